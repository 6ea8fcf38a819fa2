"""The journal: what happened, in order, in files that are only ever added to, so that a kill −9 loses nothing that was committed.

    with Journal(folder) as journal:
        journal.append({"kind": "update", "trip": 7}, update)
        journal.commit()                  # on the disk, from here on

    for facts, blob in read(folder): ...

A record is a length, a checksum, a line of JSON and bytes. A record that was being written when the power went is cut off when
the journal is opened again; a record that is damaged in the middle is an error, since what follows it depends on it. The
journal is cut into segments, so that old ones can be deleted or moved away.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from fedbuff.report.files import FolderError

Facts = dict[str, Any]
_HEAD = struct.Struct("<III")  # bytes of facts, bytes of blob, checksum of both
_SEGMENT = 256 << 20  # bytes after which `rotate` begins a new one


class Position(NamedTuple):
    """A place between two records."""

    segment: int = 0
    offset: int = 0


class Journal:
    """Open for writing, by one process; goes on after the last whole record."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # updates are in it
        self.folder = folder
        segments = _segments(folder)
        self._segment = segments[-1] if segments else 0
        path = _path(folder, self._segment)
        if path.exists():
            whole = _whole(path)
            if whole < path.stat().st_size:
                os.truncate(path, whole)
        self._file = path.open("ab")
        _sync_folder(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._file.close()

    @property
    def position(self) -> Position:
        return Position(self._segment, self._file.tell())

    def append(self, facts: Facts, blob: bytes | memoryview = b"") -> None:
        line = json.dumps(facts, separators=(",", ":")).encode()
        self._file.write(_HEAD.pack(len(line), len(blob), zlib.crc32(blob, zlib.crc32(line))))
        self._file.write(line)
        self._file.write(blob)

    def commit(self) -> None:
        """When this returns, what was appended is on the disk."""
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def rotate(self, keep: bool = True) -> None:
        """Begin a new segment if this one is large; without `keep`, delete those before it, which nobody needs to restart."""
        if self._file.tell() < _SEGMENT:
            return
        self.commit()
        self._file.close()
        if not keep:
            for old in _segments(self.folder):
                _path(self.folder, old).unlink()
        self._segment += 1
        self._file = _path(self.folder, self._segment).open("ab")
        _sync_folder(self.folder)


def read(folder: Path, since: Position = Position()) -> Iterator[tuple[Facts, bytes]]:
    """Every whole record after a position; what is cut short at the very end was never committed, and is left out."""
    segments = [segment for segment in _segments(folder) if segment >= since.segment]
    if not segments or segments[0] != since.segment:
        raise FolderError(f"{folder}: there is no segment {since.segment:08d} of the journal; was it deleted?")
    for segment in segments:
        yield from _records(_path(folder, segment), since.offset if segment == since.segment else 0, segment == segments[-1])


def _records(path: Path, offset: int, last: bool) -> Iterator[tuple[Facts, bytes]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(offset)
        while (at := file.tell()) < size:
            head = file.read(_HEAD.size)
            if len(head) == _HEAD.size:
                facts, blob, checksum = _HEAD.unpack(head)
                whole = at + _HEAD.size + facts + blob <= size
                if whole:
                    line, data = file.read(facts), file.read(blob)
                    if zlib.crc32(data, zlib.crc32(line)) == checksum:
                        yield json.loads(line), data
                        continue
                    if file.tell() < size or not last:
                        raise FolderError(f"{path}: the record at byte {at:,} is damaged; restore the file from a copy")
            if not last:
                raise FolderError(f"{path}: cut short at byte {at:,}; restore the file from a copy")
            return


def _whole(path: Path) -> int:
    """How many bytes of a segment are whole records."""
    return sum(_HEAD.size + facts + blob for facts, blob in _sizes(path))


def _sizes(path: Path) -> Iterator[tuple[int, int]]:
    size, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while at + _HEAD.size <= size:
            file.seek(at)
            facts, blob, checksum = _HEAD.unpack(file.read(_HEAD.size))
            end = at + _HEAD.size + facts + blob
            if end > size:
                return
            if end == size:  # the last one may have its length on the disk, and not its content
                line, data = file.read(facts), file.read(blob)
                if zlib.crc32(data, zlib.crc32(line)) != checksum:
                    return
            yield facts, blob
            at = end


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
