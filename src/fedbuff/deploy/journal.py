"""The journal: what happened, in order, in files that are only ever added to: a kill −9 loses nothing that was committed.

    with Journal(folder) as journal:
        journal.append({"kind": "update", "trip": 7}, update)
        journal.commit()                  # on the disk, from here on

    for facts, blob in read(folder): ...

A record is a head, a line of JSON and bytes. A record that was being written when the power went is cut off when the journal
is opened again; a record that is damaged in the middle is an error, since what follows it depends on it. The journal is cut
into segments, so that old ones can be deleted or moved away.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from fedbuff.report.files import FolderError

Facts = dict[str, Any]
FORMAT = 1  # of what a run writes into it
_HEAD = struct.Struct("<IIII")  # bytes of facts, bytes of blob, checksum of both, checksum of these three numbers
_SEGMENT = 256 << 20  # bytes after which `rotate` begins a new one


class Position(NamedTuple):
    """A place between two records."""

    segment: int = 0
    offset: int = 0


class Journal:
    """Open for writing, by one process; goes on after the last whole record."""

    def __init__(self, folder: Path, since: Position = Position()) -> None:
        """Open it, if it reaches as far as `since`, up to which somebody relies on it; else nothing is changed."""
        segments = _following(folder, since) if since != Position() else _segments(folder)
        self.folder = folder
        self._segment = segments[-1] if segments else 0
        path = _path(folder, self._segment)
        whole = _whole(path) if path.exists() else 0
        if since.segment == self._segment and whole < since.offset:
            raise _short(path)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # updates are in it
        if path.exists() and whole < path.stat().st_size:
            os.truncate(path, whole)
        self._file = path.open("ab")
        _sync_folder(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def position(self) -> Position:
        return Position(self._segment, self._file.tell())

    def append(self, facts: Facts, blob: bytes | memoryview = b"") -> None:
        line = json.dumps(facts, separators=(",", ":")).encode()
        sizes = struct.pack("<III", len(line), memoryview(blob).nbytes, zlib.crc32(blob, zlib.crc32(line)))
        self._file.write(sizes + struct.pack("<I", zlib.crc32(sizes)))
        self._file.write(line)
        self._file.write(blob)

    def commit(self) -> None:
        """When this returns, what was appended is on the disk."""
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def rotate(self, always: bool = False) -> None:
        """Begin a new segment if this one is large, or not empty and that is wanted."""
        if self._file.tell() < (1 if always else _SEGMENT):
            return
        self.commit()
        self._file.close()
        self._segment += 1
        self._file = _path(self.folder, self._segment).open("ab")
        _sync_folder(self.folder)

    def drop(self) -> None:
        """Delete the segments before this one: when a checkpoint says that nobody needs them any more."""
        for old in _segments(self.folder):
            if old < self._segment:
                _path(self.folder, old).unlink()


def read(folder: Path, since: Position = Position()) -> Iterator[tuple[Facts, bytes]]:
    """Every whole record after a position; what is cut short at the very end was never committed, and is left out."""
    segments = _following(folder, since)
    for segment in segments:
        yield from _records(_path(folder, segment), since.offset if segment == since.segment else 0, segment == segments[-1])


def _records(path: Path, offset: int, last: bool) -> Iterator[tuple[Facts, bytes]]:
    with path.open("rb") as file:
        for at, facts, blob, checksum in _places(path, offset, last):
            file.seek(at + _HEAD.size)
            line, data = file.read(facts), file.read(blob)
            if zlib.crc32(data, zlib.crc32(line)) != checksum:
                raise _damaged(path, at)
            yield json.loads(line), data


def _whole(path: Path) -> int:
    """How many bytes of the last segment are whole records."""
    return sum(_HEAD.size + facts + blob for _, facts, blob, _ in _places(path, 0, last=True))


def _places(path: Path, at: int, last: bool) -> Iterator[tuple[int, int, int, int]]:
    """Where records begin, their sizes and checksums; without what was being written when everything stopped."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            head = file.read(_HEAD.size)
            facts, blob, content, checksum = _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))
            end = at + _HEAD.size + facts + blob
            if zlib.crc32(head[:12]) != checksum:
                torn = len((head + file.read()).rstrip(b"\0")) < _HEAD.size  # a file may end in zeros when the power went
            elif end < size or (end == size and zlib.crc32(file.read()) == content):
                yield at, facts, blob, content
                at = end
                continue
            else:
                torn = True  # its lengths are on the disk, and not all of its content
            if torn and last:
                return
            raise _damaged(path, at)


def _following(folder: Path, since: Position) -> list[int]:
    """The segments from a position on, all of them."""
    segments = [segment for segment in _segments(folder) if segment >= since.segment]
    missing = next(segment for segment in count(since.segment) if segment not in segments)
    if missing <= max(segments, default=missing):
        raise FolderError(f"{folder}: there is no segment {missing:08d} of the journal; was it deleted? Restore it from a copy")
    if _path(folder, since.segment).stat().st_size < since.offset:
        raise _short(_path(folder, since.segment))
    return segments


def _short(path: Path) -> FolderError:
    return FolderError(f"{path}: shorter than it was; restore the file from a copy")


def _damaged(path: Path, at: int) -> FolderError:
    return FolderError(f"{path}: the record at byte {at:,} is damaged; restore the file from a copy")


def _segments(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*.journal") if path.stem.isdecimal())


def _path(folder: Path, segment: int) -> Path:
    return folder / f"{segment:08d}.journal"


def _sync_folder(folder: Path) -> None:
    """A new file's name is on the disk only when its folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
