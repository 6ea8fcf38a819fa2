"""A network that loses, repeats, delays and reorders; gateways that come and go; a server that is killed: all in one process.

The server's side is a `Dispatch` with real books and a real journal, driven as `serve` drives it; the gateways' side is
`Clients` with an outbox. Only the network and the training are made up. Whoever breaks a promise is found out at once: see
`World.check`.
"""

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbuff.core.optimizers import sgd
from fedbuff.core.server import Server
from fedbuff.core.starting import StartingRule, refill
from fedbuff.deploy.books import Books, Present
from fedbuff.deploy.clients import Clients
from fedbuff.deploy.dispatch import Dispatch
from fedbuff.deploy.journal import Journal, Position, read
from fedbuff.deploy.outbox import Outbox
from fedbuff.deploy.settings import Deployment
from fedbuff.deploy.wire import Order, Orders

JOB = "a job"
START = np.array([1.0, -2.0, 0.5], np.float32)


def update_of(client: int, trip: int) -> np.ndarray:
    """What a client's training brings: the same whenever it is done again."""
    return np.random.default_rng([client, trip]).normal(size=len(START)).astype(np.float32)


class Training:
    """Stands in for `learn.work.Trainer`."""

    def train(self, updates: Any, rows: Sequence[int], trips: Sequence[int], clients: Sequence[int], weights: Any) -> None:
        for row, trip, client in zip(rows, trips, clients, strict=True):
            updates[row] = update_of(client, trip)


class Killed(Exception):  # noqa: N818  # it is no error here
    """The server's process has ended."""


class World:
    """A run over a network that is not there.

    mail      messages on their way to gateways: name of the gateway, node, orders
    replies   what the server would find if it looked; None: this message will not be answered
    nodes     the node of each gateway that is there
    done      trips that the journal says are done with, as far as it is on the disk
    """

    def __init__(
        self,
        folder: Path,
        gateways: dict[str, str],
        clients: int = 12,
        start: StartingRule = refill(4),
        buffer_size: int = 2,
        **deployment: Any,
    ) -> None:
        self.folder, self.start, self.buffer_size, self.count = folder, start, buffer_size, clients
        self.deployment = Deployment(
            **{"deadline": 10.0, "linger": 0.0, "trips_per_message": 2, "gateways": gateways, **deployment}
        )
        self.now, self.kept = 0.0, None
        self.mail: dict[str, tuple[str, int, bytes]] = {}
        self.past: list[tuple[str, bytes]] = []
        self.replies: dict[str, bytes | None] = {}
        self.nodes = {name: node for node, name in enumerate(gateways, 1)}
        self.names = itertools.count()
        self.ordered: dict[int, Order] = {}
        self.done: set[int] = set()
        self.closing, self.honest = False, set(gateways)
        self.gateways = {
            name: Clients(Training(), self.deployment.clients_of(name), Outbox(folder / name / "outbox"), sgd="as we do")
            for name in gateways
        }
        self.wake_up()

    # ── the server ───────────────────────────────────────────────────────────────────────────────────────────────────

    def books(self) -> Books:
        present = Present(self.count)
        server = Server(
            start=self.start,
            buffer_size=self.buffer_size,
            optimizer=sgd(0.5),
            weights=START,
            clients=self.count,
            available=present,
        )
        return Books(server, present, self.deployment.strikes)

    def wake_up(self) -> None:
        """A server's process starts, for the first time or again."""
        self.journal = Journal(self.folder / "journal")
        books, since = self.books(), Position()
        if self.kept is not None:
            arrays, facts, since = self.kept
            books.restore(arrays, facts)
        for record, blob in read(self.journal.folder, since):
            books.apply(record, blob)
        self.dispatch = Dispatch(books, self.deployment, JOB, "as we do")
        self.now = books.time
        self.dispatch.go_on(self.now) if books.server.begun else self.dispatch.begin(self.now)
        self.commit()

    def turn(self, answered: Iterable[str] | None = None, killed: str = "", cut: float = 0.0, unsendable: int = 0) -> None:
        """The server looks around once, as `Service.go` does; `killed` says where it is killed on the way."""
        dispatch = self.dispatch
        dispatch.online({node: name for name, node in self.nodes.items()}, self.now)
        waiting = [m for m in dispatch.outstanding if m in self.replies]
        for message in waiting if answered is None else [m for m in answered if m in waiting]:
            data = self.replies.pop(message)
            if data is None:
                dispatch.lost(message)
            else:
                dispatch.reported(message, data, self.now)
        dispatch.tick(self.now)
        started, limit = dispatch.books.trips.start_time, self.now - self.deployment.deadline
        late = [trip for trip in dispatch.books.server.in_flight if started[trip] <= limit]
        assert self.closing or not late, f"trips {late} still have their slots after the deadline"
        if killed == "before the commit":
            self.die()
            raise Killed
        if killed == "in the commit":
            before = self.journal.position.offset
            for record, blob in dispatch.records():
                self.journal.append(record, blob)
            after = self.journal.position.offset
            self.die()
            os.truncate(self.folder / "journal" / "00000000.journal", before + int(cut * (after - before)))
            raise Killed
        self.commit()
        if killed == "after the commit":
            self.die()
            raise Killed
        messages = dispatch.messages(self.now)
        self.commit()
        for n, (node, orders, name) in enumerate(messages):
            if killed == "while sending" and n == int(cut * len(messages)):
                self.die()
                raise Killed
            if n < unsendable:
                dispatch.lost(name)
                continue
            message = f"message {next(self.names)}"
            gateway = next(g for g, its in self.nodes.items() if its == node)
            if gateway in self.honest and not self.closing:
                assert set(orders.forget) <= self.done, "acknowledged, and not in the journal"
            self.ordered |= {order.trip: order for order in orders.trips}
            self.mail[message] = gateway, node, orders.to_bytes()
            dispatch.sent(name, message)
        if killed:
            self.die()
            raise Killed

    def die(self) -> None:
        self.journal.__exit__(None, None, None)

    def commit(self) -> None:
        records = self.dispatch.records()
        for record, blob in records:
            self.journal.append(record, blob)
        self.journal.commit()
        trips = self.dispatch.books.trips
        self.done = set(trips.order[: trips.ended])

    def checkpoint(self) -> None:
        arrays, facts = self.dispatch.books.state()
        self.kept = {name: np.array(a) for name, a in arrays.items()}, facts, self.journal.position

    # ── the network and the gateways ─────────────────────────────────────────────────────────────────────────────────

    def deliver(self, message: str) -> None:
        """A message reaches its gateway, if that is still there, and its reply the place where the server looks."""
        name, node, data = self.mail.pop(message)
        if self.nodes.get(name) == node:
            self.past.append((message, data))
            self.replies[message] = self.work(name, data)

    def work(self, name: str, data: bytes) -> bytes:
        return self.gateways[name].work(Orders.from_bytes(data)).to_bytes()

    def settle(self, turns: int = 25, seconds: float = 0.05) -> None:
        """Nothing goes wrong for a while; what was lost before is known to be lost."""
        for name in self.gateways:
            self.nodes.setdefault(name, 100 + next(self.names))
        for _ in range(turns):
            for message in list(self.mail):
                self.deliver(message)
            for message in self.dispatch.outstanding:
                self.replies.setdefault(message, None)
            self.now += seconds
            self.turn()

    def close(self) -> None:
        """The run ends, and everybody hears of it."""
        self.settle(1)
        self.closing = True
        self.dispatch.close()
        for _ in range(20):
            self.settle(1)
            if self.dispatch.drained:
                return
        raise AssertionError("it is not drained")

    # ── promises ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        assert len(self.dispatch.books.server.in_flight) <= self.start.at_once()
        for name, gateway in self.gateways.items():
            forgotten = {trip for trip, _, _, gone in gateway._outbox.lines(JOB) if gone}
            assert forgotten <= self.done, f"{name} has forgotten what the server is not done with"

    def check_the_journal(self) -> None:
        """Every update in it is somebody's, and there once; a fresh server that reads it has the same weights."""
        live, again, by_hand = self.dispatch.books, self.books(), START.astype(np.float64)
        buffer: list[np.ndarray] = []
        version, seen = 0, set()
        for record, blob in read(self.folder / "journal"):
            again.apply(record, blob)
            if record["kind"] != "update":
                continue
            order = self.ordered[record["trip"]]
            assert record["trip"] not in seen
            assert blob == update_of(order.client, order.trip).tobytes()
            seen.add(order.trip)
            buffer.append(np.frombuffer(blob, np.float32) / np.sqrt(1.0 + version - order.version))
            if len(buffer) == self.buffer_size:
                by_hand, version, buffer = by_hand - 0.5 * sum(buffer) / self.buffer_size, version + 1, []
        assert (again.server.version, version) == (live.server.version, live.server.version)
        assert again.server.weights.tobytes() == live.server.weights.tobytes()
        np.testing.assert_allclose(again.server.weights, by_hand, rtol=1e-4, atol=1e-5)
        assert again.server.in_flight == live.server.in_flight
        ours, theirs = again.state(), live.state()
        assert all(np.array_equal(ours[0][name], theirs[0][name]) for name in (*ours[0], *theirs[0]))
        assert ours[1]["server"] == theirs[1]["server"]
