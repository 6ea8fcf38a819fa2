"""What an example costs: multiplications in a forward pass, counted layer by layer.

It decides how many trips make a chunk, so it is counted and not timed: the same on every machine.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.task import Task


def multiplications(task: Task, flat: Flat) -> int:
    """About how many one example takes: each weight of a layer times the positions it is applied at."""
    total = 0

    def count(layer: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal total
        out = output[0] if isinstance(output, tuple) else output
        weights = sum(p.numel() for p in layer.parameters(recurse=False))
        if isinstance(layer, nn.modules.conv._ConvNd):
            positions = out.numel() // layer.out_channels
        elif isinstance(layer, nn.Linear):
            positions = out.numel() // layer.out_features
        elif isinstance(layer, nn.RNNBase):
            positions = len(out.data) if isinstance(out, PackedSequence) else out.shape[0] * out.shape[1]
        else:
            weights, positions = 1, out.numel() if isinstance(out, torch.Tensor) else 0
        total += weights * positions

    leaves = [part for part in flat.module.modules() if not any(True for _ in part.children())]
    hooks = [leaf.register_forward_hook(count) for leaf in leaves]
    training = flat.module.training
    try:
        flat.module.eval()
        with torch.no_grad():
            flat.module(as_tensor(task.clients[0][0][:1], like=flat.vector))
    except (RuntimeError, ValueError):  # a model that mixes rows may not do with one
        total = len(flat.vector)
    finally:
        flat.module.train(training)
        for hook in hooks:
            hook.remove()
    return max(total, 1)
