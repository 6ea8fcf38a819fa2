"""Vectors of one length in memory that processes of one machine share, taken and given back by row."""

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

_PAGE = mmap.PAGESIZE
_LINE = 64  # bytes of a cache line
_LONG = 1 << 20  # bytes: shorter rows are left to the system, as getting back to their pages costs more than they take
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux: differs from machine to machine, and from start to start


class Rows:
    """A matrix in shared memory with a list of free rows. Memory is taken by rows that were used, however many there are.

    `on_disk` puts it into a file, of which the system keeps in memory what it has room for; `file` is one that others made.
    """

    def __init__(self, rows: int, columns: int, dtype: DTypeLike, on_disk: bool = False, file: int | None = None) -> None:
        itemsize = np.dtype(dtype).itemsize
        row = columns * itemsize
        # in memory an odd number of lines: whole pages apart, rows that are added up crowd into the same few sets of a cache
        self._stride = -(-row // _PAGE) * _PAGE if on_disk else (-(-row // _LINE) | 1) * _LINE
        size = max(rows * self._stride, 1)
        self.on_disk = on_disk
        self._file = _new_file(size, on_disk) if file is None else file
        if self._file is not None:
            weakref.finalize(self, os.close, self._file)
        self._map = mmap.mmap(-1 if self._file is None else self._file, size)
        whole: NDArray[np.floating] = np.frombuffer(self._map, dtype).reshape(rows, self._stride // itemsize)
        self.matrix = whole[:, :columns]
        self._free = list(range(rows - 1, -1, -1))
        self._reserved = 0  # rows that the disk has room for

    def take(self, count: int) -> list[int]:
        """Free rows, those that were used last if possible."""
        if count > len(self._free):
            raise MemoryError(f"no room for {count} vectors: {len(self._free)} of {len(self.matrix)} rows are free")
        taken = self._free[-1 : -count - 1 : -1]
        if self.on_disk:
            self._reserve(max(taken, default=-1) + 1)
        del self._free[len(self._free) - count :]
        return taken

    def _reserve(self, rows: int) -> None:
        """A full disk is an error here, and would be the death of whoever writes to the mapped file."""
        if rows > self._reserved and hasattr(os, "posix_fallocate"):
            assert self._file is not None
            with self._on_a_full_disk():
                os.posix_fallocate(self._file, self._reserved * self._stride, (rows - self._reserved) * self._stride)
            self._reserved = rows

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
        assert self._file is not None
        left, at = np.ascontiguousarray(values, self.matrix.dtype).data.cast("B"), row * self._stride
        with self._on_a_full_disk():
            while left:
                done = os.pwrite(self._file, left, at)
                left, at = left[done:], at + done

    @contextlib.contextmanager
    def _on_a_full_disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise ValueError(
                f"{tempfile.gettempdir()}: can't keep vectors of {self._stride:,} bytes there ({e.strerror}); "
                "set TMPDIR to a larger disk"
            ) from e

    def place(self) -> "Place | None":
        """Where another process of this machine finds them; None where it can't."""
        if self._file is None or not _BOOT.is_file():
            return None
        (rows, columns), dtype = self.matrix.shape, self.matrix.dtype.str
        return Place(f"/proc/{os.getpid()}/fd/{self._file}", _identity(self._file), rows, columns, dtype, self.on_disk)

    def rest(self, rows: Iterable[int]) -> None:
        """Nobody here looks at `rows` for a while: long ones on disk need not stay in this process's memory."""
        if self.on_disk and self._stride >= _LONG:
            for row in rows:
                self._map.madvise(mmap.MADV_DONTNEED, row * self._stride, self._stride)


class Place(NamedTuple):
    """Where Rows are: their file as seen from other processes, and what is in it."""

    path: str
    identity: str  # the path may mean another file in another container, or on another machine
    rows: int
    columns: int
    dtype: str
    on_disk: bool


def found(place: Place) -> Rows | None:
    """The Rows of another process, which says what row is whose; None if they can't be seen from here."""
    try:
        file = os.open(place.path, os.O_RDWR)
        if _identity(file) == place.identity:
            return Rows(place.rows, place.columns, place.dtype, place.on_disk, file)
        os.close(file)
    except OSError:
        pass
    return None


def _new_file(size: int, on_disk: bool) -> int | None:
    """On disk or in memory, without a name, so that nothing is left behind, whatever happens; None if the system has none."""
    if on_disk:
        with tempfile.TemporaryFile(prefix="fedbuff-") as temporary:
            temporary.truncate(size)
            return os.dup(temporary.fileno())
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("fedbuff")
    os.truncate(file, size)
    return file


def _identity(file: int) -> str:
    """What tells a file from all others, since this machine was started."""
    about = os.fstat(file)
    return f"{_BOOT.read_text(encoding='ascii').strip()} {about.st_dev} {about.st_ino}"
