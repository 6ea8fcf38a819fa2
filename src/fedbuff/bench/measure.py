"""One measurement in a process of its own: `python -m fedbuff.bench.measure WORKLOAD WAY SHARE` prints a line of JSON.

Ways: `ours` with N worker processes; `loop`, a hand-written loop over clients on one thread; `central`, training on the
same examples without clients, two threads (the usual "limit"); `ray`; and ours with differential privacy, `tree`,
`tree_honaker` and `blt`. All with the tuned allocator.
"""

import json
import sys
import time
from typing import Any, Literal

import numpy as np
import torch

from fedbuff.bench.workloads import WORKLOADS, Workload
from fedbuff.core.optimizers import sgd
from fedbuff.core.server import Server
from fedbuff.core.starting import refill
from fedbuff.learn.kernels import tune_allocator
from fedbuff.learn.task import Task
from fedbuff.privacy.plan import Mechanism
from fedbuff.privacy.settings import Privacy
from fedbuff.sim.secure import SecureAggregation
from fedbuff.sim.simulate import simulate
from fedbuff.sim.simulation import Status
from fedbuff.sim.until import trips

CONCURRENCY, BUFFER_SIZE = 1000, 10
SECURE: dict[str, Literal["plain", "enclave", "helpers"]] = {
    "fixed": "plain",
    "enclave": "enclave",
    "helpers": "helpers",
}
PRIVATE: dict[str, Mechanism] = {"tree": "tree", "tree_honaker": "tree-honaker", "blt": "blt"}


class _EnoughError(Exception):
    """The measurement is over, though the run is not."""


def ours(workload: Workload, task: Task, count: int, workers: int, **how: Any) -> float:
    """Trips per second of an asynchronous run once it is under way, of which `count` trips are measured.

    At its beginning more trips are trained, ahead, than end; at its end fewer. So it begins when all trips have turned over
    once or twice, and the run is meant to go on.
    """
    server = Server(start=refill(CONCURRENCY), buffer_size=BUFFER_SIZE, optimizer=sgd(1.0))
    first: tuple[int, float] | None = None
    rate = 0.0

    def watch(status: Status) -> None:
        nonlocal first, rate
        if first is None and status.trips >= workload.after:
            first = status.trips, time.perf_counter()
        elif first is not None and status.trips >= first[0] + count:
            rate = (status.trips - first[0]) / (time.perf_counter() - first[1])
            raise _EnoughError

    try:
        simulate(
            server,
            task,
            client=workload.client,
            until=trips(1 << 40),
            evaluate_every=1 << 40,
            workers=workers,
            progress=watch,
            **how,
        )
    except _EnoughError:
        return rate
    raise AssertionError("the run ended by itself")


def loop(workload: Workload, task: Task, count: int) -> float:
    """Trips per second of the obvious loop: load weights, train, subtract, one client after another."""
    torch.set_num_threads(1)
    model, client = task.model(), workload.client
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    optimizer = torch.optim.SGD(parameters, lr=client.lr)
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in task.clients]
    chosen = np.random.default_rng(0).integers(0, len(data), count)
    began = time.perf_counter()
    for number in chosen:
        x, y = data[number]
        with torch.no_grad():
            for p, w in zip(parameters, start, strict=True):
                p.copy_(w)
        for batch in torch.split(torch.randperm(len(y)), client.batch_size):
            optimizer.zero_grad()
            task.loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        [w - p.detach() for p, w in zip(parameters, start, strict=True)]
    return count / (time.perf_counter() - began)


def central(workload: Workload, task: Task, count: int) -> float:
    """Trips per second if `count` trips' examples were one shuffled dataset, in batches of the clients' batch size."""
    torch.set_num_threads(2)
    model = task.model()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=workload.client.lr)
    x, y = (torch.from_numpy(np.concatenate([part[i] for part in task.clients])) for i in (0, 1))
    rows = round(count * len(y) / len(task.clients))
    order = torch.randperm(len(y)).repeat(-(-rows // len(y)))[:rows]
    began = time.perf_counter()
    for batch in torch.split(order, workload.client.batch_size):
        optimizer.zero_grad()
        task.loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return count / (time.perf_counter() - began)


def main(name: str, way: str, share: str) -> None:
    tune_allocator()
    workload = WORKLOADS[name]
    task = workload.task()
    data = sum(x.nbytes + y.nbytes for x, y in task.clients) / (1 << 20)
    count, few = round(workload.trips * float(share)), round(workload.trips * float(share) / 5)
    if way == "loop":
        rate = loop(workload, task, max(10, few))
    elif way == "central":
        rate = central(workload, task, max(10, few))
    else:
        engine, workers = way.split("-")
        how: dict[str, Any] = {"engine": "ray"} if engine == "ray" else {}
        if engine in PRIVATE:
            how["privacy"] = Privacy(
                1.0, 1e-6, noise_multiplier=1.0, mechanism=PRIVATE[engine], max_participations=1 << 20, horizon=1 << 16
            )
        elif engine in SECURE:
            how["secure_aggregation"] = SecureAggregation(SECURE[engine], clip=1.0)
        rate = ours(workload, task, count, int(workers), **how)
    print(json.dumps({"trips_per_second": rate, "data_mb": data}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
