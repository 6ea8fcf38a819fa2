"""Independent N(0, 1) from uniform bits, by Box and Muller: compiled, or in numpy, with the same bits as a result.

Both use additions, multiplications, divisions and square roots only, each rounded once, so a run that is resumed on another
machine, or without a compiler, draws the noise that it would have drawn.
"""

import ctypes
import functools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedbuff.compiled import load

Bits = NDArray[np.uint64]
Numbers = NDArray[np.float64]

_FLAGS = ("-O3", "-march=native", "-std=c++17", "-ffp-contract=off", "-fno-math-errno")
_OTHERWISE = "noise is made by numpy"
_LOG = (1.479819860511658591e-01, 1.531383769920937332e-01, 1.818357216161805012e-01, 2.222219843214978396e-01,
        2.857142874366239149e-01, 3.999999999940941908e-01, 6.666666666666735130e-01)  # fmt: skip
_SIN = (1.58969099521155010221e-10, -2.50507602534068634195e-08, 2.75573137070700676789e-06, -1.98412698298579493134e-04,
        8.33333333332248946124e-03, -1.66666666666666324348e-01)  # fmt: skip
_COS = (-1.13596475577881948265e-11, 2.08757232129817482790e-09, -2.75573143513906633035e-07, 2.48015872894767294178e-05,
        -1.38888888888741095749e-03, 4.16666666666666019037e-02)  # fmt: skip


def normals(bits: Bits, out: Numbers) -> None:
    """Fill `out` with as many numbers as there are words of bits, an even number; two words make two numbers."""
    library = _library()
    if library is None:
        out[:] = slow_normals(bits)
    else:
        library.normals(bits.ctypes.data, len(bits) // 2, out.ctypes.data)


def slow_normals(bits: Bits) -> Numbers:
    """The twin; normals.cpp has the remarks."""
    first, second = np.split(bits, 2)
    u = _unit(first).view(np.uint64)
    k = (u - np.uint64(0x3FE6A09E667F3BCD) + np.uint64(64 << 52)) >> np.uint64(52)
    e = (k | np.uint64(0x4330000000000000)).view(np.float64) - (2.0**52 + 64.0)
    f = (u - (k << np.uint64(52)) + np.uint64(64 << 52)).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z, h = s * s, 0.5 * f * f
    log = e * 6.93147180369123816490e-01 - (h - (s * (h + _polynomial(_LOG, z) * z) + e * 1.90821492927058770002e-10) - f)
    radius = np.sqrt(-2.0 * log)

    v = _unit(second)
    shifted = v * 4.0 + 1.5 * 2.0**52
    q = shifted.view(np.uint64)
    x = (v - (shifted - 1.5 * 2.0**52) * 0.25) * 6.283185307179586477
    y = x * x
    sine = x + x * (y * _polynomial(_SIN, y))
    cosine = 1.0 - (0.5 * y - y * (y * _polynomial(_COS, y)))
    one, odd = np.uint64(1), (q & np.uint64(1)).astype(bool)
    c = np.where(odd, sine, cosine).view(np.uint64) ^ (((q + one) >> one & one) << np.uint64(63))
    d = np.where(odd, cosine, sine).view(np.uint64) ^ ((q >> one & one) << np.uint64(63))
    return np.concatenate([radius * c.view(np.float64), radius * d.view(np.float64)])


def _unit(bits: Bits) -> Numbers:
    return (bits >> np.uint64(12) | np.uint64(0x3FF0000000000000)).view(np.float64) - 1.0 + 2.0**-53


def _polynomial(coefficients: tuple[float, ...], x: Numbers) -> Numbers:
    out = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        out *= x
        out += coefficient
    return out


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load(Path(__file__).with_name("normals.cpp"), _FLAGS, {"normals": "pip"}, _OTHERWISE)
