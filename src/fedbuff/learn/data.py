"""Which data a run is of: settings name a dataset, not the files that were there."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.task import Task

# a digest is of so many clients, the quick one at the start of every run of fewer, and of so many inputs of a client or split
_CLIENTS, _CLIENTS_AT_START, _INPUTS = 200, 32, 64
Constants = Mapping[str, NDArray[Any]]


class Data(NamedTuple):
    """A task's own name, how many examples each client holds, and a digest of these, of some clients' examples and of what a
    model holds besides weights, such as word vectors.

    held_out   a digest of what it is evaluated on
    labels     the same as `digest` of sizes and labels only, as the earliest cells of `fedbuff paper` have it
    """

    name: str
    sizes: list[int]
    digest: str
    held_out: str = ""
    labels: str = ""

    def digests(self) -> dict[str, str]:
        return {"digest": self.digest, "held_out": self.held_out}


def data_of(task: Task) -> Data:
    from fedbuff.learn.local import initial_weights  # not before: it needs torch

    sizes = task.sizes() or [task.examples(client) for client in range(len(task.clients))]
    some = _spread(len(task.clients), _CLIENTS)
    constants = initial_weights(task, 0)[0].constants()
    return Data(task.name, sizes, _digest(task, sizes, some, constants), _held_out(task), _labels(task, sizes, some))


def quick_digests(task: Task, constants: Constants) -> dict[str, str]:
    """The digests of fewer clients, for tasks that make up millions of them as they are asked for."""
    few = _spread(len(task.clients), _CLIENTS_AT_START)
    sizes = [len(task.clients), *(task.examples(client) for client in few)]
    return {"digest": _digest(task, sizes, few, constants), "held_out": _held_out(task)}


def _labels(task: Task, sizes: Sequence[int], clients: Sequence[int]) -> str:
    seen = hashlib.sha256(np.asarray(sizes, np.int64).tobytes())
    for client in clients:
        seen.update(np.ascontiguousarray(_array(task.clients[client][1]), np.float64).tobytes())
    return seen.hexdigest()[:12]


def _digest(task: Task, sizes: Sequence[int], clients: Sequence[int], constants: Constants) -> str:
    seen = hashlib.sha256(_labels(task, sizes, clients).encode())
    for client in clients:
        seen.update(_same(*(task.clients[client][0][:_INPUTS] for _ in range(2))))
    for name in sorted(constants):
        seen.update(name.encode() + _bytes(constants[name]))
    return seen.hexdigest()[:12]


def _held_out(task: Task) -> str:
    """A digest of all labels and some inputs of every split."""
    seen = hashlib.sha256()
    for split, (inputs, labels) in task.splits.items():
        seen.update(f"{split} {len(labels)}".encode() + _bytes(labels[:]))
        for row in _spread(len(labels), _INPUTS):
            seen.update(_same(*(inputs[row : row + 1] for _ in range(2))))
    return seen.hexdigest()[:12]


def _same(once: Any, again: Any) -> bytes:
    """What was found, or nothing if it is another thing every time, augmented at random perhaps."""
    found = _bytes(once)
    return found if found == _bytes(again) else b""


def _bytes(values: Any) -> bytes:
    array = np.ascontiguousarray(_array(values))
    return b"" if array.dtype.hasobject else f"{array.dtype} {array.shape}".encode() + array.tobytes()


def _array(values: Any) -> Any:
    if not hasattr(values, "detach"):
        return values
    from fedbuff.learn.flat import as_array  # a tensor: torch is there already

    return as_array(values)


def _spread(of: int, count: int) -> list[int]:
    """So many of them, from the first to the last."""
    chosen: list[int] = np.linspace(0, of - 1, min(count, of)).astype(int).tolist()
    return chosen
