"""The workloads of the benchmark: made-up examples in the shapes of the paper's datasets, real models.

Speed does not depend on what the examples mean, so none has to be downloaded; on how many words a text has, it does.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import nn

from fedbuff.learn.client import LocalSGD
from fedbuff.learn.models import cnn, lstm
from fedbuff.learn.task import Task


@dataclass(frozen=True)
class Workload:
    """A task, what a client does in a trip, and how many trips make a measurement of several seconds on two slow cores."""

    task: Callable[[], Task]
    client: LocalSGD
    trips: int
    after: int = 2000  # trips, until all those in flight at first have turned over once or twice


def _images(sizes: list[int], classes: int) -> Task:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((sum(sizes), 3, 32, 32), dtype=np.float32)
    return _task(partial(cnn(dropout=0.0), (3, 32, 32), classes), x, rng.integers(0, classes, sum(sizes)), sizes)


def cifar(clients: int = 5000) -> Task:
    """So many clients with ten images each."""
    return _images([10] * clients, 10)


def celeba() -> Task:
    """2,500 clients with 16 to 26 images each, 21 on average."""
    return _images(np.random.default_rng(1).integers(16, 27, 2500).tolist(), 2)


def large() -> Task:
    """1,500 clients with ten vectors each, and a network of ten million weights: for memory, not for speed."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((15_000, 256), dtype=np.float32)
    model = lambda: nn.Sequential(nn.Linear(256, 2900), nn.ReLU(), nn.Linear(2900, 3180), nn.ReLU(), nn.Linear(3180, 10))  # noqa: E731
    return _task(model, x, rng.integers(0, 10, 15_000), [10] * 1500)


def million() -> Task:
    """5,000 clients with ten images each; most of the million weights are in one layer, as in McMahan et al."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50_000, 3, 32, 32), dtype=np.float32)

    def model() -> nn.Module:
        convolutions = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        convolutions += [nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4096, 240), nn.ReLU(), nn.Linear(240, 10))

    return _task(model, x, rng.integers(0, 10, 50_000), [10] * 5000)


def sent140() -> Task:
    """20,000 clients with one to five tweets of 25 words, most of them one or two; no word is more frequent than others."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(5, rng.geometric(0.45, 20_000)).tolist()
    return _texts(sizes, rng.integers(0, 10_000, (sum(sizes), 25)), rng)


def tweets() -> Task:
    """The same clients with tweets as long as Sent140's, after padding: 3 to 25 words, 15 on average; word r with odds 1/r."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(5, rng.geometric(0.45, 20_000)).tolist()
    odds = 1 / np.arange(1, 10_000)
    x = rng.choice(np.arange(1, 10_000), (sum(sizes), 25), p=odds / odds.sum())
    length = np.minimum(25, rng.integers(3, 30, sum(sizes)))
    x[np.arange(25) < 25 - length[:, None]] = 0
    return _texts(sizes, x, rng)


def _texts(sizes: list[int], x: np.ndarray, rng: np.random.Generator) -> Task:
    vectors = np.random.default_rng(1).standard_normal((10_000, 100), dtype=np.float32)
    vectors[0] = 0.0  # padding
    return _task(partial(lstm(), vectors, 2), x, rng.integers(0, 2, sum(sizes)), sizes)


def logistic() -> Task:
    """20,000 clients with 1 to 500 examples, log-normally many as in LEAF's synthetic task."""
    rng = np.random.default_rng(0)
    sizes = np.minimum(500, 1 + rng.lognormal(3.0, 1.0, 20_000)).astype(int).tolist()
    x = rng.standard_normal((sum(sizes), 60), dtype=np.float32)
    return _task(lambda: nn.Linear(60, 10), x, rng.integers(0, 10, sum(sizes)), sizes)


def _task(model: Callable[[], nn.Module], x: np.ndarray, y: np.ndarray, sizes: list[int]) -> Task:
    cuts = np.cumsum(sizes)[:-1]
    clients = list(zip(np.split(x, cuts), np.split(y, cuts), strict=True))
    return Task(model=model, loss=nn.functional.cross_entropy, clients=clients, evaluate=(x[:1], y[:1]), name="bench")


WORKLOADS = {
    "cifar": Workload(cifar, LocalSGD(lr=0.05, batch_size=32), 3000),
    # few clients, so that the measurement is of what a trip costs, and not of meeting each of them for the first time
    "cifar-again": Workload(partial(cifar, 1500), LocalSGD(lr=0.05, batch_size=32), 3000, after=4000),
    "sent140": Workload(sent140, LocalSGD(lr=0.05, batch_size=32), 20_000),
    "tweets": Workload(tweets, LocalSGD(lr=0.05, batch_size=32), 20_000),
    "celeba": Workload(celeba, LocalSGD(lr=0.05, batch_size=13), 1500),
    "logistic": Workload(logistic, LocalSGD(lr=0.01, batch_size=32), 400_000),
    "million": Workload(million, LocalSGD(lr=0.05, batch_size=32), 1500),
    "large": Workload(large, LocalSGD(lr=0.05, batch_size=32), 2000),
}
