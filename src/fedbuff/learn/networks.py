"""The two networks of the paper's experiments; `models.py` makes them without importing torch before it must."""

from torch import Tensor, nn


class ConvNet(nn.Module):
    """LEAF's convolutional network as FLSim has it: 3 × 3 convolutions, one GroupNorm shared by them, a linear head.

    31,594 weights for images of 3 × 32 × 32 and ten classes.
    """

    def __init__(self, shape: tuple[int, int, int], classes: int, channels: int, convolutions: int, dropout: float) -> None:
        super().__init__()
        inputs, height, width = shape
        sizes = [inputs, *[channels] * convolutions]
        self.convolutions = nn.ModuleList(nn.Conv2d(sizes[i], sizes[i + 1], 3, 1, 2) for i in range(convolutions))
        self.block = nn.Sequential(nn.GroupNorm(channels, channels), nn.ReLU(), nn.MaxPool2d(2, 2))
        for _ in range(convolutions):
            height, width = (height + 2) // 2, (width + 2) // 2
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(channels * height * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = self.block(convolution(x))
        return self.output(self.dropout(x.flatten(1)))  # type: ignore[no-any-return]


class WordLSTM(nn.Module):
    """LEAF's stacked LSTM: frozen embeddings, LSTM layers, a hidden linear layer on what they say after the last word."""

    def __init__(self, vectors: Tensor, classes: int, hidden: int, layers: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(vectors, freeze=True)  # type: ignore[no-untyped-call]
        between = dropout if layers > 1 else 0.0  # torch warns of dropout between the layers of one
        self.lstm = nn.LSTM(vectors.shape[1], hidden, num_layers=layers, batch_first=True, dropout=between)
        self.head = nn.Sequential(nn.Linear(hidden, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0][:, -1])  # type: ignore[no-any-return]


def mean_of_words(vectors: Tensor) -> nn.Module:
    """The mean of a text's frozen embeddings, padding left out."""
    return nn.EmbeddingBag.from_pretrained(vectors, freeze=True, mode="mean", padding_idx=0)
