"""The processes of a deployment folder: what to start, and in which environment. Nothing here starts anything.

    env = environment(folder)
    Popen(superlink_command(folder), env=env)               # Flower's SuperLink: TLS, keys, a database on the disk
    Popen(superexec_command(folder), env=env)               # starts the ServerApp of a run that is submitted
    run(register_command(folder, "gateway-1"), env=env)     # once: this gateway's key is welcome
    Popen(gateway_command(folder, "gateway-1"), env=env)
    run(run_command(folder), env=env)                       # submits a run; `keep_running` does so as often as it takes

`fedbuff deploy init` writes the folder:

    deployment.toml         where the SuperLink is
    app/                    the Flower project that is run, with the settings of server and gateways
    certificates/           ca.crt and ca.key, server.crt and server.key
    gateways/NAME/          key, key.pub, and what the gateway keeps: its outbox
    superlink/              Flower's database, and the secret it shares with the SuperExec
    flwr/                   FLWR_HOME: the connection that `flwr` uses, instead of one in your home
    run/                    the run folder: checkpoints, journal, summary.json
"""

import os
import shutil
import sys
import tomllib
from pathlib import Path

from fedbuff.report.address import is_loopback
from fedbuff.toml import SettingsError

CONNECTION = "fedbuff"  # what the SuperLink is called in Flower's config
APP = "fedbuff-app"  # what the project is called
Command = list[str]


def address(folder: Path) -> tuple[str, int]:
    """Host and port under which gateways reach the SuperLink."""
    file = folder / "deployment.toml"
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
        return str(found["host"]), int(found["port"])
    except OSError as e:
        raise SettingsError(f"{folder}: no deployment (no deployment.toml); make one with: fedbuff deploy init {folder}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as e:
        raise SettingsError(f"{file}: damaged ({e}); write it again with: fedbuff deploy init {folder} --force") from e


def settings_file(folder: Path) -> Path:
    return folder / "app" / "settings.toml"


def run_folder(folder: Path) -> Path:
    return folder / "run"


def is_alive(pid: int) -> bool:
    """Whether there is such a process on this machine, as far as one can tell; not one that is dead and was not reaped yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (OSError, IndexError):
        return True  # no Linux
    return state not in (b"Z", b"X")


def joined(host: str, port: int) -> str:
    """HOST:PORT.

    >>> joined("::1", 8000)
    '[::1]:8000'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_address(folder: Path) -> str:
    """HOST:PORT of the SuperLink for processes on its own machine."""
    host, port = address(folder)
    return joined(host if is_loopback(host) else "127.0.0.1", port)


# ── processes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def superlink_command(folder: Path) -> Command:
    host, port = address(folder)
    listen = host if is_loopback(host) else "::" if ":" in host else "0.0.0.0"
    return [
        *(sys.executable, "-m", "fedbuff.deploy.superlink"),
        *("--host", "127.0.0.1" if host == "localhost" else listen, "--port", str(port)),
        *("--ssl-ca-certfile", str(folder / "certificates" / "ca.crt")),
        *("--ssl-certfile", str(folder / "certificates" / "server.crt")),
        *("--ssl-keyfile", str(folder / "certificates" / "server.key")),
        "--enable-supernode-auth",
        *("--isolation", "process"),
        *("--superexec-auth-secret-file", str(folder / "superlink" / "superexec.secret")),
        *("--database", str(folder / "superlink" / "state.db")),
        "--disable-runtime-dependency-installation",
    ]


def superexec_command(folder: Path) -> Command:
    return [
        tool("flower-superexec"),
        *("--runtime-api-address", local_address(folder)),
        *("--root-certificates", str(folder / "certificates" / "ca.crt")),
        *("--superexec-auth-secret-file", str(folder / "superlink" / "superexec.secret")),
    ]


def gateway_command(folder: Path, name: str) -> Command:
    """`fedbuff deploy gateway`: the settings say which clients are behind it, by its name."""
    return [
        *(tool("fedbuff"), "deploy", "gateway", str(settings_file(folder)), "--name", name),
        *("--superlink", joined(*address(folder))),
        *("--root-certificates", str(folder / "certificates" / "ca.crt")),
        *("--key", str(folder / "gateways" / name / "key")),
        *("--folder", str(folder / "gateways" / name)),
    ]


def register_command(folder: Path, name: str) -> Command:
    """`flwr supernode register`: prints JSON, and exits with 0 even if it says {"success": false}."""
    key = folder / "gateways" / name / "key.pub"
    return [tool("flwr"), "supernode", "register", str(key), CONNECTION, "--name", name, "--format", "json"]


def run_command(folder: Path) -> Command:
    """`flwr run`: prints JSON, and exits with 0 even if it says {"success": false}."""
    return [tool("flwr"), "run", str(folder / "app"), CONNECTION, "--format", "json"]


def list_command() -> Command:
    """`flwr ls`: the runs as JSON, and exits with 0 even if it says {"success": false}."""
    return [tool("flwr"), "ls", CONNECTION, "--format", "json"]


def stop_command(run: str) -> Command:
    """`flwr stop`: to Flower, the run is over."""
    return [tool("flwr"), "stop", run, CONNECTION, "--format", "json"]


def gateways(folder: Path) -> dict[str, str]:
    """The gateways by name, with the clients that are behind each."""
    file = settings_file(folder)
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8")).get("deploy", {}).get("gateways", {})
    except OSError as e:
        raise SettingsError(f"{file}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError) as e:
        raise SettingsError(f"{file}: not TOML: {e}") from e
    if not isinstance(found, dict) or not found:
        raise SettingsError(f"{file}: deploy.gateways: missing; say which clients are behind each gateway")
    return {name: str(clients) for name, clients in found.items()}


# ── environment ──────────────────────────────────────────────────────────────────────────────────────────────────────


def variables(folder: Path) -> dict[str, str]:
    """What the processes find in their environment, beside what is there anyway."""
    return {
        "FLWR_HOME": str(folder / "flwr"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FEDBUFF_FOLDER": str(run_folder(folder)),
        "FORWARDED_ALLOW_IPS": "127.0.0.1",  # whom uvicorn believes when it says that a request is another's
    }


def environment(folder: Path) -> dict[str, str]:
    """The whole environment: Flower's programs start each other by name, so they have to be on the PATH."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **variables(folder), "PATH": path}


def tool(name: str) -> str:
    """A program of the environment that fedbuff runs in."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name
