"""The length of an update, as clipping needs it: in double precision, and never wrong about what is not finite.

Squares are added up in 32 lanes, compiled or in numpy, with the same bits as a result: they decide by how much an update is
shortened. Not by np.dot: it starts threads for vectors of this size, which get in the way of those who train.
"""

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.compiled import load

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off")
_FUNCTIONS = {"squares_of_floats": "pi->d", "squares_of_doubles": "pi->d"}
_OF = {np.dtype(np.float32): "squares_of_floats", np.dtype(np.float64): "squares_of_doubles"}
_LANES, _ROWS = 32, 512  # as in norm.cpp


def norm(update: NDArray[Any]) -> float:
    """The L2 norm over the whole update; not finite if anything in it is not."""
    square = squares(update)
    if 1e-280 < square < math.inf or not len(update):
        return math.sqrt(square)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        x = update.astype(np.float64, copy=False)
        largest = float(np.abs(x).max())  # squares that over- or underflow, unless it is all zeros or not finite
        return largest * math.sqrt(float(np.sum((x / largest) ** 2))) if 0.0 < largest < math.inf else largest


def squares(x: NDArray[Any]) -> float:
    """The sum of squares."""
    name = _OF.get(x.dtype)
    library = _library() if name is not None and x.flags.c_contiguous else None
    if library is None or name is None:
        return slow_squares(x)
    return float(getattr(library, name)(x.ctypes.data, len(x)))


def slow_squares(x: NDArray[Any]) -> float:
    """The twin."""
    total = np.zeros(_LANES)
    whole = len(x) // _LANES * _LANES
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        for at in range(0, whole, _LANES * _ROWS):
            rows = x[at : min(at + _LANES * _ROWS, whole)].reshape(-1, _LANES).astype(np.float64)
            rows *= rows
            total += np.add.reduce(rows, axis=0)  # row after row
        rest = x[whole:].astype(np.float64)
        total[: len(rest)] += rest * rest
        while len(total) > 1:
            total = total[: len(total) // 2] + total[len(total) // 2 :]
    return float(total[0])


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load(Path(__file__).with_name("norm.cpp"), _FLAGS, _FUNCTIONS, "the length of updates is found by numpy")
