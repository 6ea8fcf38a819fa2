"""The simulator's own cost per trip: everything but training.

Plan, look-ahead, chunks, aggregation and the table of trips are the real ones; updates are the zeros that their memory holds.
"""

import time
from typing import Any

import numpy as np

from fedbuff.core.aggregate import Aggregation
from fedbuff.core.optimizers import momentum
from fedbuff.core.staleness import polynomial
from fedbuff.core.starting import refill
from fedbuff.sim.ahead import Ahead, horizon
from fedbuff.sim.fastplan import fastest
from fedbuff.sim.simulation import Simulation
from fedbuff.sim.timing import Sizes, half_normal
from fedbuff.sim.until import trips
from fedbuff.sim.workers import Workers

CASES = [  # concurrency, clients
    (100, 10_000),
    (1_000, 10_000),
    (10_000, 1_000_000),
    (100_000, 1_000_000),
    (100, 1_000),
    (100, 1_000_000),
    (100, 10_000_000),
    (1_000, 10_000_000),
    (100_000, 10_000_000),
]


class Untrained:
    """Updates that cost nothing."""

    def train(self, updates: Any, rows: list[int], trips: list[int], clients: list[int], weights: list[Any]) -> None:
        for row in rows:
            updates[row, 0] = 0.0  # so that the memory is there

    def evaluate(self, weights: Any, split: str, start: int) -> tuple[float, float, int]:
        return 0.0, 0, 1


class NoTask:
    """As much of a task as a simulation without training looks at."""

    accuracy = None

    def __init__(self) -> None:
        self.splits = {"test": ()}


def microseconds_per_trip(concurrency: int, clients: int, weights: int, count: int, buffer_size: int = 10) -> float:
    """The time of `count` trips, once all clients in flight have turned over, divided by their number."""
    plan = fastest(
        start=refill(concurrency),
        buffer_size=buffer_size,
        weigh=polynomial(0.5),
        max_staleness=None,
        clients=clients,
        sizes=Sizes(),
        timing=half_normal(1.0),
        seed=0,
    )
    w = np.zeros(weights, np.float32)
    steps, on_disk = horizon(concurrency, buffer_size, w.nbytes)
    room = 4 * concurrency + 256, (steps + 2) * buffer_size + 256, w, on_disk
    pool = Workers(Untrained(), *room, workers=1)  # type: ignore[arg-type]
    simulation = Simulation(
        plan=plan,
        ahead=Ahead(plan, pool, steps, buffer_size, False, weights, 1.0),
        pool=pool,
        aggregation=Aggregation(w, momentum(1.0, 0.9)),
        protection=None,
        secure=None,
        by_examples=False,
        mixing=False,
        task=NoTask(),  # type: ignore[arg-type]
        blocks=[("test", 0)],
        until=trips(10**12),
        target=None,
        evaluate_every=10**12,
        settings={},
    )
    simulation.begin()
    simulation.collect(wait=True)
    for _ in range(concurrency // buffer_size):
        simulation.take_step(plan.steps[0])
    began = time.perf_counter()
    for _ in range(count // buffer_size):
        simulation.take_step(plan.steps[0])
    return (time.perf_counter() - began) / count * 1e6
