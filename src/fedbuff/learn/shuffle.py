"""Which examples each local step of a trip sees, and the seed of its dropout: addressed, never drawn in turn.

The order of an epoch sorts the examples by a hash of (seed, client, trip, epoch, example), so the orders of a whole
chunk of trips come out of a few array operations, and a trip's own do not depend on who is trained beside it.
"""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.client import LocalSGD

Hashes = NDArray[np.uint64]
Indices = NDArray[np.int64]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def steps_of(n: int, sgd: LocalSGD) -> int:
    """How many local steps a client with `n` examples takes."""
    return sgd.epochs * -(-n // sgd.batch_size) if sgd.steps is None else sgd.steps


def batches(seed: int, client: int, trip: int, n: int, sgd: LocalSGD) -> Iterator[Indices]:
    """Indices of each local step's examples: `epochs` shuffled passes, or as many as `steps` takes."""
    return iter(all_batches(seed, [client], [trip], [n], sgd)[0])


def all_batches(
    seed: int, clients: Sequence[int], trips: Sequence[int], sizes: Sequence[int], sgd: LocalSGD
) -> list[list[Indices]]:
    """For each of several trips, what `batches` gives; all of them at once."""
    if min(sizes) == 0:
        raise ValueError(f"client {clients[sizes.index(0)]} has no examples, and can't train")
    of_trip = hashes(seed, "shuffle", clients, trips)
    plans: list[list[Indices]] = [[] for _ in sizes]
    steps = [steps_of(n, sgd) for n in sizes]
    epoch, active = 0, list(range(len(sizes)))
    while active:
        orders = shuffled(_mix(of_trip[active] + np.uint64(epoch)), [sizes[j] for j in active])
        for j, order in zip(active, orders, strict=True):
            room = steps[j] - len(plans[j])
            plans[j] += [order[i : i + sgd.batch_size] for i in range(0, sizes[j], sgd.batch_size)][:room]
        epoch, active = epoch + 1, [j for j in active if len(plans[j]) < steps[j]]
    return plans


def shuffled(of_epoch: Hashes, sizes: Sequence[int]) -> list[Indices]:
    """Shuffled 0 … n−1 for each size n, by one hash each: example i's key is the i-th number of its splitmix sequence."""
    n = np.asarray(sizes)
    ends = np.cumsum(n)
    whose = np.repeat(np.arange(len(n)), n)
    example = np.arange(ends[-1]) - (ends - n)[whose]
    keys = _mix(of_epoch[whose] + example.astype(np.uint64) * _STEP)
    order = example[np.argsort(keys, kind="stable") if len(n) == 1 else np.lexsort((keys, whose))]
    return [order[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]


def dropout_seeds(seed: int, clients: Sequence[int], trips: Sequence[int]) -> list[int]:
    """What torch's generator is seeded with at the start of each trip."""
    seeds: list[int] = (hashes(seed, "dropout", clients, trips) >> np.uint64(1)).tolist()
    return seeds


def hashes(seed: int, purpose: str, *ids: Sequence[int]) -> Hashes:
    """One hash for each row of ids.

    >>> hashes(0, "shuffle", [3, 4], [7, 7])[1] == hashes(0, "shuffle", [4], [7])[0]
    np.True_
    """
    z = np.full(len(ids[0]), beginning(seed, purpose), np.uint64)
    for column in ids:
        z = _mix(z + np.asarray(column, np.uint64))
    return z


def beginning(seed: int, purpose: str) -> int:
    """Where hashes of one purpose begin."""
    return (seed * 0x9E3779B97F4A7C15 + zlib.crc32(purpose.encode()) * 0xD1342543DE82EF95) & _MASK


def _mix(z: Hashes) -> Hashes:
    """splitmix64's step: a bijection whose every output bit depends on every input bit."""
    z = z + _STEP
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
