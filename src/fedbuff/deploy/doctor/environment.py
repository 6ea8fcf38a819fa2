"""Which Flower is installed, and the variables that it reads."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from fedbuff.deploy import processes
from fedbuff.deploy.doctor.finding import Finding

OLDEST, NEWEST = (1, 41), (2,)  # versions of Flower: from, and before


def flower_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("flwr")
    except PackageNotFoundError:
        return None


def check_flower(version: str | None) -> Iterator[Finding]:
    wanted = "install Flower 1.41 or newer, before 2: pip install 'fedbuff[flower]'"
    if version is None:
        yield Finding("error", "Flower", "not installed", wanted)
        return
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < NEWEST:
        yield Finding("error", "Flower", f"version {version}", wanted)
    else:
        yield Finding("ok", "Flower", f"version {version}")


def check_environment(folder: Path, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The file `environment`, and this shell's own variables, which processes started by hand inherit."""
    about, wanted = "environment", processes.variables(folder)
    try:
        lines = (folder / "environment").read_text(encoding="utf-8").splitlines()
    except OSError as e:
        yield Finding("error", about, f"environment: {e.strerror}", "fedbuff deploy init DIR --force")
        lines = []
    written = dict(line.split("=", 1) for line in lines if "=" in line)
    wrong = [name for name, value in wanted.items() if lines and shlex.split(written.get(name, "")) != [value]]
    for name in wrong:
        yield Finding("error", about, f"environment: {name}={written.get(name, '')}", f"{name}={shlex.quote(wanted[name])}")
    for name in ("FLWR_INTERNAL_GRPC_CONTROL_API", "FLWR_INTERNAL_GRPC_FLEET_API"):
        if environ.get(name) == "1":
            yield Finding("error", about, f"{name}=1 opens another port, without our door", f"unset {name}")
    if environ.get("FLWR_OIDC_ENABLED", "0") == "1":
        yield Finding("error", about, "FLWR_OIDC_ENABLED=1 needs Flower's paid edition", "unset FLWR_OIDC_ENABLED")
    for name, value in wanted.items():
        if environ.get(name, value) != value:
            change = "in terminals where you start processes by hand: set -a; . ./environment; set +a"
            yield Finding("warning", about, f"{name}={environ[name]} in this shell", change)
    proxies = [name for name in environ if name.lower() in ("https_proxy", "all_proxy") and environ[name]]
    host = processes.address(folder)[0]
    bypass = [part.strip() for part in environ.get("no_proxy", environ.get("NO_PROXY", "")).split(",")]
    if proxies and host not in bypass and "*" not in bypass:
        yield Finding("warning", about, f"{proxies[0]} is set: Flower would go through it", f"add {host} to no_proxy")
    if not wrong and lines:
        yield Finding("ok", about, "no telemetry, no update check, nothing is installed at run time")
