"""Look-ahead, chunks and workers: however trips are trained, the run is the one that lockstep gives."""

import errno
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedbuff as fb
from conftest import same_arrays
from fedbuff.learn.work import Trainer
from fedbuff.sim import ahead, shared, workers
from fedbuff.sim.pool import Block, Chunk
from fedbuff.sim.shared import Rows
from fedbuff.sim.simulation import Simulation
from lockstep import lockstep
from test_simulate import CLIENT, SERVERS, run

LOOP = fb.Training(batched=False)


@pytest.mark.parametrize("name", SERVERS)
def test_a_run_is_what_lockstep_gives(name, small_task):
    how = {"dropout": 0.1, "timeout": 2.0, "timing": fb.per_example(fb.exponential(0.2)), "availability": fb.windows(12.0, 6.0)}
    weights, trips = lockstep(SERVERS[name], small_task, CLIENT, 150, seed=3, **how)
    got = run(SERVERS[name], small_task, trips=150, seed=3, training=LOOP, **how)
    assert same_arrays(got.trips, trips)
    assert same_arrays(got.weights, weights)
    batched = run(SERVERS[name], small_task, trips=150, seed=3, **how)
    assert same_arrays(batched.trips, trips)
    for found, expected in zip(batched.weights.values(), weights.values(), strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", SERVERS)
def test_any_number_of_workers_gives_the_same_bits(name, small_task):
    one, *more = (run(SERVERS[name], small_task, seed=1, evaluate_every=20, workers=n) for n in (1, 2, 4))
    for other in more:
        assert same_arrays(other.weights, one.weights)
        assert same_arrays(other.trips, one.trips)
        assert other.metrics == one.metrics


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("seed", range(2))
def test_with_little_memory_the_result_is_the_same(name, seed, small_task):
    """With room for few updates the look-ahead is short, and versions lie on disk."""
    plenty = run(SERVERS[name], small_task, seed=seed, training=LOOP)
    little = run(SERVERS[name], small_task, seed=seed, training=fb.Training(batched=False, ahead_gib=4 * 40 * 4 / 2**30))
    assert same_arrays(little.weights, plenty.weights)
    assert same_arrays(little.trips, plenty.trips)


def test_more_memory_sees_further_up_to_three_times_what_is_in_flight():
    far = [ahead.steps_ahead(10_000, 10, 700_000, gib * 2**30) for gib in (1, 2, 8, 16)]
    assert far == [(153, True), (306, True), (3000, False), (3000, False)]


class Counting:
    """A way to train that counts the trips it trains, and the versions that exist meanwhile."""

    def __init__(self, monkeypatch):
        self.trained, self.sizes = [], []
        monkeypatch.setattr(Trainer, "train", self.train_with(Trainer.train))

    def train_with(self, train):
        def counted(trainer, updates, rows, trips, *rest):
            self.trained += list(trips)
            self.sizes.append(len(trips))
            train(trainer, updates, rows, trips, *rest)

        return counted


@pytest.mark.parametrize("name", SERVERS)
def test_nothing_is_trained_in_vain_or_twice(name, small_task, monkeypatch):
    counting = Counting(monkeypatch)
    got = run(SERVERS[name], small_task, workers=1, dropout=0.2)
    used = got.trips["trip"][got.trips["outcome"] == "used"]
    assert sorted(counting.trained) == sorted(used.tolist())


def test_trips_are_trained_in_bulk(small_task, monkeypatch):
    counting = Counting(monkeypatch)
    run(fb.Server(start=fb.cohort(30), buffer_size=30), small_task, workers=1)
    assert max(counting.sizes) == 30
    assert min(counting.sizes) > 10


def test_versions_are_dropped_when_their_trips_are_trained(small_task, monkeypatch):
    most = 0

    def watched(keep):
        def kept(self, version, weights):
            nonlocal most
            keep(self, version, weights)
            most = max(most, len(self._versions.row_of))

        return kept

    monkeypatch.setattr(workers.Workers, "keep", watched(workers.Workers.keep))
    got = run(SERVERS["fedbuff"], small_task, trips=600, workers=1)
    assert got.summary["server_steps"] == 200
    assert most <= 10 + 2


def nan_task(bad: set[int]) -> fb.Task:
    """Clients of which some have examples that are not numbers, so that their updates are not either."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(4, 3)).astype(np.float32), rng.integers(0, 2, 4)) for _ in range(30)]
    for client in bad:
        clients[client][0][0] = np.nan
    return fb.Task(
        model=lambda: torch.nn.Linear(3, 2), loss=torch.nn.functional.cross_entropy, clients=clients, evaluate=clients[-1]
    )


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("training", [LOOP, fb.Training()], ids=["loop", "batched"])
def test_refused_updates_change_the_plan_as_in_lockstep(name, training):
    """An update that is not finite is refused when it arrives, which the plan could not know: it is made again from there."""
    task = nan_task({1, 4, 7, 11})
    weights, trips = lockstep(SERVERS[name], task, CLIENT, 150, seed=3, dropout=0.1)
    assert "failed" in trips["outcome"]
    for how in ({"workers": 1}, {"workers": 2}):
        got = run(SERVERS[name], task, trips=150, seed=3, training=training, dropout=0.1, **how)
        assert same_arrays(got.trips, trips)
        for found, expected in zip(got.weights.values(), weights.values(), strict=True):
            assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", SERVERS)
def test_only_who_sends_what_is_not_finite_is_refused(name):
    """A refused client is free earlier than planned: from then on others are chosen, whatever they were to be before."""
    task = nan_task(set(range(12)))
    for seed in range(6):
        _, trips = lockstep(SERVERS[name], task, CLIENT, 200, seed=seed)
        got = run(SERVERS[name], task, trips=200, seed=seed, training=LOOP, workers=1)
        assert same_arrays(up_to_the_last_step(got.trips), up_to_the_last_step(trips))


def up_to_the_last_step(trips):
    """Trips that ended before it; what is left in the buffer at the end is not trained, and nobody knows what it was."""
    before = trips["end_version"] < trips["server_step"].max()
    return {name: column[before] for name, column in trips.items()}


@pytest.mark.parametrize("name", SERVERS)
def test_updates_that_are_refused_do_not_stay_in_memory(name, monkeypatch):
    task, kept, held = nan_task(set(range(12))), [], []

    def watched(version):
        def begun(self, *about):
            version(self, *about)
            kept.append(len(self.trained()))
            held.append(len(self._holds))

        return begun

    monkeypatch.setattr(ahead.Ahead, "version", watched(ahead.Ahead.version))
    got = run(SERVERS[name], task, trips=600, workers=1)
    assert (got.trips["outcome"] == "failed").sum() > 90
    assert max(kept) <= 60
    assert max(held) <= 40


def test_a_run_that_diverges_trains_little_more_than_it_reports(monkeypatch):
    counting = Counting(monkeypatch)
    server = fb.Server(start=fb.refill(20), buffer_size=3)
    got = run(server, nan_task(set(range(29))), trips=400, workers=1)
    assert (got.trips["outcome"] == "failed").sum() > 350
    assert len(counting.trained) < 2 * 400


def refusals(monkeypatch):
    """A list that grows by one whenever updates are refused."""
    times, refuse = [], Simulation.refuse
    monkeypatch.setattr(Simulation, "refuse", lambda self, *about: (times.append(1), refuse(self, *about)))
    return times


def test_what_is_known_to_be_refused_is_refused_at_once(monkeypatch):
    """Each time the plan is made again; with K = 1 that would be for every single trip."""
    times = refusals(monkeypatch)
    got = run(SERVERS["fedasync"], nan_task(set(range(29))), trips=400, workers=1)
    assert (got.trips["outcome"] == "failed").sum() > 350
    assert len(times) < 120


def test_trips_that_take_no_time_can_be_refused():
    task, how = nan_task({1, 4, 7, 11}), {"seed": 3, "timing": fb.constant(0.0)}
    _, trips = lockstep(SERVERS["fedbuff"], task, CLIENT, 150, **how)
    got = run(SERVERS["fedbuff"], task, trips=150, training=LOOP, workers=1, **how)
    assert same_arrays(up_to_the_last_step(got.trips), up_to_the_last_step(trips))


def test_a_run_in_which_no_update_is_finite_says_what_to_look_at(monkeypatch):
    monkeypatch.setattr("fedbuff.sim.plan._HOPELESS", 200)
    task = replace(nan_task(set(range(30))), evaluate=(np.zeros((4, 3), np.float32), np.zeros(4, np.int64)))
    with pytest.raises(ValueError, match=r"all trips send updates that are not finite.*see the learning rates"):
        run(SERVERS["fedasync"], task, trips=10_000, workers=1)


def test_a_buffer_that_waits_for_the_last_finite_update_gives_up_soon(monkeypatch):
    """Four good clients, who may take part once, and K = 5: bad updates come one by one, and are not refused one by one."""
    times = refusals(monkeypatch)
    monkeypatch.setattr("fedbuff.sim.simulation._IN_VAIN", 400)
    server = fb.Server(start=fb.refill(12), buffer_size=5)
    privacy = fb.Privacy(0.3, 1e-5, noise_multiplier=1.0, max_participations=1, mechanism="blt", horizon=20, noise="seeded")
    task = replace(nan_task(set(range(4, 30))), evaluate=(np.zeros((4, 3), np.float32), np.zeros(4, np.int64)))
    got = run(server, task, trips=10_000, workers=1, privacy=privacy)
    assert got.summary["stopped_by"].startswith("diverged: no update is finite any more")
    assert got.metrics[-1]["server_steps"] == got.summary["server_steps"]
    assert len(times) < 100


@pytest.mark.parametrize("buffer_size", [1, 3])
@pytest.mark.parametrize("ahead_gib", [1, 1e-6])
def test_bad_updates_that_good_ones_come_between_are_no_reason_to_give_up(buffer_size, ahead_gib, monkeypatch):
    """However many are known already, as they were trained ahead."""
    monkeypatch.setattr("fedbuff.sim.simulation._IN_VAIN", 7)
    task = replace(nan_task(set(range(0, 30, 3))), evaluate=(np.zeros((4, 3), np.float32), np.zeros(4, np.int64)))
    server, how = fb.Server(start=fb.refill(26), buffer_size=buffer_size), {"training": fb.Training(ahead_gib=ahead_gib)}
    got = run(server, task, trips=600, workers=1, **how)
    assert got.summary["stopped_by"] == "reached 600 trips"
    assert (got.trips["outcome"] == "failed").sum() > 100


def test_what_an_evaluation_under_way_will_say_is_waited_for_before_updates_are_refused(small_task, monkeypatch):
    """Else a run that has diverged has thousands of updates refused until somebody looks at its evaluation."""

    def slow(evaluate):
        return lambda self, *about: (time.sleep(0.5), evaluate(self, *about))[1]

    times = refusals(monkeypatch)
    monkeypatch.setattr(Trainer, "evaluate", slow(Trainer.evaluate))
    client = replace(CLIENT, lr=1e30)
    until, often = fb.trips(5000), {"evaluate_every": 5, "workers": 2}
    got = fb.simulate(SERVERS["fedbuff"], small_task, client=client, until=until, **often)
    assert got.summary["stopped_by"].startswith("diverged")
    assert len(times) < 50


def test_a_worker_that_is_killed_changes_nothing(small_task):
    """SIGKILL for every worker process, several times during the run."""
    whole = run(SERVERS["fedbuff"], small_task, trips=900)
    killed = []

    def kill(status):
        for pid in open_children():
            if len(killed) < 6 and status.trips % 5 == 0 and pid not in killed:  # a dead one may not be missed yet
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    got = run(SERVERS["fedbuff"], small_task, trips=900, workers=3, progress=kill)
    assert len(set(killed)) == 6
    assert same_arrays(got.weights, whole.weights)
    assert same_arrays(got.trips, whole.trips)


def open_children() -> list[int]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children", encoding="ascii") as children:  # noqa: PTH123
        return [int(pid) for pid in children.read().split()]


def test_work_that_kills_every_worker_is_an_error_and_not_a_loop():
    class Deadly:
        def evaluate(self, weights, split, start):
            os._exit(9)

    pool = workers.Workers(Deadly(), 4, 4, np.zeros(3, np.float32), on_disk=False, workers=2)
    pool.keep(0, np.zeros(3, np.float32))
    pool.submit(1, Block(0, "test", 0), priority=0)
    with pytest.raises(RuntimeError, match=r"3 worker processes died .* evaluating version 0"):
        while not pool.finished(1):
            time.sleep(0.01)
    pool.close()


def test_an_error_in_a_worker_is_the_users_to_see(small_task):
    parent = os.getpid()

    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(5, 3)

        def forward(self, x):
            if os.getpid() != parent:
                raise ArithmeticError("seven")
            time.sleep(0.01)
            return self.layer(x)

    task = fb.Task(model=Broken, loss=small_task.loss, clients=small_task.clients, evaluate=small_task.evaluate)
    with pytest.raises(ArithmeticError, match="seven"):
        run(SERVERS["fedbuff"], task, workers=2, training=LOOP)


def test_no_process_outlives_its_run(small_task):
    before = set(open_children())
    run(SERVERS["fedbuff"], small_task, workers=3)
    assert set(open_children()) == before


def test_a_model_that_cannot_be_batched_is_trained_in_the_loop_and_said(small_task):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(5, 3))

        def forward(self, x):
            return x @ self.w

    task = fb.Task(model=Own, loss=small_task.loss, clients=small_task.clients, evaluate=small_task.evaluate)
    said = []
    got = run(SERVERS["fedbuff"], task, say=said.append)
    assert len(said) == 1
    assert "one at a time" in said[0]
    assert "Own" in said[0]
    weights, _ = lockstep(SERVERS["fedbuff"], task, CLIENT, 120)
    assert same_arrays(got.weights, weights)


def smooth_convolutions() -> torch.nn.Module:
    nn = torch.nn
    first, second = nn.Conv2d(1, 8, 3, padding=2), nn.Conv2d(8, 8, 3, padding=1)
    one = first, nn.GroupNorm(4, 8), nn.Tanh(), nn.AvgPool2d(2)
    two = second, nn.GroupNorm(8, 8), nn.Tanh()
    return nn.Sequential(*one, *two, nn.Flatten(), nn.Linear(128, 3))


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.lstm = torch.nn.LSTM(8, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.output = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.output(self.lstm(self.embedding(x))[0][:, -1])


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lambda: torch.nn.Linear(6, 3), (6,)),
        (fb.models.mlp((16,), dropout=0.1), (6,)),
        (smooth_convolutions, (1, 6, 6)),
        (Recurrent, None),
    ],
    ids=["logistic regression", "perceptron", "convolutions", "LSTM"],
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_after_200_server_steps_batches_and_the_loop_agree_to_1e5(model, inputs, epochs):
    rng = np.random.default_rng(0)

    def draw(n):
        x = rng.integers(0, 20, (n, 7)) if inputs is None else rng.normal(size=(n, *inputs)).astype(np.float32)
        return x, rng.integers(0, 3, n)

    task = fb.Task(
        model=(lambda: model(6, 3)) if isinstance(model, fb.models.mlp) else model,
        loss=torch.nn.functional.cross_entropy,
        clients=[draw(int(n)) for n in rng.integers(1, 15, 60)],
        evaluate=draw(5),
    )
    server = fb.Server(start=fb.refill(30), buffer_size=5, optimizer=fb.momentum(0.5, 0.5))
    client = fb.LocalSGD(lr=1.0 if model is Recurrent else 0.05, batch_size=6, epochs=epochs)
    said: list[str] = []
    loop, batches = (
        fb.simulate(server, task, client=client, until=fb.server_steps(200), training=fb.Training(batched=b), say=said.append)
        for b in (False, True)
    )
    assert not said
    a, b, start = (
        np.concatenate([w.ravel() for w in weights.values()]).astype(float)
        for weights in (loop.weights, batches.weights, lockstep(server, task, client, 1)[0])
    )
    assert np.linalg.norm(a - start) > 0.01 * np.linalg.norm(a)
    assert np.linalg.norm(a - b) < 1e-5 * np.linalg.norm(a)
    assert same_arrays(loop.trips, batches.trips)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("columns", [3, 5000])
def test_a_row_that_was_written_is_what_every_process_sees(on_disk, columns):
    rows = Rows(4, columns, np.float32, on_disk)
    values = np.arange(columns, dtype=np.float32)
    wait, go = os.pipe()
    child = os.fork()
    if not child:  # forked before it is written
        os.read(wait, 1)
        os._exit(not np.array_equal(rows.matrix[2], 2 * values))
    rows.write(2, values[::-1])
    rows.write(2, 2.0 * values.astype(np.float64))  # any order, any precision
    os.write(go, b"!")
    assert os.waitpid(child, 0)[1] == 0
    assert not rows.matrix[[0, 1, 3]].any()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_process_that_was_not_forked_finds_the_rows_by_their_place(on_disk):
    rows = Rows(4, 5000, np.float32, on_disk)
    place = rows.place()
    code = f"import sys; from fedbuff.sim.shared import Place, found; rows = found({place!r}); rows.matrix[2] = 7"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (rows.matrix[2] == 7).all()
    assert not rows.matrix[[0, 1, 3]].any()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")
def test_rows_are_not_found_where_another_file_has_their_path():
    rows, others = Rows(4, 5000, np.float32), Rows(4, 5000, np.float32)
    mine, other = rows.place(), others.place()
    assert mine and other
    assert shared.found(mine)
    assert shared.found(mine._replace(identity=other.identity)) is None
    assert shared.found(mine._replace(path="/proc/0/fd/0")) is None


def test_a_row_of_the_wrong_length_is_said():
    with pytest.raises(ValueError, match="a row is 5000 numbers, not of shape"):
        Rows(4, 5000, np.float32, on_disk=True).write(0, np.zeros(5001, np.float32))


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="room can't be reserved on this system")
def test_a_disk_that_takes_no_more_is_said_before_anybody_writes_to_it(monkeypatch):
    """Of a mapped file on a full disk, a process dies; so room is made before a row is given out."""
    disk, reserve = 40_000, os.posix_fallocate

    def full(file: int, offset: int, length: int) -> None:
        if offset + length > disk:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(file, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    rows = Rows(4, 5000, np.float32, on_disk=True)
    (first,) = rows.take(1)
    with pytest.raises(ValueError, match=r"can't keep vectors of 20,480 bytes there \(No space left.*; set TMPDIR"):
        rows.take(1)
    rows.give([first])
    assert rows.take(1) == [first]


def test_an_error_is_of_whoever_asks_for_the_work_not_of_who_happens_to_do_it():
    """A trip that no server step comes to use must not end a run, whether this process trained it or another."""

    class Slow:
        def train(self, updates: Any, rows: Any, trips: Any, clients: Any, weights: Any) -> None:
            if trips[0] == 3:
                raise OSError("a client's file")
            time.sleep(0.3)

    pool = workers.Workers(Slow(), 4, 8, np.zeros(2, np.float32), on_disk=False, workers=2)
    try:
        pool.keep(0, np.zeros(2, np.float32))
        for key in (1, 2, 3):  # the other process has two at hand: this one does the third while it waits for the first
            pool.submit(key, Chunk([key], [0], [0], pool.updates.take(1)), key)
        pool.result(1)
        pool.result(2)
        with pytest.raises(OSError, match="a client's file"):
            pool.result(3)
    finally:
        pool.close()
