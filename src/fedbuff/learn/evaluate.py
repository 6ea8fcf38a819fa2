"""Evaluation of a version on held-out examples, a block of rows at a time so that it can be shared out."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import CrossEntropyLoss, NLLLoss

from fedbuff.core.versions import Vector
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.generator import default_generator
from fedbuff.learn.losses import counts_labels, is_mean_cross_entropy
from fedbuff.learn.task import Task, most_likely

ROWS = 2048
Outputs = Callable[[Vector, Tensor], Tensor]  # what the model with these weights says of these rows


class Part(NamedTuple):
    """What was found on some rows: two sums, and what each is to be divided by."""

    loss: float
    counted: float
    right: float
    rows: int


def evaluate(task: Task, flat: Flat, weights: Vector) -> dict[str, dict[str, float]]:
    """Loss and accuracy on every split, here and now; the accuracy is left out where the task has none."""
    found: dict[str, list[Part]] = {}
    for split, start in blocks(task):
        found.setdefault(split, []).append(evaluate_rows(task, flat, weights, split, start, plain(flat)))
    return {split: combine(parts, task.accuracy is not None) for split, parts in found.items()}


def blocks(task: Task) -> list[tuple[str, int]]:
    """Where the blocks of every split start."""
    return [(split, start) for split, (_, y) in task.splits.items() for start in range(0, len(y), _rows(task, y))]


def _rows(task: Task, labels: Any) -> int:
    """How many rows a block has: all of them for a sum, and where a loss of somebody's own may leave out labels below 0."""
    if counts_labels(task.loss):
        return ROWS
    if getattr(task.loss, "reduction", "mean") != "mean":
        return max(1, len(labels))
    return max(1, len(labels)) if _any_below_zero(labels) else ROWS


def _any_below_zero(labels: Any) -> bool:
    if isinstance(labels, Tensor):
        return not labels.is_floating_point() and labels.dtype.is_signed and bool((labels < 0).any())
    numbers = np.asarray(labels)
    return numbers.dtype.kind == "i" and bool((numbers < 0).any())


def evaluate_rows(task: Task, flat: Flat, weights: Vector, split: str, start: int, outputs: Outputs) -> Part:
    """On a block of a split's examples, from `start` on."""
    inputs, labels = task.splits[split]
    end = min(len(labels), start + _rows(task, labels))
    with torch.no_grad(), default_generator() as generator:
        found = []
        for at in range(start, end, ROWS):
            generator.manual_seed(at)  # for a model that draws though it is evaluated: the same in every process
            found.append(outputs(weights, as_tensor(inputs[at : min(end, at + ROWS)], like=flat.vector)))
        whole = _joined(found, end - start)
        if whole is not None:
            return _part(task, whole, as_tensor(labels[start:end], like=flat.vector))
        cuts = range(start, end, ROWS)  # what can't be put together is looked at piece by piece, each for its rows
        pieces = [as_tensor(labels[at : min(end, at + ROWS)], like=flat.vector) for at in cuts]
        parts = [_part(task, output, y) for output, y in zip(found, pieces, strict=True)]
        return Part(*(sum(column) for column in zip(*parts, strict=True)))


def _part(task: Task, output: Any, y: Tensor) -> Part:
    counts = _counts(task, output, y)
    counted = _counted(task, y, counts) if counts_labels(task.loss) else len(y)
    loss = float(task.loss(output, y)) * counted if counted else 0.0
    if task.accuracy is None:
        return Part(loss, counted, 0.0, len(y))
    judged = right(_judged(task, output, y), len(y), counts if task.accuracy is most_likely else None)
    return Part(loss, counted, float(judged.sum()), len(judged))


def _joined(outputs: list[Any], rows: int) -> Any:
    """What a model said of some rows after others, as if it had been asked for all at once; None if that can't be."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, Tensor):
        same = first.ndim > 0 and all(output.shape[1:] == first.shape[1:] for output in outputs)
        return torch.cat(outputs) if same and sum(len(output) for output in outputs) == rows else None
    if type(first) is dict:
        parts = {name: _joined([output[name] for output in outputs], rows) for name in first}
        return None if any(part is None for part in parts.values()) else parts
    if type(first) in (tuple, list):
        several = [_joined(list(part), rows) for part in zip(*outputs, strict=True)]
        return None if any(part is None for part in several) else type(first)(several)
    return None


def _counts(task: Task, output: Tensor, label: Tensor) -> Tensor | None:
    """Which labels the loss does not leave out: of classes, those that torch is told to, or numbers below 0; None: none."""
    if label.is_floating_point() or not isinstance(output, Tensor):  # several outputs: the loss is somebody's own
        return None
    if isinstance(task.loss, CrossEntropyLoss | NLLLoss):
        return label != task.loss.ignore_index
    of_classes = output.ndim == label.ndim + 1 and max(output.shape[1], output.shape[-1]) > 1
    return label >= 0 if of_classes else None


def _counted(task: Task, label: Tensor, counts: Tensor | None) -> float:
    """By what the mean loss of these rows is to be multiplied: their number, unless labels are left out of it, or weighed."""
    if counts is None:
        return len(label)
    if isinstance(task.loss, CrossEntropyLoss | NLLLoss) and task.loss.weight is not None:
        weight = task.loss.weight.to(label.device)
        return float((counts * weight[label.where(counts, 0)]).double().sum())
    return len(label) * float(counts.sum()) / label.numel()


def _judged(task: Task, output: Tensor, label: Tensor) -> Tensor:
    """What the task's accuracy says; a single output is a class to cross entropy, and to other losses a sign."""
    assert task.accuracy is not None
    by_class = is_mean_cross_entropy(task.loss) or isinstance(task.loss, CrossEntropyLoss)
    if task.accuracy is most_likely and by_class and output.shape[1:] == (1,) and not label.is_floating_point():
        return output.argmax(1) == label
    return task.accuracy(output, label)


def right(found: Tensor, rows: int, counts: Tensor | None = None) -> Tensor:
    """How right each row is, from 0 to 1: of several labels that a row has, the mean; of those that count, if that is said."""
    if not isinstance(found, Tensor) or found.shape[:1] != (rows,):
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(f"accuracy: expected right or wrong for each of {rows} examples, got {what}")
    found = found.reshape(rows, -1).double()
    if counts is None or bool(counts.all()):
        return found.mean(1)
    counts = counts.reshape(rows, -1)
    return ((found * counts).sum(1) / counts.sum(1))[counts.any(1)]


def plain(flat: Flat) -> Outputs:
    """The model itself, all rows at once."""

    def outputs(weights: Vector, x: Tensor) -> Tensor:
        flat.load(weights)
        flat.module.eval()
        with torch.no_grad():
            return flat.module(x)  # type: ignore[no-any-return]

    return outputs


def combine(parts: list[Part], accuracy: bool) -> dict[str, float]:
    """Loss and accuracy over blocks, summed in their order."""
    loss, counted, right, rows = (sum(part) for part in zip(*parts, strict=True))
    return {"loss": loss / counted if counted else math.nan} | ({"accuracy": right / rows if rows else 0.0} if accuracy else {})
