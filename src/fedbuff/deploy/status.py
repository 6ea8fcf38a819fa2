"""`fedbuff deploy status FOLDER`: how a run that is being served stands, from the status.json in its folder.

The server writes the file about once a second (see watch.py), so nothing here talks to it: the command works for a server
that is up, one that was killed, and one that has finished, and says which it is.
"""

import argparse
import json
import platform
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbuff.deploy.logs import printable
from fedbuff.deploy.processes import is_alive, run_folder
from fedbuff.report.files import FolderError
from fedbuff.report.terminal import console

if TYPE_CHECKING:
    from rich.console import RenderableType

FILE = "status.json"
_OLD = 30.0  # seconds: a server writes at least every 20, whatever its disk and its past
_SHOWN = 50  # gateways, reasons and senders in a table

Facts = dict[str, Any]


def parser(commands: Any) -> None:
    """`status` for the subparsers of `fedbuff deploy`."""
    summary = "How a run that is being served stands: version, buffer, trips, staleness, gateways, what was refused."
    sub: argparse.ArgumentParser = commands.add_parser("status", help=summary, description=summary)
    sub.set_defaults(command=status)
    sub.add_argument("folder", type=Path, metavar="FOLDER", help="the run folder of the server")
    sub.add_argument("--json", action="store_true", help="print it as JSON; with --watch, as one line whenever it changes")
    sub.add_argument("--watch", action="store_true", help="go on until the run is finished, or Ctrl-C")


def status(args: argparse.Namespace) -> None:
    from rich.live import Live

    screen = console()
    facts = read(args.folder)
    if not args.watch:
        print(json.dumps(facts, indent=2)) if args.json else screen.print(shown(args.folder, facts))
        return
    try:
        if screen.is_terminal and not args.json:
            with Live(shown(args.folder, facts), console=screen, auto_refresh=False) as view:
                while facts["state"] != "finished":
                    time.sleep(1.0)
                    facts = read(args.folder)
                    view.update(shown(args.folder, facts), refresh=True)
            return
        told = ""
        while True:
            if facts["written"] != told:
                told = facts["written"]
                print(json.dumps(facts), flush=True) if args.json else screen.print(shown(args.folder, facts))
            if facts["state"] == "finished":
                return
            time.sleep(1.0)
            facts = read(args.folder)
    except KeyboardInterrupt:
        return  # the run goes on: only the watching ends


def read(folder: Path) -> Facts:
    """What status.json says, with `age`, its seconds, and `old`: whether no server keeps it up to date."""
    try:
        facts: Facts = json.loads((folder / FILE).read_text(encoding="utf-8"))
        age = max(0.0, time.time() - datetime.fromisoformat(facts["written"]).timestamp())
    except FileNotFoundError as e:
        if (folder / "summary.json").is_file():
            raise FolderError(f"{folder} is a finished run without a {FILE}: `fedbuff show {folder}`") from e
        if (folder / "deployment.toml").is_file() and (run_folder(folder) / FILE).is_file():
            return read(run_folder(folder))
        raise FolderError(f"{folder} has no {FILE}: give the folder of a run that is, or was, served") from e
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise FolderError(f"can't read {folder / FILE}: {getattr(e, 'strerror', None) or e}; the server writes it anew") from e
    if (folder / "summary.json").is_file():
        facts["state"] = "finished"
    over = facts["state"] in ("finished", "stopped")
    gone = not over and age > 3 * facts["every"] and _gone(facts)
    return {**facts, "age": age, "old": not over and (gone or age > _OLD), "gone": gone}


def _gone(facts: Facts) -> bool:
    """Whether the server's process is no more, as far as one can tell from here."""
    return facts["host"] == platform.node() and not is_alive(facts["pid"])


# ── as text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def shown(folder: Path, facts: Facts) -> "RenderableType":
    """What `status` prints."""
    from rich.console import Group
    from rich.text import Text

    lines = [f"{folder}: {standing(facts)}", *(f"  {name:<13} {text}" for name, text in summary(facts))]
    parts: list[RenderableType] = [Text(printable(line)) for line in lines]
    if facts["gateways"]:
        parts.append(_table(*gateways(facts)))
    if facts["refused"]:
        parts.append(_table(*refused(facts)))
    if facts["strikes"]:
        parts.append(_table(*strikes(facts)))
    return Group(*parts)


def standing(facts: Facts) -> str:
    """In a line: whether it runs, or why not."""
    reason, ago = facts["reason"], _duration(facts["age"])
    if facts["state"] == "finished":
        return f"finished: {reason}" if reason else "finished"
    if facts["state"] == "stopped":
        return f"STOPPED {ago} ago: {reason}; a server started again on this folder goes on"
    if not facts["old"]:
        return f"draining: {reason}" if facts["state"] == "draining" else "running"
    if facts["gone"] or facts["host"] != platform.node():
        return f"NOT RUNNING: no word of the server for {ago}; started again on this folder, it goes on. This is how it stood"
    return f"NO WORD for {ago}: the server's process (pid {facts['pid']}) is there, but busy or stuck. This is how it stood"


def summary(facts: Facts) -> list[tuple[str, str]]:
    """What there is to say in a line each."""
    outcomes = ", ".join(f"{count:,} {name}" for name, count in facts["outcomes"].items())
    pace = facts["trips_per_second"]
    active = f"{facts['in_flight']:,}" + (f" of {facts['concurrency']:,}" if facts["concurrency"] is not None else "")
    clients, evaluated = facts["clients"], facts["evaluation"]
    over = " when it ended" if facts["state"] == "finished" else ""
    found = [
        ("version", f"{facts['version']:,}"),
        ("buffer", f"{facts['buffer']['fill']:,} of {facts['buffer']['size']:,} updates"),
        ("active trips", f"{active}{over}"),
        (
            "trips",
            f"{facts['trips']:,} ended"
            + (f" ({outcomes})" if outcomes else "")
            + (f", {pace:,.1f}/s" if pace is not None else ""),
        ),
        ("staleness", _staleness(facts)),
        ("clients", f"{clients['online']:,} of {clients['all']:,} online{over}"),
    ]
    for split, metrics in (evaluated["splits"] if evaluated else {}).items():
        values = ", ".join(f"{name} {'–' if value is None else format(value, '.4g')}" for name, value in metrics.items())
        found.append((split, f"{values} at version {evaluated['server_steps']:,}"))
    if facts["epsilon"] is not None:
        found.append(("epsilon", f"{facts['epsilon']:.4g}"))
    if facts["shut_out"]:
        found.append(("shut out", ", ".join(facts["shut_out"][:_SHOWN])))
    if facts["page"] and not facts["old"] and facts["state"] in ("running", "draining"):
        found.append(("live page", facts["page"]))
    found.append(("up for", f"{_duration(facts['uptime'])}, pid {facts['pid']} on {facts['host']}"))
    return found


def _staleness(facts: Facts) -> str:
    latest, everything = facts["staleness"]["latest"], facts["staleness"]["all"]
    if not everything["updates"]:
        return "–"
    said = [
        f"mean {s['mean']:.2f}, median {s['median']:g}, at most {s['max']:,} {of}"
        for s, of in ((latest, f"in the last {latest['updates']:,} updates"), (everything, f"in all {everything['updates']:,}"))
    ]
    return "; ".join(said[-1:] if latest["updates"] == everything["updates"] else said)


# ── tables, here and on the live page ────────────────────────────────────────────────────────────────────────────────

Sheet = tuple[list[str], list[list[str]], str]


def gateways(facts: Facts) -> Sheet:
    """Header, rows and a caption; those with a problem first, if there are many."""
    ordered = sorted(facts["gateways"], key=lambda g: (g["online"] and not g["problem"] and not g["shut_out"], g["name"]))
    body = [
        [
            g["name"],
            "shut out" if g["shut_out"] else "online" if g["online"] else "offline",
            "unknown" if g["clients"] is None else f"{g['clients']:,}",
            f"{g['messages_out']:,}",
            f"{g['trips_queued']:,}",
            "never" if g["last_seen"] is None else f"{_duration(g['last_seen'])} ago",
            g["problem"],
        ]
        for g in ordered[:_SHOWN]
    ]
    there = sum(g["online"] for g in ordered)
    header = ["gateway", "", "clients", "messages out", "trips queued", "last heard", "problem"]
    over = " when it ended" if facts["state"] == "finished" else ""
    return header, body, f"{there:,} of {len(ordered):,} gateways online{over}" + _left_out(len(ordered))


def refused(facts: Facts) -> Sheet:
    """Reasons, the most frequent first."""
    body = [[reason, f"{count:,}"] for reason, count in _most(facts["refused"])]
    return ["refused because", "times"], body, f"{sum(facts['refused'].values()):,} refused" + _left_out(len(facts["refused"]))


def strikes(facts: Facts) -> Sheet:
    """Who sent what no honest client sends."""
    out = set(facts["shut_out"])
    body = [[who, f"{count:,}", "shut out" if who in out else ""] for who, count in _most(facts["strikes"])]
    return ["sender", "strikes", ""], body, "messages that no honest client sends" + _left_out(len(facts["strikes"]))


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])[:_SHOWN]


def _left_out(rows: int) -> str:
    return f"; {rows - _SHOWN:,} more are not shown" if rows > _SHOWN else ""


def _table(header: list[str], body: list[list[str]], caption: str) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    made = Table(caption=caption, caption_justify="left")
    for i, name in enumerate(header):
        made.add_column(name, justify="left" if i == 0 or name == "problem" else "right")
    for row in body:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def _duration(seconds: float) -> str:
    """As people say it: 12 s, 3 min, 5.2 h, 2.1 days."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
