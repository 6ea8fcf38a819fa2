"""Differential privacy in a run: the simulator is the server of `core/` with its protection, and never spends twice."""

import json
import os
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

import fedbuff as fb
from conftest import command
from fedbuff.core.random import seed_for
from fedbuff.core.schedule import Schedule, binomial
from fedbuff.privacy.ledger import Ledger
from fedbuff.privacy.plan import plan
from fedbuff.privacy.protection import protect
from lockstep import lockstep

CLIENT = fb.LocalSGD(lr=0.3, batch_size=8)
PRIVACY = fb.Privacy(clip=0.2, delta=1e-5, noise_multiplier=0.4, max_participations=3, min_separation=2, noise="seeded")
FEDBUFF = fb.Server(start=fb.refill(8), buffer_size=4, optimizer=fb.momentum(1.0, 0.5))
SAMPLED = fb.Server(start=fb.cohort(4, poisson=True), buffer_size=4, weigh=fb.constant(1.0))


@pytest.fixture(scope="module")
def task():
    return fb.tasks.digits(clients=40, model=fb.models.linear())


def run(server, task, privacy, steps=20, **how):
    return fb.simulate(server, task, client=CLIENT, until=fb.server_steps(steps), privacy=privacy, seed=3, workers=1, **how)


def equal(a, b):
    return all(np.array_equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("mechanism", ["tree", "tree-honaker", "blt", "gaussian", "sampled"])
def test_a_private_run_is_what_lockstep_gives(mechanism, task):
    """Bit for bit: the same clips, the same limits, the same noise at the same steps."""
    server, changes = FEDBUFF, {"mechanism": mechanism}
    if mechanism == "sampled":
        server, changes = SAMPLED, {"mechanism": "gaussian", "max_participations": None, "min_separation": 1}
    privacy = fb.Privacy(**{**vars(PRIVACY), **changes})
    found = run(server, task, privacy, training=fb.Training(batched=False), dropout=0.1)
    ended = found.summary["trips"]

    def protection(clients, weights):
        plan = privacy.plan(server, clients, server_steps=20)
        return protect(plan, clients, weights, seed_for(3, "noise"), seeded=True)

    weights, trips = lockstep(server, task, CLIENT, ended, seed=3, protect=protection, dropout=0.1)
    assert equal(found.weights, weights)
    for name, column in trips.items():
        assert np.array_equal(column, found.trips[name]), name
    assert not equal(found.weights, run(server, task, None, training=fb.Training(batched=False), dropout=0.1).weights)


def test_with_a_wide_clip_and_hardly_any_noise_it_is_the_run_without(task):
    wide = fb.Privacy(clip=1e3, delta=1e-5, noise_multiplier=1e-10, max_participations=1000, noise="seeded")
    private, plain = run(FEDBUFF, task, wide), run(FEDBUFF, task, None)
    for name, tensor in plain.weights.items():
        assert private.weights[name] == pytest.approx(tensor, abs=1e-6)


def test_no_step_moves_the_model_further_than_clipped_updates_can(task):
    quiet = fb.Privacy(clip=0.05, delta=1e-5, noise_multiplier=1e-7, max_participations=1000, noise="seeded")
    server = fb.Server(start=fb.refill(8), buffer_size=4)
    before, after = run(server, task, quiet, steps=6), run(server, task, quiet, steps=7)
    moved = np.concatenate([(after.weights[name] - tensor).ravel() for name, tensor in before.weights.items()])
    assert 0.0 < np.linalg.norm(moved) <= 0.05


def test_a_run_that_min_separation_ends_says_so(task):
    apart = fb.Privacy(clip=0.5, delta=1e-5, noise_multiplier=1.0, max_participations=3, min_separation=30, noise="seeded")
    found = run(FEDBUFF, task, apart, steps=1000)
    assert found.summary["server_steps"] < 30
    assert "min_separation" in found.summary["stopped_by"]


def test_a_poisson_cohort_of_those_who_are_there_is_refused(task):
    sampled = fb.Privacy(clip=0.5, delta=1e-5, noise_multiplier=1.0, mechanism="gaussian", noise="seeded")
    server = fb.Server(start=fb.cohort(8, poisson=True), buffer_size=8)
    with pytest.raises(ValueError, match="no Poisson sample"):
        run(server, task, sampled, steps=3, availability=fb.windows(10.0, 5.0))
    run(server, task, sampled, steps=3, availability=fb.windows(10.0, 10.0))


def test_clients_take_part_as_often_as_they_may_and_then_the_run_is_over(task):
    found = run(FEDBUFF, task, PRIVACY, steps=1000)
    assert found.summary["stopped_by"].startswith("every client has taken part as often as it may")
    used = found.trips["outcome"] == "used"
    admitted = used | (found.trips["outcome"] == "unused")
    times = np.bincount(found.trips["client"][admitted], minlength=40)
    assert times.max() == 3 and found.summary["server_steps"] == used.sum() / 4
    for client in range(40):
        steps = np.sort(found.trips["end_version"][admitted & (found.trips["client"] == client)])
        assert (np.diff(steps) >= 2).all()
    assert found.summary["privacy"]["epsilon"] < found.summary["privacy"]["epsilon_at_horizon"]


@pytest.mark.parametrize(
    ("start", "how"), [(fb.arrivals(concurrency=8), {}), (fb.refill(8), {"availability": fb.windows(10.0, 3.0)})]
)
def test_a_run_whose_clients_are_used_up_ends_with_its_last_trip_though_somebody_may_look_again(start, how, task):
    once = fb.Privacy(clip=0.2, delta=1e-5, noise_multiplier=0.4, max_participations=1, noise="seeded")
    found = run(fb.Server(start=start, buffer_size=4), task, once, steps=1000, **how)
    assert found.summary["stopped_by"].startswith("every client has taken part as often as it may")
    assert found.summary["server_steps"] == 10
    assert found.summary["virtual_time"] == found.trips["end_time"].max()


def test_a_server_without_noise_left_refuses_updates_and_keeps_its_promises():
    plan = fb.Privacy(clip=0.2, delta=1e-5, noise_multiplier=0.4, max_participations=3, noise="seeded", horizon=2)
    settings = {"start": fb.refill(4), "buffer_size": 2}
    protection = protect(plan.plan(fb.Server(**settings), 20), 20, 3, 1, seeded=True)
    server = fb.Server(**settings, weights=np.zeros(3), clients=20, protection=protection)
    trips = [command.trip for command in server.begin()]
    for _ in range(10):
        commands = server.handle(fb.UpdateArrived(trips.pop(0), np.ones(3)))
        trips += [command.trip for command in commands if isinstance(command, fb.StartTrip)]
    assert server.version == 2
    assert server.exhausted
    assert server.buffered == 0
    assert "horizon" in commands[0].reason


def test_epsilon_grows_and_ends_at_the_horizon(task):
    found = run(FEDBUFF, task, fb.Privacy(clip=0.2, delta=1e-5, epsilon=4.0, max_participations=2, noise="seeded"))
    spent = [m["epsilon"] for m in found.metrics]
    assert spent[0] == 0.0 and spent == sorted(spent) and spent[-1] == pytest.approx(4.0)
    assert found.summary["privacy"]["epsilon"] == pytest.approx(4.0)
    assert "epsilon" in str(found) and "seeded" in found.summary["privacy"]["noise"]


def test_a_run_ends_at_its_horizon(task):
    privacy = fb.Privacy(**{**vars(PRIVACY), "horizon": 5})
    assert run(FEDBUFF, task, privacy, steps=1000).summary["server_steps"] == 5


@pytest.mark.parametrize(
    ("server", "change", "reason"),
    [
        (fb.Server(start=fb.refill(8), buffer_size=4, weigh=lambda staleness: 1.0 + staleness), {}, "a weight above 1"),
        (fb.Server(start=fb.refill(8), buffer_size=4, weight_by="examples"), {}, "weight_by"),
        (fb.Server(start=fb.refill(8), buffer_size=4, mixing=True), {}, "mixing=True"),
        (fb.Server(start=fb.refill(8), buffer_size=4), {"max_participations": None}, "max_participations: missing"),
        (fb.Server(start=fb.cohort(4), buffer_size=4), {"max_participations": None}, "max_participations: missing"),
        (SAMPLED, {"mechanism": "tree", "max_participations": None}, "amplification by sampling"),
        (SAMPLED, {"mechanism": "gaussian", "max_participations": None}, r"privacy\.min_separation=2.*drawn more often"),
    ],
)
def test_what_the_promise_would_not_hold_for_is_refused(server, change, reason, task):
    with pytest.raises(ValueError, match=reason):
        run(server, task, fb.Privacy(**{**vars(PRIVACY), **change}))


def test_a_horizon_is_needed(task):
    with pytest.raises(ValueError, match=r"privacy\.horizon: missing"):
        fb.simulate(FEDBUFF, task, client=CLIENT, until=fb.accuracy(0.9), privacy=PRIVACY)


# ── Poisson cohorts ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_poisson_cohorts_are_binomial_and_everybody_is_as_likely():
    schedule = Schedule(fb.cohort(30, poisson=True), 30, clients=200, seed=1)
    sizes, seen = [], np.zeros(200)
    trips = schedule.begin(0.0)
    for _ in range(3000):
        clients = [schedule.in_flight[trip][0] for trip in trips]
        assert len(set(clients)) == len(clients)
        sizes.append(len(trips))
        seen[clients] += 1
        for trip in trips:
            schedule.arrived(trip)
        assert schedule.full()
        schedule.step()
        trips = schedule.start_trips(0.0)
    q = 30 / 200
    assert np.mean(sizes) == pytest.approx(200 * q, abs=5 * np.sqrt(200 * q * (1 - q) / 3000))
    assert np.var(sizes) == pytest.approx(200 * q * (1 - q), rel=0.12)
    assert seen / 3000 == pytest.approx(q, abs=5 * np.sqrt(q * (1 - q) / 3000))


@pytest.mark.parametrize(("n", "p"), [(1000, 0.01), (10, 0.5), (660_120, 1000 / 660_120), (3, 0.999), (7, 1.0)])
def test_binomial_is_the_inverse_of_its_distribution(n, p):
    from scipy import stats

    uniform = np.random.default_rng(0).random(500)
    assert [binomial(float(u), n, p) for u in uniform] == stats.binom.ppf(uniform, n, p).astype(int).tolist()


def test_a_cohort_that_nobody_is_in_is_a_step_of_noise_alone(task):
    """Two of forty on average: one cohort in eight is empty."""
    server = fb.Server(start=fb.cohort(2, poisson=True), buffer_size=2, weigh=fb.constant(1.0))
    privacy = fb.Privacy(clip=0.2, delta=1e-5, noise_multiplier=0.5, mechanism="gaussian", noise="seeded", horizon=60)
    found = run(server, task, privacy, steps=60, dropout=0.2)
    used = found.trips["server_step"][found.trips["outcome"] == "used"]
    assert found.summary["server_steps"] == 60 and len(np.unique(used)) < 60


def test_a_poisson_cohort_is_divided_by_its_mean_size_without_privacy_too(task):
    """An empty one then is a step of nothing, not of 0 / 0."""
    server = fb.Server(start=fb.cohort(2, poisson=True), buffer_size=2, weigh=fb.constant(1.0))
    found = run(server, task, None, steps=40, training=fb.Training(batched=False))
    assert found.summary["server_steps"] == 40
    weights, _ = lockstep(server, task, CLIENT, found.summary["trips"], seed=3)
    assert equal(found.weights, weights)


def test_a_poisson_cohort_is_not_weighted_by_examples():
    with pytest.raises(ValueError, match="use 'uniform'"):
        fb.Server(start=fb.cohort(2, poisson=True), buffer_size=2, weight_by="examples")


def test_over_selection_and_poisson_exclude_each_other():
    with pytest.raises(ValueError, match="would depend on speed"):
        fb.cohort(10, over_selection=0.3, poisson=True)


# ── resuming ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = """
[task.digits]
clients = 300
[algorithm.fedbuff]
concurrency = 20
buffer_size = 5
[client]
lr = 0.3
[until]
server_steps = 400
[privacy]
noise_multiplier = 0.5
delta = 1e-5
clip = 0.3
max_participations = 30
min_separation = 3
mechanism = "MECHANISM"
"""


@pytest.mark.parametrize("mechanism", ["tree", "tree-honaker", "blt"])
def test_a_killed_private_run_goes_on_with_the_same_noise(mechanism, tmp_path):
    """Kill −9 at some moments, also between a sum and its release: each step's noise is drawn from (key, step) only."""
    file = tmp_path / "private.toml"
    file.write_text(SETTINGS.replace("MECHANISM", mechanism))
    out, whole = tmp_path / "killed", tmp_path / "whole"
    start = command(["run", file, "--out", out, "--resume", "--quiet", "--checkpoint-every", "0.05", "--workers", "1"])
    kills = 0
    for wait in (0.15, 0.4, 0.8):
        process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (out / "checkpoint" / "state.safetensors").exists() and process.poll() is None:
            time.sleep(0.01)
        if not whole.exists():  # the same key, and nothing else
            whole.mkdir()
            shutil.copy(out / "noise.key", whole / "noise.key")
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills
    assert (out / "noise.key").stat().st_mode & 0o077 == 0
    subprocess.run(start, check=True, capture_output=True)
    subprocess.run(command(["run", file, "--out", whole, "--quiet", "--workers", "1"]), check=True, capture_output=True)
    for name in ("weights.safetensors", "trips.parquet", "metrics.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert not (out / "noise.key").exists() and not (out / "checkpoint" / "state.safetensors").exists()
    (out / "noise.key").write_bytes(bytes(32))  # as if it had been killed right before it was deleted
    subprocess.run(start, check=True, capture_output=True)
    assert not (out / "noise.key").exists()
    assert "secret key" in json.loads((out / "summary.json").read_text())["privacy"]["noise"]
    other = tmp_path / "other"
    subprocess.run(command(["run", file, "--out", other, "--quiet", "--workers", "1"]), check=True, capture_output=True)
    assert (other / "weights.safetensors").read_bytes() != (whole / "weights.safetensors").read_bytes()


def test_what_noise_could_be_learned_from_is_its_owners_only(tmp_path):
    modes = {}

    def look(status):
        for path in (tmp_path / "r" / "noise.key", tmp_path / "r" / "checkpoint"):
            modes[path.name] = path.stat().st_mode & 0o077

    before = os.umask(0o022)
    try:
        privacy = fb.Privacy(clip=1.0, noise_multiplier=1.0, delta=1e-5, max_participations=1)
        server = fb.Server(start=fb.refill(4), buffer_size=2, weigh=fb.constant(1.0))
        task = fb.tasks.digits(clients=50)
        how = {"client": fb.LocalSGD(lr=0.1), "until": fb.server_steps(3), "privacy": privacy, "workers": 1}
        fb.simulate(server, task, out=tmp_path / "r", progress=look, **how)
    finally:
        os.umask(before)
    assert modes == {"noise.key": 0, "checkpoint": 0}


def test_a_run_without_its_key_does_not_go_on(tmp_path):
    file = tmp_path / "private.toml"
    file.write_text(SETTINGS.replace("MECHANISM", "blt"))
    out = tmp_path / "killed"
    start = command(["run", file, "--out", out, "--resume", "--quiet", "--workers", "1"])
    process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (out / "checkpoint" / "state.safetensors").exists():
        time.sleep(0.01)
    process.kill()
    process.wait()
    (out / "noise.key").unlink()
    found = subprocess.run(start, capture_output=True, text=True)
    assert found.returncode == 2 and "noise.key is missing" in found.stderr and "Traceback" not in found.stderr


def test_the_ledger_can_be_rewritten_from_what_was_admitted():
    noted, rewritten = (Ledger(5, max_participations=3, min_separation=2) for _ in range(2))
    admitted = [(0, 0), (3, 1), (0, 2), (4, 2), (0, 7)]
    for client, step in admitted:
        assert noted.admit(client, step) is None
    clients, steps = (np.array(column) for column in zip(*admitted, strict=True))
    rewritten.admit(1, 5)
    rewritten.rewrite(clients, steps)
    assert [rewritten.refusal(client, 8) for client in range(5)] == [noted.refusal(client, 8) for client in range(5)]


def test_a_promise_that_can_not_be_kept_is_named_by_its_path():
    server = fb.Server(start=fb.refill(4), buffer_size=2)
    with pytest.raises(ValueError, match=r"^privacy\.epsilon=-6: expected a number > 0"):
        fb.Privacy(clip=1.0, delta=1e-5, epsilon=-6, max_participations=1).plan(server, 10, server_steps=5)
    for noise in (1e-300, 1e300):
        with pytest.raises(ValueError, match=r"^privacy\.noise_multiplier=1e.300: expected a number >= 1e-100"):
            fb.Privacy(clip=1.0, delta=1e-5, noise_multiplier=noise, max_participations=1).plan(server, 10, server_steps=5)


@pytest.mark.parametrize(
    ("mode", "whom"),
    [
        (None, "It trusts the server, which sees the updates and adds the noise."),
        ("plain", "It trusts the server, which sees the updates and adds the noise."),
        ("helpers", "It trusts the server, which sees the sum of each buffer and adds the noise."),
        ("enclave", "It trusts the trusted aggregator, which adds the noise"),
    ],
)
def test_epsilon_says_whom_it_trusts(mode, whom, task):
    pytest.importorskip("cryptography")
    how = {} if mode is None else {"secure_aggregation": fb.SecureAggregation(mode, clip=0.2)}
    server = fb.Server(start=fb.refill(10), buffer_size=5)
    assert whom in run(server, task, PRIVACY, steps=2, **how).summary["privacy"]["limits"]


def test_weights_that_round_more_coarsely_than_float32_are_not_protected():
    server = fb.Server(start=fb.refill(2), buffer_size=1, weigh=fb.constant(1.0))
    safe = protect(
        plan("tree", clip=1.0, buffer_size=1, horizon=8, noise_multiplier=1.0, delta=1e-5, max_participations=1), 9, 4, 0, True
    )
    server.bind(np.zeros(4, np.float32), 9, protection=safe)
    with pytest.raises(ValueError, match=r"float16.*longer than clip"):
        server.bind(np.zeros(4, np.float16), 9, protection=safe)
