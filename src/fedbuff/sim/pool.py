"""Where trips are trained: in this process, or (workers.py, ray.py) in others.

A pool keeps versions of the model, takes chunks of trips to train and blocks of examples to evaluate, and gives results
by key. Which work goes into which chunk is decided before, so that every pool gives the same bits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from fedbuff.core.versions import Vector
from fedbuff.sim.shared import Rows

if TYPE_CHECKING:
    from fedbuff.learn.work import Trainer


class Chunk(NamedTuple):
    """Trips to train together: `rows` are where their updates go."""

    trips: Sequence[int]
    clients: Sequence[int]
    versions: Sequence[int]
    rows: Sequence[int]


class Block(NamedTuple):
    """Examples to evaluate a version on: those from `start` on of a split."""

    version: int
    split: str
    start: int


Work = Chunk | Block


class Pool(Protocol):
    updates: Rows
    eager: bool  # whether work submitted is begun before somebody waits for it

    def keep(self, version: int, weights: Vector) -> None:
        """Make a version known."""

    def drop(self, version: int) -> None:
        """No work will ask for `version` any more."""

    def weights(self, version: int) -> Vector: ...

    def submit(self, key: int, work: Work, priority: int) -> None:
        """Take on work; the lowest priority goes first."""

    def finished(self, key: int) -> bool: ...

    def result(self, key: int) -> Any:
        """Wait for work, and forget it. A chunk's updates are in its rows by then; a block's result is its own."""

    def pids(self) -> list[int]:
        """Processes of this machine that belong to the pool."""

    def close(self) -> None: ...


class Here:
    """Everything in this process, when it is asked for."""

    eager = False

    def __init__(self, trainer: "Trainer", versions: int, updates: int, like: Vector, on_disk: bool) -> None:
        self._trainer = trainer
        self.updates = Rows(updates, len(like), like.dtype, on_disk)
        self._versions = SharedVersions(versions, like, on_disk)
        self._work: dict[int, Work] = {}

    def keep(self, version: int, weights: Vector) -> None:
        self._versions.keep(version, weights)

    def drop(self, version: int) -> None:
        self._versions.drop(version)

    def weights(self, version: int) -> Vector:
        return self._versions[version]

    def submit(self, key: int, work: Work, priority: int) -> None:
        self._work[key] = work

    def finished(self, key: int) -> bool:
        return False

    def result(self, key: int) -> Any:
        return do(self._work.pop(key), self._trainer, self._versions, self.updates)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._work.clear()


class SharedVersions:
    """Weights by version, each in a row of shared memory."""

    def __init__(self, most: int, like: Vector, on_disk: bool) -> None:
        self.rows = Rows(most, len(like), like.dtype, on_disk)
        self.row_of: dict[int, int] = {}

    def keep(self, version: int, weights: Vector) -> None:
        row = self.row_of[version] = self.rows.take()
        self.rows.matrix[row] = weights
        self.rows.rest(row)

    def drop(self, version: int) -> None:
        self.rows.give(self.row_of.pop(version))

    def __getitem__(self, version: int) -> Vector:
        view: Vector = self.rows.matrix[self.row_of[version]]
        view.flags.writeable = False
        return view


def do(work: Work, trainer: "Trainer", versions: Any, updates: Rows) -> Any:
    """Do the work: train a chunk into its rows, or evaluate a block."""
    if isinstance(work, Block):
        return trainer.evaluate(versions[work.version], work.split, work.start)
    starts = {version: versions[version] for version in dict.fromkeys(work.versions)}
    trained = trainer.train(work.trips, work.clients, [starts[version] for version in work.versions])
    updates.matrix[np.asarray(work.rows)] = trained
    for row in work.rows:
        updates.rest(row)
    return None
