"""The figures of a report, as numbers: page.js draws them, so that they can be zoomed and asked for values."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fedbuff.report.compare import COSTS
from fedbuff.report.digest import Counts, Digest, add
from fedbuff.report.groups import Group

_BINS = 40  # of a histogram, at most


def figures(groups: Sequence[Group]) -> dict[str, Any]:
    names = dict.fromkeys(name for g in groups for d in g.runs for name in d.curve if name not in COSTS)
    metrics = sorted(names, key=lambda name: not name.endswith(" accuracy"))
    targets = sorted({(judged, d.summary["target"]) for g in groups for d in g.runs if (judged := _judged(d)) is not None})
    counted = {
        "staleness": [_histogram(add(d.staleness for d in g.runs)) for g in groups],
        "weight": [_histogram(add(d.weight for d in g.runs), whole=False) for g in groups],
        "examples": [_histogram(add(d.examples for d in g.runs), behind=add(d.examples_all for d in g.runs)) for g in groups],
        "participations": [_histogram(add(d.participations for d in g.runs)) for g in groups],
    }
    return {
        "groups": [{"name": g.name, "seeds": [d.summary["seed"] for d in g.runs]} for g in groups],
        "costs": COSTS,
        "metrics": metrics,
        "targets": [{"metric": metric, "value": target} for metric, target in targets],
        "curves": [[{name: _short(column) for name, column in d.curve.items()} for d in g.runs] for g in groups],
        "active": [
            {"until": _short(d.summary["virtual_time"]), **{k: _short(v) for k, v in d.active.items() if k != "time"}}
            for d in (g.runs[0] for g in groups)
        ],
        **counted,
    }


def _judged(run: Digest) -> str | None:
    """What a run's target is about: the accuracy on its first split; None if it has no target."""
    accuracies = (name for name in run.curve if name.endswith(" accuracy"))
    return None if run.summary["target"] is None else next(accuracies, None)


def _histogram(counts: Counts, whole: bool = True, behind: Counts | None = None) -> dict[str, Any] | None:
    """Counts in at most `_BINS` equal bins that begin at a round number; None if there is nothing to count.

    Whole numbers get bins of whole numbers; of other values the highest belongs to the last bin. `behind` is counted in
    the same bins, unless it is the same.
    """
    everything = {**counts, **(behind or {})}
    if not counts:
        return None
    low, high = min(everything), max(everything)
    if whole:
        step: float = next(s for s in _round_steps(1) if high // s - low // s < _BINS)
        first, number = low // step * step, int(high // step - low // step) + 1
    else:
        first, step = 0.0, next(s for s in _round_steps(0.01) if high / s <= _BINS / 2)
        number = max(1, -int(-round(high / step, 9) // 1))
    total = sum(counts.values())
    average = sum(value * count for value, count in counts.items()) / total
    made = {"first": first, "step": step, "whole": whole, "total": total, "mean": _short(average)}
    made |= {"low": min(counts), "high": max(counts), "counts": _binned(counts, first, step, number)}
    if behind is not None and behind != counts:
        made["behind"] = _binned(behind, first, step, number)
    return made


def _round_steps(smallest: float) -> Iterator[float]:
    for power in itertools.count():
        yield from (smallest * factor * 10**power for factor in (1, 2, 5))


def _binned(counts: Counts, first: float, step: float, number: int) -> list[int]:
    bins = [0] * number
    for value, count in counts.items():
        bins[min(int((value - first) / step + 1e-9), number - 1)] += count
    return bins


def _short(value: Any) -> Any:
    """Five digits are more than a screen shows."""
    if isinstance(value, list):
        return [_short(item) for item in value]
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded
