"""Seeing a run that is being served: its figures once a second, in status.json, on the live page and for Prometheus.

    with watch(folder, deployment) as follow:
        serve(settings, folder, transport, follow)

The serving loop makes the figures itself and everybody else is handed finished ones, so nobody who looks can disturb the run.
They take about a hundredth of its time at most: only trips that ended since the last look are looked at, and a slow disk is
written to less often. (A view of the live page costs more, and is made only while somebody has it open: see live.py.)
"""

import contextlib
import logging
import math
import os
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from fedbuff.core.starting import StartingRule, arrivals
from fedbuff.core.trips import OUTCOMES, UNUSED, USED, Trips
from fedbuff.deploy import status as sheets
from fedbuff.deploy.dispatch import Dispatch, Gateway
from fedbuff.deploy.logs import logged
from fedbuff.deploy.metrics import CONTENT_TYPE, exposition
from fedbuff.deploy.settings import Deployment
from fedbuff.deploy.status import Facts
from fedbuff.report.files import FolderError, write_json
from fedbuff.report.html import Cell, paragraph, table
from fedbuff.report.live import live
from fedbuff.sim.simulation import Status
from fedbuff.version import __version__

log = logging.getLogger("fedbuff.deploy")
_EVERY = 1.0  # seconds between two looks
_SHARE = 100  # a look may take a hundredth of the time, and so may writing it down
_SELDOM = 10.0  # seconds: so often at least, however slow the disk is
_LATEST = 1000  # updates whose staleness is shown apart from all
_PACE = 60.0  # seconds over which trips per second are counted
_LONGEST = 500  # refusal reasons and senders in status.json


@contextlib.contextmanager
def watch(folder: Path, deployment: Deployment | None) -> Iterator[Callable[[Status, Dispatch], None]]:
    """A function to tell how a run stands; installs the logs, and serves the live page if `deployment.metrics` says where.

    Nothing is written into `folder` before the first call: until then it may be another server's.
    """
    with contextlib.ExitStack() as at_the_end:
        watcher = Watcher(folder, at_the_end.enter_context(logged()))
        if deployment is not None and deployment.metrics:
            files = {"/metrics": (CONTENT_TYPE, lambda: watcher.exposition)}
            page = live(
                folder.name,
                deployment.metrics,
                watcher.announce,
                called="deploy.metrics",
                further=lambda: page_tables(watcher.facts),
                files=files,
            )
            watcher.page = at_the_end.enter_context(page)
        try:
            yield watcher.follow
        except BaseException as e:
            watcher.end("stopped", f"{type(e).__name__}: {e}" if str(e) else type(e).__name__)
            raise
        watcher.end("finished", None)


def page_tables(facts: Facts) -> dict[str, str]:
    """What the live page of a deployed run shows besides that of any run: tables as HTML, by name."""
    buffer, latest, clients, pace = facts["buffer"], facts["staleness"]["latest"], facts["clients"], facts["trips_per_second"]
    asked = facts["concurrency"]
    now: list[str | Cell] = [
        Cell(facts["state"], facts["reason"] or ""),
        f"{facts['version']:,}",
        Cell(f"{buffer['fill']:,}", f"of {buffer['size']:,} updates", buffer["fill"] / buffer["size"]),
        Cell(f"{facts['in_flight']:,}", "" if asked is None else f"of {asked:,}"),
        Cell("–" if pace is None else f"{pace:,.1f}/s", f"{facts['trips']:,} ended"),
        Cell(f"{latest['mean']:.1f}", f"median {latest['median']:g}, at most {latest['max']:,}") if latest["updates"] else "–",
        Cell(f"{clients['online']:,}", f"of {clients['all']:,}"),
    ]
    over = f"staleness (last {latest['updates']:,} updates)" if latest["updates"] else "staleness"
    header = ["", "version", "buffer", "active trips", "trips", over, "clients online"]
    made = {"right now": table(header, [now], name="right now")}
    for name, sheet, without in (
        ("gateways", sheets.gateways, "No gateway has shown up yet."),
        ("refused updates", sheets.refused, "Nothing was refused."),
        ("strikes", sheets.strikes, "Nobody has sent what no honest client sends."),
    ):
        header, body, caption = sheet(facts)
        made[name] = table(header, body, caption, name) if body else paragraph(without)
    return made


def concurrency(start: StartingRule) -> int | None:
    """Trips that are to be in flight; None if clients come at a rate."""
    return None if isinstance(start, arrivals) else start.at_once()


def spread(counts: Mapping[int, int]) -> Facts:
    """Mean, median and highest of values that were met so often."""
    updates = sum(counts.values())
    if not updates:
        return {"updates": 0, "mean": None, "median": None, "max": None}
    mean = sum(value * count for value, count in counts.items()) / updates
    return {"updates": updates, "mean": mean, "median": _median(sorted(counts.items()), updates), "max": max(counts)}


def _median(ordered: Iterable[tuple[int, int]], total: int) -> float:
    before, lower = 0, None
    for value, count in ordered:
        before += count
        if lower is None and 2 * before >= total:
            lower = value
        if 2 * before > total:
            assert lower is not None
            return (lower + value) / 2
    raise AssertionError("there is no median of nothing")


def evaluation(metrics: list[dict[str, Any]]) -> Facts | None:
    """The last evaluation: of which version, and its values by split."""
    if not metrics:
        return None
    at = {key: metrics[-1][key] for key in ("trips", "server_steps")}
    splits = {
        m["split"]: {key: finite(m[key]) for key in ("loss", "accuracy") if key in m}
        for m in metrics[-20:]
        if m["server_steps"] == at["server_steps"] and m["trips"] == at["trips"]
    }
    return {**at, "splits": splits}


def _pause(cost: float) -> float:
    """Seconds until something is done again that took so long."""
    return min(_SELDOM, max(_EVERY, _SHARE * cost))


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


class Figures:
    """What became of a run's trips, kept up to date by looking at those that ended since the last look.

    outcomes    how many trips ended how; not those whose update is still in the buffer
    staleness   how often each was met, of the updates that server steps used; `latest` has the last ones
    """

    def __init__(self, trips: Trips) -> None:
        self._trips, self._seen = trips, 0
        self._buffered: list[int] = []
        self._pace: deque[tuple[float, int]] = deque()
        self.outcomes: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self.latest: deque[int] = deque(maxlen=_LATEST)

    def look(self) -> None:
        trips = self._trips
        new = [*self._buffered, *trips.order[self._seen : trips.ended]]
        self._seen, self._buffered = trips.ended, []
        for trip in new:
            outcome = trips.outcome[trip]
            if outcome == UNUSED:  # until the server steps on it
                self._buffered.append(trip)
                continue
            self.outcomes[OUTCOMES[outcome]] += 1
            if outcome == USED:
                staleness = trips.end_version[trip] - trips.start_version[trip]
                self.staleness[staleness] += 1
                self.latest.append(staleness)

    def pace(self, now: float) -> float | None:
        """Trips that ended per second, over the last minute."""
        self._pace.append((now, self._trips.ended))
        while len(self._pace) > 2 and self._pace[1][0] <= now - _PACE:
            self._pace.popleft()
        then, ended = self._pace[0]
        return (self._trips.ended - ended) / (now - then) if now > then else None


class Watcher:
    """Makes the figures of a run and hands them on."""

    def __init__(self, folder: Path, keep_log: Callable[[Path], None]) -> None:
        self._folder, self._keep_log = folder, keep_log
        self.page: Callable[[Status], None] | None = None
        self.exposition = b""
        self._address: str | None = None
        self._began = time.monotonic()
        self._look_due, self._write_due, self._every, self._failing = 0.0, 0.0, _EVERY, False
        self._run: tuple[Status, Dispatch, Figures] | None = None
        self._heard: dict[str, tuple[float, float]] = {}  # gateway -> when it was last seen, by its clock and by ours
        self.facts: Facts = {}

    def announce(self, line: str) -> None:
        """The live page has an address: `live view: URL`, and a warning where one is due."""
        self._address = line.split()[2]
        log.info("%s", line)

    def follow(self, status: Status, dispatch: Dispatch) -> None:
        """Take note of how the run stands, if it is time to."""
        if self._run is None:
            self._keep_log(self._folder)
        figures = Figures(dispatch.books.trips) if self._run is None else self._run[2]
        self._run = status, dispatch, figures
        now = time.monotonic()
        if now >= self._look_due:
            self._look("running" if status.stopped is None else "draining", status.stopped)
            self._look_due = now + _pause(time.monotonic() - now)
            if now >= self._write_due:
                self._write()
        if self.page is not None:
            self.page(replace(status, stopped=None))  # the page ends with the run, not when it begins to drain

    def end(self, state: str, reason: str | None) -> None:
        """The last word."""
        if self._run is None:
            return
        status, dispatch, _ = self._run
        if state == "stopped":
            log.error("stopped", {"reason": reason})
        self._look(state, reason or status.stopped)
        self._write()
        if self.page is not None and state == "finished":
            books, trips = dispatch.books, dispatch.books.trips
            last = replace(
                status,
                trips=trips.ended,
                server_steps=books.server.version,
                virtual_time=books.time,
                in_flight=len(trips) - trips.ended,
                ended_trips=partial(trips.arrays, ended=trips.ended),
                stopped=status.stopped or "finished",
            )
            self.page(last)

    def _look(self, state: str, reason: str | None) -> None:
        assert self._run is not None
        status, dispatch, figures = self._run
        figures.look()
        self.facts = self._made(state, reason, status, dispatch, figures)
        if self.page is not None:
            counts = dispatch.books.counts
            self.exposition = exposition(self.facts, figures.staleness, counts.refused, counts.strikes).encode()

    def _write(self) -> None:
        began = time.monotonic()
        try:
            write_json(self._folder / sheets.FILE, self.facts)
        except FolderError as e:  # whoever wants to know has to do without; the run goes on
            if not self._failing:
                log.warning("no status", {"reason": str(e)})
            self._failing = True
        else:
            self._failing = False
        self._every = _pause(time.monotonic() - began)
        self._write_due = began + self._every

    def _made(self, state: str, reason: str | None, status: Status, dispatch: Dispatch, figures: Figures) -> Facts:
        """Everything there is to show, ready for JSON."""
        books, now = dispatch.books, time.monotonic()
        server, trips, counts = books.server, books.trips, books.counts
        tables = status.settings
        return {
            "state": state,
            "reason": reason,
            "version": server.version,
            "trips": trips.ended,
            "outcomes": dict(figures.outcomes),
            "buffer": {"fill": server.buffered, "size": server.buffer_size},
            "in_flight": len(trips) - trips.ended,
            "concurrency": concurrency(server.start),
            "clients": {"online": len(books.present), "all": len(server.clients)},
            "staleness": {"latest": spread(Counter(figures.latest)), "all": spread(figures.staleness)},
            "trips_per_second": figures.pace(now),
            "evaluation": evaluation(status.metrics),
            "epsilon": finite(status.metrics[-1].get("epsilon")) if status.metrics else None,
            "gateways": [self._gateway(g, books.shut_out(f"gateway {g.name}"), now) for g in dispatch.gateways.values()],
            "refused": dict(counts.refused.most_common(_LONGEST)),
            "strikes": dict(counts.strikes.most_common(_LONGEST)),
            "shut_out": [who for who, _ in counts.strikes.most_common(_LONGEST) if books.shut_out(who)],
            "uptime": now - self._began,
            "served": books.time,
            "run": {
                "run": self._folder.name,
                "algorithm": tables.get("name"),
                "task": next(iter(tables.get("task", {})), None),
                "seed": tables.get("seed"),
                "job": dispatch.job,
                "fedbuff": __version__,
            },
            "page": self._address,
            "pid": os.getpid(),
            "host": platform.node(),
            "every": self._every,
            "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }

    def _gateway(self, gateway: Gateway, shut_out: bool, now: float) -> Facts:
        seen = gateway.last_seen
        if self._heard.get(gateway.name, (0.0, 0.0))[0] != seen:
            self._heard[gateway.name] = seen, now
        heard = self._heard.get(gateway.name)
        return {
            "name": gateway.name,
            "online": gateway.node is not None,
            "shut_out": shut_out,
            "clients": None if gateway.clients is None else len(gateway.clients),
            "messages_out": len(gateway.sent),
            "trips_queued": len(gateway.queue),
            "last_seen": None if heard is None else now - heard[1],
            "problem": gateway.problem,
        }
