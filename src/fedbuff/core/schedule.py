"""Who is in flight, and who may start: the half of the server that does not need the model.

Who starts when, on which version, and how stale it arrives depends on timing, concurrency and K only. `Server` adds
weights to this; the timeline runs it alone.

A client is chosen at random among the free ones: not in flight, and not yet in the buffer, so that it contributes
at most once to a server step (the paper's Appendix D); and not at the limits of a ledger, if there is one. Memory is that of
the busy clients, however many there are.
"""

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.core.random import Stream
from fedbuff.core.starting import StartingRule, is_sampled

_TRIES = 64  # draws before the free clients are listed one by one
_MANY = 100_000  # so many clients are not asked one by one whether they are available


class Availability(Protocol):
    """When a client can start a trip; `share` of them can at any time, and `retry` is how long to wait when nobody can.

    With `which(clients, time)`, an array of answers, it is asked for many at once where few are there.
    """

    @property
    def share(self) -> float: ...

    @property
    def retry(self) -> float: ...

    def __call__(self, client: int, time: float) -> bool: ...


class Limits(Protocol):
    """How often clients may take part: see `privacy/ledger.py`."""

    def allowed(self, client: int, step: int) -> bool: ...

    def free(self, step: int) -> NDArray[np.bool_]: ...


class Schedule:
    """Trips in flight, the version, and the count of the buffer.

    `in_flight` maps a trip to its client and start version. The caller reports every ended trip with `arrived` or
    `ended`, takes `step` when the buffer is `full`, and then calls `start_trips`.
    """

    def __init__(
        self,
        start: StartingRule,
        buffer_size: int,
        clients: int,
        seed: int = 0,
        available: Availability | None = None,
        limits: Limits | None = None,
    ) -> None:
        check_fits(start, buffer_size, clients)
        self.sampled = is_sampled(start)
        self.start, self.buffer_size, self.clients, self.available = start, buffer_size, clients, available
        self.limits = limits
        self.version = 0
        self.in_flight: dict[int, tuple[int, int]] = {}
        self.buffered: list[int] = []  # clients in the buffer
        self.started = 0
        self._busy: set[int] = set()
        self.choices, self._draws = Stream(seed, "choice"), 0
        self.gaps = Stream(seed, "arrival", lambda rng, n: rng.exponential(size=n))
        self._cohorts, self._gathered = Stream(seed, "cohort"), -1  # the version that the last Poisson cohort started on
        self._arrivals, self._next_arrival = 0, start.arrival(0, 0.0, 0.0)  # the first comes at once
        self._origin = 0.0
        self._wake: float | None = None  # to be told by `wake`
        self._retry_at: float | None = None  # the one wake-up pending because nobody was there

    def begin(self, time: float) -> list[int]:
        """The first trips; arrivals are counted from `time`."""
        self._origin = time
        return self.start_trips(time)

    def start_trips(self, time: float) -> list[int]:
        """Start as many trips as the rule wants now, on the current version."""
        arrived = 0
        while self._next_arrival is not None and self._origin + self._next_arrival <= time:
            arrived += 1
            self._arrivals += 1
            self._next_arrival = self.start.arrival(self._arrivals, self._next_arrival, self.gaps[self._arrivals])
            self._wake = self._origin + (self._next_arrival or 0.0)
        trips = []
        for _ in range(self._wanted(arrived)):
            client = self._choose(time)
            if client is None:
                self._look_again(time)
                break
            self._busy.add(client)
            self.in_flight[self.started] = (client, self.version)
            trips.append(self.started)
            self.started += 1
        return trips

    def full(self) -> bool:
        """Whether it is time for a server step: the buffer holds K, or everybody of a Poisson cohort has arrived or failed."""
        if self.sampled:
            return not self.in_flight and self._gathered == self.version
        return len(self.buffered) == self.buffer_size

    def _wanted(self, arrived: int) -> int:
        if not self.sampled:
            return self.start.wanted(len(self.in_flight), len(self.buffered), arrived)
        if self._gathered == self.version:
            return 0
        self._gathered = self.version
        return binomial(self._cohorts[self.version], self.clients, self.buffer_size / self.clients)

    def exhausted(self) -> bool:
        """Whether nothing will happen any more: nobody is in flight, no step is due, and the limits let no client take part."""
        if self.limits is None or self.in_flight or self.full():
            return False
        return not self.limits.free(self.version).any()

    def _look_again(self, time: float) -> None:
        """Nobody could start: ask for a wake-up, unless clients come by themselves or one is pending."""
        pending = self._retry_at is not None and self._retry_at > time
        if self.available is not None and self._next_arrival is None and not pending:
            self._retry_at = self._wake = time + self.available.retry

    def wake(self) -> float | None:
        """When to call `start_trips` again even if nothing happens; told once."""
        at, self._wake = self._wake, None
        return at

    def arrived(self, trip: int) -> None:
        """Move a trip from flight into the buffer."""
        client, _ = self.in_flight.pop(trip)
        self.buffered.append(client)

    def left(self, trip: int) -> None:
        """A trip that had waited starts from the current version after all."""
        self.in_flight[trip] = self.in_flight[trip][0], self.version

    def ended(self, trip: int) -> None:
        """A trip ended without an update in the buffer: its client is free again."""
        client, _ = self.in_flight.pop(trip)
        self._busy.remove(client)

    def step(self) -> list[tuple[int, int]]:
        """Empty the buffer and count a version; the trips cancelled by it, with their start versions."""
        self._busy.difference_update(self.buffered)
        self.buffered.clear()
        self.version += 1
        if not self.start.cancels:
            return []
        cancelled = [(trip, version) for trip, (_, version) in self.in_flight.items()]
        for trip, _ in cancelled:
            self.ended(trip)
        return cancelled

    def _choose(self, time: float) -> int | None:
        """A free client, each equally likely, or None."""
        n, busy, available, limits = self.clients, self._busy, self.available, self.limits
        if len(busy) >= n:
            return None
        self._draws += 1
        client = int(self.choices[self._draws] * n)
        if available is None and limits is None and client not in busy:  # nearly always
            return client
        for _ in range(_TRIES):
            may = limits is None or limits.allowed(client, self.version)
            if client not in busy and may and (available is None or available(client, time)):
                return client
            client = int(self._draw() * n)
        return self._choose_of_few(time)

    def _choose_of_few(self, time: float) -> int | None:
        """The same where few clients are free, or none: more draws, all at once, and then from a list of the free."""
        n, available = self.clients, self.available
        more = 0 if available is None else math.ceil(_TRIES / available.share) - _TRIES
        end, size, there = self._draws + more, 4 * _TRIES, None
        if n <= more or available is None:  # quickly asked, and perhaps nobody is there
            there = self._may_start(np.arange(n), time)
            if not there.any():
                self._draws = end
                return None
        while self._draws < end:
            first, self._draws = self._draws, min(end, self._draws + size)
            drawn = (self.choices.between(first, self._draws) * n).astype(np.int64)
            hits = np.flatnonzero(self._may_start(drawn, time) if there is None else there[drawn])
            if len(hits):
                self._draws = first + int(hits[0])
                return int(drawn[hits[0]])
            size *= 2
        if available is not None and n > _MANY:
            return None
        free = np.flatnonzero(self._may_start(np.arange(n), time) if there is None else there)
        return int(free[int(self._draw() * len(free))]) if len(free) else None

    def _may_start(self, clients: NDArray[np.int64], time: float) -> NDArray[np.bool_]:
        """Which of these clients are not busy, are there, and are not at a limit."""
        busy, available = np.fromiter(self._busy, np.int64, len(self._busy)), self.available
        may: NDArray[np.bool_] = ~np.isin(clients, busy)
        if self.limits is not None:
            may &= self.limits.free(self.version)[clients]
        if available is not None:
            may[may] = _which(available, clients[may], time)
        return may

    def _draw(self) -> float:
        self._draws += 1
        return self.choices[self._draws]

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, ready for JSON."""
        return {
            "version": self.version,
            "in_flight": [[trip, client, version] for trip, (client, version) in self.in_flight.items()],
            "buffered": list(self.buffered),
            "started": self.started,
            "draws": self._draws,
            "arrivals": self._arrivals,
            "next_arrival": self._next_arrival,
            "origin": self._origin,
            "retry_at": self._retry_at,
            "gathered": self._gathered,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a state; `wake` then tells the wake-up that was pending, for a driver that has forgotten it."""
        self.version, self.started, self._draws = state["version"], state["started"], state["draws"]
        self._arrivals, self._next_arrival, self._origin = state["arrivals"], state["next_arrival"], state["origin"]
        self.in_flight = {trip: (client, version) for trip, client, version in state["in_flight"]}
        self.buffered = list(state["buffered"])
        self._busy = {client for client, _ in self.in_flight.values()} | set(self.buffered)
        self._retry_at, self._gathered = state["retry_at"], state["gathered"]
        self._wake = self._retry_at if self._next_arrival is None else self._origin + self._next_arrival


def _which(available: Availability, clients: NDArray[np.int64], time: float) -> NDArray[np.bool_]:
    """Who of these is there: asked at once, unless a subclass has another answer for each."""
    answers = next((kind for kind in type(available).__mro__ if "__call__" in vars(kind)), None)
    if answers is not None and "which" in vars(answers):
        found: NDArray[np.bool_] = available.which(clients, time)  # type: ignore[attr-defined]
        return found
    return np.array([available(int(client), time) for client in clients], bool)


def check_fits(start: StartingRule, buffer_size: int, clients: int) -> None:
    """Refuse a rule and a buffer that so many clients can't fill, or that don't go together."""
    check.integer(1, check.MOST, buffer_size=buffer_size)
    if clients < max(start.at_once(), buffer_size):
        raise ValueError(
            f"{clients} clients are too few for {start} and buffer_size={buffer_size}: "
            f"it takes at least {max(start.at_once(), buffer_size)}, as a client trains one trip at a time and "
            f"contributes at most once to a buffer"
        )
    if start.cancels and buffer_size > start.at_once():
        raise ValueError(
            f"buffer_size={buffer_size} is never reached by {start}: it starts {start.at_once()} trips per server step"
        )
    if is_sampled(start) and buffer_size != start.at_once():
        raise ValueError(f"buffer_size={buffer_size}: a Poisson cohort's sum is divided by its mean size, {start.at_once()}")


def binomial(uniform: float, n: int, p: float) -> int:
    """How many of `n` come if each does with probability `p`, from one uniform number: the inverse of the distribution.

    >>> binomial(0.5, 1000, 0.01), binomial(0.0, 1000, 0.01)
    (10, 0)
    """
    if p >= 1.0:
        return n
    odds, mode = p / (1.0 - p), min(n, int((n + 1) * p))
    at_mode = math.exp(
        math.lgamma(n + 1)
        - math.lgamma(mode + 1)
        - math.lgamma(n - mode + 1)
        + mode * math.log(p)
        + (n - mode) * math.log1p(-p)
    )
    below: list[float] = []  # P(mode − 1), P(mode − 2), … down to what does not count
    mass, k = at_mode, mode
    while k > 0 and mass > 1e-18:
        mass *= k / (n - k + 1) / odds
        k -= 1
        below.append(mass)
    mass, total = at_mode, 0.0
    for j, part in enumerate(reversed(below)):
        total += part
        if uniform < total:
            return mode - len(below) + j
    k = mode
    while total + mass <= uniform and k < n and mass > 1e-18:
        total += mass
        mass *= (n - k) / (k + 1) * odds
        k += 1
    return k
