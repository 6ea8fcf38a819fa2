"""Convolutions."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from fedbuff.learn.kernels import (
    Shape,
    channels_last,
    convolution_weights,
    convolve,
    usable,
)
from fedbuff.learn.twins.linear import counted, lowered, row_sums
from fedbuff.learn.twins.step import LocalStep, Slot, Twin

Conv = tuple[list[int], list[int], list[int], bool, list[int], int]  # stride, padding, dilation, False, zeros, groups


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, step: LocalStep, weight: Slot, bias: Slot | None, how: Conv, keep_layout: bool
    ) -> Tensor:
        ctx.step, ctx.slots, ctx.how = step, (weight, bias), how
        w, b = weight.weights(step), None if bias is None else bias.weights(step)
        groups = step.times(step.groups, len(x))
        ctx.dtype = x.dtype
        kernels = kernels_for(x, w, how)
        if kernels is not None:
            x = channels_last(x)
            ctx.save_for_backward(x)
            ctx.shape = shape_of(x, w, how)
            y = convolve(kernels, x, w, b, groups, ctx.shape, low=step.low)
            return y.contiguous() if keep_layout else y
        x, w, b = lowered(step, x.contiguous()), lowered(step, w), None if b is None else lowered(step, b)
        ctx.save_for_backward(x)
        outputs = [torch.convolution(x[i:j], w[g], None if b is None else b[g], *how) for g, (i, j) in enumerate(groups)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), step, (weight, bias), how = ctx.saved_tensors, ctx.step, ctx.slots, ctx.how
        w = weight.weights(step).to(x.dtype)
        clients = step.times(step.clients, len(x))
        kernels = kernels_for(x, w, how)
        dy = lowered(step, grads[0].contiguous()) if kernels is None else channels_last(grads[0])
        if bias is not None and bias.offset is not None:
            sums = counted(grads[0])
            over = list(range(2, dy.dim()))
            row_sums(grads[0].sum(over) if sums is None else sums, clients, bias.gradient(step))
        if weight.offset is not None:
            into = weight.gradient(step)
            if kernels is not None:
                convolution_weights(kernels, x, dy, into, clients, ctx.shape, step.low)
            else:
                seen, handed, like = (t.to(ctx.dtype) for t in (x, dy, w[0]))  # torch's gradient in bfloat16 may be NaN
                for (i, j), g in zip(clients, into.each(), strict=True):
                    dw = torch.ops.aten.convolution_backward(handed[i:j], seen[i:j], like, None, *how, [False, True, False])[1]
                    _ = g.add_(dw) if into.beta else g.copy_(dw)
        dx = input_gradient(ctx, dy, x, w, step).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None, None


def input_gradient(ctx: Any, dy: Tensor, x: Tensor, w: Tensor, step: LocalStep) -> Tensor:
    """What a convolution hands on to its input: again a convolution, if it went over the image pixel by pixel."""
    groups, how = step.times(step.groups, len(x)), ctx.how
    kernels = kernels_for(x, w, how)
    if kernels is not None and x.shape[1] % 8 == 0 and how[0] == [1, 1]:
        s = ctx.shape
        ph, pw = s.dh * (s.kh - 1) - s.ph, s.dw * (s.kw - 1) - s.pw
        if ph >= 0 and pw >= 0:
            turned = Shape(s.oh, s.ow, s.oc, s.h, s.w, s.c, s.kh, s.kw, 1, 1, ph, pw, s.dh, s.dw)
            return convolve(kernels, dy, w, None, groups, turned, flipped=True, low=step.low)
    parts = [
        torch.ops.aten.convolution_backward(dy[i:j], x[i:j], w[g], None, *how, [True, False, False])[0]
        for g, (i, j) in enumerate(groups)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def kernels_for(x: Tensor, w: Tensor, how: Conv) -> ctypes.CDLL | None:
    """The kernels, if they can do this convolution."""
    return usable(x, w) if x.dim() == 4 and how[5] == 1 and w.shape[1] % 8 == 0 else None


def shape_of(x: Tensor, w: Tensor, how: Conv) -> Shape:
    """Sizes of input and output, as the kernels want them."""
    (oc, c, *kernel), (stride, padding, dilation, *_) = w.shape[1:], how
    sizes = zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)
    out = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes]
    return Shape(*x.shape[2:], c, *out, oc, *kernel, *stride, *padding, *dilation)


class ConvTwin(Twin):
    def setup(self, layer: Any) -> None:
        padding = layer.padding
        if padding == "valid":
            padding = (0,) * len(layer.kernel_size)
        elif padding == "same":
            padding = tuple(d * (k - 1) // 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
        zeros = [0] * len(layer.kernel_size)
        self.how: Conv = list(layer.stride), list(padding), list(layer.dilation), False, zeros, layer.groups

    @staticmethod
    def why_not(layer: Any) -> str | None:
        if layer.padding_mode != "zeros":
            return f"pads with {layer.padding_mode}; only zeros can be batched"
        if layer.padding == "same" and any(d * (k - 1) % 2 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)):
            return "has padding='same' with an even kernel, which pads one side more than the other"
        return None

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != len(self.how[0]) + 2:
            raise ValueError(f"a convolution saw an input of shape {tuple(x.shape)} without a batch dimension")
        y: Tensor = _Conv.apply(  # type: ignore[no-untyped-call]
            x,
            self.current.anchor,
            self.current.step,
            self.slots["weight"],
            self.slots.get("bias"),
            self.how,
            self.current.plain,
        )
        return y
