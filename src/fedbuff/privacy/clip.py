"""Clipping: no update is longer than `clip`, also after it was multiplied and rounded.

    factor = clip_factor(norm(update), clip)     # None: the update is not finite, reject it
    summed += factor * weight * update           # weight ≤ 1, after the clip

The bound on one client's share of the sum is what all noise is measured by.
"""

import math

# The factor, the weight, their product and its product with a number are each rounded once, by at most 2^−24 in float32.
_ROOM = 1.0 - 2.0**-22


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
