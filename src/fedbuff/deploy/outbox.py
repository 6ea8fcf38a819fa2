"""The outbox: results of a gateway's trips, on its disk from before they are sent until the server says that it has them.

    outbox.keep(job, [result, …])       # safe when this returns
    outbox.find(job, trips)             # to send, or to send again
    outbox.forget(job, trips)           # the server has them, or does not want them

One SQLite file. Of a trip that was forgotten a line stays, without the update: when it was kept and forgotten, for whoever
compares it with the server's journal.
"""

import contextlib
import hashlib
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from fedbuff.deploy.wire import Result

_TABLE = """
create table if not exists trips (
    job text not null, trip integer not null, client integer not null, examples integer not null, seconds real not null,
    problem text not null, version integer not null, digest text not null, kept real not null, forgotten real, payload blob,
    primary key (job, trip)
)
"""


class Outbox:
    """Results by job and trip."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("pragma journal_mode = wal")
        self._db.execute("pragma synchronous = full")
        self._db.execute(_TABLE)

    def close(self) -> None:
        self._db.close()

    def keep(self, job: str, results: Sequence[Result]) -> None:
        """Write results down; those that are there already stay as they are."""
        now = time.time()
        rows = [
            (
                job,
                r.trip,
                r.client,
                r.examples,
                r.seconds,
                _text(r.problem),
                r.version,
                digest(r.payload),
                now,
                bytes(r.payload),
            )
            for r in results
        ]
        with self._transaction():
            self._db.executemany("insert or ignore into trips values (?, ?, ?, ?, ?, ?, ?, ?, ?, null, ?)", rows)

    def find(self, job: str, trips: Sequence[int]) -> dict[int, Result]:
        """The results of these trips that are still here."""
        found = {}
        columns = "client, payload, examples, seconds, problem, version"
        query = f"select {columns} from trips where job = ? and trip = ? and forgotten is null"
        for trip in trips:
            row = self._db.execute(query, (job, trip)).fetchone()
            if row is not None:
                found[trip] = Result(trip, *row)
        return found

    def holding(self, job: str) -> list[int]:
        """Trips whose results are still here."""
        query = "select trip from trips where job = ? and forgotten is null order by trip"
        return [trip for (trip,) in self._db.execute(query, (job,))]

    def forget(self, job: str, trips: Sequence[int]) -> None:
        if trips:
            query = "update trips set payload = null, forgotten = ? where job = ? and trip = ? and forgotten is null"
            with self._transaction():
                self._db.executemany(query, [(time.time(), job, trip) for trip in trips])

    def lines(self, job: str) -> list[tuple[int, int, str, bool]]:
        """Every trip that was ever here: number, client, digest of its update, and whether it was forgotten."""
        query = "select trip, client, digest, forgotten is not null from trips where job = ? order by trip"
        return [(trip, client, found, bool(gone)) for trip, client, found, gone in self._db.execute(query, (job,))]

    @contextlib.contextmanager
    def _transaction(self):  # type: ignore[no-untyped-def]  # a generator of nothing
        self._db.execute("begin immediate")
        try:
            yield
        except BaseException:
            self._db.execute("rollback")
            raise
        self._db.execute("commit")


def _text(problem: str) -> str:
    """As it can be written down: an exception may quote a file name whose bytes are no text."""
    return problem.encode(errors="replace").decode()


def digest(payload: bytes | memoryview) -> str:
    return hashlib.sha256(payload).hexdigest()[:32]
