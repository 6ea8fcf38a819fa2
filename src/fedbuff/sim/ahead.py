"""Look-ahead: updates are trained in bulk, before the server step that needs them.

When a version of the model exists, every trip that started on it can be trained, whatever the others do. The plan says
which of them a server step will use, so nothing is trained in vain. A trip of a version that exists is

    waiting        no server step within sight uses it, so far
    open or soon   one does: it is on a pile that becomes a chunk when that is worth sending, or when a trip of it is needed
    in a chunk     sent to the pool
    trained        its update lies in a row of the pool's, until the server step that uses it

All of this follows virtual time only: the same chunks for any pool, any number of workers, and after a resume.
"""

import math
from array import array
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.aggregate import finite
from fedbuff.core.trips import CANCELLED, DROPPED, FAILED, USED
from fedbuff.core.versions import Vector
from fedbuff.sim.fastplan import AnyPlan
from fedbuff.sim.pool import NOW, Chunk, Pool
from fedbuff.sim.steps import Step

MEMORY = 1 << 30  # bytes of updates that may wait for their server step, if not said otherwise
WORTH = 150_000_000  # multiplications in forward passes that make a chunk worth sending: some hundredths of a second
# what a chunk has at most
_CHUNK_TRIPS = 64
_CHUNK_BYTES = 64 << 20  # of updates
_CHUNK_MULTIPLICATIONS = 4 * WORTH
_OVER = (
    DROPPED,
    FAILED,
    CANCELLED,
)  # no update will come, whatever else happens; one that is late may be in time if others fail
_SOON = 3  # a trip that is needed before so many chunks are filled is needed soon


def steps_ahead(in_flight: float, buffer_size: int, update_bytes: int, memory: float = MEMORY) -> tuple[int, bool]:
    """How many server steps to look ahead, and whether `memory`, in bytes, is the limit.

    Far enough that nearly every trip in flight has ended by then, if the updates of all of them fit into memory.
    """
    fits = memory // update_bytes
    limited = in_flight + buffer_size > fits
    return max(1, int((fits if limited else 3 * in_flight) / buffer_size)), limited


class Ahead:
    """The updates of trips in flight, as far as they are trained.

    steps        server steps to look ahead, see `steps_ahead`
    per_step     trips that a server step takes
    per_example  what an example costs, in multiplications
    examples     that a client has on average
    worth        multiplications that make a chunk worth sending: the fewer, the less anybody waits for one
    """

    def __init__(
        self,
        plan: AnyPlan,
        pool: Pool,
        steps: int,
        per_step: int,
        mixing: bool,
        per_example: int,
        examples: float,
        worth: int = WORTH,
    ) -> None:
        self.steps = steps
        self._plan, self._pool, self._mixing, self._per_example = plan, pool, mixing, per_example
        matrix = pool.updates.matrix
        self._trips = max(1, min(_CHUNK_TRIPS, _CHUNK_BYTES // (matrix.shape[1] * matrix.itemsize)))
        self._worth = worth
        in_a_chunk = min(self._trips, worth / (per_example * examples))
        self._near = max(_SOON, math.ceil(_SOON * in_a_chunk / per_step))  # so many steps are soon
        self._waiting: dict[int, int] = {}  # trips of known versions that no server step within sight uses: trip -> version
        self._open = _Pile()  # trips for the next chunk
        self._soon = _Pile()  # and those that are needed soon: with them, it would be urgent as a whole
        self._chunks: dict[int, Chunk] = {}  # sent to the pool, by key
        # where each trip is, by number: row + 1 once it is trained, −key while it is in a chunk, 0 before and after
        self._place: NDArray[np.int64] = np.zeros(0, np.int64)
        self._holds: Counter[int] = Counter()  # why a version is kept
        self._seen, self._passed = 0, 0  # ends of trips that were looked at, and that the run has passed
        self._next_key = 0

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def version(self, version: int, weights: Vector, first: int, last: int, ended: int) -> None:
        """A version exists: its trips are those from `first` up to `last`, and `ended` trips have ended before it."""
        self._pool.keep(version, weights)
        self.hold(version)
        self.consider(version, first, last)
        if version:
            self.release(version - 1)
        if self._waiting or self._plan.failed:
            for trip in self._plan.trips.order[self._passed : ended]:
                if trip in self._waiting:  # it came too late
                    self.release(self._waiting.pop(trip))
                elif self._place[trip] > 0:  # it comes too late, after another one was refused
                    self._discard(trip)
        self._passed = ended

    def hold(self, version: int, times: int = 1) -> None:
        self._holds[version] += times

    def release(self, version: int, times: int = 1) -> None:
        self._holds[version] -= times
        if not self._holds[version]:
            del self._holds[version]
            self._pool.drop(version)

    def consider(self, version: int, first: int, last: int) -> None:
        """Open the trips that a server step within sight uses, of this version and of those waiting."""
        trips = self._plan.trips
        outcome, needed, sight = trips.outcome, trips.server_step, version + self.steps
        self._make_place(last)
        held = last - first
        for trip in range(first, last):
            if outcome[trip] == USED and needed[trip] <= sight:
                self._open_up(trip, version)
            elif outcome[trip] in _OVER:
                held -= 1
            else:
                self._waiting[trip] = version
        if held:
            self.hold(version, held)
        if self._waiting:
            self._look(version, sight)
        for pile, worth in ((self._soon, self._worth // 4), (self._open, self._worth)):
            if len(pile.trips) >= self._trips or pile.examples * self._per_example >= worth:
                self._flush(pile)

    def _look(self, version: int, sight: int) -> None:
        """See what became of the trips waiting."""
        trips = self._plan.trips
        ended = self._plan.steps.ended_by(sight)
        if ended is None:
            return
        for trip in trips.order[self._seen : ended]:
            if trip not in self._waiting:
                continue
            if trips.outcome[trip] == USED:
                del self._waiting[trip]
                self._open_up(trip, version)
            elif trips.outcome[trip] in _OVER:
                self.release(self._waiting.pop(trip))
        self._seen = ended

    def _make_place(self, trips: int) -> None:
        """Have a place for each of so many trips; half as many again, so that it is seldom done."""
        more = trips - len(self._place)
        if more > 0:
            self._place = np.append(self._place, np.zeros(max(more, len(self._place) // 2), np.int64))

    def _open_up(self, trip: int, version: int) -> None:
        trips = self._plan.trips
        pile = self._soon if trips.server_step[trip] <= version + self._near else self._open
        pile.trips.append(trip)
        pile.examples += trips.examples[trip]

    # ── chunks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _flush(self, pile: "_Pile", priority: int | None = None) -> None:
        """Send the pile to the pool."""
        examples = self._plan.trips.examples
        part: list[int] = []
        cost = 0
        for trip in pile.trips:
            part.append(trip)
            cost += examples[trip] * self._per_example
            if len(part) == self._trips or cost >= _CHUNK_MULTIPLICATIONS:
                self._send(part, priority)
                part, cost = [], 0
        if part:
            self._send(part, priority)
        pile.trips, pile.examples = [], 0

    def _send(self, trips: list[int], priority: int | None = None) -> None:
        table = self._plan.trips
        client, version, needed = table.client, table.start_version, table.server_step
        rows = self._pool.updates.take(len(trips))
        chunk = Chunk(*(array("q", part) for part in (trips, [client[t] for t in trips], [version[t] for t in trips], rows)))
        key = self.key()
        self._chunks[key] = chunk
        self._place[trips] = -key
        self._pool.submit(key, chunk, min([needed[t] for t in trips]) if priority is None else priority)

    def key(self) -> int:
        self._next_key += 1
        return self._next_key

    # ── updates ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def rows(self, step: Step) -> list[int]:
        """Where the updates are that a server step needs; waits for them if need be. They are there until `used`."""
        trips = np.asarray(step.trips)  # looked up at once: with many trips in flight, each lies far from the others
        places = self._place[trips].tolist()
        if min(places, default=1) > 0:
            return [p - 1 for p in places]
        if 0 in places:
            missing = {trip for trip, p in zip(step.trips, places, strict=True) if not p}
            if not missing.isdisjoint(self._soon.trips):
                self._flush(self._soon, NOW)
            if not missing.isdisjoint(self._open.trips):
                self._flush(self._open)
        for trip in step.trips:
            if self._place[trip] < 0:
                self._finish(-int(self._place[trip]))
        return [p - 1 for p in self._place[trips].tolist()]

    def _finish(self, key: int) -> None:
        self._pool.result(key)
        chunk = self._chunks.pop(key)
        self._place[np.asarray(chunk.trips)] = np.asarray(chunk.rows) + 1
        if not self._mixing:
            for version, times in Counter(chunk.versions).items():
                self.release(version, times)

    def _finish_all(self) -> None:
        for key in list(self._chunks):
            self._finish(key)

    def used(self, step: Step, rows: list[int]) -> None:
        """A server step has used these updates."""
        self._place[np.asarray(step.trips)] = 0
        if self._mixing:
            for trip in step.trips:
                self.release(self._plan.trips.start_version[trip])
        self._pool.updates.give(rows)

    def not_finite(self) -> set[int]:
        """Trips that are trained, or being so, to updates that no server can use."""
        self._finish_all()  # else what is found would depend on how fast the workers are
        return {trip for trip in self.trained() if not finite(self.updates[self._place[trip] - 1])}

    def start(self, trip: int) -> Vector:
        """The weights that a trip started from, which `mixing` needs."""
        return self._pool.weights(self._plan.trips.start_version[trip])

    @property
    def updates(self) -> NDArray[np.floating]:
        """All updates, by row."""
        return self._pool.updates.matrix

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────

    def trained(self) -> list[int]:
        """Trips whose updates are there."""
        found: list[int] = np.flatnonzero(self._place > 0).tolist()
        return found

    def forget(self, refused: Container[int], first: int, ended: int) -> None:
        """The plan is about to change, as updates were refused.

        What it says of trips from `first` on is void, and of others when they are used. `ended` trips have ended at the last
        server step that was taken.
        """
        self._finish_all()
        for trip in [t for t in self.trained() if t >= first or t in refused]:
            self._discard(trip)
        start = self._plan.trips.start_version
        for trip in self._open.trips + self._soon.trips:  # they may be used at another step, or not at all
            self._waiting[trip] = start[trip]
        for trip in [t for t in self._waiting if t >= first]:
            self.release(self._waiting.pop(trip))
        self._open, self._soon = _Pile(), _Pile()
        self._seen = ended

    def _discard(self, trip: int) -> None:
        """Nobody will use this update."""
        self._pool.updates.give([int(self._place[trip]) - 1])
        self._place[trip] = 0
        if self._mixing:
            self.release(self._plan.trips.start_version[trip])

    def reconsider(self, version: int, first: int, since: int, last: int) -> None:
        """The plan has changed, for trips from `since` on; those of this version are from `first` up to `last`.

        A trip that was to be cancelled may be used after all.
        """
        outcome = self._plan.trips.outcome
        for trip in range(first, since):
            if trip not in self._waiting and not self._place[trip] and outcome[trip] not in _OVER:
                self._waiting[trip] = version
                self.hold(version)
        self.consider(version, since, last)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        for key in [key for key in self._chunks if self._pool.finished(key)]:
            self._finish(key)
        trained = self.trained()
        arrays = {"updates": self.updates[[self._place[trip] - 1 for trip in trained]]}
        arrays |= {f"version.{version}": self._pool.weights(version) for version in self._holds}
        return arrays, {
            "trained": trained,
            "chunks": [list(chunk.trips) for chunk in self._chunks.values()],
            "open": self._open.trips,
            "soon": self._soon.trips,
            "waiting": list(self._waiting),
            "seen": [self._seen, self._passed],
        }

    def restore(self, arrays: dict[str, Any], facts: dict[str, Any], newest: int) -> None:
        for name, weights in arrays.items():
            if name.startswith("version."):
                self._pool.keep(int(name.removeprefix("version.")), weights)
        start, examples = self._plan.trips.start_version, self._plan.trips.examples
        self._make_place(len(self._plan.trips))
        self.hold(newest)
        self._seen, self._passed = facts["seen"]
        self._waiting = {trip: start[trip] for trip in facts["waiting"]}
        self._open, self._soon = (_Pile(list(t), sum(examples[trip] for trip in t)) for t in (facts["open"], facts["soon"]))
        for trips in facts["chunks"]:
            self._send(trips)
        for trip, row, update in zip(
            facts["trained"], self._pool.updates.take(len(facts["trained"])), arrays["updates"], strict=True
        ):
            self._place[trip] = row + 1
            self.updates[row] = update
        held = [*self._waiting, *self._open.trips, *self._soon.trips, *(trip for trips in facts["chunks"] for trip in trips)]
        self._holds.update(start[trip] for trip in [*held, *(facts["trained"] if self._mixing else ())])


@dataclass
class _Pile:
    """Trips that wait for a chunk, and the examples they have together."""

    trips: list[int] = field(default_factory=list)
    examples: int = 0
