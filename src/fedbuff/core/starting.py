"""Starting rules: when do trips start? Together with the buffer size they make every algorithm of the paper.

A rule says how many trips to start now, and when the next client arrives by itself (if clients do). It says nothing about
who starts: clients are chosen at random among those who are free.
"""

import math
from dataclasses import dataclass, replace
from typing import Protocol

from fedbuff.core import check


class StartingRule(Protocol):
    @property
    def cancels(self) -> bool:
        """Whether a server step ends the trips still in flight."""

    def wanted(self, in_flight: int, buffered: int, arrived: int) -> int:
        """How many trips to start now; `arrived` clients have just come by themselves."""

    def arrival(self, number: int, previous: float, gap: float) -> float | None:
        """When client `number` (from 0) arrives, given a unit exponential `gap`; None if clients don't come by themselves."""

    def at_once(self) -> int:
        """Trips that the rule has in flight at a time; 1 if clients come by themselves, and there may be any number."""


@dataclass(frozen=True)
class refill:
    """A finished trip is replaced at once: `concurrency` trips are always in flight (FedBuff, FedAsync)."""

    concurrency: int

    def __post_init__(self) -> None:
        check.integer(1, concurrency=self.concurrency)

    cancels = False

    def wanted(self, in_flight: int, buffered: int, arrived: int) -> int:
        return self.concurrency - in_flight

    def arrival(self, number: int, previous: float, gap: float) -> float | None:
        return None

    def at_once(self) -> int:
        return self.concurrency


@dataclass(frozen=True)
class arrivals:
    """Clients arrive at a constant rate, the paper's own setting, or as a Poisson process.

    Give the `rate` (trips per unit of time), or the mean `concurrency` and let the simulator derive the rate from
    the mean duration. A client that arrives while nobody is free is lost.
    """

    rate: float | None = None
    concurrency: float | None = None
    poisson: bool = False

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.concurrency is None):
            raise ValueError(
                f"arrivals: give rate or concurrency, one of them (rate={self.rate}, concurrency={self.concurrency})"
            )
        if self.rate is not None:
            check.number(0, above=True, rate=self.rate)
        if self.concurrency is not None:
            check.number(0, above=True, concurrency=self.concurrency)
        check.switch(poisson=self.poisson)

    cancels = False

    def wanted(self, in_flight: int, buffered: int, arrived: int) -> int:
        return arrived

    def arrival(self, number: int, previous: float, gap: float) -> float | None:
        if self.rate is None:
            raise ValueError(
                f"arrivals(concurrency={self.concurrency}) needs a mean duration: use it in the simulator, or give rate"
            )
        return previous + gap / self.rate if self.poisson else number / self.rate

    def at_once(self) -> int:
        return 1

    def at_mean_duration(self, mean: float) -> "arrivals":
        """The same rule with its rate: concurrency = rate · mean duration (Little's law)."""
        return self if self.rate is not None else replace(self, rate=(self.concurrency or 0) / mean, concurrency=None)


@dataclass(frozen=True)
class cohort:
    """`size` trips start together after every server step (FedAvg and its kin).

    With over-selection ⌈size · (1 + over_selection)⌉ start; what has not arrived by the step is cancelled.
    With `poisson` every client is in a cohort with the same probability, independently, so that `size` is only the mean, as
    differential privacy's amplification by sampling wants it. The server steps when nobody is in flight any more, who dropped
    out is not replaced, and the sum is divided by `size` all the same.
    """

    size: int
    over_selection: float = 0.0
    poisson: bool = False

    def __post_init__(self) -> None:
        check.integer(1, size=self.size)
        check.number(0, 1e6, over_selection=self.over_selection)
        check.switch(poisson=self.poisson)
        if self.poisson and self.over_selection:
            raise ValueError(
                f"cohort: over_selection={self.over_selection} cancels the slowest, so with poisson=True who is in a cohort "
                "would depend on speed; give one of them"
            )

    cancels = True

    def wanted(self, in_flight: int, buffered: int, arrived: int) -> int:
        return self.at_once() - in_flight - buffered

    def arrival(self, number: int, previous: float, gap: float) -> float | None:
        return None

    def at_once(self) -> int:
        # 1e-9: 100 · 1.1 is 110.00000000000001 in floating point, and means 110
        return math.ceil(self.size * (1.0 + self.over_selection) - 1e-9)


def is_sampled(start: StartingRule) -> bool:
    """Whether cohorts are Poisson samples of all clients."""
    return isinstance(start, cohort) and start.poisson
