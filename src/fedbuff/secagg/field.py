"""Exact arithmetic modulo the prime p = 2³¹ − 1, a vector at a time.

Elements are uint64 below p. Products stay below 2⁶², and 2³¹ ≡ 1 makes reduction a shift and an addition. A matrix product
is two float64 products of 16-bit halves: with up to 64 terms all sums stay below 2⁵³, so BLAS adds them exactly.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.secagg.pad import SEED, expand
from fedbuff.secagg.sealing import subkey

P = (1 << 31) - 1
MOST_TERMS = 64

Elements = NDArray[np.uint64]

_P = np.uint64(P)
_BITS = np.uint64(31)
_PRODUCTS = 1 << 18  # at a time: BLAS does as many on one thread, without waiting for another on a busy machine


def reduce(x: Elements) -> Elements:
    """In place: x mod p, for any x."""
    for _ in range(2):
        high = x >> _BITS
        x &= _P
        x += high
    # below 2³¹ + 8 by now
    np.subtract(x, _P, out=x, where=x >= _P)
    return x


def add(a: Elements, b: Elements) -> Elements:
    return reduce(a + b)


def subtract(a: Elements, b: Elements) -> Elements:
    return reduce(a + (_P - b))


def scale(a: Elements, factor: int) -> Elements:
    return reduce(a * np.uint64(factor % P))


def inverse(a: int) -> int:
    if a % P == 0:
        raise ZeroDivisionError("0 has no inverse modulo 2³¹ − 1")
    return pow(a, P - 2, P)


def from_signed(x: NDArray[Any]) -> Elements:
    """Integers between −p and p as elements."""
    wide = x.astype(np.int64)
    wide += P * (wide < 0)
    return wide.view(np.uint64)


def to_signed(a: Elements) -> NDArray[np.int64]:
    """Elements read around zero: −(p − 1)/2 to (p − 1)/2."""
    wide = a.astype(np.int64)
    wide -= P * (wide > P // 2)
    return wide


def matmul(coefficients: Elements, rows: Elements) -> Elements:
    """The product modulo p of a small matrix and a wide one, exactly."""
    terms = coefficients.shape[1]
    if terms > MOST_TERMS:
        raise ValueError(f"{terms} terms: a product of more than {MOST_TERMS} is not exact in float64")
    low = (coefficients & np.uint64(0xFFFF)).astype(np.float64)
    high = (coefficients >> np.uint64(16)).astype(np.float64)
    out = np.empty((len(coefficients), rows.shape[1]), np.uint64)
    block_size = max(16, _PRODUCTS // coefficients.size)
    for at in range(0, rows.shape[1], block_size):
        block = rows[:, at : at + block_size].astype(np.float64)
        upper = reduce((high @ block).astype(np.uint64))
        upper <<= np.uint64(16)
        upper += (low @ block).astype(np.uint64)
        out[:, at : at + block_size] = reduce(upper)
    return out


def weighted_sum(vectors: list[Elements], weights: list[int]) -> Elements:
    total = np.zeros(len(vectors[0]), np.uint64)
    for vector, weight in zip(vectors, weights, strict=True):
        total += scale(vector, weight)  # below 2³¹ each
    return reduce(total)


def uniform(seed: bytes, length: int) -> Elements:
    """Uniform elements from a seed: 31-bit words of its pad; the one word in 2³¹ that is p itself is left out."""
    found = np.empty(0, np.uint64)
    part = seed
    while len(found) < length:  # the second time about once in a thousand for a million weights
        words = expand(part, np.empty(length - len(found) + 1, "<u4")).astype(np.uint64) & _P
        found = np.concatenate([found, words[words != _P]])
        part = subkey(seed, len(found).to_bytes(SEED, "little"))
    return found[:length]
