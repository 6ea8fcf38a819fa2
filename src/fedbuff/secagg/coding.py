"""Lagrange coding, as in LightSecAgg (So et al. 2022): a mask is split into N shares, any U of which give back a sum of masks.

A mask is cut into U − T rows, followed by T random ones. These U rows are the values of a polynomial at β = 1 … U; share j is
its value at α_j = U + j. Any U shares determine the polynomial; T or fewer say nothing about the mask, since the random rows
enter them by an invertible (Cauchy) matrix. All of it is linear: a weighted sum of shares is a share of the weighted sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fedbuff.core import check
from fedbuff.secagg import field
from fedbuff.secagg.field import MOST_TERMS, Elements, P


@dataclass(frozen=True)
class Code:
    """`helpers` N hold shares, any `recovery` U recover, any `privacy` T know nothing."""

    helpers: int
    recovery: int
    privacy: int

    def __post_init__(self) -> None:
        check.integer(1, helpers=self.helpers, recovery=self.recovery, privacy=self.privacy)
        n, u, t = self.helpers, self.recovery, self.privacy
        if not t < u <= n or u > MOST_TERMS:
            raise ValueError(f"helpers={n}, recovery={u}, privacy={t}: expected privacy < recovery <= helpers, recovery <= 64")
        if 2 * u - n <= t:  # two lists have 2U − N signers in common: if they all conspire, both lists are answered
            raise ValueError(
                f"helpers={n}, recovery={u}, privacy={t}: expected 2 · recovery − helpers > privacy, or else {t} conspiring "
                f"helpers can have two lists answered; take a recovery of {(n + t) // 2 + 1} or more"
            )

    def width(self, length: int) -> int:
        """How many numbers a share of a mask of `length` numbers has."""
        return -(-length // (self.recovery - self.privacy))

    def encode(self, mask: Elements, random_rows: Elements) -> Elements:
        """The N shares of a mask, as rows; `random_rows` are T rows of uniform elements, used once."""
        data, width = self.recovery - self.privacy, self.width(len(mask))
        if random_rows.shape != (self.privacy, width):
            raise ValueError(f"random rows: expected shape {(self.privacy, width)}, got {random_rows.shape}")
        rows = np.zeros((self.recovery, width), np.uint64)
        rows[:data].reshape(-1)[: len(mask)] = mask
        rows[data:] = random_rows
        return field.matmul(_matrix(self._betas(), self._alphas()), rows)

    def decode(self, shares: Mapping[int, Elements], length: int) -> Elements:
        """The mask, or sum of masks, behind any U shares, by the helpers' numbers 0 … N − 1."""
        if len(shares) < self.recovery:
            raise ValueError(f"{len(shares)} shares: {self.recovery} are needed")
        chosen = sorted(shares)[: self.recovery]
        alphas = tuple(self._alphas()[j] for j in chosen)
        wanted = self._betas()[: self.recovery - self.privacy]
        return field.matmul(_matrix(alphas, wanted), np.stack([shares[j] for j in chosen])).reshape(-1)[:length]

    def agree(self, shares: Mapping[int, Elements]) -> bool:
        """Whether all shares, those beyond U as well, are values of one polynomial; U shares always are."""
        chosen, spare = sorted(shares)[: self.recovery], sorted(shares)[self.recovery :]
        if not spare:
            return True
        known, wanted = (tuple(self._alphas()[j] for j in some) for some in (chosen, spare))
        expected = field.matmul(_matrix(known, wanted), np.stack([shares[j] for j in chosen]))
        return bool((expected == np.stack([shares[j] for j in spare])).all())

    def _betas(self) -> tuple[int, ...]:
        return tuple(range(1, self.recovery + 1))

    def _alphas(self) -> tuple[int, ...]:
        return tuple(range(self.recovery + 1, self.recovery + self.helpers + 1))


@lru_cache(maxsize=64)
def _matrix(known: tuple[int, ...], wanted: tuple[int, ...]) -> Elements:
    """Row by row: the value of a polynomial at `wanted`, as a combination of its values at `known`."""
    rows = []
    for x in wanted:
        row = []
        for k in known:
            above, below = 1, 1
            for other in known:
                if other != k:
                    above, below = above * (x - other) % P, below * (k - other) % P
            row.append(above * field.inverse(below) % P)
        rows.append(row)
    return np.array(rows, np.uint64)
