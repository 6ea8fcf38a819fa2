"""Where trips are trained: on this machine (workers.py), or on a cluster (ray.py).

A pool keeps versions of the model, takes chunks of trips to train and blocks of examples to evaluate, and gives results
by key. Which work goes into which chunk is decided before, so that every pool gives the same bits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fedbuff.core.versions import Vector
from fedbuff.sim.shared import Rows

if TYPE_CHECKING:
    from fedbuff.learn.work import Trainer


NOW = -1  # the priority of work that will be waited for at once


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
    alone: bool  # whether work is done only when somebody waits for it

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


class SharedVersions:
    """Weights by version, each in a row of shared memory."""

    def __init__(self, rows: Rows, row_of: dict[int, int]) -> None:
        self.rows, self.row_of = rows, row_of

    def keep(self, version: int, weights: Vector) -> None:
        (row,) = self.rows.take(1)
        self.row_of[version] = row
        self.rows.write(row, weights)
        self.rows.rest([row])

    def drop(self, version: int) -> None:
        self.rows.give([self.row_of.pop(version)])

    def __getitem__(self, version: int) -> Vector:
        view: Vector = self.rows.matrix[self.row_of[version]]
        view.flags.writeable = False
        return view

    def rest(self) -> None:
        """None of them is looked at for a while."""
        self.rows.rest(self.row_of.values())


def do(work: Work, trainer: "Trainer", versions: SharedVersions, updates: Rows) -> Any:
    """Do the work: train a chunk into its rows, or evaluate a block."""
    if isinstance(work, Block):
        return trainer.evaluate(versions[work.version], work.split, work.start)
    starts = {version: versions[version] for version in dict.fromkeys(work.versions)}
    weights = [starts[version] for version in work.versions]
    trainer.train(updates.matrix, work.rows, work.trips, work.clients, weights)
    updates.rest(list(work.rows))
    versions.rest()
    return None
