"""What happened (events, in) and what to do about it (commands, out): the whole language of `Server`.

Events are facts from outside and may be wrong; commands are orders to whoever drives the server.
`time` is virtual or real, in any unit, and only matters to rules that look at the clock.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)  # eq: an array has no single truth value
class UpdateArrived:
    """A client's update Δ = y_0 − y_Q: the weights it started from minus the weights after training."""

    trip: int
    update: Any
    examples: int = 1
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class TripFailed:
    """A trip ended without an update: the client dropped out, crashed, or ran out of time."""

    trip: int
    reason: str
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Woke:
    """The time named by a `Wake` command has come."""

    time: float


@dataclass(frozen=True, slots=True)
class TripLeft:
    """The weights of a trip that had to wait are sent only now: it starts from the newest version after all."""

    trip: int
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class UpdateSealed:
    """Secure aggregation has taken the masked update of a trip: nobody will see it, only the sum that it is part of."""

    trip: int
    time: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SumOpened:
    """The sum Σ s(τ_i) Δ_i of the full buffer at `version`: the answer to `OpenBuffer`."""

    version: int
    total: Any
    time: float = 0.0


Event = UpdateArrived | TripFailed | Woke | TripLeft | UpdateSealed | SumOpened


@dataclass(frozen=True, slots=True)
class StartTrip:
    """Send the weights of `version` to `client` and let it train."""

    trip: int
    client: Any
    version: int


@dataclass(frozen=True, slots=True)
class StepTaken:
    """The buffer was full: the server stepped to `version` on these trips (aligned tuples)."""

    version: int
    trips: tuple[int, ...]
    staleness: tuple[int, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class UpdateRejected:
    """The report of `trip` was not acceptable; weights, buffer and version are untouched."""

    trip: int
    reason: str


@dataclass(frozen=True, slots=True)
class CancelTrip:
    """`trip` is no longer wanted; a report of it will be rejected."""

    trip: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Report `Woke` at this time."""

    at: float


@dataclass(frozen=True, slots=True)
class OpenBuffer:
    """K masked updates are in the buffer of `version`: have their sum unmasked, and report it as `SumOpened`."""

    version: int


Command = StartTrip | StepTaken | UpdateRejected | CancelTrip | Wake | OpenBuffer
