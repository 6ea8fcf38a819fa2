"""Updates as integers: clip, scale, truncate toward zero; and the sum of such integers back as numbers, exactly.

    number  = FixedPoint(clip=1.0, scale=finest_scale(1.0, terms=10, limit=RING))
    integers = number.encode(update)                  # int32, of norm at most clip · scale
    total    = number.decode(sum of K of those)       # float64, exact: the scale is a power of two

Truncation toward zero can only shorten a vector, so an update's norm stays within the clip bound, and with it what one client
can change (its sensitivity). Rounding to the nearest integer could add up to √d / 2 to it.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.compiled.norm import norm
from fedbuff.core import check

RING = 1 << 31  # sums in Z_2³², read as two's complement, are below this
FIELD = 1 << 30  # sums mod 2³¹ − 1, read around zero, are below this

# the factor is rounded to float32, and so is each product: this much less, and no product exceeds the exact one
_SHY = 1.0 - 2.0**-22
_FINEST = 2.0**126  # float32 has no factor beyond
_HUGE, _SMALLER = 2.0**900, 2.0**-200  # lengths that float64 itself is short of room for, and what such updates are taken times


@dataclass(frozen=True)
class FixedPoint:
    """Integers of size at most clip · scale."""

    clip: float
    scale: float

    def __post_init__(self) -> None:
        check.number(0, above=True, clip=self.clip, scale=self.scale)
        if math.frexp(self.scale)[0] != 0.5:
            raise ValueError(f"scale={self.scale!r}: expected a power of two, so that decoding is exact")
        if self.scale > _FINEST:
            raise ValueError(f"scale={self.scale:g}: expected at most 2¹²⁶, which float32 can multiply by")
        if not 1 <= self.clip * self.scale < RING:
            raise ValueError(f"clip={self.clip:g}, scale={self.scale:g}: clip · scale must lie between 1 and 2³¹")

    @property
    def largest(self) -> int:
        """The largest integer that `encode` returns."""
        return math.floor(self.clip * self.scale)

    def encode(self, update: NDArray[np.floating], weight: float = 1.0) -> NDArray[np.int32]:
        """The update, clipped to norm `clip`, times `weight` (0 to 1), on the grid: of norm weight · clip · scale at most."""
        length, whole = norm(update), 1.0
        if length > _HUGE:  # of float64, and it may be infinite though no number in it is
            update, whole = update.astype(np.float64) * _SMALLER, 1.0 / _SMALLER
            length = norm(update)
        if not math.isfinite(length):
            raise ValueError("the update is not finite")
        factor = weight * self.scale * (self.clip / length if length * whole > self.clip else whole)
        if math.frexp(factor)[0] != 0.5:  # a power of two multiplies exactly
            factor *= _SHY
        kind = np.result_type(update, np.float32)  # float64 stays what it is: in float32 it could be infinite
        scaled: NDArray[np.floating] = np.multiply(update, kind.type(factor), dtype=kind)
        return scaled.astype(np.int32)

    def decode(self, total: NDArray[Any], unit: int = 1) -> NDArray[np.float64]:
        """A sum of encoded updates as numbers; `unit` is what a weight of 1 was as an integer."""
        return total / (self.scale * unit)

    def noise(self, increment: NDArray[np.float64], unit: int = 1) -> NDArray[np.int64]:
        """Noise on the grid: ⌊x + ½⌋, which commutes with adding integers (rounding half to even does not)."""
        return np.floor(increment * (self.scale * unit) + 0.5).astype(np.int64)

    def error(self, update: NDArray[np.float32], weight: float = 1.0) -> float:
        """How far quantisation moves a clipped update, as a share of its norm."""
        exact = update.astype(np.float64) * (weight * min(1.0, self.clip / max(norm(update), 1e-300)))
        return norm(self.decode(self.encode(update, weight)) - exact) / max(norm(exact), 1e-300)


def finest_scale(clip: float, terms: int, limit: int, noise: float = 0.0) -> float:
    """The largest power of two with which `terms` updates of norm `clip`, and noise up to `noise`, add up to less than `limit`.

    `terms` is K, or K times the largest integer weight.

    >>> finest_scale(1.0, terms=10, limit=RING) == 2.0**27
    True
    """
    check.number(0, above=True, clip=clip)
    check.number(0, noise=noise)
    check.integer(1, terms=terms)
    scale = min(_FINEST, 2.0 ** math.floor(math.log2(limit / (terms * clip + noise))))
    while not fits(clip, scale, terms, limit, noise):
        scale /= 2
    if clip * scale < 1:
        raise ValueError(
            f"clip={clip:g}, {terms:,} updates times their largest weight, noise up to {noise:g}: these do not fit "
            f"{limit.bit_length()} bits; take a smaller buffer, smaller integer weights or less noise"
        )
    return scale


def fits(clip: float, scale: float, terms: int, limit: int, noise: float = 0.0) -> bool:
    """Whether `terms` integers of size up to clip · scale, and the noise, add up to less than `limit` whatever they are."""
    return terms * math.floor(clip * scale) + math.ceil(noise * scale) < limit
