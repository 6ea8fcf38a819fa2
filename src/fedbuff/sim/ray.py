"""A pool of workers on a Ray cluster: `pip install 'fedbuff[ray]'`.

Each worker is an actor with one core. The task goes into the cluster's object store once, every version too, from where
each node fetches it once; some chunks' trips go out in one call and their updates come back in one object. An actor or a
node that dies is replaced and its work done again: the result does not change.
"""

import heapq
import inspect
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedbuff.core.versions import Vector
from fedbuff.sim.pool import NOW, Block, Chunk, Work
from fedbuff.sim.shared import Rows

try:
    import ray
except ImportError as e:
    raise ValueError("engine='ray': Ray is not installed; pip install 'fedbuff[ray]'") from e

if TYPE_CHECKING:
    from fedbuff.learn.task import Task
    from fedbuff.learn.work import Trainer

_AT_ONCE = 2  # calls that a worker has at hand: one under way, one so that it need not wait
_CHUNKS = 3  # that a call has at most: each call costs some milliseconds of our own time and of Ray's
_DEATHS = 5  # so many workers may die of the same work


class OnRay:
    """Actors on the cluster at `address`, or on one started for this run on this machine."""

    alone = False

    def __init__(
        self,
        task: "Task",
        make: "Callable[[Task], Trainer]",
        updates: int,
        like: Vector,
        on_disk: bool,
        workers: int | None,
        address: str | None,
    ) -> None:
        self.updates = Rows(updates, len(like), like.dtype, on_disk)
        self._ours = not ray.is_initialized()
        if self._ours:
            quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
            try:
                ray.init(address=address, **quiet) if address else ray.init(num_cpus=workers, **quiet)
            except (ConnectionError, RuntimeError, ValueError) as e:
                raise ValueError(f"address={address!r}: no Ray cluster there: {e}") from e
        cpus = int(ray.cluster_resources().get("CPU", 0))
        if workers is not None and workers > cpus:
            raise ValueError(f"workers={workers}: the Ray cluster has {cpus} CPUs, and each worker takes one")
        for part in (task.model, task.loss, task.accuracy):
            _send_by_value(part)
        self._task, self._make = ray.put(task), ray.put(make)
        self._local: dict[int, Vector] = {}
        self._versions: dict[int, Any] = {}  # version -> where it is in the object store
        self._actors = [self._actor() for _ in range(workers or cpus)]
        self._running: dict[Any, tuple[list[int], Any]] = {}  # results to come of a call -> keys, actor
        self._queue: list[tuple[int, int]] = []
        self._work: dict[int, Work] = {}
        self._sent: set[int] = set()
        self._done: dict[int, Any] = {}
        self._deaths: dict[int, int] = {}

    def _actor(self) -> Any:
        return ray.remote(num_cpus=1)(_Worker).remote(self._task, self._make)

    def keep(self, version: int, weights: Vector) -> None:
        self._local[version], self._versions[version] = weights, ray.put(weights)

    def drop(self, version: int) -> None:
        del self._local[version], self._versions[version]

    def weights(self, version: int) -> Vector:
        return self._local[version]

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
            self._receive(None)
        return self._done.pop(key)

    def pids(self) -> list[int]:
        return []  # they may be anywhere

    def close(self) -> None:
        if self._ours:
            ray.shutdown()
            return
        for actor in self._actors:
            ray.kill(actor)

    def _hand_out(self) -> None:
        while True:
            at_hand = Counter(actor for _, actor in self._running.values())
            actor = min(self._actors, key=lambda a: at_hand[a])
            if at_hand[actor] >= _AT_ONCE or not (keys := self._next()):
                return
            works = [self._work[key] for key in keys]
            if isinstance(works[0], Block):
                coming = actor.evaluate.remote(self._versions[works[0].version], works[0].split, works[0].start)
            else:
                chunks = [(list(c.trips), list(c.clients), list(c.versions)) for c in works if isinstance(c, Chunk)]
                needed = {version for _, _, versions in chunks for version in versions}
                places = {version: [self._versions[version]] for version in needed}  # in a list: fetched over there
                coming = actor.train.remote(chunks, places)
            self._sent.update(keys)
            self._running[coming] = keys, actor

    def _next(self) -> list[int]:
        """What goes out in the next call: an evaluation, or chunks, several if nobody waits and there are enough for all."""
        keys: list[int] = []
        room = min(_CHUNKS, max(1, len(self._queue) // len(self._actors)))
        while self._queue and len(keys) < room:
            priority, key = self._queue[0]
            if key in self._sent or key in keys or key not in self._work:
                heapq.heappop(self._queue)
                continue
            alone = priority == NOW or isinstance(self._work[key], Block)
            if alone and keys:
                break
            heapq.heappop(self._queue)
            keys.append(key)
            if alone:
                break
        return keys

    def _receive(self, timeout: float | None) -> None:
        """Hand out work and take in results; with `timeout` None, wait for one."""
        self._hand_out()
        if not self._running:
            return
        # a call costs a third of a millisecond: whoever waits takes the first, whoever does not takes all
        ready, _ = ray.wait(list(self._running), num_returns=len(self._running) if timeout == 0 else 1, timeout=timeout)
        for coming in ready:
            if coming not in self._running:  # its actor died and was replaced meanwhile
                continue
            keys, actor = self._running[coming]
            try:
                result = ray.get(coming)
            except ray.exceptions.RayTaskError as e:
                raise e.cause if isinstance(e.cause, Exception) else e from e
            except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError) as e:
                self._replace(actor, keys, e)
                continue
            del self._running[coming]
            self._sent.difference_update(keys)
            works = [self._work.pop(key) for key in keys]
            if isinstance(works[0], Block):
                self._done[keys[0]] = result
                continue
            self.updates.matrix[[row for chunk in works if isinstance(chunk, Chunk) for row in chunk.rows]] = result
            self._done.update(dict.fromkeys(keys))
        self._hand_out()

    def _replace(self, actor: Any, keys: list[int], why: Exception) -> None:
        """An actor died: another one does its work."""
        for key in keys:
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths[key] == _DEATHS:
                raise RuntimeError(f"{_DEATHS} Ray workers died one after another of the same work: {why}") from why
        lost = [key for keys, a in self._running.values() if a is actor for key in keys]
        self._running = {coming: (k, a) for coming, (k, a) in self._running.items() if a is not actor}
        for key in lost:
            self._sent.discard(key)
            heapq.heappush(self._queue, (NOW, key))
        self._actors = [self._actor() if a is actor else a for a in self._actors]


class _Worker:
    """The actor: a trainer of its own, and weights fetched from the object store of its node."""

    def __init__(self, task: "Task", make: "Callable[[Task], Trainer]") -> None:
        self._task, self._make = task, make

    @cached_property
    def _trainer(self) -> "Trainer":
        """Made by the first work, so that what goes wrong in it is the work's error and not the death of the actor."""
        from fedbuff.learn.work import settle

        settle()
        return self._make(self._task)

    def train(self, chunks: list[tuple[list[int], list[int], list[int]]], places: dict[int, list[Any]]) -> Any:
        """The updates of all chunks, one after another; a chunk is trips, clients and versions."""
        weights = dict(zip(places, ray.get([place for (place,) in places.values()]), strict=True))
        like = next(iter(weights.values()))
        updates = np.empty((sum(len(trips) for trips, _, _ in chunks), len(like)), like.dtype)
        done = 0
        for trips, clients, versions in chunks:
            rows = range(done, done + len(trips))
            self._trainer.train(updates, rows, trips, clients, [weights[version] for version in versions])
            done = rows.stop
        return updates

    def evaluate(self, weights: Vector, split: str, start: int) -> tuple[float, int, int]:
        return self._trainer.evaluate(weights, split, start)


def _send_by_value(function: Any) -> None:
    """Let a function of the user's own files travel with its code: a worker elsewhere can't import it."""
    module = inspect.getmodule(getattr(function, "func", function))
    if module is None or module.__name__ in ("__main__", "fedbuff") or module.__name__.startswith("fedbuff."):
        return
    file = getattr(module, "__file__", None)
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib", "stdlib")]
    if file and module.__name__ in sys.modules and not any(path in Path(file).resolve().parents for path in installed):
        ray.cloudpickle.register_pickle_by_value(module)
