"""`fedbuff tune`: the study orders trials sensibly, survives a kill, and its best settings are what it says."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import time
import tomllib
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import command
from fedbuff import toml
from fedbuff.presets import PRESETS
from fedbuff.report.files import FolderError
from fedbuff.settings import from_tables
from fedbuff.toml import SettingsError
from fedbuff.tune.space import RANGES, between, check_space, space_of, with_values
from fedbuff.tune.study import draw, make_study, tune
from fedbuff.tune.trial import STEPS, budget, cost, lately

SMALL = {
    "task": {"digits": {"clients": 60, "model": "linear"}},
    "algorithm": {"fedavgm": {"concurrency": 10}},
    "client": {"lr": 0.1},
    "until": {"accuracy": 0.6, "trips": 300},
    "evaluate_every": 10,
}


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(toml.dumps(SMALL))
    return path


accuracies = st.floats(0, 1)


@given(st.integers(1, 1000), accuracies, accuracies, st.floats(0.01, 1))
def test_who_reaches_the_target_comes_before_who_does_not(trips, one, other, target):
    assert cost(trips, one, target, 1000) <= cost(None, min(other, target), target, 1000)
    below = sorted((min(one, target), min(other, target)))
    assert cost(None, below[1], target, 1000) <= cost(None, below[0], target, 1000) <= 2000


def test_a_curve_that_wavers_is_judged_by_the_last_fifth_of_it():
    accuracy = [0.1] * 8 + [0.8, 0.2, 0.8]
    steady = [{"split": split, "trips": 10 * i, "accuracy": a} for i, a in enumerate(accuracy) for split in ("test", "other")]
    assert lately(steady) == pytest.approx((0.8 + 0.2 + 0.8) / 3)
    assert lately(steady[:-2]) < lately(steady)
    assert lately([{"split": "test", "trips": 0, "accuracy": None}]) == 0.0


def test_a_preset_says_what_can_be_searched():
    space, _ = space_of({"algorithm": {"fedbuff": {}}, "client": {"lr": 1.0}}, RANGES["paper"])
    assert space["client.lr"] == between(1e-8, 10000)
    assert space["algorithm.fedbuff.lr"] == between(1e-8, 10000)
    assert space["algorithm.fedbuff.beta"] == (0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
    assert space_of({"algorithm": "fedprox"}, RANGES["paper"])[0]["algorithm.fedprox.mu"] == (0.001, 0.01, 0.1, 1)
    spelled_out = {"start": {"refill": {"concurrency": 9}}, "buffer_size": 3}
    assert set(space_of({"server": spelled_out}, RANGES["paper"])[0]) == {"client.lr", "server.optimizer.sgd.lr"}
    assert set(space_of({"algorithm": "fedavg"}, RANGES["paper"])[0]) == {"client.lr", "algorithm.fedavg.lr"}


def test_a_file_can_say_what_is_searched():
    table = {"tune": {"client": {"lr": {"low": 0.1, "high": 1}, "batch_size": [8]}}, "client": {"lr": 1.0}}
    space, rest = space_of(table, RANGES["narrow"])
    assert space == {"client.lr": between(0.1, 1.0), "client.batch_size": (8,)}
    assert isinstance(space["client.batch_size"][0], int)  # a batch size is an integer, and stays one
    assert rest == {"client": {"lr": 1.0}}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["low", "high", "lr", "x"]), inner, max_size=3),
    max_leaves=6,
)


@given(anything)
def test_a_bad_tune_table_is_a_settings_error_in_one_line(table):
    try:
        space, _ = space_of({"tune": table}, RANGES["narrow"])
    except SettingsError as e:
        assert str(e).startswith(("tune.", "tune = "))
    else:
        assert space
        assert all(isinstance(r, between) or r for r in space.values())


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (("--set", "until.accuracy=0.5", "--set", "algorithm=fedavgx"), "unknown; did you mean fedavg?"),
        (("--trials", "0"), "--trials 0: expected more than 0"),
        (("--workers", "-1"), "--workers -1: expected more than 0"),
        (("--seed", "-1"), "seed=-1"),
        (("--set", "tune.client.lr=3"), "tune.client.lr = 3"),
        (("--set", "tune.client.lrx=[3.0]", "--trials", "1"), "unknown key"),
    ],
)
def test_a_mistake_is_one_line(changes, complaint, small, fedbuff):
    done = fedbuff("tune", small, *changes, code=2)
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def searching(tune_table, **changes):
    """`SMALL`, with these changes and this [tune], as far as the check of what is searched."""
    space, tables = space_of({**SMALL, **changes, "tune": tune_table}, RANGES["narrow"])
    check_space(tables, space)


@pytest.mark.parametrize(
    ("tune_table", "complaint"),
    [
        ({"client": {"lrr": [0.1]}}, "client.lrr = 0.1: unknown key; did you mean client.lr?"),
        ({"clients": {"lr": [0.1]}}, "unknown key; did you mean client?"),
        ({"client": {"momentum": [0.0, 0.5, 3.0]}}, "client.momentum=3.0: expected a number >= 0 and <= 1"),
        ({"client": {"momentum": {"low": 0.1, "high": 3}}}, "client.momentum=3.0: expected a number >= 0 and <= 1"),
        ({"client": {"batch_size": {"low": 8, "high": 32}}}, "batch_size = 8.0: expected an integer; give a list of integers"),
        ({"client": {"lr": [0.1], "batch_size": [8, 0]}}, "client.batch_size=0: expected an integer >= 1"),
        ({"client": [3]}, "client = 3: expected a table"),
        ({"algorithm": {"fedbuff": {"lr": [0.1]}}}, 'tune.algorithm.fedbuff.lr: algorithm is "fedavgm" here; search that one'),
        ({"server": {"optimizer": {"sgd": {"lr": [1]}, "adam": {"lr": [1]}}}}, 'optimizer.adam.lr: optimizer is "sgd" here'),
        *(({key: [1]}, f"tune.{key}: can't be searched") for key in ("seed", "name", "target", "dropout", "timeout")),
        *(({key: [1]}, f"tune.{key}: can't be searched") for key in ("evaluate_every", "evaluate_share")),
        ({"until": {"accuracy": [0.1, 0.6]}}, "tune.until.accuracy: can't be searched, it is part of what is measured"),
        ({"until": {"trips": [100]}}, "tune.until.trips: can't be searched"),
        ({"task": {"digits": {"clients": [60]}}}, "tune.task.digits.clients: can't be searched"),
        (
            {"algorithm": {"fedavgm": {"concurrency": [10, 9000]}}},
            "tune.algorithm.fedavgm.concurrency = 9000: 60 clients are too few for cohort(size=9000",
        ),
        (
            {"algorithm": {"fedavgm": {"concurrency": [10, 50], "over_selection": [0.0, 0.5]}}},
            "concurrency = 50, algorithm.fedavgm.over_selection = 0.5: 60 clients are too few",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_starts(tune_table, complaint):
    with pytest.raises(SettingsError) as e:
        searching(tune_table)
    assert complaint in str(e.value)
    assert str(e.value).startswith("tune")


def test_an_algorithm_is_also_known_by_its_name_alone():
    searching({"algorithm": {"fedavgm": {"lr": [1.0]}}}, algorithm="fedavgm")
    with pytest.raises(SettingsError, match='algorithm is "fedavgm" here'):
        searching({"algorithm": {"fedbuff": {"lr": [1.0]}}}, algorithm="fedavgm")


def test_what_is_searched_need_not_fit_what_the_file_has():
    """Both clips must be equal: in every trial they are, though neither is the file's."""
    privacy = {"clip": 1.0, "delta": 1e-5, "noise_multiplier": 1.0, "max_participations": 5}
    protected = {"privacy": privacy, "secure_aggregation": {"mode": "plain", "clip": 1.0}}
    searching({"privacy": {"clip": [0.5]}, "secure_aggregation": {"clip": [0.5]}}, **protected)
    with pytest.raises(SettingsError, match="make them equal"):
        searching({"privacy": {"clip": [0.5, 1.0]}, "secure_aggregation": {"clip": [0.5]}}, **protected)


def test_a_dataset_is_not_read_to_check_what_is_searched():
    searched = {"client": {"lr": [0.1]}, "task": {"celeba": {"model": {"cnn": {"dropout": [0.0, 0.5]}}}}}
    searching(searched, task={"celeba": {"data": "nowhere"}})


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_given_all_of_its_ranges(preset, ranges):
    space, tables = space_of({**SMALL, "algorithm": preset}, RANGES[ranges])
    check_space(tables, space)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_wrong_path_starts_nothing(workers, small, fedbuff, tmp_path):
    done = fedbuff("tune", small, "--set", "tune.client.lrr=[0.1]", "--workers", workers, "--out", "study", code=2)
    assert "client.lrr = 0.1: unknown key" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "study").exists()


def test_a_target_is_needed(small, fedbuff):
    small.write_text(toml.dumps({**SMALL, "until": {"trips": 300}}))
    assert "until.accuracy: missing" in fedbuff("tune", small, code=2).stderr


def test_values_go_where_their_paths_say():
    tables = with_values(SMALL, {"client.lr": 0.7, "algorithm.fedavgm.beta": 0.5})
    assert tables["client"]["lr"] == 0.7
    assert tables["algorithm"]["fedavgm"] == {"concurrency": 10, "beta": 0.5}
    assert SMALL["client"]["lr"] == 0.1


def test_the_best_settings_run_as_the_study_says(small, fedbuff, tmp_path):
    study = json.loads(fedbuff("tune", small, "--trials", 6, "--out", "study", "--json", "--quiet").stdout)
    assert study == json.loads((tmp_path / "study" / "study.json").read_text())
    assert (study["trials"], len(study["all"]), study["seeds"], study["trips"]) == (6, 6, [100, 101], 300)
    costs = [trial["cost"] for trial in study["all"] if trial["cost"] is not None]
    assert study["best"]["costs"][0] in sorted(costs)[:3]
    assert study["best"]["cost"] == sum(study["best"]["costs"]) / 2
    best = tomllib.loads((tmp_path / "study" / "best.toml").read_text())
    assert best["client"]["lr"] == study["best"]["values"]["client.lr"]
    for seed, expected in zip(study["seeds"], study["best"]["costs"], strict=True):
        how = ("--seed", seed, "--out", f"run{seed}", "--json")
        summary = json.loads(fedbuff("run", tmp_path / "study" / "best.toml", *how).stdout)
        metrics = [json.loads(line) for line in (tmp_path / f"run{seed}" / "metrics.jsonl").read_text().splitlines()]
        assert cost(summary["trips_to_target"], lately(metrics), *budget(from_tables(best))) == pytest.approx(expected)


def test_hopeless_trials_are_given_up(tmp_path):
    """Learning rates so small that nothing is learned, after some that learn."""
    good, bad = ({"client.lr": lr, "algorithm.fedavgm.lr": 1.0, "algorithm.fedavgm.beta": 0.5} for lr in (0.3, 1e-3))
    tables = {**SMALL, "until": {"accuracy": 0.99, "trips": 300}}
    first = [{**good, "client.lr": lr} for lr in (0.3, 0.4, 0.5, 0.6, 0.7)]
    study = tune(tables, tmp_path, trials=6, first=[*first, bad])
    assert [trial["cost"] is None for trial in study["all"]] == [False] * 5 + [True]
    assert study["given_up"] == 1
    assert study["all"][5]["looks"] < STEPS == study["all"][0]["looks"]


def test_a_trial_that_diverges_comes_last_however_good_it_was_before(tmp_path):
    (tmp_path / "bounded.py").write_text(
        "import fedbuff as fb\nimport numpy as np\nimport torch\n"
        "def loss(o, y):  # softmax by hand: overflows when outputs exceed 88\n"
        "    return -(o.exp() / o.exp().sum(1, keepdim=True)).gather(1, y[:, None]).log().mean()\n"
        "def task():\n"
        "    rng = np.random.default_rng(0)\n"
        "    w = rng.normal(size=(4, 3))\n"
        "    x = rng.normal(size=(21, 20, 4)).astype(np.float32)\n"
        "    clients = [(part, (part @ w + rng.normal(size=(20, 3))).argmax(1)) for part in x]\n"
        "    return fb.Task(lambda: torch.nn.Linear(4, 3), loss, clients[1:], clients[0])\n"
    )
    tables = {
        "evaluate_every": 5,
        "task": {"python": {"file": str(tmp_path / "bounded.py"), "function": "task"}},
        "server": {"start": {"refill": {"concurrency": 5}}, "buffer_size": 5},
        "client": {"lr": 0.1},
        "until": {"accuracy": 0.999, "trips": 300},
        "tune": {"client": {"lr": [0.003, 80.0]}},
    }
    study = tune(tables, tmp_path / "study", trials=2, first=[{"client.lr": 0.003}, {"client.lr": 80.0}])
    stable, diverged = (trial["cost"] for trial in study["all"])
    assert diverged == 600
    assert stable < diverged
    assert study["best"]["values"] == {"client.lr": 0.003}


def test_a_mistake_that_only_a_trial_sees_is_a_line_of_each_process(small, fedbuff):
    done = fedbuff("tune", small, "--workers", 2, "--trials", 2, "--set", "task.digits.clients=3", code=2)
    assert "Traceback" not in done.stderr
    assert 2 <= len(done.stderr.splitlines()) <= 4, done.stderr


def values(folder):
    return [(trial["values"], trial["cost"]) for trial in json.loads((folder / "study.json").read_text())["all"]]


def test_a_killed_study_goes_on_and_ends_the_same(small, fedbuff, tmp_path):
    how = ["tune", small, "--trials", "8", "--quiet"]
    fedbuff(*how, "--out", "whole")
    for _ in range(2):
        process = subprocess.Popen(command([*how, "--out", "killed"]), cwd=tmp_path, stdout=subprocess.DEVNULL)
        known = finished(tmp_path / "killed" / "study.db")
        deadline = time.monotonic() + 120
        while finished(tmp_path / "killed" / "study.db") < known + 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    fedbuff(*how, "--out", "killed")
    assert values(tmp_path / "killed") == values(tmp_path / "whole")
    fedbuff(*how[:2], "--trials", "9", "--quiet", "--out", "killed")  # and more trials go on from there
    assert values(tmp_path / "killed")[:8] == values(tmp_path / "whole")


@pytest.mark.parametrize("known", [1, 6])  # in the random beginning of a study, and when the sampler has learned something
def test_a_study_killed_while_it_drew_values_draws_the_same_ones_anew(tmp_path, known):
    tune(SMALL, tmp_path / "killed", trials=known)
    space = space_of(SMALL, RANGES["narrow"])[0]
    for drawn in range(len(space) + 1):
        trial = make_study(tmp_path / "killed" / "study.db").ask()
        draw(trial, dict(islice(space.items(), drawn)))  # and nobody goes on with it
    assert tune(SMALL, tmp_path / "killed", trials=known + 1)["all"] == tune(SMALL, tmp_path / "w", trials=known + 1)["all"]


def test_values_that_were_to_be_tried_first_are_tried_though_the_study_was_killed(tmp_path):
    first = {"client.lr": 0.5, "algorithm.fedavgm.lr": 2.0, "algorithm.fedavgm.beta": 0.3}
    tune(SMALL, tmp_path / "study", trials=1)
    study = make_study(tmp_path / "study" / "study.db")
    study.enqueue_trial(first)
    study.ask()
    assert tune(SMALL, tmp_path / "study", trials=2, first=[first])["all"][1]["values"] == first


@pytest.mark.parametrize("killed_in", [0, 1, 2])
def test_what_is_to_be_tried_first_is_tried_in_its_order_whenever_the_study_was_killed(tmp_path, killed_in):
    first = [{"client.lr": lr, "algorithm.fedavgm.lr": 1.0, "algorithm.fedavgm.beta": 0.0} for lr in (0.1, 0.2, 0.3)]
    whole = tune(SMALL, tmp_path / "whole", trials=5, first=first)
    if killed_in:
        tune(SMALL, tmp_path / "killed", trials=killed_in, first=first)
    study = make_study(tmp_path / "killed" / "study.db") if killed_in else None
    if study is not None:
        draw(study.ask(), space_of(SMALL, RANGES["narrow"])[0])  # the next of them is under way, others wait
        draw(study.ask(), space_of(SMALL, RANGES["narrow"])[0])
    assert tune(SMALL, tmp_path / "killed", trials=5, first=first)["all"] == whole["all"]


def test_a_study_killed_while_its_database_was_made_begins_anew(tmp_path):
    """Half a database can't be gone on with: it lies under another name until it is whole."""
    out = tmp_path / "study"
    out.mkdir()
    with contextlib.closing(sqlite3.connect(out / "study.new")) as db:
        db.execute("create table studies (study_id integer primary key, study_name varchar(512))")
        db.commit()
    (out / "study.new-journal").write_bytes(b"half")
    assert tune(SMALL, out, trials=1)["trials"] == 1
    assert not list(out.glob("study.new*"))


def finished(database) -> int:
    return counted(database, "COMPLETE", "PRUNED")


def counted(database, *states) -> int:
    """Trials in one of these states."""
    if not database.exists():
        return 0
    try:
        with sqlite3.connect(f"{database.as_uri()}?mode=rw", uri=True, timeout=5) as db:
            return sum(state in states for (state,) in db.execute("select state from trials"))
    except sqlite3.OperationalError:
        return 0


def test_several_processes_work_on_one_study(small, fedbuff, tmp_path):
    study = json.loads(fedbuff("tune", small, "--trials", 6, "--workers", 2, "--out", "study", "--json").stdout)
    assert len({json.dumps(trial["values"]) for trial in study["all"]}) == 6, "processes that begin together drew the same"
    assert study["trials"] == 6
    assert study["best"] is not None


def test_processes_end_with_the_study_that_started_them(small, fedbuff, tmp_path):
    how = ["tune", small, "--workers", "2", "--out", "study", "--quiet"]
    given = {"cwd": tmp_path, "stdout": subprocess.PIPE, "start_new_session": True}
    process = subprocess.Popen(command([*how, "--trials", "5000"]), **given)
    database = tmp_path / "study" / "study.db"
    try:
        deadline = time.monotonic() + 120
        while (finished(database) < 2 or counted(database, "RUNNING") < 1) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)  # its output ends when the last who can write to it has ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    trials = finished(database) + 2
    study = json.loads(fedbuff(*how, "--trials", trials, "--json").stdout)
    assert study["trials"] == trials
    assert counted(database, "RUNNING") == 0


def damage(database, how):
    whole = database.read_bytes()
    page = len(whole) // 2 // 4096 * 4096
    if how == "folder":
        database.unlink()
        database.mkdir()
        return
    database.write_bytes(
        {
            "cut off": whole[: len(whole) // 2],
            "header only": whole[:50],
            "garbage": b"what is this? " * 1000,
            "zeroed page": whole[:page] + bytes(4096) + whole[page + 4096 :],
            "last byte": whole[:-1],
            "empty": b"",
        }[how]
    )


def test_a_study_that_was_lost_is_not_begun_again(tmp_path):
    tune(SMALL, tmp_path, trials=1)
    (tmp_path / "study.db").unlink()
    with pytest.raises(SettingsError, match=r"study\.db is gone, and its results are not"):
        tune(SMALL, tmp_path, trials=1)


@pytest.mark.parametrize("how", ["cut off", "header only", "garbage", "zeroed page", "last byte", "folder", "empty"])
def test_a_damaged_study_is_refused_by_its_name(how, tmp_path):
    tune(SMALL, tmp_path, trials=1)
    damage(tmp_path / "study.db", how)
    with pytest.raises(SettingsError) as e:
        tune(SMALL, tmp_path, trials=2)
    assert str(e.value).startswith(f"{tmp_path / 'study.db'}: not a whole database (")
    assert str(e.value).endswith("); remove the study, or choose another --out")
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["per%20cent", "sp ace ü?x=1#", "{x}", "a&b;c=d", ":memory:"])
def test_a_study_lies_in_its_folder_whatever_that_is_called(name, tmp_path):
    tune(SMALL, tmp_path / name, trials=1)
    assert finished(tmp_path / name / "study.db") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert tune(SMALL, tmp_path / name, trials=1)["trials"] == 1  # and is found there again


def test_settings_that_are_no_text_are_named(tmp_path):
    kept = tmp_path / "settings.toml"
    kept.write_bytes(b"seed = 100 # caf\xe9")
    with pytest.raises(SettingsError) as e:
        tune(SMALL, tmp_path, trials=1)
    assert str(e.value).startswith(f"{kept}: not a study's settings (")


def test_a_study_of_other_settings_is_not_gone_on_with(small, fedbuff):
    fedbuff("tune", small, "--trials", 1, "--out", "study")
    done = fedbuff("tune", small, "--trials", 2, "--out", "study", "--set", "client.batch_size=8", code=2)
    assert "holds a study of other settings" in done.stderr


def test_paper_tune_keeps_what_a_table_needs(fedbuff, tmp_path):
    how = ("paper", "tune", "--dataset", "digits", "--trials", 2, "--trips", 400, "--out", "r", "--quiet")
    assert "settings: r/settings/digits/fedavgm.toml" in fedbuff(*how, "--method", "fedavgm").stdout
    kept = tomllib.loads((tmp_path / "r" / "settings" / "digits" / "fedavgm.toml").read_text())
    assert set(kept["algorithm"]["fedavgm"]) == {"lr", "beta"}
    assert (kept["study"]["trials"], kept["study"]["trips"], kept["study"]["seeds"]) == (2, 400, [100, 101])
    fedbuff(*how, "--method", "fedbuff", "--buffer-size", 40)
    assert (tmp_path / "r" / "settings" / "digits" / "fedbuff-k40.toml").is_file()
    table = fedbuff("paper", "table-hyper", "--dataset", "digits", "--out", "r").stdout
    assert "FedAvgM: the best of 2 trials of at most 400 trips" in " ".join(table.split())
    assert "DOES NOT HOLD: every method was tuned with the same budget" in table


def test_trips_are_counted_to_one_target(small, fedbuff, tmp_path):
    done = fedbuff("tune", small, "--set", "target=0.3", "--trials", 1, "--out", tmp_path / "study", code=2)
    assert "target = 0.3, until.accuracy = 0.6: trips are counted to one; give one" in done.stderr


def test_a_study_does_not_go_on_with_other_data(tmp_path):
    study = tmp_path / "study"
    tune(SMALL, study, trials=1)
    kept = json.loads((study / "data.json").read_text())
    (study / "data.json").write_text(json.dumps({**kept, "digest": "another"}))
    with pytest.raises(FolderError, match="holds a study on other data"):
        tune(SMALL, study, trials=1)
    (study / "data.json").write_text("[")
    with pytest.raises(FolderError, match=r"data\.json is damaged"):
        tune(SMALL, study, trials=1)
    (study / "data.json").write_text(json.dumps(kept))
    assert tune(SMALL, study, trials=1)["trials"] == 1
