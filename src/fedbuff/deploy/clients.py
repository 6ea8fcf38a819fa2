"""The clients behind a gateway: orders in, a report out. Torch and the data stay in memory from one message to the next.

    clients = Clients(trainer, mine=((0, 49),), outbox=Outbox(path), sgd=digest)
    report = clients.work(orders)

Trips of a message are trained together, as in the simulator, and their results are on the disk before they are reported. An
order for a trip whose result is in the outbox is answered from there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.versions import Vector
from fedbuff.deploy.books import Ranges
from fedbuff.deploy.outbox import Outbox
from fedbuff.deploy.sealing import Sealing
from fedbuff.deploy.wire import Order, Orders, Report, Result


class Trains(Protocol):
    """What `learn.work.Trainer` does: write the updates of trips into these rows."""

    def train(
        self,
        updates: NDArray[np.floating],
        rows: Sequence[int],
        trips: Sequence[int],
        clients: Sequence[int],
        weights: Sequence[Vector],
    ) -> None: ...


class Clients:
    """A gateway's clients.

    mine       ranges of clients, both ends included
    examples   how many a client has
    sgd        a digest of how they train, which must be the server's
    sealing    masks updates, if there is secure aggregation; then they leave only when they are asked for, and masked
    """

    def __init__(
        self,
        trainer: Trains,
        mine: Ranges,
        outbox: Outbox,
        examples: Callable[[int], int] = lambda client: 1,
        sgd: str = "",
        sealing: Sealing | None = None,
    ) -> None:
        self._trainer, self.mine, self._outbox, self._examples, self._sgd = trainer, mine, outbox, examples, sgd
        self._sealing = sealing

    def work(self, orders: Orders) -> Report:
        """Do what the server asks, as far as it was not done before."""
        self._outbox.forget(orders.job, orders.forget)
        if orders.sgd != self._sgd:
            problem = "this gateway trains with other settings ([client], seed or model) than the server says"
            return Report(orders.job, self.mine, problem=problem, holding=tuple(self._outbox.holding(orders.job)))
        done = self._outbox.find(orders.job, [order.trip for order in orders.trips])
        new = [order for order in orders.trips if order.trip not in done]
        if new:
            results = self._train(new, orders)
            self._outbox.keep(orders.job, results)
            done |= {result.trip: result for result in results}
        if self._sealing is not None:
            done = {trip: result if result.problem else replace(result, payload=b"") for trip, result in done.items()}
            done |= self._sealed(orders)
        holding = tuple(trip for trip in self._outbox.holding(orders.job) if trip not in done)
        return Report(orders.job, self.mine, tuple(done.values()), holding)

    def _sealed(self, orders: Orders) -> dict[int, Result]:
        """Masked updates, for those trips that the server asks for."""
        assert self._sealing is not None
        kept, found = self._outbox.find(orders.job, [trip for trip, _, _ in orders.ask]), {}
        for trip, slot, version in orders.ask:
            if trip in kept and not kept[trip].problem:
                result, start = kept[trip], kept[trip].version
                update = np.frombuffer(result.payload, np.float32)
                try:
                    upload = self._sealing.upload(orders.offer, result.client, slot, start, version, update)
                    found[trip] = replace(result, payload=upload)
                except Exception as e:  # an offer that is not acceptable, or an update that can't be encoded
                    found[trip] = replace(result, payload=b"", problem=f"{type(e).__name__}: {e}"[:200])
        return found

    def _train(self, trips: list[Order], orders: Orders) -> list[Result]:
        mine = [order for order in trips if any(first <= order.client <= last for first, last in self.mine)]
        others = [Result(o.trip, o.client, problem="not a client of this gateway") for o in trips if o not in mine]
        if not mine:
            return others
        began = time.perf_counter()
        weights = [orders.weights[order.version] for order in mine]
        updates = np.empty((len(mine), len(weights[0])), weights[0].dtype)
        try:
            self._trainer.train(updates, range(len(mine)), [o.trip for o in mine], [o.client for o in mine], weights)
        except Exception as e:  # whatever goes wrong in a user's task is that client's problem, and no reason to stop
            return [*others, *(Result(o.trip, o.client, problem=f"{type(e).__name__}: {e}"[:200]) for o in mine)]
        seconds = (time.perf_counter() - began) / len(mine)
        return [
            *others,
            *(
                Result(o.trip, o.client, update.tobytes(), int(self._examples(o.client)), seconds, version=o.version)
                for o, update in zip(mine, updates, strict=True)
            ),
        ]
