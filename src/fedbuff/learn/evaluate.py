"""Evaluation of a version on held-out examples, a block of rows at a time so that it can be shared out."""

import torch

from fedbuff.core.versions import Vector
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.task import Task

ROWS = 2048


def evaluate_rows(task: Task, flat: Flat, weights: Vector, split: str, start: int) -> tuple[float, int, int]:
    """On the `ROWS` examples of a split from `start` on: the sum of losses, how many are right, how many there are."""
    inputs, labels = task.splits[split]
    x, y = (as_tensor(part[start : start + ROWS], like=flat.vector) for part in (inputs, labels))
    flat.load(weights)
    flat.module.eval()
    with torch.no_grad():
        output = flat.module(x)
        loss = float(task.loss(output, y)) * len(y)
        return loss, int(task.accuracy(output, y).sum()) if task.accuracy else 0, len(y)


def combine(blocks: list[tuple[float, int, int]], accuracy: bool) -> dict[str, float]:
    """Loss and accuracy over blocks, summed in their order."""
    loss, right, rows = (sum(parts) for parts in zip(*blocks, strict=True))
    return {"loss": loss / rows} | ({"accuracy": right / rows} if accuracy else {})
