"""Prepared arrays, kept on disk: read out of a dataset's files once, memory-mapped from then on.

Each set is a folder of .npy files under $FEDBUFF_CACHE, named by what it was made from: the source files with their sizes
and times of change, the reader's version and its arguments. It is moved into place when it is whole, checked whenever it
is opened, and made again if it is damaged or its sources were replaced. Processes that map the same file share its memory.
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
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
    scratch: Path | None = None
    try:
        _sweep(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # a name of its own: threads have the same number, and so may processes of containers that share the cache
        scratch = Path(tempfile.mkdtemp(f".{os.getpid()}.tmp", f".{folder.name}.", folder.parent))
        print(f"fedbuff: preparing {name}, once, into {folder.parent} …", file=sys.stderr, flush=True)
        make(partial(_room, scratch))
        _seal(scratch, ctimes)
        with contextlib.suppress(OSError):  # another process was faster: its arrays are as good
            scratch.rename(folder)
        arrays = _opened(folder, ctimes)
    except OSError as e:
        kept = f"it is kept in {folder.parent}, or where FEDBUFF_CACHE says"
        raise ValueError(f"{e.filename or folder}: can't prepare {name}: {e.strerror or e}; {kept}") from e
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    if arrays is None:
        raise ValueError(f"{folder}: what was just written can't be read back; is the disk all right?")
    return arrays


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


def _sweep(folder: Path) -> None:
    """Remove a damaged set, and what killed processes left behind."""
    if folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    for left in folder.parent.glob(".*.tmp"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
