"""Look-ahead: updates are trained in bulk, before the server step that needs them.

When a version of the model exists, every trip that started on it can be trained, whatever the others do. The plan says
which of them a server step will use, so nothing is trained in vain. Trips wait in `open` until a chunk of them is worth
sending to the pool, or until the first of them is needed. All of this follows virtual time only: the same chunks for
any pool, any number of workers, and after a resume.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from fedbuff.core.versions import Vector
from fedbuff.sim.plan import Plan, Step
from fedbuff.sim.pool import Chunk, Pool
from fedbuff.sim.trips import CANCELLED, DROPPED, FAILED, USED, Trips

MEMORY = 1 << 30  # bytes of updates that may wait for their server step
_SOON = 5  # server steps: a trip needed so soon is sent at once, so that it is trained in time
_TRIPS = 64  # a chunk has at most so many trips
_COST = 30_000_000  # and about so many examples × weights: a tenth of a second for a convolutional network


def horizon(in_flight: float, buffer_size: int, update_bytes: int) -> tuple[int, bool]:
    """How many server steps to look ahead, and whether memory is the limit.

    Far enough that nearly every trip in flight has ended by then, if the updates of all of them fit into memory.
    """
    fits = MEMORY // update_bytes
    limited = in_flight + buffer_size > fits
    return max(1, int((fits if limited else 3 * in_flight) / buffer_size)), limited


class Ahead:
    """The updates of trips in flight, as far as they are trained."""

    def __init__(self, plan: Plan, pool: Pool, steps: int, mixing: bool, weights: int) -> None:
        self.steps = steps
        self._plan, self._pool, self._mixing, self._weights = plan, pool, mixing, weights
        self._waiting: dict[int, int] = {}  # trips of known versions that no server step within sight uses: trip -> version
        self._open: dict[int, int] = {}  # trips to be trained next: trip -> version
        self._cost = 0
        self._chunks: dict[int, Chunk] = {}  # sent to the pool, by key
        self._chunk_of: dict[int, int] = {}  # trip -> key, while it is there
        self._row_of: dict[int, int] = {}  # trained trips -> row
        self._holds: Counter[int] = Counter()  # why a version is kept
        self._seen, self._passed = 0, 0  # ends of trips that were looked at, and that the run has passed
        self._next_key = 0

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def version(self, version: int, weights: Vector, first: int, last: int, ended: int) -> None:
        """A version exists: its trips are those from `first` up to `last`, and `ended` trips have ended before it."""
        self._pool.keep(version, weights)
        self.hold(version)
        self._consider(version, first, last)
        if version:
            self.release(version - 1)
        if self._waiting:
            for trip in self._plan.trips.order[self._passed : ended]:
                if trip in self._waiting:  # it came too late
                    self.release(self._waiting.pop(trip))
        self._passed = ended

    def hold(self, version: int) -> None:
        self._holds[version] += 1

    def release(self, version: int) -> None:
        self._holds[version] -= 1
        if not self._holds[version]:
            del self._holds[version]
            self._pool.drop(version)

    def _consider(self, version: int, first: int, last: int) -> None:
        """Open the trips that a server step within sight uses, of this version and of those waiting."""
        trips, sight, soonest = self._plan.trips, version + self.steps, version + _SOON + 1
        for trip in range(first, last):
            if trips.outcome[trip] == USED and (needed := trips.server_step[trip]) <= sight:
                soonest = min(soonest, needed)
                self._holds[version] += 1
                self._open_up(trip, version)
            elif not over(trips, trip):
                self._holds[version] += 1
                self._waiting[trip] = version
        if self._waiting:
            self._look(sight)
        if len(self._open) >= _TRIPS or self._cost >= _COST or soonest <= version + _SOON:
            self._flush()

    def _look(self, sight: int) -> None:
        """See what became of the trips waiting."""
        trips, order = self._plan.trips, self._plan.trips.order
        for step in reversed(self._plan.steps):
            if step.version <= sight:
                break
        else:
            return
        for trip in order[self._seen : step.ended]:
            version = self._waiting.get(trip)
            if version is None:
                continue
            if trips.outcome[trip] == USED:
                del self._waiting[trip]
                self._open_up(trip, version)
            elif over(trips, trip):
                del self._waiting[trip]
                self.release(version)
        self._seen = step.ended

    def _open_up(self, trip: int, version: int) -> None:
        self._open[trip] = version
        self._cost += self._plan.trips.examples[trip] * self._weights

    # ── chunks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _flush(self) -> None:
        """Send what is open to the pool."""
        part: list[int] = []
        cost = 0
        for trip in self._open:
            part.append(trip)
            cost += self._plan.trips.examples[trip] * self._weights
            if len(part) == _TRIPS or cost >= _COST:
                self._send(part)
                part, cost = [], 0
        if part:
            self._send(part)
        self._open.clear()
        self._cost = 0

    def _send(self, trips: list[int]) -> None:
        table, take = self._plan.trips, self._pool.updates.take
        chunk = Chunk(trips, [table.client[t] for t in trips], [table.start_version[t] for t in trips], [take() for _ in trips])
        key = self.key()
        self._chunks[key] = chunk
        for trip in trips:
            self._chunk_of[trip] = key
        self._pool.submit(key, chunk, min([table.server_step[t] for t in trips]))

    def key(self) -> int:
        self._next_key += 1
        return self._next_key

    # ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, step: Step) -> None:
        """Have everything under way that a server step needs."""
        if any(trip in self._open for trip in step.trips):
            self._flush()

    def update(self, trip: int) -> Vector:
        """The update of a trip; waits for it if need be. It is there until `used`."""
        row = self._row_of.get(trip)
        if row is None:
            self._finish(self._chunk_of[trip])
            row = self._row_of[trip]
        return self._pool.updates.matrix[row]  # type: ignore[no-any-return]

    def _finish(self, key: int) -> None:
        self._pool.result(key)
        chunk = self._chunks.pop(key)
        for trip, version, row in zip(chunk.trips, chunk.versions, chunk.rows, strict=True):
            del self._chunk_of[trip]
            self._row_of[trip] = row
            if not self._mixing:
                self.release(version)

    def used(self, trips: Iterable[int]) -> None:
        """A server step has used these updates."""
        for trip in trips:
            self._pool.updates.give(self._row_of.pop(trip))
            if self._mixing:
                self.release(self._plan.trips.start_version[trip])

    def start(self, trip: int) -> Vector | None:
        """The weights that a trip started from, if `mixing` needs them."""
        return self._pool.weights(self._plan.trips.start_version[trip]) if self._mixing else None

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────

    def forget(self, version: int, first: int, ended: int) -> None:
        """The plan has changed since `version`, when `ended` trips had ended: what it said of trips from `first` on is void."""
        for key in list(self._chunks):
            self._finish(key)
        for trip in [t for t in self._row_of if t >= first]:
            self._pool.updates.give(self._row_of.pop(trip))
            if self._mixing:
                self.release(version)
        for trips in (self._open, self._waiting):
            for trip in [t for t in trips if t >= first]:
                del trips[trip]
                self.release(version)
        for trip, start in self._open.items():  # they may be used at another step, or not at all
            self._waiting[trip] = start
        self._open.clear()
        self._cost, self._seen = 0, ended

    def consider_again(self, version: int, first: int, last: int) -> None:
        self._consider(version, first, last)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        for key in [key for key in self._chunks if self._pool.finished(key)]:
            self._finish(key)
        rows = list(self._row_of.values())
        arrays = {"updates": self._pool.updates.matrix[rows] if rows else np.empty((0, 0), np.float32)}
        arrays |= {f"version.{version}": self._pool.weights(version) for version in self._holds}
        return arrays, {
            "trained": list(self._row_of),
            "chunks": [list(chunk.trips) for chunk in self._chunks.values()],
            "open": list(self._open),
            "waiting": list(self._waiting),
            "seen": [self._seen, self._passed],
        }

    def restore(self, arrays: dict[str, Any], facts: dict[str, Any], newest: int) -> None:
        for name, weights in arrays.items():
            if name.startswith("version."):
                self._pool.keep(int(name.removeprefix("version.")), weights)
        start = self._plan.trips.start_version
        self.hold(newest)
        self._seen, self._passed = facts["seen"]
        for trip in facts["waiting"]:
            self._waiting[trip] = start[trip]
        for trip in facts["open"]:
            self._open_up(trip, start[trip])
        for trips in facts["chunks"]:
            self._send(trips)
        for trip, update in zip(facts["trained"], arrays["updates"], strict=True):
            row = self._row_of[trip] = self._pool.updates.take()
            self._pool.updates.matrix[row] = update
        held = [*facts["waiting"], *facts["open"], *self._chunk_of, *(facts["trained"] if self._mixing else ())]
        self._holds.update(start[trip] for trip in held)


def over(trips: Trips, trip: int) -> bool:
    """Whether a trip has ended without an update, whatever else happens; one that is late may be in time if others fail."""
    return trips.outcome[trip] in (DROPPED, FAILED, CANCELLED)
