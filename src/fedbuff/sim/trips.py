"""The table of trips: what every trip was and what became of it; the rows of trips.parquet."""

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

OUTCOMES = ("used", "dropped", "late", "failed", "cancelled", "unused")
USED, DROPPED, LATE, FAILED, CANCELLED, UNUSED = range(6)
_IN_FLIGHT = 255
_COLUMNS = ("client", "examples", "start_time", "end_time", "start_version", "end_version", "weight", "server_step", "outcome")


class Trips:
    """One row per trip, by trip number: filled in when the trip starts, and again when it ends.

    An update in the buffer is `unused` until the server steps on it; what is left of the last buffer stays so.
    """

    def __init__(self) -> None:
        self.client, self.examples = array("q"), array("q")
        self.start_time, self.end_time = array("d"), array("d")
        self.start_version, self.end_version = array("q"), array("q")
        self.weight, self.server_step = array("d"), array("q")
        self.outcome = array("B")  # an index into OUTCOMES
        self.ended = 0

    def started(self, client: int, examples: int, time: float, version: int) -> None:
        self.client.append(client)
        self.examples.append(examples)
        self.start_time.append(time)
        self.end_time.append(-1.0)
        self.start_version.append(version)
        self.end_version.append(-1)
        self.weight.append(0.0)
        self.server_step.append(-1)
        self.outcome.append(_IN_FLIGHT)

    def end(self, trip: int, time: float, version: int, outcome: int) -> None:
        self.end_time[trip] = time
        self.end_version[trip] = version
        self.outcome[trip] = outcome
        self.ended += 1

    def used(self, trip: int, weight: float, step: int) -> None:
        self.weight[trip] = weight
        self.server_step[trip] = step
        self.outcome[trip] = USED

    def arrays(self, trips: int | None = None) -> dict[str, NDArray[Any]]:
        """The trips that ended, of the first `trips` or of all, as arrays named like the columns of trips.parquet."""
        all_rows = {name: np.array(getattr(self, name)[:trips]) for name in _COLUMNS}
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

    def state(self) -> dict[str, NDArray[Any]]:
        return {f"trips.{name}": np.array(getattr(self, name)) for name in _COLUMNS}

    def restore(self, arrays: dict[str, NDArray[Any]]) -> None:
        for name in _COLUMNS:
            column = getattr(self, name)
            del column[:]
            column.frombytes(arrays[f"trips.{name}"].tobytes())
        self.ended = len(self.outcome) - self.outcome.count(_IN_FLIGHT)
