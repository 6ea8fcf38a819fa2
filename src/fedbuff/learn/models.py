"""Small models to start with, for flat inputs; bring your own with `fb.Task(model=…)`."""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fedbuff.core import check

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class linear:
    """Logistic regression: one linear layer."""

    def __call__(self, features: int, classes: int) -> "torch.nn.Module":
        import torch

        return torch.nn.Linear(features, classes)


@dataclass(frozen=True)
class mlp:
    """Linear layers with ReLU between them, and optional dropout."""

    hidden: tuple[int, ...] = (64,)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check.number(0, 1, dropout=self.dropout)
        for width in self.hidden:
            check.integer(1, hidden=width)

    def __call__(self, features: int, classes: int) -> "torch.nn.Module":
        import torch

        layers: list[torch.nn.Module] = []
        for inputs, outputs in pairwise((features, *self.hidden)):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
            if self.dropout:
                layers.append(torch.nn.Dropout(self.dropout))
        return torch.nn.Sequential(*layers, torch.nn.Linear((features, *self.hidden)[-1], classes))


Model = linear | mlp
