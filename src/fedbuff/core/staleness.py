"""Staleness weights s(τ): how much an update counts that is τ server steps old. Any `int -> float` will do.

A fresh update (τ = 0) weighs 1 in all of these. `hinge` and `polynomial` are those of Xie et al. (2019).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check

Weigh = Callable[[int], float]


def weight_of(weigh: Weigh, staleness: int) -> float:
    """s(τ), checked: any function may be a weighting.

    >>> weight_of(polynomial(0.5), 3)
    0.5
    """
    try:
        weight = float(weigh(staleness))
    except TypeError as e:
        raise ValueError(f"weigh({staleness}) returned no number ({e}); a staleness weight is finite and >= 0") from e
    if not 0.0 <= weight < np.inf:
        raise ValueError(f"weigh({staleness}) returned {weight}; a staleness weight is finite and >= 0")
    return weight


@dataclass(frozen=True)
class constant:
    """Always `value`: as a weight s(τ) = value, as a timing model every trip takes `value`."""

    value: float = 1.0

    def __post_init__(self) -> None:
        check.number(0, value=self.value)

    @property
    def mean(self) -> float:
        return self.value

    @overload
    def __call__(self, staleness: int, /) -> float: ...
    @overload
    def __call__(self, rng: np.random.Generator, n: int, /) -> NDArray[np.float64]: ...
    def __call__(self, first: object, n: int | None = None, /) -> float | NDArray[np.float64]:
        return self.value if n is None else np.full(n, self.value)


@dataclass(frozen=True)
class polynomial:
    """s(τ) = (1 + τ)^−a; the paper's choice is a = 0.5.

    >>> polynomial(0.5)(0), polynomial(0.5)(3)
    (1.0, 0.5)
    """

    a: float = 0.5

    def __post_init__(self) -> None:
        check.number(0, a=self.a)

    def __call__(self, staleness: int) -> float:
        return float((1.0 + staleness) ** -self.a)


@dataclass(frozen=True)
class hinge:
    """s(τ) = 1 up to b, then 1 / (1 + a (τ − b))"""

    a: float = 10.0
    b: int = 4

    def __post_init__(self) -> None:
        check.number(0, a=self.a, b=self.b)

    def __call__(self, staleness: int) -> float:
        return 1.0 if staleness <= self.b else 1.0 / (1.0 + self.a * (staleness - self.b))


@dataclass(frozen=True)
class cutoff:
    """s(τ) = 1 up to `limit`, then 0: the update still fills a place in the buffer.

    To refuse stale updates instead, and refill their slot, use the server's `max_staleness`.
    """

    limit: int

    def __post_init__(self) -> None:
        check.integer(0, limit=self.limit)

    def __call__(self, staleness: int) -> float:
        return 1.0 if staleness <= self.limit else 0.0
