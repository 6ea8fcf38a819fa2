"""Clipping: no update is longer than `clip`, also after it was multiplied and rounded.

    factor = clip_factor(norm(update), clip, update.dtype)     # None: the update is not finite, reject it
    summed += factor * weight * update                         # weight ≤ 1, after the clip

The bound on one client's share of the sum is what all noise is measured by.
"""

import math

import numpy as np
from numpy.typing import DTypeLike

# The factor, the weight, their product and its product with a number are each rounded once, by at most 2^−24 in float32.
_ROOM = 1.0 - 2.0**-22


def clip_factor(norm: float, clip: float, dtype: DTypeLike = np.float32) -> float | None:
    """At most 1, so that factor · update is at most `clip` long even in float32; None if the update is not finite.

    0 if the update, whose numbers are of `dtype`, is so long that the factor is no normal number there: it would be rounded
    by far more than others, up to twice its value.

    >>> clip_factor(0.5, clip=1.0), clip_factor(float("nan"), clip=1.0), clip_factor(1e39, clip=1.0)
    (1.0, None, 0.0)
    >>> 0.25 * (1 - 1e-6) < clip_factor(4.0, clip=1.0) < 0.25
    True
    """
    if not math.isfinite(norm):
        return None
    bound = clip * _ROOM
    if norm <= bound:
        return 1.0
    factor = bound / norm
    return factor if factor >= np.finfo(dtype).smallest_normal else 0.0
