"""The methods of the paper on its datasets: which settings a cell of a table is run with.

Learning rates, momentum and μ are those that `fedbuff paper tune` found and kept in OUT/settings/DATASET/METHOD.toml; where
it was not run yet, the untuned values below, and every result says so.
"""

import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

from fedbuff import settings
from fedbuff.paper.datasets import Dataset
from fedbuff.toml import SettingsError, Table

TITLES = {"fedbuff": "FedBuff", "fedasync": "FedAsync", "fedavgm": "FedAvgM", "fedavg": "FedAvg", "fedprox": "FedProx"}
ASYNCHRONOUS = ("fedbuff", "fedasync")
K, BATCH_SIZE = 10, 32
A, A_OF_LARGE_K = 0.5, 10.0  # the staleness exponent, and that of Table 6, where K is the concurrency
_STUDY = {"trials": int, "trips": int, "best": int | float, "reached": bool, "target": float, "ranges": str, "seeds": list}


class Rates(NamedTuple):
    """What is tuned: client and server learning rate, and β or μ where a method has one."""

    client: float
    server: float
    beta: float | None = None
    mu: float | None = None


# Where tuning starts. With one local step, as most clients here take, only client · server matters.
UNTUNED = {
    "cifar10": {
        "fedbuff": Rates(0.1, 3.0, beta=0.0),  # 10 learns half as fast, 30 not at all
        "fedasync": Rates(0.1, 1.0),
        "fedavgm": Rates(0.1, 3.0, beta=0.9),
        "fedavg": Rates(0.1, 10.0),
        "fedprox": Rates(0.1, 10.0, mu=0.001),
    },
    "celeba": {
        "fedbuff": Rates(0.1, 10.0, beta=0.3),
        "fedasync": Rates(0.1, 3.0),
        "fedavgm": Rates(0.1, 3.0, beta=0.9),
        "fedavg": Rates(0.1, 10.0),
        "fedprox": Rates(0.1, 10.0, mu=0.01),
    },
    "sent140": {
        "fedbuff": Rates(3.0, 10.0, beta=0.5),
        "fedasync": Rates(3.0, 3.0),
        "fedavgm": Rates(3.0, 10.0, beta=0.9),
        "fedavg": Rates(3.0, 30.0),
        "fedprox": Rates(3.0, 30.0, mu=0.001),
    },
    # the demo's, by the same random search for each (results/demo-tuning.json), for LR-Norm on clients of two or three examples
    "digits": {
        "fedbuff": Rates(5.0, 0.96, beta=0.0),
        "fedasync": Rates(0.43, 6.8),
        "fedavgm": Rates(1.3, 4.5, beta=0.9),
        "fedavg": Rates(1.8, 6.6),
        "fedprox": Rates(1.8, 6.6, mu=0.001),
    },
}


def tables(
    dataset: Dataset,
    tuned: Path,
    method: str,
    *,
    buffer_size: int | None = None,
    concurrency: int | None = None,
    over_selection: float = 0.0,
    timing: Table | None = None,
    a: float = A,
    weighting: str = "lr-norm",
    scale: float = 1.0,
    client_scale: float = 1.0,
    average: int | None = None,
) -> Table:
    """The settings of one cell but its seed: `method` on `dataset` with tuned values from the folder `tuned`.

    Clients of the asynchronous methods arrive at a constant rate, as in the paper.
    `scale` multiplies the server learning rate, `client_scale` the client's. `weighting` is "lr-norm", "examples" or "uniform".
    With `average`, the mean of the versions of about so many trips is evaluated.
    """
    method = same_as(dataset, method)
    found = rates(dataset, tuned, method, buffer_size or K)
    in_flight = concurrency or dataset.concurrency
    arguments: dict[str, Any] = {"concurrency": in_flight, "lr": found.server * scale}
    server: Table = {"weight_by": "examples"} if weighting == "examples" else {}
    if method in ASYNCHRONOUS:
        arguments["a"] = a
        # `refill` would start as many trips on the untrained model, whose updates are one large step in the same direction
        server["start"] = {"arrivals": {"concurrency": in_flight}}
    if method == "fedbuff":
        arguments["buffer_size"] = buffer_size or K
    if average is not None:
        step = arguments.get("buffer_size", 1 if method in ASYNCHRONOUS else in_flight)
        server["average"] = max(1, round(average / step))
    if method not in ASYNCHRONOUS and over_selection:
        arguments["over_selection"] = over_selection
    arguments |= {name: value for name in ("beta", "mu") if (value := getattr(found, name)) is not None}
    made: Table = {
        "name": method,
        "task": dataset.task,
        "algorithm": {method: arguments},
        "client": {"lr": found.client * client_scale, "batch_size": BATCH_SIZE, "lr_norm": weighting == "lr-norm"},
        "timing": timing or {"half_normal": {"scale": 1.0}},
        "until": {"accuracy": dataset.target, "trips": dataset.trips},
    }
    if server:
        made["server"] = server
    if dataset.evaluate_every is not None:
        made["evaluate_every"] = dataset.evaluate_every
    return made


def rates(dataset: Dataset, tuned: Path, method: str, buffer_size: int = K) -> Rates:
    """Tuned values: of this buffer size, else of K = 10 with the server learning rate scaled, else untuned."""
    method = same_as(dataset, method)
    own = read(tuned / dataset.name / f"{file_name(method, buffer_size)}.toml", method)
    if own is not None:
        return own
    found = read(tuned / dataset.name / f"{method}.toml", method)
    if found is None:
        if dataset.name not in UNTUNED:
            raise SettingsError(f"dataset {dataset.name}: no settings to train on it with (there are: {', '.join(UNTUNED)})")
        found = UNTUNED[dataset.name][method]
    return scaled(found, buffer_size) if method == "fedbuff" else found


def scaled(found: Rates, buffer_size: int) -> Rates:
    """The rates of K = 10 for another K.

    A step's mean is over more updates as K grows, and they are less stale: η_g ∝ √K keeps what an update moves about equal.
    """
    return found._replace(server=found.server * math.sqrt(buffer_size / K))


def exponent(dataset: Dataset, buffer_size: int) -> float:
    """The staleness exponent that the paper has for this K."""
    return A_OF_LARGE_K if buffer_size == dataset.concurrency else A


def same_as(dataset: Dataset, method: str) -> str:
    """The method whose runs these are: FedProx's term is zero in the first local step, so with no other it is FedAvg."""
    return "fedavg" if method == "fedprox" and dataset.one_step else method


def is_tuned(dataset: Dataset, tuned: Path, method: str) -> bool:
    return (tuned / dataset.name / f"{same_as(dataset, method)}.toml").is_file()


def file_name(method: str, buffer_size: int = K) -> str:
    return f"{method}-k{buffer_size}" if method == "fedbuff" and buffer_size != K else method


def read(path: Path, method: str) -> Rates | None:
    """What a tuned settings file says, or None if there is none."""
    if not path.is_file():
        return None
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
        algorithm = found["algorithm"][method]
        own = {name: float(algorithm[name]) for name in ("beta", "mu") if name in algorithm}
        return Rates(float(found["client"]["lr"]), float(algorithm["lr"]), **own)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as e:
        raise SettingsError(
            f"{path}: expected [algorithm.{method}] and [client] with lr, as `fedbuff paper tune` writes them ({e})"
        ) from e


def study(path: Path) -> Table | None:
    """The [study] of a tuned settings file: trials, best, budget."""
    found = settings.read(path).get("study") if path.is_file() else None
    if found is None:
        return None
    for name, kind in _STUDY.items():
        if not isinstance(found, dict) or not isinstance(found.get(name), kind) or (kind is list and len(found[name]) != 2):
            raise SettingsError(f"{path}: study.{name}: missing or not as `fedbuff paper tune` writes it")
    return found
