"""FedBuff's server: Algorithm 1 of Nguyen et al. (2022), as facts in and orders out.

    server = Server(weights=w0, clients=range(1000), start=refill(concurrency=100), buffer_size=10)
    commands = server.begin()                        # [StartTrip(trip=0, client=…, version=0), …]
    commands = server.handle(UpdateArrived(0, Δ))    # [StepTaken(version=1, …), StartTrip(…), …]

It does no IO, reads no clock and trains nothing: whoever drives it (the simulator, a network) obeys the commands
and reports what happened. Weights and updates are flat vectors, computed in the dtype of the weights.
"""

from collections.abc import Hashable, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np

from fedbuff.core import check
from fedbuff.core.aggregate import Aggregation
from fedbuff.core.events import (
    CancelTrip,
    Command,
    Event,
    OpenBuffer,
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
from fedbuff.core.optimizers import Optimizer, sgd
from fedbuff.core.protection import Protection
from fedbuff.core.schedule import Availability, Schedule
from fedbuff.core.staleness import Weigh, polynomial, weight_of
from fedbuff.core.starting import StartingRule, is_sampled
from fedbuff.core.versions import Vector, Versions, frozen

_UNBOUND = "this Server has no weights or no clients: give both, or pass it to fedbuff.simulate()"
_MOST_EXAMPLES = 1 << 53  # beyond it, integers are not exact as floats
SETTINGS = ("start", "buffer_size", "weigh", "optimizer", "max_staleness", "weight_by", "mixing", "average")


class Server:
    """The aggregation server of FedBuff and, with other settings, of its rivals.

    start          when trips start: `refill`, `arrivals` or `cohort`
    buffer_size    K: the server steps once this many updates are in the buffer
    weigh          staleness weight s(τ), any function int -> float
    optimizer      what a server step does with the mean update
    max_staleness  updates older than this are rejected
    weight_by      "uniform": Σ s(τ_i) Δ_i / K; "examples": Σ s(τ_i) n_i Δ_i / Σ n_i. Never divided by Σ s(τ_i)
    mixing         Xie et al.'s FedAsync: average models, w − y_i in place of Δ_i, so that with K = 1 and SGD
                   w ← (1 − η_g s(τ)) w + η_g s(τ) y_i
    average        evaluate, and end with, a mean of about so many of the last versions: w̄ ← w̄ + (w − w̄) / min(t, average).
                   With a small K a single version wavers; clients start from the newest all the same
    weights, clients, seed may be left to `fedbuff.simulate`, which knows them
    protection     differential privacy, by `fedbuff.privacy.protection.protect`; `simulate` makes its own
    available      when clients can start a trip (an `Availability`); `simulate` has its own
    sealed         updates come through secure aggregation: told by `UpdateSealed`, and in the end by `SumOpened`
    """

    def __init__(
        self,
        *,
        start: StartingRule,
        buffer_size: int,
        weigh: Weigh = polynomial(0.5),
        optimizer: Optimizer = sgd(),
        max_staleness: int | None = None,
        weight_by: Literal["uniform", "examples"] = "uniform",
        mixing: bool = False,
        average: int | None = None,
        weights: Vector | None = None,
        clients: Sequence[Hashable] | int | None = None,
        seed: int = 0,
        available: Availability | None = None,
        protection: Protection | None = None,
        sealed: bool = False,
    ) -> None:
        check_settings(start, buffer_size, weigh, max_staleness)
        check.able("step", "what takes a server step, e.g. sgd(1.0)", optimizer=optimizer)
        check.integer(0, seed=seed)
        check.one_of(("uniform", "examples"), weight_by=weight_by)
        check.switch(mixing=mixing)
        if average is not None:
            check.integer(1, check.MOST, average=average)
        if weight_by == "examples" and is_sampled(start):
            raise ValueError(
                "weight_by='examples': a Poisson cohort's sum is divided by its mean size in clients; use 'uniform'"
            )
        self.start, self.weigh, self.optimizer = check.plain(start), check.plain(weigh), check.plain(optimizer)
        self.buffer_size = int(buffer_size)
        self.max_staleness, self.weight_by, self.mixing = max_staleness, weight_by, mixing
        self.average = None if average is None else int(average)  # numpy's would make the mean one of float64
        self.initial_weights = None if weights is None else np.array(weights)
        self._begun, self._sealed = False, sealed
        live = {"protection": protection is not None, "sealed": sealed, "available": available is not None}
        self.live = [name for name, given in live.items() if given]  # what only a server of its own looks at
        self._bound: Schedule | None = None
        if weights is not None and clients is not None:
            w = np.array(weights)
            if w.ndim != 1 or not np.issubdtype(w.dtype, np.floating):
                raise ValueError(f"weights: expected a flat vector of floats, got shape {w.shape} of {w.dtype}")
            if not np.isfinite(w).all():
                raise ValueError("weights: expected finite numbers")
            if isinstance(clients, Integral):
                check.integer(1, check.MOST, clients=clients)
            self.clients = _different(range(int(clients)) if isinstance(clients, Integral) else clients)  # type: ignore[arg-type]
            if protection is not None:
                protection.check(self)
            limits = None if protection is None else protection.limits
            self._bound = Schedule(self.start, self.buffer_size, len(self.clients), int(seed), available, limits)
            self._versions, self._protection = Versions({0: w}, newest=0), protection
            divisor = self.buffer_size if self._bound.sampled else None
            self._aggregation = Aggregation(w, self.optimizer, mixing, divisor, self.average)
            self._buffer: list[tuple[int, int, float]] = []  # trip, staleness, weight

    def bind(self, weights: Vector, clients: Sequence[Hashable] | int, **changes: Any) -> "Server":
        """A new server with these settings, for this model and these clients."""
        kept = {name: getattr(self, name) for name in SETTINGS}
        return Server(**{**kept, "weights": weights, "clients": clients, **changes})

    # ── the paper's Algorithm 1 ──────────────────────────────────────────────────────────────────────────────────────

    def begin(self, time: float = 0.0) -> list[Command]:
        """The first orders: once, before any event."""
        if self._begun:
            raise RuntimeError("Server.begin() was called twice; make a new Server for a new run")
        check.number(-np.inf, time=time)
        commands = self._orders(self._schedule.begin(time))
        self._begun = True
        return commands + (self._go_on(time) if self._schedule.full() else [])

    def handle(self, event: Event) -> list[Command]:
        """What to do now that `event` happened."""
        if not self._begun:
            raise RuntimeError("call Server.begin() before the first event")
        if not isinstance(event, Event):
            raise TypeError(f"Server.handle() takes an event of fedbuff.core.events, e.g. UpdateArrived, got {event!r}")
        check.number(-np.inf, time=event.time)  # the driver's own clock, and needed only after the state has changed
        match event:
            case UpdateArrived():
                return self._update_arrived(event)
            case TripFailed():
                return self._trip_failed(event)
            case Woke():
                return self._start_trips(event.time)
            case TripLeft():
                return self._trip_left(event)
            case UpdateSealed():
                return self._update_sealed(event)
            case SumOpened():
                return self._sum_opened(event)

    def _update_arrived(self, event: UpdateArrived) -> list[Command]:
        started = self._in_flight(event.trip)
        if started is None:
            return [self._unknown(event.trip)]
        if self._sealed:
            return self._rejected(event, "updates come through secure aggregation here")
        client, start_version = started
        staleness = self.version - start_version
        examples = event.examples if self.weight_by == "examples" else 1
        update, problem = self._acceptable(event.update, examples, staleness)
        if update is None:
            return self._rejected(event, problem)

        examples = int(examples)  # a numpy integer would promote the sum to float64
        weight = weight_of(self.weigh, staleness)
        factor, protection = weight, self._protection
        if protection is not None:
            refused, factor = protection.refusal(client, self.version), protection.factor(update, weight)
            if refused:
                return self._rejected(event, refused)
        with np.errstate(over="ignore", invalid="ignore"):  # Δ̄ ← Δ̄ + s(τ_i) Δ_i, Δ_i clipped before if there is privacy
            refused = self._aggregation.add(update, factor, examples, self.versions[start_version])
        if refused:
            return self._rejected(event, refused)
        return self._admitted(event.trip, client, start_version, weight, event.time)

    def _update_sealed(self, event: UpdateSealed) -> list[Command]:
        """The same with an update that is somewhere else, clipped and weighted by its client.

        Whether it is too stale was for whoever let it in there to see: from the sum, nobody can take it out again.
        """
        started = self._in_flight(event.trip)
        if started is None:
            return [self._unknown(event.trip)]
        client, start_version = started
        refused = self._protection.refusal(client, self.version) if self._protection is not None else None
        if not self._sealed or self._schedule.full() or refused:
            reason = refused or ("the buffer is full, and waits for its sum" if self._sealed else "this server is not sealed")
            return self._rejected(event, reason)
        weight = weight_of(self.weigh, self.version - start_version)
        return self._admitted(event.trip, client, start_version, weight, event.time)

    def _admitted(self, trip: int, client: int, start_version: int, weight: float, time: float) -> list[Command]:
        if self._protection is not None:
            self._protection.admit(client, self.version)
        self._buffer.append((int(trip), self.version - start_version, weight))
        self.versions.release(start_version)
        self._schedule.arrived(int(trip))  # k ← k + 1
        return self._go_on(time)

    def _sum_opened(self, event: SumOpened) -> list[Command]:
        total = np.asarray(event.total)
        if not self._sealed or not self._schedule.full() or event.version != self.version:
            raise ValueError(f"a sum for version {event.version}: there is no full, sealed buffer of that version")
        if total.shape != self.weights.shape or not np.isfinite(total).all():
            raise ValueError(f"the sum of version {event.version}: expected {len(self.weights)} finite numbers")
        np.copyto(self._aggregation.room(), total, casting="same_kind")
        self._aggregation.add_sum(len(self._buffer))
        return [*self._step(), *self._start_trips(event.time)]

    def _go_on(self, time: float) -> list[Command]:
        commands: list[Command] = []
        if self._sealed:
            return [*([OpenBuffer(self.version)] if self._schedule.full() else []), *self._start_trips(time)]
        if self._schedule.full():  # if k == K
            commands = self._step()
        commands += self._start_trips(time)
        return commands + self._go_on(time) if self._schedule.full() else commands  # a Poisson cohort may be empty

    def _step(self) -> list[Command]:
        trips, staleness, weights = zip(*self._buffer, strict=True) if self._buffer else ((), (), ())
        noise = None if self._protection is None else self._protection.noise(self.version)
        with np.errstate(over="ignore", invalid="ignore"):  # too large a learning rate is for the caller to notice
            w = self._aggregation.step(max(staleness, default=0), noise)  # w ← w − η_g Δ̄ / K,  Δ̄ ← 0
        cancelled = self._schedule.step()  # t ← t + 1
        for _, version in cancelled:
            self.versions.release(version)
        self.versions.add(w)
        self._buffer = []  # k ← 0
        return [StepTaken(self.version, trips, staleness, weights), *(CancelTrip(trip) for trip, _ in cancelled)]

    def _rejected(self, event: UpdateArrived | UpdateSealed, reason: str) -> list[Command]:
        self._ended(event.trip)
        return [UpdateRejected(event.trip, reason), *self._go_on(event.time)]

    def _trip_failed(self, event: TripFailed) -> list[Command]:
        if self._in_flight(event.trip) is None:
            return [self._unknown(event.trip)]
        self._ended(event.trip)
        return self._go_on(event.time)

    def _trip_left(self, event: TripLeft) -> list[Command]:
        started = self._in_flight(event.trip)
        if started is None:
            return [self._unknown(event.trip)]
        self.versions.hold(self.version)
        self.versions.release(started[1])
        self._schedule.left(int(event.trip))
        return []

    # ── bookkeeping ──────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def versions(self) -> Versions:
        """Weights by version: the newest, and those that trips in flight started from."""
        if self._bound is None:
            raise RuntimeError(_UNBOUND)
        return self._versions

    @property
    def weights(self) -> Vector:
        """The newest weights, read-only; they stay valid after the server has stepped on."""
        return self.versions[self.versions.newest]

    @property
    def model(self) -> Vector:
        """What to evaluate and to hand out, read-only: the newest weights, or with `average` the mean of the last versions."""
        newest = self.weights
        return newest if self.average is None else frozen(self._aggregation.model)

    @property
    def begun(self) -> bool:
        """Whether `begin` was called, here or by the server whose state was restored."""
        return self._begun

    @property
    def exhausted(self) -> bool:
        """Whether no step will be taken any more: its protection lets nobody take part again, or has noise for no more."""
        return self._schedule.exhausted() or (self._protection is not None and self._protection.over(self.version))

    @property
    def version(self) -> int:
        """How many server steps were taken."""
        return self._schedule.version

    @property
    def buffered(self) -> int:
        """How many updates are in the buffer: k of Algorithm 1."""
        if self._bound is None:
            raise RuntimeError(_UNBOUND)
        return len(self._buffer)

    @property
    def in_flight(self) -> dict[int, tuple[Hashable, int]]:
        """Trips in flight: trip -> (client, start version)."""
        return {trip: (self.clients[client], version) for trip, (client, version) in self._schedule.in_flight.items()}

    def started(self, trip: int) -> tuple[Any, int] | None:
        """Client and start version of a trip, if it is in flight."""
        found = self._in_flight(trip)
        return None if found is None else (self.clients[found[0]], found[1])

    def state(self) -> tuple[dict[str, Vector], dict[str, Any]]:
        """Everything `restore` needs to go on bit for bit: arrays, and facts ready for JSON."""
        arrays, facts = self._aggregation.state()
        arrays |= {f"version.{version}": self.versions[version] for version in self.versions}
        if self._protection is not None:
            spent, facts["protection"] = self._protection.state()
            arrays |= spent
        return arrays, {"begun": self._begun, "schedule": self._schedule.state(), "buffer": self._buffer, **facts}

    def restore(self, arrays: dict[str, Vector], facts: dict[str, Any]) -> list[Command]:
        """Take over the state of a server with the same settings, in place of `begin`.

        Returns the wake-up that was pending, if any, for a driver that does not remember it; `in_flight` has the trips.
        """
        for name, w in arrays.items():
            if name.startswith("version.") and w.shape != self.weights.shape:
                raise ValueError(f"{name}: {len(w)} weights, and this server has {len(self.weights)}: another model's state")
        self._schedule.restore(facts["schedule"])
        held = [version for _, version in self._schedule.in_flight.values()]
        weights = {int(name.removeprefix("version.")): w for name, w in arrays.items() if name.startswith("version.")}
        self._versions = Versions(weights, self.version, held)
        self._aggregation.restore(self.weights, arrays, facts)
        if self._protection is not None:
            self._protection.restore(arrays, facts["protection"])
        self._buffer = [(trip, staleness, weight) for trip, staleness, weight in facts["buffer"]]
        self._begun = facts["begun"]
        return self._orders([])

    @property
    def _schedule(self) -> Schedule:
        if self._bound is None:
            raise RuntimeError(_UNBOUND)
        return self._bound

    def _start_trips(self, time: float) -> list[Command]:
        return self._orders(self._schedule.start_trips(time))

    def _orders(self, trips: list[int]) -> list[Command]:
        commands: list[Command] = []
        for trip in trips:
            client, version = self._schedule.in_flight[trip]
            self.versions.hold(version)
            commands.append(StartTrip(trip, self.clients[client], version))
        at = self._schedule.wake()
        return commands if at is None else [*commands, Wake(at)]

    def _in_flight(self, trip: Any) -> tuple[int, int] | None:
        return self._schedule.in_flight.get(int(trip)) if _is_integer(trip) else None

    def _acceptable(self, update: Any, examples: Any, staleness: int) -> tuple[Vector | None, str]:
        """The update as a vector of the model's dtype, or why not; that it is finite is seen on the sum."""
        if self.max_staleness is not None and staleness > self.max_staleness:
            return None, f"staleness {staleness} exceeds max_staleness={self.max_staleness}"
        if not _is_integer(examples) or not 1 <= examples <= _MOST_EXAMPLES:
            return None, "examples: expected an integer >= 1, and not absurdly large"
        try:
            vector = np.asarray(update)
        except Exception:  # whatever goes wrong in there is the fault of what came from outside
            vector = np.empty(0, object)
        if vector.dtype.kind not in "fiu":
            return None, f"expected a vector of {self.weights.dtype}, got {type(update).__name__} of {vector.dtype}"
        if vector.shape != self.weights.shape:
            return None, f"expected a vector of length {len(self.weights)}, got shape {vector.shape}"
        with np.errstate(over="ignore"):  # what does not fit the dtype becomes infinite, and is refused for that
            return vector.astype(self.weights.dtype, copy=False), ""

    def _ended(self, trip: int) -> None:
        self.versions.release(self._schedule.in_flight[trip][1])
        self._schedule.ended(trip)

    def _unknown(self, trip: Any) -> UpdateRejected:
        return UpdateRejected(
            trip,
            f"trip {trip!r} is not in flight (version {self.version}, {len(self._schedule.in_flight)} trips in flight); "
            "was it reported twice, or cancelled?",
        )


def check_settings(start: StartingRule, buffer_size: int, weigh: Weigh, max_staleness: int | None) -> None:
    """Refuse what can't be a server's, with or without training."""
    check.able("wanted", "when trips start, e.g. fedbuff.refill(concurrency=100)", start=start)
    check.integer(1, buffer_size=buffer_size)
    check.function(1, "a function of staleness, e.g. polynomial(0.5)", weigh=weigh)
    if max_staleness is not None:
        check.integer(0, check.MOST, max_staleness=max_staleness)


def _different(clients: Sequence[Hashable]) -> Sequence[Hashable]:
    """A copy of the clients' names, each of which must be there once; a range stays a range, however long."""
    if isinstance(clients, range):
        return clients
    if len(set(clients)) < len(clients):
        raise ValueError(f"clients: {len(clients)} clients, but only {len(set(clients))} different ones")
    return tuple(clients)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
