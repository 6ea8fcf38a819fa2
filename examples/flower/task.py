"""What is trained: a model, a loss, and each client's data. In your project this is most likely written already."""

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

import fedbuff as fb


def task(clients: int = 40) -> fb.Task:
    x, y = load_digits(return_X_y=True)
    x = (x / 16).astype(np.float32)
    test, train = np.arange(0, len(y), 5), np.flatnonzero(np.arange(len(y)) % 5)
    order = train[np.argsort(y[train], kind="stable")]  # sorted: each client has seen a digit or two
    return fb.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        loss=nn.functional.cross_entropy,
        clients=[(x[part], y[part]) for part in np.array_split(order, clients)],
        evaluate=(x[test], y[test]),
        accuracy=lambda output, label: output.argmax(1) == label,
        name="digits by digit",
    )
