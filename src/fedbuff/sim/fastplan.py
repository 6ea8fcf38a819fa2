"""The plan of plan.py, compiled (plan.cpp): the same trips and steps, bit for bit, many times faster.

The plan in Python says what is meant, and is what runs where this one can't: without a compiler, for clients with hours of
availability or participations that are limited, for Poisson cohorts, and for starting rules of a user's own.
"""

import ctypes
import math
from array import array
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedbuff.compiled import load
from fedbuff.core.starting import arrivals, cohort, refill
from fedbuff.core.trips import COLUMNS, IN_FLIGHT, Trips
from fedbuff.sim.clock import WAKES, nothing_left
from fedbuff.sim.plan import ARRIVALS_IN_VAIN, Plan, hopeless, patience, too_many_arrive
from fedbuff.sim.steps import Steps

_SOURCE = Path(__file__).with_name("plan.cpp")
# sums and products are rounded one by one, as in Python
_FLAGS = ("-O2", "-std=c++17", "-ffp-contract=off")
_FUNCTIONS = {
    "plan_new": "p->p",
    "plan_free": "p",
    "plan_begin": "p->i",
    "plan_run": "piid->i",
    "plan_follow": "pi->i",
    "plan_upcoming": "p->d",
    "plan_ends": "pippp->i",
    "plan_restore": "pipipippp",
}
_MOST = (1 << 63) - 1
_MANY_CLIENTS = 1 << 33  # a bit for each of them is too much
_REACHED, _TRIPS, _TIME, _RAISED, _HOPELESS, _NOTHING, _BAD_DURATION, _NO_MEMORY, _IN_VAIN = range(9)
_DRAW = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(ctypes.c_double))
_ASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_double))
_GROW = ctypes.CFUNCTYPE(ctypes.c_int)


class _Facts(ctypes.Structure):
    """What both sides see: `Facts` of plan.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*COLUMNS, "order")),
        *((name, ctypes.c_int64) for name in ("capacity", "started", "ended", "version", "in_flight", "buffered", "first")),
        ("ended_at_step", ctypes.c_int64),
        ("now", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("draws", "arrivals")),
        *((name, ctypes.c_double) for name in ("next_arrival", "origin")),
        *((name, ctypes.c_void_p) for name in ("buffer", "staleness", "weights")),
        *((name, ctypes.c_int64) for name in ("hopeless", "arrivals_in_vain")),
        ("bad_duration", ctypes.c_double),
        ("bad_trip", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("rule", "most", "poisson", "buffer_size", "clients", "limit", "scaled")),
        *((name, ctypes.c_double) for name in ("rate", "dropout", "timeout", "per_time")),
        ("sizes", ctypes.c_void_p),
        ("draw", _DRAW),
        *((name, _ASK) for name in ("ask_factor", "ask_weight", "ask_examples")),
        ("grow", _GROW),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    return load(_SOURCE, _FLAGS, _FUNCTIONS, "the plan runs in Python")


def fastest(**settings: Any) -> "Plan | FastPlan":
    """A `Plan` of these settings, compiled if that can be."""
    settings["sizes"].fit(settings["clients"])
    plan = Plan(**settings)
    known = type(plan.schedule.start) in (refill, arrivals, cohort) and not plan.schedule.sampled
    ours = known and plan.schedule.clients < _MANY_CLIENTS and plan.ledger is None
    library = _library() if ours and plan.clock.availability is None else None
    return plan if library is None else FastPlan(plan, library)


class FastPlan:
    """A plan that has not begun yet, from now on compiled."""

    def __init__(self, plan: Plan, library: ctypes.CDLL) -> None:
        self.trips, self.failed, self.steps = Trips(), frozenset[int](), Steps()
        self._plan, self._library = plan, library
        clock, start, size = plan.clock, plan.schedule.start, plan.schedule.buffer_size
        self._buffer, self._staleness, self._weights = array("q", [0]) * size, array("q", [0]) * size, array("d", [0.0]) * size
        self._sizes = None if plan.sizes.listed is None else array("q", plan.sizes.listed)
        self._streams = (plan.schedule.choices, clock.durations, clock.fates, clock.moments, plan.schedule.gaps)
        self._raised: BaseException | None = None
        self._facts = _Facts(
            buffer=self._buffer.buffer_info()[0],
            staleness=self._staleness.buffer_info()[0],
            weights=self._weights.buffer_info()[0],
            hopeless=patience(size),
            arrivals_in_vain=ARRIVALS_IN_VAIN,
            rule=(refill, arrivals, cohort).index(type(start)),
            most=start.at_once(),
            poisson=getattr(start, "poisson", False),
            buffer_size=size,
            clients=plan.schedule.clients,
            limit=_MOST if plan.limit == math.inf else int(plan.limit),
            scaled=clock.scaled,
            rate=getattr(start, "rate", 0.0),
            dropout=clock.dropout,
            timeout=math.inf if clock.timeout is None else clock.timeout,
            per_time=clock.per_time,
            sizes=None if self._sizes is None else self._sizes.buffer_info()[0],
            draw=_DRAW(self._draw),
            ask_factor=_ASK(self._asked(clock.factor)),
            ask_weight=_ASK(self._asked(plan.weight)),
            ask_examples=_ASK(self._asked(plan.sizes)) if plan.sizes.asked else _ASK(),
            grow=_GROW(self._grow),
        )
        self._grow()
        self._object = library.plan_new(ctypes.addressof(self._facts))

    def __del__(self) -> None:
        if hasattr(self, "_object"):
            self._library.plan_free(self._object)

    # ── what plan.cpp asks ───────────────────────────────────────────────────────────────────────────────────────────

    def _asked(self, function: Callable[[int], float]) -> Callable[[int, Any], int]:
        def answer(number: int, into: Any) -> int:
            try:
                into[0] = function(number)
            except BaseException as e:  # handed to whoever called
                self._raised = e
                return 1
            return 0

        return answer

    def _draw(self, stream: int, block: int, into: Any) -> int:
        try:
            drawn = self._streams[stream].block(block)
            ctypes.memmove(into, drawn.ctypes.data, drawn.nbytes)
        except BaseException as e:
            self._raised = e
            return 1
        return 0

    def _grow(self) -> int:
        try:
            self.trips.grow()
            self._point()
        except BaseException as e:
            self._raised = e
            return 1
        return 0

    def _point(self) -> None:
        """Tell where the columns are."""
        for name in (*COLUMNS, "order"):
            setattr(self._facts, name, getattr(self.trips, name).buffer_info()[0])
        self._facts.capacity = len(self.trips.client)

    # ── the plan ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def version(self) -> int:
        return int(self._facts.version)

    @property
    def in_flight(self) -> int:
        return int(self._facts.in_flight)

    @property
    def now(self) -> float:
        return float(self._facts.now)

    exhausted = False  # there are no limits here

    def upcoming(self) -> float:
        at = float(self._library.plan_upcoming(self._object))
        if math.isnan(at):
            raise nothing_left(self.now)
        return at

    def mean_in_flight(self) -> float:
        return self._plan.mean_in_flight()

    def begin(self) -> None:
        self._done(self._library.plan_begin(self._object))

    def run(self, version: int, most_trips: float = math.inf, before: float = math.inf) -> bool:
        facts, most = self._facts, _MOST if most_trips == math.inf else math.ceil(most_trips)
        while facts.version < version:
            if not self._done(self._library.plan_run(self._object, facts.version + 1, most, before)):
                return False
            buffer = self._buffer, self._weights, self._staleness
            self.steps.add(facts.version, *buffer, facts.first, facts.started, facts.now, facts.ended)
        return True

    def follow(self, count: int) -> None:
        self._done(self._library.plan_follow(self._object, count))

    def _done(self, how: int) -> bool:
        """Whether a call has reached its end, or only a limit."""
        facts = self._facts
        self.trips.counted(facts.started, facts.ended)
        if how == _REACHED:
            return True
        if how in (_TRIPS, _TIME):
            return False
        if how == _HOPELESS:
            raise hopeless(facts.ended - facts.ended_at_step, facts.now, bool(self.failed))
        if how == _NOTHING:
            raise nothing_left(facts.now)
        if how == _BAD_DURATION:
            raise self._plan.clock.bad_duration(facts.bad_duration, facts.bad_trip)
        if how == _IN_VAIN:
            raise too_many_arrive(facts.now)
        if how == _NO_MEMORY:
            raise MemoryError(f"no room for what is to come after virtual time {facts.now:g}")
        assert self._raised is not None
        raise self._raised

    # ── what is kept, as plan.py keeps it ────────────────────────────────────────────────────────────────────────────

    def state(self) -> dict[str, Any]:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        f = _Facts.from_buffer_copy(self._facts)
        count = room = self._library.plan_ends(self._object, 0, None, None, None)
        times, numbers, endings = np.empty(room), np.empty(room, np.int64), np.empty(room, np.int64)
        self._library.plan_ends(self._object, room, *(a.ctypes.data for a in (times, numbers, endings)))
        is_trip = endings[:count] != WAKES
        trips = numbers[is_trip]
        flying = np.frombuffer(self.trips.outcome, np.uint8)[trips] == IN_FLIGHT
        in_flight, cancelled = np.sort(trips[flying]), np.sort(trips[~flying])
        buffer, staleness, failed = self._buffer[: f.buffered], self._staleness[: f.buffered], sorted(self.failed)

        def state() -> dict[str, Any]:
            client, version = self.trips.client, self.trips.start_version
            return {
                "schedule": {
                    "version": f.version,
                    "in_flight": [[trip, client[trip], version[trip]] for trip in in_flight.tolist()],
                    "buffered": [client[trip] for trip in buffer],
                    "started": f.started,
                    "draws": f.draws,
                    "arrivals": f.arrivals,
                    "next_arrival": f.next_arrival if isinstance(self._plan.schedule.start, arrivals) else None,
                    "origin": f.origin,
                    "retry_at": None,
                    "gathered": -1,
                },
                "clock": {
                    "now": f.now,
                    "ends": list(zip(times.tolist(), numbers.tolist(), endings.tolist(), strict=True)),
                    "cancelled": cancelled.tolist(),
                },
                "buffer": [buffer.tolist(), staleness.tolist()],
                "ended_at_step": f.ended_at_step,
                "failed": failed,
            }

        return state

    def restore(self, state: dict[str, Any], failed: Iterable[int] | None = None) -> None:
        f, schedule, clock = self._facts, state["schedule"], state["clock"]
        self._point()
        for name in ("version", "started", "draws", "arrivals", "origin"):
            setattr(f, name, schedule[name])
        f.now, f.ended, f.ended_at_step = clock["now"], self.trips.ended, state["ended_at_step"]
        f.next_arrival = schedule["next_arrival"] or 0.0
        f.in_flight, f.buffered = len(schedule["in_flight"]), len(schedule["buffered"])
        f.first = min((trip for trip, _, _ in schedule["in_flight"]), default=f.started)  # for what a cohort's step cancels
        for into, values in zip((self._buffer, self._staleness), state["buffer"], strict=True):
            into[: len(values)] = array("q", values)
        self.failed = frozenset(state["failed"] if failed is None else failed)
        busy = array("q", [client for _, client, _ in schedule["in_flight"]] + schedule["buffered"])
        fails = array("q", sorted(self.failed))
        times, trips, endings = zip(*clock["ends"], strict=True) if clock["ends"] else ((), (), ())
        columns = array("d", times), array("q", trips), array("q", endings)
        self._library.plan_restore(
            self._object, len(busy), busy.buffer_info()[0], len(fails), fails.buffer_info()[0],
            len(times), *(column.buffer_info()[0] for column in columns),
        )  # fmt: skip


AnyPlan = Plan | FastPlan
