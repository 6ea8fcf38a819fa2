"""Flower's simulation engine (Ray), FedAvg (synchronous), on the work of work.py.

    python flower_run.py [--seconds 30]

5000 supernodes, two CPUs, one per client: two Ray actors (Flower's default of two CPUs per client would leave one).
The client is the one of Flower's PyTorch quickstart. The clock of the measurement starts after the first cohort.
"""

import argparse
import contextlib
import os
from importlib.metadata import version

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from measure import Meter, TimeUp

client, server = ClientApp(), ServerApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    model = work.SimpleConvNet()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(model, int(context.node_config["partition-id"]))
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": work.EXAMPLES})}
    return Message(content=RecordDict(content), reply_to=message)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    args = parser.parse_args()
    meter = Meter("flower", version("flwr"), args.seconds)
    work.data()  # makes the files before two actors try to

    class Counted(FedAvg):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            for reply in replies:
                if reply.has_error():
                    raise RuntimeError(f"a client failed: {reply.error.reason}")
            result = super().aggregate_train(server_round, replies)
            meter.done(len(replies))
            return result

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        nodes = {"min_train_nodes": work.COHORT, "min_available_nodes": work.CLIENTS}
        strategy = Counted(fraction_train=work.COHORT / work.CLIENTS, fraction_evaluate=0.0, **nodes)
        strategy.start(grid, ArrayRecord(work.SimpleConvNet().state_dict()), num_rounds=10**6)

    with contextlib.suppress(TimeUp):
        run_simulation(
            server,
            client,
            num_supernodes=work.CLIENTS,
            backend_config={"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    meter.report()


if __name__ == "__main__":
    main()
