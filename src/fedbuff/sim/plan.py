"""The plan of a run: who trains when, on which version, and which server step uses it, without training anything.

The clock does not need the model, so the plan runs ahead of training and training knows what will be needed, and when.
The timeline is a plan and nothing else. fastplan.py has the same plan, compiled.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

from fedbuff.core.random import Draw
from fedbuff.core.schedule import Schedule
from fedbuff.core.staleness import Weigh, weight_of
from fedbuff.core.starting import StartingRule, arrivals
from fedbuff.core.trips import CANCELLED, DROPPED, FAILED, LATE, UNUSED, Trips
from fedbuff.privacy.ledger import Ledger
from fedbuff.sim.availability import windows
from fedbuff.sim.clock import ARRIVES, DROPS, WAKES, Clock, nothing_left
from fedbuff.sim.steps import Steps
from fedbuff.sim.timing import Sizes

_HOPELESS = 20_000  # trips
ARRIVALS_IN_VAIN = 1_000_000  # in a row, while nobody is free
_RAREST = 1e-200  # arrivals in a unit of time


class Plan:
    """Virtual time running ahead: `advance` lets the next thing happen, `steps` are the server steps found so far.

    start, timing, … as in `fedbuff.simulate`
    failed        trips whose updates turned out to be unusable: the server refuses them when they arrive
    ledger        how often clients may take part, if that is limited; what it knows is in the table of trips
    """

    def __init__(
        self,
        *,
        start: StartingRule,
        buffer_size: int,
        weigh: Weigh,
        max_staleness: int | None,
        clients: int,
        sizes: Sizes,
        timing: Draw,
        seed: int,
        dropout: float = 0.0,
        timeout: float | None = None,
        availability: windows | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.clock = Clock(timing, seed, sizes, dropout, timeout, availability)
        self.schedule = Schedule(with_rate(start, self.clock, clients), buffer_size, clients, seed, availability, ledger)
        self.trips, self.ledger = Trips(), ledger
        self.steps = Steps()
        self.failed: set[int] = set()
        self.sizes, self._examples, self._weigh = sizes, sizes.listed, weigh
        self.limit = math.inf if max_staleness is None else max_staleness
        self._weights: dict[int, float] = {}  # s(τ), as far as it was asked
        self._buffer: list[int] = []
        self._staleness: list[int] = []
        self._ended_at_step = 0
        self._in_vain = 0  # wake-ups since anything happened

    def begin(self) -> None:
        self._start(self.schedule.begin(0.0))

    @property
    def version(self) -> int:
        return self.schedule.version

    @property
    def in_flight(self) -> int:
        return len(self.schedule.in_flight)

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def exhausted(self) -> bool:
        """Whether nothing will happen any more as nobody may take part again."""
        return self.schedule.exhausted()

    def upcoming(self) -> float:
        """When the next thing happens."""
        return self.clock.now if self.schedule.full() else self.clock.upcoming()

    def mean_in_flight(self) -> float:
        """How many trips are in flight, on average."""
        start = self.schedule.start
        if isinstance(start, arrivals) and start.rate:
            return start.rate * self.clock.mean_duration(self.schedule.clients)
        return start.at_once()

    def run(self, version: int, most_trips: float = math.inf, before: float = math.inf) -> bool:
        """Go on until a server step makes `version`; False if so many trips have ended, or so much time has passed, before."""
        schedule, trips = self.schedule, self.trips
        while schedule.version < version:
            if trips.ended >= most_trips or (before < math.inf and self.upcoming() > before):
                return False
            self.advance()
        return True

    def follow(self, count: int) -> None:
        """Go on until the first `count` trips have all ended."""
        trips, seen, left = self.trips, 0, count
        while left:
            self.advance()
            for trip in trips.order[seen : trips.ended]:
                left -= trip < count
            seen = trips.ended
            self.steps.clear()  # nobody asks for them

    def advance(self) -> None:
        """Let the next thing happen."""
        schedule = self.schedule
        if schedule.full():  # a Poisson cohort that nobody is in
            self._step(self.clock.now)
            return
        if schedule.exhausted():  # clients that arrive, or look whether they may, would do so for ever
            raise nothing_left(self.clock.now)
        now, trip, ending = self.clock.next()
        if ending == WAKES:
            started = schedule.start_trips(now)
            self._start(started)
            self._in_vain = 0 if started else self._in_vain + 1
            if self._in_vain >= ARRIVALS_IN_VAIN:
                raise too_many_arrive(now)
            return
        self._in_vain = 0
        version = schedule.version
        staleness = version - schedule.in_flight[trip][1]
        if ending == ARRIVES and staleness <= self.limit and trip not in self.failed:
            if self.ledger is not None and (why := self.ledger.admit(schedule.in_flight[trip][0], version)):
                raise AssertionError(f"trip {trip} was started and can't take part: {why}")
            schedule.arrived(trip)
            self.trips.end(trip, now, version, UNUSED)
            self._buffer.append(trip)
            self._staleness.append(staleness)
        else:
            schedule.ended(trip)
            refused = FAILED if trip in self.failed and staleness <= self.limit else LATE
            self.trips.end(trip, now, version, DROPPED if ending == DROPS else refused if ending == ARRIVES else LATE)
            if self.trips.ended - self._ended_at_step > patience(schedule.buffer_size):
                raise hopeless(self.trips.ended - self._ended_at_step, now, bool(self.failed))
        if schedule.full():
            self._step(now)
        else:
            self._start(schedule.start_trips(now))

    def _step(self, now: float) -> None:
        schedule, trips = self.schedule, self.trips
        known = self._weights
        weights = [known[staleness] if staleness in known else self.weight(staleness) for staleness in self._staleness]
        before = schedule.version
        for gone, _ in schedule.step():
            self.clock.cancel(gone)
            trips.end(gone, now, before, CANCELLED)
        for trip, weight in zip(self._buffer, weights, strict=True):
            trips.used(trip, weight, schedule.version)
        first = schedule.started
        self._start(schedule.start_trips(now))
        self._ended_at_step = trips.ended
        self.steps.add(schedule.version, self._buffer, weights, self._staleness, first, schedule.started, now, trips.ended)
        self._buffer, self._staleness = [], []

    def weight(self, staleness: int) -> float:
        """s(τ), checked."""
        self._weights[staleness] = weight = weight_of(self._weigh, staleness)
        return weight

    def _start(self, started: list[int]) -> None:
        clock, schedule = self.clock, self.schedule
        for trip in started:
            client, version = schedule.in_flight[trip]
            clock.start(trip, client)
            self.trips.started(client, self._examples[client] if self._examples else self.sizes(client), clock.now, version)
        at = schedule.wake()
        if at is not None:
            clock.wake(at)

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, Any]:
        """Everything but the table of trips and the steps to come, ready for JSON."""
        return {
            "schedule": self.schedule.state(),
            "clock": self.clock.state(),
            "buffer": [list(self._buffer), list(self._staleness)],
            "ended_at_step": self._ended_at_step,
            "failed": sorted(self.failed),
        }

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The state as it is now, for later: it may be cheaper to take than to write out."""
        state = self.state()
        return lambda: state

    def restore(self, state: dict[str, Any], failed: Iterable[int] | None = None) -> None:
        """Take over a state; `failed` are the trips known to fail by now, if not those of the state."""
        self.schedule.restore(state["schedule"])
        self.clock.restore(state["clock"])
        self.schedule.wake()  # the clock remembers it
        self._buffer, self._staleness = (list(part) for part in state["buffer"])
        self._ended_at_step, self.failed = state["ended_at_step"], set(state["failed"] if failed is None else failed)
        if self.ledger is not None:
            self.ledger.rewrite(*self.trips.admitted())


def patience(buffer_size: int) -> int:
    """So many trips without a server step, and none will come."""
    return max(_HOPELESS, 1000 * buffer_size)


def hopeless(ended: int, now: float, refused: bool) -> ValueError:
    """Nothing comes any more; `refused` is whether updates were, for not being finite."""
    why = "send updates that are not finite, " if refused else ""
    see = "the learning rates and the clients' data, " if refused else ""
    return ValueError(
        f"no server step in {ended:,} trips, up to virtual time {now:g}: "
        f"all trips {why}fail or come too late; see {see}dropout, timeout, max_staleness"
    )


def too_many_arrive(now: float) -> ValueError:
    return ValueError(
        f"start: {ARRIVALS_IN_VAIN:,} clients arrived in a row while nobody was free, up to virtual time {now:g}: "
        "give a lower rate, or more clients"
    )


def with_rate(start: StartingRule, clock: Clock, clients: int) -> StartingRule:
    """`arrivals(concurrency=…)` with the rate that gives it on this clock; any other rule as it is."""
    if not isinstance(start, arrivals):
        return start
    found = start
    if start.rate is None:
        mean = clock.mean_duration(clients)
        if not mean > 0:
            raise ValueError(f"start: {start} needs trips that take time; give a rate")
        found = start.at_mean_duration(mean * clock.of_the_free((start.concurrency or 0.0) / clients, clients))
    if (found.rate or 0.0) < _RAREST:
        raise ValueError(f"start: {start}: nobody arrives in a time that can be counted; expected a higher rate")
    return found
