"""docs/paper.md: the paper beside ours, made from what is in OUT. Nothing is run.

Wherever ours differs by more than 30 % or in its order, a sentence must say why. Those are written by hand in OUT/why.toml,
under the experiment, the dataset and the row's key; where one is missing, the report says "unexplained".
"""

import os
import tomllib
from pathlib import Path

from fedbuff.paper.experiment import Experiment
from fedbuff.paper.experiments import EXPERIMENTS, body, kept_results
from fedbuff.paper.result import differences, pairs_of
from fedbuff.toml import SettingsError, Table

WHY = "why.toml"
UNEXPLAINED = "**unexplained**"


def report(out: Path, page: Path) -> tuple[str, list[str]]:
    """The page, as text, and the keys of what it can't explain; figures are linked from where `page` will be."""
    why = explanations(out / WHY)
    found = {experiment.name: best(kept_results(out, experiment)) for experiment in EXPERIMENTS.values()}
    parts, missing, used = [HEAD, glance(found)], [], set()
    for experiment in EXPERIMENTS.values():
        results = found[experiment.name]
        parts += [f"## {experiment.where}: {experiment.title}", f"*The paper:* {experiment.claim}"]
        if not results:
            parts.append(f"Not run yet: `fedbuff paper {experiment.name}`.")
        for path, kept in results:
            parts.append(f"### {heading(kept)}")
            figure = os.path.relpath(path.with_suffix(".svg"), page.parent)
            parts += body(kept, figure)
            if kept["stand_in"]:
                continue
            reasons, unexplained, keys = reasons_for(experiment, kept, why)
            used |= keys
            missing += unexplained
            if reasons:
                parts.append("Where ours differs:\n\n" + "\n".join(reasons))
    unused = sorted(set(why) - used)
    if unused:
        parts.append(f"<!-- {WHY} also explains what does not differ any more: {', '.join(unused)} -->")
    return "\n\n".join(parts) + "\n", missing


def glance(found: dict[str, list[tuple[Path, Table]]]) -> str:
    """A line for each result: on which data, and which claims hold."""
    rows = []
    for name, results in found.items():
        experiment = EXPERIMENTS[name]
        link = f"[{experiment.where}](#{anchor(f'{experiment.where}: {experiment.title}')}) {experiment.title}"
        for _, kept in results:
            _, *unlike = str(kept["data"]).split("; ")  # what is not as in the paper
            data = heading(kept) + (f" ({unlike[0].split(', ')[0]})" if unlike else "")
            checks = kept["checks"]
            broken = [f"{c['claim']} ({c['facts']})" for c in checks if not c["holds"]]
            rows.append([link, data, f"{len(checks) - len(broken)} of {len(checks)}", "; ".join(broken)])
            link = ""
    header = ["result", "data", "claims that hold", "claims that do not"], ["---"] * 4
    return "\n".join("| " + " | ".join(row) + " |" for row in (*header, *rows))


def anchor(title: str) -> str:
    """Where a heading is found on its page.

    >>> anchor("Table 2: Client trips for K = 1, 10")
    'table-2-client-trips-for-k--1-10'
    """
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c in "-_")


def best(results: list[tuple[Path, Table]]) -> list[tuple[Path, Table]]:
    """A quick result only where there is no full one of the same data; a quick stand-in only where there is nothing else."""
    full = {kept["dataset"] for _, kept in results if not kept["quick"]}
    chosen = [(path, kept) for path, kept in results if not kept["quick"] or kept["dataset"] not in full]
    better = [(path, kept) for path, kept in chosen if not (kept["stand_in"] and kept["quick"])]
    return better or chosen


def heading(kept: Table) -> str:
    name = str(kept["data"]).split(":")[0]
    words = [name[0].upper() + name[1:], *(["quick"] if kept["quick"] else [])]
    return ", ".join(words + ([f"to {100 * kept['target']:g} %"] if "--target" in kept["command"] else []))


def reasons_for(experiment: Experiment, kept: Table, why: dict[str, str]) -> tuple[list[str], list[str], set[str]]:
    """A line for each row that differs, the keys that nobody explained, and those that were."""
    reasons, missing, used = [], [], set()
    pairs = {pair.key: pair for pair in pairs_of(kept)}
    for key, how in differences(list(pairs.values())).items():
        full = f"{experiment.name}.{kept['dataset']}.{key}"
        used.add(full)
        if full not in why:
            missing.append(full)
        reasons.append(f"- {pairs[key].label} ({how}): {why.get(full, UNEXPLAINED)}")
    return reasons, missing, used


def explanations(path: Path) -> dict[str, str]:
    """why.toml as one level of keys, "table1.cifar10.fedavgm"."""
    if not path.is_file():
        return {}
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        found = {f"{a}.{b}.{key}": text for a, t in tables.items() for b, u in t.items() for key, text in u.items()}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError) as e:
        raise SettingsError(f'{path}: expected sentences under [EXPERIMENT.DATASET], e.g. fedavgm = "…" ({e})') from e
    for key, text in found.items():
        if not isinstance(text, str):
            raise SettingsError(f"{path}: {key}: expected a sentence, got {text!r}")
    return found


HEAD = """# The paper and ours, side by side

*Made by `fedbuff paper report` from [results/paper](../results/paper); don't edit it. [How to run it](reproduce.md).*

Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation*, AISTATS 2022. A number in "paper" is theirs, "ours"
was computed by the command below its table. "> 600" means that not every seed reached the target, and that their mean is more
than that. Where ours, to the paper's target and not on a stand-in, differs by more than 30 %, or comes in another order, a
sentence says why we think it does; **unexplained** means that we can't say yet."""
