"""The simulator: the server, the virtual clock and local training, played together.

The clock says which trip ends next; its update is trained when it is needed, from the version it started on; the server
says what happens then. Nothing here decides anything about federated learning.
"""

import contextlib
import math
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbuff import toml
from fedbuff.core import check
from fedbuff.core.events import CancelTrip, Command, StartTrip, StepTaken, TripFailed, UpdateArrived, UpdateRejected, Wake, Woke
from fedbuff.core.random import Draw
from fedbuff.core.server import SETTINGS, Server
from fedbuff.core.starting import arrivals
from fedbuff.core.versions import Vector
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.task import Task
from fedbuff.report.folder import Folder
from fedbuff.report.run import Run, load
from fedbuff.sim.availability import windows
from fedbuff.sim.clock import ARRIVES, DROPS, WAKES, Clock
from fedbuff.sim.timeline import with_rate
from fedbuff.sim.timing import Sizes, half_normal
from fedbuff.sim.trips import CANCELLED, DROPPED, FAILED, LATE, UNUSED, Trips
from fedbuff.sim.until import Until

if TYPE_CHECKING:
    from fedbuff.learn.flat import Flat
    from fedbuff.learn.local import Train

_HOPELESS = 20_000  # so many trips in a row without a server step, and nothing will come of it


@dataclass(frozen=True)
class Status:
    """Where a run stands, for a progress bar."""

    trips: int
    server_steps: int
    virtual_time: float
    accuracy: float | None
    staleness: float | None


def simulate(
    server: Server,
    task: Task,
    *,
    client: LocalSGD,
    until: Until,
    timing: Draw = half_normal(1.0),
    seed: int = 0,
    dropout: float = 0.0,
    timeout: float | None = None,
    availability: windows | None = None,
    evaluate_every: int | None = None,
    target: float | None = None,
    algorithm: str = "custom",
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: float = 10.0,
    progress: Callable[[Status], None] | None = None,
) -> Run:
    """Run `server` over `task` in virtual time.

    client, timing, dropout, timeout, availability   what clients do, how long it takes, and what goes wrong
    until             when to stop, e.g. `accuracy(0.6) | trips(600_000)`
    evaluate_every    trips between evaluations, at the next server step; by default the number of trips in flight
    target            note when this accuracy is first reached, without stopping there (`until` stops)
    out               the run folder; with `resume`, go on with the run it holds
    checkpoint_every  seconds (of real time) between checkpoints, or more where they are large; the result does not depend on it

    Weights given to the server are where it starts; otherwise the model's own, drawn from the seed. The same arguments and
    seed give the same weights and trips, bit for bit, on the same machine.
    """
    import torch

    from fedbuff.learn.local import initial_weights, one_at_a_time

    check.integer(0, seed=seed)
    check.number(0, checkpoint_every=checkpoint_every)
    seed, client, timing, until = int(seed), check.plain(client), check.plain(timing), check.plain(until)
    if evaluate_every is not None:
        check.integer(1, evaluate_every=evaluate_every)
    target = until.accuracy if target is None else target
    if target is not None:
        check.number(0, 1, target=target)
        if task.accuracy is None:
            raise ValueError(f"target={target}: the task {task.name!r} has no accuracy to reach it with")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a client's batch is too small for more, and one thread sums in one order
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(torch.set_num_threads, threads)
        n, sizes = len(task.clients), Sizes(task.examples)
        flat, weights = initial_weights(task, seed)
        clock = Clock(timing, seed, sizes, dropout, timeout, availability)
        start = with_rate(server.start, clock, n)
        in_flight = start.rate * clock.mean_duration(n) if isinstance(start, arrivals) and start.rate else start.most()
        tables = describe(
            dict(task.settings) if task.settings else {"python": {"object": task.name, "clients": n, "weights": len(weights)}},
            server,
            client,
            until,
            timing,
            availability,
            name=algorithm,
            seed=seed,
            dropout=dropout,
            timeout=timeout,
            evaluate_every=evaluate_every,
            target=None if target == until.accuracy else target,
        )
        simulation = _Simulation(
            server=server.bind(_starting_point(server, weights), n, seed=seed, available=availability, start=start),
            clock=clock,
            train=one_at_a_time(task, client, seed, flat),
            task=task,
            flat=flat,
            until=until,
            target=target,
            evaluate_every=evaluate_every or max(1, round(in_flight)),
        )
        folder = None
        if out is not None:
            folder = at_the_end.enter_context(Folder(Path(out), tables, simulation.disk_needed(), resume))
            if folder.finished:
                return load(folder.path)
        simulation.run(folder, checkpoint_every, progress)
        summary = {"algorithm": algorithm, "task": task.name, "seed": seed, **simulation.summary()}
        trips, weights_by_name = simulation.trips.arrays(), flat.named(simulation.server.weights)
        if folder is not None:
            folder.checkpoint(*simulation.state())
            folder.finish(trips, weights_by_name, simulation.metrics, summary)
        return Run(summary, simulation.metrics, trips, tables, weights_by_name, folder.path if folder else None)


def describe(
    task: toml.Table,
    server: Server,
    client: LocalSGD,
    until: Until,
    timing: Draw,
    availability: windows | None,
    **plain: Any,
) -> toml.Table:
    """The complete tables of a settings file: every setting, defaults included, None left out."""
    return {
        **toml.encode(plain),
        "task": task,
        "server": toml.encode({name: getattr(server, name) for name in SETTINGS}),
        "client": toml.fields_of(client),
        "timing": toml.encode(timing),
        **({"availability": toml.fields_of(availability)} if availability else {}),
        "until": toml.fields_of(until),
    }


def _starting_point(server: Server, drawn: Vector) -> Vector:
    """The weights given to the server, if they fit the model, else those drawn for it."""
    given = server.initial_weights
    if given is None:
        return drawn
    if given.shape != drawn.shape:
        raise ValueError(f"weights: the server has a vector of shape {given.shape}, the task's model {drawn.shape}")
    return given.astype(drawn.dtype)


class _Simulation:
    """The state of one run between two events."""

    def __init__(
        self,
        *,
        server: Server,
        clock: Clock,
        train: "Train",
        task: Task,
        flat: "Flat",
        until: Until,
        target: float | None,
        evaluate_every: int,
    ) -> None:
        self.server, self.clock, self.train, self.task, self.flat = server, clock, train, task, flat
        self.until, self.target, self.evaluate_every = until, target, evaluate_every
        self.trips = Trips()
        self.metrics: list[dict[str, Any]] = []
        self.reached: dict[str, Any] | None = None  # the first evaluation at or above the target
        self.staleness_sum, self.staleness_max, self.used, self.ended_at_step = 0, 0, 0, 0
        self.diverged = False
        self.before, self.began = 0.0, time.monotonic()  # real seconds of earlier sittings, and the start of this one

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, folder: Folder | None, checkpoint_every: float, progress: Callable[[Status], None] | None) -> None:
        saved = folder.last_checkpoint() if folder else None
        if saved is None:
            self.evaluate()
            self.obey(self.server.begin())
        else:
            self.restore(*saved)
        if folder:
            folder.rewrite_metrics(self.metrics)
        written, due = len(self.metrics), time.monotonic() + checkpoint_every
        while self.stopped_by() is None:
            self.advance()
            if progress:
                progress(self.status())
            if folder and len(self.metrics) > written:
                folder.append_metrics(self.metrics[written:])
                written = len(self.metrics)
            if folder and (now := time.monotonic()) >= due:
                folder.checkpoint(*self.state())
                cost = time.monotonic() - now
                due = now + cost + max(checkpoint_every, 20 * cost)  # at most a twentieth of the time
        if self.metrics[-1]["server_steps"] != self.server.version:
            self.evaluate()

    def advance(self) -> None:
        """Let the next thing happen."""
        now, trip, ending = self.clock.next()
        version = self.server.version
        if ending == WAKES:
            commands = self.server.handle(Woke(now))
        elif ending == ARRIVES:
            commands = self.arrive(trip, now)
        else:
            self.trips.end(trip, now, version, DROPPED if ending == DROPS else LATE)
            commands = self.server.handle(TripFailed(trip, "dropped out" if ending == DROPS else "timed out", now))
        self.obey(commands, version)
        if self.server.version > version:
            self.ended_at_step = self.trips.ended
            self.diverged = not bool(np.isfinite(self.server.weights).all())
            if self.trips.ended - self.metrics[-1]["trips"] >= self.evaluate_every or self.diverged:
                self.evaluate()
        elif self.trips.ended - self.ended_at_step > max(_HOPELESS, 1000 * self.server.buffer_size):
            raise ValueError(
                f"no server step in {self.trips.ended - self.ended_at_step:,} trips, up to virtual time {now:g}: "
                "all trips fail or come too late; see dropout, timeout, max_staleness"
            )

    def arrive(self, trip: int, now: float) -> list[Command]:
        """Train the trip that arrives, and hand its update to the server."""
        from fedbuff.learn.local import Job

        client, start = self.trips.client[trip], self.trips.start_version[trip]
        staleness, limit = self.server.version - start, self.server.max_staleness
        late = limit is not None and staleness > limit  # the server will refuse it unseen
        update = None if late else self.train([Job(trip, client, self.server.versions[start])])[0]
        self.trips.end(trip, now, self.server.version, LATE if late else UNUSED)
        return self.server.handle(UpdateArrived(trip, update, self.trips.examples[trip], now))

    def obey(self, commands: list[Command], version: int = 0) -> None:
        """Carry out the server's orders; `version` is the one before them."""
        now = self.clock.now
        for command in commands:
            match command:
                case StartTrip(trip, client, start):
                    self.clock.start(trip, client)
                    self.trips.started(client, self.task.examples(client), now, start)
                case StepTaken(step, trips, staleness, weights):
                    for trip, weight in zip(trips, weights, strict=True):
                        self.trips.used(trip, weight, step)
                    self.used += len(trips)
                    self.staleness_sum += sum(staleness)
                    self.staleness_max = max(self.staleness_max, *staleness)
                case CancelTrip(trip):
                    self.clock.cancel(trip)
                    self.trips.end(trip, now, version, CANCELLED)
                case UpdateRejected(trip):
                    if self.trips.outcome[trip] != LATE:
                        self.trips.outcome[trip] = FAILED
                case Wake(at):
                    self.clock.wake(at)

    def evaluate(self) -> None:
        from fedbuff.learn.evaluate import evaluate

        now = {"trips": self.trips.ended, "server_steps": self.server.version, "virtual_time": self.clock.now}
        results = evaluate(self.task, self.flat, self.server.weights)
        self.diverged |= not all(math.isfinite(values["loss"]) for values in results.values())
        for split, values in results.items():
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            self.metrics.append({**now, "split": split, **finite})
        accuracy = self.accuracy()
        if self.reached is None and self.target is not None and accuracy is not None and accuracy >= self.target:
            self.reached = now

    def accuracy(self) -> float | None:
        """The newest accuracy on the first split."""
        first = self.metrics[-len(self.task.splits)]
        return first.get("accuracy")

    def stopped_by(self) -> str | None:
        """Why the run is over, or None."""
        u, accuracy = self.until, self.accuracy()
        if self.diverged:
            return "diverged: the loss or the weights are no longer finite; lower the learning rates"
        if u.accuracy is not None and accuracy is not None and accuracy >= u.accuracy:
            return f"reached accuracy {u.accuracy:g}"
        if u.trips is not None and self.trips.ended >= u.trips:
            return f"reached {u.trips:,} trips"
        if u.server_steps is not None and self.server.version >= u.server_steps:
            return f"reached {u.server_steps:,} server steps"
        if u.virtual_time is not None and self.clock.upcoming() > u.virtual_time:
            return f"reached virtual time {u.virtual_time:g}"
        return None

    def status(self) -> Status:
        mean = self.staleness_sum / self.used if self.used else None
        return Status(self.trips.ended, self.server.version, self.clock.now, self.accuracy(), mean)

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        arrays, facts = self.server.state()
        return {**arrays, **self.trips.state()}, {
            "server": facts,
            "clock": self.clock.state(),
            "metrics": self.metrics,
            "reached": self.reached,
            "diverged": self.diverged,
            "staleness": [self.staleness_sum, self.staleness_max, self.used, self.ended_at_step],
            "wall_seconds": self.wall_seconds(),
        }

    def restore(self, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
        self.server.restore(arrays, facts["server"])
        self.trips.restore(arrays)
        self.clock.restore(facts["clock"])
        self.metrics, self.reached, self.diverged = facts["metrics"], facts["reached"], facts["diverged"]
        self.staleness_sum, self.staleness_max, self.used, self.ended_at_step = facts["staleness"]
        self.before, self.began = facts["wall_seconds"], time.monotonic()

    def wall_seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def disk_needed(self) -> int:
        """A first checkpoint twice over, and a megabyte; more is needed as versions and trips add up."""
        return 2 * sum(a.nbytes for a in self.server.state()[0].values()) + (1 << 20)

    def summary(self) -> dict[str, Any]:
        import torch

        from fedbuff.version import __version__

        seconds = self.wall_seconds()
        last = self.metrics[-len(self.task.splits) :]
        reached = self.reached or {}
        return {
            "stopped_by": self.stopped_by(),
            "trips": self.trips.ended,
            "in_flight": len(self.trips) - self.trips.ended,
            "server_steps": self.server.version,
            "virtual_time": self.until.virtual_time
            if (self.stopped_by() or "").startswith("reached virtual")
            else self.clock.now,
            "wall_seconds": seconds,
            "trips_per_second": self.trips.ended / seconds,
            "peak_memory_mb": _peak_memory_mb(),
            "staleness_mean": self.staleness_sum / self.used if self.used else None,
            "staleness_max": self.staleness_max if self.used else None,
            "metrics": {m["split"]: {k: v for k, v in m.items() if k in ("loss", "accuracy")} for m in last},
            "target": self.target,
            "trips_to_target": reached.get("trips"),
            "server_steps_to_target": reached.get("server_steps"),
            "virtual_time_to_target": reached.get("virtual_time"),
            "versions": {
                "fedbuff": __version__,
                "python": platform.python_version(),
                "numpy": np.__version__,
                "torch": torch.__version__,
            },
        }


def _peak_memory_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)
