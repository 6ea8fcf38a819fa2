"""kill −9 at any moment, then --resume: the same weights and trips as the run that was never interrupted."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

import fedbuff as fb
from conftest import command, same_arrays
from fedbuff.fingerprint import fingerprint
from fedbuff.report.files import FolderError, lock, write_atomically, write_text

SYNCHRONOUS = ("server.start.cohort={size=16,over_selection=0.25}", "server.buffer_size=16", "dropout=0.1")


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """What must be identical: everything but the summary, which tells real time."""
    return {
        name: (folder / name).read_bytes()
        for name in ("settings.toml", "trips.parquet", "weights.safetensors", "metrics.jsonl")
    }


@pytest.mark.parametrize(("kills", "changes"), [(20, ()), (6, SYNCHRONOUS)])
def test_a_run_killed_again_and_again_ends_the_same(kills, changes, settings_file, fedbuff, tmp_path):
    """SIGKILL at random moments, some of them before the first checkpoint or while one is written."""
    how = [settings_file, *(f"--set={change}" for change in changes), "--set=until.trips=1500", "--checkpoint-every", 0.02]
    began = time.monotonic()
    fedbuff("run", *how, "--out", tmp_path / "whole", "--quiet")
    took = time.monotonic() - began
    rng, resumed = random.Random(0), 0
    for _ in range(kills):
        out = tmp_path / "killed"
        process = subprocess.Popen(
            command(["run", *how, "--out", out, "--resume", "--quiet"]), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            process.wait(timeout=rng.uniform(0.3, 1.0) * took)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        _, complaints = process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0), complaints.decode()
        if process.returncode == 0:  # it got through: compare, and start over
            assert folder_bytes(out) == folder_bytes(tmp_path / "whole")
            out.rename(tmp_path / f"done{resumed}")
            resumed += 1
    fedbuff("run", *how, "--out", tmp_path / "killed", "--resume", "--quiet")
    assert folder_bytes(tmp_path / "killed") == folder_bytes(tmp_path / "whole")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("killed", "whole")]
    for summary in summaries:
        for real in ("wall_seconds", "trips_per_second", "peak_memory_mb"):
            del summary[real]
    assert summaries[0] == summaries[1]
    assert not list((tmp_path / "killed").rglob("*.tmp"))


def test_a_run_killed_right_before_its_summary_goes_on(small_task, tmp_path, monkeypatch):
    """However short before its end the last checkpoint was due."""

    class KilledError(Exception):
        pass

    def go(seed: int, **how) -> fb.Run:
        server = fb.Server(start=fb.refill(10), buffer_size=1)
        how |= {"timing": fb.exponential(1.0), "evaluate_every": 4, "workers": 1, "seed": seed}
        until = fb.accuracy(0.5) | fb.trips(400)
        return fb.simulate(server, small_task, client=fb.LocalSGD(lr=0.2, batch_size=4), until=until, **how)

    for seed in range(6):
        told = []

        def kill(status, told=told) -> None:
            told += [status.stopped] if status.stopped else []
            if len(told) == 2:  # of the end, at the last step and once more before the summary is written
                raise KilledError

        with monkeypatch.context() as stopped, pytest.raises(KilledError):
            stopped.setattr("fedbuff.sim.simulation.time", SimpleNamespace(monotonic=lambda: 0.0))  # one is always due
            go(seed, out=tmp_path / str(seed), checkpoint_every=0.0, progress=kill)
        assert same_arrays(go(seed, out=tmp_path / str(seed), resume=True).weights, go(seed).weights)


def test_a_file_is_replaced_and_never_overwritten(tmp_path):
    """Whoever is killed while writing leaves the old file whole: the new one is a file of its own until it is complete."""
    path = tmp_path / "state.json"
    write_text(path, "old")
    with path.open() as still_open:
        write_text(path, "new")
        assert still_open.read() == "old"
    assert path.read_text() == "new"

    def fail(temporary):
        temporary.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(FolderError, match="No space left"):
        write_atomically(path, fail)
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_damaged_checkpoint_is_named(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    state = tmp_path / "run" / "checkpoint" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    done = fedbuff("run", settings_file, "--out", tmp_path / "run", "--resume", code=2)
    assert "state.safetensors is damaged" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_resuming_with_other_settings_is_refused(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "run")
    done = fedbuff("run", settings_file, "--set", "client.lr=0.2", "--out", tmp_path / "run", "--resume", code=2)
    assert "there client.lr = 0.1, here client.lr = 0.2" in done.stderr


def test_two_processes_do_not_share_a_folder(settings_file, fedbuff, tmp_path):
    (tmp_path / "run").mkdir()
    with lock(tmp_path / "run"):
        done = fedbuff("run", settings_file, "--out", tmp_path / "run", code=2)
    assert "in use by another process" in done.stderr
    fedbuff("run", settings_file, "--out", tmp_path / "run")


def test_a_finished_run_is_shown_and_not_run_again(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "run")
    before = (tmp_path / "run" / "summary.json").read_bytes()
    again = fedbuff("run", "--resume", "--out", tmp_path / "run", "--json")
    assert json.loads(again.stdout) == json.loads(before)
    assert (tmp_path / "run" / "summary.json").read_bytes() == before


def test_a_run_does_not_go_on_with_another_function_of_the_same_name(small_task, tmp_path):
    def go(base: float, resume: bool = True) -> fb.Run:
        server = fb.Server(start=fb.refill(4), buffer_size=2, weigh=lambda tau: base**tau)
        how = {"client": fb.LocalSGD(lr=0.1), "until": fb.trips(20), "workers": 1}
        return fb.simulate(server, small_task, **how, out=tmp_path, resume=resume)

    first = go(0.9, resume=False)
    (tmp_path / "summary.json").unlink()  # as if it had been killed right before
    with pytest.raises(
        FolderError, match=r'there server.weigh = "python: .*<lambda> \(\w{8}\)", here server.weigh = "python: '
    ):
        go(0.1)
    assert same_arrays(go(0.9).weights, first.weights)


def power(tau: int, base: float = 0.5) -> float:
    return base**tau


class Power:
    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, tau: int) -> float:
        return self.base**tau


def test_a_fingerprint_is_of_the_code_and_what_it_holds():
    of = {
        "plain": power,
        "partial": partial(power, base=0.1),
        "other partial": partial(power, base=0.2),
        "object": Power(0.1),
        "other object": Power(0.2),
        "method": Power(0.1).__call__,
        "nested": lambda tau: sum(0.1 * t for t in range(tau)),
        "other nested": lambda tau: sum(0.2 * t for t in range(tau)),
    }
    assert len({fingerprint(function) for function in of.values()}) == len(of)
    assert fingerprint(partial(power, base=0.1)) == fingerprint(partial(power, base=0.1))
    assert fingerprint(Power(0.1)) == fingerprint(Power(0.1))


def test_a_fingerprint_is_the_same_in_another_process():
    code = "from test_resume import Power, power; from functools import partial; from fedbuff.fingerprint import fingerprint\n"
    code += "print(fingerprint(power), fingerprint(Power(0.1)), fingerprint(lambda tau: tau in {'a', 'b', 3}))"
    there = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    here = fingerprint(power), fingerprint(Power(0.1)), fingerprint(lambda tau: tau in {"a", "b", 3})
    assert there.stdout.split() == list(here)


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    """Neither one that was interrupted nor one that is finished."""

    def run(labels, held_out=lambda values: values, **how):
        x, y = fb.tasks.digits(clients=40).clients[0]
        clients = [(x, labels(y)) for x, y in fb.tasks.digits(clients=40).clients]
        evaluate = {"validation": (x, y), "test": held_out((x, y))}
        task = fb.Task(model=partial(torch.nn.Linear, 64, 10), loss=cross_entropy, clients=clients, evaluate=evaluate)
        server = fb.Server(start=fb.refill(8), buffer_size=4)
        return fb.simulate(server, task, client=fb.LocalSGD(lr=0.1), until=fb.trips(40), out=tmp_path / "run", workers=1, **how)

    first = run(lambda y: y)
    again = run(lambda y: y, resume=True)
    assert same_arrays(first.trips, again.trips)
    with pytest.raises(FolderError, match="holds a run on other data"):
        run(lambda y: (y + 1) % 10, resume=True)
    for held_out in (lambda v: (v[0], (v[1] + 1) % 10), lambda v: (v[0] + 1, v[1]), lambda v: (v[0][:-1], v[1][:-1])):
        with pytest.raises(FolderError, match="on other data, with other held-out examples or labels"):
            run(lambda y: y, held_out, resume=True)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(FolderError, match="holds a run on other data"):
        run(lambda y: (y + 1) % 10, resume=True)
    (tmp_path / "run" / "data.json").write_text("{")
    with pytest.raises(FolderError, match=r"data\.json is damaged"):
        run(lambda y: y, resume=True)
    (tmp_path / "run" / "data.json").unlink()
    assert same_arrays(first.trips, run(lambda y: y, resume=True).trips)


@pytest.mark.parametrize(("name", "complaint"), [("trips.parquet", "has 60 trips"), ("metrics.jsonl", "does not end with")])
def test_a_folder_of_two_runs_is_refused(name, complaint, settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--set", "until.trips=60", "--out", tmp_path / "one")
    fedbuff("run", settings_file, "--set", "until.trips=80", "--set", "client.lr=0.01", "--out", tmp_path / "other")
    fb.load(tmp_path / "one"), fb.load(tmp_path / "other")
    shutil.copy(tmp_path / "one" / name, tmp_path / "other" / name)
    with pytest.raises(FolderError, match=rf"{name}: {complaint}.*of another run"):
        fb.load(tmp_path / "other")
