"""A task: a model, a loss, clients with their examples, and what to evaluate on. Nothing to subclass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedbuff.core import check

if TYPE_CHECKING:
    import torch

Examples = tuple[Any, Any]  # inputs, labels: numpy arrays or torch tensors, the first axis counts examples


def most_likely(output: "torch.Tensor", label: "torch.Tensor") -> "torch.Tensor":
    """Which labels a classifier got right: by its largest output, or by the sign of its only one.

    Classes are the second dimension of the output, as cross entropy has it, or the last.
    """
    if output.ndim > 1 and output.shape[-1] > 1:
        label = label.squeeze(-1) if label.shape == (*output.shape[:-1], 1) else label
        for dimension in (1, -1):
            if (best := output.argmax(dimension)).shape == label.shape:
                return best == label
        shapes = f"outputs of shape {tuple(output.shape[1:])} and labels of shape {tuple(label.shape[1:])}"
        raise ValueError(f"accuracy: {shapes} can't be compared; give the Task accuracy=None, or a function of your own")
    if not bool(((label == 0) | (label == 1)).all()):
        raise ValueError("accuracy: the labels are not 0 or 1; give the Task accuracy=None, or a function of your own")
    return (output.reshape(label.shape) > 0) == (label > 0.5)


@dataclass(frozen=True, repr=False)
class Task:
    """What is learned, by whom, and how it is judged.

    model      makes the model: `() -> torch.nn.Module`
    loss       `(output, label) -> mean loss`, e.g. `torch.nn.functional.cross_entropy`
    clients    a sequence of (inputs, labels); a lazy one may add `examples(client) -> int` to spare loading to count
    evaluate   held-out (inputs, labels), or a dict of several splits; targets are watched on the first
    accuracy   `(output, label) -> right or wrong per example`; None for a task without an accuracy
    """

    model: "Callable[[], torch.nn.Module]"
    loss: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
    clients: Sequence[Examples]
    evaluate: Examples | Mapping[str, Examples]
    accuracy: "Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None" = most_likely
    name: str = "task"
    settings: Mapping[str, Any] | None = None  # its table in a settings file, where it can be made from one

    def __post_init__(self) -> None:
        check.takes(0, "a function that makes it, e.g. lambda: nn.Linear(8, 3)", model=self.model)
        if isinstance(self.loss, type):
            raise ValueError(f"loss={self.loss.__name__}: is a class; give an instance of it, or a function")
        check.function(2, "a function of output and label, e.g. torch.nn.functional.cross_entropy", loss=self.loss)
        if self.accuracy is not None:
            check.function(2, "a function of output and label, or None", accuracy=self.accuracy)
        check.instance(str, "a string", name=self.name)
        if not isinstance(self.evaluate, Mapping) and not (isinstance(self.evaluate, tuple | list) and len(self.evaluate) == 2):
            raise ValueError("evaluate: expected held-out (inputs, labels), or a dict of several such splits")
        counted = hasattr(self.clients, "__len__") and hasattr(self.clients, "__getitem__")
        named = isinstance(self.clients, Mapping) and set(range(len(self.clients))) != self.clients.keys()
        check.fits(counted and not named, "a sequence of (inputs, labels), e.g. a list", clients=self.clients)
        if len(self.clients) == 0:
            raise ValueError("clients: a task needs at least one client")
        if not self.splits:
            raise ValueError("evaluate: expected at least one split")
        for split, examples in self.splits.items():
            if not isinstance(split, str):
                raise ValueError(f"evaluate: a split is called {check.shown(split)}; expected a string, e.g. 'test'")
            _check_examples(examples, "evaluate, {}", split)
        if isinstance(self.clients, list | tuple):
            for client, examples in enumerate(self.clients):
                _check_examples(examples, "clients[{}]", client)

    def __repr__(self) -> str:
        held_out = ", ".join(f"{len(labels):,} examples in {split!r}" for split, (_, labels) in self.splits.items())
        return f"<task {self.name}: {len(self.clients):,} clients, evaluated on {held_out}>"

    @property
    def splits(self) -> Mapping[str, Examples]:
        return self.evaluate if isinstance(self.evaluate, Mapping) else {"test": self.evaluate}

    def sizes(self) -> list[int] | None:
        """How many examples each client holds, if the task has them all at hand."""
        if not isinstance(self.clients, list | tuple) or hasattr(self.clients, "examples"):
            return None
        return [len(y) for _, y in self.clients]

    def examples(self, client: int) -> int:
        """How many examples a client holds."""
        count = getattr(self.clients, "examples", None)
        return int(count(client)) if count is not None else len(self.clients[client][1])


def _check_examples(examples: Any, where: str, which: object) -> None:
    """Inputs, and as many labels."""
    try:
        x, y = examples
        inputs, labels = len(x), len(y)
    except (TypeError, ValueError):
        raise ValueError(f"{where.format(which)}: expected (inputs, labels), got {check.shown(examples)}") from None
    if inputs != labels or labels == 0:
        raise ValueError(f"{where.format(which)}: {inputs} inputs and {labels} labels; expected as many of both, at least one")
