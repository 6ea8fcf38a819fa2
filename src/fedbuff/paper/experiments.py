"""All tables and figures of the paper, and what `fedbuff paper NAME` does: run what is missing, put it together, keep it.

OUT/NAME/DATASET.json, .md and .svg hold a result (DATASET-quick.… a quick one, DATASET-to-85.… one to another target than the
paper's, result.… one that needs no data), OUT/cells what was trained for it, OUT/settings what was tuned.
"""

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedbuff import toml
from fedbuff.bench.bench import machine
from fedbuff.paper import cells, methods
from fedbuff.paper.datasets import DATASETS, NO_DATA, REAL, Dataset, aiming, quick
from fedbuff.paper.experiment import Ask, Experiment
from fedbuff.paper.fig_bias import FIG_BIAS
from fedbuff.paper.fig_concurrency import FIG_CONCURRENCY
from fedbuff.paper.fig_curves import FIG_CURVES
from fedbuff.paper.fig_delays import FIG_DELAYS
from fedbuff.paper.fig_dp import FIG_DP
from fedbuff.paper.fig_progress import FIG_PROGRESS
from fedbuff.paper.fig_rounds import FIG_ROUNDS
from fedbuff.paper.fig_stragglers import FIG_STRAGGLERS
from fedbuff.paper.result import as_json, lines
from fedbuff.paper.table1 import TABLE1
from fedbuff.paper.table_average import TABLE_AVERAGE
from fedbuff.paper.table_delays import TABLE_DELAYS
from fedbuff.paper.table_hyper import TABLE_HYPER
from fedbuff.paper.table_k import TABLE_K
from fedbuff.paper.table_large_k import TABLE_LARGE_K
from fedbuff.paper.table_lrnorm import TABLE_LRNORM
from fedbuff.paper.theorem import THEOREM
from fedbuff.report.compare import in_markdown
from fedbuff.report.files import FolderError, write_json, write_text
from fedbuff.settings import from_tables
from fedbuff.toml import SettingsError, Table

EXPERIMENTS = {
    e.name: e
    for e in (
        TABLE1,
        TABLE_K,
        TABLE_HYPER,
        TABLE_DELAYS,
        TABLE_LARGE_K,
        TABLE_LRNORM,
        FIG_ROUNDS,
        FIG_PROGRESS,
        FIG_CONCURRENCY,
        FIG_DP,
        FIG_DELAYS,
        FIG_STRAGGLERS,
        FIG_BIAS,
        FIG_CURVES,
        THEOREM,
        TABLE_AVERAGE,
    )
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What the command line asked for. `dataset` None: all that an experiment has, or what stands in for them if quick.

    With `so_far`, results are put together from what was run before, and nothing is run. `target` is for data at hand with
    which the paper's can't be reached.
    """

    out: Path = Path("results/paper")
    dataset: str | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: bool = False
    workers: int | None = None
    quiet: bool = False
    so_far: bool = False
    target: float | None = None

    def asks(self, experiment: Experiment) -> Iterator[Ask]:
        """One for each dataset."""
        for dataset in self.datasets(experiment):
            yield Ask(dataset, self.out / "settings", self.seeds, self.quick)

    def datasets(self, experiment: Experiment) -> list[Dataset]:
        if not experiment.datasets:
            return [NO_DATA]
        allowed = dict.fromkeys((*experiment.datasets, experiment.quick))
        if self.dataset is not None and self.dataset not in allowed:
            raise SettingsError(
                f"--dataset {self.dataset}: {experiment.name} can't be run on it; {toml.suggest(self.dataset, allowed)}"
            )
        names = [self.dataset] if self.dataset else [experiment.quick] if self.quick else list(experiment.datasets)
        chosen = [aiming(quick(DATASETS[name]) if self.quick else DATASETS[name], self.target) for name in names]
        return [d if d.name in REAL else replace(d, paper=experiment.beside) for d in chosen]


def find(name: str) -> Experiment:
    if name not in EXPERIMENTS:
        raise SettingsError(f"paper {name}: unknown; {toml.suggest(name, dict.fromkeys((*EXPERIMENTS, *OTHERS)))}")
    return EXPERIMENTS[name]


OTHERS = ("list", "all", "report", "tune")


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(experiment: Experiment, request: Request, say: Say) -> list[Table]:
    """Run what is missing, and keep the results: one for each dataset, as its JSON file holds it."""
    asks = list(request.asks(experiment))
    for ask in asks:
        if ask.dataset is not NO_DATA:
            _ = ask.data  # what is missing is said before hours are spent on what is there
    return [run_one(experiment, ask, request, say) for ask in asks]


def run_one(experiment: Experiment, ask: Ask, request: Request, say: Say) -> Table:
    needed = experiment.cells(ask)
    for key, tables in needed.items():  # all settings are checked before the first run starts
        try:
            from_tables(tables)
        except SettingsError as e:
            raise SettingsError(f"{experiment.name}, {ask.dataset.name}, {key}: {e}") from e
    if request.so_far and not experiment.so_far:
        raise SettingsError(f"--so-far: {experiment.name} needs all of its runs")
    found = measured(needed, ask, request, say)
    result = experiment.result(ask, found)
    partial = request.so_far and not complete(found, len(ask.seeds))
    if partial:
        result = replace(result, notes=[progress(found, len(ask.seeds)), *result.notes])
    kept = {
        **about(experiment, ask, needed),
        **as_json(result),
        "so_far": partial,
        "cells": sorted({cells.where(from_tables({**t, "seed": s}), Path()).stem for t in needed.values() for s in ask.seeds}),
    }
    folder = request.out / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    name = stem(ask)
    if result.plot is not None:
        result.plot.save(folder / f"{name}.svg")
    write_json(folder / f"{name}.json", kept)
    write_text(folder / f"{name}.md", as_markdown(kept, f"{name}.svg"))
    return kept


def measured(needed: dict[str, Table], ask: Ask, request: Request, say: Say) -> dict[str, list[cells.Cell]]:
    """What the runs came to, by key: a cell for each seed, or those that are there so far."""
    found: dict[str, list[cells.Cell]] = {key: [] for key in needed}
    if not needed:
        return found  # and there may be no data
    wanted = [(key, seed) for seed in ask.seeds for key in needed]  # a table of the first seed is there early
    runs = [(needed[key], seed) for key, seed in wanted]
    came: Sequence[cells.Cell | None]
    if request.so_far:
        came = [cells.so_far(tables, seed, request.out, ask.data) for tables, seed in runs]
    else:
        came = cells.measure_all(runs, request.out, ask.data, say, workers=request.workers, quiet=request.quiet)
    for (key, _), cell in zip(wanted, came, strict=True):
        if cell is not None:
            found[key].append(cell)
    return found


def complete(found: dict[str, list[cells.Cell]], seeds: int) -> bool:
    return all(len(group) == seeds and all(map(ended, group)) for group in found.values())


def ended(cell: cells.Cell) -> bool:
    return bool(cell.summary["stopped_by"] != "not done yet")


def progress(found: dict[str, list[cells.Cell]], seeds: int) -> str:
    """What a table that is not complete was made of."""
    done = {key: [cell.seed for cell in group if ended(cell)] for key, group in found.items()}
    told = [f"{key}: seed {', '.join(map(str, ended))}" for key, ended in done.items() if ended]
    begun = [f"{key} {cell.seed}" for key, group in found.items() for cell in group if cell.seed not in done[key]]
    text = f"so far: {sum(map(len, done.values()))} of {len(found) * seeds} runs ({'; '.join(told) or 'none'})"
    return text + (f"; stopped before their end: {', '.join(begun)}" if begun else "")


def stem(ask: Ask) -> str:
    """The name of a result's files."""
    name = "result" if ask.dataset is NO_DATA else ask.dataset.name
    if ask.dataset.aimed:
        name += f"-to-{100 * ask.dataset.target:g}"
    return f"{name}-quick" if ask.quick else name


def about(experiment: Experiment, ask: Ask, needed: dict[str, Table]) -> Table:
    """What a reader must know to judge the numbers."""
    dataset = ask.dataset
    used = list(dict.fromkeys(tables["name"] for tables in needed.values()))
    untuned = [methods.TITLES[m] for m in used if m in methods.TITLES and not methods.is_tuned(dataset, ask.tuned, m)]
    notes = [f"untuned learning rates: {', '.join(untuned)}"] if untuned else []
    return {
        "experiment": experiment.name,
        "where": experiment.where,
        "title": experiment.title,
        "claim": experiment.claim,
        "dataset": dataset.name,
        "data": "no data needed" if dataset is NO_DATA else dataset.describe(ask.data.name, ask.data.sizes),
        "paper_dataset": DATASETS[dataset.paper].title if dataset.paper in DATASETS else "",
        "stand_in": bool(dataset.reduced),
        "quick": ask.quick,
        "command": command(experiment, ask),
        "target": dataset.target if needed else None,
        "concurrency": dataset.concurrency if needed else None,
        "trips": dataset.trips if needed else None,
        "seeds": list(ask.seeds[:1] if experiment.one_seed else ask.seeds),
        "caveats": notes,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
    }


def command(experiment: Experiment, ask: Ask) -> str:
    """What to type to get the same."""
    words = ["fedbuff", "paper", experiment.name]
    if ask.dataset.name in REAL:
        words += ["--dataset", ask.dataset.name]
    if ask.dataset.aimed:
        words += ["--target", f"{ask.dataset.target:g}"]
    if ask.seeds != (0, 1, 2):
        words += ["--seeds", ",".join(map(str, ask.seeds))]
    return " ".join(words + (["--quick"] if ask.quick else []))


def as_markdown(kept: Table, figure: str) -> str:
    """A result as a page of its own."""
    parts = [f"# {kept['where']}: {kept['title']}", f"The paper: {kept['claim']}", *body(kept, figure)]
    return "\n\n".join(parts) + "\n"


def body(kept: Table, figure: str) -> list[str]:
    """Table, claims, figure and what a reader must know, as paragraphs."""
    parts = [in_markdown(*lines(kept)).rstrip("\n")]
    if kept["checks"]:
        otherwise = "**not shown so far**" if kept.get("so_far") else "**does not hold**"
        parts.append(
            "\n".join(f"- {'holds' if c['holds'] else otherwise}: {c['claim']} ({c['facts']})" for c in kept["checks"])
        )
    if kept["figure"]:
        parts.append(f"![{kept['title']}]({figure})")
    facts = [kept["data"]]
    if kept["target"] is not None:
        facts.append(f"target {100 * kept['target']:g} %, concurrency {kept['concurrency']:,}, at most {kept['trips']:,} trips")
    facts += [*kept["caveats"], *kept["notes"]]
    m = kept["machine"]
    seeds = f"seed{'s' if len(kept['seeds']) > 1 else ''} {', '.join(map(str, kept['seeds']))}"
    where = f"{m['cpu']}, {m['cores']} core{'s' if m['cores'] > 1 else ''}, torch {m['torch']}"
    facts.append(f"`{kept['command']}`; {seeds}; {where}; {kept['date']}")
    sentences = [f"{fact[0].upper() + fact[1:] if fact[0].isascii() else fact}." for fact in facts]
    parts.append("<small>" + "<br>\n".join(sentences) + "</small>")
    return parts


# ── what there is ────────────────────────────────────────────────────────────────────────────────────────────────────


def kept_results(out: Path, experiment: Experiment) -> list[tuple[Path, Table]]:
    """The results of an experiment that are there, in the order of its datasets, full ones before quick ones."""
    found = []
    names = dict.fromkeys((*experiment.datasets, experiment.quick, "result"))
    for path in (
        path
        for end in ("", "-quick")
        for name in names
        for pattern in (f"{name}{end}.json", f"{name}-to-*[0-9]{end}.json")
        for path in sorted((out / experiment.name).glob(pattern))
    ):
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            body(kept, "")  # whatever is missing is missed here
            found.append((path, kept))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as e:
            raise FolderError(f"{path} is damaged ({e!r}): run `fedbuff paper {experiment.name}` again") from e
    return found


def status(request: Request) -> list[Table]:
    """For every experiment and dataset: about how long it takes, how much of it is cached, which results are kept."""
    rows = []
    for experiment in EXPERIMENTS.values():
        kept = {path.stem: result for path, result in kept_results(request.out, experiment)}
        for dataset in [DATASETS[name] for name in experiment.datasets] or [NO_DATA]:
            ask = Ask(dataset, request.out / "settings", request.seeds, read=False)
            trips = (experiment.trips or {}).get(dataset.name, 0.0) * 1000 * len(request.seeds)
            rate = dataset.rate * (2 if experiment.linear and dataset.name == "sent140" else 1)
            have, of = cached(experiment, ask, request.out, kept.get(stem(ask)))
            own = (stem(ask), f"{stem(ask)}-quick", f"{experiment.quick}-quick")
            to_another = (f"{stem(ask)}-to-", f"{experiment.quick}-to-")
            rows.append(
                {
                    "name": experiment.name,
                    "where": experiment.where,
                    "dataset": "" if dataset is NO_DATA else dataset.name,
                    "minutes": round(trips / rate / 60, 1),
                    "cached": have,
                    "runs": of,
                    "results": [name for name in kept if name in own or name.startswith(to_another)],
                }
            )
    return rows


def cached(experiment: Experiment, ask: Ask, out: Path, kept: Table | None) -> tuple[int, int | None]:
    """How many of the runs an experiment needs are there, of how many; None if only the data could tell.

    A result that is kept says which these were: on the data at hand, they may be others than the paper's.
    """
    if kept is not None and kept["seeds"] == list(ask.seeds):
        return sum((out / "cells" / f"{name}.json").is_file() for name in kept["cells"]), len(kept["cells"])
    try:
        needed = [from_tables({**tables, "seed": seed}) for tables in experiment.cells(ask).values() for seed in ask.seeds]
    except ValueError:
        return 0, None
    return sum(cells.where(settings, out).is_file() for settings in needed), len(needed)


def estimate(row: Table) -> str:
    """How long, for people."""
    minutes = row["minutes"]
    if not minutes:
        return "seconds"
    return f"{minutes / 60:.0f} h" if minutes >= 100 else f"{max(1, minutes):.0f} min"


def all_of(request: Request, say: Say) -> list[Table]:
    """Every experiment, one after another; a dataset that not all of them have is skipped where it does not fit."""
    found: list[Table] = []
    for experiment in EXPERIMENTS.values():
        if request.dataset and experiment.datasets and request.dataset not in (*experiment.datasets, experiment.quick):
            continue
        if request.so_far and not experiment.so_far:
            continue
        say(f"{experiment.name}: {experiment.title}")
        found += run(experiment, request, say)
    return found
