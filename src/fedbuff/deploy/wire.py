"""What the server and a gateway say to each other: `Orders` out, a `Report` back, each a block of bytes.

A gateway stands for many clients. Orders name trips, with the weights of the versions they start from; the report has a result
per trip. Both are safe to repeat: a trip has a number, and whoever has seen the number knows the trip.

`Report.from_bytes` reads what may come from anybody: it takes exactly what `to_bytes` makes, and raises `MalformedError` for
anything else.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from fedbuff.core.versions import Vector

_HEAD = struct.Struct("<4sI")
_ORDERS, _REPORT = b"fbO1", b"fbR1"
_MOST_FACTS = 16 << 20
_DTYPES = ("float16", "float32", "float64")


class MalformedError(ValueError):
    """Bytes that are no message of ours."""


@dataclass(frozen=True)
class Order:
    """Train this client's trip from the weights of `version`."""

    trip: int
    client: int
    version: int


@dataclass(frozen=True)
class Orders:
    """Server to gateway.

    job       which run of the server this is: trips of another are not meant
    sgd       a digest of how clients train; a gateway with other settings says so instead of training something else
    forget    trips whose results need not be kept any longer
    ask       masked updates wanted for the open buffer, with what is needed to mask them (secure aggregation)
    offer     whom the updates are masked for (secure aggregation)
    """

    job: str
    trips: tuple[Order, ...] = ()
    weights: Mapping[int, Vector] = field(default_factory=dict)
    forget: tuple[int, ...] = ()
    sgd: str = ""
    ask: tuple[tuple[int, bytes, int], ...] = ()  # trip, slot, version of the open buffer
    offer: bytes = b""

    def to_bytes(self) -> bytes:
        facts = {
            "job": self.job,
            "trips": [[t.trip, t.client, t.version] for t in self.trips],
            "weights": [[version, str(w.dtype), len(w)] for version, w in self.weights.items()],
            "forget": self.forget,
            "sgd": self.sgd,
            "ask": [[trip, slot.hex(), version] for trip, slot, version in self.ask],
            "offer": self.offer.hex(),
        }
        return _pack(_ORDERS, facts, [np.ascontiguousarray(w).data for w in self.weights.values()])

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        facts, rest = _unpack(_ORDERS, data)
        try:
            weights, at = {}, 0
            for version, kind, length in facts["weights"]:
                if kind not in _DTYPES or length < 0:
                    raise MalformedError(f"{length} weights of {kind!r}")
                weights[version] = np.frombuffer(rest, kind, length, at)
                at += weights[version].nbytes
            if at != len(rest):
                raise MalformedError(f"{len(rest) - at} bytes too many")
            return cls(
                facts["job"],
                tuple(Order(*trip) for trip in facts["trips"]),
                weights,
                tuple(facts["forget"]),
                facts["sgd"],
                tuple((trip, bytes.fromhex(slot), version) for trip, slot, version in facts["ask"]),
                bytes.fromhex(facts["offer"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as e:
            raise MalformedError(f"orders: {e}") from e


@dataclass(frozen=True)
class Result:
    """What became of a trip.

    payload   the update's bytes, in the dtype of the weights; masked, with secure aggregation; or
    problem   why there is none; or neither: trained, and waiting to be asked (secure aggregation)
    seconds   that training took
    """

    trip: int
    client: int
    payload: bytes | memoryview = b""
    examples: int = 1
    seconds: float = 0.0
    problem: str = ""
    version: int = 0  # that the trip started from: the gateway's own note, which is not sent


@dataclass(frozen=True)
class Report:
    """Gateway to server.

    clients   whom this gateway stands for: ranges of numbers, both ends included
    holding   trips whose results it keeps, beside those in `results`
    """

    job: str
    clients: tuple[tuple[int, int], ...] = ()
    results: tuple[Result, ...] = ()
    holding: tuple[int, ...] = ()
    problem: str = ""

    def to_bytes(self) -> bytes:
        facts = {
            "job": self.job,
            "clients": self.clients,
            "results": [[r.trip, r.client, len(r.payload), r.examples, r.seconds, r.problem] for r in self.results],
            "holding": self.holding,
            "problem": self.problem,
        }
        return _pack(_REPORT, facts, [r.payload for r in self.results])

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Self:
        facts, rest = _unpack(_REPORT, data)
        if set(facts) != {"job", "clients", "results", "holding", "problem"}:
            raise MalformedError(f"report: unexpected fields {', '.join(sorted(map(str, facts)))[:80]}")
        results, at = [], 0
        for row in _list(facts["results"], "results"):
            if not isinstance(row, list) or len(row) != 6:
                raise MalformedError("report: a result has six fields")
            trip, client, size, examples = (_natural(value, "a result's numbers") for value in row[:4])
            seconds, problem = row[4], row[5]
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
                raise MalformedError("report: seconds: expected a duration")
            if not isinstance(problem, str) or at + size > len(rest):
                raise MalformedError("report: a result is cut short")
            results.append(Result(trip, client, rest[at : at + size], examples, float(seconds), problem[:200]))
            at += size
        if at != len(rest):
            raise MalformedError(f"report: {len(rest) - at} bytes too many")
        ranges = [
            tuple(_natural(end, "clients") for end in _list(pair, "clients")) for pair in _list(facts["clients"], "clients")
        ]
        if any(len(pair) != 2 or pair[0] > pair[1] for pair in ranges):
            raise MalformedError("report: clients: expected ranges")
        if not isinstance(facts["job"], str) or not isinstance(facts["problem"], str):
            raise MalformedError("report: job and problem are text")
        holding = tuple(_natural(trip, "holding") for trip in _list(facts["holding"], "holding"))
        return cls(facts["job"], tuple(ranges), tuple(results), holding, facts["problem"][:200])  # type: ignore[arg-type]


def _pack(kind: bytes, facts: dict[str, Any], blobs: Sequence[bytes | memoryview]) -> bytes:
    line = json.dumps(facts, separators=(",", ":")).encode()
    return b"".join([_HEAD.pack(kind, len(line)), line, *blobs])


def _unpack(kind: bytes, data: bytes | memoryview) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise MalformedError("cut short")
    found, size = _HEAD.unpack(view[: _HEAD.size])
    if found != kind:
        raise MalformedError(f"expected a message of kind {kind!r}, got {found!r}")
    if size > _MOST_FACTS or _HEAD.size + size > len(view):
        raise MalformedError("cut short")
    try:
        facts = json.loads(bytes(view[_HEAD.size : _HEAD.size + size]))
    except (ValueError, RecursionError) as e:
        raise MalformedError(f"not JSON: {e}") from e
    if not isinstance(facts, dict):
        raise MalformedError("not a table")
    return facts, view[_HEAD.size + size :]


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise MalformedError(f"report: {what}: expected a list")
    return value


def _natural(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
        raise MalformedError(f"report: {what}: expected a number from 0 on")
    return value
