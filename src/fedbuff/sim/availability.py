"""Availability: when a client can take part at all."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.core.random import unit, units

_KEPT = 1 << 20  # clients whose hours are remembered


@dataclass(frozen=True)
class windows:
    """Every client is there for `open` out of every `period` of virtual time, each at its own hour.

    A trip starts only inside its client's window; one still running when the window closes is dropped.
    """

    period: float
    open: float
    seed: int = 0

    def __post_init__(self) -> None:
        check.number(0, above=True, period=self.period)
        check.number(self.period / 1000, self.period, open=self.open)
        check.integer(0, seed=self.seed)

    @property
    def share(self) -> float:
        return self.open / self.period

    @property
    def retry(self) -> float:
        """How long the server waits before it looks again when nobody was there."""
        return self.open / 10

    def __call__(self, client: int, time: float) -> bool:
        # the margin: at the very moment of closing a window is closed, however the sums round
        return self.open == self.period or self._since_opening(client, time) < self.open - 1e-9 * self.period

    def which(self, clients: NDArray[np.int64], time: float) -> NDArray[np.bool_]:
        """The same for many clients at once."""
        if self.open == self.period:
            return np.ones(len(clients), bool)
        hours = _hours(self.seed)[clients] if not len(clients) or clients.max() < _KEPT else units(self.seed, "window", clients)
        there: NDArray[np.bool_] = (time + self.period * hours) % self.period < self.open - 1e-9 * self.period
        return there

    def closes(self, client: int, time: float) -> float:
        """When the window closes that is open for `client` at `time`."""
        if self.open == self.period:
            return float("inf")
        return time + self.open - self._since_opening(client, time)

    def _since_opening(self, client: int, time: float) -> float:
        return (time + self.period * unit(self.seed, "window", client)) % self.period


@lru_cache(maxsize=4)
def _hours(seed: int) -> NDArray[np.float64]:
    return units(seed, "window", np.arange(_KEPT))
