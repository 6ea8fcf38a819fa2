"""The timeline: who trains when, on which version, arriving how stale, without training anything.

It is the simulator's plan and nothing else. A million trips take seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.core.random import Draw
from fedbuff.core.server import check_settings
from fedbuff.core.staleness import Weigh, polynomial
from fedbuff.core.starting import StartingRule
from fedbuff.sim.availability import windows
from fedbuff.sim.fastplan import fastest
from fedbuff.sim.timing import Sizes, check_timing, half_normal


@dataclass(frozen=True, repr=False)
class Timeline:
    """The first trips of a run as arrays, one element a trip, each followed to its end."""

    trip: NDArray[np.int64]
    client: NDArray[np.int64]
    examples: NDArray[np.int64]
    start_time: NDArray[np.float64]
    end_time: NDArray[np.float64]
    start_version: NDArray[np.int64]
    end_version: NDArray[np.int64]
    staleness: NDArray[np.int64]
    weight: NDArray[np.float64]
    server_step: NDArray[np.int64]
    outcome: NDArray[np.str_]

    def __repr__(self) -> str:
        return f"<timeline of {len(self.trip):,} trips; its .summary() says more, its columns are .{', .'.join(self.__dict__)}>"

    def summary(self) -> dict[str, Any]:
        """Staleness of the updates that were accepted; server steps, mean concurrency and throughput in virtual time.

        The latter up to the moment when the last of the trips started: after that the timeline only waits for them to end.
        """
        staleness = self.staleness[np.isin(self.outcome, ("used", "unused"))]
        started = float(self.start_time.max())
        until = started or float(self.end_time.max()) or 1.0
        busy = np.minimum(self.end_time, until) - self.start_time
        ended = self.end_time <= until
        names, counts = np.unique(self.outcome, return_counts=True)
        return {
            "trips": len(self.trip),
            "server_steps": int(self.start_version.max() if started else self.server_step.max()),
            "virtual_time": until,
            "staleness_mean": float(staleness.mean()) if len(staleness) else None,
            "staleness_max": int(staleness.max()) if len(staleness) else None,
            "staleness_p50": float(np.percentile(staleness, 50)) if len(staleness) else None,
            "staleness_p99": float(np.percentile(staleness, 99)) if len(staleness) else None,
            "concurrency_mean": float(busy.sum() / until),
            "trips_per_time": float(ended.sum() / until),
            "duration_mean": float((self.end_time - self.start_time).mean()),
            "outcomes": dict(zip(names.tolist(), counts.tolist(), strict=True)),
        }


def timeline(
    *,
    start: StartingRule,
    buffer_size: int,
    timing: Draw = half_normal(1.0),
    clients: int | Sequence[Any],
    trips: int,
    seed: int = 0,
    weigh: Weigh = polynomial(0.5),
    max_staleness: int | None = None,
    examples: Sequence[int] | Callable[[int], int] | None = None,
    dropout: float = 0.0,
    timeout: float | None = None,
    availability: windows | None = None,
) -> Timeline:
    """The first `trips` trips, each followed to its end (so long ones are not cut off, which would bias the rest).

    `examples` says how many a client holds, by client, at least one; it matters to `per_example` timing only. The timeline of a
    simulation with the same arguments is the same, trip for trip, unless training fails.

    >>> from fedbuff.core.starting import refill
    >>> t = timeline(start=refill(concurrency=100), buffer_size=10, clients=1000, trips=20_000)
    >>> round(float(t.staleness.mean()), 1)  # (100 − 1) / 10
    9.9
    """
    check.integer(1, check.MOST, trips=trips)
    check.integer(0, seed=seed)
    check_settings(start, buffer_size, weigh, max_staleness)
    check_timing(timing, availability)
    counted = isinstance(clients, Integral) or hasattr(clients, "__len__")
    check.fits(counted, "how many there are, e.g. 1000, or a list of them", clients=clients)
    n, seed = int(clients) if isinstance(clients, Integral) else len(clients), int(seed)  # type: ignore[arg-type]
    check.integer(1, check.MOST, clients=n)
    plan = fastest(
        start=check.plain(start),
        buffer_size=buffer_size,
        weigh=weigh,
        max_staleness=max_staleness,
        clients=n,
        sizes=Sizes(examples),
        timing=check.plain(timing),
        seed=seed,
        dropout=dropout,
        timeout=timeout,
        availability=availability,
    )
    plan.begin()
    plan.follow(trips)
    return Timeline(**plan.trips.arrays(trips))
