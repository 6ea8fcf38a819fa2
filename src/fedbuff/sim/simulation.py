"""A run under way: the plan, training and the server's aggregation, played together.

The plan runs ahead and says which trips make each server step; `Ahead` has their updates trained in bulk; each step is
then taken in virtual order. Nothing here decides anything about federated learning.
"""

import math
import os
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbuff import toml
from fedbuff.core.aggregate import Aggregation, finite
from fedbuff.learn.task import Task
from fedbuff.privacy.plan import Sees
from fedbuff.privacy.protection import Protection
from fedbuff.report.folder import Folder
from fedbuff.report.run import summarise
from fedbuff.sim.ahead import Ahead
from fedbuff.sim.fastplan import AnyPlan
from fedbuff.sim.memory import own_peak_mb, together_mb
from fedbuff.sim.pool import Block, Pool
from fedbuff.sim.secure import Buffer, NotFiniteError
from fedbuff.sim.steps import NOTHING, Step
from fedbuff.sim.sums import weighted_sum
from fedbuff.sim.until import Until

DIVERGED = "diverged: the loss or the weights are no longer finite; lower the learning rates"
NOT_FINITE = "diverged: no update is finite any more; lower the learning rates, or look at the clients' data"
_IN_VAIN = 2000  # updates in a row that are not finite: no other will come


@dataclass(frozen=True)
class Status:
    """Where a run stands, for whoever follows it: a progress bar, the live page, TensorBoard, MLflow.

    settings      the tables of settings.toml
    metrics       all evaluations so far: the list itself, which grows
    ended_trips   makes the table of the trips that have ended so far, as in trips.parquet
    stopped       why the run is over, in its last status
    task          the name of what is learned, which says how much of the data there is
    epsilon       of differential privacy, spent by the last evaluation
    """

    trips: int
    server_steps: int
    virtual_time: float
    accuracy: float | None
    staleness: float | None
    in_flight: int
    settings: toml.Table
    metrics: list[dict[str, Any]]
    ended_trips: Callable[[], dict[str, NDArray[Any]]]
    stopped: str | None
    task: str
    epsilon: float | None = None


class Simulation:
    """The state of one run between two server steps: the plan is ahead, `at` is the last step taken."""

    def __init__(
        self,
        *,
        plan: AnyPlan,
        ahead: Ahead,
        pool: Pool,
        aggregation: Aggregation,
        protection: Protection | None,
        secure: Callable[[int], Buffer] | None,
        by_examples: bool,
        mixing: bool,
        task: Task,
        blocks: list[tuple[str, int]],
        until: Until,
        target: float | None,
        evaluate_every: int,
        settings: toml.Table,
    ) -> None:
        self.plan, self.ahead, self.pool, self.aggregation = plan, ahead, pool, aggregation
        self.protection, self.by_examples, self.mixing = protection, by_examples, mixing
        self.make_secure = secure
        self.secure: Buffer | None = None  # made at the version that it begins with
        self.task, self.blocks, self.until, self.target, self.evaluate_every = task, blocks, until, target, evaluate_every
        self.settings = settings
        self.at = NOTHING
        self.metrics: list[dict[str, Any]] = []
        self.reached: dict[str, Any] | None = None  # the first evaluation at or above the target
        self.evaluations: deque[_Evaluation] = deque()  # under way
        self.evaluated = 0  # trips that had ended when the last evaluation began
        self.staleness_sum, self.used = 0, 0
        self.stopped: str | None = None
        self.ended_at = 0.0  # in virtual time
        self.problem: ValueError | None = None  # why the plan can't go on
        self.snapshots: list[_Snapshot] = []  # of the plan, the first at or before the last step taken
        self.peak_memory_mb = 0.0  # of all processes together
        self.before, self.began = 0.0, time.monotonic()  # real seconds of earlier sittings, and the start of this one

    # ── the run ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, folder: Folder | None, checkpoint_every: float, progress: Callable[[Status], None] | None) -> None:
        saved = folder.last_checkpoint() if folder else None
        if saved is None:
            self.begin()
            if folder:
                folder.checkpoint(*self.state())
            self.collect(wait=True)  # a run may end before it begins
        else:
            self.restore(*saved)
        if folder:
            folder.rewrite_metrics(self.metrics)
        written, due, look = len(self.metrics), time.monotonic() + checkpoint_every, 0.0
        self.look_ahead()
        if progress:
            progress(self.status())
        while self.stopped is None:
            if not self.plan.steps:
                self.end()
                break
            self.take_step(self.plan.steps[0])
            if progress:
                progress(self.status())
            if folder and len(self.metrics) > written:
                folder.append_metrics(self.metrics[written:])
                written = len(self.metrics)
            now = time.monotonic()
            if now >= look:
                self.peak_memory_mb = max(self.peak_memory_mb, together_mb([os.getpid(), *self.pool.pids()]) or 0.0)
                look = now + max(2.0, 300 * (time.monotonic() - now))  # adding up shared pages can take 25 ms
            if folder and now >= due and self.stopped is None:  # nobody could go on from the end: what was ahead is gone
                folder.checkpoint(*self.state())
                cost = time.monotonic() - now
                due = now + cost + max(checkpoint_every, 20 * cost)  # at most a twentieth of the time
        if progress:
            progress(self.status())

    def begin(self) -> None:
        self.plan.begin()
        self.at = self.at._replace(started=len(self.plan.trips))
        self.take_snapshot()
        self.look_ahead()
        self.ahead.version(0, self.aggregation.weights, 0, self.first_of_next_version(), 0)
        self.evaluate()

    def look_ahead(self) -> None:
        """Keep the plan as far ahead as training wants it."""
        plan, goal, u = self.plan, self.at.version + self.ahead.steps, self.until
        if self.problem is not None:
            return
        if u.server_steps is not None:
            goal = min(goal, u.server_steps)
        limits = math.inf if u.trips is None else u.trips, math.inf if u.virtual_time is None else u.virtual_time
        try:
            while plan.version < goal and plan.run(plan.version + 1, *limits):
                if len(plan.trips) - self.snapshots[-1].started > 4 * max(1000, plan.in_flight):
                    self.take_snapshot()
        except ValueError as e:
            self.problem = e  # it happens when the run gets there, if it does

    def limit(self) -> str | None:
        """Which limit of the run the plan has reached, if any."""
        u, plan = self.until, self.plan
        if u.trips is not None and plan.trips.ended >= u.trips:
            return f"reached {u.trips:,} trips"
        if u.server_steps is not None and plan.version >= u.server_steps:
            return f"reached {u.server_steps:,} server steps"
        if u.virtual_time is not None and plan.upcoming() > u.virtual_time:
            return f"reached virtual time {u.virtual_time:g}"
        return None

    def take_step(self, step: Step) -> None:
        """Algorithm 1's server step, with the updates that the plan has put into its buffer."""
        rows = self.ahead.rows(step)
        refused = self.fill_buffer(step, rows)
        if refused:
            self.collect(wait=True)  # a run that has diverged would have one update after another refused
            if self.stopped is None:
                self.refuse(step, refused)
            return
        self.admit(step)
        noise = self.protection.noise(step.version - 1) if self.protection and not self.make_secure else None
        w = self.aggregation.step(max(step.staleness, default=0), noise)
        self.ahead.used(step, rows)
        self.plan.steps.taken()
        self.at = step
        self.staleness_sum += sum(step.staleness)
        self.used += len(step.trips)
        while len(self.snapshots) > 1 and self.snapshots[1].version <= step.version:
            del self.snapshots[0]
        self.look_ahead()
        self.ahead.version(step.version, w, step.first, self.first_of_next_version(), step.ended)
        diverged = not finite(w)
        if diverged or step.ended - self.evaluated >= self.evaluate_every:
            self.evaluate()
        self.collect(wait=diverged or len(self.evaluations) > 2)
        if diverged and self.stopped is None:
            self.stop(step, DIVERGED)

    def fill_buffer(self, step: Step, rows: list[int]) -> set[int]:
        """Add the updates in the order of their arrival; the trips whose updates the server refuses, if any."""
        table, updates, mixing = self.plan.trips.examples, self.ahead.updates, self.mixing
        if not rows:  # a Poisson cohort that nobody came to
            return set()
        if self.make_secure:
            return self.fill_unseen(step, rows)
        examples = [table[trip] for trip in step.trips] if self.by_examples else [1] * len(rows)
        factors = [w * n for w, n in zip(step.weights, examples, strict=True)] if self.by_examples else step.weights
        if self.protection:  # clipped first, then weighted
            factors = [self.protection.factor(updates[row], w) for row, w in zip(rows, factors, strict=True)]
        if not mixing and weighted_sum(updates, rows, factors, self.aggregation.room()):
            self.aggregation.add_sum(sum(examples))
            return set()
        weights = factors if self.protection else step.weights
        for trip, row, weight, n in zip(step.trips, rows, weights, examples, strict=True):
            start = self.ahead.start(trip) if mixing else None
            if self.aggregation.add(updates[row], weight, n, start):
                return {trip} | {t for t, r in zip(step.trips, rows, strict=True) if not finite(updates[r])}
        return set()

    def fill_unseen(self, step: Step, rows: list[int]) -> set[int]:
        """The same through secure aggregation: only the sum is seen, with privacy's noise in it."""
        if self.secure is None:
            assert self.make_secure is not None
            self.secure = self.make_secure(step.version - 1)
        clients = [self.plan.trips.client[trip] for trip in step.trips]
        try:
            total = self.secure.sum(step.version - 1, step.trips, clients, step.staleness, self.ahead.updates, rows)
        except NotFiniteError as e:
            return {step.trips[place] for place in e.places}
        np.copyto(self.aggregation.room(), total, casting="same_kind")
        self.aggregation.add_sum(len(rows))
        return set()

    def admit(self, step: Step) -> None:
        """Note who is part of a server step: the plan has kept to their limits."""
        if self.protection is not None:
            for trip in step.trips:
                self.protection.admit(self.plan.trips.client[trip], step.version - 1)

    def first_of_next_version(self) -> int:
        """The first trip that starts on a version after the one at hand."""
        steps = self.plan.steps
        return steps.first if steps else len(self.plan.trips)

    def refuse(self, step: Step, bad: set[int]) -> None:
        """The server refuses updates that are not finite: the plan goes another way from the first of them on.

        Its client is free earlier than planned, so that others may be chosen from then on. Trips that had started before are
        what they were: of those, all that are bad are refused at once.
        """
        self.aggregation.clear()
        trips = self.plan.trips
        first = next(trip for trip in step.trips if trip in bad)
        since = max(self.at.first, first + 1, bisect_left(trips.start_time, trips.end_time[first], hi=len(trips)))
        good = [trip for trip in step.trips if trip not in bad]
        latest = max((trips.end_time[trip] for trip in good), default=self.at.time)
        in_vain = len(bad) + sum(latest <= trips.end_time[trip] <= step.time for trip in self.plan.failed)
        if in_vain >= len(step.trips):  # they may be the first of many
            bad = bad | self.ahead.not_finite()
        if in_vain >= max(_IN_VAIN, 2 * len(step.trips)):
            self.give_up()
            return
        snapshot, failed = self.snapshots[0], self.plan.failed | {trip for trip in bad if trip < since}
        self.ahead.forget(failed, since, self.at.ended)
        trips.rewind(snapshot.started, snapshot.ended)
        self.plan.restore(snapshot.state(), failed)
        self.problem = None
        self.plan.steps.clear()
        del self.snapshots[1:]
        self.plan.run(self.at.version)
        self.plan.steps.clear()
        self.look_ahead()
        self.ahead.reconsider(self.at.version, self.at.first, since, self.first_of_next_version())

    def give_up(self) -> None:
        """No update is finite any more, though the weights may be: the run ends with the last server step."""
        if self.metrics[-1]["server_steps"] != self.at.version:
            self.evaluate()
            self.collect(wait=True)
        if self.stopped is None:
            self.stop(self.at, NOT_FINITE)

    def take_snapshot(self) -> None:
        """Remember the plan as it is right after a server step."""
        plan = self.plan
        self.snapshots.append(_Snapshot(plan.version, len(plan.trips), plan.trips.ended, plan.snapshot()))

    def end(self) -> None:
        """The plan is over: whatever is still being evaluated may end the run earlier."""
        self.collect(wait=True)
        if self.stopped is not None:
            return
        if self.problem is not None and not self.plan.exhausted:
            raise self.problem
        limit = self.exhausted() if self.plan.exhausted else self.limit()
        if self.metrics[-1]["server_steps"] != self.at.version:
            self.evaluate(self.plan.trips.ended, self.plan.now)
            self.collect(wait=True)
        if self.stopped is None:
            self.stopped, self.ended_at = limit, self.plan.now

    def exhausted(self) -> str:
        """Why the ledger lets nobody start; up to K − 1 clients wait in a buffer that was never filled."""
        assert self.protection is not None
        return self.protection.limits.ended(len(self.at.trips))

    def stop(self, step: Step, reason: str) -> None:
        """The run ended right after `step`: what the plan knows beyond it never happened."""
        self.stopped = reason
        self.ended_at = step.time
        self.plan.trips.rewind(step.started, step.ended)
        if step.version != self.at.version:
            self.aggregation.end_with(self.pool.weights(self.shown(step.version)).copy())
        self.at = step
        self.evaluations.clear()

    # ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────

    def shown(self, version: int) -> int:
        """Under which number the pool has what is evaluated at a version: an average of several is no version itself."""
        return version if self.aggregation.average is None else ~version

    def evaluate(self, ended: int | None = None, now: float | None = None) -> None:
        """Have the model evaluated as it is; the run goes on meanwhile."""
        at = self.at if ended is None or now is None else self.at._replace(ended=ended, time=now, started=len(self.plan.trips))
        self.evaluated = at.ended
        if self.aggregation.average is not None:
            self.pool.keep(self.shown(at.version), self.aggregation.model)
        self.ask_for(at)

    def ask_for(self, at: Step) -> None:
        """Have evaluated what the pool keeps for this step."""
        shown = self.shown(at.version)
        self.ahead.hold(shown)
        keys = [self.ahead.key() for _ in self.blocks]
        for key, (split, start) in zip(keys, self.blocks, strict=True):
            self.pool.submit(key, Block(shown, split, start), at.version)
        self.evaluations.append(_Evaluation(at, keys))

    def collect(self, wait: bool) -> None:
        """Write down the evaluations that are done, in order; the first that ends the run ends it."""
        while self.evaluations and self.stopped is None:
            at, keys = self.evaluations[0]
            if not wait and not self.pool.alone and not all(self.pool.finished(key) for key in keys):
                return
            self.evaluations.popleft()
            found: dict[str, list[Any]] = {}
            for key, (split, _) in zip(keys, self.blocks, strict=True):
                found.setdefault(split, []).append(self.pool.result(key))
            from fedbuff.learn.evaluate import combine  # not before: it needs torch

            results = {split: combine(blocks, self.task.accuracy is not None) for split, blocks in found.items()}
            self.record(at, results)
            self.ahead.release(self.shown(at.version))

    def record(self, at: Step, results: dict[str, dict[str, float]]) -> None:
        now = {"trips": at.ended, "server_steps": at.version, "virtual_time": at.time}
        spent = {"epsilon": self.protection.spent(at.version)} if self.protection else {}
        for split, values in results.items():
            finite_ones = {name: value if math.isfinite(value) else None for name, value in values.items()}
            self.metrics.append({**now, "split": split, **finite_ones, **spent})
        accuracy, u = self.accuracy(), self.until
        if self.reached is None and self.target is not None and accuracy is not None and accuracy >= self.target:
            self.reached = now
        if not all(math.isfinite(values["loss"]) for values in results.values()):
            self.stop(at, DIVERGED)
        elif u.accuracy is not None and accuracy is not None and accuracy >= u.accuracy:
            self.stop(at, f"reached accuracy {u.accuracy:g}")

    def accuracy(self) -> float | None:
        """The newest accuracy on the first split."""
        return self.metrics[-len(self.task.splits)].get("accuracy") if self.metrics else None

    def status(self) -> Status:
        mean, at, trips = self.staleness_sum / self.used if self.used else None, self.at, self.plan.trips
        # the plan knows the future: what has happened ends with the last step taken, but for the end of the run
        ended, now, started = at.ended, at.time, at.started
        if self.stopped is not None:
            ended, now, started = trips.ended, self.ended_at, len(trips)
        table = partial(trips.arrays, ended=ended)
        epsilon = self.metrics[-1].get("epsilon") if self.metrics else None
        known = (mean, started - ended, self.settings, self.metrics, table, self.stopped, self.task.name, epsilon)
        return Status(ended, at.version, now, self.accuracy(), *known)

    # ── what is kept ─────────────────────────────────────────────────────────────────────────────────────────────────

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        aggregated, counted = self.aggregation.state()
        trained, chunks = self.ahead.state()
        drawn, protection = self.protection.state() if self.protection else ({}, None)
        return {**aggregated, **trained, **self.plan.trips.state(), **drawn}, {
            "protection": protection,
            "aggregation": counted,
            "ahead": chunks,
            "plan": self.plan.state(),
            "steps": [step.state() for step in self.plan.steps],
            "snapshots": [(*snapshot[:-1], snapshot.state()) for snapshot in self.snapshots],
            "at": self.at.state(),
            "evaluations": [at.state() for at, _ in self.evaluations],
            "evaluated": self.evaluated,
            "metrics": self.metrics,
            "reached": self.reached,
            "staleness": [self.staleness_sum, self.used],
            "wall_seconds": self.wall_seconds(),
        }

    def restore(self, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
        self.plan.trips.restore(arrays)
        if len(self.plan.trips) != facts["plan"]["schedule"]["started"]:  # a plan in C++ would write where nothing is
            raise ValueError(
                "an earlier version took this checkpoint as the run ended, and nobody can go on from it: begin anew, elsewhere"
            )
        self.plan.restore(facts["plan"])
        self.plan.steps.extend(map(Step.restored, facts["steps"]))
        self.snapshots = [_Snapshot(a, b, c, partial(dict, state)) for a, b, c, state in facts["snapshots"]]
        self.at, self.evaluated = Step.restored(facts["at"]), facts["evaluated"]
        self.ahead.restore(arrays, facts["ahead"], self.at.version)
        self.aggregation.restore(arrays[f"version.{self.at.version}"], arrays, facts["aggregation"])
        if self.protection:
            self.protection.restore(arrays, facts["protection"])
        self.metrics, self.reached = facts["metrics"], facts["reached"]
        self.staleness_sum, self.used = facts["staleness"]
        for at in facts["evaluations"]:
            self.ask_for(Step.restored(at))
        self.before, self.began = facts["wall_seconds"], time.monotonic()

    def wall_seconds(self) -> float:
        return self.before + time.monotonic() - self.began

    def summary(self, sees: Sees = "updates") -> dict[str, Any]:
        by_time = self.until.virtual_time if (self.stopped or "").startswith("reached virtual") else None
        return summarise(
            self.plan.trips,
            stopped_by=self.stopped,
            server_steps=self.at.version,
            virtual_time=self.ended_at if by_time is None else by_time,
            wall_seconds=self.wall_seconds(),
            peak_memory_mb=self.peak_memory_mb or own_peak_mb(),
            metrics=self.metrics[-len(self.task.splits) :],
            target=self.target,
            reached=self.reached,
            privacy=self.protection.describe(self.at.version, sees) if self.protection else None,
        )


class _Evaluation(NamedTuple):
    at: Step
    keys: list[int]


class _Snapshot(NamedTuple):
    """The plan right after a server step, to go back to."""

    version: int
    started: int
    ended: int
    state: Callable[[], dict[str, Any]]
