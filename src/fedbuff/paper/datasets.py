"""The datasets of the paper, and what stands in for them in quick versions: the only place that knows them by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedbuff import toml
from fedbuff.learn.task import Task
from fedbuff.settings import TASKS
from fedbuff.toml import SettingsError, Table


@dataclass(frozen=True)
class Dataset:
    """A task with the paper's target, and how much of everything an experiment on it uses.

    concurrency, trips   of every run, and the most trips it may take
    sweep                concurrencies of the figures that vary it
    paper                whose numbers of the paper stand beside ours
    clients              of the paper's data
    rate                 trips a second on two cores (fedbuff bench), for estimates
    evaluate_every       trips between evaluations, if not the simulator's choice
    one_step             no client has more examples than a batch, so a trip is one local step; data at hand may be so too
    reduced              how a quick version differs from the real one; "" for the real one
    aimed                the target was asked for, and is not the one above
    """

    name: str
    title: str
    task: Table
    target: float
    paper: str
    rate: float
    concurrency: int = 1000
    trips: int = 600_000
    sweep: tuple[int, ...] = (10, 100, 300, 1000)
    clients: int | None = None
    evaluate_every: int | None = None
    one_step: bool = False
    reduced: str = ""
    aimed: bool = False

    def load(self) -> Task:
        make, arguments = toml.decode_choice(TASKS, self.task, "task", call=False)
        try:
            return make(**arguments)  # type: ignore[no-any-return]
        except ValueError as e:
            raise SettingsError(f"{self.title}: {e}") from e

    def describe(self, name: str, sizes: Sequence[int]) -> str:
        """What the data at hand is, beside the paper's; `name` is the task's, which says so if it is not all of the data."""
        total, of_all = sum(sizes), name.partition("(")[2].rstrip(")")
        spread = (
            f"{min(sizes)} each" if min(sizes) == max(sizes) else f"{total / len(sizes):.1f} on average, {max(sizes)} at most"
        )
        found = f"{self.title}: {len(sizes):,} clients, {total:,} training examples ({spread})"
        if of_all:
            found += f"; {of_all}"
        if self.clients is not None and self.clients != len(sizes):
            found += f"; the paper has {self.clients:,} clients"
        if of_all:
            found += "; numbers can't be compared with the paper's one by one"
        return found + (f"; {self.reduced}" if self.reduced else "")


CIFAR10 = Dataset(
    "cifar10", "CIFAR-10", {"cifar10": {}}, target=0.60, paper="cifar10", rate=350.0, clients=5_000,
    evaluate_every=1000, one_step=True,
)  # fmt: skip
CELEBA = Dataset(
    "celeba", "CelebA", {"celeba": {}}, target=0.90, paper="celeba", rate=200.0, clients=9_343, evaluate_every=2000
)
SENT140 = Dataset(  # as many tweets to look at as thousands of trips train on
    "sent140", "Sent140", {"sent140": {}}, target=0.69, paper="sent140", rate=1500.0, clients=660_120, evaluate_every=5000
)

DIGITS = Dataset(
    "digits",
    "handwritten digits",
    {"digits": {"clients": 700, "split": {"dirichlet": {"alpha": 0.1}}}},
    target=0.90,
    paper="cifar10",
    rate=4000.0,
    concurrency=300,
    trips=15_000,
    sweep=(10, 30, 100, 300),
    evaluate_every=100,
    one_step=True,
    reduced="a stand-in for the paper's data, so only the shape of the result can be compared",
)
SIZES = Dataset(
    "synthetic",
    "synthetic clients",
    {"synthetic": {"clients": 100_000}},
    target=0.8,
    paper="sent140",
    rate=4000.0,
    reduced="log-normally many examples each; a stand-in for the paper's data, so only the shape of the result can be compared",
)

ALIKE = Dataset(
    "synthetic-iid",
    "synthetic clients, all alike",
    {"synthetic": {"clients": 20_000, "max_examples": 10, "iid": True}},
    target=0.8,
    paper="sent140",
    rate=2000.0,
    concurrency=100,
    trips=20_000,
    clients=20_000,
    reduced="a stand-in for the paper's data, so only the shape of the result can be compared",
)

NO_DATA = Dataset("none", "no data", {}, target=0.0, paper="", rate=1.0)

DATASETS = {d.name: d for d in (CIFAR10, CELEBA, SENT140, DIGITS, SIZES, ALIKE)}
REAL = ("cifar10", "celeba", "sent140")

_LESS = {"cifar10": (0.45, 40_000), "celeba": (0.80, 30_000), "sent140": (0.62, 30_000)}


def aiming(dataset: Dataset, target: float | None) -> Dataset:
    """The dataset with another target than the paper's, for data at hand with which that can't be reached."""
    if target is None or target == dataset.target:
        return dataset
    reduced = f"to {100 * target:g} % instead of {100 * dataset.target:g} %"
    return replace(dataset, target=target, aimed=True, reduced="; ".join(filter(None, (dataset.reduced, reduced))))


def quick(dataset: Dataset) -> Dataset:
    """A minutes-long version of a real dataset: a lower target, fewer trips."""
    if dataset.name not in _LESS:
        return dataset
    target, trips = _LESS[dataset.name]
    reduced = f"quick: to {100 * target:g} % instead of {100 * dataset.target:g} %, at most {trips:,} trips"
    return replace(dataset, target=target, trips=trips, sweep=(100, 1000), reduced=reduced)
