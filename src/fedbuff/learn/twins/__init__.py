"""Layers that train many clients at once: each group of rows sees its own weights, each client gets its own gradient.

A batch here is the rows of many clients, one after another and without padding. `LocalStep` says which rows form a *group*
(rows that see the same weights: all clients of a version in their first local step, one client in later ones) and
which belong to a *client*. A *twin* stands in for a layer that holds parameters: forward, it applies to every group
the group's weights; backward, it hands on the gradient of its input as usual, and writes the gradients of its weights,
client by client, into rows of one matrix. autograd never sees a parameter.

Everything else in a model, the code of its forward included, runs as it is: rows do not know of each other.
"""

import copy

import torch
from torch import nn

from fedbuff.learn.flat import Flat
from fedbuff.learn.twins.convolution import ConvTwin
from fedbuff.learn.twins.dropout import DropoutTwin
from fedbuff.learn.twins.embedding import EmbeddingTwin
from fedbuff.learn.twins.linear import LinearTwin
from fedbuff.learn.twins.norm import FrozenGroupNorm, GroupNormTwin, LayerNormTwin, NormPoolTwin, PoolTwin, norm_pool_at
from fedbuff.learn.twins.recurrent import RecurrentTwin
from fedbuff.learn.twins.step import Current, Slot, Twin


def why_no_twin(module: nn.Module) -> str | None:
    """A sentence why this model can't be trained in batches of clients, or None."""
    if any(getattr(nn.modules.module, f"_global_{kind}") for kind in _HOOKS):
        return "there are hooks for all modules, which would see the rows of many clients"
    for name, part in module.named_modules():
        label = f"{name}: {type(part).__name__}" if name else type(part).__name__
        if any(getattr(part, f"_{kind}") for kind in _HOOKS):
            return f"{label} has hooks, which would see the rows of many clients"
        if "forward" in vars(part):
            return f"{label} has a forward that was put into this one module, which its twin would not have"
        if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in part.parameters(recurse=False)):
            return f"{label} has parameters with hooks, which would see no client's own gradient"
        own = [p for p in part.parameters(recurse=False) if p.requires_grad]
        if isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 and type(part) is not nn.Dropout:
            return f"{label} draws its own random numbers for a whole batch; only Dropout can be drawn client by client"
        if not own:
            continue
        if type(part) not in _TWINS:
            known = ", ".join(kind.__name__ for kind in _TWINS)
            return f"{label} holds parameters of its own and is not one of {known}"
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
    unreadable = [(part, {n: _hidden(p) for n, p in part.named_parameters()}) for part in module.modules()]
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
                own = part.named_parameters(recurse=False, remove_duplicate=False)  # a tied one has several names
                of = {name: slots[id(p)] for name, p in own}
                twins[id(part)] = _TWINS[type(part)](part, of, current)
            elif type(part) is nn.GroupNorm:
                twins[id(part)] = FrozenGroupNorm(part)
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
    for part, parameters in unreadable:
        vars(part).update(
            parameters=lambda recurse=True, found=parameters: iter(found.values()),
            named_parameters=lambda prefix="", recurse=True, remove_duplicate=True, found=parameters: iter(found.items()),
        )
    return whole, current


def _hidden(parameter: nn.Parameter) -> torch.Tensor:
    """What a model's own code may see of a parameter: a trained one differs by client, so its shape and kind, but no number."""
    return parameter.detach().new_tensor(torch.nan).expand(parameter.shape) if parameter.requires_grad else parameter


_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
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
