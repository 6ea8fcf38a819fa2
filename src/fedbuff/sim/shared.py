"""Vectors of one length in memory that forked processes share, taken and given back by row."""

import mmap
import tempfile

import numpy as np
from numpy.typing import DTypeLike, NDArray

_PAGE = mmap.PAGESIZE


class Rows:
    """A matrix in shared memory with a list of free rows. Memory is taken by rows that were used, however many there are.

    `on_disk` puts it into a file, of which the system keeps in memory what it has room for.
    """

    def __init__(self, rows: int, columns: int, dtype: DTypeLike, on_disk: bool = False) -> None:
        itemsize = np.dtype(dtype).itemsize
        row = columns * itemsize
        self._stride = -(-row // _PAGE) * _PAGE if on_disk or row > _PAGE else row
        size = max(rows * self._stride, 1)
        self.on_disk = on_disk
        if self.on_disk:
            with tempfile.TemporaryFile(
                prefix="fedbuff-"
            ) as file:  # unlinked at once: nothing is left behind, whatever happens
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        else:
            self._map = mmap.mmap(-1, size)
        whole: NDArray[np.floating] = np.frombuffer(self._map, dtype).reshape(rows, self._stride // itemsize)
        self.matrix = whole[:, :columns]
        self._free = list(range(rows - 1, -1, -1))

    def take(self) -> int:
        """A free row, the one used last if possible."""
        return self._free.pop()

    def give(self, row: int) -> None:
        self._free.append(row)
        self.rest(row)

    def rest(self, row: int) -> None:
        """Nobody here looks at `row` for a while: if it lies on disk, it need not stay in this process's memory."""
        if self.on_disk:
            self._map.madvise(mmap.MADV_DONTNEED, row * self._stride, self._stride)
