"""Layers that train many clients at once: each group of rows sees its own weights, each client gets its own gradient.

A batch here is the rows of many clients, one after another and without padding. `Step` says which rows form a *group*
(rows that see the same weights: all clients of a version in their first local step, one client in later ones) and
which belong to a *client*. A *twin* stands in for a layer that holds parameters: forward, it applies to every group
the group's weights; backward, it hands on the gradient of its input as usual, and writes the gradients of its weights,
client by client, into rows of one matrix. autograd never sees a parameter.

Everything else in a model, the code of its forward included, runs as it is: rows do not know of each other.
"""

import copy
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedbuff.learn.flat import Flat
from fedbuff.learn.kernels import (
    Norm,
    Shape,
    Twisters,
    channels_last,
    client_sums,
    convolution_weights,
    convolve,
    library,
    lstm,
    lstm_back,
    needed,
    norm_pool,
    norm_pool_back,
    outer_products,
    twisters_agree,
    usable,
)

Ranges = list[tuple[int, int]]


@dataclass
class Step:
    """One local step of several clients: whose rows are where, the weights they see, and room for their gradients."""

    clients: Ranges
    groups: Ranges
    weights: Tensor  # [groups, d]
    gradient: Tensor  # [clients, d]; undefined where nothing was written
    draws: "Draws"  # random numbers, for dropout
    whose: Sequence[int]  # which of them are each client's
    rows: int
    low: torch.dtype | None = None  # what products of linear layers and convolutions are computed in, if not as they are
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
        self.offset, self.shape, self.frozen = offset, parameter.shape, parameter.detach()
        self.size = parameter.numel()

    def weights(self, step: Step) -> Tensor:
        """[groups, *shape]: what each group sees."""
        if self.offset is None:
            return self.frozen.expand(len(step.groups), *self.shape)
        return step.weights[:, self.offset : self.offset + self.size].view(-1, *self.shape)

    def gradient(self, step: Step) -> tuple[Tensor, int]:
        """[clients, *shape] to write to, and β: 0 to overwrite, 1 to add to what is there."""
        assert self.offset is not None
        beta = int(self.offset in step.written)
        step.written.add(self.offset)
        return step.gradient[:, self.offset : self.offset + self.size].view(-1, *self.shape), beta


def why_no_twin(module: nn.Module) -> str | None:
    """A sentence why this model can't be trained in batches of clients, or None."""
    for name, part in module.named_modules():
        label = f"{name}: {type(part).__name__}" if name else type(part).__name__
        own = [p for p in part.parameters(recurse=False) if p.requires_grad]
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and type(part) is not nn.Dropout:
            return f"{label} draws its own random numbers for a whole batch; only Dropout can be drawn client by client"
        if not own:
            continue
        if type(part) not in _TWINS:
            known = ", ".join(kind.__name__ for kind in _TWINS)
            return f"{label} holds parameters of its own and is not one of {known}"
        hooks = part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks
        if any(hooks):
            return f"{label} has hooks, which would see the rows of many clients"
        if reason := _TWINS[type(part)].why_not(part):
            return f"{label} {reason}"
    return None


def twin_of(flat: Flat, device: torch.device) -> "tuple[nn.Module, Current]":
    """A copy of the model with twins for layers, and the place to put the step they work on."""
    offsets: dict[int, int | None] = {}
    offset = 0
    for p in flat.parameters.values():
        offsets[id(p)] = offset
        offset += p.numel()
    module = copy.deepcopy(flat.module).to(device)
    slots = {
        id(twin): Slot(offsets.get(id(p)), twin) for p, twin in zip(flat.module.parameters(), module.parameters(), strict=True)
    }  # .parameters() names a tied parameter once, and a deep copy keeps the tie
    current, twins = Current(), dict[int, nn.Module]()
    alive = list(module.modules())  # what was swapped out must live on for a while, or its id would be given to another

    def swapped(part: nn.Module) -> nn.Module:
        if id(part) not in twins:
            trains = any(p.requires_grad for p in part.parameters(recurse=False))
            trains |= isinstance(part, nn.RNNBase) and part.dropout > 0  # a frozen one still draws masks
            if type(part) is nn.Dropout and part.p > 0:
                twins[id(part)] = DropoutTwin(part.p, current)
            elif type(part) is nn.MaxPool2d and not part.return_indices:
                twins[id(part)] = PoolTwin(part)
            elif trains:
                of = {name: slots[id(p)] for name, p in part.named_parameters(recurse=False)}
                twins[id(part)] = _TWINS[type(part)](part, of, current)
            else:
                twins[id(part)] = part
                if type(part) is nn.Sequential:
                    fuse(part)
                for name, child in part._modules.items():
                    if child is not None:
                        part._modules[name] = swapped(child)
        return twins[id(part)]

    def fuse(sequence: nn.Sequential) -> None:
        """Put one twin in place of a norm, a ReLU and a pool, and nothing in place of what follows it."""
        parts = list(sequence)
        for i in range(len(parts)):
            if count := norm_pool_at(parts[i:]):
                norm = parts[i]
                slots_of = {name: slots[id(p)] for name, p in norm.named_parameters(recurse=False)}
                names = list(sequence._modules)[i : i + count]
                assert isinstance(norm, nn.GroupNorm)
                fused = NormPoolTwin(norm, swapped(norm), slots_of, 2 if count == 3 else 1, current)
                twins[id(fused)] = fused
                for name, part in zip(names, [fused, nn.Identity(), nn.Identity()], strict=False):
                    sequence._modules[name] = part

    whole = swapped(module)
    del alive
    return whole, current


class Current:
    """The step that the twins of a model work on."""

    step: Step

    def __init__(self) -> None:
        # outputs of twins must require a gradient though no input does: this one is never looked at
        self.anchor = torch.zeros((), requires_grad=True)
        # convolutions give channels-last images, unless the model's own code can't do with them
        self.plain = False


class Twin(nn.Module):
    """A layer's stand-in: `slots` say where its parameters lie."""

    def __init__(self, layer: nn.Module, slots: dict[str, Slot], current: Current) -> None:
        super().__init__()
        self.slots, self.current = slots, current
        self.setup(layer)

    def setup(self, layer: Any) -> None:
        """Take over the layer's settings."""

    @staticmethod
    def why_not(layer: Any) -> str | None:
        """Why this very layer has no twin, as the end of a sentence that begins with its name."""
        return None


# ── linear ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def same_length(ranges: Ranges) -> int:
    """The length of the ranges if all have the same, else 0."""
    n = ranges[0][1] - ranges[0][0]
    return n if all(b - a == n for a, b in ranges) else 0


def grouped_linear(x: Tensor, groups: Ranges, w: Tensor, b: Tensor | None) -> Tensor:
    """Linear, x wᵀ + b, where the rows of each group have their own w [groups, out, in] and b [groups, out]."""
    if len(groups) == 1:
        return F.linear(x, w[0], None if b is None else b[0])
    if n := same_length(groups):
        stack, wt = x.view(len(groups), n, -1), w.transpose(1, 2)
        return (torch.bmm(stack, wt) if b is None else torch.baddbmm(b[:, None], stack, wt)).flatten(0, 1)
    y = x.new_empty(len(x), w.shape[1])
    for (i, j), wg, bg in zip(groups, w, b if b is not None else [None] * len(w), strict=True):
        _ = torch.mm(x[i:j], wg.t(), out=y[i:j]) if bg is None else torch.addmm(bg, x[i:j], wg.t(), out=y[i:j])
    return y


def grouped_outer(dy: Tensor, x: Tensor, clients: Ranges, into: Tensor, beta: int) -> None:
    """into[c] ← β into[c] + dyᵀ x over the rows of client c."""
    kernels = usable(dy, x, into)
    if kernels is not None:
        outer_products(kernels, dy, x, into, beta, clients)
        return
    for (i, j), g in zip(clients, into, strict=True):
        if dy.dtype == g.dtype:
            g.addmm_(dy[i:j].t(), x[i:j], beta=beta)
        else:
            _ = g.add_(dy[i:j].t() @ x[i:j]) if beta else g.copy_(dy[i:j].t() @ x[i:j])


def row_sums(values: Tensor, clients: Ranges, into: Tensor, beta: int) -> None:
    """into[c] ← β into[c] + Σ values over the rows of client c."""
    kernels = usable(values, into)
    if kernels is not None:
        client_sums(kernels, values, into, beta, clients)
        return
    for (i, j), g in zip(clients, into, strict=True):
        _ = g.add_(values[i:j].sum(0)) if beta else torch.sum(values[i:j], 0, out=g)


def lowered(step: Step, values: Tensor) -> Tensor:
    """The values in the precision that products are computed in."""
    return values if step.low is None else values.to(step.low)


def with_sums(gradient: Tensor, sums: Tensor) -> Tensor:
    """The gradient, with its sums [rows, channels] attached: they came for free, and a bias before this needs them."""
    gradient.sums = sums, gradient._version  # type: ignore[attr-defined]
    return gradient


def counted(gradient: Tensor) -> Tensor | None:
    """The sums that `with_sums` attached, unless autograd changed the gradient since."""
    sums, version = getattr(gradient, "sums", (None, 0))
    return sums if version == gradient._version else None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, step: Step, weight: Slot, bias: Slot | None) -> Tensor:
        ctx.step, ctx.slots = step, (weight, bias)
        flat = lowered(step, x.reshape(-1, x.shape[-1]))
        ctx.save_for_backward(flat)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        groups = step.times(step.groups, len(flat))
        w, b = lowered(step, weight.weights(step)), None if bias is None else lowered(step, bias.weights(step))
        return grouped_linear(flat, groups, w, b).to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), step, (weight, bias) = ctx.saved_tensors, ctx.step, ctx.slots
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        clients, groups = step.times(step.clients, len(x)), step.times(step.groups, len(x))
        if weight.offset is not None:
            grouped_outer(lowered(step, dy), x, clients, *weight.gradient(step))
        if bias is not None and bias.offset is not None:
            sums = counted(grads[0])
            row_sums(
                dy if sums is None else sums,
                clients if sums is None else step.times(step.clients, len(sums)),
                *bias.gradient(step),
            )
        dx = None
        if ctx.needs_input_grad[0]:
            w = lowered(step, weight.weights(step)).transpose(1, 2)
            dx = grouped_linear(lowered(step, dy), groups, w, None).to(ctx.dtype).view(ctx.shape)
        return dx, None, None, None, None


class LinearTwin(Twin):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
            x, self.current.anchor, self.current.step, self.slots["weight"], self.slots.get("bias")
        )
        return y


# ── convolution ──────────────────────────────────────────────────────────────────────────────────────────────────────

Conv = tuple[list[int], list[int], list[int], bool, list[int], int]  # stride, padding, dilation, False, zeros, groups


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, step: Step, weight: Slot, bias: Slot | None, how: Conv, keep_layout: bool
    ) -> Tensor:
        ctx.step, ctx.slots, ctx.how = step, (weight, bias), how
        w, b = lowered(step, weight.weights(step)), None if bias is None else lowered(step, bias.weights(step))
        groups = step.times(step.groups, len(x))
        ctx.dtype = x.dtype
        x = lowered(step, x)
        kernels = kernels_for(x, w, how)
        if kernels is not None:
            x = channels_last(x)
            ctx.save_for_backward(x)
            ctx.shape = shape_of(x, w, how)
            y = convolve(kernels, x, w, b, groups, ctx.shape)
            return y.contiguous() if keep_layout else y
        x = x.contiguous()
        ctx.save_for_backward(x)
        outputs = [torch.convolution(x[i:j], w[g], None if b is None else b[g], *how) for g, (i, j) in enumerate(groups)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).to(ctx.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), step, (weight, bias), how = ctx.saved_tensors, ctx.step, ctx.slots, ctx.how
        w = lowered(step, weight.weights(step))
        clients = step.times(step.clients, len(x))
        kernels = kernels_for(x, w, how)
        dy = lowered(step, grads[0].contiguous()) if kernels is None else channels_last(grads[0])
        if bias is not None and bias.offset is not None:
            sums = counted(grads[0])
            over = list(range(2, dy.dim()))
            row_sums(grads[0].sum(over) if sums is None else sums, clients, *bias.gradient(step))
        if weight.offset is not None:
            gradient, beta = weight.gradient(step)
            if kernels is not None:
                convolution_weights(kernels, x, dy, gradient, beta, clients, ctx.shape)
            else:
                for (i, j), g in zip(clients, gradient, strict=True):
                    dw = torch.ops.aten.convolution_backward(dy[i:j], x[i:j], w[0], None, *how, [False, True, False])[1]
                    _ = g.add_(dw) if beta else g.copy_(dw)
        dx = input_gradient(ctx, dy, x, w, step).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None, None


def input_gradient(ctx: Any, dy: Tensor, x: Tensor, w: Tensor, step: Step) -> Tensor:
    """What a convolution hands on to its input: again a convolution, if it went over the image pixel by pixel."""
    groups, how = step.times(step.groups, len(x)), ctx.how
    kernels = kernels_for(x, w, how)
    if kernels is not None and x.shape[1] % 8 == 0 and how[0] == [1, 1]:
        s = ctx.shape
        ph, pw = s.dh * (s.kh - 1) - s.ph, s.dw * (s.kw - 1) - s.pw
        if ph >= 0 and pw >= 0:
            turned = Shape(s.oh, s.ow, s.oc, s.h, s.w, s.c, s.kh, s.kw, 1, 1, ph, pw, s.dh, s.dw)
            return convolve(kernels, dy, w, None, groups, turned, flipped=True)
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


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Affine(torch.autograd.Function):
    """y = x γ + β, over the trailing dimensions of x that `view` says γ and β have there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, step: Step, weight: Slot, bias: Slot | None, view: tuple[int, ...]
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
                row_sums(_sum_to(values, view).view(-1, *slot.shape), clients, *slot.gradient(step))
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
        normal = F.group_norm(x, self.groups, eps=self.eps)
        y: Tensor = _Affine.apply(  # type: ignore[no-untyped-call]
            normal,
            self.current.anchor,
            self.current.step,
            self.slots["weight"],
            self.slots["bias"],
            (-1, *(1,) * (x.dim() - 2)),
        )
        return y


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
        ctx: Any, x: Tensor, anchor: Tensor, step: Step, weight: Slot | None, bias: Slot | None, norm: Norm, pool: int
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
                row_sums(values, clients, *slot.gradient(step))
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


# ── embedding ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, step: Step, weight: Slot, padding: int | None) -> Tensor:
        ctx.step, ctx.slot, ctx.padding = step, weight, padding
        ctx.save_for_backward(x)
        w = weight.weights(step)
        parts = [F.embedding(x[i:j], w[g]) for g, (i, j) in enumerate(step.times(step.groups, len(x)))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), step = ctx.saved_tensors, ctx.step
        gradient, beta = ctx.slot.gradient(step)
        for (i, j), g in zip(step.times(step.clients, len(x)), gradient, strict=True):
            if not beta:
                g.zero_()
            kept = x[i:j].reshape(-1)
            dy = grads[0][i:j].reshape(len(kept), -1)
            if ctx.padding is not None:
                dy = dy * (kept != ctx.padding)[:, None]
            g.index_add_(0, kept, dy)
        return None, None, None, None, None


class EmbeddingTwin(Twin):
    def setup(self, layer: Any) -> None:
        self.padding = layer.padding_idx

    @staticmethod
    def why_not(layer: Any) -> str | None:
        odd = layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
        return "uses max_norm, scale_grad_by_freq or sparse, which can't be batched" if odd else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
            x, self.current.anchor, self.current.step, self.slots["weight"], self.padding
        )
        return y


# ── dropout ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Draws:
    """The generators of some clients, in the state that the loop's would be in."""

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.seeds = seeds
        self.kernels = library() if device.type == "cpu" and twisters_agree() else None
        self.twisters: Twisters | None = None
        self.generators: list[torch.Generator] = []

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


def dropout(x: Tensor, p: float, step: Step, time_first: bool = False) -> Tensor:
    """What torch's dropout does to [rows, …]; with `time_first`, to [rows, time, …] as if it were [time, rows, …]."""
    if p == 1:
        return x * 0.0
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous()  # channels-last comes from a twin, where the loop has no such thing
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda d: -strides[d])  # torch draws in the order of memory
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
        return dropout(x, self.p, self.current.step)


# ── recurrent ────────────────────────────────────────────────────────────────────────────────────────────────────────


class RecurrentTwin(Twin):
    """LSTM, GRU and RNN: the inputs of all time steps are multiplied at once, the state step by step."""

    def setup(self, layer: Any) -> None:
        self.layers, self.directions = layer.num_layers, 2 if layer.bidirectional else 1
        self.batch_first, self.dropout, self.hidden = layer.batch_first, layer.dropout, layer.hidden_size
        self.kind = layer.mode
        self.cell = {
            "LSTM": _lstm_cell,
            "GRU": _gru_cell,
            "RNN_TANH": _rnn_cell(torch.tanh),
            "RNN_RELU": _rnn_cell(torch.relu),
        }[layer.mode]

    @staticmethod
    def why_not(layer: Any) -> str | None:
        return "has proj_size, which can't be batched" if layer.proj_size else None

    def forward(self, x: Tensor, state: object = None) -> Any:
        if state is not None or not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError("a recurrent layer saw a starting state, packed sequences or an input without a batch dimension")
        x = x if self.batch_first else x.transpose(0, 1)
        last = []
        for layer in range(self.layers):
            outputs = []
            for direction in range(self.directions):
                suffix = f"_l{layer}" + "_reverse" * direction
                last_one = layer == self.layers - 1 and self.directions == 1
                y, ends = self.one(x, suffix, backwards=bool(direction), time_first=last_one)
                outputs.append(y)
                last.append(ends)
            x = torch.cat(outputs, 2) if len(outputs) > 1 else outputs[0]
            if self.dropout > 0 and layer < self.layers - 1:
                x = dropout(x, self.dropout, self.current.step, time_first=True)
        ends = tuple(torch.stack(part) for part in zip(*last, strict=True))
        x = x.transpose(0, 1).contiguous()  # in memory as torch has it, where it matters to dropout after this
        return x.transpose(0, 1) if self.batch_first else x, ends if self.kind == "LSTM" else ends[0]

    def one(self, x: Tensor, suffix: str, backwards: bool, time_first: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One layer in one direction: [rows, time, features] to [rows, time, hidden], and the states at the end.

        `time_first` is how the result should lie in memory; it may not.
        """
        step, anchor = self.current.step, self.current.anchor
        from_input, weight = self.slots[f"weight_ih{suffix}"], self.slots[f"weight_hh{suffix}"]
        biases = [self.slots[name] for name in (f"bias_ih{suffix}", f"bias_hh{suffix}") if name in self.slots]
        if self.kind == "LSTM" and self.hidden % 2 == 0 and step.low is None and usable(x) is not None:
            h, c = _Lstm.apply(x, anchor, step, (from_input, weight), biases, backwards, time_first)  # type: ignore[no-untyped-call]
            return h, (h[:, 0 if backwards else -1], c)
        inputs = _Linear.apply(x, anchor, step, from_input, biases[0] if biases else None)  # type: ignore[no-untyped-call]
        state = tuple(x.new_zeros(len(x), self.hidden) for _ in range(2 if self.kind == "LSTM" else 1))
        outputs: list[Tensor] = []
        times = range(x.shape[1])
        tape = Tape(weight, biases[1:])
        for t in reversed(times) if backwards else times:
            pushed = _Recurrent.apply(state[0], anchor, step, tape)  # type: ignore[no-untyped-call]
            state = self.cell(inputs[:, t], pushed, state)
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if backwards else outputs, 1), state


class Tape:
    """Inputs and output gradients of a layer that is used once for every time step, for one weight gradient at the end."""

    def __init__(self, weight: Slot, biases: list[Slot]) -> None:
        self.weight, self.biases, self.steps = weight, biases, 0
        self.seen: list[tuple[Tensor, Tensor]] = []


class _Recurrent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, anchor: Tensor, step: Step, tape: Tape) -> Tensor:
        ctx.step, ctx.tape, ctx.first = step, tape, tape.steps == 0
        tape.steps += 1
        ctx.save_for_backward(h)
        b = tape.biases[0].weights(step) if tape.biases else None
        return grouped_linear(h.contiguous(), step.times(step.groups, len(h)), tape.weight.weights(step), b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (h,), step, tape = ctx.saved_tensors, ctx.step, ctx.tape
        dy = grads[0].contiguous()
        tape.seen.append((dy, h))
        groups = step.times(step.groups, len(h))
        if ctx.first:  # the first step is the last to come here
            dys, hs = (torch.stack(part, 1) for part in zip(*tape.seen, strict=True))
            tape.seen.clear()
            recurrent_gradients(step, tape.weight, tape.biases, dys, hs)
            return None, None, None, None
        return grouped_linear(dy, groups, tape.weight.weights(step).transpose(1, 2), None), None, None, None


def recurrent_gradients(step: Step, weight: Slot, biases: list[Slot], dy: Tensor, h: Tensor) -> None:
    """Gradients of W_hh and of biases from those of its outputs and the states it saw, both [rows, time, …]."""
    clients = step.times(step.clients, len(h))
    if weight.offset is not None:
        time = h.shape[1]
        grouped_outer(dy.flatten(0, 1), h.flatten(0, 1), [(a * time, b * time) for a, b in clients], *weight.gradient(step))
    sums = dy.sum(1) if biases else dy
    for bias in biases:
        if bias.offset is not None:
            row_sums(sums, clients, *bias.gradient(step))


class _Lstm(torch.autograd.Function):
    """One layer in one direction, from x [rows, time, features] to all h and the last c."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, step: Step, weights: tuple[Slot, Slot], biases: list[Slot], backwards: bool,
        time_first: bool,
    ) -> Any:  # fmt: skip
        x = x.contiguous()
        w_in, w = (slot.weights(step) for slot in weights)
        b = biases[0].weights(step) + biases[1].weights(step) if biases else None
        groups = step.times(step.groups, len(x))
        h, gates, before, c, tanh_c = lstm(needed(), x, w_in, w, b, groups, backwards, time_first)
        ctx.save_for_backward(x, gates, before, c, tanh_c)
        ctx.step, ctx.weights, ctx.biases, ctx.backwards = step, weights, biases, backwards
        return h, c[:, 0 if backwards else -1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, gates, before, c, tanh_c), step, (of_input, weight) = ctx.saved_tensors, ctx.step, ctx.weights
        groups = step.times(step.groups, len(gates))
        dh = grads[0] if grads[0].stride(2) == 1 else grads[0].contiguous()
        dc = grads[1].clone(memory_format=torch.contiguous_format)
        dgates = lstm_back(needed(), gates, weight.weights(step), c, tanh_c, dh, dc, groups, ctx.backwards)
        recurrent_gradients(step, weight, ctx.biases, dgates, before)
        recurrent_gradients(step, of_input, [], dgates, x)
        dx = None
        if ctx.needs_input_grad[0]:
            flat, w_in = dgates.flatten(0, 1), of_input.weights(step).transpose(1, 2)
            dx = grouped_linear(flat, step.times(step.groups, len(flat)), w_in, None).view(x.shape)
        return dx, None, None, None, None, None, None


Cell = Callable[[Tensor, Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def _lstm_cell(x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = (x + h).chunk(4, 1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_cell(x: Tensor, h: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, 1), h.chunk(3, 1)
    z, n = torch.sigmoid(xz + hz), torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return (n + z * (state[0] - n),)


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    return lambda x, h, state: (activation(x + h),)


_TWINS: dict[type[nn.Module], type[Twin]] = {
    nn.Linear: LinearTwin,
    nn.Conv1d: ConvTwin,
    nn.Conv2d: ConvTwin,
    nn.Conv3d: ConvTwin,
    nn.GroupNorm: GroupNormTwin,
    nn.LayerNorm: LayerNormTwin,
    nn.Embedding: EmbeddingTwin,
    nn.LSTM: RecurrentTwin,
    nn.GRU: RecurrentTwin,
    nn.RNN: RecurrentTwin,
}
