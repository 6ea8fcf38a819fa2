"""The report: runs on one page, from their folders or while they train."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedbuff.report.digest import POINTS, Digest, digest
from fedbuff.report.figures import figures
from fedbuff.report.files import FolderError
from fedbuff.report.groups import Group, grouped, isolated, reasons, seeds_of
from fedbuff.report.html import page, paragraph, section
from fedbuff.report.run import load
from fedbuff.report.tables import facts_table, settings_tables, summary_table

_EVALUATIONS = 20_000  # shared by the curves of a page, so that many runs still make a small file


@dataclass(frozen=True)
class View:
    """What a page shows of runs: a line about them, tables by name (HTML), figures (numbers), and sentences above the curves.

    Tables that not every run has, but a deployed one, follow the summary under their own names.
    """

    lead: str
    tables: dict[str, str]
    figures: dict[str, Any]
    about_curves: list[str]


def report(paths: Sequence[Path], title: str | None = None, say: Callable[[str], None] = lambda line: None) -> str:
    """The page of the runs in these folders, or in folders of runs as `fedbuff compare` leaves them."""
    found = run_folders(paths, say)
    points = min(POINTS, max(50, _EVALUATIONS // len(found)))
    digests = [digest(load(path), points) for path in found]
    return runs_page(view(digests), title or " · ".join(dict.fromkeys(path.resolve().name for path in paths)))


def runs_page(shown: View, title: str, live: bool = False) -> str:
    """The page of a view; a live one asks for newer views by itself."""
    drawn = {name: f'<div data-figure="{name}"></div>' for name in ("curves", "active", "staleness", "participation")}
    tables = {name: f'<div data-slot="{name}">{made}</div>' for name, made in shown.tables.items()}
    further = [name for name in tables if name not in ("summary", "privacy", "cost", "settings")]
    sections = [
        section("summary", "Summary", tables["summary"]),
        *(section(name.replace(" ", "-"), name.capitalize(), tables[name]) for name in further),
        section("curves", "Learning curves", *map(paragraph, shown.about_curves), drawn["curves"]),
        section("active", "Active trips over virtual time", drawn["active"]),
        section("staleness", "Staleness and weights", drawn["staleness"]),
        section("participation", "Who took part", drawn["participation"]),
        *(section(name, name.capitalize(), tables[name]) for name in ("privacy", "cost") if name in tables),
        section("settings", "Settings", tables["settings"]),
    ]
    without = (
        "<noscript><p>The tables are here; the figures are drawn by a script, which this browser does not run.</p></noscript>"
    )
    state = '<p id="live" role="status">waiting for the run …</p>' if live else ""
    return page(title, [part for part in (state, without, *sections) if part], shown.lead, shown.figures)


def run_folders(paths: Sequence[Path], say: Callable[[str], None] = lambda line: None) -> list[Path]:
    """The runs that `paths` are or hold, each once; those of a comparison in its order. Unfinished ones inside are said."""
    found: dict[Path, Path] = {}
    for path in paths:
        if path.exists() and not path.is_dir():
            raise FolderError(f"{path} is a file, not a run folder")
        inside = [path]
        if path.is_dir() and not (path / "settings.toml").is_file():
            runs = sorted(child.parent for child in path.glob("*/settings.toml"))
            inside = sorted(_finished(runs, say), key=_place_in(path))
            if not inside:
                what = "holds no finished run" if runs else "is neither a run folder nor a folder of runs"
                raise FolderError(f"{path} {what}; `fedbuff run` and `fedbuff compare` write them")
        found |= {run.resolve(): run for run in inside}
    return list(found.values())


def _finished(runs: list[Path], say: Callable[[str], None]) -> list[Path]:
    for run in runs:
        if not (run / "summary.json").is_file():
            say(f"{run} is not finished and left out")
    return [run for run in runs if (run / "summary.json").is_file()]


def _place_in(comparison_folder: Path) -> Callable[[Path], int]:
    """Where a run's name stands in comparison.json; the same for all if there is none."""
    try:
        rows = json.loads((comparison_folder / "comparison.json").read_text(encoding="utf-8"))
        names = [row["name"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError):
        return lambda run: 0
    return lambda run: next((i for i, name in enumerate(names) if run.name.rpartition("-seed")[0] == name), len(names))


def view(digests: Sequence[Digest]) -> View:
    groups = grouped(digests)
    tables = {"summary": summary_table(groups), "settings": settings_tables(groups)}
    tables |= {name: made for name in ("privacy", "cost") if (made := facts_table(groups, name))}
    trips = sum(d.summary["trips"] for d in digests)
    tasks = ", ".join(dict.fromkeys(isolated(str(d.summary["task"])) for d in digests))
    names = ", ".join(isolated(group.name) for group in groups)
    runs = f"{len(digests)} runs" if len(digests) > 1 else f"seed {digests[0].summary['seed']}"
    return View(f"{names} on {tasks} · {runs} · {trips:,} trips", tables, figures(groups), _about_curves(groups))


def _about_curves(groups: Sequence[Group]) -> list[str]:
    """What the figure can't say itself."""
    tasks: dict[str, list[str]] = {}
    for group in groups:
        tasks.setdefault(isolated(str(group.runs[0].summary["task"])), []).append(isolated(group.name))
    said = []
    if len(tasks) > 1:
        which = "; ".join(f"{', '.join(names)} on {task}" for task, names in tasks.items())
        said.append(f"These runs are of different tasks, so their curves can’t be compared: {which}.")
    for group in groups:
        for reason, seeds in reasons(group).items():
            if reason.startswith("diverged"):
                said.append(f"{isolated(group.name)}, {seeds_of(seeds)}: {reason}.")
    without = [isolated(group.name) for group in groups if not any(d.curve["trips"] for d in group.runs)]
    if len(without) == len(groups):
        said.append("There were no evaluations, so there is nothing to draw.")
    elif without:
        said.append(f"Without evaluations: {', '.join(without)}.")
    return said
