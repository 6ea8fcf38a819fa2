"""The server of a run over a network: its folder, its journal, and the loop that asks the transport and the dispatch in turn.

    run = serve(settings, folder, transport)

Started again on the same folder, after whatever happened, it goes on where it stopped: from the last checkpoint, and the
journal since. Nothing is acknowledged before it is in the journal, on the disk.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedbuff import toml
from fedbuff.core.versions import Vector
from fedbuff.deploy.books import Books, Present
from fedbuff.deploy.dispatch import Dispatch
from fedbuff.deploy.journal import FORMAT, Journal, Position, read
from fedbuff.deploy.settings import Deployment
from fedbuff.deploy.tidy import tidy
from fedbuff.deploy.transport import Transport
from fedbuff.deploy.vault import vault
from fedbuff.learn.client import LocalSGD
from fedbuff.report.files import FolderError
from fedbuff.report.folder import Folder
from fedbuff.report.run import Run, load, summarise
from fedbuff.settings import Settings
from fedbuff.sim.simulate import protected
from fedbuff.sim.simulation import Status

log = logging.getLogger("fedbuff.deploy")
_NODES_EVERY = 5.0  # seconds between looks at who is online
_SLOWEST = 0.5  # seconds between looks for replies when nothing happens


def serve(
    settings: Settings, folder: Path, transport: Transport, follow: Callable[[Status, Dispatch], None] | None = None
) -> Run:
    """Run to the end; `follow` is told about it now and then."""
    with ExitStack() as at_the_end:
        service = Service(settings, folder, at_the_end)
        if service.folder.finished:
            tidy(settings, folder)  # it was killed right before
            return load(folder)
        service.go(transport, follow)
        return service.finish()


def digest_of(client: LocalSGD, seed: int, weights: int) -> str:
    """What a gateway's clients must have in common with the server."""
    facts = [toml.fields_of(client), seed, weights]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


def in_the_folder(settings: Settings) -> toml.Table:
    """The settings that a run can't change: of [deploy] only what its journal depends on, so that a restart may wait longer."""
    deployment = settings.deploy or Deployment()
    return {**settings.tables(), "deploy": {"strikes": deployment.strikes}}


class Service:
    """A run that is being served."""

    def __init__(self, settings: Settings, path: Path, at_the_end: ExitStack) -> None:
        from fedbuff.learn.evaluate import blocks
        from fedbuff.learn.local import initial_weights
        from fedbuff.learn.work import settle, trainer

        settings.check_deployable()
        settle()
        self.settings, self.deployment = settings, settings.deploy or Deployment()
        self.task = settings.load_task()
        self.flat, self.weights = initial_weights(self.task, settings.seed)
        self.tables = in_the_folder(settings)
        self.folder = at_the_end.enter_context(Folder(path, self.tables, 4 * self.weights.nbytes + (1 << 20), resume=True))
        if self.folder.finished:
            return
        self._trainer = trainer(self.task, settings.client, settings.seed, settings.training, self.flat)
        self._blocks = blocks(self.task)
        self._evaluator = at_the_end.enter_context(ThreadPoolExecutor(1, "evaluation"))
        self._evaluation: tuple[dict[str, Any], Future[dict[str, dict[str, float]]]] | None = None
        self.books, self.protection, self.last_step = opened(settings, self.weights, len(self.task.clients), self.folder)
        kept = self.folder.last_checkpoint()
        since = Position() if kept is None else Position(*kept[1]["position"])
        self.journal = at_the_end.enter_context(Journal(path / "journal", since))
        self.metrics: list[dict[str, Any]] = []
        self.reached: dict[str, Any] | None = None
        self.stopped: str | None = None
        self._evaluated = -1
        self._before = 0.0
        self.job = self._restore(kept, since)
        self._began = time.monotonic()
        sgd = digest_of(settings.client, settings.seed, len(self.weights))
        secure, held = settings.secure_aggregation, None
        if secure is not None:
            held = vault(secure, self.books.server, path / "trusted", self.deployment.deadline)
            at_the_end.callback(held.close)
        most_stale = secure.stalest(self.books.server) if secure is not None else 0
        self.dispatch = Dispatch(self.books, self.deployment, self.job, sgd, self.limit, held, most_stale)

    # ── from the folder ──────────────────────────────────────────────────────────────────────────────────────────────

    def _restore(self, kept: tuple[dict[str, Any], dict[str, Any]] | None, since: Position) -> str:
        """Everything as it was when the last process ended, however it ended: a checkpoint, and the journal since then."""
        job = ""
        if kept is not None:
            arrays, facts = kept
            self.books.restore(arrays, facts["books"])
            self.metrics, self.reached, self.stopped = facts["metrics"], facts["reached"], facts["stopped"]
            job, self._before = facts["job"], facts["wall_seconds"]
        count = 0
        if self.journal.position != Position():
            for record, blob in read(self.journal.folder, since):
                if record["kind"] == "header":
                    job = record["job"]
                    continue
                self.books.apply(record, blob)
                count += 1
        self._before = max(self._before, self.books.time)  # what the journal knows of, and the checkpoint not yet
        if not job and self.protection is not None and (self.folder.path / "metrics.jsonl").exists():
            where = self.folder.path
            raise FolderError(f"{where}: its journal and checkpoint are gone, and its noise was used: begin in a new folder")
        if not job:
            job = os.urandom(8).hex()
            header = {"kind": "header", "format": FORMAT, "job": job, "dtype": str(self.weights.dtype), "settings": self.tables}
            self.journal.append(header, np.ascontiguousarray(self.weights).data)
            self.journal.commit()
        elif count or kept is not None:
            log.info("restored", {"version": self.books.server.version, "records": count})
        self._evaluated = max((m["trips"] for m in self.metrics), default=-1)
        self.folder.rewrite_metrics(self.metrics)
        return job

    def checkpoint(self) -> None:
        self.journal.rotate(always=not self.deployment.keep_journal)
        arrays, facts = self.books.state()
        self.folder.checkpoint(
            arrays,
            {
                "books": facts,
                "metrics": self.metrics,
                "reached": self.reached,
                "stopped": self.stopped,
                "position": self.journal.position,
                "job": self.job,
                "wall_seconds": self.wall_seconds(),
            },
        )
        if not self.deployment.keep_journal:
            self.journal.drop()  # now that the checkpoint does not need them

    # ── the loop ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def now(self) -> float:
        """Seconds that the run has been served for: time when no server ran is no time."""
        return self._resumed_at + time.monotonic() - self._began

    def go(self, transport: Transport, follow: Callable[[Status, Dispatch], None] | None = None) -> None:
        """Serve until the run is over, and everybody knows."""
        dispatch, self._resumed_at = self.dispatch, self.books.time
        if self.books.server.begun:
            dispatch.go_on(self.now())
        else:
            dispatch.begin(self.now())
        self.commit()
        if not self.metrics:
            self.evaluate()
        look = kept = told = -1e9
        pause, closing = self.deployment.poll, 0.0
        while True:
            now = self.now()
            if now - look >= _NODES_EVERY:
                dispatch.online(transport.nodes(), now)
                look = now
            answers = transport.pull(dispatch.outstanding) if dispatch.outstanding else []
            for message, data in answers:
                if data is None:
                    dispatch.lost(message)
                else:
                    dispatch.reported(message, data, now)
            dispatch.tick(now)
            self.commit()
            dispatch.seal(now)
            self.commit()
            self.look_at_progress()
            if self.stopped is not None and not closing:
                log.info("draining", {"reason": self.stopped})
                dispatch.close()
                self.checkpoint()  # a server that is killed now has stopped all the same
                closing = now + self.deployment.drain
            sent = self.send(transport)
            if now - kept >= self.deployment.checkpoint_every:
                self.checkpoint()
                kept = now
            if follow is not None and (now - told >= 1.0 or closing):
                follow(self.status(), dispatch)
                told = now
            if closing and (dispatch.drained or now > closing):
                return
            pause = self.deployment.poll if answers or sent else min(_SLOWEST, 1.2 * pause)
            time.sleep(pause)

    def commit(self) -> None:
        """Put on the disk what has happened: before anything that depends on it leaves."""
        records = self.dispatch.records()
        for record, blob in records:
            self.journal.append(record, blob)
            if record["kind"] in ("strike", "refused", "failed"):
                log.warning(record["kind"], record)
        if records:
            self.journal.commit()

    def send(self, transport: Transport) -> bool:
        messages = self.dispatch.messages(self.now())
        if not messages:
            return False
        self.commit()  # which versions they start from
        names = transport.push([(node, orders.to_bytes()) for node, orders, _ in messages])
        for (_, _, ours), name in zip(messages, [*names, *[None] * (len(messages) - len(names))], strict=True):
            if name is None:
                self.dispatch.lost(ours)
            else:
                self.dispatch.sent(ours, name)
        return True

    # ── how far it is ────────────────────────────────────────────────────────────────────────────────────────────────

    def limit(self) -> str | None:
        """Which limit of the run is reached, if any."""
        u, trips, version = self.settings.until, self.books.trips.ended, self.books.server.version
        if self.stopped is not None:
            return self.stopped
        if u.trips is not None and trips >= u.trips:
            return f"reached {u.trips:,} trips"
        if u.server_steps is not None and version >= u.server_steps:
            return f"reached {u.server_steps:,} server steps"
        if self.last_step is not None and version >= self.last_step:
            return f"reached {self.last_step:,} server steps, the horizon of its privacy"
        if self.protection is not None and self.books.server.begun and self.books.server.exhausted:
            return str(self.protection.limits.ended(self.books.server.buffer_size))
        if u.virtual_time is not None and self.books.time >= u.virtual_time:
            return f"reached {u.virtual_time:g} seconds"
        return None

    def look_at_progress(self) -> None:
        if self._evaluation is not None and self._evaluation[1].done():
            self.collect()
        if self.stopped is None:
            self.stopped = self.limit()
        server = self.books.server
        in_flight = max(1, server.start.at_once(), len(server.in_flight))  # there may be more if clients come by themselves
        every = self.settings.evaluate_every or in_flight
        due = self.books.trips.ended - self._evaluated >= every
        if self._evaluation is None and self.stopped is None and due and self._new_version():
            self.evaluate()

    def _new_version(self) -> bool:
        return not self.metrics or self.metrics[-1]["server_steps"] != self.books.server.version

    def evaluate(self) -> None:
        """Have the model evaluated as it is, beside the loop."""
        self._evaluated = self.books.trips.ended
        at = {"trips": self._evaluated, "server_steps": self.books.server.version, "virtual_time": self.books.time}
        self._evaluation = at, self._evaluator.submit(self._evaluate, self.books.server.model)

    def _evaluate(self, weights: Vector) -> dict[str, dict[str, float]]:
        from fedbuff.learn.evaluate import combine

        found: dict[str, list[Any]] = {}
        for split, start in self._blocks:
            found.setdefault(split, []).append(self._trainer.evaluate(weights, split, start))
        return {split: combine(parts, self.task.accuracy is not None) for split, parts in found.items()}

    def collect(self) -> None:
        """Write an evaluation down."""
        assert self._evaluation is not None
        at, future = self._evaluation
        self._evaluation = None
        new = []
        for split, values in future.result().items():
            finite = {name: value if np.isfinite(value) else None for name, value in values.items()}
            spent = {"epsilon": self.protection.spent(at["server_steps"])} if self.protection else {}
            new.append({**at, "split": split, **finite, **spent})
        self.metrics += new
        self.folder.append_metrics(new)
        accuracy, target = new[0].get("accuracy"), self.target
        log.info("evaluated", {"version": at["server_steps"], "loss": new[0]["loss"], "accuracy": accuracy})
        if self.reached is None and target is not None and accuracy is not None and accuracy >= target:
            self.reached = at
        wanted = self.settings.until.accuracy
        if wanted is not None and accuracy is not None and accuracy >= wanted and self.stopped is None:
            self.stopped = f"reached accuracy {wanted:g}"
        if new[0]["loss"] is None and self.stopped is None:
            self.stopped = "diverged: the loss is no longer finite; lower the learning rates"

    @property
    def target(self) -> float | None:
        return self.settings.until.accuracy if self.settings.target is None else self.settings.target

    def wall_seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def status(self) -> Status:
        trips, server = self.books.trips, self.books.server
        mean = self.books.staleness / self.books.used if self.books.used else None
        accuracy = next((m.get("accuracy") for m in reversed(self.metrics) if m["split"] == self.metrics[0]["split"]), None)
        return Status(
            trips.ended,
            server.version,
            self.books.time,
            accuracy,
            mean,
            len(trips) - trips.ended,
            self.tables,
            self.metrics,
            partial(trips.arrays, ended=trips.ended),
            self.stopped,
            self.task.name,
        )

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def finish(self) -> Run:
        if self._evaluation is not None:
            self.collect()
        if self._new_version():
            self.evaluate()
            self.collect()
        self.checkpoint()
        summary, trips = self.summary(), self.books.trips.arrays()
        weights = self.flat.named(np.array(self.books.server.model))
        self.folder.finish(trips, weights, self.metrics, summary)
        self.journal.close()
        tidy(self.settings, self.folder.path)
        return Run(summary, self.metrics, trips, self.tables, weights, self.folder.path)

    def summary(self) -> dict[str, Any]:
        from fedbuff.sim.memory import own_peak_mb

        version, secure = self.books.server.version, self.settings.secure_aggregation
        hidden = secure is not None and secure.mode != "plain"
        return {
            "algorithm": self.settings.name,
            "task": self.task.name,
            "seed": self.settings.seed,
            **summarise(
                self.books.trips,
                stopped_by=self.stopped,
                server_steps=version,
                virtual_time=self.books.time,
                wall_seconds=self.wall_seconds(),
                peak_memory_mb=own_peak_mb(),
                metrics=self.metrics[-len(self.task.splits) :],
                target=self.target,
                reached=self.reached,
                privacy=self.protection.describe(version, "sums" if hidden else "updates") if self.protection else None,
            ),
            "refused": dict(self.books.counts.refused),
            "strikes": dict(self.books.counts.strikes),
        }


def opened(settings: Settings, weights: Vector, clients: int, folder: Folder | None) -> tuple[Books, Any, int | None]:
    """New books for these settings; with privacy, its protection and its last server step."""
    until, deployment = settings.until, settings.deploy or Deployment()
    present = Present(clients)
    protection = last = None
    if settings.privacy is not None:
        promise = settings.privacy.plan(settings.server, clients, server_steps=until.server_steps, trips=until.trips)
        protection, last = protected(promise, settings.privacy, clients, len(weights), settings.seed, folder), promise.horizon
    sealed = settings.secure_aggregation is not None
    more = {"seed": settings.seed, "available": present, "protection": protection, "sealed": sealed}
    server = settings.server.bind(weights, clients, **more)
    return Books(server, present, deployment.strikes), protection, last
