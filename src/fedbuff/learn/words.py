"""Local training of the paper's network for text: chunks of trips of one local step, a call for each.

As in `small.py`, trips are described by a few arrays, and one function of kernels/words.cpp takes them from the first word
to the last gradient. Everything else, trips of several local steps for example, is for `batched.py`.
"""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from fedbuff.core.versions import Vector
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.flat import Flat
from fedbuff.learn.kernels import Words, twisters_agree, usable
from fedbuff.learn.local import Matrix
from fedbuff.learn.networks import WordLSTM
from fedbuff.learn.places import Places, described
from fedbuff.learn.shuffle import beginning
from fedbuff.learn.small import as_sgd, is_cross_entropy
from fedbuff.learn.task import Task


class Parts(NamedTuple):
    """The parts of a `WordLSTM`."""

    embedding: nn.Embedding
    lstm: nn.LSTM
    first: nn.Linear
    relu: nn.ReLU
    dropout: nn.Dropout
    last: nn.Linear


def parts_of(flat: Flat) -> Parts | None:
    """The parts of a network that the kernel knows; None if it is another one, or was changed since it was made."""
    model = flat.module
    if type(model) is not WordLSTM or len(model.head) != 4:
        return None
    parts = Parts(model.embedding, model.lstm, *model.head)
    kinds = nn.Embedding, nn.LSTM, nn.Linear, nn.ReLU, nn.Dropout, nn.Linear
    if tuple(map(type, parts)) != kinds:
        return None
    lstm, p = parts.lstm, parts.dropout.p
    if (lstm.bidirectional, lstm.proj_size, lstm.batch_first, lstm.bias) != (False, 0, True, True) or lstm.hidden_size % 2:
        return None
    if not 0 <= p < 1 or (lstm.num_layers > 1 and lstm.dropout != p) or (p and not twisters_agree()):
        return None
    if parts.embedding.max_norm is not None or usable(parts.embedding.weight) is None:
        return None
    trained = [*lstm.parameters(), *model.head.parameters()]
    if len(trained) != 4 * lstm.num_layers + 4 or list(map(id, trained)) != list(map(id, flat.parameters.values())):
        return None  # some are tied or frozen, or the vectors are not
    return parts


class WholeTrips:
    """Trains chunks of trips of a `WordLSTM`."""

    def __init__(self, task: Task, sgd: LocalSGD, seed: int, flat: Flat, parts: Parts, kernels: ctypes.CDLL) -> None:
        time = np.shape(task.clients[0][0])[1]
        self._kernels = kernels
        self._vectors = parts.embedding.weight.detach().contiguous()  # kept: the kernel has its address
        net = Words(
            *self._vectors.shape, time, parts.lstm.hidden_size, parts.lstm.num_layers, parts.first.out_features,
            parts.last.out_features, self._vectors.data_ptr(), 1 - parts.dropout.p,
        )  # fmt: skip
        self._network = ctypes.pointer(net), ctypes.pointer(as_sgd(sgd))
        self._hashes = beginning(seed, "shuffle"), beginning(seed, "dropout")
        self._places = Places(task, flat, time, np.dtype(np.int64))

    def into(
        self, updates: Matrix, rows: Sequence[int], trips: Sequence[int], clients: Sequence[int], weights: Sequence[Vector]
    ) -> bool:
        """Write the updates into these rows; False if the kernel can't take one of these trips: then they may hold anything."""
        rank = {version: number for number, version in enumerate(dict.fromkeys(map(id, weights)))}
        order = sorted(range(len(clients)), key=lambda i: rank[id(weights[i])])
        found = described(
            self._places, updates, [rows[i] for i in order], [trips[i] for i in order], [clients[i] for i in order],
            [weights[i] for i in order],
        )  # fmt: skip
        if found is None:
            return False
        return bool(self._kernels.train_words(*found.arguments, *self._hashes, *self._network) < 0)


def whole_trips(task: Task, sgd: LocalSGD, seed: int, flat: Flat) -> WholeTrips | None:
    """A way to train chunks of trips of this task, if its model is one that the kernel knows; else None."""
    kernels, parts = usable(flat.vector), parts_of(flat)
    if kernels is None or parts is None or not is_cross_entropy(task.loss) or sgd.momentum or sgd.weight_decay:
        return None
    return WholeTrips(task, sgd, seed, flat, parts, kernels) if np.ndim(task.clients[0][0]) == 2 else None
