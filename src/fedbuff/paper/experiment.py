"""What an experiment is: the runs it needs, and what their cells come to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedbuff.learn.data import Data, data_of
from fedbuff.paper import methods
from fedbuff.paper.cells import Cell
from fedbuff.paper.datasets import Dataset
from fedbuff.paper.result import Result
from fedbuff.toml import Table

Cells = Mapping[str, list[Cell]]  # by the experiment's own key, a cell for each seed


@dataclass(frozen=True)
class Ask:
    """What is asked of an experiment: on which data, over which seeds, with tuned settings from which folder.

    With `read=False` the data may not be read: asking for it is an error.
    """

    dataset: Dataset
    tuned: Path
    seeds: tuple[int, ...] = (0, 1, 2)
    quick: bool = False
    read: bool = True

    def tables(self, method: str, **changes: Any) -> Table:
        """The settings of `method` on the dataset; `changes` as in `methods.tables`."""
        return methods.tables(self.at_hand, self.tuned, method, **changes)

    @property
    def sizes(self) -> list[int]:
        """How many examples each client holds, read from the data."""
        return self.data.sizes

    @property
    def at_hand(self) -> Dataset:
        """The dataset as the data here has it, if that may be read: clients may have one local step, and the paper's more."""
        one_step = self.dataset.one_step or (self.read and max(self.sizes) <= methods.BATCH_SIZE)
        return replace(self.dataset, one_step=one_step)

    @cached_property
    def data(self) -> Data:
        if not self.read:
            raise ValueError(f"{self.dataset.title} is not to be read now")
        return data_of(self.dataset.load())


def nothing(ask: Ask) -> dict[str, Table]:
    """The cells of an experiment that trains nothing."""
    return {}


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    where      its place in the paper
    claim      what it shows there, in a sentence or two
    datasets   those it can be run on; none for one that needs no data
    quick      what stands in for them in a quick version
    beside     whose numbers of the paper stand beside those of a stand-in
    cells      the settings of every run it needs, by a key of its own
    result     what the cells come to
    trips      about how many thousand trips a seed takes on each real dataset, by the paper's numbers
    so_far     it can be put together from some of its cells
    one_seed   the first seed is all it uses
    linear     on Sent140 its model is linear, and a run is taken to last half as long as the LSTM's
    """

    name: str
    where: str
    title: str
    claim: str
    result: Callable[[Ask, Cells], Result]
    cells: Callable[[Ask], dict[str, Table]] = nothing
    datasets: tuple[str, ...] = ("cifar10", "celeba", "sent140")
    quick: str = "digits"
    beside: str = "cifar10"
    trips: Mapping[str, float] | None = None
    so_far: bool = False
    one_seed: bool = False
    linear: bool = False
