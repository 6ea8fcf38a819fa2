"""Partitions: which examples belong to which client.

A partition is a function `(labels, clients, rng) -> one array of indices per client`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check

Indices = NDArray[np.int64]
Partition = Callable[[NDArray[Any], int, np.random.Generator], list[Indices]]


@dataclass(frozen=True)
class iid:
    """Examples dealt out at random, equally many to each client (or one more)."""

    def __call__(self, labels: NDArray[Any], clients: int, rng: np.random.Generator) -> list[Indices]:
        _enough(len(labels), clients)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


@dataclass(frozen=True)
class dirichlet:
    """Each client draws its mix of classes from Dirichlet(alpha · class shares), as Hsu et al. (2019) do.

    Clients hold equally many examples (or one more); small alpha means few classes per client.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        check.number(0, above=True, alpha=self.alpha)

    def __call__(self, labels: NDArray[Any], clients: int, rng: np.random.Generator) -> list[Indices]:
        _enough(len(labels), clients)
        classes, inverse = np.unique(labels, return_inverse=True)
        left = [rng.permutation(np.flatnonzero(inverse == c)).tolist() for c in range(len(classes))]
        shares = np.bincount(inverse) / len(labels)
        sizes = np.full(clients, len(labels) // clients)
        sizes[: len(labels) % clients] += 1
        parts = []
        for size in sizes[rng.permutation(clients)]:
            mix = rng.dirichlet(self.alpha * len(classes) * shares)
            part = [left[c].pop() for c in _draw_classes(mix, size, np.array([len(pool) for pool in left]), rng)]
            parts.append(np.sort(np.array(part, np.int64)))
        return parts


def _draw_classes(mix: NDArray[np.float64], size: int, counts: Indices, rng: np.random.Generator) -> list[int]:
    """`size` classes by `mix`, one after another, without taking more of a class than `counts` has left."""
    counts = counts.copy()
    drawn = []
    for _ in range(size):
        possible = np.where(counts > 0, mix, 0.0)
        if possible.sum() <= 0:  # the client's classes are used up: take what there is
            possible = counts.astype(float)
        c = int(rng.choice(len(mix), p=possible / possible.sum()))
        counts[c] -= 1
        drawn.append(c)
    return drawn


@dataclass(frozen=True)
class shards:
    """Examples sorted by class and cut into equal shards, `per_client` random shards each, as McMahan et al. (2016) do."""

    per_client: int = 2

    def __post_init__(self) -> None:
        check.integer(1, per_client=self.per_client)

    def __call__(self, labels: NDArray[Any], clients: int, rng: np.random.Generator) -> list[Indices]:
        _enough(len(labels), clients * self.per_client)
        pieces = np.array_split(np.argsort(labels, kind="stable"), clients * self.per_client)
        order = rng.permutation(len(pieces)).reshape(clients, self.per_client)
        return [np.sort(np.concatenate([pieces[i] for i in row])) for row in order]


def by_key(keys: Sequence[Any]) -> list[Indices]:
    """A client per distinct key (an account, a writer), in order of first appearance.

    >>> [part.tolist() for part in by_key(["ann", "bob", "ann"])]
    [[0, 2], [1]]
    """
    parts: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        parts.setdefault(key, []).append(index)
    return [np.array(part, np.int64) for part in parts.values()]


def split_examples(x: NDArray[Any], y: NDArray[Any], parts: Sequence[Indices]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """The clients of a task: (inputs, labels) for each part."""
    return [(x[part], y[part]) for part in parts]


def _enough(examples: int, clients: int) -> None:
    if examples < clients:
        raise ValueError(f"{examples} examples are too few for {clients} clients: each needs at least one")
