"""A pool of worker processes on this machine: this one, and others beside it.

They are forked, so they have the task as it is, examples included, at no cost; versions and updates lie in memory they
share; messages are a few numbers. Whenever this process would have to wait, it works. A worker that dies is replaced and
its work done again: the result does not change.
"""

import heapq
import multiprocessing
import os
import pickle
import selectors
import signal
import time
import warnings
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from fedbuff.core.versions import Vector
from fedbuff.sim.pool import NOW, Block, SharedVersions, Work, do
from fedbuff.sim.shared import Rows

if TYPE_CHECKING:
    from fedbuff.learn.work import Trainer

_LONG = 0.003  # seconds: work that takes longer is handed out one by one, so that whoever is idle can have it
_DEATHS = 3  # so many workers may die of the same work


def can_fork() -> bool:
    """Whether worker processes can be had here: macOS forbids a fork after its libraries have been used."""
    return hasattr(os, "fork") and os.uname().sysname != "Darwin"


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """`workers` processes, this one included; the others are forked when the first work comes."""

    def __init__(self, trainer: "Trainer", versions: int, updates: int, like: Vector, on_disk: bool, workers: int) -> None:
        self.updates = Rows(updates, len(like), like.dtype, on_disk)
        self._trainer = trainer
        self._versions = SharedVersions(Rows(versions, len(like), like.dtype, on_disk), {})
        self._others = workers - 1
        self.alone = workers == 1
        self._processes: dict[Connection, multiprocessing.process.BaseProcess] = {}
        self._at_hand: dict[Connection, list[int]] = {}
        self._selector = selectors.DefaultSelector()
        self._queue: list[tuple[int, int]] = []  # priority, key
        self._work: dict[int, Work] = {}  # not done yet
        self._sent: set[int] = set()
        self._done: dict[int, Any] = {}
        self._deaths: dict[int, int] = {}
        self._seconds = 0.0  # that work takes, about

    # ── the pool ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, version: int, weights: Vector) -> None:
        self._versions.keep(version, weights)

    def drop(self, version: int) -> None:
        self._versions.drop(version)

    def weights(self, version: int) -> Vector:
        return self._versions[version]

    def submit(self, key: int, work: Work, priority: int) -> None:
        while len(self._processes) < self._others:
            self._fork()
        self._work[key] = work
        if self._others and priority != NOW:  # else this process does it, as soon as it waits for it
            heapq.heappush(self._queue, (priority, key))
            self._hand_out()

    def finished(self, key: int) -> bool:
        self._receive(0)
        self._hand_out()
        return key in self._done

    def result(self, key: int) -> Any:
        if key in self._sent:
            self._receive(0)
        while key not in self._done:
            mine = key if key not in self._sent else self._next()
            if mine is None:
                self._receive(None)
                continue
            work = self._work.pop(mine)
            self._hand_out(at_once=3)  # nobody will hand out more before this is done
            try:
                self._done[mine], seconds = timed(work, self._trainer, self._versions, self.updates)
            except Exception as e:
                if mine == key:
                    raise
                self._done[mine] = e  # for whoever asks for it, as if another process had done it
            else:
                self._took(seconds)
            if mine != key:
                self._receive(0)
        self._hand_out()
        result = self._done.pop(key)
        if isinstance(result, BaseException):
            raise result
        return result

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values() if process.pid]

    def close(self) -> None:
        for connection, process in self._processes.items():
            connection.close()
            process.kill()
            process.join()
        self._processes.clear()
        self._selector.close()

    # ── workers ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _fork(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        others = [*self._processes, ours]
        process = context.Process(
            target=_serve, args=(theirs, others, self._trainer, self._versions.rows, self.updates), daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python ≥ 3.12 warns of forks beside threads; ours run no lock
            process.start()
        theirs.close()
        self._processes[ours], self._at_hand[ours] = process, []
        self._selector.register(ours, selectors.EVENT_READ)

    def _next(self) -> int | None:
        """The most urgent work that nobody has begun, taken off the queue."""
        while self._queue:
            _, key = heapq.heappop(self._queue)
            if key in self._work and key not in self._sent:
                return key
        return None

    def _took(self, seconds: float) -> None:
        self._seconds += (seconds - self._seconds) / 8

    def _hand_out(self, at_once: int | None = None) -> None:
        """Give work to whoever has least at hand, up to `at_once` each."""
        at_once = at_once or (1 if self._seconds > _LONG else 2)
        if self._processes and self._queue:
            self._receive(0)
        while self._processes and self._queue:
            connection = min(self._at_hand, key=lambda c: len(self._at_hand[c]))
            if len(self._at_hand[connection]) >= at_once:
                return
            key = self._next()
            if key is None:
                return
            work = self._work[key]
            versions = [work.version] if isinstance(work, Block) else work.versions
            rows = {version: self._versions.row_of[version] for version in versions}
            try:
                connection.send_bytes(pickle.dumps((key, work, rows), protocol=5))
            except OSError:  # it died: the next reading notices
                heapq.heappush(self._queue, (NOW, key))
                self._replace(connection)
                continue
            self._sent.add(key)
            self._at_hand[connection].append(key)

    def _receive(self, timeout: float | None) -> None:
        """Take in results; with `timeout` None, wait for one."""
        for ready, _ in self._selector.select(timeout) if self._processes else ():
            connection = ready.fileobj
            assert isinstance(connection, Connection)
            try:
                key, result, seconds = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                self._replace(connection)
                continue
            self._at_hand[connection].remove(key)
            self._sent.discard(key)
            del self._work[key]
            self._done[key] = result
            self._took(seconds)

    def _replace(self, connection: Connection) -> None:
        """A worker died: another one does its work."""
        process, lost = self._processes.pop(connection), self._at_hand.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        process.join()
        for key in lost[:1]:  # what it was at; the rest was only waiting
            self._deaths[key] = self._deaths.get(key, 0) + 1
            if self._deaths[key] == _DEATHS:
                raise RuntimeError(
                    f"{_DEATHS} worker processes died one after another (exit code {process.exitcode}) of the same work, "
                    f"{_named(self._work[key])}: not enough memory? Try workers=1, which shows what happens"
                )
        for key in lost:
            self._sent.discard(key)
            heapq.heappush(self._queue, (NOW, key))
        self._fork()


def timed(work: Work, trainer: "Trainer", versions: SharedVersions, updates: Rows) -> tuple[Any, float]:
    """Do the work; its result, and how long it took."""
    began = time.perf_counter()
    return do(work, trainer, versions, updates), time.perf_counter() - began


def _named(work: Work) -> str:
    return f"evaluating version {work.version}" if isinstance(work, Block) else f"trips {work.trips[0]} to {work.trips[-1]}"


def _serve(connection: Connection, others: list[Connection], trainer: "Trainer", versions: Rows, updates: Rows) -> None:
    """A worker's life: work comes in, results go out, until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    for other in others:  # so that a worker sees the end of its pipe when the parent is gone
        other.close()
    try:
        while True:
            key, work, rows = pickle.loads(connection.recv_bytes())
            seconds = 0.0
            try:
                result, seconds = timed(work, trainer, SharedVersions(versions, rows), updates)
            except Exception as e:
                result = _portable(e)
            connection.send_bytes(pickle.dumps((key, result, seconds), protocol=5))
    except (EOFError, OSError):
        pass
    finally:
        os._exit(0)  # nothing of the parent's is this process's to tidy up


def _portable(error: Exception) -> Exception:
    """The error as another process can read it, with where it came from."""
    import traceback

    error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
