"""Models to start with: small ones for flat inputs, and the paper's two; bring your own with `fb.Task(model=…)`."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from fedbuff.core import check

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(frozen=True)
class linear:
    """Logistic regression: one linear layer."""

    def __call__(self, features: int, classes: int) -> "torch.nn.Module":
        import torch

        return torch.nn.Linear(features, classes)


@dataclass(frozen=True)
class mlp:
    """Linear layers with ReLU between them, and optional dropout."""

    hidden: tuple[int, ...] = (64,)
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check.number(0, 1, dropout=self.dropout)
        check.instance(tuple | list, "the widths of the layers between, e.g. (64,)", hidden=self.hidden)
        for width in self.hidden:
            check.integer(1, hidden=width)

    def __call__(self, features: int, classes: int) -> "torch.nn.Module":
        import torch

        layers: list[torch.nn.Module] = []
        for inputs, outputs in pairwise((features, *self.hidden)):
            layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
            if self.dropout:
                layers.append(torch.nn.Dropout(self.dropout))
        return torch.nn.Sequential(*layers, torch.nn.Linear((features, *self.hidden)[-1], classes))


@dataclass(frozen=True)
class cnn:
    """The paper's network for images, LEAF's with GroupNorm: four 3 × 3 convolutions, each followed by norm, ReLU and max pool.

    The convolutions have stride 1 and padding 2, and share one norm with as many groups as channels, as in FLSim.
    """

    channels: int = 32
    dropout: float = 0.1
    convolutions: int = 4

    def __post_init__(self) -> None:
        check.number(0, 1, dropout=self.dropout)
        check.integer(1, channels=self.channels, convolutions=self.convolutions)

    def __call__(self, shape: tuple[int, int, int], classes: int) -> "torch.nn.Module":
        from fedbuff.learn.networks import ConvNet

        return ConvNet(shape, classes, self.channels, self.convolutions, self.dropout)


@dataclass(frozen=True)
class lstm:
    """The paper's network for text, LEAF's: frozen word vectors, two LSTM layers of 100, a linear layer of 128."""

    hidden: int = 100
    layers: int = 2
    width: int = 128
    dropout: float = 0.1

    def __post_init__(self) -> None:
        check.number(0, 1, dropout=self.dropout)
        check.integer(1, hidden=self.hidden, layers=self.layers, width=self.width)

    def __call__(self, vectors: "NDArray[np.float32]", classes: int) -> "torch.nn.Module":
        """`vectors` has a row for each word: row 0 is padding, and comes before the text."""
        import torch

        from fedbuff.learn.networks import WordLSTM

        return WordLSTM(torch.tensor(vectors), classes, self.hidden, self.layers, self.width, self.dropout)


Model = linear | mlp
ImageModel = cnn | linear | mlp
TextModel = lstm | linear | mlp


def image_model(model: ImageModel, shape: tuple[int, ...], classes: int) -> "torch.nn.Module":
    """A model for images of this shape; a linear one or an mlp sees their pixels in a row."""
    import torch

    if isinstance(model, linear | mlp):
        return torch.nn.Sequential(torch.nn.Flatten(), model(math.prod(shape), classes))
    if len(shape) != 3:
        raise ValueError(f"model={model}: expects images of channels × height × width, not inputs of shape {shape}")
    return model((shape[0], shape[1], shape[2]), classes)


def text_model(model: TextModel, vectors: "NDArray[np.float32]", classes: int) -> "torch.nn.Module":
    """A model for rows of words; a linear one or an mlp sees the mean of their vectors."""
    import torch

    if isinstance(model, linear | mlp):
        from fedbuff.learn.networks import mean_of_words

        return torch.nn.Sequential(mean_of_words(torch.tensor(vectors)), model(vectors.shape[1], classes))
    return model(vectors, classes)
