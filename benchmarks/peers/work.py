"""The work every peer does: the data, the model, one client's training.

    python work.py [--seconds 30]

runs it as a loop written by hand, on one thread: what the arithmetic alone costs. A simulator's distance from that
number is its overhead (below it) or its parallelism (above it).

Only PyTorch and NumPy are needed, so every peer's virtual environment can import this file.
"""

import argparse
import functools
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

CLIENTS = 5_000
EXAMPLES = 10  # per client
BATCH = 32  # so a trip is one step
LR = 0.05
CONCURRENCY, BUFFER = 1_000, 10  # of the asynchronous peers
COHORT = 100  # of the synchronous ones


class SimpleConvNet(nn.Module):
    """FLSim's CNN for CIFAR-10: four convolutions that share one GroupNorm, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(inputs, 32, 3, stride=1, padding=2) for inputs in (3, 32, 32, 32))
        self.gn_relu = nn.Sequential(nn.GroupNorm(32, 32), nn.ReLU(), nn.MaxPool2d(2, 2))
        self.dropout = nn.Dropout(0)
        self.fc = nn.Linear(288, 10)
        assert sum(p.numel() for p in self.parameters()) == 31_594

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.gn_relu(layer(x))
        return self.fc(self.dropout(x.flatten(1)))


@functools.cache
def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Random images (5000, 10, 3, 32, 32) and labels (5000, 10); client i has row i.

    They live in two files mapped into memory (in the folder PEERS_DATA), so that a peer of several processes
    is not charged for several copies; both are read once here, so that every peer is charged for all of them.
    """
    folder = Path(os.environ.get("PEERS_DATA", Path(tempfile.gettempdir()) / "peers-data"))
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    made = {
        "images.npy": lambda: rng.standard_normal((CLIENTS, EXAMPLES, 3, 32, 32), dtype=np.float32),
        "labels.npy": lambda: rng.integers(0, 10, (CLIENTS, EXAMPLES)),
    }
    tensors = []
    for name, make in made.items():
        if not (folder / name).exists():
            part = folder / f"{os.getpid()}-{name}"
            np.save(part, make())
            part.rename(folder / name)
        tensors.append(torch.from_numpy(np.load(folder / name, mmap_mode="c")))
        tensors[-1].sum()
    return tensors[0], tensors[1]


def batches(client: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = data()
    return list(zip(images[client].split(BATCH), labels[client].split(BATCH), strict=True))


def train(model: nn.Module, client: int) -> None:
    """One local epoch; for those peers that leave the loop to their user."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model.train()
    for x, y in batches(client):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def main() -> None:
    from measure import Meter, TimeUp

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    meter = Meter("loop", torch.__version__, parser.parse_args().seconds)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    server, model = SimpleConvNet(), SimpleConvNet()
    mean = [torch.zeros_like(p) for p in server.parameters()]
    data()
    try:
        while True:
            for client in rng.integers(CLIENTS, size=BUFFER):
                model.load_state_dict(server.state_dict())
                train(model, int(client))
                with torch.no_grad():
                    for m, after, before in zip(mean, model.parameters(), server.parameters(), strict=True):
                        m += (after - before) / BUFFER
            with torch.no_grad():
                for m, weight in zip(mean, server.parameters(), strict=True):
                    weight += m
                    m.zero_()
            meter.done(BUFFER)
    except TimeUp:
        meter.report()


if __name__ == "__main__":
    main()
