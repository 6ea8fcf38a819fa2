"""FLSim 0.1.0, asynchronous (FedBuff) or synchronous (FedAvg), on the work of work.py.

    python flsim_run.py async|sync [--seconds 30]          (in its virtual environment: run.py makes it)

Concurrency in FLSim is not a setting but a result: clients start at a constant rate in virtual time, whatever is in
flight, so by Little's law rate × mean duration are in flight on average. Here: 1000 starts per unit of time, durations
normal with mean 1 and deviation 0.1 (a narrow one: a wide one takes thousands of trips to fill the pipe). The clock of
the measurement starts once 950 are in flight; how many there were, and their staleness, goes to stderr.

Two things stand between FLSim and a present Python: its dataclasses use instances as defaults, which Python 3.11
refuses (`patch` rewrites them, in the virtual environment), and it asks for torchvision, which only its examples
import (so it is not installed).
"""

import argparse
import contextlib
import importlib.util
import re
import sys
from pathlib import Path

import torch
import work
from measure import Meter, TimeUp

DEFAULT = re.compile(r"^(    \w+: [\w.\[\]]+ = )(?:\(\s*(\w+\([^()]*\))\s*\)|([A-Z]\w+\([^()]*\)))(?= *(?:#.*)?$)", re.M)


def patch() -> None:
    """x: XConfig = XConfig()  ->  x: XConfig = field(default_factory=lambda: XConfig())"""
    spec = importlib.util.find_spec("flsim")
    if spec is None or spec.origin is None:
        sys.exit("flsim is not installed here; run.py makes a virtual environment that has it")
    for file in Path(spec.origin).parent.rglob("*.py"):
        before = file.read_text()
        after = DEFAULT.sub(lambda m: f"{m[1]}field(default_factory=lambda: {m[2] or m[3]})", before)
        if after != before:
            after = re.sub(
                r"^from dataclasses import dataclass$", "from dataclasses import dataclass, field", after, flags=re.M
            )
            file.write_text(after)


def model_and_data():
    from flsim.data.data_provider import FLDataProviderFromList
    from flsim.interfaces.model import IFLModel
    from flsim.utils.simple_batch_metrics import FLBatchMetrics

    class Model(IFLModel):  # as FLModel in flsim.utils.example_utils
        def __init__(self) -> None:
            self.module = work.SimpleConvNet()

        def fl_forward(self, batch):
            x, y = batch
            output = self.module(x)
            loss = torch.nn.functional.cross_entropy(output, y)
            return FLBatchMetrics(loss=loss, num_examples=len(y), predictions=output.detach(), targets=y, model_inputs=x)

        def fl_create_training_batch(self, batch=None, **_):
            return batch

        def fl_get_module(self):
            return self.module

        def fl_cuda(self) -> None: ...

        def get_eval_metrics(self, batch):
            return self.fl_forward(batch)

        def get_num_examples(self, batch) -> int:
            return len(batch[1])

    model = Model()
    clients = [work.batches(i) for i in range(work.CLIENTS)]
    return model, FLDataProviderFromList(clients, clients[:1], clients[:1], model)


def asynchronous(model):
    from flsim.optimizers.async_aggregators import FedAvgWithLRFedBuffAggregatorConfig
    from flsim.trainers.async_trainer import AsyncTrainer, AsyncTrainerConfig
    from flsim.utils.async_trainer.async_staleness_weights import PolynomialStalenessWeightConfig
    from flsim.utils.async_trainer.async_weights import AsyncWeightConfig
    from flsim.utils.async_trainer.training_event_generator import (
        AsyncTrainingEventGeneratorConfig,
        ConstantAsyncTrainingStartTimeDistrConfig,
    )
    from flsim.utils.timing.training_duration_distribution import PerUserGaussianDurationDistributionConfig
    from omegaconf import OmegaConf

    config = AsyncTrainerConfig(
        **common(),
        # lr: FLSim adds the buffer's updates up, the paper takes their mean
        aggregator=FedAvgWithLRFedBuffAggregatorConfig(buffer_size=work.BUFFER, lr=1 / work.BUFFER),
        async_weight=AsyncWeightConfig(staleness_weight=PolynomialStalenessWeightConfig(exponent=0.5, avg_staleness=0)),
        training_event_generator=AsyncTrainingEventGeneratorConfig(
            training_start_time_distribution=ConstantAsyncTrainingStartTimeDistrConfig(training_rate=work.CONCURRENCY),
            duration_distribution_generator=PerUserGaussianDurationDistributionConfig(
                training_duration_mean=1.0, training_duration_sd=0.1, training_duration_min=0.0
            ),
        ),
    )
    return AsyncTrainer(model=model, cuda_enabled=False, **OmegaConf.structured(config))


def synchronous(model):
    from flsim.active_user_selectors.simple_user_selector import UniformlyRandomActiveUserSelectorConfig
    from flsim.optimizers.server_optimizers import FedAvgOptimizerConfig
    from flsim.servers.sync_servers import SyncServerConfig
    from flsim.trainers.sync_trainer import SyncTrainer, SyncTrainerConfig
    from omegaconf import OmegaConf

    server = SyncServerConfig(
        server_optimizer=FedAvgOptimizerConfig(), active_user_selector=UniformlyRandomActiveUserSelectorConfig()
    )
    config = SyncTrainerConfig(**common(), users_per_round=work.COHORT, server=server)
    return SyncTrainer(model=model, cuda_enabled=False, **OmegaConf.structured(config))


def common() -> dict:
    from flsim.clients.base_client import ClientConfig
    from flsim.optimizers.local_optimizers import LocalOptimizerSGDConfig

    return {"epochs": 1000, "do_eval": False, "client": ClientConfig(epochs=1, optimizer=LocalOptimizerSGDConfig(lr=work.LR))}


def in_flight(trainer) -> float:
    return trainer._training_simulator.queue_stats.num_started_jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["async", "sync"])
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    patch()
    from importlib.metadata import version

    from flsim.interfaces.metrics_reporter import IFLMetricsReporter

    meter = Meter(f"flsim-{args.mode}", version("flsim"), args.seconds)
    torch.manual_seed(0)
    model, provider = model_and_data()
    trainer = asynchronous(model) if args.mode == "async" else synchronous(model)

    class Reporter(IFLMetricsReporter):
        """FLSim tells it of every batch, and a trip is one batch; it computes nothing."""

        batches = 0

        def add_batch_metrics(self, metrics) -> None:
            self.batches += 1
            if args.mode == "sync" and self.batches % work.COHORT == 0:
                meter.done(work.COHORT)
            if args.mode == "async" and (meter.began or in_flight(trainer) >= 0.95 * work.CONCURRENCY):
                meter.done(1)

        def aggregate(self, one_user_metrics) -> None: ...

        def report_metrics(self, **_):
            return None, False

        def reset(self) -> None: ...

    reporter = Reporter()
    with contextlib.suppress(TimeUp):
        trainer.train(provider, reporter, num_total_users=work.CLIENTS, distributed_world_size=1)
    if args.mode == "async":
        steps, staleness = trainer.aggregator.global_seqnum, trainer.aggregator.seqnum_tracker.mean()
        print(f"{reporter.batches} trips, {steps} server steps, {in_flight(trainer):.0f} in flight", file=sys.stderr)
        print(f"{staleness:.1f} mean staleness of all trips, those of the warm-up included", file=sys.stderr)
        assert abs(steps - reporter.batches / work.BUFFER) <= 1, "this was not FedBuff with the buffer asked for"
    meter.report()


if __name__ == "__main__":
    main()
