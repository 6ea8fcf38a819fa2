"""The table of trips: what every trip was and what became of it; the rows of trips.parquet."""

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

OUTCOMES = ("used", "dropped", "late", "failed", "cancelled", "unused")
USED, DROPPED, LATE, FAILED, CANCELLED, UNUSED = range(6)
IN_FLIGHT = 255
# what a column has until it is filled in
_BLANKS = {
    "client": ("q", -1),
    "examples": ("q", -1),
    "start_time": ("d", -1.0),
    "end_time": ("d", -1.0),
    "start_version": ("q", -1),
    "end_version": ("q", -1),
    "weight": ("d", 0.0),
    "server_step": ("q", -1),
    "outcome": ("B", IN_FLIGHT),  # an index into OUTCOMES
}
COLUMNS = tuple(_BLANKS)
_AT_THE_END = ("end_time", "end_version", "weight", "server_step", "outcome")
_BLOCK = 4096


class Trips:
    """One row per trip, by trip number: filled in when the trip starts, and again when it ends.

    An update in the buffer is `unused` until the server steps on it; what is left of the last buffer stays so.
    Columns are longer than `len(trips)`, and `order`, the trips that ended in this order, than `ended`: they grow in blocks.
    """

    def __init__(self) -> None:
        self._count, self.ended = 0, 0
        self.client, self.examples, self.start_time, self.start_version = array("q"), array("q"), array("d"), array("q")
        self.end_time, self.end_version, self.weight, self.server_step = array("d"), array("q"), array("d"), array("q")
        self.outcome, self.order = array("B"), array("q")

    def __len__(self) -> int:
        return self._count

    def counted(self, started: int, ended: int) -> None:
        """So many trips have started and ended: whoever wrote into the columns says so."""
        self._count, self.ended = started, ended

    def grow(self) -> None:
        """Make room for half as many trips again."""
        self._fill(len(self.client) + max(_BLOCK, len(self.client) // 2))

    def _fill(self, rows: int) -> None:
        for name, (kind, blank) in (*_BLANKS.items(), ("order", ("q", -1))):
            column = getattr(self, name)
            column.extend(array(kind, [blank]) * (rows - len(column)))

    def started(self, client: int, examples: int, time: float, version: int) -> None:
        trip = self._count
        if trip == len(self.client):
            self.grow()
        self.client[trip] = client
        self.examples[trip] = examples
        self.start_time[trip] = time
        self.start_version[trip] = version
        self._count += 1

    def end(self, trip: int, time: float, version: int, outcome: int) -> None:
        self.end_time[trip] = time
        self.end_version[trip] = version
        self.outcome[trip] = outcome
        self.order[self.ended] = trip
        self.ended += 1

    def used(self, trip: int, weight: float, step: int) -> None:
        self.weight[trip] = weight
        self.server_step[trip] = step
        self.outcome[trip] = USED

    def rewind(self, started: int, ended: int) -> None:
        """Back to right after a server step, when so many trips had started, and so many of them ended."""
        for name in _AT_THE_END:
            column, blank = getattr(self, name), _BLANKS[name][1]
            for trip in self.order[ended : self.ended]:
                column[trip] = blank
        self.counted(started, ended)

    def arrays(self, trips: int | None = None, ended: int | None = None) -> dict[str, NDArray[Any]]:
        """The trips that ended, of the first `trips` or of all, as arrays named like the columns of trips.parquet.

        With `ended`, those that ended first, so many.
        """
        first = len(self) if trips is None else min(trips, len(self))
        all_rows = {name: np.array(getattr(self, name)[:first]) for name in COLUMNS}
        rows = np.flatnonzero(all_rows["outcome"] != IN_FLIGHT) if ended is None else np.sort(np.array(self.order[:ended]))
        c = {name: column[rows] for name, column in all_rows.items()}
        return {
            "trip": rows,
            **{name: c[name] for name in COLUMNS[:6]},
            "staleness": c["end_version"] - c["start_version"],
            "weight": c["weight"],
            "server_step": c["server_step"],
            "outcome": np.array(OUTCOMES)[c["outcome"]],
        }

    def staleness_used(self) -> NDArray[np.int64]:
        """The staleness of every update that a server step used."""
        used = np.flatnonzero(np.array(self.outcome[: len(self)]) == USED)
        staleness: NDArray[np.int64] = np.array(self.end_version)[used] - np.array(self.start_version)[used]
        return staleness

    def admitted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Clients whose updates came into a buffer, with the server steps taken before; once for every update."""
        outcome = np.array(self.outcome[: len(self)])
        rows = np.flatnonzero((outcome == USED) | (outcome == UNUSED))
        return np.array(self.client)[rows], np.array(self.end_version)[rows]

    def state(self) -> dict[str, NDArray[Any]]:
        columns = {f"trips.{name}": np.array(getattr(self, name)[: len(self)]) for name in COLUMNS}
        return {**columns, "trips.order": np.array(self.order[: self.ended])}

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        for name in (*COLUMNS, "order"):
            column = getattr(self, name)
            del column[:]
            column.frombytes(arrays[f"trips.{name}"].tobytes())
        self.counted(len(self.client), len(self.order))
        self._fill(self._count)
