"""The report: runs on one page, a single file that opens offline, on a phone and on paper.

Tables are made here. Figures are numbers in JSON that page.js draws, so that they can be zoomed and asked for values; the
same numbers, sent again and again, are the live view. Everything that comes from a run is escaped, and the page's content
security policy lets no script run but its own.

`page`, `section`, `table` and `figure` also make other pages, of tables and pictures.
"""

import base64
import hashlib
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

from fedbuff import toml
from fedbuff.report.compare import COSTS, comparison
from fedbuff.report.digest import POINTS, Counts, Digest, add, digest
from fedbuff.report.files import FolderError
from fedbuff.report.run import load

_COLOURS = 7  # in page.css; the next seven groups have them again, with another shape
_BINS = 40  # of a histogram, at most
_LONG = 120  # characters of a fact: then it is no cell of a table
_SHORT = 24  # characters of a name that is said again and again
_TURNING = {"R", "AL", "AN", "RLE", "RLO", "RLI"}  # kinds of characters that change the direction of what stands beside them
_EVALUATIONS = 20_000  # shared by the curves of a page, so that many runs still make a small file


# ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def page(title: str, sections: Sequence[str], lead: str = "", figures: Mapping[str, Any] | None = None) -> str:
    """A whole HTML document; `sections` are HTML, as `section` makes it, `title` and `lead` are plain text."""
    script, style = (files("fedbuff.report").joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'; connect-src 'self'"
    parts = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>",
        f"<header><h1>{escape(title)}</h1>" + (f'<p class="lead">{escape(lead)}</p>' if lead else "") + "</header>",
        "<main>",
        *sections,
        "</main>",
        f'<script type="application/json" id="figures">{in_script(figures)}</script>' if figures is not None else "",
        f"<script>{script}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(part for part in parts if part)


def section(name: str, heading: str, *parts: str) -> str:
    """A part of a page with a heading; `name` is its anchor."""
    return f'<section id="{escape(name)}">\n<h2>{escape(heading)}</h2>\n' + "\n".join(parts) + "\n</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def figure(svg: str, caption: str) -> str:
    """A picture: the text of an SVG file, embedded so that its styles stay its own."""
    data = base64.b64encode(svg.encode()).decode()
    said = escape(caption)
    picture = f'<img class="picture" alt="{said}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{picture}<figcaption>{said}</figcaption></figure>"


def table(header: Sequence[str], body: Sequence[Sequence["str | Cell"]], caption: str = "", name: str = "") -> str:
    """A table of plain text, in a frame of its own that scrolls if it is wider than the screen."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    rows = "\n".join(_row(row) for row in body)
    said = f"<caption>{escape(caption)}</caption>" if caption else ""
    label = escape(caption or header[0] or "table")
    of = f' data-table="{escape(name)}"' if name else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"{of}><table>{said}\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>"
    )


@dataclass(frozen=True)
class Cell:
    """A cell with more than text: a remark below, a bar as long as `share`, a group's colour, or a mark that it differs.

    dotted   it is the path of a setting, to be broken at its dots and nowhere else
    """

    text: str
    remark: str = ""
    share: float | None = None
    group: int | None = None
    differs: bool = False
    dotted: bool = False


def _row(cells: Sequence[str | Cell]) -> str:
    first, *others = (cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)
    named = f'<th scope="row">{_inside(first)}</th>'
    return "<tr>" + named + "".join(f"<td{' class=differs' if c.differs else ''}>{_inside(c)}</td>" for c in others) + "</tr>"


def _inside(cell: Cell) -> str:
    chip = "" if cell.group is None else _chip(cell.group)
    text = escape(cell.text).replace(".", ".<wbr>") if cell.dotted else escape(cell.text)
    bar = "" if cell.share is None else f'<span class="bar" style="width:{100 * cell.share:.1f}%"></span>'
    return chip + text + (f"<small>{escape(cell.remark)}</small>" if cell.remark else "") + bar


def _chip(group: int) -> str:
    return f'<span class="chip" data-group="{group % _COLOURS}" data-lap="{group // _COLOURS}"></span>'


def in_script(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e").replace("\u2028", "\\u2028")


# ── the report of runs ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Group:
    """Runs with the same settings but for the seed."""

    name: str
    runs: list[Digest]


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
    tables = {"summary": _summary_table(groups), "settings": _settings_tables(groups)}
    tables |= {name: made for name in ("privacy", "cost") if (made := _facts_table(groups, name))}
    trips = sum(d.summary["trips"] for d in digests)
    tasks = ", ".join(dict.fromkeys(_isolated(str(d.summary["task"])) for d in digests))
    names = ", ".join(_isolated(group.name) for group in groups)
    runs = f"{len(digests)} runs" if len(digests) > 1 else f"seed {digests[0].summary['seed']}"
    return View(f"{names} on {tasks} · {runs} · {trips:,} trips", tables, _figures(groups), _about_curves(groups))


def grouped(digests: Sequence[Digest]) -> list[Group]:
    """Runs that differ in nothing but the seed make one group; groups of one name are told apart by their settings."""
    same: dict[str, list[Digest]] = {}
    for d in digests:
        same.setdefault(json.dumps(_without_seed(d), sort_keys=True), []).append(d)
    names = [str(runs[0].summary["algorithm"]) for runs in same.values()]
    tables = [toml.dotted(_without_seed(runs[0])) for runs in same.values()]
    named: dict[str, list[Digest]] = {}
    for i, runs in enumerate(same.values()):
        twins = [table for name, table in zip(names, tables, strict=True) if name == names[i]]
        differing = [key for key in tables[i] if any(table.get(key) != tables[i][key] for table in twins)]
        remarks = [f"{_told_apart(key, differing)} {tables[i][key]}" for key in differing[:3]]
        name = f"{_isolated(names[i])} ({', '.join(remarks)})" if remarks else names[i].strip()
        while name in named:
            name += "′"
        named[name] = runs
    return [Group(name, runs) for name, runs in named.items()]


def _told_apart(path: str, others: Sequence[str]) -> str:
    """The last part of a setting's path, with the first where others end alike: client.lr, server.lr."""
    first, last = path.partition(".")[0], path.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in others].count(last) == 1 else f"{first}.{last}"


def _isolated(name: str) -> str:
    """A name among other words, which stay in their order whatever is in it."""
    turning = any(unicodedata.bidirectional(c) in _TURNING for c in name)
    return f"\N{FIRST STRONG ISOLATE}{name}\N{POP DIRECTIONAL ISOLATE}" if turning else name


def _reasons(group: Group) -> dict[str, list[int]]:
    """Why runs stopped, with their seeds."""
    found: dict[str, list[int]] = {}
    for d in group.runs:
        if reason := d.summary.get("stopped_by"):
            found.setdefault(str(reason), []).append(d.summary["seed"])
    return found


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _without_seed(d: Digest) -> dict[str, Any]:
    return {key: value for key, value in d.settings.items() if key != "seed"}


# ── tables ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _summary_table(groups: Sequence[Group]) -> str:
    rows = comparison({group.name: group.runs for group in groups})
    targets = {row["target"] for row in rows}
    common = next(iter(targets)) if len(targets) == 1 else None
    to = f" to {100 * common:g}\N{NO-BREAK SPACE}%" if common is not None else "" if targets == {None} else " to target"
    header = ["", "seeds", *(f"{title}{to}" for title in COSTS.values()), "last accuracy", "staleness", "updates used", "took"]
    most = {cost: max(row[f"{cost}_limit"] for row in rows) or 1.0 for cost in COSTS}
    body: list[list[str | Cell]] = []
    for i, (group, row) in enumerate(zip(groups, rows, strict=True)):
        seeds = ", ".join(map(str, row["seeds"]))
        costs = [_cost_cell(row, rows[0], cost, most[cost]) for cost in COSTS]
        stale = [d.summary["staleness_max"] for d in group.runs if d.summary["staleness_max"] is not None]
        outcomes = add(d.outcomes for d in group.runs)
        ended, used = sum(outcomes.values()), outcomes.pop("used", 0)
        body.append(
            [
                Cell(group.name, group=i),
                Cell(seeds, _reached(row)),
                *costs,
                _accuracy(row["accuracy"]),
                Cell(f"{row['staleness_mean']:.1f}", _together(f"at most {max(stale):,}") if stale else ""),
                Cell(f"{used / ended:.1%}" if ended else "–", ", ".join(f"{v:,} {k}" for k, v in outcomes.items())),
                Cell(f"{row['wall_seconds']:,.1f} s", _stopped(_reasons(group))),
            ]
        )
    several = any(len(group.runs) > 1 for group in groups)
    return table(header, body, "Mean ± standard deviation over seeds" if several else "", "summary")


def _stopped(reasons: Mapping[str, Sequence[int]]) -> str:
    """Why, in few words."""
    short = {reason: reason.partition(":")[0] for reason in reasons}
    if len(reasons) == 1:
        return "".join(short.values())
    return "; ".join(f"{short[reason]} ({_together(_seeds(seeds))})" for reason, seeds in reasons.items())


def _reached(row: Mapping[str, Any]) -> str:
    if row["target"] is None:
        return ""
    return " ".join(map(_together, (f"{row['reached']} of {len(row['seeds'])}", f"reached {100 * row['target']:g} %")))


def _cost_cell(row: Mapping[str, Any], first: Mapping[str, Any], cost: str, most: float) -> Cell:
    digits = 1 if cost == "virtual_time" else 0
    limit = row[f"{cost}_limit"]
    share = limit / most
    if row["target"] is None:
        return Cell(f"{limit:,.{digits}f}", share=share)
    if not row[cost]:
        return Cell(f"> {limit:,.{digits}f}", "not reached by all", share)
    spread = f" ± {row[cost]['std']:,.{digits}f}" if len(row["seeds"]) > 1 else ""
    ratio = row["ratio"][cost] if row["name"] != first["name"] and row["target"] == first["target"] else None
    whose = f"{_isolated(first['name'])}’s" if len(first["name"]) <= _SHORT else "the first’s"
    remark = f"{_together(f'{ratio:.2f} ×')} {whose}" if ratio is not None else ""
    return Cell(f"{row[cost]['mean']:,.{digits}f}{spread}", remark, share)


def _together(words: str) -> str:
    """Words that stay on one line."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def _accuracy(spread: Mapping[str, float | None] | None) -> str:
    if spread is None or spread["mean"] is None:
        return "–"
    return f"{spread['mean']:.1%}" + ("" if spread["std"] is None else f" ± {100 * spread['std']:.1f}")


def _settings_tables(groups: Sequence[Group]) -> str:
    """What differs, in full view; what is the same for all, folded away."""
    columns = [toml.dotted(_without_seed(group.runs[0])) for group in groups]
    keys = _in_order([key for column in columns for key in column if key != "name"])  # which heads the columns
    differing = [key for key in keys if len({column.get(key) for column in columns}) > 1]
    same = [key for key in keys if key not in differing]
    header = ["", *(group.name for group in groups)]
    parts = []
    if differing:
        body: list[list[str | Cell]] = [
            [Cell(key, dotted=True), *_marked([column.get(key, "–") for column in columns])] for key in differing
        ]
        parts.append(table(header, body, "What differs; ◆ marks a value unlike the first’s", "differences"))
    shared = table(["", "value"], [[Cell(key, dotted=True), columns[0][key]] for key in same], "The same for all", "same")
    about = f"{len(same)} settings are the same for all" if len(groups) > 1 else f"{len(same)} settings"
    parts.append(f"<details{'' if differing else ' open'}><summary>{about}</summary>{shared}</details>" if same else "")
    return "".join(parts)


def _in_order(keys: Sequence[str]) -> list[str]:
    """Each key once, those of one table together: `server.start.cohort.size` beside `server.start.refill.concurrency`."""
    places: dict[str, int] = {}
    for key in keys:
        parts = key.split(".")
        for depth in range(1, len(parts) + 1):
            places.setdefault(".".join(parts[:depth]), len(places))
    return sorted(dict.fromkeys(keys), key=lambda key: [places[key.rsplit(".", up)[0]] for up in range(key.count("."), -1, -1)])


def _marked(values: list[str]) -> list[Cell]:
    return [Cell(value if value == values[0] else f"◆ {value}", differs=value != values[0]) for value in values]


def _facts_table(groups: Sequence[Group], name: str) -> str:
    """What the summaries of the runs say under `name`, if any do: means over seeds where they differ."""
    columns: list[dict[str, str]] = []
    for group in groups:
        facts = [_plain(d.summary[name]) for d in group.runs if isinstance(d.summary.get(name), Mapping)]
        keys = dict.fromkeys(key for fact in facts for key in fact)
        columns.append({key: _typical([fact[key] for fact in facts if key in fact]) for key in keys})
    keys = dict.fromkeys(key for column in columns for key in column)
    if not keys:
        return ""
    long = {key for key in keys for column in columns if len(column.get(key, "")) > _LONG}
    body = [[key.replace("_", " "), *(column.get(key, "–") for column in columns)] for key in keys if key not in long]
    texts = dict.fromkeys(column[key] for key in keys if key in long for column in columns if key in column)
    return table(["", *(group.name for group in groups)], body, name.capitalize(), name) + "".join(map(paragraph, texts))


def _plain(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in facts.items():
        plain |= _plain(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return plain


def _typical(values: Sequence[Any]) -> str:
    if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        middle = mean(values)
        return f"{middle:,.0f}" if abs(middle) >= 1000 else f"{middle:.4g}"
    return ", ".join(dict.fromkeys("–" if v is None else str(v) for v in values))


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _figures(groups: Sequence[Group]) -> dict[str, Any]:
    names = dict.fromkeys(name for g in groups for d in g.runs for name in d.curve if name not in COSTS)
    metrics = sorted(names, key=lambda name: not name.endswith(" accuracy"))
    judged = metrics[0] if metrics and metrics[0].endswith(" accuracy") else None
    targets = sorted({d.summary["target"] for g in groups for d in g.runs} - {None})
    counted = {
        "staleness": [_histogram(add(d.staleness for d in g.runs)) for g in groups],
        "weight": [_histogram(add(d.weight for d in g.runs), whole=False) for g in groups],
        "examples": [_histogram(add(d.examples for d in g.runs), behind=add(d.examples_all for d in g.runs)) for g in groups],
        "participations": [_histogram(add(d.participations for d in g.runs)) for g in groups],
    }
    return {
        "groups": [{"name": g.name, "seeds": [d.summary["seed"] for d in g.runs]} for g in groups],
        "costs": COSTS,
        "metrics": metrics,
        "targets": [{"metric": judged, "value": target} for target in targets if judged is not None],
        "curves": [[{name: _short(column) for name, column in d.curve.items()} for d in g.runs] for g in groups],
        "active": [
            {"until": _short(d.summary["virtual_time"]), **{k: _short(v) for k, v in d.active.items() if k != "time"}}
            for d in (g.runs[0] for g in groups)
        ],
        **counted,
    }


def _about_curves(groups: Sequence[Group]) -> list[str]:
    """What the figure can't say itself."""
    tasks: dict[str, list[str]] = {}
    for group in groups:
        tasks.setdefault(_isolated(str(group.runs[0].summary["task"])), []).append(_isolated(group.name))
    said = []
    if len(tasks) > 1:
        which = "; ".join(f"{', '.join(names)} on {task}" for task, names in tasks.items())
        said.append(f"These runs are of different tasks, so their curves can’t be compared: {which}.")
    for group in groups:
        for reason, seeds in _reasons(group).items():
            if reason.startswith("diverged"):
                said.append(f"{_isolated(group.name)}, {_seeds(seeds)}: {reason}.")
    without = [_isolated(group.name) for group in groups if not any(d.curve["trips"] for d in group.runs)]
    if len(without) == len(groups):
        said.append("There were no evaluations, so there is nothing to draw.")
    elif without:
        said.append(f"Without evaluations: {', '.join(without)}.")
    return said


def _histogram(counts: Counts, whole: bool = True, behind: Counts | None = None) -> dict[str, Any] | None:
    """Counts in at most `_BINS` equal bins that begin at a round number; None if there is nothing to count.

    Whole numbers get bins of whole numbers; of other values the highest belongs to the last bin. `behind` is counted in
    the same bins, unless it is the same.
    """
    everything = {**counts, **(behind or {})}
    if not counts:
        return None
    low, high = min(everything), max(everything)
    if whole:
        step: float = next(s for s in _round_steps(1) if high // s - low // s < _BINS)
        first, number = low // step * step, int(high // step - low // step) + 1
    else:
        first, step = 0.0, next(s for s in _round_steps(0.01) if high / s <= _BINS / 2)
        number = max(1, -int(-round(high / step, 9) // 1))
    total = sum(counts.values())
    average = sum(value * count for value, count in counts.items()) / total
    made = {"first": first, "step": step, "whole": whole, "total": total, "mean": _short(average)}
    made |= {"low": min(counts), "high": max(counts), "counts": _binned(counts, first, step, number)}
    if behind is not None and behind != counts:
        made["behind"] = _binned(behind, first, step, number)
    return made


def _round_steps(smallest: float) -> Sequence[float]:
    return [smallest * factor * 10**power for power in range(13) for factor in (1, 2, 5)]


def _binned(counts: Counts, first: float, step: float, number: int) -> list[int]:
    bins = [0] * number
    for value, count in counts.items():
        bins[min(int((value - first) / step + 1e-9), number - 1)] += count
    return bins


def _short(value: Any) -> Any:
    """Five digits are more than a screen shows."""
    if isinstance(value, list):
        return [_short(item) for item in value]
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.5g}")
    return int(rounded) if rounded.is_integer() else rounded
