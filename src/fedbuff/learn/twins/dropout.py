"""Dropout: each client draws its own masks, the very ones that torch would draw in a loop over clients."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedbuff.learn.kernels import (
    Twisters,
    library,
    twisters_agree,
)
from fedbuff.learn.twins.step import Current, LocalStep, Ranges


class Draws:
    """The generators of some clients, in the state that the loop's would be in."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.seeds = seeds
        self.kernels = library() if device.type == "cpu" and twisters_agree() else None
        self.twisters: Twisters | None = None
        self.generators: list[torch.Generator] = []
        self.orders: list[list[int]] = []  # in which the dimensions of each tensor lie in memory, and masks are drawn

    def mask(self, x: Tensor, keep: float, whose: Sequence[int], clients: Ranges, time_first: bool) -> Tensor:
        """1/keep or 0 for each element; drawn client by client as torch would for the client's rows alone."""
        if self.kernels is not None and x.dtype == torch.float32:
            self.twisters = self.twisters or Twisters(self.kernels, self.seeds)
            return self.twisters.draw(x, keep, whose, clients, time_first)
        if not self.generators:
            self.generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        mask = torch.empty_like(x)
        for client, (i, j) in zip(whose, clients, strict=True):
            rows = mask[i:j].transpose(0, 1) if time_first else mask[i:j]
            rows.copy_(torch.empty(rows.shape, dtype=x.dtype).bernoulli_(keep, generator=self.generators[client]))
        return mask.div_(keep)


def dropout(x: Tensor, p: float, step: LocalStep, time_first: bool = False) -> Tensor:
    """What torch's dropout does to [rows, …]; with `time_first`, to [rows, time, …] as if it were [time, rows, …]."""
    if p == 1:
        return x * 0.0
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous()  # channels-last comes from a twin, where the loop has no such thing
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])  # torch draws in the order of memory
    step.draws.orders.append(order)
    if order[:2] == [1, 0]:
        time_first, order = True, [0, 1, *order[2:]]
    elif order[0] != 0:
        raise ValueError("dropout saw a tensor whose rows are neither the first nor the second dimension in memory")
    shuffled = x.permute(order).contiguous()
    mask = step.draws.mask(shuffled, 1 - p, step.whose, step.times(step.clients, len(x)), time_first)
    return x * mask.permute([order.index(d) for d in range(x.dim())])


class DropoutTwin(nn.Module):
    def __init__(self, p: float, current: Current) -> None:
        super().__init__()
        self.p, self.current = p, current

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.current.step) if self.training else x
