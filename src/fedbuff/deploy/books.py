"""The books: the server, who is there, and what became of every trip. All of it follows from the journal's records.

    commands = books.apply(record, blob)      # live, then written to the journal; or read from it

A live run and its replay go through `apply` and nothing else, so a journal brings back everything, bit for bit: after a crash
from the last checkpoint on, or from the beginning.

Records are facts as JSON, and the bytes of an update:

    begin                            the run began
    present  clients, up             these clients can be reached, or no longer
    left     trips                   the weights of these trips are sent now, the newest ones
    update   trip, examples + bytes  an update that passed every check of ours
    failed   trip, reason, strike    a trip that ended without one; it may be a strike as well
    woke                             a time has come that the server had asked for
    masked   trip + bytes            a masked update for the open buffer (secure aggregation), and then
    sealed   trip                    it is part of that buffer's sum, and at last
    opened   version + bytes         the sum
    strike   gateway, client, reason something that no honest client sends; the n-th one shuts it out
    refused  gateway, trip, reason   something that came too late or twice, which happens to the honest
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.events import (
    CancelTrip,
    Command,
    StartTrip,
    StepTaken,
    SumOpened,
    TripFailed,
    TripLeft,
    UpdateArrived,
    UpdateRejected,
    UpdateSealed,
    Wake,
    Woke,
)
from fedbuff.core.server import Server
from fedbuff.core.trips import CANCELLED, FAILED, LATE, UNUSED, Trips
from fedbuff.deploy import reasons

Record = dict[str, Any]
Ranges = tuple[tuple[int, int], ...]


class Present:
    """Which clients can be reached, and are not shut out: what the server's schedule asks before it starts a trip."""

    retry = 1.0  # seconds until it looks again when nobody was there

    def __init__(self, clients: int) -> None:
        self._up = np.zeros(clients, bool)
        self._out: set[int] = set()

    @property
    def share(self) -> float:
        return max(float(self._up.mean()), 0.01)

    def __len__(self) -> int:
        return int(self._up.sum())

    def __call__(self, client: int, time: float) -> bool:
        return bool(self._up[client]) and client not in self._out

    def which(self, clients: NDArray[np.int64], time: float) -> NDArray[np.bool_]:
        """The same for many clients at once."""
        there: NDArray[np.bool_] = self._up[clients] & ~np.isin(clients, list(self._out))
        return there

    def up(self, client: int) -> bool:
        return bool(self._up[client])

    def set(self, clients: Iterable[int], up: bool) -> None:
        self._up[list(clients)] = up

    def shut_out(self, client: int) -> None:
        self._out.add(client)

    def state(self) -> dict[str, Any]:
        return {"up": ranges_of(np.flatnonzero(self._up).tolist()), "out": sorted(self._out)}

    def restore(self, state: dict[str, Any]) -> None:
        self._up[:] = False
        self._up[list(numbers_in(state["up"]))] = True
        self._out = set(state["out"])


@dataclass
class Counts:
    """What was sent to us that we did not use, and by whom."""

    refused: Counter[str]
    strikes: Counter[str]  # "client 7", "gateway north"


class Books:
    """Everything that a journal brings back.

    strikes   so many bad messages shut a client out, or a gateway with all its clients
    """

    def __init__(self, server: Server, present: Present, strikes: int = 5) -> None:
        self.server, self.present, self._strikes = server, present, strikes
        self.trips, self.counts, self.time = Trips(), Counts(Counter(), Counter()), 0.0
        self.wake: float | None = None
        self.masked: dict[int, bytes] = {}  # uploads for the open buffer, by trip
        self.left: set[int] = set()  # trips in flight whose weights were sent
        self.staleness, self.used = 0, 0  # the sum over updates that a step has used, and how many they are

    def apply(self, record: Record, blob: bytes | memoryview = b"") -> list[Command]:
        """Let it have happened."""
        self.time = now = float(record["time"])
        kind = record["kind"]
        if kind == "begin":
            return self._noted(self.server.begin(now), now)
        if kind == "present":
            self.present.set(numbers_in(record["clients"]), record["up"])
            return self._noted(self.server.handle(Woke(now)), now)
        if kind == "woke":
            self.wake = None
            return self._noted(self.server.handle(Woke(now)), now)
        if kind == "left":
            return self._left(record["trips"], now)
        if kind == "update":
            return self._update(record["trip"], blob, record["examples"], now)
        if kind == "failed":
            return self._failed(record, now)
        if kind in ("strike", "refused"):
            return self._counted(record)
        if kind == "masked":
            self.masked[record["trip"]] = bytes(blob)
            self.trips.examples[record["trip"]] = record["examples"]
            return []
        if kind == "sealed":
            return self._ended(record["trip"], self.server.handle(UpdateSealed(record["trip"], now)), now)
        if kind == "opened":
            self.masked.clear()
            return self._noted(self.server.handle(SumOpened(record["version"], np.frombuffer(blob, np.float64), now)), now)
        raise ValueError(f"the journal has a record of kind {kind!r}, which this version of fedbuff does not know")

    def shut_out(self, who: str) -> bool:
        return self.counts.strikes[who] >= self._strikes

    def _left(self, trips: list[int], now: float) -> list[Command]:
        for trip in trips:
            self.server.handle(TripLeft(trip, now))
            self.trips.start_version[trip] = self.server.version
            self.left.add(trip)
        return []

    def _update(self, trip: int, blob: bytes | memoryview, examples: int, now: float) -> list[Command]:
        version, update = self.server.version, np.frombuffer(blob, self.server.weights.dtype)
        self.trips.examples[trip] = examples
        return self._ended(trip, self.server.handle(UpdateArrived(trip, update, examples, now)), now, version)

    def _ended(self, trip: int, commands: list[Command], now: float, version: int | None = None) -> list[Command]:
        refused = commands[0] if commands and isinstance(commands[0], UpdateRejected) else None
        self.left.discard(trip)
        outcome = UNUSED
        if refused is not None:
            self.masked.pop(trip, None)
            outcome = LATE if _too_stale(refused) else FAILED
        self.trips.end(trip, now, self.server.version if version is None else version, outcome)
        return self._noted(commands, now)

    def _failed(self, record: Record, now: float) -> list[Command]:
        trip, reason = record["trip"], record["reason"]
        self._counted(record)
        self.left.discard(trip)
        self.masked.pop(trip, None)
        self.trips.end(trip, now, self.server.version, reasons.outcome(reason))
        return self._noted(self.server.handle(TripFailed(trip, reason, now)), now)

    def _counted(self, record: Record) -> list[Command]:
        self.counts.refused[record["reason"]] += record.get("counts", 1)
        if record["kind"] == "strike" or record.get("strike"):
            client = record.get("client")
            who = f"gateway {record['gateway']}" if client is None else f"client {client}"
            self.counts.strikes[who] += 1
            if client is not None and self.shut_out(who):
                self.present.shut_out(client)
        return []

    def _noted(self, commands: list[Command], now: float) -> list[Command]:
        """Note in the table of trips what the server has ordered."""
        for command in commands:
            match command:
                case StartTrip(_, client, version):
                    self.trips.started(client, -1, now, version)
                case StepTaken(version, trips, staleness, weights):
                    for trip, weight, old in zip(trips, weights, staleness, strict=True):
                        self.trips.used(trip, weight, version)
                        self.staleness, self.used = self.staleness + old, self.used + 1
                case CancelTrip(trip):
                    self.left.discard(trip)
                    self.trips.end(trip, now, self.server.version, CANCELLED)
                case UpdateRejected(_, reason):  # few of them, so that they can be counted
                    self.counts.refused["too stale" if _too_stale(command) else reason] += 1
                case Wake(at):
                    self.wake = at
        return commands

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """As of a checkpoint: arrays, and facts ready for JSON."""
        arrays, facts = self.server.state()
        masked = {f"masked.{trip}": np.frombuffer(upload, np.uint8) for trip, upload in self.masked.items()}
        return {**arrays, **self.trips.state(), **masked}, {
            "server": facts,
            "present": self.present.state(),
            "refused": dict(self.counts.refused),
            "strikes": dict(self.counts.strikes),
            "time": self.time,
            "wake": self.wake,
            "staleness": [self.staleness, self.used],
            "left": sorted(self.left),
        }

    def restore(self, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
        self.present.restore(facts["present"])
        ours = ("trips.", "masked.")
        self.server.restore({name: a for name, a in arrays.items() if not name.startswith(ours)}, facts["server"])
        self.masked = {int(name[7:]): a.tobytes() for name, a in arrays.items() if name.startswith("masked.")}
        self.trips.restore(arrays)
        self.counts = Counts(Counter(facts["refused"]), Counter(facts["strikes"]))
        self.time, self.wake = facts["time"], facts["wake"]
        self.staleness, self.used = facts["staleness"]
        self.left = set(facts["left"])


def _too_stale(refused: UpdateRejected) -> bool:
    return refused.reason.startswith("staleness")


def ranges_of(numbers: Iterable[int]) -> Ranges:
    """Numbers as ranges, both ends included.

    >>> ranges_of([4, 0, 1, 2])
    ((0, 2), (4, 4))
    """
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return tuple(found)


def numbers_in(ranges: Iterable[tuple[int, int]]) -> Iterable[int]:
    """The numbers of ranges.

    >>> list(numbers_in([(0, 2), (4, 4)]))
    [0, 1, 2, 4]
    """
    return (number for first, last in ranges for number in range(first, last + 1))
