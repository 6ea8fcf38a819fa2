"""Tuning: Optuna's TPE searches the learning rates, β and μ for the fewest trips to the target (extra `fedbuff[tune]`).

    study = tune(tables, Path("runs/tune"), trials=30, workers=2)

A trial is a run with one worker. It is judged by its trips to the target; one that does not get there within its trips comes
after all that do, by its accuracy over the last fifth of them. One whose learning curve lies below the median of the others'
is given up. In the end the best three are run with another seed as well, and the best on both wins: a lucky seed finds
learning rates at the edge. Trials are kept in SQLite: a study that was killed goes on where it stopped, and with one process
ends the same as one that was not.
"""

import json
import math
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbuff import settings, toml
from fedbuff.core import check
from fedbuff.core.random import seed_for
from fedbuff.core.schedule import check_fits
from fedbuff.presets import PRESETS
from fedbuff.report.files import write_json, write_text
from fedbuff.sim.simulation import DIVERGED, Status
from fedbuff.toml import SettingsError, Table
from fedbuff.tune_folder import opened

if TYPE_CHECKING:
    import optuna


@dataclass(frozen=True)
class between:
    """Any number from `low` to `high`, on a logarithmic scale."""

    low: float
    high: float

    def __post_init__(self) -> None:
        check.number(0, above=True, low=self.low)
        check.number(self.low, above=True, high=self.high)


Space = Mapping[str, between | tuple[float, ...]]  # by the path of a setting, "client.lr"

BETA = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
MU = (0.001, 0.01, 0.1, 1.0)
# what a preset's own arguments may be; "paper": the ranges of the paper's appendix
RANGES: dict[str, dict[str, between | tuple[float, ...]]] = {
    "paper": {"client": between(1e-8, 1e4), "lr": between(1e-8, 1e4), "beta": BETA, "mu": MU},
    "narrow": {"client": between(1e-3, 1e1), "lr": between(1e-2, 1e2), "beta": BETA, "mu": MU},
    # for clients that take one local step: then only η_l · η_g matters, and μ does nothing
    "one-step": {"lr": between(0.3, 1e2), "beta": (0.0, 0.3, 0.6, 0.9)},
}
METHOD = ("algorithm", "client", "server", "privacy", "secure_aggregation")  # may be searched; the rest is what is measured
CROWDS = ("concurrency", "size", "over_selection", "buffer_size")  # settings that need so many clients
_COMBINATIONS = 10_000  # of them are tried
STEPS = 20  # looks at the learning curve in a whole trial
STARTUP = 5  # trials that nobody gives up on
AGAIN = 3  # of the best are run with another seed


class _HopelessError(Exception):
    """The median of the others is better: this trial is given up."""


# ── the study ────────────────────────────────────────────────────────────────────────────────────────────────────────


def tune(
    tables: Table,
    out: Path,
    *,
    trials: int = 30,
    ranges: str = "narrow",
    workers: int = 1,
    seed: int = 100,
    first: Sequence[Mapping[str, float]] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Table:
    """Search until the study in `out` has `trials` finished trials; what it found, as study.json holds it.

    tables    settings with a target (`until.accuracy` or `target`) and `until.trips`; their [tune] says what is searched, else
    ranges    "narrow", "paper" or "one-step", for the preset's η_l, η_g, β and μ
    workers   processes, each with a trial of its own
    seed      of the runs, and of the search; that and the next should be none that a comparison will use
    first     values to try before any others
    """
    check.integer(1, trials=trials, workers=workers)
    check.integer(0, seed=seed)
    check.one_of(tuple(RANGES), ranges=ranges)
    tables, own = {**tables, "seed": seed}, "tune" in tables
    space, tables = space_of(tables, RANGES[ranges])
    budget(settings.from_tables(tables))  # which checks that there is one
    check_space(tables, space)
    ranges_of = {path: toml.fields_of(r) if isinstance(r, between) else list(r) for path, r in space.items()}
    with opened(out, tables, ranges_of) as database:
        study = make_study(database)
        stale(study)
        known = {json.dumps(t.system_attrs.get("fixed_params"), sort_keys=True) for t in study.get_trials(deepcopy=False)}
        for values in first:
            if json.dumps(dict(values), sort_keys=True) not in known:
                study.enqueue_trial(dict(values))
        if workers == 1:
            work(database, tables, space, trials, seed, say)
        else:
            together(database, tables, space, trials, seed, workers)
        again(study, tables)
        found = outcome(study, tables, "[tune]" if own else ranges)
        write_json(out / "study.json", found)
        if found["best"] is not None:
            write_text(out / "best.toml", toml.dumps(with_values(tables, found["best"]["values"])))
    return found


def space_of(
    tables: Table, ranges: Mapping[str, between | tuple[float, ...]]
) -> tuple[dict[str, between | tuple[float, ...]], Table]:
    """What is searched, and the tables without [tune]: from [tune] if the file has one, else what its preset can be given,
    or its server's optimizer.

    >>> space_of({"algorithm": {"fedprox": {}}, "client": {"lr": 1.0}}, RANGES["paper"])[0].keys()
    dict_keys(['client.lr', 'algorithm.fedprox.lr', 'algorithm.fedprox.mu'])
    >>> server = {"start": {"refill": {"concurrency": 9}}, "buffer_size": 3, "optimizer": "momentum"}
    >>> space_of({"server": server, "client": {"lr": 1.0}}, RANGES["paper"])[0].keys()
    dict_keys(['client.lr', 'server.optimizer.momentum.lr', 'server.optimizer.momentum.beta'])
    """
    rest = {key: value for key, value in tables.items() if key != "tune"}
    if "tune" in tables:
        return {path: searched(path, value) for path, value in flat(tables["tune"])}, rest
    path, own = _tunable(tables)
    found = {f"{path}.{key}": ranges[key] for key in ("lr", "beta", "mu") if key in own and key in ranges}
    return ({"client.lr": ranges["client"]} if "client" in ranges else {}) | found, rest


def _tunable(tables: Table) -> tuple[str, Container[str]]:
    """What has learning rates, by its path, and what it can be given: the preset, or the server's optimizer."""
    if "algorithm" not in tables and isinstance(tables.get("server"), dict):
        optimizer = toml.decode(settings.ServerSettings, tables["server"], "server").optimizer
        return f"server.optimizer.{type(optimizer).__name__}", toml.fields_of(optimizer)
    named = tables.get("algorithm")
    name = next(iter(named), "") if isinstance(named, dict) else named
    if not name:
        raise SettingsError("tune: nothing to search; give a preset as [algorithm.NAME], or the ranges in [tune]")
    if name not in PRESETS:
        raise SettingsError(f"algorithm = {toml.show(name)}: unknown; {toml.suggest(str(name), PRESETS)}")
    return f"algorithm.{name}", toml.parameters(PRESETS[name])


def flat(table: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of [tune], by their paths: lists, and tables of low and high."""
    if not isinstance(table, dict) or not table:
        raise SettingsError(f"tune.{path} = {toml.show(table)}: expected a list, or {{low = …, high = …}}")
    for key, value in table.items():
        at = f"{path}.{key}" if path else key
        if isinstance(value, list) or (isinstance(value, dict) and {"low", "high"} & value.keys()):
            yield at, value
        else:
            yield from flat(value, at)


def searched(path: str, value: Any) -> between | tuple[float, ...]:
    if isinstance(value, dict):
        return toml.decode(between, value, f"tune.{path}")  # type: ignore[no-any-return]
    if not value or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value):
        raise SettingsError(f"tune.{path} = {toml.show(value)}: expected a list of numbers")
    return tuple(value)


def check_space(tables: Table, space: Space) -> None:
    """Refuse what a trial would stumble over, or what would change what is measured, before anything starts."""
    values = {path: (where.low, where.high) if isinstance(where, between) else where for path, where in space.items()}
    drawn = tables  # with the first value of every range
    for path in space:
        _check_path(drawn, path)
        drawn = with_values(drawn, {path: values[path][0]})
    crowds = [path for path in space if path.rpartition(".")[2] in CROWDS]
    for path, value in [(each, value) for each in space for value in values[each]]:
        try:
            settings.from_tables(with_values(drawn, {path: value}))
        except SettingsError as e:
            hint = "; give a list of integers" if str(e).endswith("expected an integer") else ""
            raise SettingsError(f"tune: {e}{hint}") from e
    if crowds:
        make, arguments = settings.from_tables(drawn).task
        check_clients(drawn, {path: values[path] for path in crowds}, len(make(**arguments).clients))


def check_clients(tables: Table, values: Mapping[str, Sequence[float]], clients: int) -> None:
    """Refuse what needs more clients than there are, in whatever combination."""
    for chosen in islice(product(*values.values()), _COMBINATIONS):
        change = dict(zip(values, chosen, strict=True))
        try:
            server = settings.from_tables(with_values(tables, change)).server
            check_fits(server.start, server.buffer_size, clients)
        except ValueError as e:
            said = ", ".join(f"{path} = {toml.show(value)}" for path, value in change.items())
            raise SettingsError(f"tune.{said}: {e}") from e


def _check_path(tables: Table, path: str) -> None:
    """Refuse settings that are not the method's, and those of another kind than the tables have."""
    root, *inner = path.split(".")
    of_task = root == "task" and {"model", "arguments"} & set(inner)
    if root in settings.Settings.__dataclass_fields__ and root not in METHOD and not of_task:
        raise SettingsError(
            f"tune.{path}: can't be searched, it is part of what is measured; search {', '.join(METHOD)} or a task's model"
        )
    at: Any = tables
    for key, kind in pairwise([root, *inner]):
        at = at.get(key) if isinstance(at, dict) else None
        named = list(at) if isinstance(at, dict) else [at]
        if key in settings.CHOICES and at and kind not in named:
            raise SettingsError(f"tune.{path}: {key} is {toml.show(named[0])} here; search that one, or change the file")


def make_study(database: Path, seed: int = 0) -> "optuna.Study":
    try:
        import optuna
        from sqlalchemy.engine import URL
    except ImportError as e:
        raise ValueError("tuning needs Optuna: pip install 'fedbuff[tune]'") from e
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(
        storage=URL.create("sqlite", database=str(database)).render_as_string(),
        study_name="fedbuff",
        load_if_exists=True,
        direction="minimize",
        sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=STEPS // 5),
    )


def stale(study: "optuna.Study") -> None:
    """Trials under way in a study that nobody works on were killed: they are tried again."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)
        if trial.params:
            study.enqueue_trial(trial.params)


# ── trials ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def together(database: Path, tables: Table, space: Space, trials: int, seed: int, workers: int) -> None:
    """Several processes on one study; each ends when there are enough trials."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=beside, args=(database, tables, dict(space), trials, seed), daemon=False) for _ in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
                process.join()
    failed = [process.exitcode for process in processes if process.exitcode]
    if failed:
        raise ValueError(f"{len(failed)} of {workers} tuning processes failed (exit code {failed[0]}); what they said is above")


def beside(database: Path, tables: Table, space: Space, trials: int, seed: int) -> None:
    """`work` in a process of its own, which ends when its parent does, however that was killed: the folder is free then.

    Its trial is left to be tried again.
    """

    def follow() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    try:
        work(database, tables, space, trials, seed)
    except (SettingsError, ValueError) as e:
        sys.exit(f"fedbuff: {e}")


def work(
    database: Path, tables: Table, space: Space, trials: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> None:
    """Try one after another until the study has `trials` that finished or are under way."""
    from optuna.trial import TrialState

    counted = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    study = make_study(database)
    while (number := len(study.get_trials(deepcopy=False, states=counted))) < trials:
        # a sampler of its own for every trial: what it draws depends on what is known, not on who was killed before
        study = make_study(database, seed_for(seed, "tune", number) % (1 << 32))
        trial = study.ask()
        if sum(t.number < trial.number for t in study.get_trials(deepcopy=False, states=counted)) >= trials:
            study.tell(trial, state=TrialState.FAIL)  # another process was faster
            return
        values = draw(trial, space)
        try:
            value, facts = judge(trial, with_values(tables, values))
        except _HopelessError:
            study.tell(trial, state=TrialState.PRUNED)
            say(f"trial {number + 1}: given up, {said(values)}")
            continue
        for name, fact in facts.items():
            trial.set_user_attr(name, fact)
        study.tell(trial, value)
        say(f"trial {number + 1}: {value:,.0f}{'' if facts['reached'] else ' (not reached)'}, {said(values)}")


def draw(trial: "optuna.Trial", space: Space) -> dict[str, float]:
    return {
        path: trial.suggest_float(path, where.low, where.high, log=True)
        if isinstance(where, between)
        else trial.suggest_categorical(path, where)
        for path, where in space.items()
    }


def judge(trial: "optuna.Trial | None", tables: Table) -> tuple[float, dict[str, Any]]:
    """The cost of one trial, or `_HopelessError` on the way; without a trial, nobody gives up."""
    experiment = settings.from_tables(tables)
    target, trips = budget(experiment)
    looked = 0

    def watch(status: Status) -> None:
        nonlocal looked
        step = status.trips * STEPS // trips
        if trial is not None and step > looked and status.accuracy is not None:
            looked = step
            trial.report(shortfall(status.accuracy, target), step)
            if trial.should_prune():
                raise _HopelessError

    run = experiment.run(workers=1, progress=watch)
    reached, why = run.summary["trips_to_target"], run.summary["stopped_by"]
    accuracy = 0.0 if why == DIVERGED else lately(run.metrics)  # however good it was before
    facts = {"reached": reached is not None, "accuracy": accuracy, "stopped_by": why}
    return cost(reached, accuracy, target, trips), facts


def lately(metrics: Sequence[Mapping[str, Any]]) -> float:
    """The mean accuracy over the last fifth of a run's trips: where a curve wavers, its last point is a matter of luck.

    >>> lately([{"split": "test", "trips": trips, "accuracy": trips / 100} for trips in (0, 70, 80, 90, 100)])
    0.9
    """
    split, end = metrics[0]["split"], metrics[-1]["trips"]
    last = [m.get("accuracy") or 0.0 for m in metrics if m["split"] == split and m["trips"] >= 0.8 * end]
    return math.fsum(last) / len(last)


def cost(reached: int | None, accuracy: float, target: float, trips: int) -> float:
    """Trips to the target; if it was not reached, more than all of them, the more so the lower the accuracy.

    >>> cost(400, 0.9, 0.9, 1000), cost(None, 0.9, 0.9, 1000), cost(None, 0.45, 0.9, 1000)
    (400.0, 1000.0, 1500.0)
    """
    return float(reached) if reached is not None else trips * (1 + max(0.0, shortfall(accuracy, target)))


def shortfall(accuracy: float, target: float) -> float:
    return 1 - accuracy / target


def budget(experiment: settings.Settings) -> tuple[float, int]:
    """Target and trips of a trial."""
    target, trips = experiment.until.accuracy or experiment.target, experiment.until.trips
    if experiment.target is not None and experiment.target != target:
        raise SettingsError(f"target = {experiment.target:g}, until.accuracy = {target:g}: trips are counted to one; give one")
    if not target:
        raise SettingsError("until.accuracy: missing; tuning needs a target to count the trips to")
    if trips is None:
        raise SettingsError("until.trips: missing; tuning needs to know when to give up")
    return target, trips


def with_values(tables: Table, values: Mapping[str, float]) -> Table:
    """The settings of a trial."""
    for path, value in values.items():
        changes: Any = value
        for key in reversed(path.split(".")):
            changes = {key: changes}
        tables = settings.merge(tables, changes)
    return tables


# ── what came out ────────────────────────────────────────────────────────────────────────────────────────────────────


def again(study: "optuna.Study", tables: Table) -> None:
    """Run the best trials with another seed, unless that was done before."""
    for trial in ranked(study)[:AGAIN]:
        if f"again {trial.number}" not in study.user_attrs:
            changed = {**with_values(tables, trial.params), "seed": tables["seed"] + 1}
            study.set_user_attr(f"again {trial.number}", judge(None, changed))


def ranked(study: "optuna.Study") -> "list[optuna.trial.FrozenTrial]":
    """The trials that were followed to their end, the best first."""
    from optuna.trial import TrialState

    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    return sorted(complete, key=lambda t: (t.value or 0.0, t.number))


def outcome(study: "optuna.Study", tables: Table, ranges: str) -> Table:
    """The best trial, how many there were, and all of them in order."""
    from optuna.trial import TrialState

    finished = [t for t in study.get_trials(deepcopy=False) if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    complete = ranked(study)
    target, trips = budget(settings.from_tables(tables))
    best = None
    for trial in complete[:AGAIN]:
        second, facts = study.user_attrs[f"again {trial.number}"]
        costs = [trial.value or 0.0, second]
        if best is None or sum(costs) / 2 < best["cost"]:
            reached = trial.user_attrs["reached"] and facts["reached"]
            best = {"cost": sum(costs) / 2, "costs": costs, "reached": reached, "values": dict(trial.params)}
    return {
        "target": target,
        "trips": trips,
        "seeds": [tables["seed"], tables["seed"] + 1],
        "ranges": ranges,
        "trials": len(finished),
        "given_up": len(finished) - len(complete),
        "best": best,
        "all": [
            {
                "values": dict(t.params),
                "cost": t.value if t.state == TrialState.COMPLETE else None,
                "reached": t.user_attrs.get("reached"),
                "looks": len(t.intermediate_values),
            }
            for t in finished
        ],
    }


def said(values: Mapping[str, float]) -> str:
    return ", ".join(f"{path} {value:.3g}" for path, value in values.items())
