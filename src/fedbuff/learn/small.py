"""Whole trips of small networks in one call: logistic regression and perceptrons, where a step takes microseconds.

All trips of a chunk are described by a few arrays (where a client's examples lie, how many, which weights it starts
from), and one function of kernels.cpp trains them from there, shuffling included. Models are Linear layers with ReLU
between them, with cross entropy as the loss; everything else is for `batched.py`.
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F  # noqa: N812

from fedbuff.learn.client import LocalSGD
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.kernels import Sgd, usable
from fedbuff.learn.local import Job, Matrix, Train, room_for
from fedbuff.learn.shuffle import hashes
from fedbuff.learn.task import Task

_LARGEST = 1 << 16  # weights; larger layers are better off with a real matrix library


def layers_of(module: nn.Module) -> list[nn.Linear] | None:
    """The linear layers of a model that consists of these, ReLU between them, and flattening before; else None."""
    parts = [part for part in module.modules() if not isinstance(part, nn.Sequential)]
    while parts and type(parts[0]) is nn.Flatten and parts[0].start_dim == 1 and parts[0].end_dim == -1:
        parts.pop(0)
    linear, between = parts[::2], parts[1::2]
    if len(parts) % 2 == 0 or any(type(part) is not nn.ReLU for part in between):
        return None
    layers = [part for part in linear if type(part) is nn.Linear]
    chain = all(a.out_features == b.in_features for a, b in pairwise(layers))
    hooked = any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in module.modules()
    )
    whole = type(module) in (nn.Linear, nn.Sequential) and all(type(m) in _KINDS for m in module.modules())
    return layers if len(layers) == len(linear) and chain and whole and not hooked else None


_KINDS = (nn.Linear, nn.Sequential, nn.Flatten, nn.ReLU)


def small(task: Task, sgd: LocalSGD, seed: int, flat: Flat, otherwise: Train) -> Train | None:
    """A function that trains chunks of trips of this task, if it is small enough; else None.

    Chunks whose examples the kernel can't take (labels that are no class, say) go to `otherwise`.
    """
    layers = layers_of(flat.module)
    kernels = usable(flat.vector)
    expected = [p for layer in layers or () for p in (layer.weight, layer.bias) if p is not None]
    if layers is None or kernels is None or task.loss is not F.cross_entropy or len(flat.vector) > _LARGEST:
        return None
    if [id(p) for p in expected] != [id(p) for p in flat.parameters.values()]:  # some are frozen, or tied
        return None
    sizes = (ctypes.c_int64 * (len(layers) + 1))(layers[0].in_features, *(layer.out_features for layer in layers))
    bias = (ctypes.c_int64 * len(layers))(*(int(layer.bias is not None) for layer in layers))
    how = Sgd(
        sgd.lr, sgd.momentum, sgd.weight_decay, sgd.proximal, sgd.batch_size, sgd.epochs,
        -1 if sgd.steps is None else sgd.steps, sgd.lr_norm,
    )  # fmt: skip
    places = Places(task, flat, layers[0].in_features)

    def train(jobs: Sequence[Job], out: Matrix | None = None) -> Matrix:
        updates = room_for(jobs, flat) if out is None else out
        count = len(jobs)
        clients = [job.client for job in jobs]
        found = places.of(clients)
        weights = [job.weights for job in jobs]
        fits = updates.dtype == np.float32 and updates.strides[-1] == 4
        fits &= all(w.dtype == np.float32 and w.flags.c_contiguous for w in {id(w): w for w in weights}.values())
        if found is None or not fits or count == 0:
            return otherwise(jobs, updates)
        x, y, n, _kept = found
        address: dict[int, int] = {}
        starts = np.array([address.get(id(w)) or address.setdefault(id(w), w.ctypes.data) for w in weights], np.int64)
        of_trip = hashes(seed, "shuffle", clients, [job.trip for job in jobs])
        bad = kernels.train_trips(
            count, x.ctypes.data, y.ctypes.data, n.ctypes.data, starts.ctypes.data, of_trip.ctypes.data, updates.ctypes.data,
            updates.strides[0] // 4, len(layers), sizes, bias, ctypes.byref(how),
        )  # fmt: skip
        return updates if bad < 0 else otherwise(jobs, updates)

    return train


Found = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[torch.Tensor]]


class Places:
    """Where the examples of clients lie in memory: remembered if the task holds them all, else found for each chunk."""

    def __init__(self, task: Task, flat: Flat, features: int) -> None:
        self.task, self.flat, self.features = task, flat, features
        self.all = isinstance(task.clients, list | tuple)
        self.table = np.zeros((3, len(task.clients) if self.all else 0), np.int64)  # inputs, labels, how many
        self.kept: list[torch.Tensor] = []

    def of(self, clients: list[int]) -> Found | None:
        """Addresses of inputs and labels, the number of examples, and what to keep while they are used."""
        if not self.all:
            kept: list[torch.Tensor] = []
            rows = [self.find(client, kept) for client in clients]
            if any(row is None for row in rows):
                return None
            x, y, n = np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, 3).T)
            return x, y, n, kept
        n = self.table[2, clients]
        if not n.all():
            for client in clients:
                if not self.table[2, client]:
                    row = self.find(client, self.kept)
                    if row is None:
                        return None
                    self.table[:, client] = row
            n = self.table[2, clients]
        return self.table[0, clients], self.table[1, clients], n, self.kept

    def find(self, client: int, kept: list[torch.Tensor]) -> tuple[int, int, int] | None:
        x, y = self.task.clients[client]
        if not (isinstance(x, np.ndarray) and x.dtype == np.float32 and x.flags.c_contiguous):
            x = as_tensor(x, like=self.flat.vector).contiguous()
        if not (isinstance(y, np.ndarray) and y.dtype == np.int64 and y.flags.c_contiguous):
            y = as_tensor(y, like=self.flat.vector).contiguous()
        if str(x.dtype).split(".")[-1] != "float32" or str(y.dtype).split(".")[-1] != "int64" or y.ndim != 1 or len(y) == 0:
            return None
        if len(x) != len(y) or np.prod(x.shape[1:]) != self.features:
            return None
        kept += [x, y]
        return _address(x), _address(y), len(y)


def _address(array: "NDArray[np.generic] | torch.Tensor") -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data
