"""Partitions: which examples belong to which client.

A partition is a function `(labels, clients, rng) -> one array of indices per client`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class iid:
    """Examples dealt out at random, equally many to each client (or one more)."""

    def __call__(self, labels: NDArray[Any], clients: int, rng: np.random.Generator) -> list[Indices]:
        _enough(len(labels), clients)
        return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), clients)]


@dataclass(frozen=True)
class dirichlet:
    """Each client draws its mix of classes from a Dirichlet distribution, as Hsu et al. (2019) do; small alpha, few classes.

    Clients hold equally many examples (or one more). The distribution's parameters are alpha for every class, as in
    FLSim's notebook (in proportion to the class, if some are rarer); with `prior` they sum up to alpha, which is how
    Hsu et al. write it, Dir(α·p): for ten classes alpha is then worth a tenth. See docs/decisions/0009-dirichlet.md.
    """

    alpha: float = 0.1
    prior: bool = False

    def __post_init__(self) -> None:
        check.number(0, 1e9, above=True, alpha=self.alpha)
        check.switch(prior=self.prior)

    def __call__(self, labels: NDArray[Any], clients: int, rng: np.random.Generator) -> list[Indices]:
        _enough(len(labels), clients)
        classes, inverse = np.unique(labels, return_inverse=True)
        left = [rng.permutation(np.flatnonzero(inverse == c)).tolist() for c in range(len(classes))]
        shares = np.bincount(inverse) / len(labels)
        parameters = self.alpha * shares if self.prior else self.alpha * len(classes) * shares
        sizes = np.full(clients, len(labels) // clients)
        sizes[: len(labels) % clients] += 1
        parts = []
        for size in sizes[rng.permutation(clients)]:
            mix = rng.dirichlet(parameters)
            part = [left[c].pop() for c in _draw_classes(mix, size, np.array([len(pool) for pool in left]), rng)]
            parts.append(np.sort(np.array(part, np.int64)))
        return parts


def _draw_classes(mix: NDArray[np.float64], size: int, counts: Indices, rng: np.random.Generator) -> list[int]:
    """`size` classes by `mix`, one after another, without taking more of a class than `counts` has left.

    The probabilities change only when a class is used up, so all draws up to there are made at once.
    """
    uniform = rng.random(size)
    drawn: list[int] = []
    while len(drawn) < size:
        possible, until = np.where(counts > 0, mix, 0.0), size
        if possible.sum() <= 0:  # the client's classes are used up: take what there is
            possible, until = counts.astype(float), len(drawn) + 1
        cumulated = (possible / possible.sum()).cumsum()
        tried = (cumulated / cumulated[-1]).searchsorted(uniform[len(drawn) : until], side="right")
        taken = np.bincount(tried, minlength=len(counts))
        used_up = np.flatnonzero((taken > 0) & (taken >= counts))
        if len(used_up):  # stop at the draw that takes the last one of a class
            tried = tried[: 1 + min(np.flatnonzero(tried == c)[counts[c] - 1] for c in used_up)]
            taken = np.bincount(tried, minlength=len(counts))
        drawn += tried.tolist()
        counts = counts - taken
    return drawn


@dataclass(frozen=True)
class shards:
    """Examples sorted by class and cut into equal shards, `per_client` random shards each, as McMahan et al. (2016) do."""

    per_client: int = 2

    def __post_init__(self) -> None:
        check.integer(1, per_client=self.per_client)

    def __call__(self, labels: NDArray[Any], clients: int, rng: np.random.Generator) -> list[Indices]:
        if len(labels) < clients * self.per_client:
            raise ValueError(f"{len(labels)} examples are too few for {clients} clients with {self.per_client} shards each")
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
    if len(x) != len(y):
        raise ValueError(f"split_examples: {len(x)} inputs and {len(y)} labels; expected as many of both")
    check.able("__iter__", "the indices of each client's examples, e.g. fedbuff.by_key(accounts)", parts=parts)
    # as arrays what is not indexed by position: lists, and series of pandas
    x, y = (np.asarray(rows) if isinstance(rows, Sequence) or hasattr(rows, "to_numpy") else rows for rows in (x, y))
    chosen = (_indices(part, len(y), client) for client, part in enumerate(parts))
    return [(x[rows], y[rows]) for rows in chosen]


def _indices(part: Any, examples: int, client: int) -> Any:
    """A part as it can index; an index below 0 is a mistake, which numpy would count from the end."""
    if isinstance(part, slice):
        return part
    rows = np.asarray(part)
    if rows.dtype == bool and rows.shape == (examples,):
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.dtype.kind not in "iu" and len(rows)):
        raise ValueError(f"parts[{client}]: expected a row of indices, got {rows.dtype}{list(rows.shape)}")
    wrong = rows[(rows < 0) | (rows >= examples)]
    if len(wrong):
        raise ValueError(f"parts[{client}]: index {wrong[0]}; expected 0 to {examples - 1}")
    return rows.astype(np.int64, copy=False)


def some_of_each(owners: NDArray[Any], share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which examples to hold out so that every owner keeps `share` of its own, as LEAF splits "by sample".

    Rounded in favour of what is held out; an owner of a single example keeps it.

    >>> held_out = some_of_each(np.array([7, 7, 7, 8]), 0.9, np.random.default_rng(0))
    >>> held_out[:3].sum(), held_out[3]
    (np.int64(1), np.False_)
    """
    order = np.lexsort((rng.random(len(owners)), owners))
    _, sizes = np.unique(owners, return_counts=True)
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # of each in its owner's random order
    kept = np.maximum(1, (share * sizes).astype(np.int64))
    held_out = np.zeros(len(owners), bool)
    held_out[order] = rank >= np.repeat(kept, sizes)
    return held_out


def _enough(examples: int, clients: int) -> None:
    if examples < clients:
        raise ValueError(f"{examples} examples are too few for {clients} clients: each needs at least one")
