"""One step of the filter that makes a BLT's noise, in place: compiled, or in numpy, with the same bits as a result.

    x = z − Σ_j ω_j b_j,   b_j ← θ_j b_j + x,   and x is scaled

Four vectors as long as the model pass by at every server step, so once each, and a block that stays in the cache at a time.
"""

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbuff.compiled import load

Numbers = NDArray[np.float64]

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off")
_BLOCK = 8192  # numbers


def filtered(z: Numbers, buffers: Sequence[Numbers], weight: Sequence[float], decay: Sequence[float], scale: float) -> Numbers:
    """x, in the place of z."""
    library = _library()
    if library is None:
        return slow_filtered(z, buffers, weight, decay, scale)
    count = len(buffers)
    places = (ctypes.c_void_p * count)(*(buffer.ctypes.data for buffer in buffers))
    numbers = ctypes.c_double * count
    library.toeplitz(z.ctypes.data, len(z), places, numbers(*weight), numbers(*decay), count, scale)
    return z


def slow_filtered(
    z: Numbers, buffers: Sequence[Numbers], weight: Sequence[float], decay: Sequence[float], scale: float
) -> Numbers:
    """The twin."""
    for at in range(0, len(z), _BLOCK):
        x, parts = z[at : at + _BLOCK], [buffer[at : at + _BLOCK] for buffer in buffers]
        for w, b in zip(weight, parts, strict=True):
            x -= w * b
        for d, b in zip(decay, parts, strict=True):
            b *= d
            b += x
        x *= scale
    return z


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load(Path(__file__).with_name("toeplitz.cpp"), _FLAGS, {"toeplitz": "pipppid"}, "a BLT's noise is filtered by numpy")
