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
from fedbuff.learn.losses import is_plain_cross_entropy
from fedbuff.learn.networks import WordLSTM
from fedbuff.learn.places import Places, described
from fedbuff.learn.shuffle import beginning
from fedbuff.learn.small import as_sgd, countable
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
    if type(model) is not WordLSTM or type(model.head) is not nn.Sequential or len(model.head) != 4:
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
    # in the order in which the kernel has them: some may be tied or frozen, the vectors not, or all lie in another order
    kinds_of = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    trained = [getattr(lstm, f"{kind}_l{layer}") for layer in range(lstm.num_layers) for kind in kinds_of]
    trained += [p for part in (parts.first, parts.last) for p in (part.weight, part.bias)]
    if list(map(id, trained)) != list(map(id, flat.parameters.values())):
        return None
    return parts


class WholeTrips:
    """Trains chunks of trips of a `WordLSTM`."""

    def __init__(self, task: Task, sgd: LocalSGD, seed: int, flat: Flat, parts: Parts, kernels: ctypes.CDLL, low: bool) -> None:
        time = np.shape(task.clients[0][0])[1]
        self._kernels = kernels
        # who has more examples than a step takes is known before they are looked up, if the task can tell
        self._known = task.examples if sgd.steps is None and hasattr(task.clients, "examples") else None
        self._most = sgd.batch_size
        self._vectors = parts.embedding.weight.detach().contiguous()  # kept: the kernel has its address
        net = Words(
            *self._vectors.shape, time, parts.lstm.hidden_size, parts.lstm.num_layers, parts.first.out_features,
            parts.last.out_features, self._vectors.data_ptr(), 1 - parts.dropout.p,
        )  # fmt: skip
        self._network = ctypes.pointer(net), ctypes.pointer(as_sgd(sgd)), int(low)
        self._hashes = beginning(seed, "shuffle"), beginning(seed, "dropout")
        self._places = Places(task, flat, time, np.dtype(np.int64), in_a_row=True)

    def into(
        self, updates: Matrix, rows: Sequence[int], trips: Sequence[int], clients: Sequence[int], weights: Sequence[Vector]
    ) -> bool:
        """Write the updates into these rows; False if the kernel can't take one of these trips: then they may hold anything."""
        if self._known is not None and any(self._known(client) > self._most for client in clients):
            return False
        rank = {version: number for number, version in enumerate(dict.fromkeys(map(id, weights)))}
        order = sorted(range(len(clients)), key=lambda i: rank[id(weights[i])])
        found = described(
            self._places, updates, [rows[i] for i in order], [trips[i] for i in order], [clients[i] for i in order],
            [weights[i] for i in order],
        )  # fmt: skip
        if found is None:
            return False
        return bool(self._kernels.train_words(*found.arguments, *self._hashes, *self._network) < 0)


def whole_trips(task: Task, sgd: LocalSGD, seed: int, flat: Flat, low: bool = False) -> WholeTrips | None:
    """A way to train chunks of trips of this task, if its model is one that the kernel knows; else None.

    With `low`, products are of bfloat16.
    """
    kernels, parts = usable(flat.vector), parts_of(flat)
    one_step = sgd.steps == 1 or (sgd.steps is None and sgd.epochs == 1)
    if kernels is None or parts is None or not one_step or sgd.weight_decay or not countable(sgd):
        return None
    shape = np.shape(task.clients[0][0])
    if not is_plain_cross_entropy(task.loss) or len(shape) != 2 or shape[1] == 0:
        return None
    return WholeTrips(task, sgd, seed, flat, parts, kernels, low)
