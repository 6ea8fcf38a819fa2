"""`fedbuff deploy run DIR`: keep a run going until it is finished.

To Flower, a run whose ServerApp died has failed for good. Ours goes on from its folder, in whatever run it is started again. So
this submits a run, looks at it now and then, and submits the next one when it failed or vanished, until summary.json is there.
It may be killed and started again itself: a run that is on its way is found, and not submitted twice.
"""

import json
import logging
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from fedbuff.deploy import processes
from fedbuff.deploy.tidy import tidy
from fedbuff.report.files import FolderError, lock
from fedbuff.settings import from_tables, read
from fedbuff.toml import SettingsError

log = logging.getLogger("fedbuff.deploy")
_SOON, _OFTEN = 60.0, 5  # a run that fails so soon (seconds), so often in a row, will not get well by itself
_LEAVING = 60  # seconds that a server may take to leave when its run is finished
_ANSWER = 120.0  # seconds that a `flwr` command may take
Answer = dict[str, Any]


def keep_running(folder: Path, every: float = 15.0) -> None:
    """Return when the run is finished; raise if it was stopped by hand, or fails again and again at once.

    every   seconds between looks at Flower, each of which takes it a second or two; summary.json is looked for every second
    """
    processes.address(folder)
    summary = processes.run_folder(folder) / "summary.json"
    ours, since, seen, soon, reachable = "", 0.0, 0.0, 0, True
    while not summary.exists():
        runs = _runs(folder)
        if (runs is not None) != reachable:
            reachable = runs is not None
            log.info("the SuperLink answers again" if reachable else "the SuperLink does not answer; waiting for it")
        if runs is None:
            _wait(summary, every)
            continue
        active = [run for run, found in runs.items() if not found["status"].startswith("finished")]
        if active:
            if ours != active[0]:
                ours, since, seen = active[0], time.monotonic(), time.time()
                log.info("run %s is %s", ours, runs[ours]["status"])
            if _died(processes.run_folder(folder), seen):  # Flower would notice in a minute
                log.warning("run %s: its server's process has died", ours)
                _flwr(processes.stop_command(ours), folder)
                ours = ""
                continue
            _wait(summary, every)
            continue
        if ours:
            soon = soon + 1 if time.monotonic() - since < _SOON else 0
            _explain(ours, runs.get(ours), soon)
            _wait(summary, min(300.0, 2.0 * 2**soon))
            if summary.exists():
                break
        _register(folder)
        ours, since, seen = _submit(folder) or "", time.monotonic(), time.time()
        _wait(summary, every)
    _tidy(folder)
    log.info("finished: %s", summary)


def _tidy(folder: Path) -> None:
    """Once the server is gone: it may have been killed before it could do so itself."""
    run = processes.run_folder(folder)
    for _ in range(_LEAVING):
        try:
            with lock(run):
                tidy(from_tables(read(processes.settings_file(folder))), run)
            return
        except (FolderError, SettingsError) as e:
            problem = e
        time.sleep(1.0)
    log.warning("%s", problem)


def missing_keys(folder: Path) -> list[str] | None:
    """The gateways whose keys the SuperLink does not know yet, from its database; None if that can't be told."""
    import sqlite3

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    database = folder / "superlink" / "state.db"
    if not database.exists():
        return None
    try:
        connection = sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True, timeout=10)
        try:
            known = {bytes(row[0]) for row in connection.execute("SELECT public_key FROM node WHERE unregistered_at IS NULL")}
        finally:
            connection.close()
    except sqlite3.Error:
        return None

    def key(name: str) -> bytes:
        found = load_ssh_public_key((folder / "gateways" / name / "key.pub").read_bytes())
        return found.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    return [
        name
        for name in processes.gateways(folder)
        if (folder / "gateways" / name / "key.pub").exists() and key(name) not in known
    ]


def _register(folder: Path) -> None:
    missing = missing_keys(folder)
    for name in processes.gateways(folder) if missing is None else missing:
        answer = _flwr(processes.register_command(folder, name), folder)
        if answer is not None and answer.get("success"):
            log.info("registered the key of %s", name)
        elif answer is not None and "already in use" not in str(answer.get("error-message")):
            log.warning("can't register the key of %s: %s", name, _reason(answer))


def _submit(folder: Path) -> str | None:
    answer = _flwr(processes.run_command(folder), folder)
    if answer is None or not answer.get("success"):
        log.warning("can't submit the run: %s", "no answer" if answer is None else _reason(answer))
        return None
    log.info("submitted run %s", answer["run-id"])
    return str(answer["run-id"])


def _runs(folder: Path) -> dict[str, Answer] | None:
    """Our runs, by id; None if the SuperLink does not answer."""
    answer = _flwr(processes.list_command(), folder)
    if answer is None or not answer.get("success"):
        return None
    return {run["run-id"]: run for run in answer["runs"] if run["fab-name"] == processes.APP}


def _flwr(command: processes.Command, folder: Path) -> Answer | None:
    """What a `flwr` command answers, which it does with exit code 0 even if it failed; None if it does not."""
    try:
        done = subprocess.run(command, env=processes.environment(folder), capture_output=True, text=True, timeout=_ANSWER)
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        return None
    except OSError as e:
        raise SettingsError(f"{command[0]}: {e.strerror}; install Flower: pip install 'fedbuff[flower]'") from e
    return found if isinstance(found, dict) else None


def _explain(run: str, found: Answer | None, soon: int) -> None:
    status, details = ("vanished", "") if found is None else (found["status"], found.get("status-details") or "")
    if status == "finished:stopped":
        raise SettingsError(f"run {run} was stopped by hand (flwr stop); `fedbuff deploy run` goes on with it")
    if soon >= _OFTEN:
        raise SettingsError(f"run {run} failed as {soon} others before it, soon after its start: {details}; see flwr log {run}")
    log.warning("run %s: %s %s; submitting the next one, which goes on from the run folder", run, status, details)


def _reason(answer: Answer) -> str:
    return " ".join(str(answer.get("error-message", answer)).split())


def _died(run: Path, since: float) -> bool:
    """Whether a server that has written its status since then, on this machine, is no longer there."""
    try:
        file = run / "status.json"
        found = json.loads(file.read_text(encoding="utf-8"))
        if file.stat().st_mtime < since or found["state"] not in ("running", "draining") or found["host"] != platform.node():
            return False
        return not processes.is_alive(found["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _wait(file: Path, seconds: float) -> None:
    """Until a file exists, or for so many seconds."""
    until = time.monotonic() + seconds
    while not file.exists() and (left := until - time.monotonic()) > 0:
        time.sleep(min(1.0, left))
