"""Which data a run is of: settings name a dataset, not the files that were there."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedbuff.learn.task import Task

_SOME = 200  # clients whose labels are looked at,
_FEW = 32  # and at the start of every run


class Data(NamedTuple):
    """A task's own name, how many examples each client holds, and a digest of these and of some clients' labels."""

    name: str
    sizes: list[int]
    digest: str


def data_of(task: Task) -> Data:
    sizes = task.sizes() or [task.examples(client) for client in range(len(task.clients))]
    return Data(task.name, sizes, _digest(task, sizes, _SOME))


def quick_digest(task: Task) -> str:
    """The same digest of less, for tasks that make up millions of clients as they are asked for."""
    few = _spread(len(task.clients), _FEW)
    return _digest(task, [len(task.clients), *(task.examples(client) for client in few)], _FEW)


def _digest(task: Task, sizes: Sequence[int], count: int) -> str:
    seen = hashlib.sha256(np.asarray(sizes, np.int64).tobytes())
    for client in _spread(len(task.clients), count):
        seen.update(np.ascontiguousarray(task.clients[client][1], np.float64).tobytes())
    return seen.hexdigest()[:12]


def _spread(clients: int, count: int) -> list[int]:
    """So many clients, from the first to the last."""
    chosen: list[int] = np.linspace(0, clients - 1, min(count, clients)).astype(int).tolist()
    return chosen
