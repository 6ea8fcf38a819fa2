"""`fedbuff doctor`: it is content with what `deploy init` wrote, and finds each thing that was broken since."""

import argparse
import datetime
import json
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest

from fedbuff.deploy import init, processes
from fedbuff.deploy.doctor.certificates import check_certificates
from fedbuff.deploy.doctor.command import examine, parser
from fedbuff.deploy.doctor.environment import check_environment, check_flower
from fedbuff.deploy.doctor.folder import check_host
from fedbuff.deploy.doctor.keys import check_keys
from fedbuff.deploy.doctor.settings import check_clients, check_deadline, check_disk, check_outcomes
from fedbuff.deploy.doctor.superlink import check_command, check_superlink
from fedbuff.deploy.settings import Deployment
from fedbuff.toml import SettingsError

pytest.importorskip("cryptography")
pytest.importorskip("flwr")
NOW = datetime.datetime.now(datetime.UTC)
GB = 10**9


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return init.write_folder(tmp_path_factory.mktemp("made") / "d", gateways=2, clients_per_gateway=3, port=21986)


@pytest.fixture
def folder(made, tmp_path):
    """A deployment to break: a copy, since keys take a moment to make."""
    copy = tmp_path / "d"
    shutil.copytree(made, copy)
    return init.write_folder(copy, force=True)


def levels(findings):
    return {finding.level for finding in findings}


def examined(folder):
    return examine(folder, {"PATH": "/bin"})


def test_a_new_deployment_is_well(folder):
    found = [f for f in examined(folder) if f.about not in ("folder", "SuperLink")]
    assert levels(found) == {"ok"}, [f for f in found if f.level != "ok"]
    assert {f.about for f in examined(folder) if f.level == "warning"} <= {"folder", "SuperLink"}  # in /tmp, and not started


# ── what was broken ──────────────────────────────────────────────────────────────────────────────────────────────────


def rewritten(name, *changes):
    def breaks(folder):
        path = folder / name
        text = path.read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path.write_text(text)

    return breaks


def removed(name):
    return lambda folder: (folder / name).unlink()


def mode(name, bits):
    return lambda folder: (folder / name).chmod(bits)


def copied(source, target):
    return lambda folder: shutil.copy(folder / source, folder / target)


def other_certificate(folder):
    """The certificate of another deployment."""
    other = init.write_folder(folder.parent / "other", gateways=1, clients_per_gateway=1)
    for name in ("server.crt", "server.key"):
        shutil.copy(other / "certificates" / name, folder / "certificates" / name)


def large(folder):
    (folder / "app" / "data.json").write_bytes(b"0" * (11 << 20))


UNIT, SETTINGS, CONFIG = "systemd/fedbuff-superlink.service", "app/settings.toml", "flwr/config.toml"


@pytest.mark.parametrize(
    ("breaks", "level", "about", "found"),
    [
        (rewritten("environment", ("TELEMETRY_ENABLED=0", "TELEMETRY_ENABLED=1")), "error", "environment", "TELEMETRY"),
        (rewritten("environment", ("FLWR_DISABLE_UPDATE_CHECK=1\n", "")), "error", "environment", "UPDATE_CHECK"),
        (removed("environment"), "error", "environment", "No such file"),
        (mode("certificates/server.key", 0o644), "error", "modes", "server.key has mode 0644"),
        (mode("certificates/ca.key", 0o640), "error", "modes", "ca.key"),
        (mode("gateways/gateway-1/key", 0o604), "error", "modes", "gateways/gateway-1/key"),
        (mode("superlink/superexec.secret", 0o644), "error", "modes", "superexec.secret"),
        (mode("superlink", 0o755), "error", "modes", "superlink has mode 0755"),
        (removed("certificates/server.crt"), "error", "certificates", "can't read"),
        (rewritten("certificates/server.crt", ("BEGIN", "BEGINNING")), "error", "certificates", "can't read"),
        (copied("certificates/ca.key", "certificates/server.key"), "error", "certificates", "not the key of"),
        (other_certificate, "error", "certificates", "not issued by"),
        (rewritten("deployment.toml", ("127.0.0.1", "fl.example.org")), "error", "certificates", "not for fl.example.org"),
        (removed("app/client_app.py"), "error", "project", "client_app.py is missing"),
        (rewritten("app/pyproject.toml", ("serverapp", "server")), "error", "project", "serverapp"),
        (rewritten("app/pyproject.toml", ("[tool", "[[tool")), "error", "project", "pyproject.toml"),
        (large, "error", "project", "11 MB"),
        (rewritten(CONFIG, ("21986", "9999")), "error", "flwr", "9999"),
        (rewritten(CONFIG, ("ca.crt", "server.crt")), "error", "flwr", "root-certificates"),
        (rewritten(CONFIG, ("fedbuff.address", "fedbuff.insecure = true\nfedbuff.address")), "error", "flwr", "insecure"),
        (removed(CONFIG), "error", "flwr", "No such file"),
        (rewritten(UNIT, ("--isolation process", "--isolation subprocess")), "error", "SuperLink (systemd)", "dies with"),
        (rewritten(UNIT, ("--enable-supernode-auth", "--insecure")), "error", "SuperLink (systemd)", "no TLS"),
        (rewritten("compose.yaml", ('"--enable-supernode-auth", ', "")), "error", "SuperLink (compose)", "without a key"),
        (rewritten("compose.yaml", ('"--isolation", "process", ', "")), "error", "SuperLink (compose)", "dies with"),
        (removed(SETTINGS), "error", "settings", "No such file"),
        (rewritten(SETTINGS, ("buffer_size = 3", "buffer_size = 9")), "error", "clients", "6 clients are too few"),
        (rewritten(SETTINGS, ("buffer_size = 3", "bufer_size = 3")), "error", "settings", "did you mean"),
        (rewritten(SETTINGS, ('"0-2"', '"0-3"')), "error", "settings", "client 3"),
        (rewritten(SETTINGS, ('"0-2"', '"0-1"')), "error", "clients", "1 of 6 clients are behind no gateway, the first is 2"),
        (rewritten(SETTINGS, ('"3-5"', '"3-6"')), "error", "clients", "client 6 of deploy.gateways does not exist"),
        (rewritten(SETTINGS, ("deadline = 600.0", "deadline = 1")), "warning", "deadline", "1 s"),
        (rewritten(SETTINGS, ("deadline = 600.0", "deadline = 90_000")), "warning", "deadline", "12 h"),
        (rewritten(SETTINGS, ("deadline = 600.0", "metrics = '0.0.0.0:21985'")), "warning", "settings", "can watch"),
        (rewritten(SETTINGS, ("gateways.gateway-2", "gateways.south")), "error", "keys", "gateways/south"),
        (removed("gateways/gateway-2/key"), "error", "keys", "gateways/gateway-2"),
        (copied("gateways/gateway-1/key.pub", "gateways/gateway-2/key.pub"), "error", "keys", "key.pub is not of key"),
        (copied("certificates/server.key", "gateways/gateway-2/key"), "error", "keys", "can't read a private key"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_it_finds_what_was_broken_and_says_what_to_change(folder, breaks, level, about, found):
    breaks(folder)
    matching = [f for f in examined(folder) if (f.level, f.about) == (level, about) and found in f.found]
    assert matching, "\n".join(map(str, examined(folder)))
    assert matching[0].change
    assert "\n" not in str(matching[0])


def test_two_gateways_with_one_key(folder):
    for name in ("key", "key.pub"):
        copied(f"gateways/gateway-1/{name}", f"gateways/gateway-2/{name}")(folder)
    assert "gateway-2 has the key of gateway-1" in [f.found for f in check_keys(folder)]


def test_force_heals_most_of_it(folder):
    for path in ("environment", "app/client_app.py", "flwr/config.toml", "certificates/server.crt", "gateways/gateway-2/key"):
        (folder / path).unlink()
    (folder / "gateways" / "gateway-2" / "key.pub").unlink()
    init.write_folder(folder, force=True)
    assert "error" not in levels(examined(folder))


# ── each check by itself ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("version", "level"),
    [(None, "error"), ("1.40.2", "error"), ("1.41.0", "ok"), ("1.42.0.dev20270101", "ok"), ("2.0.0", "error")],
)
def test_versions_of_flower(version, level):
    assert levels(check_flower(version)) == {level}


@pytest.mark.parametrize(
    ("environ", "level", "found"),
    [
        ({"FLWR_INTERNAL_GRPC_CONTROL_API": "1"}, "error", "another port"),
        ({"FLWR_OIDC_ENABLED": "1"}, "error", "paid edition"),
        ({"FLWR_HOME": "/home/me/.flwr"}, "warning", "FLWR_HOME"),
        ({"FLWR_TELEMETRY_ENABLED": "1"}, "warning", "TELEMETRY"),
        ({"FORWARDED_ALLOW_IPS": "*"}, "warning", "FORWARDED_ALLOW_IPS"),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "warning", "HTTPS_PROXY"),
    ],
)
def test_variables_of_this_shell(made, environ, level, found):
    assert any(f.level == level and found in f.found for f in check_environment(made, environ))
    assert levels(check_environment(made, {})) == {"ok"}
    assert levels(check_environment(made, {"HTTPS_PROXY": "http://proxy", "no_proxy": "127.0.0.1"})) == {"ok"}


@pytest.mark.parametrize(
    ("days", "found"),
    [(0, {"ok"}), (800, {"ok", "warning"}), (900, {"ok", "error"}), (4000, {"error"}), (-2, {"error"})],
)
def test_certificates_end(made, days, found):
    assert levels(check_certificates(made, "127.0.0.1", NOW + datetime.timedelta(days=days))) == found


@pytest.mark.parametrize(
    ("without", "level"),
    [
        ("--enable-supernode-auth", "error"),
        ("--isolation", "error"),
        ("--database", "error"),
        ("--ssl-certfile", "error"),
        ("--ssl-keyfile", "error"),
        ("--superexec-auth-secret-file", "warning"),
        ("fedbuff.deploy.superlink", "warning"),
    ],
)
def test_a_superlinks_command_without(made, without, level):
    command = processes.superlink_command(made)
    at = command.index(without)
    value = 0 if without in ("--enable-supernode-auth", "fedbuff.deploy.superlink") else 1
    assert levels(check_command(command[:at] + command[at + 1 + value :], "here")) == {level}
    assert levels(check_command(command, "here")) == {"ok"}


@pytest.mark.parametrize("database", [":memory:", ":flwr-in-memory:", "sqlite:///:memory:", ""])
def test_a_database_in_memory(made, database):
    assert levels(check_command([*processes.superlink_command(made), f"--database={database}"], "here")) == {"error"}


@pytest.mark.parametrize(("deadline", "level"), [(5, "warning"), (30, "ok"), (600, "ok"), (43_200, "ok"), (50_000, "warning")])
def test_deadlines(deadline, level):
    (finding,) = check_deadline(Deployment(deadline=deadline))
    assert finding.level == level
    assert ("60 s" in finding.found) == (deadline == 30)


def test_trips_that_were_not_back_in_time(folder):
    assert not list(check_outcomes(folder, Deployment()))
    (folder / "run").mkdir()
    for late, found in ((1, []), (20, ["warning"])):
        (folder / "run" / "status.json").write_text(json.dumps({"trips": 100, "refused": {"deadline": late}}))
        assert [f.level for f in check_outcomes(folder, Deployment())] == found


def test_who_was_shut_out(folder):
    (folder / "run").mkdir()
    out = ["gateway north", *(f"client {n}" for n in range(4))]
    (folder / "run" / "status.json").write_text(json.dumps({"trips": 100, "refused": {}, "shut_out": out}))
    (found,) = check_outcomes(folder, Deployment())
    assert (found.level, found.found) == ("warning", "shut out: gateway north, client 0, client 1 and 2 more")


@pytest.mark.parametrize(
    ("free", "trips", "keep", "level"),
    [
        (100 * GB, 10_000, True, "ok"),
        (15 * GB, 10_000, True, "warning"),
        (5 * GB, 10_000, True, "error"),
        (5 * GB, 10_000, False, "ok"),
        (1000 * GB, None, True, "ok"),
        (5 * GB, None, True, "warning"),
        (5 * GB, None, False, "ok"),
    ],
)
def test_room_for_the_journal(free, trips, keep, level):
    assert levels(check_disk(free, 10**6, trips, keep, concurrency=100)) == {level}


def test_gateways_that_say_themselves_whom_they_stand_for():
    assert levels(check_clients(Deployment(), 10)) == {"warning"}


def test_a_host_for_others():
    (finding,) = check_host("fl.example.org")
    assert "nothing else" in finding.found


# ── the SuperLink that runs ──────────────────────────────────────────────────────────────────────────────────────────


def serving(certificates: Path, answer: bytes):
    """Something that answers once, with TLS; its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        with listener:
            plain, _ = listener.accept()
            with plain:
                try:
                    with context.wrap_socket(plain, server_side=True) as s:
                        s.recv(1000)
                        s.sendall(answer)
                except (ssl.SSLError, ConnectionError):
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    return listener.getsockname()[1], thread


@pytest.mark.parametrize(
    ("answer", "level"), [(b"HTTP/1.1 200 OK\r\n\r\n", "ok"), (b"HTTP/1.1 404 Not Found\r\n\r\n", "error"), (b"hello", "error")]
)
def test_a_superlink_that_answers(folder, answer, level):
    port, thread = serving(folder / "certificates", answer)
    assert levels(check_superlink(folder, port)) == {level}
    thread.join()


def test_somebody_else_who_answers(folder, tmp_path):
    other = init.write_folder(tmp_path / "other", gateways=1, clients_per_gateway=1)
    port, thread = serving(other / "certificates", b"HTTP/1.1 200 OK\r\n\r\n")
    (finding,) = check_superlink(folder, port)
    thread.join()
    assert finding.level == "error" and "certificate" in finding.found


def test_a_superlink_that_was_not_restarted(folder):
    port, thread = serving(folder / "certificates", b"HTTP/1.1 200 OK\r\n\r\n")
    init.write_folder(folder, force=True)  # a new certificate
    (finding,) = check_superlink(folder, port)
    thread.join()
    assert finding.level == "warning" and finding.change == "restart the SuperLink"


def test_nobody_answers(folder):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        (finding,) = check_superlink(folder, free.getsockname()[1])
    assert finding.level == "warning" and "nothing answers" in finding.found


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────────────


def called(*arguments):
    line = argparse.ArgumentParser()
    parser(line.add_subparsers())
    args = line.parse_args(["doctor", *map(str, arguments)])
    args.command(args)


def test_one_line_for_each_finding_and_an_exit_code(folder, capsys):
    called(folder)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10 and all(line.startswith(("ok ", "warning ")) for line in lines)
    (folder / "certificates" / "server.key").chmod(0o644)
    with pytest.raises(SystemExit) as e:
        called(folder, "--json")
    assert e.value.code == 1
    assert {"ok", "error"} <= {finding["level"] for finding in json.loads(capsys.readouterr().out)}


def test_a_folder_that_is_no_deployment(tmp_path):
    with pytest.raises(SettingsError, match="deploy init"):
        called(tmp_path)
