"""The sum of a buffer's weighted updates in one pass: Δ̄ = Σ s(τ_i) Δ_i, bit for bit what `Aggregation.add` would add up."""

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbuff.compiled import load
from fedbuff.core.versions import Vector

_SOURCE = Path(__file__).with_name("sums.cpp")
# products and sums are rounded one by one, as numpy's are
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off")
_FUNCTIONS = {"sum_floats": "piippip->i", "sum_doubles": "piippip->i"}
_OF = {np.dtype(np.float32): "sum_floats", np.dtype(np.float64): "sum_doubles"}


@cache
def _library() -> ctypes.CDLL | None:
    return load(_SOURCE, _FLAGS, _FUNCTIONS, "updates are added up one by one")


def weighted_sum(updates: NDArray[np.floating], rows: Sequence[int], weights: Sequence[float], out: Vector) -> bool | None:
    """Out ← Σ weights[i] · updates[rows[i]]; whether it is finite, or None if there is no way to do it here."""
    library, name = _library(), _OF.get(updates.dtype)
    stride, itemsize = updates.strides[0], updates.itemsize
    if library is None or name is None or updates.strides[1] != itemsize or out.dtype != updates.dtype:
        return None
    numbers, factors = array("q", rows), array("d", weights)
    finite = getattr(library, name)(
        updates.__array_interface__["data"][0], stride // itemsize, len(rows), numbers.buffer_info()[0],
        factors.buffer_info()[0], len(out), out.__array_interface__["data"][0],
    )  # fmt: skip
    return bool(finite)
