"""Secure aggregation in a run: masked or in the clear, the weights are the same bit for bit."""

import signal
import subprocess
import time

import numpy as np
import pytest

import fedbuff as fb
from conftest import command

CLIENT = fb.LocalSGD(lr=0.3, batch_size=8)
PRIVACY = fb.Privacy(clip=2.0, delta=1e-5, noise_multiplier=0.05, max_participations=20, mechanism="tree", noise="seeded")


@pytest.fixture(scope="module")
def task():
    return fb.tasks.digits(clients=150, model=fb.models.linear())


def weights(task, secure, buffer_size=5, steps=25, **how):
    server = fb.Server(start=fb.refill(4 * buffer_size), buffer_size=buffer_size, optimizer=fb.momentum(1.0, 0.5))
    how = {"client": CLIENT, "until": fb.server_steps(steps), "seed": 2, "workers": 1, **how}
    found = fb.simulate(server, task, secure_aggregation=secure, **how)
    return np.concatenate([tensor.ravel() for tensor in found.weights.values()]), found


@pytest.mark.parametrize("mode", ["enclave", "helpers"])
@pytest.mark.parametrize("privacy", [None, PRIVACY], ids=["", "private"])
def test_masks_change_nothing(mode, privacy, task):
    """Clients drop out between messages, and privacy's noise is added inside; stalenesses are mixed, four buffers in flight."""
    plain, first = weights(task, fb.SecureAggregation("plain", 2.0, like=mode), privacy=privacy)
    masked, second = weights(task, fb.SecureAggregation(mode, 2.0, dropout=0.2), privacy=privacy)
    assert np.array_equal(plain, masked)
    assert len(np.unique(first.trips["staleness"])) > 4
    assert all(np.array_equal(column, second.trips[name]) for name, column in first.trips.items())


def test_fixed_point_is_near_what_floats_give(task):
    floats, _ = weights(task, None)
    fixed, _ = weights(task, fb.SecureAggregation("plain", clip=100.0))
    assert fixed == pytest.approx(floats, abs=1e-5)


def test_updates_that_are_not_finite_are_refused_as_without(task):
    """A client whose examples are infinite has an update that is not a number: nobody sends it."""
    broken = [(x + (np.float32(np.inf) if client == 3 else np.float32(0)), y) for client, (x, y) in enumerate(task.clients)]
    bad = fb.Task(model=task.model, loss=task.loss, clients=broken, evaluate=task.splits["test"])
    for mode in ("plain", "enclave", "helpers"):
        _, found = weights(bad, fb.SecureAggregation(mode, 100.0), steps=40)
        outcome = found.trips["outcome"][found.trips["client"] == 3]
        assert len(outcome) and set(outcome) <= {"failed", "unused"}
        assert found.summary["server_steps"] == 40


def test_staler_updates_than_the_table_of_weights_are_late(task):
    _, found = weights(task, fb.SecureAggregation("plain", 2.0, max_staleness=3))
    used = found.trips["outcome"] == "used"
    assert found.trips["staleness"][used].max() == 3 and "late" in found.trips["outcome"]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (fb.Server(start=fb.refill(8), buffer_size=4, weight_by="examples"), "weight_by='examples': a masked update"),
        (fb.Server(start=fb.refill(8), buffer_size=4, mixing=True), "mixing=True: a masked update"),
        (fb.Server(start=fb.cohort(4, poisson=True), buffer_size=4), "poisson=True: a secure buffer"),
        (fb.Server(start=fb.refill(8), buffer_size=1), "buffer_size=1: the sum of one update hides nothing"),
    ],
)
def test_what_can_not_be_masked_is_refused(server, reason, task):
    with pytest.raises(ValueError, match=reason):
        fb.simulate(
            server,
            task,
            client=CLIENT,
            until=fb.trips(10),
            secure_aggregation=fb.SecureAggregation("enclave", 1.0),
        )


def test_clients_clip_once(task):
    with pytest.raises(ValueError, match="make them equal"):
        weights(task, fb.SecureAggregation("enclave", 1.0), privacy=PRIVACY)


SETTINGS = """
[task.digits]
clients = 200
[algorithm.fedbuff]
concurrency = 20
buffer_size = 5
[client]
lr = 0.3
[until]
server_steps = 300
[secure_aggregation]
mode = "MODE"
clip = 2.0
dropout = 0.1
"""


def test_a_killed_run_goes_on_with_new_parties_and_ends_the_same(tmp_path):
    file, plain = tmp_path / "secure.toml", tmp_path / "plain.toml"
    file.write_text(SETTINGS.replace("MODE", "enclave"))
    plain.write_text(SETTINGS.replace("MODE", "plain"))
    out = tmp_path / "killed"
    start = command(["run", file, "--out", out, "--resume", "--quiet", "--checkpoint-every", "0.05", "--workers", "1"])
    for wait in (0.1, 0.5):
        process = subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not (out / "checkpoint" / "state.safetensors").exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(start, check=True, capture_output=True)
    subprocess.run(command(["run", plain, "--out", tmp_path / "whole", "--quiet"]), check=True, capture_output=True)
    for name in ("weights.safetensors", "trips.parquet", "metrics.jsonl"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
