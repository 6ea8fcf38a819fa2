"""Versions of the model: each stored once, and dropped when no trip needs it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.floating]


class Versions:
    """Weights by version, counted by the trips that started on them; the newest is always kept.

    Arrays are shared, never copied, and read-only, so that nobody can change history.
    """

    def __init__(self, weights: Mapping[int, Vector], newest: int, held: Iterable[int] = ()) -> None:
        self._weights = {version: frozen(w) for version, w in weights.items()}
        self._trips = Counter(held)
        self.newest = newest

    def __getitem__(self, version: int) -> Vector:
        return self._weights[version]

    def __iter__(self) -> Iterator[int]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def add(self, weights: Vector) -> None:
        """`weights` are the newest version from now on."""
        self.newest += 1
        self._weights[self.newest] = frozen(weights)
        self._drop_if_unused(self.newest - 1)

    def hold(self, version: int) -> None:
        """A trip started on `version`."""
        self._trips[version] += 1

    def release(self, version: int) -> None:
        """A trip that had started on `version` ended."""
        self._trips[version] -= 1
        self._drop_if_unused(version)

    def _drop_if_unused(self, version: int) -> None:
        if self._trips[version] == 0 and version != self.newest:
            del self._weights[version], self._trips[version]


def frozen(weights: Vector) -> Vector:
    weights = weights.view()
    weights.flags.writeable = False
    return weights
