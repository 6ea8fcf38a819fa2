"""`fedbuff paper tune`: the best settings for a method on a dataset, kept in OUT/settings/DATASET/METHOD.toml.

Every method gets the same number of trials of the same length, from the same ranges; the first is the untuned guess, the
next two are a third and three times its server learning rate. Another K than 10 begins with K = 10's tuned values, scaled;
one as large as the concurrency with FedAvgM's, which steps as seldom.
"""

import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fedbuff import toml
from fedbuff.paper import methods
from fedbuff.paper.datasets import Dataset, aiming
from fedbuff.report.files import write_text
from fedbuff.toml import SettingsError, Table
from fedbuff.tune.space import RANGES, between, space_of
from fedbuff.tune.study import tune

SEED = 100  # this and the next are none of those that the tables use


def tune_method(
    dataset: Dataset,
    method: str,
    out: Path,
    *,
    buffer_size: int | None = None,
    trials: int = 30,
    trips: int | None = None,
    target: float | None = None,
    ranges: str = "narrow",
    workers: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Path, Table]:
    """Tune a method; the file it is kept in, and the study. `trips` and `target` are the dataset's, if not said otherwise."""
    if method not in methods.TITLES:
        raise SettingsError(f"--method {method}: unknown; {toml.suggest(method, methods.TITLES)}")
    if methods.same_as(dataset, method) != method:
        raise SettingsError(f"--method {method}: with one local step, as on {dataset.title}, it is FedAvg; tune that")
    if buffer_size is not None and method != "fedbuff":
        raise SettingsError(f"--buffer-size {buffer_size}: only FedBuff has one to choose, not {methods.TITLES[method]}")
    k = buffer_size or methods.K
    tuned, shorter = out / "settings", replace(aiming(dataset, target), trips=trips or dataset.trips)
    untuned = out / "none"  # the same guess for everybody, whatever was tuned before
    tables = methods.tables(shorter, untuned, method, buffer_size=k, a=methods.exponent(shorter, k))
    guess = methods.rates(shorter, untuned, method)
    if k == shorter.concurrency:
        guess = methods.rates(shorter, tuned, "fedavgm")
    elif k != methods.K:
        guess = methods.scaled(methods.rates(shorter, tuned, method), k)
    tables["client"]["lr"] = guess.client
    known, lr = {"client.lr": guess.client}, f"algorithm.{method}.lr"
    known |= {f"algorithm.{method}.{name}": v for name in ("beta", "mu") if (v := getattr(guess, name)) is not None}
    searched, _ = space_of(tables, RANGES[ranges])
    first = [
        {path: within(searched[path], v) for path, v in (known | {lr: guess.server * times}).items() if path in searched}
        for times in (1.0, 1 / 3, 3.0)
    ]
    name = methods.file_name(method, k)
    to = f"-to-{100 * shorter.target:g}" if shorter.aimed else ""
    folder = out / "studies" / f"{dataset.name}-{name}-{shorter.trips}-{ranges}{to}"
    study = tune(tables, folder, trials=trials, ranges=ranges, workers=workers, seed=SEED, first=first, say=say)
    path = tuned / dataset.name / f"{name}.toml"
    if study["best"] is None:
        raise ValueError(f"{methods.TITLES[method]} on {dataset.title}: all {study['trials']} trials were given up")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, as_toml(dataset, method, k, study, guess.client))
    return path, study


def within(searched: between | tuple[float, ...], value: float) -> float:
    """The value, or what comes nearest to it among those that are searched."""
    if isinstance(searched, between):
        return min(max(value, searched.low), searched.high)
    return min(searched, key=lambda one: abs(one - value))


def as_toml(dataset: Dataset, method: str, k: int, study: Table, client_lr: float) -> str:
    """What a table needs of a study: the best values, and what finding them cost. `client_lr` is for one that kept it."""
    best, values = study["best"], study["best"]["values"]
    algorithm = {path.rsplit(".", 1)[1]: value for path, value in values.items() if path.startswith("algorithm.")}
    title = methods.TITLES[method] + (f" with K = {k}" if method == "fedbuff" else "")
    head = f"# {title} on {dataset.title}, by `fedbuff paper tune`\n"
    return head + toml.dumps(
        {
            "algorithm": {method: algorithm},
            "client": {"lr": values.get("client.lr", client_lr)},
            "study": {
                "best": best["cost"],
                "reached": best["reached"],
                "target": study["target"],
                "trials": study["trials"],
                "given_up": study["given_up"],
                "trips": study["trips"],
                "ranges": study["ranges"],
                "seeds": study["seeds"],
                "data": dataset.load().name,
                "date": datetime.date.today().isoformat(),
            },
        }
    )
