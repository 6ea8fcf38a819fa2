"""Files that are there whole or not at all."""

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

_MEGABYTE = 1 << 20
_LEFT_OVER = re.compile(r"\.(space|[a-z]+\.(toml|jsonl|json|parquet|safetensors))\.\d+\.tmp")  # by a process that was killed


class FolderError(Exception):
    """A run folder that can't be used; the message says what to do."""


class InUseError(FolderError):
    """A folder that another process is at work in."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one move; a pipe is written to."""
    target = Path(os.path.realpath(path))  # a link stays one
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if path.exists() and not path.is_file():  # nothing may take its place
            write(path)
            return
        write(temporary)
        with temporary.open("rb") as f:
            os.fsync(f.fileno())
        temporary.replace(target)
    except OSError as e:
        raise FolderError(f"can't write {path}: {e.strerror or e}; what was there before is still whole") from e
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda p: p.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def lock(folder: Path) -> IO[bytes]:
    """Keep other processes out of `folder` for as long as the returned file is open, and sweep up after killed ones."""
    held = (folder / ".lock").open("wb")
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        held.close()
        raise InUseError(f"{folder} is in use by another process") from e
    _locks.add(held)
    for left in (*folder.iterdir(), *(folder / "checkpoint").glob("*")):
        if _LEFT_OVER.fullmatch(left.name):
            left.unlink(missing_ok=True)
    return held


_locks: WeakSet[IO[bytes]] = WeakSet()
# a forked worker that outlives its killed parent for a moment must not keep the folder locked
os.register_at_fork(after_in_child=lambda: [held.close() for held in _locks])


def make_writable_folder(folder: Path, needed: int) -> None:
    """Create `folder` and prove that `needed` bytes fit into it, before any work is done."""
    probe = folder / f".space.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with probe.open("wb") as f:
            for written in range(0, needed, _MEGABYTE):
                f.write(bytes(min(_MEGABYTE, needed - written)))  # some file systems promise space they don't have
            f.flush()
            os.fsync(f.fileno())
    except OSError as e:
        raise FolderError(
            f"can't write a run ({needed / 1e6:.1f} MB) to {folder}: {e.strerror or e}; choose another --out"
        ) from e
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
