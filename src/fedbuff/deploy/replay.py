"""`fedbuff replay`: a run over a network once more, from its journal alone, to the same bits.

    fedbuff replay RUN                          # are its weights what its journal says?
    fedbuff replay RUN --until 40 --out weights.safetensors
    fedbuff replay RUN --trace durations.csv    # how long trips took, to simulate with

The journal has every update that was accepted and everything else that the server decided by. A fresh server is told all of
it in the order in which it happened; what comes out is compared with the weights that the run left.
"""

import argparse
import csv
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbuff.core.trips import FAILED, LATE, UNUSED, USED
from fedbuff.core.versions import Vector
from fedbuff.deploy.journal import FORMAT, Facts, read
from fedbuff.report.files import FolderError

if TYPE_CHECKING:
    from fedbuff.deploy.books import Books
    from fedbuff.learn.flat import Flat
    from fedbuff.settings import Settings


def parser(commands: Any) -> None:
    """`fedbuff replay` for the command line's own parser."""
    summary = "A run over a network once more, from its journal: the same weights, bit for bit."
    sub: argparse.ArgumentParser = commands.add_parser("replay", help=summary, description=summary)
    sub.set_defaults(command=command)
    sub.add_argument("folder", type=Path, metavar="RUN", help="a run folder, or a journal")
    sub.add_argument("--until", type=version_number, metavar="VERSION", help="stop at this version of the model")
    sub.add_argument("--out", type=Path, metavar="FILE.safetensors", help="write the weights")
    sub.add_argument("--trace", type=Path, metavar="FILE.csv", help="write how long trips took, for `timeline --trace`")
    sub.add_argument("--data", type=Path, metavar="DIR", help="where the datasets are (default: $FEDBUFF_DATA)")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")


def command(args: argparse.Namespace) -> None:
    from fedbuff.report.finished import read_weights
    from fedbuff.report.folder import write_tensors

    began = time.perf_counter()
    done = replay(args.folder, args.until)
    took = time.perf_counter() - began
    weights = done.flat.named(np.array(done.weights))
    run = _run_of(args.folder)
    difference = None
    compared = args.until is None and run is not None and (run / "weights.safetensors").exists()
    if compared and run is not None:
        difference = first_difference(weights, read_weights(run))
    if args.out is not None:
        write_tensors(args.out, weights)
    if args.trace is not None:
        _write_trace(args.trace, done.durations())
    facts = {
        "updates": done.updates,
        "server_steps": done.books.server.version,
        "refused": dict(done.books.counts.refused),
        "digest": hashlib.sha256(done.weights.tobytes()).hexdigest(),
        "identical": difference is None if compared else None,
        "difference": difference,
        "seconds": took,
    }
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts)
    if difference is not None:
        sys.exit(1)


def version_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a version, 0 or more, not {text!r}")
    return int(text)


def replay(path: Path, until: int | None = None) -> "Replayed":
    """Tell a fresh server what the journal says, up to its end or to the first server step that makes version `until`."""
    folder = journal_of(path)
    records = read(folder)
    header, blob = _header(records, folder)
    with ExitStack() as at_the_end:
        books, flat = _opened(header, blob, path, at_the_end)
        done = Replayed(books, flat)
        for record, update in records:
            if until is not None and books.server.version >= until:
                break
            books.apply(record, update)
            done.updates += record["kind"] in ("update", "sealed")
            if "seconds" in record:
                done.seconds[record["trip"]] = record["seconds"]
    if until is not None and books.server.version < until:
        raise ValueError(f"--until {until}: the journal ends at version {books.server.version}")
    return done


def journal_of(path: Path) -> Path:
    """The journal of a run folder, or the folder itself if it is one; FolderError if it can't be replayed."""
    folder = path / "journal" if (path / "journal").is_dir() else path
    if not folder.is_dir() or not any(folder.glob("*.journal")):
        raise FolderError(
            f"{path}: there is no journal; only runs over a network (`fedbuff deploy`) have one, not private ones that ended, "
            "nor those with deploy.keep_journal = false"
        )
    if not (folder / "00000000.journal").exists():
        raise FolderError(f"{folder}: its beginning was deleted (deploy.keep_journal = false), so it can't be replayed")
    return folder


def first_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Where two models differ, to the bit; None if they don't.

    >>> first_difference({"w": np.array([1.0, 2.0])}, {"w": np.array([1.0, 2.5])})
    'w[1]: 2.0 here, 2.5 in the run'
    """
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            return f"{name}: only {'in the run' if a is None else 'here'}"
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return f"{name}: {a.dtype}{list(a.shape)} here, {b.dtype}{list(b.shape)} in the run"
        bits_of_a, bits_of_b = (np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8) for x in (a, b))
        if len(different := np.flatnonzero((bits_of_a != bits_of_b).any(axis=1))):
            at = np.unravel_index(different[0], a.shape)
            return f"{name}[{', '.join(map(str, at))}]: {a[at]} here, {b[at]} in the run"
    return None


def _header(records: Iterator[tuple[Facts, bytes]], folder: Path) -> tuple[Facts, bytes]:
    header, blob = next(records, ({}, b""))
    if header.get("kind") != "header":
        raise FolderError(f"{folder}: it does not begin with the settings of a run; is it the journal of one?")
    if header["format"] != FORMAT:
        raise FolderError(f"{folder}: written by another version of fedbuff (format {header['format']}, here {FORMAT})")
    return header, blob


def _opened(header: Facts, blob: bytes, path: Path, at_the_end: ExitStack) -> "tuple[Books, Flat]":
    """New books as the run had them at its beginning, and the shape of its model."""
    from fedbuff.deploy.serve import opened
    from fedbuff.learn.local import initial_weights
    from fedbuff.report.folder import Folder
    from fedbuff.settings import from_tables

    settings = from_tables(header["settings"])
    folder = None
    if _secret_noise(settings):
        run = _run_of(path)
        if run is None or not (run / "noise.key").exists():
            raise FolderError(f"{path}: its noise was drawn from noise.key, which is deleted when a run ends: no replay")
        folder = at_the_end.enter_context(Folder(run, header["settings"], 0, resume=True))
    task = settings.load_task()
    flat, _ = initial_weights(task, settings.seed)
    weights = np.frombuffer(blob, header["dtype"])
    return opened(settings, weights, len(task.clients), folder)[0], flat


def _secret_noise(settings: "Settings") -> bool:
    return settings.privacy is not None and settings.privacy.noise == "secure"


def _run_of(path: Path) -> Path | None:
    """The run folder that a path means, if it means one."""
    if (path / "journal").is_dir():
        return path
    return path.parent if path.resolve().name == "journal" else None


def _write_trace(path: Path, rows: list[tuple[int, float, float]]) -> None:
    lines = [("client", "duration", "seconds"), *rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def _print(facts: dict[str, Any]) -> None:
    print(f"{facts['updates']:,} updates, {facts['server_steps']:,} server steps, in {facts['seconds']:.1f} s")
    print(f"  refused   {', '.join(f'{why} {n:,}' for why, n in sorted(facts['refused'].items())) or 'nothing'}")
    print(f"  weights   sha256 {facts['digest']}")
    if facts["difference"] is not None:
        print(f"  DIFFERENT from the run's weights.safetensors: {facts['difference']}")
    elif facts["identical"]:
        print("  identical to the run's weights.safetensors, bit for bit")


@dataclass
class Replayed:
    """What a journal came to.

    flat      the shape of the model
    updates   how many there were
    seconds   of training, by trip
    """

    books: "Books"
    flat: "Flat"
    updates: int = 0
    seconds: dict[int, float] = field(default_factory=dict)

    @property
    def weights(self) -> Vector:
        return self.books.server.model

    def durations(self) -> list[tuple[int, float, float]]:
        """Client, duration and seconds of training, of every trip that arrived."""
        t = self.books.trips
        # an update that was refused is known by how long its client trained: what never came, or was none, has no such time
        refused = (FAILED, LATE)
        arrived = [
            trip
            for trip in t.order[: t.ended]
            if t.outcome[trip] in (USED, UNUSED) or (t.outcome[trip] in refused and trip in self.seconds)
        ]
        return [(t.client[i], t.end_time[i] - t.start_time[i], self.seconds.get(i, 0.0)) for i in arrived]
