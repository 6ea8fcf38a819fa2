"""The command line as users meet it: real processes, their output, their exit codes, and the folder they leave."""

import json
import os
import resource
import shutil
import signal
import tomllib
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import fedbuff as fb

COLUMNS = ["trip", "client", "examples", "start_time", "end_time", "start_version", "end_version"]
COLUMNS += ["staleness", "weight", "server_step", "outcome"]


def test_a_run_is_a_folder_that_explains_itself(settings_file, fedbuff, tmp_path):
    done = fedbuff("run", settings_file, "--seed", 3, "--set", "until.accuracy=0.2", "--out", tmp_path / "run", "--json")
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert json.loads(done.stdout) == summary
    keys = "algorithm seed trips server_steps virtual_time wall_seconds trips_per_second peak_memory_mb staleness_mean "
    keys += "staleness_max metrics target trips_to_target"
    assert set(keys.split()) <= set(summary)
    assert (summary["algorithm"], summary["seed"], summary["target"]) == ("fedbuff", 3, 0.2)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert list(metrics[0]) == ["trips", "server_steps", "virtual_time", "split", "loss", "accuracy"]
    trips = pq.read_table(folder / "trips.parquet")
    assert trips.column_names == COLUMNS
    assert trips.num_rows == summary["trips"]
    assert set(trips["outcome"].to_pylist()) <= {"used", "dropped", "late", "failed", "cancelled", "unused"}
    assert sum(w.size for w in load_file(folder / "weights.safetensors").values()) == 8 * 8 + 8 + 8 * 4 + 4
    assert tomllib.loads((folder / "settings.toml").read_text())["seed"] == 3
    assert (folder / "checkpoint" / "state.safetensors").exists()
    assert not [p for p in folder.rglob("*") if "tmp" in p.name]


def test_settings_toml_alone_reproduces_the_run(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "a", "--set", "dropout=0.1", "--seed", 5)
    fedbuff("run", tmp_path / "a" / "settings.toml", "--out", tmp_path / "b")
    for name in ("settings.toml", "trips.parquet", "weights.safetensors", "metrics.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_run_from_the_command_line_is_the_run_in_python(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "run")
    task = fb.tasks.synthetic(clients=60, features=8, classes=4, max_examples=20, model=fb.models.mlp((8,), dropout=0.1))
    server = fb.Server(start=fb.refill(20), buffer_size=4, weigh=fb.polynomial(0.5), optimizer=fb.momentum(1.0, 0.5))
    in_python = fb.simulate(server, task, client=fb.LocalSGD(lr=0.1, batch_size=8), until=fb.trips(400))
    loaded = fb.load(tmp_path / "run")
    for name, weights in loaded.weights.items():
        assert np.array_equal(weights, in_python.weights[name])


def test_compare_prints_one_table_and_goes_on_where_it_stopped(settings_file, fedbuff, tmp_path):
    how = (
        "compare",
        settings_file,
        "--algorithms",
        "fedbuff,fedavgm",
        "--seeds",
        "0,1",
        "--set",
        "until.accuracy=0.3",
        "--out",
        "cmp",
    )
    done = fedbuff(*how)
    assert "fedbuff" in done.stdout
    assert "±" in done.stdout
    rows = json.loads((tmp_path / "cmp" / "comparison.json").read_text())
    assert [row["name"] for row in rows] == ["fedbuff", "fedavgm"]
    summaries = [json.loads((tmp_path / "cmp" / f"fedavgm-seed{seed}" / "summary.json").read_text()) for seed in (0, 1)]
    reached = [s["trips_to_target"] for s in summaries]
    assert None in reached or rows[1]["trips"]["mean"] == np.mean(reached)
    assert (tmp_path / "cmp" / "accuracy-by-trips.svg").read_text().startswith("<?xml")
    before = (tmp_path / "cmp" / "fedavgm-seed1" / "summary.json").stat().st_mtime_ns
    again = json.loads(fedbuff(*how, "--json").stdout)
    assert again == rows
    assert (tmp_path / "cmp" / "fedavgm-seed1" / "summary.json").stat().st_mtime_ns == before


def test_show_tells_what_a_run_did(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "run")
    shown = fedbuff("show", tmp_path / "run").stdout
    assert "400" in shown
    assert "buffer_size = 4" in shown
    assert "no such" not in shown
    assert "does not exist" in fedbuff("show", tmp_path / "nothing", code=2).stderr


def test_timeline_needs_no_settings_and_gives_the_python_timeline(fedbuff, tmp_path):
    how = ("--concurrency", 50, "--buffer-size", 5, "--trips", 5000, "--seed", 2, "--clients", 700)
    got = json.loads(fedbuff("timeline", *how, "--json", "--out", tmp_path / "t.parquet").stdout)
    t = fb.timeline(start=fb.refill(50), buffer_size=5, clients=700, trips=5000, seed=2)
    assert got["staleness_mean"] == t.staleness.mean()
    assert got["staleness_max"] == t.staleness.max()
    assert got["trips"] == 5000
    assert np.array_equal(pq.read_table(tmp_path / "t.parquet")["end_time"].to_numpy(), t.end_time)
    assert "concurrency" in fedbuff("timeline", "--trips", 500).stdout


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("until.tripz=5", "until.tripz = 5: unknown key; did you mean until.trips?"),
        ("until=-1", "until"),
        ("training.bached=true", "did you mean training.batched?"),
        ("evaluate_share=7", "evaluate_share"),
        ("privacy.clp=1", "did you mean privacy.clip?"),
        ("target={}", "target"),
    ],
)
def test_a_timeline_does_not_overlook_what_is_wrong_elsewhere_in_its_file(fedbuff, tmp_path, change, says):
    server = "[server]\nstart.refill.concurrency = 5\nbuffer_size = 2\n"
    (tmp_path / "f.toml").write_text(server + "[task.digits]\nclients = 30\n[client]\nlr = 0.1\n[until]\ntrips = 20\n")
    done = fedbuff("timeline", "f.toml", "--set", change, code=2)
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_timeline_of_a_settings_file_is_that_of_its_run(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "run")
    fedbuff("timeline", settings_file, "--trips", 380, "--out", tmp_path / "t.parquet")
    ran, alone = (
        pq.read_table(tmp_path / "run" / "trips.parquet").to_pylist(),
        pq.read_table(tmp_path / "t.parquet").to_pylist(),
    )
    by_trip = {row["trip"]: row for row in alone}
    assert all(by_trip[row["trip"]]["end_time"] == row["end_time"] for row in ran if row["trip"] in by_trip)


def test_presets_print_files_that_run(fedbuff, tmp_path):
    assert "fedasync_mixing" in fedbuff("presets").stdout
    (tmp_path / "prox.toml").write_text(fedbuff("presets", "fedprox").stdout)
    fedbuff("run", "prox.toml", "--set", "until.trips=100")
    assert (tmp_path / "runs" / "prox-seed0" / "summary.json").exists()
    assert "did you mean fedprox?" in fedbuff("presets", "fedporx", code=2).stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("run", "nothing.toml"), "nothing.toml: No such file"),
        (("run",), "give a SETTINGS.toml"),
        (("run", "{settings}", "--set", "server.bufer_size=3"), "did you mean server.buffer_size?"),
        (("run", "{settings}", "--set", "nonsense"), "expected KEY=VALUE"),
        (("run", "{settings}", "--set", "algorithm.fedbuff.concurrency=61"), "60 clients are too few"),
        (("run", "{settings}", "--out", "/proc/nothing"), "can't write a run"),
        (("run", "{settings}", "--out", "{settings}"), "can't write a run"),
        (("run", "{settings}", "--set", "task={leaf={folder='nowhere'}}"), "no such folder"),
        (("run", "{settings}", "--set", "task={python={file='nowhere.py'}}"), "no such file"),
        (("run", "{settings}", "--live", "--live-address", "ü..x:0"), "can't serve the live view at ü..x:0"),
        (("run", "{settings}", "--workers", "1000000"), "workers=1000000: expected an integer >= 1 and <= 1,024"),
        (("compare", "{settings}", "--seeds", "a"), "expected different integers"),
        (("compare", "{settings}", "--seeds", "0,0"), "expected different integers"),
        (("compare", "{settings}", "--set", "seed=3"), "takes its seeds from --seeds"),
        (("compare", "{settings}", "{settings}"), "not all different"),
        (("run", "{settings}", "--set", "task.digits={test=0}"), "task.digits: test=0.0"),
        (("run", "{settings}", "--seed", "-1"), "seed=-1: expected an integer >= 0"),
        (("run", "{settings}", "--checkpoint-every", "nan"), "checkpoint_every=nan"),
        (
            ("run", "{settings}", "--set", "server.start.arrivals.concurrency=9", "--set", "timing.constant.value=0"),
            "give a rate",
        ),
        (("timeline", "--set", "timming.half_normal.scale=3"), "did you mean timing?"),
        (("timeline", "--clients", "0"), "clients=0: expected an integer >= 1"),
        (("timeline", "--trips", "10", "--out", "{settings}/t.parquet"), "can't write"),
        (("compare", "{settings}", "--algorithms", "fedbuff,fedvag"), "did you mean algorithm.fedavg?"),
        (("timeline", "--trips", "0"), "trips=0: expected an integer >= 1"),
        (("timeline", "--trips", "many"), "argument --trips: invalid int value: 'many'; see fedbuff timeline --help"),
        (("privacy", "epsilon", "--stepps", "3"), "see fedbuff privacy epsilon --help"),
        (("runn",), "invalid choice: 'runn'"),
        (("paper", "fig-progress", "--quick", "--out", "{settings}"), "Not a directory"),
        (("bench", "--only", "engine", "--out", "{settings}/bench"), "Not a directory"),
        (("timeline", "--set", "timing.uniform={low=3, high=2}"), "timing.uniform.high=2.0: expected a number > 3"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, complaint, settings_file, fedbuff):
    done = fedbuff(*(a.replace("{settings}", str(settings_file)) for a in arguments), code=2)
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("content", ["a = " + "[" * 20_000, "a = " + "1" * 5_000, "a = \x00"])
def test_what_is_no_settings_file_is_one_line(content, tmp_path, fedbuff):
    (tmp_path / "odd.toml").write_text(content)
    done = fedbuff("run", tmp_path / "odd.toml", code=2)
    assert "odd.toml: not TOML: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_comparison_stays_in_its_folder(settings_file, fedbuff, tmp_path):
    settings_file.write_text(settings_file.read_text() + '\n[compare."../x"]\nclient.lr = 0.2\n')
    done = fedbuff("compare", settings_file, "--out", tmp_path / "c", code=2)
    assert 'compare: "../x": a name is part of a folder' in done.stderr
    assert not list(tmp_path.glob("x-seed*"))


def test_timeline_of_another_concurrency_keeps_arrivals_random(fedbuff, tmp_path):
    file = tmp_path / "arrivals.toml"
    file.write_text("[server]\nbuffer_size = 3\nstart.arrivals = {concurrency = 10, poisson = true}\n")
    gaps = []
    for size in ((), ("--concurrency", "20")):
        out = tmp_path / f"{len(gaps)}.parquet"
        fedbuff("timeline", file, "--trips", "3000", "--clients", "500", "--out", out, *size)
        gaps.append(np.diff(np.sort(pq.read_table(out)["start_time"].to_numpy())))
    assert [np.std(g) / np.mean(g) for g in gaps] == pytest.approx([1.0, 1.0], abs=0.1)


def test_timeline_says_what_it_leaves_out(fedbuff):
    done = fedbuff("timeline", Path(__file__).parents[1] / "examples" / "private.toml", "--trips", "100")
    assert "[privacy] is ignored here" in done.stderr


def test_different_targets_are_not_compared(settings_file, fedbuff, tmp_path):
    file = tmp_path / "targets.toml"
    file.write_text(settings_file.read_text() + "\n[compare.a]\ntarget = 0.3\n[compare.b]\ntarget = 0.6\n[compare.c]\n")
    fedbuff("compare", file, "--seeds", "0", "--out", tmp_path / "out")
    table = (tmp_path / "out" / "comparison.md").read_text()
    assert "client trips to its target" in table
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in table.splitlines()[2:]}
    assert rows.keys() == {"a (target: 30 %)", "b (target: 60 %)", "c (target: none)"}
    assert rows["b (target: 60 %)"][3:5] == ["–", "–"]
    assert rows["c (target: none)"][:5] == ["–"] * 5


def test_timeline_keeps_the_files_own_starting_rule(fedbuff, settings_file):
    """A synchronous file stays synchronous at another concurrency."""
    how = ("--set", "algorithm={fedavg={concurrency=10}}", "--concurrency", 20, "--trips", 400, "--json")
    got = json.loads(fedbuff("timeline", settings_file, *how).stdout)
    assert got["staleness_max"] == 0
    assert got["server_steps"] == 19
    at_rate = ("--set", "server.start.arrivals.concurrency=500", "--trips", 20_000, "--json")
    assert json.loads(fedbuff("timeline", *at_rate).stdout)["concurrency_mean"] == pytest.approx(500, rel=0.05)


def test_a_files_own_algorithm_is_compared_as_it_is(settings_file, fedbuff, tmp_path):
    fedbuff("compare", settings_file, "--algorithms", "fedbuff,fedprox", "--set", "until.trips=40", "--out", "cmp")
    ours, prox = (fb.load(tmp_path / "cmp" / f"{name}-seed0").settings for name in ("fedbuff", "fedprox"))
    assert ours["server"]["buffer_size"] == 4
    assert prox["server"]["start"]["cohort"]["size"] == 20
    assert prox["client"]["proximal"] == 0.01


def test_an_algorithm_that_a_file_names_and_spells_out_keeps_its_settings(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--set", "until.trips=40", "--out", tmp_path / "run")
    how = ("compare", tmp_path / "run" / "settings.toml", "--algorithms", "fedbuff,fedavg", "--out", "cmp")
    fedbuff(*how)
    assert fb.load(tmp_path / "cmp" / "fedbuff-seed0").settings["server"]["buffer_size"] == 4
    assert "2 of 2 runs were finished before" in fedbuff(*how).stdout
    assert "is not a run folder" in fedbuff("show", tmp_path / "cmp", code=2).stderr


def test_a_run_made_in_python_can_be_repeated_from_its_folder(fedbuff, tmp_path):
    task = fb.tasks.synthetic(clients=40, features=6, max_examples=9)
    server = fb.Server(start=fb.refill(8), buffer_size=4)
    fb.simulate(
        server, task, client=fb.LocalSGD(lr=np.float64(0.1)), until=fb.trips(60), seed=np.int64(2), out=tmp_path / "python"
    )
    fedbuff("run", tmp_path / "python" / "settings.toml", "--out", tmp_path / "again")
    for name in ("settings.toml", "trips.parquet", "weights.safetensors"):
        assert (tmp_path / "python" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_a_damaged_run_is_one_line(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "run")
    for name in ("weights.safetensors", "trips.parquet", "summary.json"):
        whole = (tmp_path / "run" / name).read_bytes()
        (tmp_path / "run" / name).write_bytes(whole[:40])
        done = fedbuff("show", tmp_path / "run", code=2)
        assert "is not a whole run" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        (tmp_path / "run" / name).write_bytes(whole)


def test_a_disk_that_fills_up_later_is_one_line_and_the_run_goes_on_afterwards(settings_file, fedbuff, tmp_path):
    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_200_000, 1_200_000))

    how = ("run", settings_file, "--set", "until.trips=30000", "--set", "client.lr=0.01", "--checkpoint-every", 0.05)
    done = fedbuff(*how, "--out", tmp_path / "run", code=2, preexec_fn=small_files)
    assert "can't write" in done.stderr
    assert "File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "run" / "checkpoint" / "state.safetensors").exists()


def test_files_of_others_in_the_folder_are_left_alone(settings_file, fedbuff, tmp_path):
    (tmp_path / "run" / "deep").mkdir(parents=True)
    theirs = [tmp_path / "run" / ".mine.tmp", tmp_path / "run" / "deep" / ".settings.toml.1.tmp"]
    ours = tmp_path / "run" / ".settings.toml.12345.tmp"
    for path in (*theirs, ours):
        path.touch()
    fedbuff("run", settings_file, "--set", "until.trips=20", "--out", tmp_path / "run")
    assert all(path.exists() for path in theirs)
    assert not ours.exists()


def test_not_toml_is_one_line_too(fedbuff, tmp_path):
    (tmp_path / "bad.toml").write_text("[client\nlr = 1")
    assert len(fedbuff("run", "bad.toml", code=2).stderr.splitlines()) == 1


def test_an_existing_run_is_not_overwritten(settings_file, fedbuff, tmp_path):
    fedbuff("run", settings_file, "--out", tmp_path / "run")
    assert "already holds a run" in fedbuff("run", settings_file, "--out", tmp_path / "run", code=2).stderr


def test_a_run_that_was_refused_before_it_began_does_not_hold_its_folder(settings_file, fedbuff, tmp_path):
    out = ["--out", tmp_path / "run", "--quiet"]
    fedbuff("run", settings_file, *out, "--engine", "ray", "--address", "127.0.0.1:1", code=2)
    assert (tmp_path / "run" / "settings.toml").exists()
    fedbuff("run", settings_file, *out, "--seed", 5)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["seed"] == 5


@pytest.mark.parametrize("beside", [[], ["study.db", "data.json"]])
def test_settings_that_are_somebodys_own_are_left_alone(beside, settings_file, fedbuff, tmp_path):
    (tmp_path / "mine").mkdir()
    mine = tmp_path / "mine" / "settings.toml"
    mine.write_text(f"# mine\n{settings_file.read_text()}")
    for name in beside:
        (tmp_path / "mine" / name).write_text("{}")
    assert "already holds a run" in fedbuff("run", mine, "--out", tmp_path / "mine", code=2).stderr
    assert mine.read_text().startswith("# mine")


def _no_large_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_no_room_is_an_error_before_training_starts(settings_file, fedbuff, tmp_path):
    """The disk is made full by a limit on the size of files."""
    done = fedbuff("run", settings_file, "--out", tmp_path / "run", code=2, preexec_fn=_no_large_files)
    assert "can't write a run (1.1 MB)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounting a small disk takes root")
def test_a_really_full_disk_is_an_error_before_training_starts(settings_file, fedbuff, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {disk} 2>/dev/null") != 0:
        pytest.skip("this machine does not let root mount")
    try:
        assert "No space left on device" in fedbuff("run", settings_file, "--out", disk / "run", code=2).stderr
    finally:
        os.system(f"umount {disk}")


def test_nothing_but_the_answer_is_printed_when_piped(settings_file, fedbuff, tmp_path):
    done = fedbuff("run", settings_file, "--out", tmp_path / "run")
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


def test_your_own_task_is_a_python_file(settings_file, fedbuff, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import fedbuff as fb\ndef make(n):\n    return fb.tasks.synthetic(clients=n, features=4)\n"
    )
    settings_text = settings_file.read_text().replace("[task.synthetic]", "[task.python]").split("[algorithm")
    task = "[task.python]\nfile = 'mine.py'\nfunction = 'make'\narguments = {n = 40}\n"
    settings_file.write_text(task + "[algorithm" + settings_text[1])
    assert json.loads(fedbuff("run", settings_file, "--json").stdout)["task"] == "synthetic"
