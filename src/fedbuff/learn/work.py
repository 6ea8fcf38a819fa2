"""What a worker can do with a task: train trips, and evaluate a version on a block of held-out examples."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedbuff.core.versions import Vector
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.evaluate import ROWS, evaluate_rows
from fedbuff.learn.flat import Flat
from fedbuff.learn.local import Job, Train, one_at_a_time
from fedbuff.learn.task import Task

Matrix = NDArray[np.floating]


@dataclass(frozen=True)
class Trainer:
    """A task, its model, and a way to train trips."""

    task: Task
    flat: Flat
    trips: Train
    note: str | None = None  # why trips are trained one at a time, if they are

    def train(self, trips: Sequence[int], clients: Sequence[int], weights: Sequence[Vector]) -> Matrix:
        """The updates of trips, one per row."""
        jobs = [Job(*job) for job in zip(trips, clients, weights, strict=True)]
        return np.asarray(self.trips(jobs))

    def evaluate(self, weights: Vector, split: str, start: int) -> tuple[float, int, int]:
        """The sum of losses, how many are right, and how many there are, among the rows of one block."""
        return evaluate_rows(self.task, self.flat, weights, split, start)

    def blocks(self) -> list[tuple[str, int]]:
        """Where the blocks of every split start."""
        return [(split, start) for split, (_, y) in self.task.splits.items() for start in range(0, len(y), ROWS)]


def trainer(task: Task, sgd: LocalSGD, seed: int, flat: Flat, how: dict[str, Any] | None = None) -> Trainer:
    """The fastest way to train this task."""
    return Trainer(task, flat, one_at_a_time(task, sgd, seed, flat))


def one_thread() -> int:
    """A chunk is too small for more threads, and one sums in one order; the number there was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads
