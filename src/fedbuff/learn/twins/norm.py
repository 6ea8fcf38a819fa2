"""GroupNorm, LayerNorm and pooling, and all of GroupNorm, ReLU and max pooling in one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedbuff.learn.kernels import (
    Norm,
    channels_last,
    needed,
    norm_pool,
    norm_pool_back,
    usable,
)
from fedbuff.learn.twins.linear import row_sums, with_sums
from fedbuff.learn.twins.step import Current, LocalStep, Slot, Twin


class _Affine(torch.autograd.Function):
    """y = x γ + β, over the trailing dimensions of x that `view` says γ and β have there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, step: LocalStep, weight: Slot, bias: Slot | None, view: tuple[int, ...]
    ) -> Tensor:
        ctx.step, ctx.slots, ctx.view = step, (weight, bias), view
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        w, b = weight.weights(step), None if bias is None else bias.weights(step)
        for g, (i, j) in enumerate(step.times(step.groups, len(x))):
            torch.mul(x[i:j], w[g].view(view), out=y[i:j])
            if b is not None:
                y[i:j] += b[g].view(view)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), step, (weight, bias), view = ctx.saved_tensors, ctx.step, ctx.slots, ctx.view
        dy = grads[0]
        clients = step.times(step.clients, len(x))
        for slot, values in ((weight, dy * x if weight.offset is not None else dy), (bias, dy)):
            if slot is not None and slot.offset is not None:
                row_sums(_sum_to(values, view).view(-1, *slot.shape), clients, slot.gradient(step))
        dx = None
        if ctx.needs_input_grad[0]:
            dx, w = torch.empty_like(dy), weight.weights(step)
            for g, (i, j) in enumerate(step.times(step.groups, len(x))):
                torch.mul(dy[i:j], w[g].view(view), out=dx[i:j])
        return dx, None, None, None, None, None


def _sum_to(values: Tensor, view: tuple[int, ...]) -> Tensor:
    """[rows, size of view]: sums over every dimension but the first that `view` does not have."""
    shape = (1,) * (values.dim() - len(view)) + view
    over = [d for d in range(1, values.dim()) if shape[d] == 1 and values.shape[d] != 1]
    return (values.sum(over) if over else values).flatten(1)


class GroupNormTwin(Twin):
    def setup(self, layer: Any) -> None:
        self.groups, self.eps = layer.num_groups, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        # contiguous: of channels-last images torch takes the variance as E[x²] − E[x]², and loses its digits
        normal = F.group_norm(x.contiguous(), self.groups, eps=self.eps)
        y: Tensor = _Affine.apply(  # type: ignore[no-untyped-call]
            normal,
            self.current.anchor,
            self.current.step,
            self.slots["weight"],
            self.slots["bias"],
            (-1, *(1,) * (x.dim() - 2)),
        )
        return y


class FrozenGroupNorm(nn.Module):
    """GroupNorm that trains nothing; contiguous as in `GroupNormTwin`."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        normal: Tensor = self.norm(x.contiguous())
        return normal


class LayerNormTwin(Twin):
    def setup(self, layer: Any) -> None:
        self.shape, self.eps = layer.normalized_shape, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        normal = F.layer_norm(x, self.shape, eps=self.eps)
        y: Tensor = _Affine.apply(  # type: ignore[no-untyped-call]
            normal, self.current.anchor, self.current.step, self.slots["weight"], self.slots.get("bias"), self.shape
        )
        return y


class _NormPool(torch.autograd.Function):
    """Group norm, ReLU and max pool in one pass over each image."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, step: LocalStep, weight: Slot | None, bias: Slot | None, norm: Norm, pool: int
    ) -> Tensor:
        x = channels_last(x)
        gamma, beta = (None if slot is None else slot.weights(step) for slot in (weight, bias))
        groups = step.times(step.groups, len(x))
        y, *saved = norm_pool(needed(), x, gamma, beta, groups, norm, pool)
        ctx.save_for_backward(x, *saved)
        ctx.step, ctx.slots, ctx.norm, ctx.pool = step, (weight, bias), norm, pool
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, *saved), step, (weight, bias) = ctx.saved_tensors, ctx.step, ctx.slots
        gamma = None if weight is None else weight.weights(step)
        groups = step.times(step.groups, len(x))
        dx, dgamma, dbeta, dsum = norm_pool_back(
            needed(), x, channels_last(grads[0]), (saved[0], saved[1], saved[2]), gamma, groups, ctx.norm, ctx.pool
        )
        clients = step.times(step.clients, len(x))
        for slot, values in ((weight, dgamma), (bias, dbeta)):
            if slot is not None and slot.offset is not None:
                row_sums(values, clients, slot.gradient(step))
        return with_sums(dx, dsum), None, None, None, None, None, None


class NormPoolTwin(nn.Module):
    """Stands for a GroupNorm, a ReLU and maybe a MaxPool2d in a row; goes through torch where the kernel can't."""

    def __init__(self, norm: nn.GroupNorm, twin: nn.Module, slots: dict[str, Slot], pool: int, current: Current) -> None:
        super().__init__()
        self.groups, self.eps, self.pool = norm.num_groups, norm.eps, pool
        self.twin, self.slots, self.current = twin, slots, current

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] % 8 or min(x.shape[2:]) < self.pool or usable(x) is None:
            y = F.relu(self.twin(x))
            return F.max_pool2d(y, 2) if self.pool == 2 else y
        norm = Norm(x.shape[2], x.shape[3], x.shape[1], self.groups, self.eps)
        pooled: Tensor = _NormPool.apply(  # type: ignore[no-untyped-call]
            x, self.current.anchor, self.current.step, self.slots.get("weight"), self.slots.get("bias"), norm, self.pool
        )
        return pooled


class PoolTwin(nn.Module):
    """MaxPool2d of channels-last images, which torch does ten times as fast as of others."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.pool(channels_last(x)).contiguous() if x.dim() == 4 else self.pool(x)
        return pooled


def norm_pool_at(parts: Sequence[nn.Module]) -> int:
    """How many of these modules, from the first, are a GroupNorm, a ReLU and maybe a MaxPool2d of 2 by 2, or 0."""
    if len(parts) < 2 or type(parts[0]) is not nn.GroupNorm or type(parts[1]) is not nn.ReLU:
        return 0
    pool = parts[2] if len(parts) > 2 else None
    if type(pool) is not nn.MaxPool2d:
        return 2
    square = [(2, 2) if size == 2 else size for size in (pool.kernel_size, pool.stride)] == [(2, 2), (2, 2)]
    plain = pool.padding in (0, (0, 0)) and pool.dilation in (1, (1, 1)) and not pool.ceil_mode and not pool.return_indices
    return 3 if square and plain else 2
