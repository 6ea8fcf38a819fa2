"""The simulator's own cost per trip: everything but training.

Plan, look-ahead, chunks, aggregation and the table of trips are the real ones; updates are the zeros that their memory holds.
All cases are under way at once, each in a process of its own, and go on in turn for a fraction of a second: what slows the
machine down slows all of them.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from fedbuff.core.aggregate import Aggregation
from fedbuff.core.optimizers import momentum
from fedbuff.core.staleness import polynomial
from fedbuff.core.starting import refill
from fedbuff.learn.evaluate import Part
from fedbuff.sim.ahead import Ahead, steps_ahead
from fedbuff.sim.fastplan import fastest
from fedbuff.sim.simulation import Simulation
from fedbuff.sim.timing import Sizes, half_normal
from fedbuff.sim.until import trips
from fedbuff.sim.workers import Workers

BUFFER_SIZE = 10
_TURNOVERS = 4  # until a run is what it will be: its longest trips have ended, and its memory is no longer new


class Case(NamedTuple):
    concurrency: int
    clients: int
    weights: int


# the first of so many weights is what the others are compared with
CASES = [
    Case(concurrency, clients, weights)
    for weights in (610, 31_594)
    for concurrency, clients in (
        (100, 10_000),
        (1_000, 10_000),
        (10_000, 1_000_000),
        (100_000, 1_000_000),
        (100, 1_000),
        (100, 1_000_000),
        (100, 10_000_000),
        (1_000, 10_000_000),
        (100_000, 10_000_000),
    )
    if weights == 610 or clients == 10_000 or concurrency == 100_000
]


class Untrained:
    """Updates that cost nothing, but that their memory is there."""

    def __init__(self) -> None:
        self.met = 0  # rows that were written to; new ones come in order

    def train(self, updates: Any, rows: list[int], trips: list[int], clients: list[int], weights: list[Any]) -> None:
        most = max(rows) + 1
        if most > self.met:
            updates[self.met : most, ::1024] = 0.0  # once for every page
            self.met = most

    def evaluate(self, weights: Any, split: str, start: int) -> Part:
        return Part(0.0, 1, 0.0, 1)


class NoTask:
    """As much of a task as a simulation without training looks at."""

    accuracy = None

    def __init__(self) -> None:
        self.splits = {"test": ()}


def microseconds_per_trip(cases: Sequence[Case], count: int, rounds: int) -> list[list[float]]:
    """For each case the times of `rounds` turns of `count` trips, per trip."""
    found: list[list[float]] = [[] for _ in cases]
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(_in_a_process(case, count)) for case in cases]
        for end in ends:
            end.recv()  # it is under way
        for _ in range(rounds):
            for end, times in zip(ends, found, strict=True):
                end.send(True)
                times.append(end.recv())
    return found


@contextlib.contextmanager
def _in_a_process(case: Case, count: int) -> Iterator[Connection]:
    """A run of this case; it takes a turn whenever it is sent True."""
    end, other = Pipe()
    process = Process(target=_take_turns, args=(case, count, other), daemon=True)
    process.start()
    other.close()  # so that its end is noticed
    try:
        yield end
    finally:
        process.kill()
        process.join()


def _take_turns(case: Case, count: int, end: Connection) -> None:
    run = under_way(case)
    end.send(0.0)
    while end.recv():
        began = time.perf_counter()
        take_steps(run, count // BUFFER_SIZE)
        end.send((time.perf_counter() - began) / count * 1e6)


def under_way(case: Case) -> Simulation:
    """A run without training, all of whose trips have turned over a few times."""
    concurrency, clients, weights = case
    plan = fastest(
        start=refill(concurrency),
        buffer_size=BUFFER_SIZE,
        weigh=polynomial(0.5),
        max_staleness=None,
        clients=clients,
        sizes=Sizes(),
        timing=half_normal(1.0),
        seed=0,
    )
    w = np.zeros(weights, np.float32)
    steps, on_disk = steps_ahead(concurrency, BUFFER_SIZE, w.nbytes)
    room = 4 * concurrency + 256, (steps + 2) * BUFFER_SIZE + 256, w, on_disk
    pool = Workers(Untrained(), *room, workers=1)  # type: ignore[arg-type]
    simulation = Simulation(
        plan=plan,
        ahead=Ahead(plan, pool, steps, BUFFER_SIZE, False, weights, 1.0),
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
    take_steps(simulation, _TURNOVERS * concurrency // BUFFER_SIZE)
    return simulation


def take_steps(simulation: Simulation, count: int) -> None:
    steps = simulation.plan.steps
    for _ in range(count):
        simulation.take_step(steps[0])
