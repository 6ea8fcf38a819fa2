"""A pool of workers on a Ray cluster: `pip install 'fedbuff[ray]'`.

Each worker is an actor with one core. The task goes into the cluster's object store once, from where each node fetches it
once; a chunk's trips go out in one call. An actor of our own node reads versions and writes updates in memory that it shares
with us. For others a version goes into the object store, too, and a chunk's updates come back in one object. An actor gets
work once it has come up, which may take long, or for ever, where the cluster's cores are in use. One that dies, perhaps with
its node, is replaced and its work done again: the result does not change.
"""

import heapq
import inspect
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbuff.core.versions import Vector
from fedbuff.sim.pool import NOW, Block, Chunk, SharedVersions, Work
from fedbuff.sim.shared import Place, Rows, found

try:
    import ray
except ImportError as e:
    raise ValueError("engine='ray': Ray is not installed; pip install 'fedbuff[ray]'") from e

if TYPE_CHECKING:
    from fedbuff.learn.evaluate import Part
    from fedbuff.learn.task import Task
    from fedbuff.learn.work import Trainer

_AT_ONCE = 2  # work that a worker has at hand: one under way, one so that it need not wait
_DEATHS = 5  # so many workers may die of the same work
_PATIENCE = 10.0  # seconds that a cluster may take to answer,
_LONG = 30.0  # and its workers to come up before it is said that they don't


class OnRay:
    """Actors on the cluster at `address`, or on one started for this run on this machine."""

    alone = False

    def __init__(
        self,
        task: "Task",
        make: "Callable[[Task], Trainer]",
        versions: int,
        updates: int,
        like: Vector,
        on_disk: bool,
        workers: int | None,
        address: str | None,
    ) -> None:
        self.updates = Rows(updates, len(like), like.dtype, on_disk)
        self._versions = SharedVersions(Rows(versions, len(like), like.dtype, on_disk), {})
        self._stored: dict[int, Any] = {}  # version -> where it is in the object store, if an actor elsewhere needs it
        self._ours = not ray.is_initialized()
        self._near: set[Any] = set()  # actors that share our memory
        self._starting: dict[Any, Any] = {}  # word that it has come up -> actor
        self._at_hand: dict[Any, list[int]] = {}  # actors that have come up, and their work
        self._running: dict[Any, tuple[int, Any]] = {}  # result to come -> key, actor
        self._queue: list[tuple[int, int]] = []
        self._work: dict[int, Work] = {}
        self._sent: set[int] = set()
        self._done: dict[int, Any] = {}
        self._deaths: dict[int, int] = {}
        self._stillborn = 0  # actors that have died before they came up, one after another
        self._silent_since: float | None = time.monotonic()  # no actor is up
        _connect(address, workers)
        try:
            cpus = int(ray.cluster_resources().get("CPU", 0))
            if workers is not None and workers > cpus:
                raise ValueError(f"workers={workers}: the Ray cluster has {cpus} CPUs, and each worker takes one")
            for part in (task.model, task.loss, task.accuracy):
                _send_by_value(part)
            self._task, self._make = _sent(task), ray.put(make)
            self._node = ray.get_runtime_context().get_node_id()
            for _ in range(workers or max(cpus, 1)):  # a cluster may have none yet, and grow when somebody asks
                self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Ask for an actor."""
        shared = self._versions.rows.place(), self.updates.place()
        actor = ray.remote(num_cpus=1)(_Worker).remote(self._task, self._make, self._node, *shared)
        self._starting[actor.is_near.remote()] = actor

    def keep(self, version: int, weights: Vector) -> None:
        self._versions.keep(version, weights)

    def drop(self, version: int) -> None:
        self._versions.drop(version)
        self._stored.pop(version, None)

    def weights(self, version: int) -> Vector:
        return self._versions[version]

    def submit(self, key: int, work: Work, priority: int) -> None:
        self._work[key] = work
        heapq.heappush(self._queue, (priority, key))
        self._receive(0)

    def finished(self, key: int) -> bool:
        self._receive(0)
        return key in self._done

    def result(self, key: int) -> Any:
        if key in self._work and key not in self._sent:
            heapq.heappush(self._queue, (NOW, key))  # somebody is waiting: before all others
        while key not in self._done:
            self._receive(_PATIENCE)
        result = self._done.pop(key)
        if isinstance(result, BaseException):
            raise result
        return result

    def pids(self) -> list[int]:
        return []  # they may be anywhere

    def close(self) -> None:
        if self._ours:
            ray.shutdown()
            return
        for actor in (*self._at_hand, *self._starting.values()):
            ray.kill(actor)

    def _hand_out(self) -> None:
        while self._queue and self._at_hand:
            actor = min(self._at_hand, key=lambda a: len(self._at_hand[a]))
            if len(self._at_hand[actor]) >= _AT_ONCE:
                return
            _, key = heapq.heappop(self._queue)
            if key in self._sent or key not in self._work:
                continue
            work = self._work[key]
            versions = [work.version] if isinstance(work, Block) else work.versions
            places = {version: [self._found_by(actor, version)] for version in versions}  # in a list: fetched over there
            if isinstance(work, Block):
                coming = actor.evaluate.remote(work.version, places, work.split, work.start)
            else:
                coming = actor.train.remote(list(work.trips), list(work.clients), list(work.versions), places, list(work.rows))
            self._sent.add(key)
            self._at_hand[actor].append(key)
            self._running[coming] = key, actor

    def _found_by(self, actor: Any, version: int) -> Any:
        """Where an actor finds a version: its row, or what stands for it in the object store."""
        if actor in self._near:
            return self._versions.row_of[version]
        if version not in self._stored:
            self._stored[version] = ray.put(self._versions[version])
        return self._stored[version]

    def _receive(self, timeout: float) -> None:
        """Hand out work, and take in results and who has come up; wait for something of that as long as `timeout`."""
        self._hand_out()
        expected = [*self._running, *self._starting]
        if not expected:
            return
        ready, _ = ray.wait(expected, num_returns=len(expected), timeout=0)
        if not ready and timeout:
            ready, _ = ray.wait(expected, num_returns=1, timeout=timeout)
        for coming in ready:
            if coming in self._starting:
                self._come_up(coming)
                continue
            if coming not in self._running:  # its actor died and was replaced meanwhile
                continue
            key, actor = self._running[coming]
            try:
                result = ray.get(coming)
            except ray.exceptions.RayTaskError as e:  # for whoever asks for this work
                result = e.cause if isinstance(e.cause, Exception) else e
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as e:
                self._replace(actor, key, e)
                continue
            del self._running[coming]
            self._at_hand[actor].remove(key)
            self._sent.discard(key)
            work = self._work.pop(key)
            if isinstance(work, Chunk) and isinstance(result, np.ndarray):
                self.updates.matrix[list(work.rows)] = result
                result = None
            self._done[key] = result
        self._hand_out()
        if self._silent_since is not None and time.monotonic() - self._silent_since > _LONG:
            self._silent_since = None  # said once
            print(
                f"fedbuff: none of {len(self._starting)} workers on Ray has come up for {_LONG:g} s: are all of the "
                "cluster's cores in use? Waiting",
                file=sys.stderr,
                flush=True,
            )

    def _come_up(self, coming: Any) -> None:
        """An actor is there, or has died before it was."""
        actor = self._starting.pop(coming)
        try:
            near = ray.get(coming)
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as e:
            self._stillborn += 1
            if self._stillborn < _DEATHS:
                self._start()
            elif not self._at_hand and not self._starting:
                raise RuntimeError(f"{_DEATHS} Ray workers died one after another before they could work: {e}") from e
            return
        self._at_hand[actor] = []
        self._stillborn, self._silent_since = 0, None
        if near:
            self._near.add(actor)

    def _replace(self, actor: Any, key: int, why: Exception) -> None:
        """An actor died: another one does its work."""
        self._deaths[key] = self._deaths.get(key, 0) + 1
        if self._deaths[key] == _DEATHS:
            raise RuntimeError(f"{_DEATHS} Ray workers died one after another of the same work: {why}") from why
        ray.kill(actor)  # if it is only out of reach: it must not write to rows that others have by then
        lost = self._at_hand.pop(actor)
        self._near.discard(actor)
        self._running = {coming: (k, a) for coming, (k, a) in self._running.items() if a is not actor}
        for k in lost:
            self._sent.discard(k)
            heapq.heappush(self._queue, (NOW, k))
        self._start()
        if not self._at_hand:
            self._silent_since = time.monotonic()


class _Worker:
    """The actor: a trainer of its own; weights from memory that it shares, or from the object store of its node."""

    def __init__(
        self, task: "Task", make: "Callable[[Task], Trainer]", node: str, versions: Place | None, updates: Place | None
    ) -> None:
        self._task, self._make = task, make
        self._versions, self._updates = None, None
        if versions and updates and node == ray.get_runtime_context().get_node_id():
            both = found(versions), found(updates)
            self._versions, self._updates = (None, None) if None in both else both

    def is_near(self) -> bool:
        """Whether it shares memory with whoever made it."""
        return self._updates is not None

    @cached_property
    def _trainer(self) -> "Trainer":
        """Made by the first work, so that what goes wrong in it is the work's error and not the death of the actor."""
        from fedbuff.learn.work import settle

        settle()
        return self._make(self._task)

    def train(
        self, trips: list[int], clients: list[int], versions: list[int], places: dict[int, list[Any]], rows: list[int]
    ) -> Any:
        """Train a chunk into its rows, or return its updates if they are out of reach."""
        weights = self._weights(places)
        starts = [weights[version] for version in versions]
        if self._updates is not None:
            self._trainer.train(self._updates.matrix, rows, trips, clients, starts)
            self._updates.rest(rows)
            if self._versions is not None:
                self._versions.rest(place for (place,) in places.values())
            return None
        updates = np.empty((len(trips), len(starts[0])), starts[0].dtype)
        self._trainer.train(updates, range(len(trips)), trips, clients, starts)
        return updates

    def evaluate(self, version: int, places: dict[int, list[Any]], split: str, start: int) -> "Part":
        return self._trainer.evaluate(self._weights(places)[version], split, start)

    def _weights(self, places: dict[int, list[Any]]) -> dict[int, Vector]:
        """The versions at these places, all of them rows of shared memory or all of them in the object store."""
        there = [place for (place,) in places.values()]
        if self._versions is None or not isinstance(there[0], int):
            return dict(zip(places, ray.get(there), strict=True))
        shared = SharedVersions(self._versions, dict(zip(places, there, strict=True)))
        return {version: shared[version] for version in places}


def _connect(address: str | None, workers: int | None) -> None:
    """To the cluster at `address`, or to one that is started here; whoever has connected this process before has done so."""
    there = address or os.environ.get("RAY_ADDRESS")  # which ray.init would follow, too
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        port = (address or "").rpartition(":")[2]
        if port.isdecimal() and not str(address).startswith("ray://") and port != joined.rpartition(":")[2]:
            raise ValueError(f"address={address!r}: this process is connected to another Ray cluster, {joined}; ray.shutdown()")
        return
    if there:
        _answers(there)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    try:  # "local": not one that happens to be running here
        ray.init(address=there, **quiet) if there else ray.init(address="local", num_cpus=workers, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as e:
        what = f"address={there!r}: could not connect to a Ray cluster there" if there else "engine='ray': could not start Ray"
        raise ValueError(f"{what}: {e}") from e


def _sent(task: "Task") -> Any:
    try:
        return ray.put(task)
    except TypeError as e:
        why = str(e.__cause__ or e).strip().splitlines()[0]
        raise ValueError(f"task: it can't be sent to Ray's workers, as something in it can't be pickled: {why}") from e


def _answers(address: str) -> None:
    """See that somebody is there: Ray itself goes on trying for more than a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto" and the like, which Ray knows what to make of
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PATIENCE).close()
    except (OSError, OverflowError, UnicodeError) as e:
        raise ValueError(f"address={address!r}: nobody answers there ({e}); is it HOST:PORT of a Ray cluster's head?") from e


def _send_by_value(function: Any) -> None:
    """Let a function of the user's own files travel with its code: a worker elsewhere can't import it."""
    module = inspect.getmodule(getattr(function, "func", function))
    if module is None or module.__name__ in ("__main__", "fedbuff") or module.__name__.startswith("fedbuff."):
        return
    file = getattr(module, "__file__", None)
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    if file and module.__name__ in sys.modules and not any(path in Path(file).resolve().parents for path in installed):
        ray.cloudpickle.register_pickle_by_value(module)
