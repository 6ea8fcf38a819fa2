"""Whoever follows a run: the live page, TensorBoard, MLflow. None of them changes it."""

import json
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedbuff as fb
from browser import CHROMIUM, Browser
from conftest import command
from fedbuff.report.live import live, so_far

# the obvious loop: slow enough to be watched, however fast the rest becomes
SLOW = ("--set", "until.trips=15000", "--set", "client.lr=0.001", "--set", "training.batched=false", "--workers", 1)


def same_result(a: Path, b: Path) -> bool:
    return all(
        (a / name).read_bytes() == (b / name).read_bytes() for name in ("trips.parquet", "weights.safetensors", "metrics.jsonl")
    )


@contextmanager
def started(tmp_path: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run with --live as a process, and the address it says; killed at the latest at the end."""
    pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command(("run", *arguments)), cwd=tmp_path, **pipes) as process:  # type: ignore[call-overload]
        try:
            line = process.stderr.readline()
            found = re.search(r"live view: (http://\S+/)", line)
            assert found, line
            yield process, found[1]
        finally:
            process.kill()


def fetch(url: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as e:
        with e:
            return e.code, e.read()


# ── what a follower sees ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [1, 2])
def test_a_status_tells_what_has_happened_and_not_what_is_planned(small_task, workers):
    seen = []

    def follow(status):
        trips = status.ended_trips()
        assert len(trips["trip"]) == status.trips
        assert trips["end_time"].max(initial=0.0) <= status.virtual_time
        assert trips["server_step"].max(initial=-1) <= status.server_steps
        assert (trips["outcome"] == "used").sum() == 3 * status.server_steps
        seen.append((status.trips, status.in_flight, status.stopped, len(status.metrics), trips))

    server = fb.Server(start=fb.refill(10), buffer_size=3)
    how = {"client": fb.LocalSGD(lr=0.1), "evaluate_every": 10, "workers": workers}
    run = fb.simulate(server, small_task, until=fb.trips(100), progress=follow, **how)
    assert seen[0][0] == 0
    assert {in_flight for _, in_flight, *_ in seen} == {10}
    assert [stopped for _, _, stopped, *_ in seen] == [None] * (len(seen) - 1) + ["reached 100 trips"]
    assert seen[-1][0] == 100
    assert seen[-1][3] == len(run.metrics)
    assert all(np.array_equal(seen[-1][4][name], column) for name, column in run.trips.items())
    alone = fb.simulate(server, small_task, until=fb.trips(100), **how)
    assert all(np.array_equal(alone.weights[name], weights) for name, weights in run.weights.items())


def test_a_run_that_stops_at_an_evaluation_ends_with_the_status_of_its_summary(small_task):
    last = None

    def follow(status):
        nonlocal last
        last = status

    server = fb.Server(start=fb.refill(10), buffer_size=3)
    how = {"client": fb.LocalSGD(lr=0.1), "evaluate_every": 10, "workers": 2}
    run = fb.simulate(server, small_task, until=fb.accuracy(0.4) | fb.trips(3000), progress=follow, **how)
    for key in ("trips", "server_steps", "virtual_time", "in_flight"):
        assert getattr(last, key) == run.summary[key], key
    assert last.stopped == run.summary["stopped_by"]
    assert last.task == so_far(last, 1.0).summary["task"] == run.summary["task"]
    assert all(np.array_equal(last.ended_trips()[name], column) for name, column in run.trips.items())


# ── the live page ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_live_view_follows_a_run_and_ends_with_it(settings_file, fedbuff, tmp_path):
    with started(tmp_path, settings_file, *SLOW, "--out", "watched", "--live") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        status, page = fetch(url)
        assert status == 200
        assert b'id="live"' in page
        views = watched(process, url)
        process.communicate()
        assert process.returncode == 0
    assert len({view["text"] for view in views}) > 1
    assert views[-1]["text"] == "finished: reached 15,000 trips"
    assert views[-1]["figures"]["curves"][0][0]["trips"][-1] == 15_000
    with pytest.raises(OSError, match="refused"):
        fetch(url)
    with socket.create_server(("127.0.0.1", int(url.rsplit(":", 1)[1].rstrip("/")))):
        pass  # no worker keeps the port
    fedbuff("run", settings_file, *SLOW, "--out", "unwatched")
    assert same_result(tmp_path / "watched", tmp_path / "unwatched")


def watched(process: subprocess.Popen[str], url: str) -> list[dict[str, Any]]:
    """All views that a page would see until the end of the run."""
    views: list[dict[str, Any]] = []
    while process.poll() is None and not (views and views[-1]["state"] != "running"):
        status, news = fetch(f"{url}data.json?seen={views[-1]['number'] if views else 0}")
        if status == 200:
            views.append(json.loads(news))
        time.sleep(0.1)
    return views


def test_only_this_machine_is_answered_and_only_what_there_is(settings_file, tmp_path):
    with started(tmp_path, settings_file, *SLOW, "--live", "--out", "run") as (_, url):
        assert fetch(url, Host="evil.example")[0] == 421
        assert fetch(url, Host="localhost:1")[0] == 200
        assert fetch(f"{url}settings.toml")[0] == 404
        assert fetch(f"{url}../../etc/passwd")[0] == 404
        assert fetch(url, data=b"x")[0] == 501


def test_a_failed_run_says_so_on_the_page():
    addresses: list[str] = []
    states: list[str] = []
    task = fb.tasks.synthetic(clients=5, features=3, max_examples=4)

    def stop(status):
        follow(status)
        if status.server_steps == 2:
            watching.start()
            while "running" not in states:
                time.sleep(0.01)
            raise RuntimeError("enough")

    def watch():
        while states[-1:] != ["failed"]:
            states.append(json.loads(fetch(f"{url}data.json")[1])["state"])
            time.sleep(0.05)

    watching = threading.Thread(target=watch, daemon=True)

    with pytest.raises(RuntimeError, match="enough"), live("<x>", say=addresses.append) as follow:
        url = addresses[0].split()[-1]
        server = fb.Server(start=fb.refill(2), buffer_size=1)
        fb.simulate(server, task, client=fb.LocalSGD(lr=0.1), until=fb.server_steps(9), progress=stop, workers=1)
    watching.join(timeout=30)
    assert states[-1] == "failed"


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("nonsense", "expected HOST:PORT"),
        (":80", "expected HOST:PORT"),
        ("127.0.0.1:99999", "expected HOST:PORT"),
        ("127.0.0.1:-1", "expected HOST:PORT"),
        ("192.0.2.1:0", "can't serve the live view at 192.0.2.1:0"),
        ("no.such.host.invalid:0", "can't serve the live view"),
    ],
)
def test_an_address_that_can_not_be_served_is_one_line(address, complaint, settings_file, fedbuff, tmp_path):
    done = fedbuff("run", settings_file, "--live-address", address, "--out", "run", code=2)
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_is_one_line(settings_file, fedbuff):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "Address already in use" in fedbuff("run", settings_file, "--live-address", address, code=2).stderr


@pytest.mark.skipif(CHROMIUM is None, reason="no browser: the live page is not looked at (apt-get install chromium)")
@pytest.mark.xdist_group("browser")
def test_an_open_page_draws_the_run_as_it_goes_on_until_its_end(settings_file, tmp_path):
    name = "<script>window.harmed = 1</script>"
    how = ("--set", f"name='{name}'", "--live", "--out", "run", "--json")
    with started(tmp_path, settings_file, *SLOW, *how) as (process, url):
        browser = Browser()
        try:
            browser.open(url)
            points = "document.querySelector('[data-chart=curves] .line').getAttribute('d').split(/[ML]/).length"
            first = browser.wait(points)
            browser.wait(points, lambda now: now > first)
            browser.wait("document.getElementById('live').textContent", lambda text: text == "finished: reached 15,000 trips")
            assert "15,000 trips" in browser.run("document.querySelector('.lead').textContent")
            assert name in browser.run("document.querySelector('[data-slot=summary] tbody th').textContent")
            assert browser.run("window.harmed") is None
            assert browser.complaints == []
        finally:
            browser.close()
        assert json.loads(process.communicate()[0])["trips"] == 15_000


# ── TensorBoard ──────────────────────────────────────────────────────────────────────────────────────────────────────


def killed_and_resumed(tmp_path: Path, settings_file: Path, *sink: object) -> list[dict[str, float]]:
    """A run that is killed under way and gone on with; its evaluations."""
    how = (settings_file, *SLOW, "--set", "evaluate_every=50", "--out", "run", "--checkpoint-every", 0.1, *sink)
    process = subprocess.Popen(command(("run", *how)), cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 60):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    done = subprocess.run(command(("run", "--resume", *how)), cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def test_tensorboard_has_every_evaluation_once_even_after_a_kill(settings_file, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="no TensorBoard")
    metrics = killed_and_resumed(tmp_path, settings_file, "--tensorboard", "board")
    events = accumulator.EventAccumulator(str(tmp_path / "board" / "run"), size_guidance={"scalars": 0})
    events.Reload()
    for name in ("accuracy", "loss"):
        found = [(e.step, e.value) for e in events.Scalars(f"{name}/test")]
        assert [step for step, _ in found] == [m["trips"] for m in metrics]
        assert [value for _, value in found] == pytest.approx([m[name] for m in metrics], rel=1e-6)
    assert events.Scalars("run/server_steps")[-1].value == metrics[-1]["server_steps"]
    assert b"buffer_size = 4" in events.Tensors("settings")[0].tensor_proto.string_val[0]


# ── MLflow ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def mlflow_run(uri: str) -> tuple[object, object]:
    client = pytest.importorskip("mlflow", reason="no MLflow").MlflowClient(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("fedbuff").experiment_id])
    return client, found


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_has_every_evaluation_once_even_after_a_kill(settings_file, tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="no MLflow")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    metrics = killed_and_resumed(tmp_path, settings_file, "--mlflow", uri)
    client, found = mlflow_run(uri)
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "run"
    assert found.data.params["server.buffer_size"] == "4"
    history = sorted((m.step, m.value) for m in client.get_metric_history(found.info.run_id, "accuracy/test"))
    assert history == [(m["trips"], pytest.approx(m["accuracy"])) for m in metrics]


def test_mlflow_that_can_not_be_reached_is_one_line_before_the_run_starts(settings_file, fedbuff, tmp_path):
    pytest.importorskip("mlflow", reason="no MLflow")
    done = fedbuff("run", settings_file, "--mlflow", "gopher://nowhere", "--out", "run", code=2)
    assert "--mlflow gopher://nowhere" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_no_database_of_mlflow_is_one_line(settings_file, fedbuff, tmp_path):
    pytest.importorskip("mlflow", reason="no MLflow")
    (tmp_path / "bad.db").write_bytes(b"no database" * 500)
    done = fedbuff("run", settings_file, "--mlflow", "sqlite:///bad.db", "--out", "run", code=2)
    assert done.stderr == "fedbuff: --mlflow sqlite:///bad.db: (sqlite3.DatabaseError) file is not a database\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow_that_goes_away_does_not_end_the_run(settings_file, tmp_path):
    """The database is overwritten before the run starts."""
    pytest.importorskip("mlflow", reason="no MLflow")
    from fedbuff.report.mlflow import mlflow

    said = []
    task = fb.tasks.synthetic(clients=30, features=5, max_examples=12)
    database = tmp_path / "mlflow.db"
    with mlflow(f"sqlite:///{database}", tmp_path / "run", say=said.append) as follow:
        database.write_bytes(b"gone" * 5000)
        server = fb.Server(start=fb.refill(10), buffer_size=3)
        run = fb.simulate(server, task, client=fb.LocalSGD(lr=0.1), until=fb.trips(300), progress=follow, workers=1)
    assert run.summary["trips"] == 300
    assert len(said) == 1
    assert said[0].startswith("mlflow: ")
    assert said[0].endswith("; the run goes on without it")
