"""Prepared arrays, kept on disk: read out of a dataset's files once, memory-mapped from then on.

Each set is a folder of .npy files under $FEDBUFF_CACHE, named by what it was made from: the source files with their sizes
and times of change, the reader's version and its arguments. It is moved into place when it is whole, checked whenever it
is opened, and made again if it is damaged or its sources were replaced. Processes that map the same file share its memory.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.compiled import cache_folder

Arrays = dict[str, NDArray[Any]]
New = Callable[[str, tuple[int, ...], Any], NDArray[Any]]  # new(name, shape, dtype): zeros on disk, to be filled

_LIST = "files.json"  # written last: every file with its size and checksum
_CTIMES = "ctimes.json"  # of the sources, which no copying tool sets back; sets of earlier versions have none
_BLOCK = 1 << 24


def prepared(name: str, sources: Sequence[Path], facts: Sequence[Any], make: Callable[[New], None]) -> Arrays:
    """The arrays that `make(new)` fills, by name and read-only; it is called only if they are not at hand.

    facts   what else the arrays depend on: the reader's version, and its arguments
    """
    stats = [path.stat() for path in sources]
    files = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in zip(sources, stats, strict=True)]
    ctimes = [stat.st_ctime_ns for stat in stats]
    key = hashlib.sha256(json.dumps([name, files, list(facts)]).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{name}-{key}"
    arrays = _opened(folder, ctimes)
    if arrays is not None:
        return arrays
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _sweep(folder.parent)
        with _alone(folder, name):
            arrays = _opened(folder, ctimes)  # another process may have made it meanwhile
            if arrays is None:
                print(f"fedbuff: preparing {name}, once, into {folder.parent} …", file=sys.stderr, flush=True)
                _make(folder, make, ctimes)
                arrays = _opened(folder, ctimes)
    except OSError as e:
        kept = f"it is kept in {folder.parent}, or where FEDBUFF_CACHE says"
        raise ValueError(f"{e.filename or folder}: can't prepare {name}: {e.strerror or e}; {kept}") from e
    if arrays is None:
        raise ValueError(f"{folder}: what was just written can't be read back; is the disk all right?")
    return arrays


def _make(folder: Path, make: Callable[[New], None], ctimes: list[int]) -> None:
    """Have it made beside its place, and moved there when it is whole; what is there now is damaged."""
    scratch = Path(tempfile.mkdtemp(".tmp", f".{folder.name}.", folder.parent))
    try:
        make(partial(_room, scratch))
        _seal(scratch, ctimes)
        try:
            scratch.rename(folder)
        except OSError:  # it is damaged; or, where there are no locks, another process was faster: its arrays are as good
            if _opened(folder, ctimes) is None:
                _remove(folder)
                with contextlib.suppress(OSError):
                    scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.unlink()  # a file, for some reason
    shutil.rmtree(folder, ignore_errors=True)


def _room(folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    path = folder / f"{name}.npy"
    array: NDArray[Any] = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
    if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and would be a crash later
        with path.open("r+b") as f:
            os.posix_fallocate(f.fileno(), 0, path.stat().st_size)
    return array


def _seal(folder: Path, ctimes: list[int]) -> None:
    """Put everything on disk, and write down what a whole set looks like."""
    (folder / _CTIMES).write_text(json.dumps(ctimes), encoding="utf-8")
    files = {}
    for path in sorted(folder.glob("*.npy")):
        with path.open("rb") as f:
            os.fsync(f.fileno())
        files[path.name] = [path.stat().st_size, _checksum(path)]
    (folder / _LIST).write_text(json.dumps(files), encoding="utf-8")


def _opened(folder: Path, ctimes: list[int]) -> Arrays | None:
    """The arrays in the folder, or None if it is not there, damaged, or made of other files than these."""
    try:
        files = json.loads((folder / _LIST).read_text(encoding="utf-8"))
        if not files or files.keys() != {path.name for path in folder.glob("*.npy")}:
            return None
        if (folder / _CTIMES).exists() and json.loads((folder / _CTIMES).read_text(encoding="utf-8")) != ctimes:
            return None
        arrays = {}
        for name, (size, checksum) in files.items():
            path = folder / name
            if path.stat().st_size != size or _checksum(path) != checksum:
                return None
            arrays[path.stem] = np.asarray(np.load(path, mmap_mode="r"))
        return arrays
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None  # nothing there, not JSON, not a list of files, not an array


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as f:
        while block := f.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


@contextlib.contextmanager
def _alone(folder: Path, name: str) -> Iterator[None]:
    """One process makes a set; others wait, and find it there. Who is killed holds no lock."""
    with _lock(folder.parent, folder.name).open("wb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"fedbuff: another process is preparing {name}: waiting for it …", file=sys.stderr, flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: it may be made twice
        yield


def _sweep(parent: Path) -> None:
    """Remove what killed processes left behind: that of sets which nobody is making. Another user's stays."""
    for left in parent.glob(".*.tmp"):
        lock = _lock(parent, left.name.split(".")[1])
        with contextlib.suppress(OSError), lock.open("r+b") if lock.exists() else contextlib.nullcontext() as held:
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)


def _lock(parent: Path, name: str) -> Path:
    return parent / f".{name}.lock"
