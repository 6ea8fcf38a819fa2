"""Who is sent what: trips become messages to gateways, and reports become facts for the books. No clock and no network in here.

    dispatch.online({node: name, …}, now)              # who is there
    dispatch.reported(message, data, now)              # a gateway has answered
    dispatch.lost(message)                             # it never will
    dispatch.tick(now)                                 # deadlines
    messages = dispatch.messages(now)                  # what to send, but first …
    for record, blob in dispatch.records(): …          # … what happened goes onto the disk, since orders acknowledge it

Networks lose and repeat messages, and processes die. What makes that harmless: an order may be sent again (a gateway that has
the result answers with it), a result may come again (the trip is not in flight any more, so it is counted and dropped), and a
gateway keeps a result until it is told to forget it. A trip that is not back at its deadline has failed, and frees its slot.

Gateways authenticate (to Flower's SuperLink), and each stands for certain clients. Whatever does not come from the gateway of a
trip's client, or is no proper update, is refused with a reason, and is a strike.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedbuff.compiled.norm import norm
from fedbuff.core.events import CancelTrip, Command, StartTrip
from fedbuff.core.trips import FAILED, UNUSED, USED
from fedbuff.deploy.books import Books, Ranges, Record, numbers_in, ranges_of
from fedbuff.deploy.reasons import (
    ANOTHERS,
    DEADLINE,
    EXAMPLES,
    LATE,
    MALFORMED,
    NOT_ASKED,
    NOT_FINITE,
    NOT_ITS_CLIENTS,
    NOT_SEALED,
    OTHER_JOB,
    OVER,
    PROBLEM,
    RATE,
    SHUT_OUT,
    SIZE,
    STRIKES,
    TAKEN,
    TOO_LONG,
    TWICE,
    UNKNOWN,
)
from fedbuff.deploy.settings import Deployment
from fedbuff.deploy.vault import Vault
from fedbuff.deploy.wire import MalformedError, Order, Orders, Report, Result

_ARRIVED = (USED, UNUSED, FAILED)  # outcomes of trips whose result was here before
_MINUTE = 60.0
_MOST_SEALED = 1024  # bytes that come with a masked update


@dataclass
class Gateway:
    """What we know of a gateway; it is known by its registered name, or by its node if it has none."""

    name: str
    node: int | None = None
    clients: frozenset[int] | None = None  # None: not asked yet
    queue: deque[int] = field(default_factory=deque)  # trips to be sent
    sent: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)  # message -> its number, trips
    ask: list[tuple[int, bytes, int]] = field(default_factory=list)  # masked updates to ask for: trip, slot, version
    forget: set[int] = field(default_factory=set)
    greeted: bool = False
    messages: int = 0
    last_sent: float = -math.inf
    last_seen: float = 0.0
    problem: str = ""


class Dispatch:
    """The server's half of the protocol.

    job    names this run; a report of another one is of no use
    sgd    a digest of how clients train
    over   whether the run is at its end, and why: asked before each update, as several steps may be in one report
    vault  through which updates come, with secure aggregation; none that is staler than `most_stale`
    """

    def __init__(
        self,
        books: Books,
        deployment: Deployment,
        job: str,
        sgd: str = "",
        over: Callable[[], str | None] = lambda: None,
        vault: Vault | None = None,
        most_stale: int = 0,
    ) -> None:
        self.books, self.deployment, self.job, self._sgd, self._over, self._vault = books, deployment, job, sgd, over, vault
        self._trained: deque[int] = deque()  # trips whose updates could be asked for (secure aggregation)
        self._asked: set[int] = set()  # those that are
        self._taken: set[int] = set()  # those that the vault has
        self._most_stale = most_stale
        self.gateways: dict[str, Gateway] = {}
        self._by_node: dict[int, Gateway] = {}
        self._gateway_of: dict[int, Gateway] = {}  # by client
        self._owner: dict[str, Gateway] = {}  # of messages that are out
        self._overtaken: dict[str, int] = {}  # gateway -> the newest message that it has answered
        self._records: list[tuple[Record, bytes | memoryview]] = []
        self._answered: dict[int, deque[float]] = {}  # client -> when it reported, in the last minute
        self._closing = False
        self._young: deque[int] = deque(sorted(books.server.in_flight))  # trips in the order of their start
        for name in deployment.gateways:
            self._known(name).clients = frozenset(numbers_in(deployment.clients_of(name)))
            self._bind(self.gateways[name])

    # ── facts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, now: float) -> None:
        """The first time; after a restart, `go_on`."""
        self._happened({"kind": "begin", "time": now})

    def go_on(self, now: float) -> None:
        """After a restart: whoever was there has to show up again; trips in flight are queued for their gateways already."""
        up = self.books.present.state()["up"]
        if up:
            self._happened({"kind": "present", "clients": up, "up": False, "time": now})

    def online(self, nodes: Mapping[int, str], now: float) -> None:
        """These nodes can be reached now."""
        for node, name in nodes.items():
            gateway = self._known(name or str(node))
            if gateway.node != node:
                if gateway.node is not None:
                    self._by_node.pop(gateway.node, None)
                    for message in list(gateway.sent):  # they went to the node that it was
                        self.lost(message)
                gateway.node, gateway.greeted = node, False
                self._by_node[node] = gateway
                gateway.last_seen = now
        for gateway in list(self.gateways.values()):
            if gateway.node is not None and gateway.node not in nodes:
                self._gone(gateway, now)

    def reported(self, message: str, data: bytes | memoryview, now: float) -> None:
        """The answer to a message, from the gateway that it was sent to."""
        gateway = self._owner.pop(message, None)
        if gateway is None:
            return
        number, trips = gateway.sent.pop(message)
        self._overtaken[gateway.name] = max(number, self._overtaken.get(gateway.name, -1))
        gateway.last_seen = now
        if self.books.shut_out(f"gateway {gateway.name}"):
            self.books.counts.refused[SHUT_OUT] += 1
            return
        most = self.deployment.most_bytes(len(trips), self.books.server.weights.nbytes)
        try:
            if len(data) > most:
                raise MalformedError(f"{len(data):,} bytes, expected at most {most:,}")
            report = Report.from_bytes(data)
        except MalformedError as e:
            self._unusable(gateway, trips, MALFORMED, now, str(e))
            return
        gateway.problem = report.problem
        if report.job != self.job:
            self._unusable(gateway, trips, OTHER_JOB, now)
            return
        if (reason := self._introduced(gateway, report.clients)) is not None:
            self._unusable(gateway, trips, reason, now, f"{report.clients}"[:100])
            gateway.greeted = reason == TAKEN  # it is asked again when the other one is gone
            return
        if any(not self.books.present.up(client) for client in numbers_in(report.clients)):
            self._present(numbers_in(report.clients), True, now)
        for result in report.results:
            self._result(gateway, result, now)
        for trip in report.holding:
            if self._closing and self._wanted(trip) and trip not in gateway.forget:
                self._refuse(gateway, self.books.trips.client[trip], OVER, now, trip)
            if self._closing or not self._wanted(trip):
                gateway.forget.add(trip)
        if not report.problem:
            self._again(trips)  # those that it did not report; with a problem it would not be better the next time

    def lost(self, message: str) -> None:
        """A message that will not be answered: it expired, or its node went away."""
        gateway = self._owner.pop(message, None)
        if gateway is not None:
            _, trips = gateway.sent.pop(message)
            self._again(trips)
            gateway.greeted = False

    def tick(self, now: float) -> None:
        """What time brings: deadlines, and what the server wanted to be woken for."""
        for name, newest in self._overtaken.items():  # a gateway answers in order: what was passed over, it never got
            sent = self.gateways[name].sent
            for message in [m for m, (number, _) in sent.items() if number < newest]:
                self.lost(message)
        self._overtaken.clear()
        if self._closing or self._over() is not None:
            return
        started, limit = self.books.trips.start_time, now - self.deployment.deadline
        while self._young and (not self._wanted(self._young[0]) or started[self._young[0]] <= limit):
            trip = self._young.popleft()
            if self._wanted(trip):
                self._happened({"kind": "failed", "trip": trip, "reason": DEADLINE, "time": now})
        if self.books.wake is not None and self.books.wake <= now:
            self._happened({"kind": "woke", "time": now})

    def seal(self, now: float) -> None:
        """Secure aggregation: take what has arrived, and is safe in the journal, into the open buffer; open it when it is full.

        To be called when `records` are on the disk; it makes new ones.
        """
        books, vault = self.books, self._vault
        if vault is None or self._closing:
            return
        new = {trip: upload for trip, upload in books.masked.items() if trip not in self._taken}
        if new:
            for trip, reason in vault.take(new, books.server.version).items():
                self._taken.add(trip)
                if not self._wanted(trip):
                    continue  # sealed before a restart: the vault knows it again now
                if reason is None:
                    self._happened({"kind": "sealed", "trip": trip, "time": now})
                else:
                    self._happened({"kind": "failed", "trip": trip, "reason": NOT_SEALED, "detail": reason, "time": now})
                self._gateway_of[books.trips.client[trip]].forget.add(trip)
        if books.server.buffered == books.server.buffer_size:
            version = books.server.version
            total = vault.open(version)
            self._taken.clear()
            self._happened({"kind": "opened", "version": version, "time": now}, total.tobytes())

    def close(self) -> None:
        """The run is over: no trip starts, is sent or ends any more, and what still comes back is acknowledged and not used."""
        self._closing = True
        for gateway in self.gateways.values():
            gateway.queue.clear()

    @property
    def drained(self) -> bool:
        """After `close`: nothing is out, and everybody knows what to forget."""
        waiting = [g for g in self.gateways.values() if g.node is not None and g.forget]
        return self._closing and not self._owner and all(self.books.shut_out(f"gateway {g.name}") for g in waiting)

    # ── what follows ─────────────────────────────────────────────────────────────────────────────────────────────────

    def records(self) -> list[tuple[Record, bytes | memoryview]]:
        """What has happened since the last time: it must be safe before what `messages` has returned leaves."""
        found, self._records = self._records, []
        return found

    @property
    def outstanding(self) -> list[str]:
        """Messages that are out."""
        return list(self._owner)

    def messages(self, now: float | None = None) -> list[tuple[int, Orders, str]]:
        """What to send now: node, orders, and a name until `sent` says which message it became, or `lost` that it did not."""
        found, now = [], self.books.time if now is None else now
        self._ask_for_updates()
        for gateway in self.gateways.values():
            while gateway.node is not None and len(gateway.sent) < self.deployment.messages_per_gateway:
                orders = self._orders(gateway, now) if self._pays(gateway, now) else None
                if orders is None:
                    break
                name = f"{gateway.name}/{gateway.messages}"
                asked = tuple(trip for trip, _, _ in orders.ask)
                gateway.sent[name] = gateway.messages, (*(order.trip for order in orders.trips), *asked)
                gateway.messages += 1
                gateway.last_sent = now
                self._owner[name] = gateway
                found.append((gateway.node, orders, name))
        return found

    def sent(self, name: str, message: str) -> None:
        """What `messages` called `name` left as this message."""
        gateway = self._owner.pop(name)
        gateway.sent[message] = gateway.sent.pop(name)
        self._owner[message] = gateway

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _pays(self, gateway: Gateway, now: float) -> bool:
        """Whether to send what there is: a message costs the SuperLink some twenty requests, whatever is in it."""
        if self._closing or gateway.ask or not gateway.greeted or len(gateway.queue) >= self.deployment.trips_per_message:
            return True
        return bool(gateway.queue and not gateway.sent) or now - gateway.last_sent >= self.deployment.linger

    def _orders(self, gateway: Gateway, now: float) -> Orders | None:
        if self.books.shut_out(f"gateway {gateway.name}"):
            return None
        server = self.books.server
        chosen: list[int] = []
        while gateway.queue and gateway.greeted and len(chosen) < self.deployment.trips_per_message:
            trip = gateway.queue.popleft()
            if self._wanted(trip):
                chosen.append(trip)
        # trips that have waited here start from the newest version, which is also one version for all; those that are sent
        # again stay as they are, since they may have been trained already
        if new := [trip for trip in chosen if trip not in self.books.left]:
            self._happened({"kind": "left", "trips": new, "time": now})
        trips = [Order(trip, *started) for trip in chosen if (started := server.started(trip)) is not None]
        ask, gateway.ask = tuple(gateway.ask), []
        if not trips and not ask and not gateway.forget and (gateway.greeted or gateway.sent):
            return None
        gateway.greeted = True
        forget, gateway.forget = tuple(sorted(gateway.forget)), set()
        versions = {order.version: server.versions[order.version] for order in trips}
        offer = self._vault.offer if self._vault is not None and ask else b""
        return Orders(self.job, tuple(trips), versions, forget, self._sgd, ask, offer)

    def _ask_for_updates(self) -> None:
        """Ask trained clients, first come first served, for as many masked updates as the open buffer has room for."""
        server, vault = self.books.server, self._vault
        if vault is None or self._closing or not self._trained:
            return
        room = server.buffer_size - server.buffered - len(self._asked)
        chosen: list[int] = []
        for trip in list(self._trained):
            if len(chosen) >= room:
                break
            gateway = self._gateway_of[self.books.trips.client[trip]]
            if not self._wanted(trip) or gateway.node is not None:
                self._trained.remove(trip)
                chosen += [trip] if self._wanted(trip) else []
        for trip, slot in zip(chosen, vault.slots([self.books.trips.client[trip] for trip in chosen]), strict=True):
            self._asked.add(trip)
            self._gateway_of[self.books.trips.client[trip]].ask.append((trip, slot, server.version))

    def _result(self, gateway: Gateway, result: Result, now: float) -> None:
        """One trip's result: into the books, or refused."""
        trip = result.trip
        reason, detail = self._refusal(gateway, result, now)
        if reason is None and self._vault is not None:
            self._sealed_result(gateway, result, now)
            return
        if reason is None:
            update = {"kind": "update", "trip": trip, "client": result.client, "examples": result.examples}
            self._happened({**update, "gateway": gateway.name, "seconds": result.seconds, "time": now}, result.payload)
        elif reason != OVER and self._its_own(gateway, result):
            facts = {"kind": "failed", "trip": trip, "client": result.client, "gateway": gateway.name, "reason": reason}
            self._happened({**facts, "strike": reason in STRIKES, "detail": detail, "time": now})
        else:
            self._refuse(gateway, result.client, reason, now, trip, detail)
        if not self._wanted(trip) or reason == OVER:
            gateway.forget.add(trip)

    def _its_own(self, gateway: Gateway, result: Result) -> bool:
        """Whether a result is of a trip in flight, and from whom it should be."""
        started = self.books.server.started(result.trip)
        return started is not None and started[0] == result.client and result.client in (gateway.clients or ())

    def _sealed_result(self, gateway: Gateway, result: Result, now: float) -> None:
        """Trained, and waiting to be asked; or masked, for the open buffer."""
        trip = result.trip
        if not result.payload:
            if trip not in self._asked and trip not in self._trained and trip not in self.books.masked:
                self._trained.append(trip)
        elif trip in self._asked and trip not in self.books.masked:
            facts = {"kind": "masked", "trip": trip, "client": result.client, "examples": result.examples}
            self._happened({**facts, "seconds": result.seconds, "time": now}, result.payload)
        else:
            self._refuse(gateway, result.client, NOT_ASKED, now, trip)

    def _refusal(self, gateway: Gateway, result: Result, now: float) -> tuple[str | None, str]:
        """Why a result is refused, and more of it; or None."""
        books, server, limits = self.books, self.books.server, self.deployment
        if result.client not in (gateway.clients or ()):
            return ANOTHERS, f"client {result.client} is not behind gateway {gateway.name}"
        started = server.started(result.trip)
        if started is not None and (self._closing or self._over() is not None):
            return OVER, ""
        if self._too_often(result.client, now):
            return RATE, f"more than {limits.results_per_minute} results in a minute"
        if started is None:
            if result.trip >= len(books.trips):
                return UNKNOWN, f"trip {result.trip} was never started"
            if books.trips.client[result.trip] != result.client:
                return ANOTHERS, f"trip {result.trip} is of client {books.trips.client[result.trip]}"
            return (TWICE if books.trips.outcome[result.trip] in _ARRIVED else LATE), ""
        if started[0] != result.client:
            return ANOTHERS, f"trip {result.trip} is of client {started[0]}"
        if result.problem:
            return PROBLEM, result.problem
        weights = server.weights
        if not 1 <= result.examples <= limits.max_examples:
            return EXAMPLES, f"{result.examples}"
        if self._vault is not None:
            late = server.version - started[1] > self._most_stale
            too_large = len(result.payload) > weights.nbytes + _MOST_SEALED
            return (SIZE if too_large else LATE if late else None), ""
        if len(result.payload) != weights.nbytes:
            return SIZE, f"{len(result.payload):,} bytes, expected {weights.nbytes:,}"
        length = norm(np.frombuffer(result.payload, weights.dtype))
        if not math.isfinite(length):
            return NOT_FINITE, ""
        if limits.max_norm is not None and length > limits.max_norm:
            return TOO_LONG, f"{length:.3g}, at most {limits.max_norm:g}"
        return None, ""

    def _too_often(self, client: int, now: float) -> bool:
        times = self._answered.setdefault(client, deque())
        while times and times[0] <= now - _MINUTE:
            times.popleft()
        if len(times) >= self.deployment.results_per_minute:
            return True
        times.append(now)
        return False

    def _refuse(
        self, gateway: Gateway, client: int | None, reason: str, now: float, trip: int | None = None, detail: str = ""
    ) -> None:
        """Count it; a gateway that speaks for others' clients is to blame itself."""
        if client is not None and client not in (gateway.clients or ()):
            client = None
        kind = "strike" if reason in STRIKES else "refused"
        who = f"gateway {gateway.name}" if client is None else f"client {client}"
        record: Record = {"kind": kind, "gateway": gateway.name, "reason": reason, "time": now}
        record |= {
            name: value for name, value in (("client", client), ("trip", trip), ("detail", detail)) if value not in (None, "")
        }
        if self.books.shut_out(who) or self.books.shut_out(f"gateway {gateway.name}"):
            self.books.counts.refused[reason] += 1  # counted, but whoever is shut out does not fill our disk
            return
        self._happened(record)
        if client is None and self.books.shut_out(who) and gateway.clients and not self._closing:
            self._present(gateway.clients, False, now)
            for lost, (owner, _) in list(self.books.server.in_flight.items()):
                if owner in gateway.clients:
                    self._happened({"kind": "failed", "trip": lost, "reason": SHUT_OUT, "counts": 0, "time": now})

    def _unusable(self, gateway: Gateway, trips: Iterable[int], reason: str, now: float, detail: str = "") -> None:
        """A whole report is refused: its trips are still wanted, and the gateway has to introduce itself again."""
        self._refuse(gateway, None, reason, now, detail=detail)
        self._again(trips)
        gateway.greeted = False

    def _introduced(self, gateway: Gateway, claimed: Ranges) -> str | None:
        """Whom the gateway stands for, as our settings say or as it says itself where they leave it open; or why not."""
        total = len(self.books.server.clients)
        sensible = all(last < total for _, last in claimed) and sum(last - first + 1 for first, last in claimed) <= total
        clients = frozenset(numbers_in(claimed)) if sensible else frozenset()
        if gateway.clients is None:
            others = [
                c for c in clients if (g := self._gateway_of.get(c)) is not None and g is not gateway and g.node is not None
            ]
            if not clients or self.deployment.gateways:
                return NOT_ITS_CLIENTS
            if others:
                return TAKEN
            for other in {self._gateway_of[c].name for c in clients if c in self._gateway_of}:
                self.gateways[other].clients = None  # it is gone; should it return, it has to say anew whom it stands for
                self.gateways[other].queue.clear()
            gateway.clients = clients
            self._bind(gateway)
        return None if clients and clients <= gateway.clients else NOT_ITS_CLIENTS

    def _present(self, clients: Iterable[int], up: bool, now: float) -> None:
        if not self._closing:  # whoever comes would be given a trip
            self._happened({"kind": "present", "clients": ranges_of(clients), "up": up, "time": now})

    def _gone(self, gateway: Gateway, now: float) -> None:
        self._by_node.pop(gateway.node or 0, None)
        gateway.node, gateway.greeted = None, False
        for message in list(gateway.sent):
            self.lost(message)
        if gateway.clients:
            self._present(gateway.clients, False, now)
        for other in self.gateways.values():  # who waits to take its clients over is asked again
            other.greeted = other.greeted and other.clients is not None

    def _known(self, name: str) -> Gateway:
        return self.gateways.setdefault(name, Gateway(name))

    def _bind(self, gateway: Gateway) -> None:
        """Trips of its clients are this gateway's from now on."""
        for client in gateway.clients or ():
            self._gateway_of[client] = gateway
        for trip, (owner, _) in self.books.server.in_flight.items():
            if owner in (gateway.clients or ()) and trip not in gateway.queue:
                gateway.queue.append(trip)

    def _again(self, trips: Iterable[int]) -> None:
        """Order trips again that are still wanted."""
        for trip in trips:
            if self._wanted(trip):
                self._queue(trip)

    def _wanted(self, trip: int) -> bool:
        return self.books.server.started(trip) is not None

    def _queue(self, trip: int) -> None:
        if trip in self._asked and trip not in self.books.masked:  # whoever was asked is asked again, with a new slot
            self._asked.discard(trip)
        if trip in self.books.masked or trip in self._trained:
            return
        gateway = self._gateway_of.get(self.books.trips.client[trip])
        if gateway is not None and not self._closing and trip not in gateway.queue:
            gateway.queue.append(trip)

    def _happened(self, record: Record, blob: bytes | memoryview = b"") -> None:
        commands: list[Command] = self.books.apply(record, blob)
        self._records.append((record, blob))
        if record["kind"] in ("failed", "sealed"):
            self._asked.discard(record["trip"])
        for command in commands:
            match command:
                case StartTrip(trip):
                    self._young.append(trip)
                    self._queue(trip)
                case CancelTrip(trip):
                    gateway = self._gateway_of.get(self.books.trips.client[trip])
                    if gateway is not None:
                        gateway.forget.add(trip)
                case _:
                    pass
