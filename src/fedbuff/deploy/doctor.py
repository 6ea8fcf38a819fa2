"""`fedbuff doctor DIR`: what is wrong with a deployment folder, what may go wrong, and what to change.

Each check looks at one thing and returns findings; none of them changes anything. An error is what will not work, or is not
safe; a warning is what works until it does not.
"""

import argparse
import datetime
import json
import os
import re
import shlex
import shutil
import stat
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbuff.deploy import processes
from fedbuff.deploy.settings import Deployment
from fedbuff.toml import SettingsError

OLDEST, NEWEST = (1, 41), (2,)  # versions of Flower: from, and before
_DEFAULT_TTL = 43_200.0  # Flower's, in seconds
_GONE = 60.0  # seconds after which Flower takes a silent node for gone: a heartbeat every 30 s, and twice that
_COLD = 10.0  # seconds that Flower's own SuperNode takes for a message, at worst
_SOON = 30  # days before a certificate ends


@dataclass(frozen=True)
class Finding:
    """What was found, and what to change if it is not ok."""

    level: Literal["ok", "warning", "error"]
    about: str
    found: str
    change: str = ""

    def __str__(self) -> str:
        return f"{self.level:8} {self.about:12} {self.found}{f' → {self.change}' if self.change else ''}"


def parser(commands: Any) -> None:
    """`fedbuff doctor` for the command line's own parser."""
    summary = "Check a deployment folder: settings, certificates, keys, Flower, and the SuperLink if it runs."
    sub: argparse.ArgumentParser = commands.add_parser("doctor", help=summary, description=summary)
    sub.set_defaults(command=run_doctor)
    sub.add_argument("folder", type=Path, metavar="DIR", help="that `fedbuff deploy init` wrote")
    sub.add_argument("--json", action="store_true", help="print the findings as JSON")


def run_doctor(args: argparse.Namespace) -> None:
    findings = examine(args.folder.resolve(), os.environ)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(finding)
    if any(finding.level == "error" for finding in findings):
        raise SystemExit(1)


def examine(folder: Path, environ: Mapping[str, str]) -> list[Finding]:
    """All findings. Raises if this is no deployment folder."""
    host, port = processes.address(folder)
    found = [*check_flower(flower_version()), *check_environment(folder, environ)]
    found += [*check_modes(folder), *check_certificates(folder, host, datetime.datetime.now(datetime.UTC))]
    found += [*check_project(folder), *check_connection(folder), *check_files(folder)]
    found += [*check_place(folder), *check_host(host)]
    found += [*check_settings(folder), *check_keys(folder), *check_superlink(folder, port)]
    return found


# ── Flower and its environment ───────────────────────────────────────────────────────────────────────────────────────


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


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def check_certificates(folder: Path, host: str, now: datetime.datetime) -> Iterator[Finding]:
    """The SuperLink's certificate: by our authority, for its host, with its key, and not about to end."""
    try:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        from fedbuff.deploy.certificates import general_name
    except ImportError:
        yield Finding("error", "certificates", "cryptography is not installed", "pip install 'fedbuff[flower]'")
        return
    about, where, anew = "certificates", folder / "certificates", "fedbuff deploy init DIR --force makes a new one"
    try:
        authority = x509.load_pem_x509_certificate((where / "ca.crt").read_bytes())
        server = x509.load_pem_x509_certificate((where / "server.crt").read_bytes())
        key = load_pem_private_key((where / "server.key").read_bytes(), None)
    except (OSError, ValueError, TypeError) as e:
        yield Finding("error", about, f"can't read ca.crt, server.crt or server.key: {e}", anew)
        return
    if key.public_key() != server.public_key():
        yield Finding("error", about, "server.key is not the key of server.crt", anew)
    try:
        server.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError):
        yield Finding("error", about, "server.crt was not issued by ca.crt", anew)
    try:
        names = list(server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        names = []
    for name in (host, "127.0.0.1"):
        if general_name(name) not in names:
            yield Finding("error", about, f"server.crt is not for {name}", f"{anew} (for another host: --host)")
    for file, certificate in (("ca.crt", authority), ("server.crt", server)):
        days = (certificate.not_valid_after_utc - now).days
        if certificate.not_valid_before_utc > now or certificate.not_valid_after_utc <= now:
            change = anew if file == "server.crt" else "remove certificates/ca.*, then --force; give gateways the new ca.crt"
            yield Finding("error", about, f"{file} is valid {_span(certificate)}, which is not now", change)
        elif days < _SOON:
            yield Finding("warning", about, f"{file} ends in {days} days", f"{anew}; restart the SuperLink")
        else:
            yield Finding("ok", about, f"{file}: {days} days left")


def _span(certificate: Any) -> str:
    return f"from {certificate.not_valid_before_utc:%Y-%m-%d} to {certificate.not_valid_after_utc:%Y-%m-%d}"


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


def check_files(folder: Path) -> Iterator[Finding]:
    """The SuperLink's command: ours, and those that stand in files somebody may have changed."""
    yield from check_command(processes.superlink_command(folder), "by hand")
    unit = folder / "systemd" / "fedbuff-superlink.service"
    if unit.exists():
        line = re.search(r"^ExecStart=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE)
        yield from check_command(shlex.split(line[1]) if line else [], "systemd")
    compose = folder / "compose.yaml"
    if compose.exists():
        line = re.search(
            r"^  superlink:\n(?:    .*\n)*?    command: (\[.*\])$", compose.read_text(encoding="utf-8"), re.MULTILINE
        )
        yield from check_command(json.loads(line[1]) if line else [], "compose")


def check_command(command: list[str], where: str) -> Iterator[Finding]:
    """A command that starts a SuperLink: what Flower's defaults would get wrong."""
    about = f"SuperLink ({where})"

    def option(name: str) -> str:
        given = [b for a, b in pairwise(command) if a == name]
        given += [part.split("=", 1)[1] for part in command if part.startswith(f"{name}=")]
        return given[-1] if given else ""

    found: list[Finding] = []
    if "--insecure" in command or not all(option(f"--ssl-{name}") for name in ("certfile", "keyfile", "ca-certfile")):
        change = "no --insecure, but --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile"
        found.append(Finding("error", about, "no TLS: whoever listens reads every update and can pass for a gateway", change))
    if "--enable-supernode-auth" not in command:
        found.append(Finding("error", about, "any gateway may join, without a key", "--enable-supernode-auth"))
    if option("--isolation") != "process":
        change = "--isolation process, and a flower-superexec beside it"
        found.append(Finding("error", about, "the run's server dies with the SuperLink", change))
    database = option("--database")
    if not database or ":memory:" in database or database == ":flwr-in-memory:":
        found.append(Finding("error", about, "a restart forgets keys, runs and messages", "--database FILE, on a disk"))
    if not option("--superexec-auth-secret-file"):
        change = "--superexec-auth-secret-file, here and for the flower-superexec"
        found.append(Finding("warning", about, "whoever reaches it may take over the run's server", change))
    if "fedbuff.deploy.superlink" not in command:
        change = "python -m fedbuff.deploy.superlink instead of flower-superlink, or a firewall"
        found.append(
            Finding("warning", about, "everybody who reaches the port may start code: Flower asks no password", change)
        )
    yield from found or [Finding("ok", about, "TLS, keys, a database on the disk, a process for the server")]


def check_place(folder: Path) -> Iterator[Finding]:
    if folder.is_relative_to("/tmp") or folder.is_relative_to("/dev/shm"):
        yield Finding(
            "warning", "folder", f"{folder} may not survive a reboot", "move it; then fedbuff deploy init DIR --force"
        )


def check_host(host: str) -> Iterator[Finding]:
    if processes.is_loopback(host):
        yield Finding("ok", "host", f"{host}: gateways on this machine only (for others: deploy init --force --host NAME)")
    else:
        yield Finding("ok", "host", f"{host}: other machines reach /v1/fleet/ and nothing else")


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_settings(folder: Path) -> Iterator[Finding]:
    """The settings, and what follows from them: whose clients, how long a trip may take, how large the journal gets."""
    from fedbuff.settings import from_tables, read

    about = "settings"
    try:
        settings = from_tables(read(processes.settings_file(folder)))
    except ValueError as e:
        yield Finding("error", about, " ".join(str(e).split()), "correct it in app/settings.toml")
        return
    deployment = settings.deploy or Deployment()
    yield Finding("ok", about, f"app/settings.toml: {settings.name} on {settings.task[0].__name__}")
    yield from check_deadline(deployment)
    if deployment.metrics and not processes.is_loopback(deployment.metrics.rpartition(":")[0].strip("[]")):
        change = 'metrics = "127.0.0.1:PORT", and a proxy that asks for a password'
        yield Finding("warning", about, f"deploy.metrics = {deployment.metrics!r}: everybody who reaches it can watch", change)
    yield from check_outcomes(folder, deployment)
    try:
        from fedbuff.learn.local import initial_weights

        make, arguments = settings.task
        task = make(**arguments)
        size = initial_weights(task, settings.seed)[1].nbytes
    except (ValueError, OSError, ImportError) as e:
        change = "the server and every gateway need the task's data and libraries"
        yield Finding("error", about, f"task.{settings.task[0].__name__}: {' '.join(str(e).split())}", change)
        return
    yield from check_clients(deployment, len(task.clients))
    try:
        settings.server.bind(np.zeros(1), len(task.clients))
    except ValueError as e:
        yield Finding("error", "clients", str(e), "more clients, or a smaller concurrency or buffer_size")
    concurrent = settings.server.start.most()
    free = shutil.disk_usage(folder).free
    yield from check_disk(free, size, settings.until.trips, deployment.keep_journal, concurrent)


def check_deadline(deployment: Deployment) -> Iterator[Finding]:
    """How long a trip may take."""
    about, deadline = "deadline", deployment.deadline
    if deadline < _COLD:
        change = "a deadline of several times what a trip takes; more is harmless"
        yield Finding("warning", about, f"{deadline:g} s: Flower's own SuperNode alone takes up to {_COLD:g} s", change)
    elif deadline > _DEFAULT_TTL:
        change = f"at most {_DEFAULT_TTL:g}: a client that is lost keeps its slot for so long"
        yield Finding("warning", about, f"{deadline:g} s is longer than Flower keeps messages by default (12 h)", change)
    elif deadline < _GONE:
        note = f"{deadline:g} s: trips of a gateway that is gone end before Flower notices, after {_GONE:g} s; that is fine"
        yield Finding("ok", about, note)
    else:
        yield Finding("ok", about, f"{deadline:g} s")


def check_outcomes(folder: Path, deployment: Deployment) -> Iterator[Finding]:
    """Of a run that was begun: did trips fail at their deadline?"""
    try:
        found = json.loads((processes.run_folder(folder) / "status.json").read_text(encoding="utf-8"))
        trips, late = int(found["trips"]), int(dict(found["refused"]).get("deadline", 0))
    except (OSError, ValueError, KeyError, TypeError):
        return
    if late > 0.05 * max(trips, 1):
        change = f"a deadline above {deployment.deadline:g}, or smaller deploy.trips_per_message"
        yield Finding("warning", "deadline", f"{late:,} of {trips:,} trips were not back in time", change)


def check_clients(deployment: Deployment, clients: int) -> Iterator[Finding]:
    """Every client behind exactly one gateway."""
    about = "clients"
    if not deployment.gateways:
        change = "say in deploy.gateways which clients are behind each"
        yield Finding("warning", about, "gateways say themselves whom they stand for, and the first is believed", change)
        return
    behind = {c for name in deployment.gateways for a, b in deployment.clients_of(name) for c in range(a, b + 1)}
    without, unknown = sorted(set(range(clients)) - behind), sorted(behind - set(range(clients)))
    if without:
        found = f"{len(without):,} of {clients:,} clients are behind no gateway, the first is {without[0]}: never chosen"
        yield Finding("error", about, found, "add them to a gateway in deploy.gateways")
    if unknown:
        found = f"client {unknown[0]} of deploy.gateways does not exist: the task has 0 to {clients - 1}"
        yield Finding("error", about, found, "correct deploy.gateways: a gateway with such clients is turned away")
    if not without and not unknown:
        yield Finding("ok", about, f"{clients:,} behind {len(deployment.gateways)} gateways")


def check_disk(free: int, weights: int, trips: int | None, keep_journal: bool, concurrency: int) -> Iterator[Finding]:
    """Room for the journal: an update for each trip."""
    kept = trips if keep_journal else min(trips or 10 * concurrency, 10 * concurrency)
    have = f"{free / 1e9:,.1f} GB free"
    if kept is None:
        days = "until.trips is open"
        found = f"{have}; each trip adds {weights / 1e6:,.2f} MB to the journal, and {days}"
        yield Finding(
            "warning" if free < 1e5 * weights else "ok", "disk", found, "" if free >= 1e5 * weights else "keep_journal = false"
        )
        return
    need = kept * (weights + 256) + 4 * weights
    found = f"{have}, the journal takes up to {need / 1e9:,.2f} GB"
    if need > free:
        yield Finding("error", "disk", found, "deploy.keep_journal = false, or a larger disk")
    elif need > 0.5 * free:
        yield Finding("warning", "disk", found, "deploy.keep_journal = false, or a larger disk")
    else:
        yield Finding("ok", "disk", found)


# ── keys, and the SuperLink that runs ────────────────────────────────────────────────────────────────────────────────


def check_keys(folder: Path) -> Iterator[Finding]:
    """A key pair for each gateway, each another one, and known to the SuperLink."""
    try:
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        from fedbuff.deploy.gateway import private_key
        from fedbuff.deploy.keep import missing_keys
    except ImportError as e:
        yield Finding("error", "keys", f"{e.name} is not installed", "pip install 'fedbuff[flower]'")
        return
    about, again = "keys", "fedbuff deploy init DIR --force makes keys that are missing"
    try:
        names = list(processes.gateways(folder))
    except SettingsError as e:
        yield Finding("error", about, str(e), "correct it in app/settings.toml")
        return
    seen: dict[bytes, str] = {}
    good = True
    for name in names:
        where = folder / "gateways" / name
        try:
            _, public = private_key(where / "key")
            written = load_ssh_public_key((where / "key.pub").read_bytes())
        except (OSError, ValueError) as e:
            good = False
            yield Finding("error", about, f"gateways/{name}: {' '.join(str(e).split())}", again)
            continue
        if written != public:
            good = False
            yield Finding("error", about, f"gateways/{name}: key.pub is not of key", f"remove both; {again}")
        other = seen.setdefault((where / "key.pub").read_bytes().split()[1], name)
        if other != name:
            good = False
            yield Finding("error", about, f"{name} has the key of {other}", f"remove gateways/{name}/key*; {again}")
    if not good:
        return
    missing = missing_keys(folder)
    if missing is None:
        yield Finding("ok", about, f"{len(names)} pairs; not registered yet, `fedbuff deploy run` does it")
    elif missing:
        change = "fedbuff deploy run DIR registers them, or: " + shlex.join(processes.register_command(folder, missing[0]))
        yield Finding("warning", about, f"{', '.join(missing[:5])}{' …' if missing[5:] else ''}: not registered", change)
    else:
        yield Finding("ok", about, f"{len(names)} pairs, all registered")


def check_superlink(folder: Path, port: int) -> Iterator[Finding]:
    """Whether it answers, and as itself."""
    import socket
    import ssl

    about, (host, _) = "SuperLink", processes.address(folder)
    try:
        context = ssl.create_default_context(cafile=str(folder / "certificates" / "ca.crt"))
        ours = ssl.PEM_cert_to_DER_cert((folder / "certificates" / "server.crt").read_text(encoding="ascii"))
    except (OSError, ValueError) as e:
        yield Finding("error", about, f"can't ask it: ca.crt or server.crt: {e}", "fedbuff deploy init DIR --force")
        return
    where = processes.joined(host, port)
    try:
        with socket.create_connection((host, port), timeout=5) as plain, context.wrap_socket(plain, server_hostname=host) as s:
            theirs = s.getpeercert(binary_form=True)
            s.sendall(f"GET /health HTTP/1.1\r\nHost: {where}\r\nConnection: close\r\n\r\n".encode())
            answer = s.recv(64).split(b"\r\n")[0].decode("latin-1")
    except ConnectionRefusedError:
        yield Finding("warning", about, f"nothing answers at {where}", "start it, as README.md says")
        return
    except ssl.SSLError as e:
        change = "whose is that port? It does not show the certificate of this folder; restart the SuperLink"
        yield Finding("error", about, f"{where}: {getattr(e, 'verify_message', '') or e.reason or e}", change)
        return
    except OSError as e:
        yield Finding("warning", about, f"{where}: {e}", "start it, as README.md says; open the port in the firewall")
        return
    if theirs != ours:
        yield Finding("warning", about, f"{where} shows an older certificate than server.crt", "restart the SuperLink")
    elif " 200" in answer:
        yield Finding("ok", about, f"{where} answers, with its certificate")
    else:
        yield Finding("error", about, f"{where} answers {answer!r}", "whose is that port? Is it a SuperLink?")
