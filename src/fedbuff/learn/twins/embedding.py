"""Embeddings."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedbuff.learn.twins.step import LocalStep, Slot, Twin


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, step: LocalStep, weight: Slot, padding: int | None) -> Tensor:
        ctx.step, ctx.slot, ctx.padding = step, weight, padding
        ctx.save_for_backward(x)
        w = weight.weights(step)
        parts = [F.embedding(x[i:j], w[g]) for g, (i, j) in enumerate(step.times(step.groups, len(x)))]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), step = ctx.saved_tensors, ctx.step
        into = ctx.slot.gradient(step)
        for (i, j), g in zip(step.times(step.clients, len(x)), into.each(), strict=True):
            if not into.beta:
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
