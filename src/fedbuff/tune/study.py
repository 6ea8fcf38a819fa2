"""A study: Optuna's TPE searches the learning rates, β and μ for the fewest trips to the target.

    study = tune(tables, Path("runs/tune"), trials=30, workers=2)

A trial is a run with one worker. In the end the best three are run with another seed as well, and the best on both wins: a
lucky seed finds learning rates at the edge. Trials are kept in SQLite: a study that was killed goes on where it stopped, and
with one process ends the same as one that was not.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedbuff import settings, toml
from fedbuff.core import check
from fedbuff.core.random import seed_for
from fedbuff.report.files import write_json, write_text
from fedbuff.toml import SettingsError, Table
from fedbuff.tune.folder import opened
from fedbuff.tune.space import RANGES, Space, between, check_space, space_of, with_values
from fedbuff.tune.trial import STEPS, HopelessError, budget, judge

if TYPE_CHECKING:
    import optuna

STARTUP = 5  # trials that nobody gives up on
AGAIN = 3  # of the best are run with another seed


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
    with opened(out, tables, ranges_of, make_study) as database:
        study = make_study(database)
        stale(study)
        tried = [t.system_attrs.get("fixed_params") for t in finished(study)]
        for values in first:
            if dict(values) not in tried:
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


def make_study(database: Path) -> "optuna.Study":
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
        sampler=make_sampler(0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=STEPS // 5),
    )


def make_sampler(seed: int) -> "optuna.samplers.BaseSampler":
    from optuna.samplers import TPESampler

    return TPESampler(seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True)


def stale(study: "optuna.Study") -> None:
    """Trials under way in a study that nobody works on were killed, and those that wait were to come after them.

    All are forgotten: what was to be tried first is asked for again, in its order, and what was drawn, perhaps half of a
    trial's values, the sampler draws anew.
    """
    from optuna.trial import TrialState

    while study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.ask()
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        study.tell(trial.number, state=TrialState.FAIL)


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
    while len(study.get_trials(deepcopy=False, states=counted)) < trials:
        trial = study.ask()
        number = sum(t.number < trial.number for t in study.get_trials(deepcopy=False, states=counted))
        if number >= trials:
            study.tell(trial, state=TrialState.FAIL)  # another process was faster
            return
        # a sampler of its own for every trial: what it draws depends on what is known, not on who was killed before, and
        # processes that begin together do not draw the same
        study.sampler = make_sampler(seed_for(seed, "tune", number) % (1 << 32))
        values = draw(trial, space)
        try:
            value, facts = judge(trial, with_values(tables, values))
        except HopelessError:
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


def finished(study: "optuna.Study") -> "list[optuna.trial.FrozenTrial]":
    """The trials that were followed to their end or given up, in order."""
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))


def outcome(study: "optuna.Study", tables: Table, ranges: str) -> Table:
    """The best trial, how many there were, and all of them in order."""
    from optuna.trial import TrialState

    done, complete = finished(study), ranked(study)
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
        "trials": len(done),
        "given_up": len(done) - len(complete),
        "best": best,
        "all": [
            {
                "values": dict(t.params),
                "cost": t.value if t.state == TrialState.COMPLETE else None,
                "reached": t.user_attrs.get("reached"),
                "looks": len(t.intermediate_values),
            }
            for t in done
        ],
    }


def said(values: Mapping[str, float]) -> str:
    return ", ".join(f"{path} {value:.3g}" for path, value in values.items())
