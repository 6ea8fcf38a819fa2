"""Seeing a run that is being served: what status.json, the live page, Prometheus and the logs say is what happened."""

import argparse
import json
import logging
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import CHROMIUM, Browser
from fedbuff.core.trips import FAILED, UNUSED, USED, Trips
from fedbuff.deploy import logs, status
from fedbuff.deploy.metrics import exposition
from fedbuff.deploy.processes import is_alive
from fedbuff.deploy.serve import serve
from fedbuff.deploy.settings import Deployment
from fedbuff.deploy.watch import Figures, page_tables, spread, watch
from fedbuff.deploy.wire import Orders, Report, Result
from fedbuff.report.files import FolderError
from fedbuff.settings import Settings, from_tables
from test_follow import fetch

HOSTILE = 'e"v\\i\nl <script>window.harmed = 1</script>'


def settings(trips: int, **deploy: Any) -> Settings:
    return from_tables(
        {
            "name": "<b>served</b>",
            "task": {"synthetic": {"clients": 60, "features": 8, "classes": 4, "max_examples": 20}},
            "algorithm": {"fedbuff": {"concurrency": 20, "buffer_size": 4}},
            "client": {"lr": 0.1},
            "until": {"trips": trips},
            "evaluate_every": 40,
            "deploy": {"poll": 0.002, "linger": 0.0, "strikes": 3, "trips_per_message": 4, "metrics": "127.0.0.1:0", **deploy},
        }
    )


class Gateways:
    """A transport without a network: three gateways whose clients answer at random moments with random updates.

    Client 7 sends what is not finite, client 8 can't train, and the third gateway sends no reports at all, but noise.
    `pace` is the mean of the seconds that a message takes.
    """

    def __init__(self, pace: float = 0.01) -> None:
        self.pace, self._random, self._count = pace, random.Random(0), 0
        self._answers: dict[str, tuple[float, bytes]] = {}
        self.accepted = 0

    def nodes(self) -> dict[int, str]:
        return {1: "north", 2: "south", 3: HOSTILE}

    def push(self, messages: Sequence[tuple[int, bytes]]) -> list[str | None]:
        names: list[str | None] = []
        for node, data in messages:
            self._count += 1
            orders = Orders.from_bytes(data)
            mine = {1: ((0, 29),), 2: ((30, 59),), 3: ((0, 59),)}[node]
            results = tuple(self._result(orders, *started) for started in ((o.trip, o.client, o.version) for o in orders.trips))
            problem = "<i>disk nearly full</i>" if node == 2 else ""
            report = b"noise" if node == 3 else Report(orders.job, mine, results, problem=problem).to_bytes()
            self._answers[str(self._count)] = time.monotonic() + self._random.expovariate(1 / self.pace), report
            names.append(str(self._count))
        return names

    def pull(self, messages: Sequence[str]) -> list[tuple[str, bytes | None]]:
        ready = [m for m in messages if m in self._answers and self._answers[m][0] <= time.monotonic()]
        return [(m, self._answers.pop(m)[1]) for m in ready]

    def _result(self, orders: Orders, trip: int, client: int, version: int) -> Result:
        if client == 8:
            return Result(trip, client, problem="out of memory")
        weights = np.array(orders.weights[version])
        update = np.random.default_rng(trip).normal(0, 1e-3, len(weights)).astype(weights.dtype)
        if client == 7:
            update[0] = np.nan
        return Result(trip, client, update.tobytes(), examples=1 + client)


# ── a run that was watched ───────────────────────────────────────────────────────────────────────────────────────────


def counted(books: Any) -> dict[str, Any]:
    """What a run's books say, by numpy."""
    trips = books.trips.arrays()
    by_trip = dict(zip(trips["trip"].tolist(), zip(trips["outcome"], trips["staleness"], strict=True), strict=True))
    used = [int(by_trip[t][1]) for t in books.trips.order[: books.trips.ended] if by_trip[t][0] == "used"]
    outcomes = Counter(str(outcome) for outcome in trips["outcome"])
    assert outcomes.pop("unused", 0) == books.server.buffered
    return {
        "version": int(trips["server_step"].max(initial=0)),
        "trips": len(trips["trip"]),
        "outcomes": outcomes,
        "used": used,
        "in_flight": len(books.server.in_flight),
        "buffered": books.server.buffered,
        "refused": dict(books.counts.refused),
        "strikes": dict(books.counts.strikes),
    }


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of some seconds: each time it was looked at, what was shown and what had happened."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    moments: list[dict[str, Any]] = []
    chosen = settings(trips=1500)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("fedbuff.deploy.watch._SHARE", 0)
        with watch(folder, chosen.deploy) as follow:
            assert not folder.exists()

            def spy(told: Any, dispatch: Any) -> None:
                follow(told, dispatch)
                facts = json.loads((folder / "status.json").read_text())
                if moments and moments[-1]["facts"]["written"] == facts["written"]:
                    return
                url = facts["page"]
                moment = {"facts": facts, "counted": counted(dispatch.books), "metrics": fetch(f"{url}metrics")[1].decode()}
                refusals = [fetch(url, Host="evil.example")[0], fetch(f"{url}metrics", Host="evil.example")[0]]
                refusals += [fetch(f"{url}status.json")[0], fetch(f"{url}metrics", data=b"x")[0]]
                moments.append({**moment, "page": fetch(url)[1], "news": fetch(f"{url}data.json")[1], "refusals": refusals})

            run = serve(chosen, folder, Gateways(0.03), spy)
    return {"folder": folder, "moments": moments, "run": run, "last": status.read(folder)}


def test_the_status_says_what_happened(watched):
    assert len(watched["moments"]) >= 3
    for moment in watched["moments"]:
        facts, happened = moment["facts"], moment["counted"]
        used = happened["used"]
        assert facts["state"] in ("running", "draining")
        assert facts["version"] == happened["version"] == len(used) // 4
        assert facts["trips"] == happened["trips"] == sum(facts["outcomes"].values()) + facts["buffer"]["fill"]
        assert facts["outcomes"] == happened["outcomes"]
        assert facts["buffer"] == {"fill": happened["buffered"], "size": 4}
        assert facts["in_flight"] == happened["in_flight"]
        assert facts["concurrency"] == 20
        for name, values in (("all", used), ("latest", used[-1000:])):
            expected = (float(np.mean(values)), float(np.median(values)), max(values)) if values else (None, None, None)
            shown = facts["staleness"][name]
            assert (shown["mean"], shown["median"], shown["max"]) == pytest.approx(expected)
            assert shown["updates"] == len(values)
        assert facts["refused"] == happened["refused"]
        assert facts["strikes"] == happened["strikes"]
        assert facts["pid"] == os.getpid()
    last = watched["moments"][-1]["facts"]
    assert {"not finite", "client failed", "malformed report"} <= set(last["refused"])
    assert set(last["shut_out"]) == {"client 7", f"gateway {HOSTILE}"}
    assert last["strikes"] == {"client 7": 3, f"gateway {HOSTILE}": 3}
    north, south, evil = (next(g for g in last["gateways"] if g["name"] == name) for name in ("north", "south", HOSTILE))
    assert (north["online"], north["clients"], north["problem"]) == (True, 30, "")
    assert (south["online"], south["clients"], south["problem"]) == (True, 30, "<i>disk nearly full</i>")
    assert (evil["shut_out"], evil["clients"]) == (True, None)
    assert north["last_seen"] < 60
    assert last["clients"] == {"online": 60, "all": 60}
    assert last["trips_per_second"] > 0


def test_the_last_status_is_the_summary_of_the_run(watched):
    facts, summary = watched["last"], watched["run"].summary
    assert facts["state"] == "finished"
    assert facts["reason"] == summary["stopped_by"] == "reached 1,500 trips"
    assert not facts["old"]
    assert (facts["trips"], facts["version"], facts["in_flight"]) == tuple(
        summary[key] for key in ("trips", "server_steps", "in_flight")
    )
    assert facts["staleness"]["all"]["mean"] == pytest.approx(summary["staleness_mean"])
    assert facts["staleness"]["all"]["max"] == summary["staleness_max"]
    assert facts["evaluation"]["splits"] == summary["metrics"]
    assert facts["evaluation"]["server_steps"] == summary["server_steps"]
    assert facts["refused"] == summary["refused"]
    assert json.loads((watched["folder"] / "status.json").read_text())["state"] == "finished"


# ── Prometheus ───────────────────────────────────────────────────────────────────────────────────────────────────────

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\n"])*)"')
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> tuple[Samples, dict[str, str]]:
    """Samples and types of a text in Prometheus' format 0.0.4; whatever the format does not allow is an assertion."""
    samples: Samples = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    closed: set[str] = set()
    current = ""
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        comment = re.fullmatch(r"# (HELP|TYPE) (\S+) (.+)", line)
        if comment:
            word, name, rest = comment.groups()
            assert NAME.fullmatch(name)
            if name != current:
                assert name not in closed, f"{name} comes in two places"
                closed.add(current)
                current = name
            assert name not in (helped if word == "HELP" else kinds)
            assert not any(key[0] == name for key in samples), "a comment after its samples"
            if word == "HELP":
                helped.add(name)
                assert re.fullmatch(r"(?:[^\\]|\\\\|\\n)*", rest)
            else:
                assert rest in ("counter", "gauge", "histogram", "summary", "untyped")
                kinds[name] = rest
            continue
        name = NAME.match(line)[0]  # type: ignore[index]
        rest, labels = line[len(name) :], []
        if rest.startswith("{"):
            at = 1
            while rest[at] != "}":
                found = LABEL.match(rest, at)
                assert found, line
                labels.append((found[1], re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), found[2])))
                at = found.end()
                if rest[at] == ",":
                    at += 1
                    assert rest[at] != "}"
            rest = rest[at + 1 :]
        value = re.fullmatch(r" (NaN|[+-]Inf|[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?)", rest)
        assert value, line
        assert len(dict(labels)) == len(labels)
        family = name
        if kinds.get(current) == "histogram":
            family = re.sub(r"_(bucket|sum|count)$", "", name)
        assert family == current, f"{name} stands under {current}"
        key = name, tuple(sorted(labels))
        assert key not in samples, f"{line} twice"
        samples[key] = float(value[1])
    assert helped == set(kinds)
    for name, kind in kinds.items():
        assert (kind == "counter") == name.endswith("_total"), name
        if kind == "histogram":
            check_histogram(name, samples)
    return samples, kinds


def check_histogram(name: str, samples: Samples) -> None:
    buckets = [(dict(labels)["le"], value) for (of, labels), value in samples.items() if of == f"{name}_bucket"]
    edges = [math.inf if edge == "+Inf" else float(edge) for edge, _ in buckets]
    counts = [count for _, count in buckets]
    assert edges == sorted(edges)
    assert counts == sorted(counts)
    assert edges[-1] == math.inf
    assert counts[-1] == samples[f"{name}_count", ()]


def test_prometheus_is_told_what_happened_and_counters_never_fall(watched):
    before: Samples = {}
    for moment in watched["moments"]:
        samples, kinds = parsed(moment["metrics"])
        happened = moment["counted"]

        def by(name: str, label: str, samples: Samples = samples) -> dict[str, float]:
            return {dict(labels)[label]: value for (of, labels), value in samples.items() if of == name}

        assert samples["fedbuff_server_steps_total", ()] == happened["version"]
        assert by("fedbuff_trips_total", "outcome") == happened["outcomes"]
        assert by("fedbuff_updates_refused_total", "reason") == happened["refused"]
        assert by("fedbuff_strikes_total", "who") == happened["strikes"]
        assert samples["fedbuff_buffer_fill", ()] == happened["buffered"]
        assert samples["fedbuff_buffer_size", ()] == 4
        assert samples["fedbuff_trips_in_flight", ()] == happened["in_flight"]
        used = happened["used"]
        assert samples["fedbuff_staleness_sum", ()] == sum(used)
        assert samples["fedbuff_staleness_count", ()] == len(used)
        for edge, count in by("fedbuff_staleness_bucket", "le").items():
            assert count == sum(value <= float(edge) for value in used)
        assert by("fedbuff_gateway_online", "gateway").keys() == {"north", "south", HOSTILE}
        for key, value in before.items():
            family = re.sub(r"_(bucket|sum|count)$", "", key[0])
            if kinds[family if family in kinds else key[0]] in ("counter", "histogram"):
                assert samples[key] >= value, key
        before = samples
    evaluated = watched["moments"][-1]["facts"]["evaluation"]["splits"]["test"]
    assert before["fedbuff_accuracy", (("split", "test"),)] == evaluated["accuracy"]
    assert before["fedbuff_loss", (("split", "test"),)] == evaluated["loss"]
    info = next(dict(labels) for name, labels in before if name == "fedbuff_run_info")
    assert (info["algorithm"], info["task"], info["seed"], info["run"]) == ("<b>served</b>", "synthetic", "0", "run")


def test_metrics_that_are_not_known_are_left_out_and_a_crowd_is_counted_together(watched):
    facts = {**watched["last"], "evaluation": None, "epsilon": 2.5, "concurrency": None, "gateways": []}
    crowd = {f"client {i}": 1 for i in range(1500)}
    samples, kinds = parsed(exposition(facts, {}, {}, crowd))
    assert samples["fedbuff_epsilon", ()] == 2.5
    assert not {"fedbuff_accuracy", "fedbuff_concurrency", "fedbuff_gateway_online"} & set(kinds)
    assert samples["fedbuff_staleness_count", ()] == 0
    assert samples["fedbuff_strikes_total", (("who", "others"),)] == 500
    assert sum(value for (name, _), value in samples.items() if name == "fedbuff_strikes_total") == 1500


# ── over HTTP ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_this_machine_is_answered_and_only_what_there_is(watched):
    for moment in watched["moments"]:
        assert moment["refusals"] == [421, 421, 404, 501]
    assert b'id="live"' in watched["moments"][-1]["page"]
    with pytest.raises(OSError, match="refused"):
        fetch(watched["last"]["page"])


def test_the_page_has_the_tables_and_nothing_in_them_is_code(watched):
    news = json.loads(watched["moments"][-1]["news"])
    assert {"right now", "gateways", "refused updates", "strikes"} <= set(news["tables"])
    for name in news["tables"]:
        assert f'data-slot="{name}"'.encode() in watched["moments"][-1]["page"]
    together = "".join(news["tables"].values())
    assert "<script>" not in together
    assert "<i>" not in together
    assert "&lt;i&gt;disk nearly full" in news["tables"]["gateways"]
    assert "not finite" in news["tables"]["refused updates"]


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("9464", "deploy.metrics 9464: expected HOST:PORT"),
        (":9464", "deploy.metrics :9464: expected HOST:PORT"),
        ("192.0.2.1:0", "can't serve the live view at 192.0.2.1:0: .*; choose another deploy.metrics"),
    ],
)
def test_an_address_that_can_not_be_served_is_said_before_anything_begins(address, complaint, tmp_path):
    with pytest.raises(ValueError, match=complaint) as raised, watch(tmp_path / "run", Deployment(metrics=address)):
        pytest.fail("it began")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_who_serves_everybody_is_warned(tmp_path, capsys):
    with watch(tmp_path / "run", Deployment(metrics="0.0.0.0:0")):
        pass
    assert "anyone who can reach this machine can see it" in capsys.readouterr().err


# ── the status command ───────────────────────────────────────────────────────────────────────────────────────────────


def status_of(folder: Path, *options: str) -> None:
    parser = argparse.ArgumentParser()
    status.parser(parser.add_subparsers())
    args = parser.parse_args(["status", str(folder), *options])
    args.command(args)


def told(folder: Path, state: str = "running", age: float = 0.0, **changes: Any) -> Path:
    """A folder with the status of such a server."""
    made = json.loads((folder / "status.json").read_text())
    written = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(time.time() - age))
    new = folder.parent / f"{state}-{age:g}-{len(changes)}"
    new.mkdir()
    (new / "status.json").write_text(json.dumps({**made, "state": state, "written": written, **changes}))
    return new


def test_it_is_printed_for_people_and_for_programs(watched, capsys):
    status_of(watched["folder"])
    printed = capsys.readouterr().out
    facts = watched["last"]
    assert "finished: reached 1,500 trips" in printed
    assert f"{facts['version']:,}" in printed
    assert f"{facts['trips']:,} ended" in printed
    assert "client 7" in printed
    assert "not finite" in printed
    assert "<i>disk nearly full</i>" in printed
    assert 'e"v\\i\\x0al' in printed
    status_of(watched["folder"], "--json")
    assert json.loads(capsys.readouterr().out)["trips"] == facts["trips"]
    status_of(watched["folder"], "--watch", "--json")
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_it_says_whether_a_server_keeps_it_up_to_date(watched, capsys):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = watched["folder"]
    for place, expected in (
        (told(folder), ": running\n"),
        (told(folder, "draining", reason="reached 9 trips"), ": draining: reached 9 trips"),
        (told(folder, age=300), f"NO WORD for 5 min: the server's process (pid {os.getpid()}) is there"),
        (told(folder, age=301, pid=gone.pid), "NOT RUNNING: no word of the server for 5 min"),
        (told(folder, age=302, host="elsewhere"), "NOT RUNNING: no word of the server for 5 min"),
        (told(folder, "stopped", 303, reason="OSError: no space"), "STOPPED 5 min ago: OSError: no space"),
    ):
        status_of(place)
        assert expected in capsys.readouterr().out


def test_a_process_that_died_and_was_not_reaped_is_not_alive():
    """Flower's SuperExec does not reap the server that it started."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from here on
        assert not is_alive(child.pid)
    assert not is_alive(child.pid)
    assert is_alive(os.getpid())
    assert is_alive(1)  # somebody else's, or ours


def test_a_mistake_is_one_line(watched, tmp_path):
    for make, complaint in (
        (lambda: None, "has no status.json"),
        (lambda: (tmp_path / "summary.json").write_text("{}"), "is a finished run without a status.json"),
        (lambda: (tmp_path / "status.json").write_text("{"), "can't read"),
    ):
        make()
        with pytest.raises(FolderError, match=complaint) as raised:
            status_of(tmp_path)
        assert "\n" not in str(raised.value)


def test_a_server_that_is_killed_leaves_an_old_status_and_whole_lines(tmp_path):
    """For real: a process that serves, and SIGKILL."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import test_watch as t\n"
        "chosen = t.settings(trips=10**9); folder = Path(sys.argv[2])\n"
        "with t.watch(folder, chosen.deploy) as follow: t.serve(chosen, folder, t.Gateways(), follow)"
    )
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(folder)], stderr=subprocess.PIPE
    ) as server:
        try:
            wait(lambda: (folder / "status.json").exists() and status.read(folder)["version"] > 0)
            assert not status.read(folder)["old"]
        finally:
            server.kill()
    wait(lambda: status.read(folder)["old"])
    facts = status.read(folder)
    assert facts["gone"]
    assert facts["state"] == "running"
    assert status.standing(facts).startswith("NOT RUNNING")
    assert all(set(line) == {"time", "level", "event", "fields"} for line in lines(folder))


def wait(done: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not done():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_a_server_that_fails_says_so(tmp_path, capsys):
    chosen = settings(trips=10**9)

    class Broken(Gateways):
        def pull(self, messages: Sequence[str]) -> list[tuple[str, bytes | None]]:
            if self._count > 50:
                raise ConnectionError("no\nSuperLink")
            return super().pull(messages)

    with pytest.raises(ConnectionError), watch(tmp_path / "run", chosen.deploy) as follow:
        serve(chosen, tmp_path / "run", Broken(), follow)
    facts = status.read(tmp_path / "run")
    assert (facts["state"], facts["reason"]) == ("stopped", "ConnectionError: no\nSuperLink")
    assert lines(tmp_path / "run")[-1]["event"] == "stopped"
    assert 'error: stopped reason="ConnectionError: no\\nSuperLink"' in capsys.readouterr().err


def test_a_folder_that_another_server_uses_is_left_alone(tmp_path):
    from fedbuff.report.files import lock

    chosen, folder = settings(trips=10), tmp_path / "run"
    folder.mkdir()
    with lock(folder), pytest.raises(FolderError, match="in use"), watch(folder, chosen.deploy) as follow:
        serve(chosen, folder, Gateways(), follow)
    assert {path.name for path in folder.iterdir()} <= {".lock"}


def test_a_status_that_can_not_be_written_does_not_end_the_run(tmp_path):
    chosen, folder = settings(trips=40), tmp_path / "run"
    (folder / "status.json").mkdir(parents=True)
    with watch(folder, chosen.deploy) as follow:
        run = serve(chosen, folder, Gateways(), follow)
    assert run.summary["stopped_by"] == "reached 40 trips"
    assert sum(line["event"] == "no status" for line in lines(folder)) == 1


# ── logs ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_log_has_one_object_per_line_from_the_first_word_on(watched):
    found = lines(watched["folder"])
    assert all(set(line) == {"time", "level", "event", "fields"} for line in found)
    assert found[0]["event"].startswith("live view: http://127.0.0.1:")
    assert any("draining" in line["event"] for line in found)
    assert any(line["level"] == "warning" for line in found)
    assert logging.getLogger("fedbuff.deploy").handlers == []


def test_an_event_has_fields_and_can_not_break_a_line(tmp_path, capsys):
    log = logging.getLogger("fedbuff.deploy")
    with logs.logged() as keep:
        log.info("early")
        assert not (tmp_path / "log.jsonl").exists()
        keep(tmp_path)
        log.warning("refused", {"client": 7, "reason": "wrong size", "norm": math.nan, "path": Path("x"), "who": "a\n\x1b[2J"})
        try:
            raise ValueError("oh")
        except ValueError:
            log.exception("failed")
    log.info("nobody hears this")
    early, refused, failed = lines(tmp_path)
    assert (early["event"], early["fields"]) == ("early", {})
    assert (refused["level"], refused["event"]) == ("warning", "refused")
    assert refused["fields"] == {"client": 7, "reason": "wrong size", "norm": "nan", "path": "x", "who": "a\n\x1b[2J"}
    assert failed["fields"]["traceback"].endswith("ValueError: oh")
    said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d early", said[0])
    assert said[1].endswith('warning: refused client=7 reason="wrong size" norm=nan path="x" who=a\\x0a\\x1b[2J')
    assert said[-1] == "ValueError: oh"


def test_a_log_does_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_LARGEST", 2000)
    with logs.logged() as keep:
        keep(tmp_path)
        for number in range(500):
            logging.getLogger("fedbuff.deploy").info("event", {"number": number})
    kept = sorted(tmp_path.glob("log.jsonl*"))
    assert len(kept) == 6
    assert all(path.stat().st_size <= 2000 for path in kept)
    assert lines(tmp_path)[-1]["fields"] == {"number": 499}


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def filled(number: int, trips: Trips | None = None) -> Trips:
    """A table with so many trips more: nine of ten used four at a time, the others failed."""
    trips = Trips() if trips is None else trips
    for trip in range(len(trips), len(trips) + number):
        trips.started(trip % 1000, 1, float(trip), max(0, trip // 4 - trip % 13))
        trips.end(trip, float(trip), max(trip // 4, trip // 4 - trip % 13), FAILED if trip % 10 == 0 else UNUSED)
        if trip % 10:
            trips.used(trip, 1.0, trip // 4)
    return trips


def test_looking_again_is_over_what_is_new():
    trips = filled(600_000)
    figures = Figures(trips)
    began = time.perf_counter()
    figures.look()
    all_of_them = time.perf_counter() - began
    assert sum(figures.outcomes.values()) == 600_000
    took = []
    for _ in range(5):
        filled(1000, trips)
        began = time.perf_counter()
        figures.look()
        spread(figures.staleness)
        took.append(time.perf_counter() - began)
    assert sorted(took)[2] < all_of_them / 10  # 600 times as many
    values = trips.staleness_used()
    shown = spread(figures.staleness)
    assert shown == {"updates": len(values), "mean": values.mean(), "median": np.median(values), "max": values.max()}


def test_an_update_counts_when_a_server_step_uses_it():
    trips = Trips()
    figures = Figures(trips)
    for trip in range(3):
        trips.started(trip, 1, 0.0, 0)
        trips.end(trip, 1.0, trip, UNUSED)
        figures.look()
    assert not figures.outcomes
    for trip in (0, 1):
        trips.used(trip, 1.0, 1)
    figures.look()
    assert (figures.outcomes, list(figures.latest)) == ({"used": 2}, [0, 1])
    assert trips.outcome[0] == USED


@pytest.mark.parametrize("values", [[], [3], [1, 2], [0, 0, 5], [4, 1, 1, 9, 7, 7], list(range(101))])
def test_the_median_of_counts_is_the_median(values):
    shown = spread(Counter(values))
    assert shown["updates"] == len(values)
    assert shown["median"] == (np.median(values) if values else None)


# ── in a browser ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(CHROMIUM is None, reason="no browser: the live page is not looked at (apt-get install chromium)")
@pytest.mark.xdist_group("browser")
def test_an_open_page_shows_what_is_deployed_until_the_end(tmp_path):
    chosen, folder, gateways = settings(trips=3000), tmp_path / "run", Gateways(0.3)
    outcome: list[Any] = []

    def run() -> None:
        with watch(folder, chosen.deploy) as follow:
            outcome.append(serve(chosen, folder, gateways, follow))

    serving = threading.Thread(target=run)
    serving.start()
    browser = Browser()
    try:
        wait(lambda: (folder / "status.json").exists() or not serving.is_alive())
        browser.open(status.read(folder)["page"])
        cells = "[...document.querySelectorAll('[data-table=\"{}\"] tbody tr')].map(row => row.innerText)"
        browser.wait("document.querySelector('[data-chart=curves] .line') !== null")
        headings = browser.run("[...document.querySelectorAll('h2')].map(h => h.textContent)")
        assert headings[:5] == ["Summary", "Right now", "Gateways", "Refused updates", "Strikes"]
        browser.wait(cells.format("gateways"), lambda rows: any("disk nearly full" in row for row in rows))
        browser.wait(cells.format("refused updates"), lambda rows: any("not finite" in row for row in rows))
        browser.wait(cells.format("strikes"), lambda rows: any("client 7" in row and "shut out" in row for row in rows))
        first = browser.run(cells.format("right now"))
        browser.wait(cells.format("right now"), lambda rows: rows != first)
        if "FEDBUFF_PICTURES" in os.environ:
            pictures = Path(os.environ["FEDBUFF_PICTURES"])
            for name, how in (("deployed", (1200, 900)), ("deployed-phone", (390, 800))):
                browser.size(*how, phone="phone" in name)
                browser.run("window.dispatchEvent(new Event('resize'))")
                time.sleep(2.0)
                browser.picture(pictures / f"{name}.png", whole=True)
            browser.media(dark=True)
            browser.size(1200, 900)
            time.sleep(2.0)
            browser.picture(pictures / "deployed-dark.png", whole=True)
        for width in (1200, 390):
            browser.size(width, 800, phone=width < 500)
            assert browser.run("document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
        gateways.pace = 0.005
        browser.wait("document.getElementById('live').textContent", lambda text: text == "finished: reached 3,000 trips")
        assert "finished" in browser.run(cells.format("right now"))[0]
        assert browser.run("window.harmed") is None
        assert browser.complaints == []
    finally:
        gateways.pace = 0.005
        browser.close()
        serving.join()
    assert outcome[0].summary["stopped_by"] == "reached 3,000 trips"


def test_a_run_that_nobody_has_refused_anything_says_so(watched):
    facts = {**watched["last"], "gateways": [], "refused": {}, "strikes": {}}
    tables = page_tables(facts)
    assert tables["refused updates"] == "<p>Nothing was refused.</p>"
    assert tables["gateways"] == "<p>No gateway has shown up yet.</p>"
