"""The virtual clock: when each trip ends, and how.

The ends to come, (time, trip, ending), lie in buckets of time, and only the bucket at hand is sorted: a heap of all of them
would be slower the more trips are in flight. Ties end in the order the trips started, wake-ups come after them, so that a
run is repeatable. What a trip's end *means* is the server's business.
"""

import heapq
import math
from bisect import insort
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.core.random import Draw, Stream, generator
from fedbuff.sim.availability import windows
from fedbuff.sim.timing import Sizes, factor, mean_duration, some_factors

ARRIVES, DROPS, TIMES_OUT, WAKES = range(4)
_PATIENCE = 100_000  # wake-ups in a row with no trip under way
End = tuple[float, int, int]
_NEVER = 1 << 62  # sorts a wake-up behind the trips that end at the same time


class Clock:
    """Virtual time.

    timing        durations, see `fedbuff.sim.timing`
    dropout       probability that a client drops out, at a uniformly random moment of its trip
    timeout       a trip is given up after so long
    availability  windows in which clients are there
    """

    def __init__(
        self,
        timing: Draw,
        seed: int,
        examples: Sizes,
        dropout: float = 0.0,
        timeout: float | None = None,
        availability: windows | None = None,
    ) -> None:
        check.number(0, 1, dropout=dropout)
        if timeout is not None:
            check.number(0, above=True, timeout=timeout)
        self.now = 0.0
        self.timing, self.seed, self._examples = timing, seed, examples
        self.durations = Stream(seed, "duration", timing)
        self.fates, self.moments = Stream(seed, "dropout"), Stream(seed, "dropout moment")
        self.dropout, self.timeout, self.availability = dropout, timeout, availability
        self.scaled = hasattr(timing, "factor")
        self._buckets: dict[int, list[End]] = {}
        self._numbers: list[int] = []  # of the buckets, a heap
        mean = float(np.mean(timing(generator(seed, "buckets"), 256)))
        self.per_time = 256 / mean if 0 < mean < math.inf else 1.0  # buckets
        self._ends: list[End] = []  # the bucket at hand, and what came before it since; sorted
        self._position, self._number = 0, -1  # the first end in there that is still to come; the bucket's number
        self._cancelled: set[int] = set()
        self._idle = 0

    def start(self, trip: int, client: int) -> None:
        """A trip starts now: draw when and how it will end."""
        duration, ending = self.durations[trip], ARRIVES
        if self.scaled:
            duration *= self.factor(client)
        if not 0.0 <= duration < math.inf:
            raise self.bad_duration(duration, trip)
        if self.dropout and self.fates[trip] < self.dropout:
            duration, ending = duration * self.moments[trip], DROPS
        if self.availability is not None:
            left = self.availability.closes(client, self.now) - self.now
            if duration > left:
                duration, ending = left, DROPS
        if self.timeout is not None and duration > self.timeout:
            duration, ending = self.timeout, TIMES_OUT
        self._put((self.now + duration, trip, ending))
        self._idle = 0

    def bad_duration(self, duration: float, trip: int) -> ValueError:
        return ValueError(f"timing: {self.timing} drew the duration {duration} for trip {trip}; expected a finite one >= 0")

    def factor(self, client: int) -> float:
        """What the durations of a client are multiplied by."""
        return factor(self.timing, self.seed, client, self._examples(client))

    def _put(self, end: End) -> None:
        number = int(end[0] * self.per_time)
        if number <= self._number:
            insort(self._ends, end, lo=self._position)
        elif number in self._buckets:
            self._buckets[number].append(end)
        else:
            self._buckets[number] = [end]
            heapq.heappush(self._numbers, number)

    def mean_duration(self, clients: int) -> float:
        """How long a trip by a random client is under way, on average, drop-outs, time-outs and closing windows included."""
        mean = mean_duration(self.timing, self.seed, clients, self._examples)
        if not self.dropout and self.timeout is None and self.availability is None:
            return mean
        rng = generator(self.seed, "mean time under way")
        durations = self.timing(rng, 100_000)
        durations = durations * rng.choice(some_factors(self.timing, self.seed, clients, self._examples), len(durations))
        durations = np.where(rng.random(len(durations)) < self.dropout, durations * rng.random(len(durations)), durations)
        if self.availability is not None and self.availability.share < 1:
            durations = np.minimum(durations, self.availability.open * rng.random(len(durations)))
        return float(np.minimum(durations, math.inf if self.timeout is None else self.timeout).mean())

    def of_the_free(self, share: float, clients: int) -> float:
        """The mean factor of who starts a trip, relative to that of all, if this share of clients is on one at any time.

        Who starts is drawn from those that are not under way, and slow ones are so less often. Each is drawn at the same rate
        x while it is free, so that it is under way x d / (1 + x d) of the time, d its mean duration: x is what gives `share`.
        """
        factors = np.array(some_factors(self.timing, self.seed, clients, self._examples))
        if share <= 0 or factors.min() == factors.max():
            return 1.0
        durations = self._under_way(factors)
        relative = durations / durations.mean()
        share = min(share, 1 - 0.5 / clients)  # that of all clients would take a rate without end
        low, high = 0.0, 1.0
        while np.mean(high * relative / (1 + high * relative)) < share and high < 1e12:
            high *= 2
        for _ in range(60):
            x = (low + high) / 2
            low, high = (x, high) if np.mean(x * relative / (1 + x * relative)) < share else (low, x)
        return share / (low * (1 - share))

    def _under_way(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """How long trips of clients with these factors are under way on average, relative to each other."""
        if self.timeout is None:
            return factors
        rng = generator(self.seed, "mean time of each")
        base = self.timing(rng, 2_000)
        base = np.where(rng.random(len(base)) < self.dropout, base * rng.random(len(base)), base)
        return np.array([np.minimum(factor * base, self.timeout).mean() for factor in factors])

    def wake(self, at: float) -> None:
        self._put((at, _NEVER, WAKES))

    def cancel(self, trip: int) -> None:
        self._cancelled.add(trip)

    def next(self) -> End:
        """Move on to the next end of a trip, or wake-up: (time, trip, ending)."""
        if self._cancelled or self._position == len(self._ends):
            self.upcoming()
        end = self._ends[self._position]
        self._position += 1
        self.now = end[0]
        if end[2] == WAKES and not self._numbers and self._position == len(self._ends):
            self._idle += 1
            if self._idle > _PATIENCE:
                raise ValueError(
                    f"nobody was available for any trip up to virtual time {self.now:g}, however often the server looked"
                )
        return end

    def upcoming(self) -> float:
        """The time that `next` would move to."""
        cancelled = self._cancelled
        while True:
            if self._position == len(self._ends):
                if not self._numbers:
                    raise nothing_left(self.now)
                self._number = heapq.heappop(self._numbers)
                self._ends, self._position = sorted(self._buckets.pop(self._number)), 0
            end = self._ends[self._position]
            if end[1] not in cancelled:
                return end[0]
            cancelled.remove(end[1])
            self._position += 1

    def state(self) -> dict[str, Any]:
        ends = [*self._ends[self._position :], *(end for bucket in self._buckets.values() for end in bucket)]
        return {"now": self.now, "ends": ends, "cancelled": sorted(self._cancelled)}

    def restore(self, state: dict[str, Any]) -> None:
        self.now, self._cancelled = state["now"], set(state["cancelled"])
        self._buckets, self._numbers, self._ends, self._position, self._number = {}, [], [], 0, -1
        for time, trip, ending in state["ends"]:
            self._put((time, trip, ending))


def nothing_left(now: float) -> ValueError:
    return ValueError(f"no trip is in flight at virtual time {now:g} and none can start: nothing will happen any more")
