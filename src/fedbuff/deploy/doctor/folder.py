"""The folder: who may read it, the Flower project in it, how `flwr` finds the SuperLink, and where it lies."""

import shlex
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

from fedbuff.deploy import processes
from fedbuff.deploy.doctor.finding import Finding
from fedbuff.report.address import is_loopback


def check_modes(folder: Path) -> Iterator[Finding]:
    """Nobody but the owner reads private keys and updates."""
    private = [folder / "certificates" / "ca.key", folder / "certificates" / "server.key"]
    private += [folder / "superlink" / "superexec.secret", *sorted((folder / "gateways").glob("*/key"))]
    closed = [folder / name for name in ("certificates", "superlink", "gateways")]
    closed += sorted(path for path in (folder / "gateways").glob("*") if path.is_dir())
    bad = [(path, 0o600) for path in private if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    bad += [(path, 0o700) for path in closed if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    for path, mode in bad:
        found = f"{path.relative_to(folder)} has mode {stat.S_IMODE(path.stat().st_mode):04o}: others can read it"
        yield Finding("error", "modes", found, f"chmod {mode:o} {shlex.quote(str(path))}")
    if not bad:
        yield Finding("ok", "modes", f"{len(private)} secrets, for their owner only")


def check_project(folder: Path) -> Iterator[Finding]:
    """The Flower project: complete, and small enough for Flower."""
    about = "project"
    missing = [name for name in ("pyproject.toml", "server_app.py", "client_app.py") if not (folder / "app" / name).is_file()]
    if missing:
        yield Finding("error", about, f"app/{missing[0]} is missing", "fedbuff deploy init DIR --force")
        return
    try:
        found = tomllib.loads((folder / "app" / "pyproject.toml").read_text(encoding="utf-8"))
        parts = found["tool"]["flwr"]["app"]["components"]
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as e:
        yield Finding("error", about, f"app/pyproject.toml: {e}", "fedbuff deploy init DIR --force")
        return
    if not {"serverapp", "clientapp"} <= set(parts):
        yield Finding("error", about, "app/pyproject.toml names no serverapp or clientapp", "fedbuff deploy init DIR --force")
        return
    size = sum(path.stat().st_size for path in (folder / "app").rglob("*") if path.is_file())
    if size > 10 << 20:
        change = "keep data out of app/: Flower sends all of it with each run, 10 MB at most"
        yield Finding("error", about, f"app/ has {size / (1 << 20):.0f} MB", change)
    else:
        yield Finding("ok", about, "app/ can be run")


def check_connection(folder: Path) -> Iterator[Finding]:
    """What `flwr` finds in FLWR_HOME."""
    about, again = "flwr", "fedbuff deploy init DIR --force"
    try:
        config = tomllib.loads((folder / "flwr" / "config.toml").read_text(encoding="utf-8"))
        mine = config["superlink"][processes.CONNECTION]
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as e:
        yield Finding("error", about, f"flwr/config.toml has no superlink.{processes.CONNECTION} ({e})", again)
        return
    wanted = {"address": processes.local_address(folder), "root-certificates": str(folder / "certificates" / "ca.crt")}
    wrong = [key for key, value in wanted.items() if mine.get(key) != value]
    for key in wrong:
        yield Finding("error", about, f"flwr/config.toml: {key} = {mine.get(key)!r}", f"{key} = {wanted[key]!r}; or {again}")
    if mine.get("insecure"):
        yield Finding("error", about, "flwr/config.toml: insecure = true", "remove it: the SuperLink speaks TLS")
    elif not wrong:
        yield Finding("ok", about, f"flwr/config.toml: {mine['address']}, with TLS")


def check_place(folder: Path) -> Iterator[Finding]:
    if folder.is_relative_to("/tmp") or folder.is_relative_to("/dev/shm"):
        yield Finding(
            "warning", "folder", f"{folder} may not survive a reboot", "move it; then fedbuff deploy init DIR --force"
        )


def check_host(host: str) -> Iterator[Finding]:
    if is_loopback(host):
        yield Finding("ok", "host", f"{host}: gateways on this machine only (for others: deploy init --force --host NAME)")
    else:
        yield Finding("ok", "host", f"{host}: other machines reach /v1/fleet/ and nothing else")
