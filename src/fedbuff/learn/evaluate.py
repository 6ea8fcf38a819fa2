"""Evaluation of a version on held-out examples, a block of rows at a time so that it can be shared out."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedbuff.core.versions import Vector
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.task import Task

ROWS = 2048
Outputs = Callable[[Vector, Tensor], Tensor]  # what the model with these weights says of these rows


def evaluate(task: Task, flat: Flat, weights: Vector) -> dict[str, dict[str, float]]:
    """Loss and accuracy on every split, here and now; the accuracy is left out where the task has none."""
    found: dict[str, list[tuple[float, int, int]]] = {}
    for split, start in blocks(task):
        found.setdefault(split, []).append(evaluate_rows(task, flat, weights, split, start, plain(flat)))
    return {split: combine(parts, task.accuracy is not None) for split, parts in found.items()}


def blocks(task: Task) -> list[tuple[str, int]]:
    """Where the blocks of every split start."""
    return [(split, start) for split, (_, y) in task.splits.items() for start in range(0, len(y), ROWS)]


def evaluate_rows(task: Task, flat: Flat, weights: Vector, split: str, start: int, outputs: Outputs) -> tuple[float, int, int]:
    """On the `ROWS` examples of a split from `start` on: the sum of losses, how many are right, how many there are."""
    inputs, labels = task.splits[split]
    x, y = (as_tensor(part[start : start + ROWS], like=flat.vector) for part in (inputs, labels))
    output = outputs(weights, x)
    with torch.no_grad():
        loss = float(task.loss(output, y)) * len(y)
        return loss, int(task.accuracy(output, y).sum()) if task.accuracy else 0, len(y)


def plain(flat: Flat) -> Outputs:
    """The model itself, all rows at once."""

    def outputs(weights: Vector, x: Tensor) -> Tensor:
        flat.load(weights)
        flat.module.eval()
        with torch.no_grad():
            return flat.module(x)  # type: ignore[no-any-return]

    return outputs


def combine(parts: list[tuple[float, int, int]], accuracy: bool) -> dict[str, float]:
    """Loss and accuracy over blocks, summed in their order."""
    loss, right, rows = (sum(part) for part in zip(*parts, strict=True))
    return {"loss": loss / rows} | ({"accuracy": right / rows} if accuracy else {})
