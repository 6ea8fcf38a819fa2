"""One local step of many clients, and what a layer's twin is."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedbuff.learn.kernels import Into, Numbers

if TYPE_CHECKING:
    from fedbuff.learn.twins.dropout import Draws

Ranges = list[tuple[int, int]]


@dataclass
class LocalStep:
    """One local step of several clients: whose rows are where, the weights they see, and room for their gradients."""

    clients: Ranges
    groups: Ranges
    weights: Tensor  # [groups, d]
    gradient: Tensor  # [rows, d]; undefined where nothing was written
    places: Numbers  # in which of these rows each client's gradient goes
    draws: "Draws"  # random numbers, for dropout
    whose: Sequence[int]  # which of them are each client's
    rows: int
    low: bool = False  # products are of numbers rounded to bfloat16
    written: set[int] = field(default_factory=set)  # offsets of the parameters whose gradient was written

    def times(self, ranges: Ranges, rows: int) -> Ranges:
        """The ranges in a tensor that holds several rows for each row of the batch, as after x.reshape(-1, features)."""
        if rows == self.rows:
            return ranges
        if rows % self.rows:
            raise ValueError(f"a layer saw {rows} rows of a batch of {self.rows}; the batch must be the first dimension")
        k = rows // self.rows
        return [(a * k, b * k) for a, b in ranges]


class Slot:
    """Where a parameter lies in the flat vector; a frozen one (offset None) is the same for everyone."""

    def __init__(self, offset: int | None, parameter: Tensor) -> None:
        self.offset, self.shape, self.frozen = offset, parameter.shape, parameter.detach().contiguous()
        self.size = parameter.numel()

    def weights(self, step: LocalStep) -> Tensor:
        """[groups, *shape]: what each group sees."""
        if self.offset is None:
            return self.frozen.expand(len(step.groups), *self.shape)
        return step.weights[:, self.offset : self.offset + self.size].view(-1, *self.shape)

    def gradient(self, step: LocalStep) -> Into:
        """Where to write the gradients of clients; the second to do so adds."""
        assert self.offset is not None
        beta = int(self.offset in step.written)
        step.written.add(self.offset)
        return Into(step.gradient[:, self.offset : self.offset + self.size].view(-1, *self.shape), step.places, beta)


class Current:
    """The step that the twins of a model work on."""

    step: LocalStep

    def __init__(self) -> None:
        # outputs of twins must require a gradient though no input does: this one is never looked at
        self.anchor = torch.zeros((), requires_grad=True)
        # convolutions give channels-last images, unless the model's own code can't do with them
        self.plain = False


class Twin(nn.Module):
    """A layer's stand-in: `slots` say where its parameters lie."""

    def __init__(self, layer: nn.Module, slots: dict[str, Slot], current: Current) -> None:
        super().__init__()
        for name in getattr(layer, "__constants__", ()):  # in_features and the like, which a model's own code may read
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))
        self.slots, self.current = slots, current
        self.setup(layer)

    def setup(self, layer: Any) -> None:
        """Take over the layer's settings."""

    @staticmethod
    def why_not(layer: Any) -> str | None:
        """Why this very layer has no twin, as the end of a sentence that begins with its name."""
        return None
