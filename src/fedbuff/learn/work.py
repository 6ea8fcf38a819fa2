"""What a worker can do with a task: train trips, and evaluate a version on a block of held-out examples."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from fedbuff.core.versions import Vector
from fedbuff.learn.batched import Together, batched
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.evaluate import Outputs, Part, evaluate_rows, plain
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.kernels import trim_allocator, tune_allocator
from fedbuff.learn.local import Job, Matrix, Train, initial_weights, one_at_a_time
from fedbuff.learn.small import Small
from fedbuff.learn.task import Task
from fedbuff.learn.tasks import cross_entropy
from fedbuff.learn.training import Training
from fedbuff.learn.trial import way_to_train

_TRIED = 16  # rows on which the twins' outputs are compared with the model's


@dataclass(frozen=True)
class Trainer:
    """A task, its model, and a way to train trips."""

    task: Task
    flat: Flat
    trips: Train
    note: str | None = None  # why trips are trained one at a time, if they can't be trained together
    failures: list[str] = field(default_factory=list)  # why some could not be trained together, though a trial went well

    def train(
        self, updates: Matrix, rows: Sequence[int], trips: Sequence[int], clients: Sequence[int], weights: Sequence[Vector]
    ) -> None:
        """Write the updates of trips into these rows; trips of one version have the same array as weights."""
        if isinstance(self.trips, Small) and self.trips.into(updates, rows, trips, clients, weights):
            return
        jobs = [Job(*job) for job in zip(trips, clients, weights, strict=True)]
        if isinstance(self.trips, Together):
            try:
                self.trips.into(updates, rows, jobs)
            except Exception as e:  # the model does with these rows what it did with none of the trial's
                updates[np.asarray(rows)] = one_at_a_time(self.task, self.trips.sgd, self.trips.seed, self.flat)(jobs)
                if not self.failures:  # the first is enough; the error itself would keep all that was computed so far
                    self.failures.append(f"together it failed with {type(e).__name__}: {e}")
                    print(
                        f"fedbuff: some trips are trained one at a time, which is slower: {self.failures[0]}", file=sys.stderr
                    )
        else:
            updates[np.asarray(rows)] = self.trips(jobs)

    @property
    def one_call(self) -> bool:
        """Whether a chunk of trips is one call of a kernel, and small chunks hardly cost more than large ones."""
        return isinstance(self.trips, Small) or (isinstance(self.trips, Together) and self.trips.whole is not None)

    def evaluate(self, weights: Vector, split: str, start: int) -> Part:
        """The sum of losses, how many are right, and how many there are, among the rows of one block."""
        return evaluate_rows(self.task, self.flat, weights, split, start, self.outputs)

    @cached_property
    def outputs(self) -> Outputs:
        """The model as it is evaluated: through its twins, where these say the same of a few rows as the model itself."""
        itself = plain(self.flat)
        if not isinstance(self.trips, Together):
            return itself
        twins = self.trips.outputs
        inputs, _ = next(iter(self.task.splits.values()))
        x, weights = as_tensor(inputs[:_TRIED], like=self.flat.vector), self.flat.weights()
        try:  # in two parts: a model may mix the rows of a batch, if only in evaluation
            parts = torch.cat([twins(weights, part.clone()) for part in torch.split(x, _TRIED // 2)])
            same = torch.allclose(parts, itself(weights, x), rtol=1e-4, atol=1e-4)
        except Exception:  # the model's code takes another way in evaluation, one that twins can't go
            same = False

        def together(weights: Vector, x: torch.Tensor) -> torch.Tensor:
            try:
                return twins(weights, x.clone())  # a model may write to what it sees
            except Exception:  # these rows are not like the few: twins can't go where they lead
                return itself(weights, x)

        return together if same else itself


def trainer(
    task: Task,
    sgd: LocalSGD,
    seed: int,
    how: Training,
    flat: Flat | None = None,
    checked: bool = False,
    constants: dict[str, NDArray[np.generic]] | None = None,
) -> Trainer:
    """The way to train this task that `how` asks for; `flat` is its model with initial weights, if it is there already.

    `checked` says that trips of this task can be trained together, as another process has found out; `constants` are those of
    that process's model.
    """
    flat = initial_weights(task, seed)[0] if flat is None else flat
    if constants is not None:
        flat.hold(constants)
    if task.loss is cross_entropy:
        task = replace(task, loss=torch.nn.functional.cross_entropy)  # which is recognised, and then has faster ways
    if not how.batched:
        return Trainer(task, flat, one_at_a_time(task, sgd, seed, flat))
    if checked:
        return Trainer(task, flat, batched(task, sgd, seed, flat, device=how.device, precision=how.precision))
    found = way_to_train(task, sgd, seed, flat, device=how.device, precision=how.precision)
    trim_allocator()  # the trial's, which takes some thirty times the model's weights
    return Trainer(task, flat, *found)


def settle() -> int:
    """Make this process one that trains: one thread, and memory that is kept for the next chunk. How many threads there were.

    A chunk is too small for more threads, and one sums in one order.
    """
    tune_allocator()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    return threads
