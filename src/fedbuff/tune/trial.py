"""A trial: one run, and what it costs.

It costs its trips to the target. If it does not get there within its trips it comes after all that do, by its accuracy over
the last fifth of them. One whose learning curve lies below the median of the others' is given up.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedbuff import settings
from fedbuff.sim.simulation import DIVERGED, NOT_FINITE, Status
from fedbuff.toml import SettingsError, Table

if TYPE_CHECKING:
    import optuna

STEPS = 20  # looks at the learning curve in a whole trial


class HopelessError(Exception):
    """The median of the others is better: this trial is given up."""


def judge(trial: "optuna.Trial | None", tables: Table) -> tuple[float, dict[str, Any]]:
    """The cost of one trial, or `HopelessError` on the way; without a trial, nobody gives up."""
    experiment = settings.from_tables(tables)
    target, trips = budget(experiment)
    looked = 0

    def watch(status: Status) -> None:
        nonlocal looked
        step = status.trips * STEPS // trips
        if trial is not None and step > looked and status.accuracy is not None:
            looked = step
            trial.report(shortfall(status.accuracy, target), step)
            if trial.should_prune():
                raise HopelessError

    run = experiment.run(workers=1, progress=watch)
    reached, why = run.summary["trips_to_target"], run.summary["stopped_by"]
    accuracy = 0.0 if why in (DIVERGED, NOT_FINITE) else lately(run.metrics)  # however good it was before
    facts = {"reached": reached is not None, "accuracy": accuracy, "stopped_by": why}
    return cost(reached, accuracy, target, trips), facts


def lately(metrics: Sequence[Mapping[str, Any]]) -> float:
    """The mean accuracy over the last fifth of a run's trips: where a curve wavers, its last point is a matter of luck.

    >>> lately([{"split": "test", "trips": trips, "accuracy": trips / 100} for trips in (0, 70, 80, 90, 100)])
    0.9
    """
    split, end = metrics[0]["split"], metrics[-1]["trips"]
    last = [m.get("accuracy") or 0.0 for m in metrics if m["split"] == split and m["trips"] >= 0.8 * end]
    return math.fsum(last) / len(last)


def cost(reached: int | None, accuracy: float, target: float, trips: int) -> float:
    """Trips to the target; if it was not reached, more than all of them, the more so the lower the accuracy.

    >>> cost(400, 0.9, 0.9, 1000), cost(None, 0.9, 0.9, 1000), cost(None, 0.45, 0.9, 1000)
    (400.0, 1000.0, 1500.0)
    """
    return float(reached) if reached is not None else trips * (1 + max(0.0, shortfall(accuracy, target)))


def shortfall(accuracy: float, target: float) -> float:
    return 1 - accuracy / target


def budget(experiment: settings.Settings) -> tuple[float, int]:
    """Target and trips of a trial."""
    target, trips = experiment.until.accuracy or experiment.target, experiment.until.trips
    if experiment.target is not None and experiment.target != target:
        raise SettingsError(f"target = {experiment.target:g}, until.accuracy = {target:g}: trips are counted to one; give one")
    if not target:
        raise SettingsError("until.accuracy: missing; tuning needs a target to count the trips to")
    if trips is None:
        raise SettingsError("until.trips: missing; tuning needs to know when to give up")
    return target, trips
