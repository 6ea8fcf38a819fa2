"""Linear layers, and the sums over rows of groups and clients that other layers need too."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedbuff.learn.kernels import (
    Into,
    client_sums,
    low_linear,
    outer_products,
    usable,
)
from fedbuff.learn.twins.step import Current, LocalStep, Ranges, Slot, Twin


def same_length(ranges: Ranges) -> int:
    """The length of the ranges if all have the same, else 0."""
    n = ranges[0][1] - ranges[0][0]
    return n if all(b - a == n for a, b in ranges) else 0


def grouped_linear(x: Tensor, groups: Ranges, w: Tensor, b: Tensor | None, low: bool) -> Tensor:
    """Linear, x wᵀ + b, where the rows of each group have their own w [groups, out, in] and b [groups, out]."""
    if low:
        kernels = usable(x, w)
        if kernels is not None:
            return low_linear(kernels, x, w, b, groups)
        return grouped_linear(x.bfloat16(), groups, w.bfloat16(), None if b is None else b.bfloat16(), False).to(x.dtype)
    if len(groups) == 1:
        return F.linear(x, w[0], None if b is None else b[0])
    y = x.new_empty(len(x), w.shape[1])
    if n := same_length(groups):
        stack, wt, into = x.view(len(groups), n, -1), w.transpose(1, 2), y.view(len(groups), n, -1)
        _ = torch.bmm(stack, wt, out=into) if b is None else torch.baddbmm(b[:, None], stack, wt, out=into)
        return y
    for (i, j), wg, bg in zip(groups, w, b if b is not None else [None] * len(w), strict=True):
        _ = torch.mm(x[i:j], wg.t(), out=y[i:j]) if bg is None else torch.addmm(bg, x[i:j], wg.t(), out=y[i:j])
    return y


def grouped_outer(step: LocalStep, dy: Tensor, x: Tensor, clients: Ranges, into: Into) -> None:
    """For each client dyᵀ x over its rows."""
    kernels = usable(dy, x, into.rows)
    if kernels is not None:
        outer_products(kernels, dy, x, into, clients, step.low)
        return
    dy, x = lowered(step, dy), lowered(step, x)
    for (i, j), g in zip(clients, into.each(), strict=True):
        if dy.dtype == g.dtype:
            g.addmm_(dy[i:j].t(), x[i:j], beta=into.beta)
        else:
            _ = g.add_(dy[i:j].t() @ x[i:j]) if into.beta else g.copy_(dy[i:j].t() @ x[i:j])


def row_sums(values: Tensor, clients: Ranges, into: Into) -> None:
    """For each client Σ values over its rows."""
    kernels = usable(values, into.rows)
    if kernels is not None:
        client_sums(kernels, values, into, clients)
        return
    for (i, j), g in zip(clients, into.each(), strict=True):
        _ = g.add_(values[i:j].sum(0)) if into.beta else torch.sum(values[i:j], 0, out=g)


def lowered(step: LocalStep, values: Tensor) -> Tensor:
    """The values in the precision that products are computed in."""
    return values.bfloat16() if step.low else values


def with_sums(gradient: Tensor, sums: Tensor) -> Tensor:
    """The gradient, with its sums [rows, channels] attached: they came for free, and a bias before this needs them."""
    gradient.sums = sums, gradient._version  # type: ignore[attr-defined]
    return gradient


def counted(gradient: Tensor) -> Tensor | None:
    """The sums that `with_sums` attached, unless autograd changed the gradient since."""
    sums, version = getattr(gradient, "sums", (None, 0))
    return sums if version == gradient._version else None


class LinearFunction(torch.autograd.Function):
    """On rows [n, features]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, step: LocalStep, weight: Slot, bias: Slot | None) -> Tensor:
        ctx.step, ctx.slots = step, (weight, bias)
        ctx.save_for_backward(x)
        groups = step.times(step.groups, len(x))
        return grouped_linear(x, groups, weight.weights(step), None if bias is None else bias.weights(step), step.low)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), step, (weight, bias) = ctx.saved_tensors, ctx.step, ctx.slots
        dy = grads[0].contiguous()
        clients, groups = step.times(step.clients, len(x)), step.times(step.groups, len(x))
        if weight.offset is not None:
            grouped_outer(step, dy, x, clients, weight.gradient(step))
        if bias is not None and bias.offset is not None:
            row_sums(dy, clients, bias.gradient(step))
        dx = None
        if ctx.needs_input_grad[0]:
            dx = grouped_linear(dy, groups, weight.weights(step).transpose(1, 2), None, step.low)
        return dx, None, None, None, None


def linear(x: Tensor, current: Current, weight: Slot, bias: Slot | None) -> Tensor:
    """What a linear layer makes of inputs [rows, …, features]; it may be changed in place, as a view from within could not."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    y: Tensor = LinearFunction.apply(rows.contiguous(), current.anchor, current.step, weight, bias)  # type: ignore[no-untyped-call]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], -1)


class LinearTwin(Twin):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.current, self.slots["weight"], self.slots.get("bias"))
