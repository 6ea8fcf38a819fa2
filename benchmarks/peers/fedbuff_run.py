"""Ours on the peers' work: FedBuff, K = 10, 1000 in flight, one process per core.

python fedbuff_run.py [--seconds 30]
"""

import argparse

from measure import Meter, TimeUp
from torch import nn
from work import BATCH, BUFFER, CLIENTS, CONCURRENCY, LR, SimpleConvNet, data

import fedbuff as fb

WARM_UP = 2 * CONCURRENCY  # trips, until all those in flight at first have turned over: at first more are trained than end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    meter = Meter("fedbuff", fb.__version__, parser.parse_args().seconds)
    images, labels = (part.numpy() for part in data())
    task = fb.Task(
        model=SimpleConvNet,
        loss=nn.functional.cross_entropy,
        clients=[(images[client], labels[client]) for client in range(CLIENTS)],
        evaluate=(images[0][:1], labels[0][:1]),
        name="peers",
    )
    server = fb.Server(start=fb.refill(CONCURRENCY), buffer_size=BUFFER, optimizer=fb.sgd(1.0))
    ended = 0

    def watch(status) -> None:
        nonlocal ended
        if status.trips >= WARM_UP:
            meter.done(status.trips - ended)
        ended = status.trips

    try:
        fb.simulate(
            server,
            task,
            client=fb.LocalSGD(lr=LR, batch_size=BATCH),
            until=fb.trips(1 << 40),
            evaluate_every=1 << 40,
            progress=watch,
        )
    except TimeUp:
        meter.report()


if __name__ == "__main__":
    main()
