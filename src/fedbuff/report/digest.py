"""What a report needs of a run: a few hundred numbers, whether it had a hundred trips or a million.

Counts are exact, so that runs over several seeds can be added up before anything is put into bins; curves are thinned to
`POINTS`, active trips to `SLICES` of virtual time.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedbuff.report.compare import COSTS
from fedbuff.report.run import Run

POINTS = 500  # of a curve, or a little more
SLICES = 300  # of virtual time

Counts = dict[float, int]  # how often each value was met
Value = TypeVar("Value", float, str)


@dataclass(frozen=True)
class Digest:
    """A run in little.

    curve                  columns of evaluations: the costs, and "SPLIT METRIC" for each, None where it was not finite
    staleness, weight      of the updates that a server step used
    examples, examples_all held by the clients of those updates, and of all trips that ended
    participations         how many clients had how many updates used, of those that made a trip
    active                 trips in flight in slices of virtual time: their edges, and mean, low and high of each slice
    """

    summary: Mapping[str, Any]
    settings: Mapping[str, Any]
    curve: dict[str, list[Any]]
    outcomes: dict[str, int]
    staleness: Counts
    weight: Counts
    examples: Counts
    examples_all: Counts
    participations: Counts
    active: dict[str, list[float]]


def digest(run: Run, points: int = POINTS) -> Digest:
    """Of a finished run, or of one so far; with at most about so many points of its curves."""
    trips = run.trips
    outcomes, counts = np.unique(trips["outcome"].astype(str), return_counts=True)
    used = trips["outcome"] == "used"
    clients, who = np.unique(trips["client"], return_inverse=True)
    return Digest(
        summary=run.summary,
        settings=run.settings,
        curve=curve(run.metrics, run.summary["target"], points),
        outcomes=dict(zip(outcomes.tolist(), counts.tolist(), strict=True)),
        staleness=_count(trips["staleness"][used]),
        weight=_count(trips["weight"][used].round(6)),
        examples=_count(trips["examples"][used]),
        examples_all=_count(trips["examples"]),
        participations=_count(np.bincount(who[used], minlength=len(clients))),
        active=active(run),
    )


def add(counts: Iterable[dict[Value, int]]) -> dict[Value, int]:
    total: dict[Value, int] = {}
    for some in counts:
        for value, count in some.items():
            total[value] = total.get(value, 0) + count
    return total


def _count(values: NDArray[Any]) -> Counts:
    found, counts = np.unique(values, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


# ── curves ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def curve(metrics: Sequence[Mapping[str, Any]], target: float | None = None, points: int = POINTS) -> dict[str, list[Any]]:
    """Evaluations as columns, one row for all splits, thinned: what stands out of its neighbours stays."""
    columns: dict[str, list[Any]] = {cost: [] for cost in COSTS}
    for m in metrics:
        if not columns["server_steps"] or [m[cost] for cost in COSTS] != [columns[cost][-1] for cost in COSTS]:
            for name, column in columns.items():
                column.append(m[name] if name in COSTS else None)
        rows = len(columns["trips"])
        for name, value in m.items():
            if name not in COSTS and name not in ("split", "epsilon"):  # which goes by server steps, not by split
                columns.setdefault(f"{m['split']} {name}", [None] * rows)[-1] = value
    kept = _thinned([column for name, column in columns.items() if name not in COSTS], points)
    reached = _reached(metrics, columns, target)
    kept = sorted({*kept, *reached})
    return {name: [column[row] for row in kept] for name, column in columns.items()}


def _thinned(columns: list[list[Any]], points: int) -> list[int]:
    """Which rows to keep: all if they are few, else the ends and, of each stretch, where any column is highest and lowest."""
    rows = len(columns[0]) if columns else 0
    if rows <= points:
        return list(range(rows))
    kept = {0, rows - 1}
    edges = np.linspace(0, rows, max(1, points // (2 * len(columns))) + 1).astype(int)
    for column in columns:
        values = np.array([np.nan if v is None else v for v in column], float)
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            stretch = values[start:stop]
            if np.isfinite(stretch).any():
                kept |= {start + int(np.nanargmin(stretch)), start + int(np.nanargmax(stretch))}
    return sorted(kept)


def _reached(metrics: Sequence[Mapping[str, Any]], columns: Mapping[str, list[Any]], target: float | None) -> list[int]:
    """The row that first reached the target: it is what the figure is about."""
    judged = columns.get(f"{metrics[0]['split']} accuracy", []) if metrics else []
    return [row for row, value in enumerate(judged) if target is not None and value is not None and value >= target][:1]


# ── active trips ─────────────────────────────────────────────────────────────────────────────────────────────────────


def active(run: Run, slices: int = SLICES) -> dict[str, list[float]]:
    """How many trips were under way: mean, low and high in equal slices of virtual time."""
    trips, until = run.trips, run.summary["virtual_time"]
    if not len(trips["trip"]) or until <= 0:
        return {"time": [], "mean": [], "low": [], "high": []}
    starts = np.concatenate([trips["start_time"], _starts_in_flight(run)])
    times = np.concatenate([starts, trips["end_time"]])
    changes = np.concatenate([np.ones(len(starts)), -np.ones(len(trips["end_time"]))])
    by_time = np.argsort(times, kind="stable")
    moments, first = np.unique(times[by_time], return_index=True)
    level = np.cumsum(np.add.reduceat(changes[by_time], first))  # from each moment on
    edges = np.linspace(0.0, until, slices + 1)
    return {"time": edges.tolist(), **_levels(moments, level, edges)}


def _starts_in_flight(run: Run) -> NDArray[np.float64]:
    """When the trips started that were in flight when the run stopped: they have no rows, they are the missing numbers.

    Numbers are in the order of start, so each began between its neighbours. Where a rule replaces trips, the last to start
    did so when the last to be replaced ended; clients that come by themselves are taken to have come evenly.
    """
    trips, rule, until = run.trips, run.settings["server"]["start"], run.summary["virtual_time"]
    order = np.argsort(trips["trip"])
    numbers, starts = trips["trip"][order], trips["start_time"][order]
    total = len(numbers) + run.summary["in_flight"]
    missing = np.setdiff1d(np.arange(total), numbers, assume_unique=True)
    if not ("refill" in rule or "cohort" in rule):
        evenly: NDArray[np.float64] = np.interp(missing, np.append(numbers, total - 1), np.append(starts, until))
        return evenly
    first, begin, replaced = 0, 0.0, np.sort(trips["end_time"])
    if "cohort" in rule:  # of the last one: who brought no update is replaced, unless it is a sample
        now = trips["start_version"] == run.summary["server_steps"]
        last_step = trips["end_time"][trips["server_step"] == run.summary["server_steps"]]
        first, begin = int((~now).sum()), trips["start_time"][now].min() if now.any() else last_step.max(initial=0.0)
        lost = now & (trips["outcome"] != "unused") & (not rule["cohort"].get("poisson"))
        replaced = np.sort(trips["end_time"][lost])
    began = np.append(np.full(max(1, total - first - len(replaced)), begin), replaced)
    place = np.searchsorted(numbers, missing)
    from_the_end = began[np.maximum(missing - total, -len(began))]
    between: NDArray[np.float64] = np.clip(from_the_end, np.append(0.0, starts)[place], np.append(starts, until)[place])
    return between


def _levels(moments: NDArray[np.float64], level: NDArray[np.float64], edges: NDArray[np.float64]) -> dict[str, list[float]]:
    """Mean, low and high of a step function between each two edges; before its first moment it is 0."""
    at_edges = np.concatenate([[0.0], level])[np.searchsorted(moments, edges, side="right")]
    x = np.concatenate([moments, edges])
    y = np.concatenate([level, at_edges])
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    areas = np.concatenate([[0.0], np.cumsum(y[:-1] * np.diff(x))])
    mean = np.diff(np.interp(edges, x, areas)) / np.diff(edges)
    begins = np.searchsorted(x, edges[:-1], side="right") - 1  # the level a slice begins with counts as its own
    ends = np.searchsorted(x, edges[1:], side="left")
    low = [float(y[a:b].min()) for a, b in zip(begins, ends, strict=True)]
    high = [float(y[a:b].max()) for a, b in zip(begins, ends, strict=True)]
    return {"mean": mean.tolist(), "low": low, "high": high}
