"""A model as one flat vector: the only form in which the rest of fedbuff knows it."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.core.versions import Vector


class Flat:
    """A module whose trainable parameters are views into `vector`, and their gradients into `gradient`.

    Frozen parameters (requires_grad=False) stay in the module and are not part of the vector.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ValueError(f"model() returned {check.shown(module)}; expected a torch.nn.Module")
        for name, part in module.named_modules():
            if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.track_running_stats:
                raise ValueError(
                    f"{name}: {type(part).__name__} keeps running statistics, which are no weights and differ by client; "
                    "use GroupNorm or LayerNorm, or track_running_stats=False"
                )
        self.module = module
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError("the model has no trainable parameters")
        parts = list(self.parameters.values())
        self.vector = torch.cat([p.detach().reshape(-1) for p in parts])
        if self.vector.dtype == torch.bfloat16:
            raise ValueError(
                "the model's weights are bfloat16, in which small updates vanish; make them float32, and have products "
                "computed in bfloat16 with training.precision='bfloat16'"
            )
        self.gradient = torch.zeros_like(self.vector)
        for p, w, g in zip(parts, self._cut(self.vector), self._cut(self.gradient), strict=True):
            p.data, p.grad = w, g
        self._numpy = self.vector.numpy()
        self.buffers = Buffers(module)

    def _cut(self, vector: torch.Tensor) -> list[torch.Tensor]:
        parts = list(self.parameters.values())
        pieces = torch.split(vector, [p.numel() for p in parts])
        return [piece.view(p.shape) for piece, p in zip(pieces, parts, strict=True)]

    def load(self, weights: Vector) -> None:
        """Take over these weights; buffers are what they were when the model was made, whatever ran since."""
        self._numpy[:] = weights
        self.buffers.reset()

    def weights(self) -> Vector:
        """A copy of the weights."""
        return self._numpy.copy()

    def constants(self) -> dict[str, NDArray[np.generic]]:
        """What the model holds besides weights: frozen parameters, and buffers as they were at first."""
        self.buffers.reset()
        frozen = {name: p.detach() for name, p in self.module.named_parameters() if name not in self.parameters}
        return {name: as_array(t).copy() for name, t in [*frozen.items(), *self.module.named_buffers()]}

    def hold(self, constants: dict[str, NDArray[np.generic]]) -> None:
        """Take over the constants of another copy of the model, whose own were perhaps drawn at random."""
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        with torch.no_grad():
            for name, values in constants.items():
                tensor = torch.from_numpy(np.array(values))
                if name in own:
                    own[name].copy_(tensor)
                else:  # the model makes it when it is first applied
                    owner, _, leaf = name.rpartition(".")
                    self.module.get_submodule(owner).register_buffer(leaf, tensor)
        self.buffers = Buffers(self.module)

    def named(self, weights: Vector) -> dict[str, NDArray[np.floating]]:
        """The model's whole state dict with these weights, frozen parameters and buffers included."""
        self.load(weights)
        return {name: np.array(as_array(tensor)) for name, tensor in self.module.state_dict().items()}


class Buffers:
    """A module's buffers, and what they were at first."""

    def __init__(self, module: torch.nn.Module) -> None:
        owned = [(owner, name, b) for owner in module.modules() for name, b in owner._buffers.items() if b is not None]
        self._owned = [(owner, name, buffer, buffer.clone()) for owner, name, buffer in owned]

    def reset(self) -> None:
        for owner, name, buffer, first in self._owned:
            owner._buffers[name] = buffer.copy_(first)  # the model's code may have put another in its place


def as_tensor(array: object, like: torch.Tensor) -> torch.Tensor:
    """A copy of inputs or labels, as the model takes them: its code may change them in place."""
    if isinstance(array, torch.Tensor):
        return cast(array.detach().clone(), like)
    values = np.ascontiguousarray(array)
    # a single row counts as contiguous though it was reversed, which torch does not take
    return cast(torch.tensor(values.copy() if any(stride < 0 for stride in values.strides) else values), like)


def cast(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Floats in the model's dtype, integers as torch wants its labels and indices."""
    return tensor.to(like.dtype) if tensor.is_floating_point() else tensor.long()


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor as numpy has it, which knows no bfloat16."""
    tensor = tensor.detach().cpu()
    found: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found
