"""The live view: the report of a run while it trains, for a browser on this machine.

The run itself makes each view, between two server steps: only while somebody looks, and in at most a fiftieth of its time.
The threads that answer the browser hand out finished bytes, so they never touch the run.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit
from weakref import WeakSet

from fedbuff.report.address import host_and_port, is_loopback
from fedbuff.report.compare import COSTS
from fedbuff.report.digest import digest
from fedbuff.report.pages import View, runs_page, view
from fedbuff.report.run import Run

if TYPE_CHECKING:
    from fedbuff.sim.simulation import Status

_EVERY = 1.0  # seconds between two views
_SHARE = 50  # a view may take a fiftieth of the time
_LOOKING = 10.0  # seconds after which a page that has not asked is closed
_LAST_WORDS = 3.0  # seconds to wait for an open page to fetch the end
_WAIT = b'<!doctype html><meta http-equiv="refresh" content="1"><title>fedbuff</title><p>waiting for the first evaluation'


@contextlib.contextmanager
def live(
    title: str,
    address: str = "127.0.0.1:0",
    say: Callable[[str], None] = print,
    *,
    called: str = "--live-address",
    further: Callable[[], Mapping[str, str]] = dict,
    files: Mapping[str, tuple[str, Callable[[], bytes]]] = MappingProxyType({}),
) -> "Iterator[Callable[[Status], None]]":
    """Serve the view of a run at `address`; a function to report its `Status` to.

    Port 0 takes a free one; `say` is told the URL. The server ends with the run, once an open page has seen the end.

    called    what the address is called in complaints
    further   more tables for the page, as HTML by name: the same names each time
    files     what else is served: a type and the content of now, by path; other threads ask
    """
    server = _Server(address, say, called, files)
    began, due = time.monotonic(), 0.0

    def report(status: "Status") -> None:
        nonlocal due
        now = time.monotonic()
        if now < due and status.stopped is None:
            return
        if server.page and now - server.asked > _LOOKING and status.stopped is None:
            due = now + 0.1  # nobody is looking
            return
        if not status.metrics:
            server.start()  # what else is served is there already
            return
        made = view([digest(so_far(status, now - began))])
        made = replace(made, tables={**made.tables, **further()})
        if not server.page:
            server.page = runs_page(made, title, live=True).encode()
        server.show(made, status.stopped, f"{status.trips:,} trips, {status.server_steps:,} server steps")
        # only now: the run's worker processes were forked from a process without threads
        server.start()
        cost = time.monotonic() - now
        due = now + cost + max(_EVERY, _SHARE * cost)

    try:
        yield report
    except BaseException as e:
        server.end("failed", f"the run stopped: {e or type(e).__name__}")
        raise
    finally:
        server.close()


def so_far(status: "Status", seconds: float) -> Run:
    """A run that is still under way as if it had ended now, with what a report needs of it."""
    trips, tables = status.ended_trips(), status.settings
    used = trips["staleness"][trips["outcome"] == "used"]
    split = status.metrics[0]["split"]
    target = tables.get("target", tables["until"].get("accuracy"))
    reached = next(
        (m for m in status.metrics if m["split"] == split and target is not None and (m.get("accuracy") or 0.0) >= target), {}
    )
    last = {m["split"]: {k: v for k, v in m.items() if k not in (*COSTS, "split")} for m in status.metrics}
    summary = {
        "algorithm": tables["name"],
        "task": status.task,
        "seed": tables["seed"],
        "stopped_by": status.stopped,
        **{cost: getattr(status, cost) for cost in COSTS},
        **{f"{cost}_to_target": reached.get(cost) for cost in COSTS},
        "in_flight": status.in_flight,
        "target": target,
        "metrics": last,
        "staleness_mean": status.staleness,
        "staleness_max": int(used.max()) if len(used) else None,
        "wall_seconds": seconds,
    }
    return Run(summary, status.metrics, trips, tables, {})


class _Server:
    """Hands out one page, and the newest view as JSON; `asked` is when it was last asked for."""

    def __init__(
        self, address: str, say: Callable[[str], None], called: str, files: Mapping[str, tuple[str, Callable[[], bytes]]]
    ) -> None:
        host, port = host_and_port(address, called)
        self._files = files
        self.page, self._news, self.asked, self._told = b"", (0, b"{}"), time.monotonic(), 0
        self._newest: dict[str, Any] = {}
        self._thread: threading.Thread | None = None
        try:
            self._http = _http(host, port, self)
        except (OSError, TypeError, UnicodeError) as e:  # the latter two of a host that can be none
            why = getattr(e, "strerror", None) or e
            raise ValueError(f"can't serve the live view at {address}: {why}; choose another {called}") from e
        _listening.add(self._http.socket)
        where = f"http://{f'[{host}]' if ':' in host else host}:{self._http.server_address[1]}/"
        say(f"live view: {where}" + ("" if is_loopback(host) else " (anyone who can reach this machine can see it)"))

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), daemon=True, name="live view")
            self._thread.start()

    def show(self, made: View, stopped: str | None, text: str) -> None:
        self._newest = {"lead": made.lead, "tables": made.tables, "figures": made.figures}
        self.end("finished", f"finished: {stopped}") if stopped else self._publish("running", text)

    def end(self, state: str, text: str) -> None:
        if self._newest:
            self._publish(state, text)

    def _publish(self, state: str, text: str) -> None:
        number = self._news[0] + 1
        news = {"number": number, "state": state, "text": text, **self._newest}
        self._news = number, json.dumps(news, allow_nan=False).encode()  # in one go: other threads read it

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Status, type and content for a path; called from other threads."""
        asked = urlsplit(path)
        if asked.path == "/favicon.ico":  # browsers ask by themselves, and call it an error if there is none
            return 204, "image/x-icon", b""
        if asked.path == "/":
            self.asked = time.monotonic()
            return 200, "text/html; charset=utf-8", self.page or _WAIT
        if asked.path == "/data.json":
            self.asked = time.monotonic()
            self._told, news = self._news
            seen = parse_qs(asked.query).get("seen") == [str(self._told)]
            return (204, "application/json", b"") if seen else (200, "application/json", news)
        if asked.path in self._files:
            kind, content = self._files[asked.path]
            return 200, kind, content()
        there = ", ".join(["/", *self._files])
        return 404, "text/plain", f"there are {there} and /data.json\n".encode()

    def close(self) -> None:
        if self._thread is not None:
            until = time.monotonic() + _LAST_WORDS
            while self._told < self._news[0] and time.monotonic() - self.asked < _LOOKING and time.monotonic() < until:
                time.sleep(0.05)
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()


def _http(host: str, port: int, server: _Server) -> ThreadingHTTPServer:
    local = is_loopback(host)

    class Answers(BaseHTTPRequestHandler):
        """GET, and nothing else; on loopback only for names of this machine, or a web page elsewhere could read along."""

        server_version, sys_version = "fedbuff", ""

        def do_GET(self) -> None:
            asked_as = (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "").lower()
            if local and asked_as not in ("localhost", host.lower()) and not is_loopback(asked_as):
                status, kind, content = 421, "text/plain", b"this live view is for this machine only\n"
            else:
                status, kind, content = server.answer(self.path)
            with contextlib.suppress(ConnectionError):  # the page was closed meanwhile
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Say nothing: stderr is the user's."""

    class Http(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        daemon_threads, block_on_close = True, False

        def handle_error(self, request: object, client_address: object) -> None:
            """A browser that went away is no error of ours."""

    return Http((host, port), Answers)


_listening: WeakSet[socket.socket] = WeakSet()


def _stop_listening() -> None:
    for listener in _listening:
        listener.close()


os.register_at_fork(after_in_child=_stop_listening)  # worker processes must not keep the port
