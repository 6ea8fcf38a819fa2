"""Every random number comes from (seed, purpose, index), never from a generator that remembers.

So a number does not depend on what was drawn before it, by whom, or in which process, and a resumed
run needs to restore counters only.
"""

import zlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

_BLOCK = 4096
_MASK = (1 << 64) - 1


def generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """A generator of its own for one purpose, e.g. `generator(0, "shuffle", client, trip)`."""
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(purpose.encode()), *ids]))


def seed_for(seed: int, purpose: str, *ids: int) -> int:
    """A 63-bit seed for a library that wants a number (torch)."""
    return int(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *ids]).generate_state(1, np.uint64)[0] >> 1)


def unit(seed: int, purpose: str, index: int) -> float:
    """One uniform number in (0, 1) that belongs to `index`: cheap at random access (splitmix64).

    >>> unit(0, "speed", 7) == unit(0, "speed", 7) != unit(0, "speed", 8)
    True
    """
    z = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(purpose.encode()) * 0xD1342543DE82EF95 + index) & _MASK
    for _ in range(2):
        z = (z + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return ((z >> 11) + 0.5) / (1 << 53)


def units(seed: int, purpose: str, indices: NDArray[np.integer]) -> NDArray[np.float64]:
    """`unit` of many indices at once, the same numbers.

    >>> float(units(0, "speed", np.arange(9))[7]) == unit(0, "speed", 7)
    True
    """
    first = (seed * 0x9E3779B97F4A7C15 + zlib.crc32(purpose.encode()) * 0xD1342543DE82EF95) & _MASK
    z = indices.astype(np.uint64) + np.uint64(first)  # numbers of 64 bits wrap around by themselves
    for _ in range(2):
        z += np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    found: NDArray[np.float64] = ((z >> np.uint64(11)).astype(np.float64) + 0.5) / (1 << 53)
    return found


def uniforms(rng: np.random.Generator, n: int) -> NDArray[np.float64]:
    return rng.random(n)


class Stream:
    """Numbers of one purpose, addressed by index and drawn a block at a time.

    `stream[i]` is the same number whatever was asked before; walking upwards costs well under a microsecond.
    """

    def __init__(self, seed: int, purpose: str, draw: Draw = uniforms) -> None:
        self._seed, self._purpose, self._draw = seed, purpose, draw
        self._first = -_BLOCK  # the index of the first number in the block
        self._block: list[float] = []

    def __getitem__(self, index: int) -> float:
        offset = index - self._first
        if not 0 <= offset < _BLOCK:
            number, offset = divmod(index, _BLOCK)
            self._block, self._first = self.block(number).tolist(), number * _BLOCK
        return self._block[offset]

    def between(self, first: int, end: int) -> NDArray[np.float64]:
        """The numbers from `first` up to `end`, at once."""
        if self._first <= first and end <= self._first + _BLOCK:
            return np.array(self._block[first - self._first : end - self._first])
        blocks = [self.block(number) for number in range(first // _BLOCK, max(first, end - 1) // _BLOCK + 1)]
        return np.concatenate(blocks)[first % _BLOCK :][: end - first]

    def block(self, number: int) -> NDArray[np.float64]:
        """The numbers from `number` · 4096 on, as many."""
        drawn = np.ascontiguousarray(self._draw(generator(self._seed, self._purpose, number), _BLOCK), dtype=np.float64)
        if drawn.shape != (_BLOCK,):
            raise ValueError(f"{self._purpose}: {self._draw} was asked for {_BLOCK} numbers and drew an array of {drawn.shape}")
        return drawn
