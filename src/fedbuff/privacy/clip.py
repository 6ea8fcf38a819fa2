"""Clipping: no update is longer than `clip`, also after it was multiplied and rounded.

    factor = clip_factor(norm(update), clip)     # None: the update is not finite, reject it
    summed += factor * weight * update           # weight ≤ 1, after the clip

The bound on one client's share of the sum is what all noise is measured by.
"""

import math

import numpy as np

from fedbuff.core.versions import Vector

# The factor, the weight, their product and its product with a number are each rounded once, by at most 2^−24 in float32.
_ROOM = 1.0 - 2.0**-22


def norm(update: Vector) -> float:
    """The L2 norm over the whole update, added up in float64; not finite if anything in it is not."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # not np.dot, which starts threads for vectors of this size, and they wait for one another on a busy machine
        square = float(np.einsum("i,i->", update, update, dtype=np.float64))
        if 1e-280 < square < math.inf or not len(update):
            return math.sqrt(square)
        x = update.astype(np.float64, copy=False)
        largest = float(np.abs(x).max())  # squares that over- or underflow, unless it is all zeros or not finite
        return largest * math.sqrt(float(np.sum((x / largest) ** 2))) if 0.0 < largest < math.inf else largest


def clip_factor(norm: float, clip: float) -> float | None:
    """At most 1, so that factor · update is at most `clip` long even in float32; None if the update is not finite.

    >>> clip_factor(0.5, clip=1.0), clip_factor(float("nan"), clip=1.0)
    (1.0, None)
    >>> 0.25 * (1 - 1e-6) < clip_factor(4.0, clip=1.0) < 0.25
    True
    """
    if not math.isfinite(norm):
        return None
    bound = clip * _ROOM
    return 1.0 if norm <= bound else bound / norm
