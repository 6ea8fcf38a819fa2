"""A deployment in real processes on loopback, with TLS and keys as `fedbuff deploy init` makes them: it trains, it survives
kill −9, and strangers are kept out.
"""

import contextlib
import json
import socket
import subprocess
import threading
import time

import httpx
import numpy as np
import pytest

pytest.importorskip("flwr")

import fedbuff as fb
from deployment import Deployment, check_journals, check_replay
from fedbuff.deploy import processes
from fedbuff.deploy.certificates import make_key
from fedbuff.deploy.fleet import RefusedError, connected
from fedbuff.deploy.flower import orders_in, reply
from fedbuff.deploy.gateway import private_key
from fedbuff.deploy.serve import opened
from fedbuff.deploy.wire import Orders, Report, Result
from fedbuff.settings import from_tables
from fedbuff.settings import read as read_settings

pytestmark = [pytest.mark.xdist_group("flower"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

SETTINGS = """
evaluate_every = 200

[task.digits]
clients = 200

[algorithm.fedbuff]
concurrency = 100
buffer_size = 5
lr = 1.0

[client]
lr = 0.1

[until]
accuracy = 0.8
trips = 20_000

[deploy]
deadline = 90.0
checkpoint_every = 2.0
"""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    place = tmp_path_factory.mktemp("deployment")
    with Deployment(place / "d", gateways=4, clients_per_gateway=50, settings=SETTINGS) as made:
        made.start_all()
        yield made


def test_a_run_survives_kills_and_ends_at_its_target(deployment):
    deployment.until(lambda: deployment.updates() > 50, "no update has arrived", 240)
    for name in ("gateway-1", "superlink", "serverapp", "gateway-2"):
        before = deployment.updates()
        deployment.kill(name)
        time.sleep(1.0)
        if name != "serverapp":  # which the keeper has started again
            deployment.start(name)
        deployment.until(lambda n=before: deployment.updates() > n + 200 or deployment.finished(), f"stuck without {name}", 300)
    deployment.until(deployment.finished, "the run is not finished", 600)
    summary = deployment.summary()
    assert summary["stopped_by"] == "reached accuracy 0.8"
    assert summary["strikes"] == {}
    counts = check_journals(deployment)
    assert counts["accepted"] >= summary["server_steps"] * 5
    assert counts["kept"] >= counts["accepted"]
    check_replay(deployment)


# ── strangers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def connect(deployment, *, key=None, authority=None, port=None):
    """Be a gateway for a moment; raises if the SuperLink will not have it, or is not who it should be."""
    host, usual = processes.address(deployment.folder)
    certificates = (authority or deployment.folder / "certificates" / "ca.crt").read_bytes()
    keys, remember = (None, None) if key is None else (private_key(key), key.with_name("node"))
    where = f"{host}:{port or usual}"
    with connected(where, keys=keys, certificates=certificates, remember=remember, patience=3.0) as fleet:
        fleet.receive()
        return fleet.node


@pytest.fixture
def key(deployment):
    """The key of gateway-3, which makes room for us: a node is one process."""
    deployment.until(lambda: deployment.updates() > 0, "no update has arrived", 240)
    deployment.kill("gateway-3")
    yield deployment.folder / "gateways" / "gateway-3" / "key"
    deployment.start("gateway-3")


def test_a_gateway_with_a_registered_key_is_let_in(deployment, key):
    assert connect(deployment, key=key) > 0


def test_a_node_without_a_key_is_refused(deployment):
    with pytest.raises((RefusedError, httpx.HTTPError)):
        connect(deployment)


def test_a_node_with_a_key_that_nobody_registered_is_refused(deployment, tmp_path):
    make_key(tmp_path)
    with pytest.raises((RefusedError, httpx.HTTPError)):
        connect(deployment, key=tmp_path / "key")


def test_a_superlink_with_another_authoritys_certificate_is_refused_by_the_gateway(deployment, key, tmp_path):
    from fedbuff.deploy import init

    other = init.write_folder(tmp_path / "other", gateways=1, clients_per_gateway=2, port=1)
    with pytest.raises(RefusedError, match="certificate is not by"):
        connect(deployment, key=key, authority=other / "certificates" / "ca.crt")


def test_a_message_that_is_tampered_with_on_the_way_is_refused(deployment, key):
    with tampering_proxy(processes.address(deployment.folder), after=900) as (port, tampered):
        with pytest.raises(httpx.HTTPError):
            connect(deployment, key=key, port=port)
        assert tampered.is_set()
    assert connect(deployment, key=key) > 0  # on a wire that leaves messages alone


def test_plain_http_is_not_answered(deployment):
    host, port = processes.address(deployment.folder)
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://{host}:{port}/v1/fleet/pull-messages", timeout=5)


def test_status_of_a_deployment_can_be_asked_for(deployment):
    deployment.until((deployment.run / "status.json").exists, "no status", 240)
    command = [processes.tool("fedbuff"), "deploy", "status", str(deployment.run)]
    done = subprocess.run(command, capture_output=True, text=True, env=deployment.env)
    assert done.returncode == 0, done.stderr
    assert "gateway-1" in done.stdout


@contextlib.contextmanager
def tampering_proxy(target, after):
    """A wire to `target` that flips one bit of what a client sends, after so many bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    tampered, wires, threads = threading.Event(), [listener], []

    def carry(source, sink, flip):
        count = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if flip and count <= after < count + len(data):
                    at = after - count
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
                    tampered.set()
                count += len(data)
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(target)
                wires.extend((client, server))
                for pair in ((client, server, True), (server, client, False)):
                    threads.append(threading.Thread(target=carry, args=pair, daemon=True))
                    threads[-1].start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1], tampered
    finally:
        for wire in wires:
            with contextlib.suppress(OSError):
                wire.shutdown(socket.SHUT_RDWR)
            wire.close()
        for thread in threads:
            thread.join()


# ── with a key, and hostile ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_thousand_hostile_results_over_the_wire_change_nothing_and_are_counted(tmp_path):
    """A gateway with a key of its own answers with a thousand lies: the other one trains as if it were not there."""
    settings = SETTINGS.replace("clients = 200", "clients = 40").replace("concurrency = 100", "concurrency = 10")
    settings = settings.replace("accuracy = 0.8\ntrips = 20_000", "server_steps = 120").replace(
        "checkpoint_every", "strikes = 2000\ncheckpoint_every"
    )
    settings = settings.replace("deadline = 90.0", "deadline = 20.0\nresults_per_minute = 100_000\nmax_norm = 100.0")
    with Deployment(tmp_path / "d", gateways=2, clients_per_gateway=20, settings=settings) as deployment:
        deployment.start("superlink")
        deployment.until(deployment.answers, "the SuperLink does not answer")
        deployment.start("superexec", "keeper")
        lie(deployment, "gateway-2", 1000, other="gateway-1")
        deployment.until(deployment.finished, "the run is not finished", 300)
        summary = deployment.summary()
        assert summary["stopped_by"] == "reached 120 server steps"
        assert set(summary["refused"]) <= {*REASONS, "deadline", "the run is over"}
        assert refused(summary) == 1000
        used = {facts["client"] for facts, _ in deployment.records() if facts["kind"] == "update"}
        assert used <= set(range(20))  # nothing of what the liar said is in the model
        check_replay(deployment)


REASONS = {
    "unknown trip",
    "another client's trip",
    "not finite",
    "norm too large",
    "wrong size",
    "bad number of examples",
    "too late",
}


def refused(summary):
    return sum(count for reason, count in summary["refused"].items() if reason in REASONS)


def lie(deployment, name, count, other):
    """Be the gateway `name`, and answer with so many results none of which is true, until the server has seen them all.

    The gateway `other` comes towards the end: its run would be over before the last lie.
    """
    rng, sent, weights = np.random.default_rng(0), 0, 2410 * 4
    certificates = (deployment.folder / "certificates" / "ca.crt").read_bytes()
    address, key = processes.joined(*processes.address(deployment.folder)), deployment.folder / "gateways" / name / "key"
    until = time.monotonic() + 240

    def seen():
        return refused(json.loads((deployment.folder / "run" / "status.json").read_text())) >= count

    while sent < count:
        assert time.monotonic() < until, deployment.tails()
        try:
            with connected(address, keys=private_key(key), certificates=certificates, patience=5.0) as fleet:
                while sent < count:
                    message = fleet.receive()
                    if message is None:
                        time.sleep(0.3)
                        continue
                    orders = Orders.from_bytes(orders_in(message))
                    ours = [order.trip for order in orders.trips]
                    payloads = (np.full(2410, np.nan, np.float32), np.full(2410, 1e6, np.float32), np.ones(7, np.float32))
                    results = [
                        Result(t, order.client, bytes(payloads[t % 3])) for t, order in zip(ours, orders.trips, strict=True)
                    ]
                    # one report is limited in size, so most of the lies are short
                    while len(results) < 100 + len(ours):
                        trip, client = int(rng.integers(0, 10**6)), int(rng.integers(0, 40))
                        results.append(Result(trip, client, b"" if rng.random() < 0.9 else bytes(weights // 100)))
                    results = results[: count - sent]
                    report = Report(orders.job, ((20, 39),), tuple(results)).to_bytes()
                    fleet.answer(message, reply(message, report))
                    if sent < 0.7 * count <= sent + len(results):
                        deployment.start(other)
                    sent += len(results)
                deployment.until(seen, "lies were lost", 60)
        except RefusedError:
            time.sleep(1.0)  # its key is not registered yet


# ── secure aggregation ───────────────────────────────────────────────────────────────────────────────────────────────


def test_secure_aggregation_over_the_network_is_the_plain_fixed_point_sum(tmp_path):
    """Each sum that came out of the enclave is the sum of the clients' own integers, trained once more here."""
    from fedbuff.deploy.vault import policy_of
    from fedbuff.learn.training import Training
    from fedbuff.learn.work import trainer

    settings = SETTINGS.replace("clients = 200", "clients = 20").replace("concurrency = 100", "concurrency = 8")
    settings = settings.replace("accuracy = 0.8\ntrips = 20_000", "server_steps = 6")
    settings += '\n[secure_aggregation]\nmode = "enclave"\nclip = 2.0\n\n[training]\nbatched = false\n'
    with Deployment(tmp_path / "d", gateways=2, clients_per_gateway=10, settings=settings) as deployment:
        deployment.start_all()
        deployment.until(deployment.finished, "the run is not finished", 300)
        check_replay(deployment)
        chosen = from_tables(read_settings(processes.settings_file(deployment.folder)))
        task = fb.tasks.digits(clients=20)
        train = trainer(task, chosen.client, chosen.seed, Training(batched=False)).train
        books = weights = None
        sealed, opened_sums = [], 0
        for facts, blob in deployment.records():
            if facts["kind"] == "header":
                books = opened(chosen, np.frombuffer(blob, facts["dtype"]), 20, None)[0]
                weights = {0: books.server.weights}
                policy = policy_of(chosen.secure_aggregation, books.server, len(weights[0]), 90.0)
                continue
            if facts["kind"] == "sealed":
                sealed.append((facts["trip"], *books.server.started(facts["trip"])))
            if facts["kind"] == "opened":
                total, version = np.zeros(policy.length, np.int64), facts["version"]
                for trip, client, start in sealed:
                    update = np.empty((1, policy.length), np.float32)
                    train(update, [0], [trip], [client], [weights[start]])
                    total += policy.fixed_point.encode(update[0], policy.weight(start, version))
                np.testing.assert_array_equal(policy.fixed_point.decode(total), np.frombuffer(blob, np.float64))
                sealed, opened_sums = [], opened_sums + 1
            books.apply(facts, blob)
            weights[books.server.version] = np.array(books.server.weights)
    assert opened_sums == 6
