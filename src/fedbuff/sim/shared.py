"""Vectors of one length in memory that forked processes share, taken and given back by row."""

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike, NDArray

_PAGE = mmap.PAGESIZE
_LONG = 1 << 20  # bytes: shorter rows are left to the system, as getting back to their pages costs more than they take


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
            with tempfile.TemporaryFile(prefix="fedbuff-") as file:  # without a name: nothing is left behind, whatever happens
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
                self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
        else:
            self._map = mmap.mmap(-1, size)
        whole: NDArray[np.floating] = np.frombuffer(self._map, dtype).reshape(rows, self._stride // itemsize)
        self.matrix = whole[:, :columns]
        self._free = list(range(rows - 1, -1, -1))

    def take(self, count: int) -> list[int]:
        """Free rows, those that were used last if possible."""
        if count > len(self._free):
            raise MemoryError(f"no room for {count} vectors: {len(self._free)} of {len(self.matrix)} rows are free")
        taken = self._free[-1 : -count - 1 : -1]
        del self._free[len(self._free) - count :]
        return taken

    def give(self, rows: list[int]) -> None:
        self._free += rows
        self.rest(rows)

    def write(self, row: int, values: NDArray[np.floating]) -> None:
        """Fill a row. Writing to a file costs a tenth of touching its mapped pages for the first time."""
        if not self.on_disk:
            self.matrix[row] = values
            return
        if values.shape != self.matrix.shape[1:]:
            raise ValueError(f"a row is {self.matrix.shape[1]} numbers, not of shape {values.shape}")
        left, at = np.ascontiguousarray(values, self.matrix.dtype).data.cast("B"), row * self._stride
        try:
            while left:
                done = os.pwrite(self._file, left, at)
                left, at = left[done:], at + done
        except OSError as e:
            raise ValueError(
                f"{tempfile.gettempdir()}: can't keep versions there ({e.strerror}); set TMPDIR to a larger disk"
            ) from e

    def rest(self, rows: Iterable[int]) -> None:
        """Nobody here looks at `rows` for a while: long ones on disk need not stay in this process's memory."""
        if self.on_disk and self._stride >= _LONG:
            for row in rows:
                self._map.madvise(mmap.MADV_DONTNEED, row * self._stride, self._stride)
