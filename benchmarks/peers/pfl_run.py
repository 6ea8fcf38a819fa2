"""pfl-research, FedAvg on its SimulatedBackend (synchronous), on the work of work.py.

    python pfl_run.py [--seconds 30]                                                     one process, pfl's default
    python -m torch.distributed.run --standalone --nproc-per-node 2 pfl_run.py           the cohort split over two

The clock of the measurement starts after the first cohort, the only one on which pfl evaluates here.
"""

import argparse
import os
from importlib.metadata import version

import numpy as np
import torch
import work
from measure import Meter, TimeUp
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

RANK, PROCESSES = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Model(work.SimpleConvNet):
    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


class Count(TrainingProcessCallback):
    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        stop = torch.zeros(1)
        try:
            self.meter.done(work.COHORT)
        except TimeUp:
            stop += 1
        if PROCESSES > 1:  # all stop when the first does
            torch.distributed.broadcast(stop, 0)
        return bool(stop), Metrics()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    name, root = ("pfl", os.getpid()) if PROCESSES == 1 else (f"pfl-{PROCESSES}", os.getppid())
    meter = Meter(name, version("pfl"), args.seconds, root)
    torch.manual_seed(0)
    np.random.seed(0)  # pfl draws from the global generator; its processes must draw alike
    images, labels = work.data()
    clients = FederatedDataset.from_slices(
        {i: [images[i], labels[i]] for i in range(work.CLIENTS)}, get_user_sampler("random", range(work.CLIENTS))
    )
    module = Model()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6, evaluation_frequency=10**6, train_cohort_size=work.COHORT, val_cohort_size=None
        ),
        SimulatedBackend(training_data=clients, val_data=clients),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.LR, local_batch_size=work.BATCH),
        callbacks=[Count(meter)],
    )
    if RANK == 0:
        meter.report()


if __name__ == "__main__":
    main()
