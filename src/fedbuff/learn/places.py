"""Where the examples of clients lie in memory, for kernels that train whole trips."""

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedbuff.core.versions import Vector
from fedbuff.learn.flat import Flat, as_tensor, cast
from fedbuff.learn.local import Matrix
from fedbuff.learn.task import Task

Found = tuple[NDArray[np.int64], Sequence[int], list[Any]]


class Places:
    """Addresses of inputs and labels: remembered if the task holds all clients, else found for each chunk.

    An example's input is `features` numbers of `kind`, in a row if `in_a_row`, else of any shape; its label is a class. What
    is of another kind is kept as a copy.
    """

    def __init__(self, task: Task, flat: Flat, features: int, kind: "np.dtype[Any]", in_a_row: bool) -> None:
        self.task, self.flat, self.features, self.kind, self.in_a_row = task, flat, features, kind, in_a_row
        self.all = isinstance(task.clients, list | tuple)
        self.table = np.zeros((len(task.clients) if self.all else 0, 3), np.int64)  # inputs, labels, how many
        self.missing = len(self.table)
        self.kept: list[Any] = []

    def of(self, clients: Sequence[int]) -> Found | None:
        """A table of addresses of inputs and labels and numbers of examples, a row of it for each of these clients, and what
        to keep while it is used.
        """
        if not self.all:
            kept: list[Any] = []
            rows = [self.find(client, kept) for client in clients]
            if any(row is None for row in rows):
                return None
            return np.array(rows, np.int64).reshape(-1, 3), range(len(rows)), kept
        if self.missing:
            for client in clients:
                if not self.table[client, 2]:
                    row = self.find(client, self.kept)
                    if row is None:
                        return None
                    self.table[client] = row
                    self.missing -= 1
        return self.table, clients, self.kept

    def find(self, client: int, kept: list[Any]) -> tuple[int, int, int] | None:
        x, y = (np.asarray(part) if isinstance(part, np.memmap) else part for part in self.task.clients[client])
        if not (type(x) is np.ndarray and x.dtype == self.kind and x.flags.c_contiguous):
            x = self.readable(x)
        if not (type(y) is np.ndarray and y.dtype == np.int64 and y.flags.c_contiguous):
            y = self.readable(y)
        n = len(y)
        if x.dtype != self.kind or y.dtype != np.int64 or y.ndim != 1 or n == 0 or len(x) != n:
            return None
        if x.size != n * self.features or (self.in_a_row and x.ndim != 2):
            return None
        kept += [x, y]
        return x.__array_interface__["data"][0], y.__array_interface__["data"][0], n

    def readable(self, values: Any) -> NDArray[Any]:
        """The values as the kernel reads them."""
        like = self.flat.vector  # which tensors mostly are: these are read where they lie
        tensor = cast(values.detach(), like) if isinstance(values, Tensor) else as_tensor(values, like)
        found: NDArray[Any] = tensor.contiguous().numpy()
        return found


class Described(NamedTuple):
    """Some trips as a kernel takes them, and what must live while it works."""

    arguments: tuple[int, ...]
    kept: list[Any]


def described(
    places: Places,
    updates: Matrix,
    rows: Sequence[int],
    trips: Sequence[int],
    clients: Sequence[int],
    weights: Sequence[Vector],
) -> Described | None:
    """Their number, examples, clients, names, weights and updates, most of it by address; None if it is not for a kernel."""
    size = len(places.flat.vector)
    if updates.dtype != np.float32 or updates.strides[1] != 4 or updates.strides[0] % 4 or not clients:
        return None
    distinct = {id(w): w for w in weights}
    if updates.shape[1] != size or any(w.shape != (size,) for w in distinct.values()):
        raise ValueError(f"weights and updates are vectors of {size:,} numbers, not of {updates.shape[1]:,}")
    if any(w.dtype != np.float32 or not w.flags.c_contiguous for w in distinct.values()):
        return None
    found = places.of(clients)
    if found is None:
        return None
    table, where, kept = found
    address = {number: w.__array_interface__["data"][0] for number, w in distinct.items()}
    columns = [array("q", column) for column in (where, clients, trips, [address[id(w)] for w in weights], rows)]
    addresses = (column.buffer_info()[0] for column in columns)
    return Described(
        (len(clients), table.ctypes.data, *addresses, updates.ctypes.data, updates.strides[0] // 4), [table, columns, kept]
    )
