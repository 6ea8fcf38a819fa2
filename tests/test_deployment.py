"""A deployment in real processes on loopback, with TLS and keys as `fedbuff deploy init` makes them: it trains, it survives
kill −9, and strangers are kept out.
"""

import contextlib
import socket
import subprocess
import threading
import time

import httpx
import pytest

pytest.importorskip("flwr")

from deployment import Deployment, check_journals, check_replay
from fedbuff.deploy import processes
from fedbuff.deploy.certificates import make_key
from fedbuff.deploy.fleet import RefusedError, connected
from fedbuff.deploy.gateway import private_key

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
    keys = None if key is None else private_key(key)
    with connected(f"{host}:{port or usual}", keys=keys, certificates=certificates, patience=3.0) as fleet:
        fleet.receive()
        return fleet.node


def test_a_gateway_with_a_registered_key_is_let_in(deployment):
    deployment.kill("gateway-3")  # a node is one process
    (deployment.folder / "gateways" / "gateway-3" / "node").unlink()
    deployment.until(lambda: may_connect(deployment), "the SuperLink still takes it for alive", 90)


def may_connect(deployment):
    try:
        return connect(deployment, key=deployment.folder / "gateways" / "gateway-3" / "key") > 0
    except RefusedError:
        return False


def test_a_node_without_a_key_is_refused(deployment):
    with pytest.raises((RefusedError, httpx.HTTPError)):
        connect(deployment)


def test_a_node_with_a_key_that_nobody_registered_is_refused(deployment, tmp_path):
    make_key(tmp_path)
    with pytest.raises((RefusedError, httpx.HTTPError)):
        connect(deployment, key=tmp_path / "key")


def test_a_superlink_with_another_authoritys_certificate_is_refused_by_the_gateway(deployment, tmp_path):
    from fedbuff.deploy import init

    other = init.write_folder(tmp_path / "other", gateways=1, clients_per_gateway=2, port=1)
    key = deployment.folder / "gateways" / "gateway-3" / "key"
    with pytest.raises((RefusedError, httpx.HTTPError)):
        connect(deployment, key=key, authority=other / "certificates" / "ca.crt")


def test_a_message_that_is_tampered_with_on_the_way_is_refused(deployment):
    key = deployment.folder / "gateways" / "gateway-3" / "key"
    with tampering_proxy(processes.address(deployment.folder), after=3000) as (port, tampered):
        with pytest.raises((RefusedError, httpx.HTTPError)):
            for _ in range(50):
                connect(deployment, key=key, port=port)
                assert not tampered.is_set()
        assert tampered.is_set()


def test_plain_http_is_not_answered(deployment):
    host, port = processes.address(deployment.folder)
    with pytest.raises(httpx.HTTPError):
        httpx.post(f"http://{host}:{port}/v1/fleet/pull-messages", timeout=5)


def test_status_of_a_deployment_can_be_asked_for(deployment):
    command = [processes.tool("fedbuff"), "deploy", "status", str(deployment.run)]
    done = subprocess.run(command, capture_output=True, text=True, env=deployment.env)
    assert done.returncode == 0, done.stderr
    assert "gateway-1" in done.stdout


@contextlib.contextmanager
def tampering_proxy(target, after):
    """A wire to `target` that flips one bit of what a client sends, after so many bytes."""
    listener = socket.create_server(("127.0.0.1", 0))
    tampered = threading.Event()

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
                for pair in ((client, server, True), (server, client, False)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1], tampered
    finally:
        listener.close()
