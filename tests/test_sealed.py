"""Secure aggregation and differential privacy over the deployment's transport: right to the bit, whoever is killed."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from test_replay import TABLES, Blown, Wires, serve_to_the_end

pytest.importorskip("cryptography")

from fedbuff.core.events import OpenBuffer, StartTrip, StepTaken, SumOpened, UpdateArrived, UpdateRejected, UpdateSealed
from fedbuff.core.server import Server
from fedbuff.core.starting import refill
from fedbuff.deploy.journal import read
from fedbuff.deploy.replay import first_difference, replay
from fedbuff.deploy.sealing import Sealing
from fedbuff.deploy.serve import serve
from fedbuff.deploy.vault import policy_of
from fedbuff.deploy.wire import Report
from fedbuff.report.finished import read_weights
from fedbuff.report.run import load
from fedbuff.settings import from_tables
from fedbuff.sim.secure import SecureAggregation

SECURE = {**TABLES, "until": {"server_steps": 12}, "secure_aggregation": {"mode": "enclave", "clip": 2.0}}
PLAIN = {**SECURE, "secure_aggregation": {"mode": "plain", "clip": 2.0}}
PRIVATE = {"clip": 2.0, "delta": 1e-3, "noise_multiplier": 0.2, "mechanism": "tree", "max_participations": 3, "noise": "seeded"}


def weights_of(folder):
    return read_weights(folder)


# ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def sealed_server():
    server = Server(start=refill(4), buffer_size=2, weights=np.zeros(3, np.float32), clients=9, sealed=True)
    return server, [c.trip for c in server.begin() if isinstance(c, StartTrip)]


def test_a_sealed_server_steps_when_it_is_told_the_sum_and_not_before():
    server, trips = sealed_server()
    assert not any(isinstance(c, OpenBuffer) for c in server.handle(UpdateSealed(trips[0])))
    assert server.handle(UpdateSealed(trips[1]))[0] == OpenBuffer(0)
    assert server.version == 0
    stepped = server.handle(SumOpened(0, np.array([2.0, 4.0, 6.0])))
    assert isinstance(stepped[0], StepTaken)
    np.testing.assert_array_equal(server.weights, np.float32([-1, -2, -3]))


def test_a_full_sealed_buffer_takes_no_more():
    server, trips = sealed_server()
    for trip in trips[:2]:
        server.handle(UpdateSealed(trip))
    assert isinstance(server.handle(UpdateSealed(trips[2]))[0], UpdateRejected)
    assert server.buffered == 2


def test_a_deployment_accepts_what_both_server_and_policy_do():
    secure = SecureAggregation("enclave", clip=1.0, max_staleness=5)
    limits = [secure.stalest(Server(start=refill(4), buffer_size=2, max_staleness=most)) for most in (None, 2, 9)]
    assert limits == [5, 2, 5]


def test_a_sealed_server_looks_at_no_update_and_an_open_one_takes_no_sealed_one():
    server, trips = sealed_server()
    assert isinstance(server.handle(UpdateArrived(trips[0], np.ones(3)))[0], UpdateRejected)
    other = Server(start=refill(4), buffer_size=2, weights=np.zeros(3, np.float32), clients=9)
    first = next(c for c in other.begin() if isinstance(c, StartTrip))
    assert isinstance(other.handle(UpdateSealed(first.trip))[0], UpdateRejected)


@pytest.mark.parametrize("total", [np.array([1.0, np.nan, 0.0]), np.ones(2)])
def test_a_sum_that_can_not_be_is_an_error(total):
    server, trips = sealed_server()
    for trip in trips[:2]:
        server.handle(UpdateSealed(trip))
    with pytest.raises(ValueError, match="finite numbers"):
        server.handle(SumOpened(0, total))


def test_a_sum_of_another_version_is_an_error():
    server, _ = sealed_server()
    with pytest.raises(ValueError, match="no full, sealed buffer"):
        server.handle(SumOpened(0, np.zeros(3)))


# ── over the transport ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return serve_to_the_end(Wires(tmp_path_factory.mktemp("plain"), PLAIN), PLAIN)


@pytest.fixture(scope="module")
def enclave(tmp_path_factory):
    return serve_to_the_end(Wires(tmp_path_factory.mktemp("enclave"), SECURE), SECURE)


def test_masked_updates_add_up_to_the_plain_fixed_point_sum(plain, enclave):
    assert first_difference(weights_of(enclave), weights_of(plain)) is None


def test_no_update_and_no_part_of_one_is_in_the_clear_on_the_server(enclave, plain):
    words = [np.frombuffer(blob[-4 * 650 :], "<u4") for record, blob in read(enclave / "journal") if record["kind"] == "masked"]
    assert len(words) == 12 * 3
    high = np.concatenate(words) >> 28  # of a number on the grid nearly all are 0 or 15; of a uniform one, any
    counts = np.bincount(high, minlength=16) / len(high)
    assert abs(counts - 1 / 16).max() < 0.01
    clear = [np.frombuffer(blob, "<u4") for record, blob in read(plain / "journal") if record["kind"] == "masked"]
    assert np.isin(np.concatenate(clear) >> 28, (0, 15)).mean() > 0.9


def test_replay_needs_no_enclave(enclave):
    done = replay(enclave)
    assert first_difference(done.flat.named(np.array(done.weights)), weights_of(enclave)) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_is_killed_loses_no_masked_update(tmp_path, seed):
    """The order of arrival may change with a kill, so the journal is the oracle: its sums, and each trip in one of them."""
    wires = Wires(tmp_path, SECURE)
    run = serve_to_the_end(wires, SECURE, kills=4, seed=seed)
    done = replay(run)
    assert first_difference(done.flat.named(np.array(done.weights)), weights_of(run)) is None
    sealed = [record["trip"] for record, _ in read(run / "journal") if record["kind"] == "sealed"]
    assert len(sealed) == len(set(sealed)) == 12 * 3
    assert not [record for record, _ in read(run / "journal") if record["kind"] == "failed"]


def test_a_trusted_aggregator_that_is_killed_stops_the_server_and_both_go_on(tmp_path):
    wires = Wires(tmp_path, SECURE)
    wires.fuse = 60
    with pytest.raises(Blown):
        serve(from_tables(SECURE), wires.run, wires)
    killed = []

    def pull(messages, original=wires.pull):
        if len(killed) < 1:
            for child in children():
                os.kill(child, signal.SIGKILL)
                killed.append(child)
        return original(messages)

    wires.fuse, wires.pull = None, pull
    with pytest.raises(ConnectionError, match="trusted aggregator"):
        serve(from_tables(SECURE), wires.run, wires)
    run = serve_to_the_end(wires, SECURE)
    assert first_difference((done := replay(run)).flat.named(np.array(done.weights)), weights_of(run)) is None


def children():
    """The trusted aggregators that this process has started."""
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found if "fedbuff.trusted" in Path(f"/proc/{pid}/cmdline").read_text()]


def test_privacy_and_secure_aggregation_go_together(tmp_path):
    both = {**SECURE, "privacy": PRIVATE}
    run = serve_to_the_end(Wires(tmp_path / "both", both), both, kills=2)
    done = replay(run)
    assert first_difference(done.flat.named(np.array(done.weights)), weights_of(run)) is None
    quiet = serve_to_the_end(Wires(tmp_path / "quiet", PLAIN), PLAIN)
    assert first_difference(weights_of(run), weights_of(quiet)) is not None  # the noise is in it


def test_privacy_over_the_transport_is_the_servers_and_replays(tmp_path):
    private = {**TABLES, "until": {"server_steps": 12}, "privacy": PRIVATE}
    run = serve_to_the_end(Wires(tmp_path, private), private, kills=3)
    done = replay(run)
    assert first_difference(done.flat.named(np.array(done.weights)), weights_of(run)) is None
    took_part = np.bincount(done.books.trips.admitted()[0])
    assert took_part.max() <= 3


def test_a_masked_update_that_nobody_asked_for_is_counted_and_not_used(tmp_path):
    wires, forward = Wires(tmp_path, SECURE), []

    def eager(data, honest=wires.work[1]):
        report = Report.from_bytes(honest(data))
        if report.results and not forward:
            forward.append(replace(report.results[0], payload=b"not asked for"))
            report = replace(report, results=(forward[0], *report.results[1:]))
        return report.to_bytes()

    wires.work[1] = eager
    run = serve_to_the_end(wires, SECURE)
    summary = load(run).summary
    assert summary["refused"]["not asked for"] == 1
    assert summary["server_steps"] == 12
    assert "masked" not in {record["kind"] for record, blob in read(run / "journal") if blob == b"not asked for"}


def test_helpers_are_not_offered_over_a_network(tmp_path):
    tables = {**SECURE, "secure_aggregation": {"mode": "helpers", "clip": 2.0}}
    with pytest.raises(ValueError, match="over a network there are 'enclave' and 'plain'"):
        serve(from_tables(tables), tmp_path / "run", None)


def test_poisson_cohorts_are_not_served(tmp_path):
    """Who is not there can't be in a cohort: it would be no Poisson sample, and its amplification would not hold."""
    tables = {**TABLES, "server": {"start": {"cohort": {"size": 4, "poisson": True}}, "buffer_size": 4}}
    with pytest.raises(ValueError, match="no Poisson sample"):
        from_tables(tables)
    del tables["deploy"]
    with pytest.raises(ValueError, match="no Poisson sample"):
        serve(from_tables(tables), tmp_path / "run", None)


def test_a_gateway_masks_for_the_policy_of_its_own_settings_and_no_other(tmp_path):
    made = from_tables(SECURE)
    sealing = Sealing(made.secure_aggregation, made.server, tmp_path)
    own = policy_of(made.secure_aggregation, made.server, 40, 600.0)
    assert sealing._acceptable(own)
    assert not sealing._acceptable(replace(own, weights=own.weights[1:]))
    assert sealing._acceptable(replace(own, weights=(1.0, *(weight * (1 - 1e-15) for weight in own.weights[1:]))))
    for other in (
        {"weights": (1.0, *(0.001 for _ in own.weights[1:]))},  # one fresh update would stand out of the sum
        {"clip": own.clip / 2},
        {"buffer_size": own.buffer_size - 1},
        {"noise": "increments"},
        {"participations": 3},
        {"scale": own.scale / 2},
    ):
        assert not sealing._acceptable(replace(own, **other)), other
