"""A deployment in real processes on loopback: started, killed and started again at will, and checked from its journals."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np

from fedbuff.deploy import init, processes
from fedbuff.deploy.journal import read
from fedbuff.deploy.outbox import Outbox, digest
from fedbuff.deploy.replay import first_difference, replay
from fedbuff.report.finished import read_weights


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Deployment:
    """SuperLink, SuperExec (which starts the ServerApp), gateways, and the keeper that submits the run."""

    def __init__(self, folder: Path, *, gateways: int, clients_per_gateway: int, settings: str | None = None) -> None:
        path = None
        if settings is not None:
            path = folder.parent / "settings.toml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(settings, encoding="utf-8")
        self.folder = init.write_folder(
            folder, gateways=gateways, clients_per_gateway=clients_per_gateway, port=free_port(), settings=path
        )
        self.gateways = list(processes.gateways(self.folder))
        self.env = processes.environment(self.folder)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = folder.parent / "logs"
        self._logs.mkdir(exist_ok=True)

    def __enter__(self) -> "Deployment":
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.kill(name)

    @property
    def run(self) -> Path:
        return processes.run_folder(self.folder)

    def command(self, name: str) -> list[str]:
        if name == "superlink":
            return processes.superlink_command(self.folder)
        if name == "superexec":
            return processes.superexec_command(self.folder)
        if name == "keeper":
            return [processes.tool("fedbuff"), "deploy", "run", str(self.folder)]
        return processes.gateway_command(self.folder, name)

    def start(self, *names: str) -> None:
        for name in names:
            with (self._logs / f"{name}.log").open("ab") as out:
                self._running[name] = subprocess.Popen(
                    self.command(name), env=self.env, stdout=out, stderr=out, start_new_session=True
                )

    def start_all(self) -> None:
        """Everything, in an order that does not matter: whoever comes too early tries again."""
        self.start("superlink")
        self.until(self.answers, "the SuperLink does not answer")
        self.start("superexec", *self.gateways, "keeper")

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(processes.address(self.folder), 1).close()
            return True
        return False

    def kill(self, name: str) -> None:
        """Kill −9: the process and, as a ServerApp would outlive its SuperExec, those it has started."""
        if name == "serverapp":
            for pid in self.serverapps():
                os.kill(pid, signal.SIGKILL)
            return
        process = self._running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def serverapps(self) -> list[int]:
        """The ServerApps of this deployment, by their command line."""
        found, port = [], str(processes.address(self.folder)[1])
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_bytes().decode(errors="replace")
                if "flwr-serverapp" in line and port in line:
                    found.append(int(path.parent.name))
        return found

    def until(self, done, what: str, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, f"{what} after {seconds:g} s\n{self.tails()}"
            time.sleep(0.2)

    def finished(self) -> bool:
        return (self.run / "summary.json").exists()

    def summary(self) -> dict:
        return json.loads((self.run / "summary.json").read_text())

    def updates(self) -> int:
        """How many updates the server has accepted so far."""
        return sum(facts["kind"] == "update" for facts, _ in self.records())

    def records(self):
        if (self.run / "journal").exists() and any((self.run / "journal").iterdir()):
            yield from read(self.run / "journal")

    def tails(self) -> str:
        texts = []
        for path in sorted(self._logs.glob("*.log")):
            texts.append(f"── {path.name}\n" + path.read_text(errors="replace")[-1500:])
        return "\n".join(texts)


def check_journals(deployment: Deployment) -> dict[str, int]:
    """That no accepted update was lost or applied twice, from the journals of both sides; some counts."""
    job, accepted, ended = "", {}, set()
    for facts, blob in deployment.records():
        if facts["kind"] == "header":
            job = facts["job"]
        elif facts["kind"] == "update":
            assert facts["trip"] not in accepted, f"trip {facts['trip']} was applied twice"
            accepted[facts["trip"]] = facts["client"], digest(blob)
            ended.add(facts["trip"])
        elif facts["kind"] in ("failed", "refused"):
            ended.add(facts.get("trip"))
    kept = {}
    for name in deployment.gateways:
        copy = deployment.folder / "gateways" / name / "outbox-copy.sqlite"
        original = copy.with_name("outbox.sqlite")
        for suffix in ("", "-wal", "-shm"):
            if Path(f"{original}{suffix}").exists():
                shutil.copy(f"{original}{suffix}", f"{copy}{suffix}")
        for trip, client, found, forgotten in Outbox(copy).lines(job):
            kept[trip] = client, found, forgotten
    for trip, (client, found) in accepted.items():
        assert kept[trip][:2] == (client, found), f"trip {trip}: the server applied something else than the client kept"
    lost = [trip for trip, (_, _, forgotten) in kept.items() if forgotten and trip not in ended]
    assert not lost, f"trips {lost[:10]} were acknowledged, and the server does not know them"
    return {"accepted": len(accepted), "kept": len(kept), "forgotten": sum(forgotten for *_, forgotten in kept.values())}


def check_replay(deployment: Deployment) -> None:
    """That the journal, replayed, gives the weights that the run left, bit for bit."""
    done = replay(deployment.run)
    assert first_difference(done.flat.named(np.array(done.weights)), read_weights(deployment.run)) is None
