"""The virtual clock: when each trip ends, and how.

A heap of (time, trip, ending). Ties end in the order the trips started, wake-ups come after them, so that a run is
repeatable. What a trip's end *means* is the server's business.
"""

import heapq
from collections.abc import Callable
from typing import Any

from fedbuff.core import check
from fedbuff.core.random import Draw, Stream
from fedbuff.sim.availability import windows
from fedbuff.sim.timing import factor

ARRIVES, DROPS, TIMES_OUT, WAKES = range(4)
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
        examples: Callable[[int], int],
        dropout: float = 0.0,
        timeout: float | None = None,
        availability: windows | None = None,
    ) -> None:
        check.number(0, 1, dropout=dropout)
        if timeout is not None:
            check.number(0, above=True, timeout=timeout)
        self.now = 0.0
        self._timing, self._seed, self._examples = timing, seed, examples
        self._durations = Stream(seed, "duration", timing)
        self._fates, self._moments = Stream(seed, "dropout"), Stream(seed, "dropout moment")
        self._dropout, self._timeout, self._availability = dropout, timeout, availability
        self._scaled = hasattr(timing, "factor")
        self._ends: list[tuple[float, int, int]] = []
        self._cancelled: set[int] = set()

    def start(self, trip: int, client: int) -> None:
        """A trip starts now: draw when and how it will end."""
        duration, ending = self._durations[trip], ARRIVES
        if self._scaled:
            duration *= factor(self._timing, self._seed, client, self._examples(client))
        if not duration >= 0.0:
            raise ValueError(f"timing {self._timing} drew the duration {duration} for trip {trip}; durations are >= 0")
        if self._dropout and self._fates[trip] < self._dropout:
            duration, ending = duration * self._moments[trip], DROPS
        if self._availability is not None:
            left = self._availability.closes(client, self.now) - self.now
            if duration > left:
                duration, ending = left, DROPS
        if self._timeout is not None and duration > self._timeout:
            duration, ending = self._timeout, TIMES_OUT
        heapq.heappush(self._ends, (self.now + duration, trip, ending))

    def wake(self, at: float) -> None:
        heapq.heappush(self._ends, (at, _NEVER, WAKES))

    def cancel(self, trip: int) -> None:
        self._cancelled.add(trip)

    def next(self) -> tuple[float, int, int]:
        """Move on to the next end of a trip, or wake-up: (time, trip, ending)."""
        self.now = self.upcoming()
        return heapq.heappop(self._ends)

    def upcoming(self) -> float:
        """The time that `next` would move to."""
        ends, cancelled = self._ends, self._cancelled
        while cancelled and ends and ends[0][1] in cancelled:
            cancelled.remove(heapq.heappop(ends)[1])
        if not ends:
            raise ValueError(
                f"no trip is in flight at virtual time {self.now:g} and none can start: nothing will happen any more"
            )
        return ends[0][0]

    def state(self) -> dict[str, Any]:
        return {"now": self.now, "ends": self._ends, "cancelled": sorted(self._cancelled)}

    def restore(self, state: dict[str, Any]) -> None:
        self.now, self._cancelled = state["now"], set(state["cancelled"])
        self._ends = [(time, trip, ending) for time, trip, ending in state["ends"]]
