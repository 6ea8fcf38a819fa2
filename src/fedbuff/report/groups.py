"""Groups of runs: those with the same settings but for the seed, and the names by which groups are told apart."""

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedbuff import toml
from fedbuff.report.digest import Digest

_TURNING = {"R", "AL", "AN", "RLE", "RLO", "RLI"}  # kinds of characters that change the direction of what stands beside them


@dataclass(frozen=True)
class Group:
    """Runs with the same settings but for the seed."""

    name: str
    runs: list[Digest]


def grouped(digests: Sequence[Digest]) -> list[Group]:
    """Runs that differ in nothing but the seed make one group; groups of one name are told apart by their settings.

    A run that is there twice counts once. Settings name a dataset, not the files that were there: the task's own name does.
    """
    same: dict[tuple[str, str], list[Digest]] = {}
    for d in digests:
        group = same.setdefault((json.dumps(without_seed(d), sort_keys=True), str(d.summary["task"])), [])
        if not any(d.summary["seed"] == other.summary["seed"] and d.curve == other.curve for other in group):
            group.append(d)
    names = [str(runs[0].summary["algorithm"]) for runs in same.values()]
    tables = [toml.dotted(without_seed(runs[0])) for runs in same.values()]
    for table, (settings, task) in zip(tables, same, strict=True):
        if any(other != task for others, other in same if others == settings):
            table["data"] = task
    named: dict[str, list[Digest]] = {}
    for i, runs in enumerate(same.values()):
        twins = [table for name, table in zip(names, tables, strict=True) if name == names[i]]
        differing = [key for key in tables[i] if any(table.get(key) != tables[i][key] for table in twins)]
        keys = differing[:3]
        for twin in twins:  # as many more as it takes
            if all(twin.get(key) == tables[i][key] for key in keys):
                keys += [key for key in differing if twin.get(key) != tables[i][key]][:1]
        remarks = [f"{_told_apart(key, differing)} {tables[i][key]}" for key in keys]
        name = f"{isolated(names[i])} ({', '.join(remarks)})" if remarks else names[i].strip()
        while name in named:
            name += "′"
        named[name] = runs
    return [Group(name, runs) for name, runs in named.items()]


def _told_apart(path: str, others: Sequence[str]) -> str:
    """The last part of a setting's path, with the first where others end alike: client.lr, server.lr."""
    first, last = path.partition(".")[0], path.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in others].count(last) == 1 else f"{first}.{last}"


def without_seed(d: Digest) -> dict[str, Any]:
    return {key: value for key, value in d.settings.items() if key != "seed"}


def reasons(group: Group) -> dict[str, list[int]]:
    """Why runs stopped, with their seeds."""
    found: dict[str, list[int]] = {}
    for d in group.runs:
        if reason := d.summary.get("stopped_by"):
            found.setdefault(str(reason), []).append(d.summary["seed"])
    return found


def seeds_of(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def isolated(name: str) -> str:
    """A name among other words, which stay in their order whatever is in it."""
    turning = any(unicodedata.bidirectional(c) in _TURNING for c in name)
    return f"\N{FIRST STRONG ISOLATE}{name}\N{POP DIRECTIONAL ISOLATE}" if turning else name
