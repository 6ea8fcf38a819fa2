"""Evaluation of a version on held-out examples."""

import torch

from fedbuff.core.versions import Vector
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.task import Task

_ROWS = 2048


def evaluate(task: Task, flat: Flat, weights: Vector) -> dict[str, dict[str, float]]:
    """Loss and accuracy on every split; the accuracy is left out where the task has none."""
    flat.load(weights)
    flat.module.eval()
    results = {}
    with torch.no_grad():
        for split, (inputs, labels) in task.splits.items():
            x, y = as_tensor(inputs, like=flat.vector), as_tensor(labels, like=flat.vector)
            loss, right = 0.0, 0
            for rows_x, rows_y in zip(torch.split(x, _ROWS), torch.split(y, _ROWS), strict=True):
                output = flat.module(rows_x)
                loss += float(task.loss(output, rows_y)) * len(rows_y)
                right += int(task.accuracy(output, rows_y).sum()) if task.accuracy else 0
            results[split] = {"loss": loss / len(y)} | ({"accuracy": right / len(y)} if task.accuracy else {})
    return results
