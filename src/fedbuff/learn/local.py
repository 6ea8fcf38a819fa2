"""Local training, one trip at a time: the slow obvious loop, Algorithm 2 of the paper.

It stays as the oracle that every faster way of training must agree with.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fedbuff.core.random import generator, seed_for
from fedbuff.core.versions import Vector
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.task import Task


class Job(NamedTuple):
    """A trip to train: the client, and the weights it starts from."""

    trip: int
    client: int
    weights: Vector


Train = Callable[[Sequence[Job]], list[Vector]]


def initial_weights(task: Task, seed: int) -> tuple[Flat, Vector]:
    """The model with its initial weights, drawn from the seed and leaving torch's own generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_for(seed, "model"))
        flat = Flat(task.model())
    return flat, flat.weights()


def one_at_a_time(task: Task, sgd: LocalSGD, seed: int, flat: Flat) -> Train:
    """A function that trains trips one after another in `flat`; each depends on (seed, client, trip) only."""

    def train(jobs: Sequence[Job]) -> list[Vector]:
        with torch.random.fork_rng(devices=[]):
            return [train_one(task, sgd, seed, flat, job) for job in jobs]

    return train


def train_one(task: Task, sgd: LocalSGD, seed: int, flat: Flat, job: Job) -> Vector:
    """One trip; the update Δ = y_0 − y_Q. Uses torch's default generator, for dropout."""
    rng = generator(seed, "training", job.client, job.trip)
    torch.default_generator.manual_seed(int(rng.integers(1 << 63)))
    x, y = (as_tensor(part, like=flat.vector) for part in task.clients[job.client])
    flat.module.train()
    flat.load(job.weights)  # y_0 ← w
    weights, gradient = flat.vector, flat.gradient
    start, velocity = weights.clone(), torch.zeros_like(weights)
    for batch in batches(len(y), sgd, rng):
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


def batches(n: int, sgd: LocalSGD, rng: np.random.Generator) -> Iterator[torch.Tensor]:
    """Indices of each local step's examples: `epochs` shuffled passes, or as many as `steps` takes."""
    if n == 0:
        raise ValueError("a client without examples can't train")
    epoch, step = 0, 0
    while epoch < sgd.epochs if sgd.steps is None else step < sgd.steps:
        order = torch.from_numpy(rng.permutation(n))
        for batch in torch.split(order, sgd.batch_size):
            if sgd.steps is not None and step == sgd.steps:
                return
            yield batch
            step += 1
        epoch += 1
