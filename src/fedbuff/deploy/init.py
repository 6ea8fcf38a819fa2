"""`fedbuff deploy init DIR`: everything that a deployment needs, in one folder, safe as it is.

TLS with a certificate authority of its own, a key for each gateway, a database on the disk, no telemetry, no code that is
installed at run time. processes.py says what is where in the folder; its README.md says what to start, in which order. Files
for systemd and for compose start the same processes with the same arguments.
"""

import argparse
import logging
import os
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np

from fedbuff import toml
from fedbuff.deploy import processes
from fedbuff.deploy.files import texts
from fedbuff.report.address import is_loopback
from fedbuff.settings import Settings, from_tables, read
from fedbuff.toml import SettingsError, Table

PORT = 9092
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]+")


def parser(commands: Any) -> None:
    """`init` and `run` for the parser of `fedbuff deploy`."""
    summary = "Write a deployment folder: certificates, keys, settings, a Flower project, systemd and compose files."
    sub: argparse.ArgumentParser = commands.add_parser("init", help=summary, description=summary)
    sub.set_defaults(command=run_init)
    sub.add_argument("folder", type=Path, metavar="DIR")
    sub.add_argument("--gateways", type=int, metavar="N", help="that stand for the clients (4)")
    sub.add_argument("--clients-per-gateway", type=int, metavar="N", help="(50; with --settings, what the task has)")
    sub.add_argument("--host", metavar="NAME", help="under which gateways reach the SuperLink (127.0.0.1: this machine only)")
    sub.add_argument("--port", type=int, metavar="N", help=f"({PORT})")
    sub.add_argument("--settings", type=Path, metavar="SETTINGS.toml", help="what to train (handwritten digits)")
    sub.add_argument(
        "--force", action="store_true", help="write the folder again; keys, settings and the run in it stay as they are"
    )
    summary = "Keep a run going until it is finished: submit it, and again whenever its server was lost."
    sub = commands.add_parser("run", help=summary, description=summary)
    sub.set_defaults(command=run_keeper)
    sub.add_argument("folder", type=Path, metavar="DIR")


def run_init(args: argparse.Namespace) -> None:
    folder = write_folder(
        args.folder,
        gateways=args.gateways,
        clients_per_gateway=args.clients_per_gateway,
        host=args.host,
        port=args.port,
        settings=args.settings,
        force=args.force,
    )
    host, port = processes.address(folder)
    names = processes.gateways(folder)
    print(f"{folder}: {len(names)} gateways, SuperLink at {processes.joined(host, port)}")
    if not is_loopback(host):
        print("  each gateway's machine needs app/settings.toml, certificates/ca.crt and its own folder of gateways/,")
        print("  and what the task reads, its data or a Python file of yours, under the paths in app/settings.toml")
    print(f"what to start, in which order: {folder / 'README.md'}")
    print(f"check it at any time: fedbuff doctor {shlex.quote(str(args.folder))}")


def run_keeper(args: argparse.Namespace) -> None:
    from fedbuff.deploy.keep import keep_running

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    keep_running(args.folder.resolve())


def write_folder(
    path: Path,
    *,
    gateways: int | None = None,
    clients_per_gateway: int | None = None,
    host: str | None = None,
    port: int | None = None,
    settings: Path | None = None,
    force: bool = False,
) -> Path:
    """Write a deployment folder; its absolute path. With `force`, over one that exists: its keys stay."""
    try:
        from fedbuff.deploy import certificates
    except ImportError as e:
        raise SettingsError("deploy init needs Flower and cryptography: pip install 'fedbuff[flower]'") from e
    folder = path.resolve()
    exists = (folder / "deployment.toml").exists()
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"{path}: a file is in the way; choose another DIR")
    if folder.exists() and any(folder.iterdir()) and not (exists and force):
        what = "has a deployment already; write it again with --force, or" if exists else "not empty;"
        raise SettingsError(f"{path}: {what} choose another DIR")
    old_host, old_port = processes.address(folder) if exists else ("127.0.0.1", PORT)
    host, port = host or old_host, old_port if port is None else port
    _check_address(host, port)
    if exists and settings is None and processes.settings_file(folder).exists():
        if gateways is not None or clients_per_gateway is not None:
            raise SettingsError(
                f"--gateways: {processes.settings_file(path)} says which there are; change deploy.gateways there, then --force"
            )
        text = None
    else:
        text = filled_in(settings, gateways, clients_per_gateway)

    mask = os.umask(0o077)  # nothing in here is for others
    try:
        for name in ("app", "certificates", "flwr", "gateways", "superlink", "systemd"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name).chmod(0o700)
        folder.chmod(0o700)
        (folder / "deployment.toml").write_text(toml.dumps({"host": host, "port": port}), encoding="utf-8")
        if text is not None:
            processes.settings_file(folder).write_text(text, encoding="utf-8")
        names = processes.gateways(folder)
        certificates.make_authority(folder / "certificates")
        certificates.make_server(folder / "certificates", host)
        for name in names:
            (folder / "gateways" / name).mkdir(exist_ok=True)
            certificates.make_key(folder / "gateways" / name)
        if not (folder / "superlink" / "superexec.secret").exists():
            certificates.write_secret(folder / "superlink" / "superexec.secret", os.urandom(32))
        for file, content in texts(folder, list(names)).items():
            (folder / file).write_text(content, encoding="utf-8")
    finally:
        os.umask(mask)
    return folder


def _check_address(host: str, port: int) -> None:
    if not _HOST.fullmatch(host):
        raise SettingsError(f"--host {host}: expected a name or an address, without a port, e.g. fl.example.org")
    if host in ("0.0.0.0", "::"):
        raise SettingsError(f"--host {host}: gateways can't connect to that; give the name or address that they use")
    if not 1 <= port <= 65535:
        raise SettingsError(f"--port {port}: expected 1 to 65535")


# ── settings ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def filled_in(file: Path | None, gateways: int | None, each: int | None) -> str:
    """The settings as text: the demo's or a user's, with `deploy.gateways`."""
    if gateways is not None and gateways < 1:
        raise SettingsError(f"--gateways {gateways}: expected at least 1")
    if each is not None and each < 1:
        raise SettingsError(f"--clients-per-gateway {each}: expected at least 1")
    if file is None:
        gateways, clients = gateways or 4, (gateways or 4) * (each or 50)
        concurrency = max(1, clients // 2)
        return _DEMO.format(
            clients=clients,
            concurrency=concurrency,
            buffer_size=min(10, concurrency),
            gateways="\n".join(f'gateways.{name} = "{share}"' for name, share in named(gateways, clients).items()),
        )
    tables = read(file)
    chosen = from_tables(tables)
    try:
        chosen.check_deployable()
    except ValueError as e:
        raise SettingsError(f"{file}: {e}") from e
    if chosen.deploy is not None and chosen.deploy.gateways:
        if gateways is not None or each is not None:
            raise SettingsError(f"--gateways: {file} has deploy.gateways of its own; leave it out, there or here")
        for name in chosen.deploy.gateways:
            _check_name(name, file)
        return toml.dumps(tables)
    clients = clients_in(chosen)
    gateways = gateways or (4 if each is None else -(-clients // each))
    if gateways > clients or (each is not None and gateways * each != clients):
        raise SettingsError(
            f"--gateways {gateways}{f' --clients-per-gateway {each}' if each else ''}: the task of {file} has {clients} clients"
        )
    deploy: Table = tables.get("deploy", {})
    return toml.dumps({**tables, "deploy": {**deploy, "gateways": named(gateways, clients)}})


def clients_in(settings: Settings) -> int:
    """How many clients the task has; makes it, and checks that they are enough."""
    clients = len(settings.load_task().clients)
    settings.server.bind(np.zeros(1), clients)
    return clients


def named(gateways: int, clients: int) -> dict[str, str]:
    """Clients in equal shares.

    >>> named(2, 5)
    {'gateway-1': '0-2', 'gateway-2': '3-4'}
    """
    ends = [clients * i // gateways + (clients * i % gateways > 0) for i in range(gateways + 1)]
    return {f"gateway-{i + 1}": f"{ends[i]}-{ends[i + 1] - 1}" for i in range(gateways)}


def _check_name(name: str, file: Path) -> None:
    if not _NAME.fullmatch(name):
        raise SettingsError(f"{file}: deploy.gateways.{name}: a name is letters, digits, '-', '_' and '.', at most 63")


_DEMO = """\
# What the server and all gateways train. docs/settings.md lists every key.
# A run keeps the settings it began with: to change them, begin another run by moving the folder run/ away.

evaluate_every = 200

[task.digits]
clients = {clients}
split.dirichlet.alpha = 0.1

[algorithm.fedbuff]
concurrency = {concurrency}
buffer_size = {buffer_size}
lr = 0.96
beta = 0.0

[client]
lr = 0.41
batch_size = 32

[until]
accuracy = 0.9
trips = 20_000

[deploy]
deadline = 600.0
{gateways}
"""
