"""The tables of a report: what groups of runs came to, and their settings side by side."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from fedbuff import toml
from fedbuff.report.compare import COSTS, comparison
from fedbuff.report.digest import add
from fedbuff.report.groups import Group, isolated, reasons, seeds_of, without_seed
from fedbuff.report.html import Cell, paragraph, table

_LONG = 120  # characters of a fact: then it is no cell of a table
_SHORT = 24  # characters of a name that is said again and again


def summary_table(groups: Sequence[Group]) -> str:
    rows = comparison({group.name: group.runs for group in groups})
    targets = {row["target"] for row in rows}
    common = next(iter(targets)) if len(targets) == 1 else None
    to = f" to {100 * common:g}\N{NO-BREAK SPACE}%" if common is not None else "" if targets == {None} else " to target"
    header = ["", "seeds", *(f"{title}{to}" for title in COSTS.values()), "last accuracy", "staleness", "updates used", "took"]
    most = {cost: max(row[f"{cost}_limit"] for row in rows) or 1.0 for cost in COSTS}
    body: list[list[str | Cell]] = []
    for i, (group, row) in enumerate(zip(groups, rows, strict=True)):
        seeds = ", ".join(map(str, row["seeds"]))
        costs = [_cost_cell(row, rows[0], cost, most[cost], targets != {None}) for cost in COSTS]
        stale = [d.summary["staleness_max"] for d in group.runs if d.summary["staleness_max"] is not None]
        outcomes = add(d.outcomes for d in group.runs)
        ended, used = sum(outcomes.values()), outcomes.pop("used", 0)
        body.append(
            [
                Cell(group.name, group=i),
                Cell(seeds, _reached(row)),
                *costs,
                _accuracy(row["accuracy"]),
                Cell(f"{row['staleness_mean']:.1f}", _together(f"at most {max(stale):,}")) if stale else "–",
                Cell(f"{used / ended:.1%}" if ended else "–", ", ".join(f"{v:,} {k}" for k, v in outcomes.items())),
                Cell(f"{row['wall_seconds']:,.1f} s", _stopped(reasons(group))),
            ]
        )
    several = any(len(group.runs) > 1 for group in groups)
    return table(header, body, "Mean ± standard deviation over seeds" if several else "", "summary")


def _stopped(why: Mapping[str, Sequence[int]]) -> str:
    """Why, in few words."""
    short = {reason: reason.partition(":")[0] for reason in why}
    if len(why) == 1:
        return "".join(short.values())
    return "; ".join(f"{short[reason]} ({_together(seeds_of(seeds))})" for reason, seeds in why.items())


def _reached(row: Mapping[str, Any]) -> str:
    if row["target"] is None:
        return ""
    return " ".join(map(_together, (f"{row['reached']} of {len(row['seeds'])}", f"reached {100 * row['target']:g} %")))


def _cost_cell(row: Mapping[str, Any], first: Mapping[str, Any], cost: str, most: float, targets: bool) -> Cell:
    digits = 1 if cost == "virtual_time" else 0
    limit = row[f"{cost}_limit"]
    share = limit / most
    if row["target"] is None:
        return Cell("–", f"no target: {limit:,.{digits}f} in all") if targets else Cell(f"{limit:,.{digits}f}", share=share)
    if not row[cost]:
        return Cell(f"> {limit:,.{digits}f}", "not reached by all", share)
    spread = f" ± {row[cost]['std']:,.{digits}f}" if len(row["seeds"]) > 1 else ""
    ratio = row["ratio"][cost] if row["name"] != first["name"] and row["target"] == first["target"] else None
    whose = f"{isolated(first['name'])}’s" if len(first["name"]) <= _SHORT else "the first’s"
    remark = f"{_together(f'{ratio:.2f} ×')} {whose}" if ratio is not None else ""
    return Cell(f"{row[cost]['mean']:,.{digits}f}{spread}", remark, share)


def _together(words: str) -> str:
    """Words that stay on one line."""
    return words.replace(" ", "\N{NO-BREAK SPACE}")


def _accuracy(spread: Mapping[str, float | None] | None) -> str:
    if spread is None or spread["mean"] is None:
        return "–"
    return f"{spread['mean']:.1%}" + ("" if spread["std"] is None else f" ± {100 * spread['std']:.1f}")


def settings_tables(groups: Sequence[Group]) -> str:
    """What differs, in full view; what is the same for all, folded away."""
    columns = [toml.dotted(without_seed(group.runs[0])) for group in groups]
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
    caption = "The same for all" if len(groups) > 1 else ""
    shared = table(["", "value"], [[Cell(key, dotted=True), columns[0][key]] for key in same], caption, "same")
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


def facts_table(groups: Sequence[Group], name: str) -> str:
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
