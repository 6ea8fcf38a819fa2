"""The table of trips: what every trip was and what became of it; the rows of trips.parquet."""

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

OUTCOMES = ("used", "dropped", "late", "failed", "cancelled", "unused")
USED, DROPPED, LATE, FAILED, CANCELLED, UNUSED = range(6)
_IN_FLIGHT = 255
_BLANKS = {"end_time": -1.0, "end_version": -1, "weight": 0.0, "server_step": -1, "outcome": _IN_FLIGHT}
_BLOCK = 4096
_COLUMNS = ("client", "examples", "start_time", "end_time", "start_version", "end_version", "weight", "server_step", "outcome")


class Trips:
    """One row per trip, by trip number: filled in when the trip starts, and again when it ends.

    An update in the buffer is `unused` until the server steps on it; what is left of the last buffer stays so.
    """

    def __init__(self) -> None:
        self.client, self.examples, self.start_time, self.start_version = array("q"), array("q"), array("d"), array("q")
        # what is known at the end is there from the start, in blocks of blanks: half the work per trip
        self.end_time, self.end_version, self.weight, self.server_step = array("d"), array("q"), array("d"), array("q")
        self.outcome = array("B")  # an index into OUTCOMES
        self.order = array("q")  # the trips that ended, in this order

    def __len__(self) -> int:
        return len(self.client)

    @property
    def ended(self) -> int:
        return len(self.order)

    def started(self, client: int, examples: int, time: float, version: int) -> None:
        if len(self.client) == len(self.outcome):
            for name, blank in _BLANKS.items():
                getattr(self, name).extend([blank] * _BLOCK)
        self.client.append(client)
        self.examples.append(examples)
        self.start_time.append(time)
        self.start_version.append(version)

    def end(self, trip: int, time: float, version: int, outcome: int) -> None:
        self.end_time[trip] = time
        self.end_version[trip] = version
        self.outcome[trip] = outcome
        self.order.append(trip)

    def used(self, trip: int, weight: float, step: int) -> None:
        self.weight[trip] = weight
        self.server_step[trip] = step
        self.outcome[trip] = USED

    def rewind(self, started: int, ended: int) -> None:
        """Back to right after a server step, when so many trips had started, and so many of them ended."""
        for name, blank in _BLANKS.items():
            column = getattr(self, name)
            for trip in self.order[ended:]:
                column[trip] = blank
        del self.order[ended:], self.client[started:], self.examples[started:], self.start_time[started:]
        del self.start_version[started:]

    def arrays(self, trips: int | None = None) -> dict[str, NDArray[Any]]:
        """The trips that ended, of the first `trips` or of all, as arrays named like the columns of trips.parquet."""
        first = len(self) if trips is None else min(trips, len(self))
        all_rows = {name: np.array(getattr(self, name)[:first]) for name in _COLUMNS}
        rows = np.flatnonzero(all_rows["outcome"] != _IN_FLIGHT)
        c = {name: column[rows] for name, column in all_rows.items()}
        return {
            "trip": rows,
            **{name: c[name] for name in _COLUMNS[:6]},
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

    def state(self) -> dict[str, NDArray[Any]]:
        columns = {f"trips.{name}": np.array(getattr(self, name)[: len(self)]) for name in _COLUMNS}
        return {**columns, "trips.order": np.array(self.order)}

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        for name in (*_COLUMNS, "order"):
            column = getattr(self, name)
            del column[:]
            column.frombytes(arrays[f"trips.{name}"].tobytes())
