"""The settings, and what follows from them: whose clients, how long a trip may take, how large the journal gets."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedbuff.core.starting import arrivals
from fedbuff.deploy import processes
from fedbuff.deploy.doctor.finding import Finding
from fedbuff.deploy.settings import Deployment
from fedbuff.report.address import host_and_port, is_loopback

_DEFAULT_TTL = 43_200.0  # Flower's, in seconds
_GONE = 60.0  # seconds after which Flower takes a silent node for gone: a heartbeat every 30 s, and twice that
_COLD = 10.0  # seconds that Flower's own SuperNode takes for a message, at worst


def check_settings(folder: Path) -> Iterator[Finding]:
    """Whether they can be read, their task loaded, and all of the checks below."""
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
    if deployment.metrics and not is_loopback(host_and_port(deployment.metrics, "deploy.metrics")[0]):
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
    start, concurrent = settings.server.start, settings.server.start.at_once()
    if isinstance(start, arrivals):  # nobody is away for longer than the deadline
        concurrent = min(len(task.clients), math.ceil((start.rate or 0.0) * deployment.deadline))
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
    """Of a run that was begun: did trips fail at their deadline, and was anybody shut out?"""
    try:
        found = json.loads((processes.run_folder(folder) / "status.json").read_text(encoding="utf-8"))
        trips, late = int(found["trips"]), int(dict(found["refused"]).get("deadline", 0))
        out = [str(who) for who in found.get("shut_out", [])]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if out:
        more = f" and {len(out) - 3:,} more" if len(out) > 3 else ""
        change = "see `fedbuff deploy status` for why; they are let in again by a new run"
        yield Finding("warning", "clients", f"shut out: {', '.join(out[:3])}{more}", change)
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
        found = f"{have}; each trip adds {weights / 1e6:,.2f} MB to the journal, and until.trips is open"
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
