"""Your own model and data, nothing to subclass: a sine wave that 50 clients see a piece of each."""

import numpy as np
import torch
from torch import nn

import fedbuff as fb

rng = np.random.default_rng(0)
pieces = [np.sort(rng.uniform(low, low + 1.0, (20, 1))) for low in rng.uniform(-3, 2, 50)]
everywhere = np.linspace(-3, 3, 200)[:, None]

task = fb.Task(
    model=lambda: nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)),
    loss=nn.functional.mse_loss,
    clients=[(x, np.sin(x)) for x in pieces],
    evaluate=(everywhere, np.sin(everywhere)),
    accuracy=lambda output, label: torch.isclose(output, label, atol=0.1)[:, 0],  # right to within 0.1
)
server = fb.Server(start=fb.refill(concurrency=10), buffer_size=5, optimizer=fb.momentum(lr=0.5, beta=0.5))
run = fb.simulate(server, task, client=fb.LocalSGD(lr=0.05, epochs=5, batch_size=10), until=fb.trips(1000))
print(run)
