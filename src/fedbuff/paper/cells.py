"""A cell: one run of one setting with one seed, kept as a small JSON file under the hash of its settings.

So an interrupted table goes on where it stopped, and tables that share runs train them once. While it trains, a run has a
folder of its own (OUT/runs, not for the repository) from whose checkpoints it goes on in the middle; what tables and
figures need of it stays (OUT/cells).
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from fedbuff import toml
from fedbuff.learn.data import Data
from fedbuff.paper.result import NOT_RUN, Number, ratio, spread
from fedbuff.report.files import FolderError, InUseError, write_json
from fedbuff.report.progress import bar
from fedbuff.settings import Settings, from_tables
from fedbuff.toml import Table

_LOOK_AGAIN = 2.0  # seconds, while others have all that is left


@dataclass(frozen=True)
class Cell:
    """What a run came to: its settings, its summary.json, and its learning curve on the first split, column by column.

    data, held_out   the digests of what it was run and evaluated on; the earliest cells have none
    """

    settings: Table
    seed: int
    summary: Mapping[str, Any]
    curve: Mapping[str, list[Any]]
    data: str = ""
    held_out: str = ""

    def to_target(self, cost: str) -> float | None:
        """`cost` (trips, server_steps, virtual_time) when the target was reached; None if it never was."""
        found: float | None = self.summary[f"{cost}_to_target"]
        return found


def to_target(cells: Sequence[Cell], cost: str, unit: float = 1.0) -> Number:
    """Mean and standard deviation over seeds, or how much was not enough: a mean over the lucky seeds would flatter."""
    if not cells:
        return NOT_RUN
    found = [cell.to_target(cost) for cell in cells]
    reached = [value / unit for value in found if value is not None]
    if len(reached) == len(cells):
        return spread(reached)
    spent = [cell.summary[cost] if value is None else value for cell, value in zip(cells, found, strict=True)]
    return Number(mean(spent) / unit, bound=True)


def times(cells: Sequence[Cell], others: Sequence[Cell], cost: str) -> Number | None:
    """How many times `others`' cost these took, over the seeds that both have: a seed may matter more than a method."""
    ours, theirs = over_shared_seeds(cost, cells, others)
    return ratio(ours, theirs)


def over_shared_seeds(cost: str, *groups: Sequence[Cell], unit: float = 1.0) -> list[Number]:
    """`to_target` of each group over the seeds that all of them have, so that they can be compared."""
    seeds = set.intersection(*({cell.seed for cell in group} for group in groups))
    return [to_target([cell for cell in group if cell.seed in seeds], cost, unit) for group in groups]


def measure(
    tables: Table,
    seed: int,
    out: Path,
    data: Data,
    workers: int | None = None,
    quiet: bool = True,
    say: Callable[[str], None] = print,
) -> Cell:
    """The cell of these settings, seed and data: from its file, or by running it, from its last checkpoint if there is one."""
    experiment = from_tables({**tables, "seed": seed})
    path = where(experiment, out)
    kept = read(path, data)
    if kept is not None:
        return kept
    out.mkdir(parents=True, exist_ok=True)
    with bar(f"{experiment.name} {seed}", experiment.until, quiet) as progress:
        run = experiment.run(out=folder(path, data), resume=True, progress=progress, workers=workers)
    cell = Cell(without_seed(experiment), seed, run.summary, columns(run.metrics), data.digest, data.held_out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {**vars(cell), "summary": dict(run.summary)})
    reached = run.summary["trips_to_target"]
    found = f"after {reached:,} trips" if reached is not None else f"not within {run.summary['trips']:,} trips"
    say(f"{path.stem}: {100 * run.summary['target']:g} % {found}, {run.summary['wall_seconds']:.0f} s")
    return cell


def measure_all(
    wanted: Sequence[tuple[Table, int]], out: Path, data: Data, say: Callable[[str], None], **how: Any
) -> list[Cell]:
    """The cells of these settings and seeds. What another process is running is left to it, so several can share a table."""
    found: dict[int, Cell] = {}
    waiting = False
    while len(found) < len(wanted):
        before, in_use = len(found), ""
        for i, (tables, seed) in enumerate(wanted):
            if i in found:
                continue
            try:
                found[i] = measure(tables, seed, out, data, say=say, **how)
            except InUseError as e:
                in_use = str(e)
        if len(found) == before:  # others have all that is left; if one of them is killed, its run goes on here
            if not waiting:
                say(f"{in_use}: waiting for it")
            waiting = True
            time.sleep(_LOOK_AGAIN)
    return [found[i] for i in range(len(wanted))]


def so_far(tables: Table, seed: int, out: Path, data: Data) -> Cell | None:
    """The same without running anything: a run that was interrupted has not reached its target yet. None if it never began."""
    experiment = from_tables({**tables, "seed": seed})
    path = where(experiment, out)
    if (kept := read(path, data)) is not None:
        return kept
    lines = folder(path, data) / "metrics.jsonl"
    whole = lines.read_text(encoding="utf-8").rpartition("\n")[0] if lines.is_file() else ""  # a last line may be half written
    if not whole:
        return None
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        columns(rows)
    except (ValueError, TypeError, KeyError) as e:
        raise FolderError(f"{lines} is damaged ({e!r}): remove {lines.parent} to run this cell again") from e
    spent, target = {cost: rows[-1][cost] for cost in _COSTS}, experiment.until.accuracy
    # one that was killed while it wrote its last files has got there
    there = target is not None and rows[-1]["split"] == rows[0]["split"] and (rows[-1].get("accuracy") or 0.0) >= target
    to_target = {f"{cost}_to_target": spent[cost] if there else None for cost in spent}
    return Cell(without_seed(experiment), seed, {**spent, **to_target, "stopped_by": "not done yet"}, columns(rows))


def where(experiment: Settings, out: Path) -> Path:
    """The file of a cell: readable, and different for all that can change the result."""
    task = next(iter(experiment.tables()["task"]))
    return out / "cells" / f"{task}-{experiment.name}-{_hash(without_seed(experiment))}-seed{experiment.seed}.json"


def _hash(settings: Table) -> str:
    return hashlib.sha256(toml.dumps(settings).encode()).hexdigest()[:12]


def folder(path: Path, data: Data) -> Path:
    """Where the run of a cell is while it is under way: never gone on with on other data."""
    return path.parent.parent / "runs" / f"{path.stem}-{data.digest}-{data.held_out}"


def without_seed(experiment: Settings) -> Table:
    return {key: value for key, value in experiment.tables().items() if key != "seed"}


def read(path: Path, data: Data) -> Cell | None:
    """A cell from its file, or None if it was not run yet; one of other data is an error."""
    if not path.is_file():
        return None
    try:
        cell = Cell(**json.loads(path.read_text(encoding="utf-8")))
        task = cell.summary["task"]
        _check(cell, path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise FolderError(f"{path} is damaged ({e!r}): remove it to run this cell again") from e
    same = cell.data in ("", data.digest, data.labels) and cell.held_out in ("", data.held_out)
    if task != data.name or not same:
        raise FolderError(f"{path}: a run on other data ({task}) than what is at hand ({data.name}); choose another --out")
    return cell


def _check(cell: Cell, path: Path) -> None:
    """Refuse what no table could be made of."""
    if not isinstance(cell.seed, int) or path.stem.rpartition("-seed")[2] != str(cell.seed):
        raise ValueError(f"seed {cell.seed!r}")
    if _hash(cell.settings) not in path.stem.split("-"):
        raise ValueError("its settings are another cell's")
    for cost in _COSTS:
        spent, reached = cell.summary[cost], cell.summary[f"{cost}_to_target"]
        for value in (spent, 0 if reached is None else reached):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= spent:
                raise ValueError(f"{cost} {value!r}")
    lengths = {len(cell.curve[name]) for name in _CURVE}
    if len(lengths) != 1 or not all(isinstance(v, int | float | None) for name in _CURVE for v in cell.curve[name]):
        raise ValueError("its curve is not of numbers, or not as long in every column")


_COSTS = ("trips", "server_steps", "virtual_time")
_CURVE = (*_COSTS, "loss", "accuracy")


def columns(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The evaluations on the first split as columns."""
    rows = [m for m in metrics if m["split"] == metrics[0]["split"]]
    return {name: [row.get(name) for row in rows] for name in _CURVE}
