"""How much noise is in a prefix sum of increments, which is what a model trained with SGD has: the variance after each step.

In units of (noise_multiplier · clip)². Times the squared sensitivity it compares mechanisms at the same epsilon.
"""

import numpy as np
from numpy.typing import NDArray

Variances = NDArray[np.float64]


def of_gaussian(steps: int) -> Variances:
    return np.arange(1.0, steps + 1)


def of_tree(steps: int, honaker: bool = False) -> Variances:
    """One node for each one of t in binary; averaged nodes of 2^h leaves have a variance of 1 / (2 − 2^−h).

    >>> of_tree(7).tolist()
    [1.0, 1.0, 2.0, 1.0, 2.0, 2.0, 3.0]
    """
    t = np.arange(1, steps + 1)
    out = np.zeros(steps)
    for level in range(steps.bit_length()):
        out += (t >> level & 1) * (1.0 / (2.0 - 2.0**-level) if honaker else 1.0)
    return out


def of_blt(decay: tuple[float, ...], weight: tuple[float, ...], steps: int) -> Variances:
    """The response to one draw is the same at every step, so squares of its prefix sums add up."""
    buffers, total, response = [0.0] * len(decay), 0.0, np.empty(steps)
    for i in range(steps):
        x = (i == 0) - sum(w * b for w, b in zip(weight, buffers, strict=True))
        buffers = [d * b + x for d, b in zip(decay, buffers, strict=True)]
        total += x
        response[i] = total
    return np.cumsum(response**2)
