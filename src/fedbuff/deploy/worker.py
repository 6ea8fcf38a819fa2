"""A worker that stays: torch and data are loaded once, and messages are answered for as long as they come.

    report = ask(orders, "settings.toml", None, 0, node_config)      # in Flower's short-lived ClientApp process

`ask` finds the worker of this node by its socket, or starts it. One process, one message at a time, as Flower delivers them.
`python -m fedbuff.deploy.worker SPEC` is the worker; it ends by itself when nobody has asked for ten minutes.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbuff.deploy.books import Ranges
from fedbuff.deploy.clients import Clients
from fedbuff.deploy.outbox import Outbox
from fedbuff.deploy.settings import ranges
from fedbuff.deploy.wire import Orders
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.task import Task

_IDLE = 600.0
_START = 120.0  # seconds to wait for a worker: it may have to read a dataset
_SIZE = struct.Struct("<Q")
Work = Callable[[bytes], bytes]
_here: dict[int, Work] = {}  # of tasks that only this process knows
_started: list["subprocess.Popen[bytes]"] = []


def ask(orders: bytes, task: Any, client: LocalSGD | None, seed: int, node_config: dict[str, Any]) -> bytes:
    """The report on these orders, by the worker of this node."""
    mine, folder = clients_of(node_config), folder_of(node_config)
    if isinstance(task, Task) or (callable(task) and not _findable(task)):
        if id(task) not in _here:
            _here[id(task)] = work_of(task, client, seed, mine, folder)
        return _here[id(task)](orders)
    spec = {"clients": mine, "folder": str(folder), "seed": seed}
    if callable(task):
        how = vars(_given(client))
        spec |= {"module": task.__module__, "function": task.__qualname__, "path": sys.path, "client": how}
    else:
        spec |= {"settings": str(task), "content": Path(task).read_text(encoding="utf-8")}
    return _through(_socket(spec, folder), spec, orders)


def work_of(task: Any, client: LocalSGD | None, seed: int, mine: Ranges, folder: Path) -> Work:
    """What answers orders, from a task, a function that makes one, or a settings file."""
    from fedbuff.deploy.serve import digest_of
    from fedbuff.learn.local import initial_weights
    from fedbuff.learn.training import Training
    from fedbuff.learn.work import settle, trainer

    training, sealing = Training(), None
    if isinstance(task, str | Path):
        from fedbuff.settings import from_tables, read

        settings = from_tables(read(Path(task)))
        made, client, seed, training = settings.load_task(), settings.client, settings.seed, settings.training
        if settings.secure_aggregation is not None:
            from fedbuff.deploy.sealing import Sealing

            sealing = Sealing(settings.secure_aggregation, settings.server, folder)
    else:
        made = task if isinstance(task, Task) else task()
    client = _given(client)
    settle()
    flat, weights = initial_weights(made, seed)
    outbox = Outbox(folder / "outbox.sqlite")
    sgd = digest_of(client, seed, len(weights))
    clients = Clients(trainer(made, client, seed, training, flat), mine, outbox, made.examples, sgd, sealing)
    return lambda orders: clients.work(Orders.from_bytes(orders)).to_bytes()


def _given(client: LocalSGD | None) -> LocalSGD:
    if client is None:
        raise ValueError("client: missing; say how clients train, e.g. client_app(task, client=fb.LocalSGD(lr=0.1))")
    return client


def clients_of(node_config: dict[str, Any]) -> Ranges:
    """The clients behind a node: `clients` of its config, or Flower's `partition-id`."""
    if "clients" in node_config:
        return ranges(str(node_config["clients"]))
    if "partition-id" in node_config:
        return ((int(node_config["partition-id"]), int(node_config["partition-id"])),)
    raise ValueError("node config: missing clients, e.g. --node-config 'clients=\"0-49\"', or Flower's partition-id")


def folder_of(node_config: dict[str, Any]) -> Path:
    """Where a node keeps what must last."""
    if "folder" in node_config:
        return Path(str(node_config["folder"])).expanduser()
    name = "-".join(f"{first}-{last}" for first, last in clients_of(node_config))[:60]
    return Path.home() / ".fedbuff" / f"clients-{name}"


# ── by socket ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _findable(function: Any) -> bool:
    """Whether another process can import it."""
    return "<" not in function.__qualname__ and function.__module__ != "__main__"


def _socket(spec: dict[str, Any], folder: Path) -> Path:
    name = f"worker-{hashlib.sha256(json.dumps(spec, default=str).encode()).hexdigest()[:16]}.sock"
    path = folder / name
    if len(str(path)) < 100:  # the system's limit is 108
        return path
    return Path(tempfile.gettempdir()) / f"fedbuff-{os.getuid()}-{name}"


def _through(path: Path, spec: dict[str, Any], orders: bytes) -> bytes:
    """Ask the worker at this socket, which is started if it is not there; orders are safe to repeat."""
    until, started = time.monotonic() + _START, None
    while True:
        with socket.socket(socket.AF_UNIX) as s:
            try:
                s.connect(str(path))
                send(s, orders)
                return receive(s)
            except OSError as e:
                if started is None:
                    started = _start(path, spec)
                elif started.poll() not in (None, 0):
                    raise RuntimeError(f"the worker could not start: see {_log(spec)}") from e
                if time.monotonic() > until:
                    raise RuntimeError(f"no worker at {path} after {_START:g} s: see {_log(spec)}") from e
        time.sleep(0.05)


def _start(path: Path, spec: dict[str, Any]) -> "subprocess.Popen[bytes]":
    _log(spec).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", "fedbuff.deploy.worker", json.dumps({**spec, "socket": str(path)}, default=str)]
    with _log(spec).open("ab") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    _started.append(process)  # it outlives us, and nobody waits for it
    return process


def _log(spec: dict[str, Any]) -> Path:
    return Path(spec["folder"]) / "worker.log"


def send(s: socket.socket, data: bytes) -> None:
    s.sendall(_SIZE.pack(len(data)))
    s.sendall(data)


def receive(s: socket.socket) -> bytes:
    (size,) = _SIZE.unpack(_exactly(s, _SIZE.size))
    return _exactly(s, size)


def _exactly(s: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = s.recv(min(1 << 20, size - len(parts)))
        if not part:
            raise ConnectionError("the worker hung up")
        parts += part
    return bytes(parts)


def main() -> None:
    spec = json.loads(sys.argv[1])
    path = Path(spec["socket"])
    lock = (path.parent / f"{path.name}.lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # another one is starting
    if "module" in spec:
        sys.path[:] = spec["path"]
        task: Any = importlib.import_module(spec["module"])
        for name in spec["function"].split("."):
            task = getattr(task, name)
        work = work_of(task, LocalSGD(**spec["client"]), spec["seed"], _pairs(spec["clients"]), Path(spec["folder"]))
    else:
        work = work_of(spec["settings"], None, spec["seed"], _pairs(spec["clients"]), Path(spec["folder"]))
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        mask = os.umask(0o177)
        listener.bind(str(path))
        os.umask(mask)
        listener.listen(8)
        listener.settimeout(_IDLE)
        with contextlib.suppress(TimeoutError):
            while True:
                connection, _ = listener.accept()
                connection.settimeout(None)
                with connection, contextlib.suppress(ConnectionError):
                    send(connection, work(receive(connection)))
    path.unlink(missing_ok=True)


def _pairs(value: list[list[int]]) -> Ranges:
    return tuple((first, last) for first, last in value)


if __name__ == "__main__":
    main()
