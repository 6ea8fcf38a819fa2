"""Whole trips of small networks in one call: logistic regression and perceptrons, where a step takes microseconds.

All trips of a chunk are described by a few arrays (where a client's examples lie, how many, which weights it starts
from), and one function of kernels/small.cpp trains them from there, shuffling included. Models are Linear layers with ReLU
between them, with cross entropy as the loss; everything else is for `batched.py`.
"""

import ctypes
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from torch import nn

from fedbuff.core.versions import Vector
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.flat import Flat
from fedbuff.learn.kernels import Sgd, usable
from fedbuff.learn.local import Job, Matrix, Train, room_for
from fedbuff.learn.losses import is_plain_cross_entropy
from fedbuff.learn.places import Places, described
from fedbuff.learn.shuffle import beginning
from fedbuff.learn.task import Task

_LARGEST = 1 << 16  # weights; larger layers are better off with a real matrix library
_MOST = 1 << 30  # examples in a batch, epochs, or steps


def layers_of(module: nn.Module) -> list[nn.Linear] | None:
    """The linear layers of a model that consists of these, ReLU between them, and flattening before; else None."""
    every = [part for _, part in module.named_modules(remove_duplicate=False)]  # one that stands in two places works twice
    parts = [part for part in every if not isinstance(part, nn.Sequential)]
    while parts and type(parts[0]) is nn.Flatten and parts[0].start_dim == 1 and parts[0].end_dim == -1:
        parts.pop(0)
    linear, between = parts[::2], parts[1::2]
    if len(parts) % 2 == 0 or any(type(part) is not nn.ReLU for part in between):
        return None
    layers = [part for part in linear if type(part) is nn.Linear]
    own = len({id(p) for layer in layers for p in layer.parameters()}) == sum(len(list(layer.parameters())) for layer in layers)
    chain = all(a.out_features == b.in_features for a, b in pairwise(layers))
    whole = type(module) in (nn.Linear, nn.Sequential) and all(type(m) in _KINDS for m in module.modules())
    return layers if len(layers) == len(linear) and chain and own and whole else None


_KINDS = (nn.Linear, nn.Sequential, nn.Flatten, nn.ReLU)


def countable(sgd: LocalSGD) -> bool:
    """Whether kernels can count with its numbers: sys.maxsize as a batch size, say, plus a few is none of theirs."""
    return max(sgd.batch_size, sgd.epochs, sgd.steps or 0) <= _MOST


def as_sgd(sgd: LocalSGD) -> Sgd:
    """Local training as kernels are told of it."""
    return Sgd(
        sgd.lr, sgd.momentum, sgd.weight_decay, sgd.proximal, sgd.batch_size, sgd.epochs,
        -1 if sgd.steps is None else sgd.steps, sgd.lr_norm,
    )  # fmt: skip


class Small:
    """Trains chunks of trips of a small network.

    It is called like every other way to train, `(jobs, out=None) -> updates`; `into` spares the copy. Chunks whose
    examples the kernel can't take (labels that are no class, say) go to `otherwise`.
    """

    def __init__(
        self, task: Task, sgd: LocalSGD, seed: int, flat: Flat, layers: list[nn.Linear], kernels: ctypes.CDLL, otherwise: Train
    ) -> None:
        self._flat, self._otherwise, self._kernels = flat, otherwise, kernels
        sizes = (ctypes.c_int64 * (len(layers) + 1))(layers[0].in_features, *(layer.out_features for layer in layers))
        bias = (ctypes.c_int64 * len(layers))(*(int(layer.bias is not None) for layer in layers))
        self._network = len(layers), sizes, bias, ctypes.pointer(as_sgd(sgd))
        self._hash = beginning(seed, "shuffle")
        self._places = Places(task, flat, layers[0].in_features, np.dtype(np.float32), in_a_row=False)

    def __call__(self, jobs: Sequence[Job], out: Matrix | None = None) -> Matrix:
        updates = room_for(jobs, self._flat) if out is None else out
        trips, clients, weights = [job.trip for job in jobs], [job.client for job in jobs], [job.weights for job in jobs]
        taken = self.into(updates, range(len(jobs)), trips, clients, weights)
        return updates if taken else self._otherwise(jobs, updates)

    def into(
        self, updates: Matrix, rows: Sequence[int], trips: Sequence[int], clients: Sequence[int], weights: Sequence[Vector]
    ) -> bool:
        """Write the updates into these rows; False if the kernel can't take one of these trips: then they may hold anything."""
        found = described(self._places, updates, rows, trips, clients, weights)
        return found is not None and bool(self._kernels.train_trips(*found.arguments, self._hash, *self._network) < 0)


def small(task: Task, sgd: LocalSGD, seed: int, flat: Flat, otherwise: Callable[[], Train]) -> Small | None:
    """A way to train chunks of trips of this task, if it is small enough; else None. `otherwise` makes another way."""
    layers = layers_of(flat.module)
    kernels = usable(flat.vector)
    expected = [p for layer in layers or () for p in (layer.weight, layer.bias) if p is not None]
    if layers is None or kernels is None or not is_plain_cross_entropy(task.loss) or len(flat.vector) > _LARGEST:
        return None
    if not countable(sgd):
        return None
    if [id(p) for p in expected] != [id(p) for p in flat.parameters.values()]:  # some are frozen, or tied
        return None
    return Small(task, sgd, seed, flat, layers, kernels, otherwise())
