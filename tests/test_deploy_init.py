"""`fedbuff deploy init`: a folder that is safe as it is, that Flower accepts, and a run that is kept going."""

import asyncio
import json
import os
import platform
import shlex
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fedbuff.deploy import init, keep, processes
from fedbuff.deploy.superlink import Door
from fedbuff.settings import from_tables, read
from fedbuff.toml import SettingsError

pytest.importorskip("cryptography")
HOST = "fl.example.org"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return init.write_folder(tmp_path_factory.mktemp("made") / "d", gateways=2, clients_per_gateway=20, host=HOST, port=21987)


@pytest.fixture
def folder(tmp_path):
    return init.write_folder(tmp_path / "d", gateways=2, clients_per_gateway=20, port=21988)


# ── certificates and keys ────────────────────────────────────────────────────────────────────────────────────────────


def shake_hands(authority: Path, server: Path, host: str) -> None:
    """A TLS handshake without a network; raises if the client does not trust the server."""
    ours, theirs = ssl.create_default_context(cafile=str(authority)), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(server / "server.crt", server / "server.key")
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [ours.wrap_bio(back, there, server_hostname=host), theirs.wrap_bio(there, back, server_side=True)]
    for end in [*ends, *ends]:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue


@pytest.mark.parametrize("host", [HOST, "localhost", "127.0.0.1", "::1"])
def test_the_certificate_is_trusted_under_the_names_of_the_superlink(made, host):
    shake_hands(made / "certificates" / "ca.crt", made / "certificates", host)


def test_and_under_no_other_name_and_by_nobody_elses_authority(made, folder):
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for"):
        shake_hands(made / "certificates" / "ca.crt", made / "certificates", "other.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(folder / "certificates" / "ca.crt", made / "certificates", "localhost")


def test_everything_is_for_its_owner_only(made):
    for path in [made, *made.rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_each_gateway_has_a_key_that_flower_reads(made):
    pytest.importorskip("flwr")
    from flwr.cli.supernode.register import try_load_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    from fedbuff.deploy.gateway import private_key

    seen = set()
    for name in ("gateway-1", "gateway-2"):
        _, public = private_key(made / "gateways" / name / "key")
        assert try_load_public_key(made / "gateways" / name / "key.pub") == public_key_to_bytes(public)
        seen.add(public_key_to_bytes(public))
    assert len(seen) == 2


# ── what Flower makes of it ──────────────────────────────────────────────────────────────────────────────────────────


EXAMPLE = Path(__file__).parent.parent / "examples" / "flower"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Flower's own, of pathspec
@pytest.mark.parametrize("which", ["made", "example"])
def test_flower_accepts_the_project_and_takes_the_settings_along(which, made):
    pytest.importorskip("flwr")
    import io
    import zipfile

    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import load_and_validate

    app = made / "app" if which == "made" else EXAMPLE
    _, warnings = load_and_validate(app / "pyproject.toml")
    assert not warnings
    inside = set(zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))).namelist())
    assert {"pyproject.toml", "server_app.py", "client_app.py", "settings.toml"} <= inside
    assert which == "made" or "task.py" in inside


def test_the_example_can_be_simulated_and_deployed(fedbuff, tmp_path):
    fedbuff("run", EXAMPLE / "settings.toml", "--set", "until.trips=200", "--out", "run")
    folder = init.write_folder(tmp_path / "d", settings=EXAMPLE / "settings.toml")
    assert processes.gateways(folder)["gateway-4"] == "30-39"


def test_flwr_finds_the_superlink_without_touching_the_home(made, monkeypatch):
    pytest.importorskip("flwr")
    from flwr.cli.flower_config import read_superlink_connection

    monkeypatch.setenv("FLWR_HOME", processes.variables(made)["FLWR_HOME"])
    found = read_superlink_connection()
    assert (found.name, found.address) == ("fedbuff", "127.0.0.1:21987")
    assert found.root_certificates == str(made / "certificates" / "ca.crt")
    assert not found.insecure


def test_flower_reads_the_superlinks_arguments(made, monkeypatch):
    pytest.importorskip("flwr")
    from flwr.superlink.cli.flower_superlink import _parse_superlink_lifespan_config

    monkeypatch.setattr(sys, "argv", ["flower-superlink", *processes.superlink_command(made)[3:]])
    config = _parse_superlink_lifespan_config()
    assert config.enable_supernode_auth and config.isolation == "process" and not config.insecure
    assert config.database == str(made / "superlink" / "state.db")
    assert config.superexec_auth_secret and len(config.superexec_auth_secret) == 32
    assert not config.runtime_dependency_install
    assert (config.host, config.port) == ("0.0.0.0", 21987)


def test_commands_of_one_machine_and_of_others(made, folder):
    assert processes.local_address(made) == "127.0.0.1:21987"
    assert f"{HOST}:21987" in processes.gateway_command(made, "gateway-1")
    assert "127.0.0.1" in processes.superlink_command(folder)  # not 0.0.0.0: nobody else is to reach it
    for command in (processes.superexec_command(made), processes.gateway_command(made, "gateway-2")):
        assert str(made / "certificates" / "ca.crt") in command
        assert "--insecure" not in command
    assert processes.register_command(made, "gateway-2")[1:3] == ["supernode", "register"]
    env = processes.environment(made)
    assert env["FLWR_TELEMETRY_ENABLED"] == "0" and env["PATH"].startswith(str(Path(sys.executable).parent))


# ── files for others to start them ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def odd(tmp_path):
    """A deployment in a folder whose name wants quoting everywhere."""
    return init.write_folder(tmp_path / "a 100% $HOME 'd'", gateways=1, clients_per_gateway=2)


def test_systemd_starts_the_same_commands(odd):
    unit = (odd / "systemd" / "fedbuff-superlink.service").read_text()
    started = shlex.split(next(line for line in unit.splitlines() if line.startswith("ExecStart="))[10:])
    assert [part.replace("%%", "%").replace("$$", "$") for part in started] == processes.superlink_command(odd)
    gateway = (odd / "systemd" / "fedbuff-gateway@.service").read_text()
    assert "gateways/%i/key" in gateway and "--name" in gateway and "\0" not in gateway


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_units(folder, tmp_path):
    for unit in (folder / "systemd").iterdir():
        copy = tmp_path / unit.name.replace("@.", "@gateway-1.")
        shutil.copy(unit, copy)
        done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
        assert unit.stem not in done.stderr, done.stderr


def test_compose_starts_the_same_commands(odd):
    yaml = pytest.importorskip("yaml")
    services = yaml.safe_load((odd / "compose.yaml").read_text())["services"]
    assert set(services) == {"superlink", "superexec", "gateway-1", "run"}
    command = [part.replace("$$", "$") for part in services["superlink"]["command"]]
    assert command == ["python", *processes.superlink_command(odd)[1:]]
    assert all(service["cap_drop"] == ["ALL"] and service["read_only"] for service in services.values())


def test_the_environment_file_is_what_a_shell_reads(odd):
    script = 'set -a; . ./environment; set +a; printf %s "$FLWR_HOME"'
    done = subprocess.run(["sh", "-c", script], cwd=odd, capture_output=True, text=True, check=True)
    assert done.stdout == str(odd / "flwr")


def test_the_readme_has_every_command(made):
    text = (made / "README.md").read_text()
    for command in (
        processes.superexec_command(made),
        processes.gateway_command(made, "gateway-2"),
        processes.run_command(made),
    ):
        assert shlex.join([Path(command[0]).name, *command[1:]]) in text


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("gateways", "each"), [(1, 1), (1, 4), (4, 50), (3, 100)])
def test_the_demo_has_enough_clients(gateways, each):
    settings = from_tables(tomllib.loads(init.filled_in(None, gateways, each)))
    assert init.clients_in(settings) == gateways * each


def test_the_demo_can_be_read_and_every_client_has_a_gateway(made):
    settings = from_tables(read(processes.settings_file(made)))
    assert settings.deploy is not None and settings.deploy.gateways == {"gateway-1": "0-19", "gateway-2": "20-39"}


def test_settings_of_ones_own_get_gateways_and_absolute_paths(settings_file, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import fedbuff as fb\ndef task(): return fb.tasks.synthetic(clients=25, features=3, classes=2)"
    )
    text = settings_file.read_text().partition("[algorithm")
    own = "[task.python]\nfile = 'mine.py'\nfunction = 'task'\n[algorithm" + text[2]
    settings_file.write_text(own)
    found = read(processes.settings_file(init.write_folder(tmp_path / "d", gateways=3, settings=settings_file)))
    assert found["task"]["python"]["file"] == str(tmp_path / "mine.py")
    assert found["deploy"]["gateways"] == {"gateway-1": "0-8", "gateway-2": "9-16", "gateway-3": "17-24"}


def test_gateways_of_ones_own_stay(settings_file, tmp_path):
    with settings_file.open("a") as f:
        f.write("\n[deploy]\ndeadline = 5\ngateways = {north = '0-29', south = '30-59'}\n")
    folder = init.write_folder(tmp_path / "d", settings=settings_file)
    assert processes.gateways(folder) == {"north": "0-29", "south": "30-59"}
    assert (folder / "gateways" / "south" / "key").exists()


# ── again ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_force_keeps_keys_and_settings_and_renews_the_certificate(folder):
    kept = ["certificates/ca.crt", "gateways/gateway-1/key", "superlink/superexec.secret", "app/settings.toml"]
    before = {name: (folder / name).read_bytes() for name in [*kept, "certificates/server.crt"]}
    (folder / "app" / "server_app.py").unlink()
    init.write_folder(folder, host=HOST, force=True)
    assert {name: (folder / name).read_bytes() for name in kept} == {name: before[name] for name in kept}
    assert (folder / "certificates" / "server.crt").read_bytes() != before["certificates/server.crt"]
    shake_hands(folder / "certificates" / "ca.crt", folder / "certificates", HOST)
    assert processes.address(folder) == (HOST, 21988)
    assert (folder / "app" / "server_app.py").exists()


def test_a_gateway_that_was_added_to_the_settings_gets_a_key(folder):
    file = processes.settings_file(folder)
    file.write_text(file.read_text().replace('"20-39"', '"20-29"') + 'gateways.late = "30-39"\n')
    init.write_folder(folder, force=True)
    assert (folder / "gateways" / "late" / "key.pub").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gateways", "0"], "--gateways 0"),
        (["--clients-per-gateway", "-1"], "--clients-per-gateway -1"),
        (["--port", "70000"], "--port 70000"),
        (["--host", "fl.example.org:443"], "without a port"),
        (["--host", "0.0.0.0"], "can't connect to that"),
        (["--settings", "none.toml"], "none.toml"),
        (["--settings", "small.toml", "--gateways", "61"], "60 clients"),
        (["--settings", "greedy.toml"], "60 clients are too few"),
        (["--settings", "helped.toml"], "over a network there are 'enclave' and 'plain'"),
        (["--settings", "small.toml", "--gateways", "3", "--clients-per-gateway", "7"], "60 clients"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(arguments, message, settings_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    helped = "\n[secure_aggregation]\nmode = 'helpers'\nclip = 1.0\n"
    (tmp_path / "helped.toml").write_text(settings_file.read_text() + helped)
    (tmp_path / "greedy.toml").write_text(settings_file.read_text().replace("buffer_size = 4", "buffer_size = 61"))
    with pytest.raises(ValueError) as e:
        called("init", "d", *arguments)
    assert message in str(e.value) and "\n" not in str(e.value)
    assert not (tmp_path / "d").exists()


def test_nothing_is_written_over_by_accident(folder, tmp_path):
    with pytest.raises(SettingsError, match="--force"):
        called("init", folder)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for more in ([], ["--force"]):
        with pytest.raises(SettingsError, match="not empty"):
            called("init", tmp_path / "mine", *more)
    with pytest.raises(SettingsError, match="no deployment"):
        called("run", tmp_path / "mine")


def called(*arguments):
    import argparse

    parser = argparse.ArgumentParser()
    init.parser(parser.add_subparsers())
    args = parser.parse_args([str(argument) for argument in arguments])
    args.command(args)


def test_it_says_what_to_do_next(tmp_path, capsys):
    called("init", tmp_path / "d", "--gateways", "3", "--host", HOST)
    out = capsys.readouterr().out
    assert "3 gateways" in out and f"{HOST}:9092" in out and "README.md" in out and "fedbuff doctor" in out


# ── the door ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("peer", "path", "status"),
    [
        ("127.0.0.1", "/v1/control/start-run", 200),
        ("::1", "/v1/runtime/acquire-task", 200),
        ("192.0.2.7", "/v1/fleet/pull-messages", 200),
        ("192.0.2.7", "/health", 200),
        ("192.0.2.7", "/v1/control/start-run", 403),
        ("192.0.2.7", "/v1/runtime/acquire-task", 403),
        ("192.0.2.7", "/docs", 403),
        ("192.0.2.7", "/v1/fleet", 403),
        ("192.0.2.7", "//v1/control/start-run", 403),
        ("", "/v1/control/start-run", 403),
    ],
)
def test_the_door_lets_gateways_in_and_everything_else_from_this_machine_only(peer, path, status):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})

    said = []

    async def send(message):
        said.append(message)

    scope = {"type": "http", "path": path, "client": (peer, 4711) if peer else None}
    asyncio.run(Door(app)(scope, None, send))
    assert said[0]["status"] == status


# ── keeping a run going ──────────────────────────────────────────────────────────────────────────────────────────────


class Flower:
    """Answers like `flwr`, and changes the state of its runs at each look as it was told."""

    def __init__(self, folder, looks):
        self.folder, self.looks, self.runs, self.submitted, self.registered = folder, list(looks), {}, 0, 0
        self.refuses = 0

    def __call__(self, command, folder):
        if "register" in command:
            self.registered += 1
            return {"success": False, "error-message": "[code: 23] Public key already in use."}
        if command[1] == "stop":
            self.runs[command[2]] = "finished:stopped"
            return {"success": True}
        if command[1] == "run" and self.refuses:
            self.refuses -= 1
            return {"success": False, "error-message": "not now"} if self.refuses % 2 else None
        if command[1] == "run":
            self.submitted += 1
            self.runs[str(self.submitted)] = "pending"
            return {"success": True, "run-id": str(self.submitted)}
        look = self.looks.pop(0)
        if look == "away":
            return {"success": False, "error-message": "unavailable"} if len(self.looks) % 2 else None
        if look == "lost":
            self.runs.clear()
        elif look == "done":
            (self.folder / "run").mkdir(exist_ok=True)
            (self.folder / "run" / "summary.json").write_text("{}")
        elif self.runs:
            self.runs[max(self.runs)] = look
        runs = [{"run-id": r, "fab-name": "fedbuff-app", "status": s, "status-details": "why"} for r, s in self.runs.items()]
        return {"success": True, "runs": [*runs, {"run-id": "0", "fab-name": "other", "status": "running"}]}


@pytest.fixture
def kept(folder, monkeypatch):
    """Keep a run going with a Flower that tells these states; how often it was submitted."""
    monkeypatch.setattr(keep, "_wait", lambda file, seconds: None)

    def go(*looks, before=(), refuses=0):
        flower = Flower(folder, looks)
        flower.runs, flower.refuses = dict(before), refuses
        monkeypatch.setattr(keep, "_flwr", flower)
        keep.keep_running(folder)
        return flower.submitted

    return go


def test_a_run_is_submitted_once_and_watched_to_its_end(kept, folder):
    assert kept("", "starting", "running", "running", "done") == 1
    assert kept() == 0  # it is finished, and nobody is asked


@pytest.mark.parametrize("end", ["finished:failed", "finished:completed", "lost"])
def test_a_run_that_lost_its_server_is_submitted_again(kept, end):
    assert kept("", "running", end, "running", "done") == 2


def test_a_run_that_is_on_its_way_is_not_submitted_twice(kept):
    assert kept("running", "running", "done", before={"7": "running"}) == 0


@pytest.mark.parametrize(("pid", "host", "later", "submitted"), [
    ("dead", platform.node(), 60, 2),
    ("dead", platform.node(), -60, 1),  # a status of the run before this one
    ("dead", "elsewhere", 60, 1),
    ("alive", platform.node(), 60, 1),
])  # fmt: skip
def test_a_server_that_died_on_this_machine_is_replaced_at_once(kept, folder, pid, host, later, submitted):
    if pid == "dead":
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
    status = {"state": "running", "pid": process.pid if pid == "dead" else os.getpid(), "host": host}
    (folder / "run").mkdir()
    file = folder / "run" / "status.json"
    file.write_text(json.dumps(status))
    os.utime(file, (time.time() + later,) * 2)
    looks = ["", "running", "running", "done"] if submitted == 1 else ["", "running", "", "done"]
    assert kept(*looks) == submitted


def test_a_superlink_that_is_away_is_waited_for(kept):
    assert kept("away", "away", "", "running", "away", "away", "away", "running", "done") == 1


def test_a_run_that_could_not_be_submitted_is_submitted_later(kept):
    assert kept(*[""] * 8, "running", "done", refuses=7) == 1


def test_a_run_that_was_stopped_by_hand_stays_stopped(kept):
    with pytest.raises(SettingsError, match="stopped by hand"):
        kept("", "running", "finished:stopped")


def test_a_run_that_always_fails_at_once_is_given_up_with_the_reason(kept):
    with pytest.raises(SettingsError, match="why"):
        kept(*["", *["finished:failed"] * 20])


def test_registered_keys_are_read_from_flowers_database(folder):
    pytest.importorskip("flwr")
    import sqlite3

    assert keep.missing_keys(folder) is None
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    with sqlite3.connect(folder / "superlink" / "state.db") as database:
        database.execute("CREATE TABLE node (public_key BLOB, unregistered_at VARCHAR)")
        key = load_ssh_public_key((folder / "gateways" / "gateway-2" / "key.pub").read_bytes())
        pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        database.execute("INSERT INTO node VALUES (?, NULL)", (pem,))
    database.close()
    assert keep.missing_keys(folder) == ["gateway-1"]


# ── for real ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.xdist_group("flower")
def test_real_processes_start_register_and_run(tmp_path):
    """SuperLink with TLS and keys, a key that registers, a run that is submitted, and a ServerApp that begins it."""
    pytest.importorskip("flwr")
    from fedbuff.deploy.doctor.keys import check_keys
    from fedbuff.deploy.doctor.superlink import check_superlink

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = init.write_folder(tmp_path / "d", gateways=1, clients_per_gateway=4, port=port)
    env, out = processes.environment(folder), (tmp_path / "log").open("wb")
    started = [
        subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        for command in (processes.superlink_command(folder), processes.superexec_command(folder))
    ]
    try:
        until(lambda: [f.level for f in check_superlink(folder, port)] == ["ok"], tmp_path / "log")
        answer = json.loads(
            subprocess.run(processes.register_command(folder, "gateway-1"), env=env, capture_output=True).stdout
        )
        assert answer["success"]
        assert [f.found for f in check_keys(folder)] == ["1 pairs, all registered"]
        answer = json.loads(subprocess.run(processes.run_command(folder), env=env, capture_output=True).stdout)
        assert answer["success"], answer
        until((folder / "run" / "settings.toml").exists, tmp_path / "log")
        runs = json.loads(subprocess.run(processes.list_command(), env=env, capture_output=True).stdout)["runs"]
        assert [(run["run-id"], run["status"]) for run in runs] == [(answer["run-id"], "running")], runs
    finally:
        for process in started:  # the ServerApp is in the SuperExec's session, and would outlive it
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.close()


def until(done, log, seconds=90.0):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.3)


def test_the_deployment_file_says_where_it_is(made):
    assert tomllib.loads((made / "deployment.toml").read_text()) == {"host": HOST, "port": 21987}


def test_a_gateways_authority_must_be_a_certificate(tmp_path):
    pytest.importorskip("flwr")
    from fedbuff.deploy.gateway import authority

    (tmp_path / "settings.toml").write_text("seed = 1\n")
    for name, complaint in (("settings.toml", "not a certificate in PEM format"), ("nothing", "No such file")):
        with pytest.raises(ValueError, match=rf"--root-certificates .*{name}: {complaint}"):
            authority(tmp_path / name)
