"""A first look at a task: do its model, loss and examples fit together? So that a mistake is said before a run begins."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fedbuff.learn.evaluate import right
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.generator import default_generator
from fedbuff.learn.task import Task
from fedbuff.learn.tasks import cross_entropy

_ROWS = 2  # examples that are looked at
_CLIENTS = 100_000  # whose labels are looked at
_FORMS = 100  # of examples, by type and shape, that are tried
_IGNORED = -100  # a label that torch's cross entropy passes over


def first_look(task: Task, flat: Flat, device: str = "cpu") -> None:
    """Apply model and loss to a few examples of a client and of what is held out; a ValueError says what does not fit."""
    try:
        torch.empty(1, device=device).cpu()  # "meta" has no numbers to give back
    except (AssertionError, RuntimeError, NotImplementedError) as e:
        raise ValueError(f"training.device={device!r}: torch can't compute there: {str(e).splitlines()[0]}") from e
    training = flat.module.training
    flat.module.eval()  # draws no random numbers, and remembers nothing
    try:
        with torch.no_grad(), default_generator() as generator:
            generator.manual_seed(0)  # for what a model draws when it is first applied
            output = _try(task, flat, "clients[0]", *task.clients[0], gradient=True)
            _others_fit(task, flat)
            for name, (x, y) in task.splits.items():
                found = _try(task, flat, f"evaluate, {name}", x, y)
                if task.accuracy is not None:
                    with _said_where(task, f"evaluate, {name}", x, y, "accuracy can't be applied to"):
                        right(task.accuracy(found, as_tensor(y[:_ROWS], like=flat.vector)), len(found))
    finally:
        flat.module.train(training)
        flat.buffers.reset()
    if task.loss in (cross_entropy, torch.nn.functional.cross_entropy) and output.ndim == 2:
        _labels_fit(task, output.shape[1])


def _try(task: Task, flat: Flat, where: str, x: Any, y: Any, gradient: bool = False) -> torch.Tensor:
    with _said_where(task, where, x, y), torch.set_grad_enabled(gradient):
        inputs, labels = (as_tensor(part[:_ROWS], like=flat.vector) for part in (x, y))
        output: torch.Tensor = flat.module(inputs)
        loss = task.loss(output, labels)
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss: expected the mean over the examples, one number; got {found}")
    if gradient and not _differentiable(loss, flat):
        with _said_where(task, where, x, y, "model and loss can't be trained on"):
            trains = _trains(task, flat, *(as_tensor(part[:_ROWS], like=flat.vector) for part in (x, y)))
        if not trains:
            raise ValueError(
                f"task {task.name!r}, loss: has no gradient, so nothing can be learned from it; compute it with torch from the "
                "model's output, without detach(), item() or numpy"
            )
    return output


def _differentiable(loss: torch.Tensor, flat: Flat) -> bool:
    try:
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    finally:
        flat.gradient.zero_()
    return loss.requires_grad


def _trains(task: Task, flat: Flat, inputs: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether there is a gradient when the model trains: one that is evaluated may do without."""
    flat.module.train()
    try:
        with torch.enable_grad():
            loss = task.loss(flat.module(inputs), labels)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            return bool(loss.requires_grad)
    finally:
        flat.gradient.zero_()
        flat.module.eval()


def _others_fit(task: Task, flat: Flat) -> None:
    """Clients at hand whose examples are of another form than those before: a model may take texts of any length, or not."""
    if isinstance(task.clients, list | tuple):
        seen = {_form(*task.clients[0])}
        for client, (x, y) in enumerate(task.clients[:_CLIENTS]):
            if (form := _form(x, y)) not in seen:
                _try(task, flat, f"clients[{client}]", x, y)
                seen.add(form)
            if len(seen) == _FORMS:
                break


@contextmanager
def _said_where(task: Task, where: str, x: Any, y: Any, what: str = "model and loss can't be applied to") -> Iterator[None]:
    try:
        yield
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as e:
        # what torch says of shapes and types that don't fit
        raise ValueError(
            f"task {task.name!r}, {where}: {what} inputs {_kind(x)} and labels {_kind(y)}: "
            f"{(str(e).splitlines() or [type(e).__name__])[0]}"
        ) from e


def _kind(array: Any) -> str:
    """The type and shape of inputs or labels."""
    kind, shape = _form(array)[0]
    return f"{str(kind).removeprefix('torch.')}{[len(array), *shape]}"


def _form(*arrays: Any) -> tuple[tuple[Any, tuple[int, ...]], ...]:
    """The types of inputs and labels, and the shape of each."""
    found = [array if hasattr(array, "dtype") else np.asarray(array[:1]) for array in arrays]
    return tuple((array.dtype, tuple(array.shape[1:])) for array in found)


def _labels_fit(task: Task, classes: int) -> None:
    """Labels are looked at as far as they are at hand: reading those of all clients might take hours."""
    parts = [(f"evaluate, {name}", y) for name, (_, y) in task.splits.items()]
    if isinstance(task.clients, list | tuple):
        parts += [(f"clients[{client}]", y) for client, (_, y) in enumerate(task.clients[:_CLIENTS])]
    for where, y in parts:
        labels = np.asarray(y)
        if labels.dtype.kind in "iu" and labels.ndim == 1:
            wrong = labels[((labels < 0) | (labels >= classes)) & (labels != _IGNORED)]
            if len(wrong):
                raise ValueError(f"task {task.name!r}, {where}: label {wrong[0]}; the model has outputs for 0 to {classes - 1}")
