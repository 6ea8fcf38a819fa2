"""The buffer and the server optimizer: the half of the server that needs the model.

Δ̄ of Algorithm 1 is a running sum, so a buffer costs one vector however large K is. When to add and when to step is
`Schedule`'s business: `Server` plays the two together, the simulator lets the schedule run ahead.
"""

import math
from typing import Any

import numpy as np

from fedbuff.core.optimizers import Optimizer, State
from fedbuff.core.versions import Vector


class Aggregation:
    """The newest weights, the sum of weighted updates since the last server step, and the optimizer's state.

    The sum is divided by what is behind it, K updates or their examples; with `divisor`, by that, whatever came in.
    With `average`, a mean of about so many of the last versions goes along; no client starts from it.
    """

    def __init__(
        self,
        weights: Vector,
        optimizer: Optimizer,
        mixing: bool = False,
        divisor: int | None = None,
        average: int | None = None,
    ) -> None:
        self.weights = weights
        self.average = average
        self._optimizer, self._mixing, self._divisor = optimizer, mixing, divisor
        self._mean, self._averaged = weights, 0  # w̄, and how many versions are in it, up to `average`
        self._optimizer_state: State = optimizer.init(weights)
        self._sum: Vector = np.zeros_like(weights)  # Δ̄
        self._count = 0  # what Δ̄ is divided by: K, or the examples behind it
        self._scaled, self._next = np.empty_like(weights), np.empty_like(weights)

    def add(self, update: Vector, weight: float, examples: int = 1, start: Vector | None = None) -> str | None:
        """Δ̄ ← Δ̄ + weight · examples · Δ_i, or why not: then nothing has changed.

        `start` are the weights that the trip started from, which only `mixing` needs. Overflows are expected here and
        seen on the sum: call it under `np.errstate(over="ignore", invalid="ignore")`.
        """
        if self._mixing:
            update = self.weights - start + update  # type: ignore[operator]  # w − y_i
        np.multiply(update, weight * examples, out=self._scaled)
        np.add(self._sum, self._scaled, out=self._next)
        if not finite(self._next):
            return "the update overflows the buffer" if finite(update) else "the update is not finite"
        self._sum, self._next = self._next, self._sum
        self._count += examples
        return None

    def room(self) -> Vector:
        """A vector for a whole buffer's sum, made by somebody who has all its updates at once; see `add_sum`."""
        return self._next

    def add_sum(self, count: int) -> None:
        """Fill an empty buffer with the sum in `room()`: what `add` would have made, one after another, of finite updates."""
        self._sum, self._next = self._next, self._sum
        self._count += count

    def step(self, staleness: int, noise: Vector | None = None) -> Vector:
        """Take the server step, w ← w − η_g Δ̄ / K or what the optimizer makes of it. `staleness` is the buffer's largest.

        `noise` is added to the sum Δ̄ before the division, in its own precision: a noise stream's increment.
        """
        if noise is not None:
            np.add(self._sum, noise, out=self._sum, casting="same_kind")
        mean = self._sum / (self._divisor or self._count)
        w, self._optimizer_state = self._optimizer.step(self.weights, mean, self._optimizer_state, staleness)
        self.weights = w.astype(self.weights.dtype, copy=False)
        if self.average is not None:
            n = self._averaged = min(self._averaged + 1, self.average)
            # w̄ ← w̄ + (w − w̄) / min(t, average); the first is w itself, to the last digit
            self._mean = self._mean + (self.weights - self._mean) / n if n > 1 else self.weights
        self.clear()
        return self.weights

    @property
    def model(self) -> Vector:
        """What to evaluate and to hand out: the average of the last versions, if there is one, else the newest weights."""
        return self.weights if self.average is None else self._mean

    def end_with(self, model: Vector) -> None:
        """The run ended at an earlier step, with this model: no step comes after it."""
        self.weights = self._mean = model

    def clear(self) -> None:
        """Δ̄ ← 0."""
        self._sum.fill(0)
        self._count = 0

    def state(self) -> tuple[dict[str, Vector], dict[str, Any]]:
        """Everything `restore` needs but the weights: arrays, and facts ready for JSON."""
        optimizer = {f"optimizer.{name}": array for name, array in self._optimizer_state.items()}
        average = {} if self.average is None else {"average": self._mean}
        return {"buffer": self._sum.copy(), **average, **optimizer}, {"count": self._count, "averaged": self._averaged}

    def restore(self, weights: Vector, arrays: dict[str, Vector], facts: dict[str, Any]) -> None:
        self.weights, self._sum, self._count = weights, np.array(arrays["buffer"]), facts["count"]
        if self.average is not None and "average" not in arrays:
            raise ValueError(
                f"average={self.average}: the state has no mean of versions; it is that of a server without average"
            )
        self._mean, self._averaged = arrays.get("average", weights), facts.get("averaged", 0)
        self._optimizer_state = {name[10:]: array for name, array in arrays.items() if name.startswith("optimizer.")}


def finite(vector: Vector) -> bool:
    """Whether all numbers are finite: by their sum of squares, one fast pass, unless that overflows by itself."""
    return math.isfinite(np.dot(vector, vector)) or bool(np.isfinite(vector).all())
