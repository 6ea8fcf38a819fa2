"""`Server(average=…)`: a mean of versions is evaluated and kept; nobody trains from it. Its formula: test_server_oracle.py."""

import json
from dataclasses import replace

import numpy as np
import pytest

import fedbuff as fb
from conftest import same_arrays
from fedbuff.cli import main
from fedbuff.learn.evaluate import evaluate_rows, plain
from fedbuff.learn.local import initial_weights
from test_simulate import CLIENT, SERVERS, run

K, SPAN = 3, 7


def flat(run: fb.Run) -> np.ndarray:
    return np.concatenate([a.ravel() for a in run.weights.values()])


def accuracy(task: fb.Task, weights: np.ndarray) -> float:
    model, _ = initial_weights(task, 0)
    split, (x, _) = next(iter(task.splits.items()))
    *_, right, rows = evaluate_rows(task, model, weights, split, 0, plain(model))
    assert rows == len(x)
    return right / rows


def test_a_run_ends_with_the_mean_of_the_versions_that_runs_without_it_end_with(small_task):
    """Each version from a run of its own that stops there."""
    steps = 12

    def after(n: int, server: fb.Server) -> np.ndarray:
        return flat(fb.simulate(server, small_task, client=CLIENT, until=fb.server_steps(n)))

    without = fb.Server(start=fb.refill(10), buffer_size=K)
    versions = [after(n, without) for n in range(1, steps + 1)]
    mean = np.mean(versions[:SPAN], axis=0, dtype=np.float64)
    for w in versions[SPAN:]:
        mean += (w - mean) / SPAN
    got = after(steps, fb.Server(start=fb.refill(10), buffer_size=K, average=SPAN))
    assert got == pytest.approx(mean, abs=1e-6)
    assert abs(got - versions[-1]).max() > 1e-3


def test_trips_and_versions_are_what_they_are_without_it(small_task):
    """An average of one version is that version, and who takes part when does not depend on any."""
    without, one, some = (run(fb.Server(start=fb.refill(10), buffer_size=K, average=n), small_task) for n in (None, 1, SPAN))
    assert same_arrays(without.weights, one.weights)
    assert without.metrics == one.metrics
    assert same_arrays(without.trips, some.trips)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_stops_at_an_accuracy_ends_with_the_weights_that_had_it(workers, small_task):
    """Though with other processes it has gone on by the time that the evaluation is there."""
    until = fb.accuracy(0.5) | fb.trips(5000)
    got = fb.simulate(SERVERS["average"], small_task, client=CLIENT, until=until, evaluate_every=K, workers=workers)
    assert got.summary["stopped_by"] == "reached accuracy 0.5"
    assert accuracy(small_task, flat(got)) == got.metrics[-1]["accuracy"] >= 0.5


def test_an_average_that_is_no_longer_finite_ends_the_run(small_task):
    got = fb.simulate(SERVERS["average"], small_task, client=replace(CLIENT, lr=1e18), until=fb.trips(500))
    assert got.summary["stopped_by"].startswith("diverged")


def test_in_a_settings_file_it_goes_with_any_preset(tmp_path, small_task, capsys):
    (tmp_path / "a.toml").write_text(
        "[task.digits]\nclients = 20\n[algorithm.fedavgm]\nconcurrency = 5\n[server]\naverage = 4\n"
        "[client]\nlr = 0.1\n[until]\nserver_steps = 6\n"
    )
    main(["run", str(tmp_path / "a.toml"), "--out", str(tmp_path / "run")])
    assert "average = 4" in (tmp_path / "run/settings.toml").read_text()
    assert json.loads((tmp_path / "run/summary.json").read_text())["server_steps"] == 6
    capsys.readouterr()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "10"])
def test_an_average_of_no_versions_is_a_mistake(wrong):
    with pytest.raises((ValueError, TypeError), match="average"):
        fb.Server(start=fb.refill(10), buffer_size=K, average=wrong)


def test_a_mean_of_very_many_versions_of_float32_does_not_drift():
    """Versions that stay where they are have themselves for a mean."""
    w = np.full(5, 1.234567, np.float32)
    server = fb.Server(start=fb.refill(1), buffer_size=1, average=np.int64(3000), weights=w, clients=1)
    server.begin()
    for trip in range(9000):
        server.handle(fb.UpdateArrived(trip, np.zeros(5, np.float32)))
    assert server.model.dtype == np.float32
    assert server.model == pytest.approx(w, rel=1e-6)


def test_a_server_without_a_model_has_no_mean_either():
    with pytest.raises(RuntimeError, match="no weights or no clients"):
        fb.Server(start=fb.refill(1), buffer_size=1, average=3).model  # noqa: B018
