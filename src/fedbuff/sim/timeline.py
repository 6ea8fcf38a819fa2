"""The timeline: who trains when, on which version, arriving how stale, without training anything.

It is the simulator's schedule and clock without weights. A million trips take seconds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.core.random import Draw
from fedbuff.core.schedule import Schedule
from fedbuff.core.staleness import Weigh, polynomial
from fedbuff.core.starting import StartingRule, arrivals
from fedbuff.sim.availability import windows
from fedbuff.sim.clock import ARRIVES, DROPS, WAKES, Clock
from fedbuff.sim.timing import Sizes, half_normal
from fedbuff.sim.trips import CANCELLED, DROPPED, LATE, UNUSED, Trips


@dataclass(frozen=True)
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

    def summary(self) -> dict[str, Any]:
        """Staleness of the updates that were accepted; server steps, mean concurrency and throughput in virtual time.

        The latter up to the moment when the last of the trips started: after that the timeline only waits for them to end.
        """
        staleness = self.staleness[np.isin(self.outcome, ("used", "unused"))]
        started = float(self.start_time.max())
        horizon = started or float(self.end_time.max()) or 1.0
        busy = np.minimum(self.end_time, horizon) - self.start_time
        ended = self.end_time <= horizon
        names, counts = np.unique(self.outcome, return_counts=True)
        return {
            "trips": len(self.trip),
            "server_steps": int(self.start_version.max() if started else self.server_step.max()),
            "virtual_time": horizon,
            "staleness_mean": float(staleness.mean()) if len(staleness) else None,
            "staleness_max": int(staleness.max()) if len(staleness) else None,
            "staleness_p50": float(np.percentile(staleness, 50)) if len(staleness) else None,
            "staleness_p99": float(np.percentile(staleness, 99)) if len(staleness) else None,
            "concurrency_mean": float(busy.sum() / horizon),
            "trips_per_time": float(ended.sum() / horizon),
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

    `examples` says how many a client holds, by client; it matters to `per_example` timing only. The timeline of a
    simulation with the same arguments is the same, trip for trip, unless training fails.

    >>> from fedbuff.core.starting import refill
    >>> t = timeline(start=refill(concurrency=100), buffer_size=10, clients=1000, trips=20_000)
    >>> round(float(t.staleness.mean()), 1)  # (100 − 1) / 10
    9.9
    """
    check.integer(1, trips=trips)
    check.integer(0, seed=seed)
    n, seed = int(clients) if isinstance(clients, Integral) else len(clients), int(seed)  # type: ignore[arg-type]
    check.integer(1, clients=n)
    sizes = Sizes(examples)
    clock = Clock(check.plain(timing), seed, sizes, dropout, timeout, availability)
    schedule = Schedule(with_rate(check.plain(start), clock, n), buffer_size, n, seed, availability)
    table = Trips()
    in_flight, counted = schedule.in_flight, 0
    buffer: list[tuple[int, float]] = []
    limit = math.inf if max_staleness is None else max_staleness

    def begin(started: list[int]) -> None:
        for trip in started:
            client, version = in_flight[trip]
            clock.start(trip, client)
            table.started(client, sizes(client), clock.now, version)
        at = schedule.wake()
        if at is not None:
            clock.wake(at)

    begin(schedule.begin(0.0))
    while counted < trips:
        now, trip, ending = clock.next()
        if ending != WAKES:
            counted += trip < trips
            staleness = schedule.version - in_flight[trip][1]
            if ending == ARRIVES and staleness <= limit:
                schedule.arrived(trip)
                table.end(trip, now, schedule.version, UNUSED)
                buffer.append((trip, weigh(staleness)))
                if len(buffer) == buffer_size:
                    before = schedule.version
                    for gone, _ in schedule.step():
                        clock.cancel(gone)
                        table.end(gone, now, before, CANCELLED)
                        counted += gone < trips
                    for used, weight in buffer:
                        table.used(used, weight, schedule.version)
                    buffer.clear()
            else:
                schedule.ended(trip)
                table.end(trip, now, schedule.version, DROPPED if ending == DROPS else LATE)
        begin(schedule.start_trips(now))
    return Timeline(**table.arrays(trips))


def with_rate(start: StartingRule, clock: Clock, clients: int) -> StartingRule:
    """`arrivals(concurrency=…)` with the rate that gives it on this clock; any other rule as it is."""
    if not isinstance(start, arrivals) or start.rate is not None:
        return start
    mean = clock.mean_duration(clients)
    if not mean > 0:
        raise ValueError(f"start: {start} needs trips that take time; give a rate")
    return start.at_mean_duration(mean)
