"""Evaluation of a version on held-out examples, a block of rows at a time so that it can be shared out."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss
from torch.nn import functional as F  # noqa: N812

from fedbuff.core.versions import Vector
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.generator import default_generator
from fedbuff.learn.task import Task, most_likely
from fedbuff.learn.tasks import cross_entropy

ROWS = 2048
Outputs = Callable[[Vector, Tensor], Tensor]  # what the model with these weights says of these rows


def evaluate(task: Task, flat: Flat, weights: Vector) -> dict[str, dict[str, float]]:
    """Loss and accuracy on every split, here and now; the accuracy is left out where the task has none."""
    found: dict[str, list[tuple[float, float, int]]] = {}
    for split, start in blocks(task):
        found.setdefault(split, []).append(evaluate_rows(task, flat, weights, split, start, plain(flat)))
    return {split: combine(parts, task.accuracy is not None) for split, parts in found.items()}


def blocks(task: Task) -> list[tuple[str, int]]:
    """Where the blocks of every split start."""
    return [(split, start) for split, (_, y) in task.splits.items() for start in range(0, len(y), ROWS)]


def evaluate_rows(
    task: Task, flat: Flat, weights: Vector, split: str, start: int, outputs: Outputs
) -> tuple[float, float, int]:
    """On the `ROWS` examples of a split from `start` on: the sum of losses, how many are right, how many there are."""
    inputs, labels = task.splits[split]
    x, y = (as_tensor(part[start : start + ROWS], like=flat.vector) for part in (inputs, labels))
    with torch.no_grad(), default_generator() as generator:
        generator.manual_seed(start)  # for a model that draws though it is evaluated: the same in every process
        output = outputs(weights, x)
        loss = float(task.loss(output, y)) * len(y)
        return loss, float(right(_judged(task, output, y), len(y)).sum()) if task.accuracy else 0.0, len(y)


def _judged(task: Task, output: Tensor, label: Tensor) -> Tensor:
    """What the task's accuracy says; a single output is a class to cross entropy, and to other losses a sign."""
    assert task.accuracy is not None
    by_class = task.loss in (cross_entropy, F.cross_entropy) or isinstance(task.loss, CrossEntropyLoss)
    if task.accuracy is most_likely and by_class and output.shape[1:] == (1,) and not label.is_floating_point():
        return output.argmax(1) == label
    return task.accuracy(output, label)


def right(found: Tensor, rows: int) -> Tensor:
    """How right each row is, from 0 to 1: of several labels that a row has, the mean."""
    if not isinstance(found, Tensor) or found.shape[:1] != (rows,):
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"accuracy: expected right or wrong for each of {rows} examples, got {what}")
    return found.reshape(rows, -1).double().mean(1)


def plain(flat: Flat) -> Outputs:
    """The model itself, all rows at once."""

    def outputs(weights: Vector, x: Tensor) -> Tensor:
        flat.load(weights)
        flat.module.eval()
        with torch.no_grad():
            return flat.module(x)  # type: ignore[no-any-return]

    return outputs


def combine(parts: list[tuple[float, float, int]], accuracy: bool) -> dict[str, float]:
    """Loss and accuracy over blocks, summed in their order."""
    loss, right, rows = (sum(part) for part in zip(*parts, strict=True))
    return {"loss": loss / rows} | ({"accuracy": right / rows} if accuracy else {})
