"""The run folder: settings.toml, metrics.jsonl, checkpoint/, trips.parquet, weights.safetensors, and summary.json last.

Whoever finds a summary.json finds a finished run. docs/run-folder.md describes every file.
"""

import contextlib
import json
import os
import secrets
import tomllib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff import toml
from fedbuff.report.files import FolderError, lock, make_writable_folder, write_atomically, write_json, write_text
from fedbuff.report.same_data import DATA, see_data

Arrays = dict[str, NDArray[Any]]


class Folder:
    """Writes a run down while it goes on, so that it can be killed at any moment and resumed."""

    def __init__(
        self, path: Path, settings: toml.Table, needed: int, resume: bool, data: Mapping[str, str] | None = None
    ) -> None:
        """Open `path` for a new run, or to resume one with the same settings; prove that there is room for `needed` bytes.

        `data` are digests of what it is run on: a run does not go on with other data.
        """
        self.path = path
        make_writable_folder(path, needed)
        self._lock = lock(path)
        try:
            self._claim(toml.dumps(settings), resume)
            if data is not None:
                see_data(path, data, "run")
        except BaseException:
            self._lock.close()
            raise
        (path / "checkpoint").mkdir(exist_ok=True, mode=0o700)
        with contextlib.suppress(PermissionError):  # it is somebody else's
            (path / "checkpoint").chmod(0o700)  # updates are in it, and the noise of a private run

    def _claim(self, text: str, resume: bool) -> None:
        """Write the settings down, or see that the run that is there has the same."""
        existing = self.path / "settings.toml"
        if not resume and self._refused():
            existing.unlink(missing_ok=True)
            (self.path / DATA).unlink()
        if not existing.exists():
            write_text(existing, text)
        elif not resume:
            raise FolderError(f"{self.path} already holds a run: go on with --resume, or choose another --out")
        elif (kept := existing.read_text(encoding="utf-8", errors="replace")) != text:
            raise FolderError(f"{self.path} holds a run with other settings: {_difference(kept, text)}")

    def _refused(self) -> bool:
        """Whether all that is there are the traces of a run that was refused before it began."""
        ours = (self.path / DATA).exists() and (self.path / "checkpoint").is_dir()  # others have a settings.toml, too
        begun = (self.path / name for name in ("journal", "metrics.jsonl", "summary.json", "study.db"))
        return ours and not self._checkpoint.exists() and not any(trace.exists() for trace in begun)

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()

    def checkpoint(self, arrays: Arrays, facts: dict[str, Any]) -> None:
        """Everything a run needs to go on, in one file that is whole or absent."""
        text = json.dumps(facts)
        write_tensors(self._checkpoint, arrays, {"facts": text, "checksum": _checksum(arrays, text)})

    def last_checkpoint(self) -> tuple[Arrays, dict[str, Any]] | None:
        if not self._checkpoint.exists():
            return None
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._checkpoint, framework="np") as f:
                arrays, about = {name: f.get_tensor(name) for name in f.keys()}, f.metadata()  # noqa: SIM118  # not a dict
            if about["checksum"] != _checksum(arrays, about["facts"]):
                raise ValueError("its checksum is another")
            return arrays, json.loads(about["facts"])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as e:
            whole = (self.path / "journal" / "00000000.journal").exists()
            then = "; or remove it: the run goes on from its journal" if whole else ""
            then = then if self._journal else "; or remove it: the run begins again"
            raise FolderError(f"{self._checkpoint} is damaged ({e}): restore it from a copy{then}") from e

    @property
    def _journal(self) -> bool:
        """Whether a server has written down here what happened: see deploy/journal.py."""
        return any(path.stat().st_size for path in (self.path / "journal").glob("*.journal"))

    @property
    def _checkpoint(self) -> Path:
        return self.path / "checkpoint" / "state.safetensors"

    def rewrite_metrics(self, metrics: list[dict[str, Any]]) -> None:
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(m) + "\n" for m in metrics))

    def append_metrics(self, metrics: list[dict[str, Any]]) -> None:
        try:
            with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as f:
                f.writelines(json.dumps(m) + "\n" for m in metrics)
        except OSError as e:
            raise FolderError(
                f"can't write {self.path / 'metrics.jsonl'}: {e.strerror or e}; free some space and --resume"
            ) from e

    def key(self) -> bytes:
        """The secret that noise is drawn from: 32 random bytes, made once, before anything is drawn from them.

        They can take the noise off the model again, so nobody else may read them and they end with the run.
        """
        path = self.path / "noise.key"
        if path.exists():
            kept = path.read_bytes()
            if len(kept) != 32:
                raise FolderError(f"{path} is damaged: expected 32 bytes, found {len(kept)}; the run can't go on without it")
            return kept
        if self._checkpoint.exists() or self._journal:
            raise FolderError(
                f"{path} is missing, and the run in {self.path} can't go on without it: its noise was drawn from it"
            )
        key = secrets.token_bytes(32)
        write_atomically(path, lambda p: _write_secret(p, key))
        return key

    def finish(self, trips: Arrays, weights: Arrays, metrics: list[dict[str, Any]], summary: dict[str, Any]) -> None:
        write_trips(self.path / "trips.parquet", trips)
        write_tensors(self.path / "weights.safetensors", weights)
        self.rewrite_metrics(metrics)
        write_json(self.path / "summary.json", summary)
        forget_key(self.path)


def forget_key(run: Path) -> None:
    """Delete the key of a finished run, and the checkpoint, which holds noise too."""
    if (run / "noise.key").exists():
        (run / "checkpoint" / "state.safetensors").unlink(missing_ok=True)
        (run / "noise.key").unlink()


def _checksum(arrays: Arrays, facts: str) -> str:
    found = zlib.crc32(facts.encode())
    for name in sorted(arrays):
        found = zlib.crc32(np.ascontiguousarray(arrays[name]).data, zlib.crc32(name.encode(), found))
    return f"{found:08x}"


def _write_secret(path: Path, secret: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as f:
        f.write(secret)
        f.flush()
        os.fsync(f.fileno())


def write_tensors(path: Path, arrays: Arrays, metadata: dict[str, str] | None = None) -> None:
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata)
    write_atomically(path, lambda p: p.write_bytes(data))


def write_trips(path: Path, trips: Arrays) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_atomically(path, lambda p: pq.write_table(pa.table(trips), p, compression="zstd"))


def _difference(old: str, new: str) -> str:
    """Which settings of two TOML texts differ, three of them at most."""
    try:
        there, here = toml.dotted(tomllib.loads(old)), toml.dotted(tomllib.loads(new))
    except tomllib.TOMLDecodeError as e:
        return f"its settings.toml is damaged ({e})"
    differ = [path for path in {**there, **here} if there.get(path) != here.get(path)]
    gone, come = ([f"{path} = {side[path]}" for path in differ if path in side][:3] for side in (there, here))
    return f"there {' | '.join(gone) or 'nothing more'}, here {' | '.join(come) or 'nothing more'}"
