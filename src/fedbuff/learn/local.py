"""Local training, one trip at a time: the slow obvious loop, Algorithm 2 of the paper.

It stays as the oracle that every faster way of training must agree with.
"""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedbuff.core.random import seed_for
from fedbuff.core.versions import Vector
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.generator import default_generator
from fedbuff.learn.shuffle import batches, dropout_seeds
from fedbuff.learn.task import Task

Matrix = NDArray[np.floating]


class Job(NamedTuple):
    """A trip to train: the client, and the weights it starts from; trips of one version share the same array."""

    trip: int
    client: int
    weights: Vector


# train(jobs, out=None): the updates Δ = y_0 − y_Q as a matrix, row i for jobs[i], written into `out` if given
Train = Callable[..., Matrix]


def initial_weights(task: Task, seed: int) -> tuple[Flat, Vector]:
    """The model with its initial weights, drawn from the seed and leaving torch's own generator as it was."""
    if isinstance(task.model, torch.nn.Module):
        raise ValueError("model: give the function that makes it, e.g. lambda: nn.Linear(8, 3), instead of a model")
    with default_generator() as generator:
        generator.manual_seed(seed_for(seed, "model"))
        flat = Flat(_fresh(task))
    return flat, flat.weights()


def _fresh(task: Task) -> torch.nn.Module:
    """The task's model; of one that the function gives every time, which is the user's own and not for us to train, a copy."""
    module = task.model()
    return copy.deepcopy(module) if task.model() is module else module


def one_at_a_time(task: Task, sgd: LocalSGD, seed: int, flat: Flat) -> Train:
    """A function that trains trips one after another in `flat`; each depends on (seed, client, trip) only."""

    def train(jobs: Sequence[Job], out: Matrix | None = None) -> Matrix:
        updates = room_for(jobs, flat) if out is None else out
        with default_generator():
            for i, job in enumerate(jobs):
                updates[i] = train_one(task, sgd, seed, flat, job)
        return updates

    return train


def room_for(jobs: Sequence[Job], flat: Flat) -> Matrix:
    """An uninitialised matrix for the updates of these jobs."""
    return torch.empty(len(jobs), len(flat.vector), dtype=flat.vector.dtype).numpy()


def train_one(task: Task, sgd: LocalSGD, seed: int, flat: Flat, job: Job) -> Vector:
    """One trip; the update Δ = y_0 − y_Q. Uses torch's default generator, for dropout."""
    torch.default_generator.manual_seed(dropout_seeds(seed, [job.client], [job.trip])[0])
    x, y = (as_tensor(part, like=flat.vector) for part in task.clients[job.client])
    flat.module.train()
    flat.load(job.weights)  # y_0 ← w
    weights, gradient = flat.vector, flat.gradient
    start, velocity = weights.clone(), torch.zeros_like(weights)
    for indices in batches(seed, job.client, job.trip, len(y), sgd):
        batch = torch.from_numpy(indices)
        gradient.zero_()
        task.loss(flat.module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        if sgd.weight_decay:
            gradient.add_(weights, alpha=sgd.weight_decay)
        if sgd.proximal:
            gradient.add_(weights - start, alpha=sgd.proximal)
        direction = velocity.mul_(sgd.momentum).add_(gradient) if sgd.momentum else gradient
        lr = sgd.lr * len(batch) / sgd.batch_size if sgd.lr_norm else sgd.lr
        weights.sub_(direction, alpha=lr)  # y_q ← y_{q−1} − η_l g_q(y_{q−1})
    return start.sub_(weights).numpy()
