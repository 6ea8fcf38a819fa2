"""One measurement in a process of its own: `python -m fedbuff.bench.measure WORKLOAD WAY SHARE` prints a line of JSON.

Ways: `ours` with N worker processes, and `bfloat16`, the same with products of it; `loop`, a hand-written loop over clients
on one thread; `central`, training on the same examples without clients, two threads (the usual "limit"); `ray`;
`at`-CONCURRENCY-CLIENTS, ours on one worker with so many trips in flight and so many clients; and `turns`, ours on one
worker with and without each of its layers (differential privacy, secure aggregation), a few hundred trips of each in turn.
All with the tuned allocator.
"""

import contextlib
import ctypes
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedbuff.bench.workloads import WORKLOADS, Workload
from fedbuff.core.optimizers import sgd
from fedbuff.core.server import Server
from fedbuff.core.starting import refill
from fedbuff.learn.kernels import tune_allocator
from fedbuff.learn.task import Task
from fedbuff.learn.training import Training
from fedbuff.privacy.plan import Mechanism
from fedbuff.privacy.settings import Privacy
from fedbuff.sim.secure import SecureAggregation
from fedbuff.sim.simulate import simulate
from fedbuff.sim.simulation import Status
from fedbuff.sim.until import trips

CONCURRENCY, BUFFER_SIZE = 1000, 10
PRIVATE: dict[str, Mechanism] = {"tree": "tree", "blt": "blt"}
ROUNDS = 60  # of turns
AFTER = 200_000  # trips, until 100,000 in flight have turned over
LAYERS = (*PRIVATE, "enclave")


class _EnoughError(Exception):
    """The measurement is over, though the run is not."""


def under_way(
    workload: Workload, task: Task, workers: int, watch: Callable[[Status], None], concurrency: int = CONCURRENCY, **how: Any
) -> None:
    """An asynchronous run that is meant to go on, until `watch` has seen enough of it."""
    server = Server(start=refill(concurrency), buffer_size=BUFFER_SIZE, optimizer=sgd(1.0))
    never = 1 << 40
    try:
        simulate(
            server,
            task,
            client=workload.client,
            until=trips(never),
            evaluate_every=never,
            workers=workers,
            progress=watch,
            **how,
        )
    except _EnoughError:
        return
    raise AssertionError("the run ended by itself")


def ours(workload: Workload, task: Task, count: int, workers: int, **how: Any) -> float:
    """Trips per second of an asynchronous run once it is under way, of which `count` trips are measured.

    At its beginning more trips are trained, ahead, than end; at its end fewer. So it begins when all trips have turned over
    once or twice.
    """
    first: tuple[int, float] | None = None
    rate = 0.0

    def watch(status: Status) -> None:
        nonlocal first, rate
        if first is None and status.trips >= workload.after:
            first = status.trips, time.perf_counter()
        elif first is not None and status.trips >= first[0] + count:
            rate = (status.trips - first[0]) / (time.perf_counter() - first[1])
            raise _EnoughError

    under_way(workload, task, workers, watch, **how)
    return rate


def at(workload: Workload, task: Task, count: int, concurrency: int, clients: int) -> float:
    """Trips per second of one worker with so many trips in flight; clients beyond the task's hold the examples of others."""
    some = list(task.clients)
    many = replace(task, clients=(some * -(-clients // len(some)))[:clients])
    # the same for all concurrencies: whoever is met for the first time costs more, and as time goes by fewer are
    later = replace(workload, after=AFTER)
    return ours(later, many, count, 1, concurrency=concurrency)


def turns(workload: Workload, task: Task, count: int, ways: dict[str, dict[str, Any]]) -> dict[str, list[list[float]]]:
    """Milliseconds per trip, elapsed and of this process's CPU, in each of `ROUNDS` turns of every way.

    A layer's few per cent are less than what this machine's speed changes by from one minute to the next, so the runs are
    all under way at once, and only one of them goes on at a time, for `count` trips: each round compares the same seconds.
    """
    one_arena()
    found: dict[str, list[list[float]]] = {way: [] for way in ways}
    failed: list[Exception] = []
    go, back = {way: threading.Semaphore(0) for way in ways}, threading.Semaphore(0)

    def play(way: str) -> None:
        begun: tuple[int, float, float] | None = None

        def watch(status: Status) -> None:
            nonlocal begun
            now = status.trips, time.perf_counter(), time.process_time()
            if begun is None:
                if status.trips < workload.after:
                    return
            elif status.trips < begun[0] + count:
                return
            else:
                found[way].append([1000 * (now[i] - begun[i]) / (now[0] - begun[0]) for i in (1, 2)])
            back.release()
            go[way].acquire()
            if len(found[way]) == ROUNDS:
                raise _EnoughError
            begun = status.trips, time.perf_counter(), time.process_time()

        go[way].acquire()
        try:
            under_way(workload, task, 1, watch, **ways[way])
        except Exception as e:
            failed.append(e)
        finally:
            back.release()

    players = [threading.Thread(target=play, args=[way], daemon=True) for way in ways]
    for player in players:
        player.start()
    order = list(ways)
    for _ in range(ROUNDS + 2):  # the first turn gets a run under way, the last one ends it
        for way in order:
            go[way].release()
            back.acquire()
            if failed:
                raise failed[0]
        order = [*order[1:], order[0]]  # nobody always comes after the same one
    return found


def one_arena() -> None:
    """Have threads allocate as the main one does: else glibc maps large arrays anew each time, and faults on every page."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX


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
    result: dict[str, Any] = {"data_mb": data}
    if way == "turns":
        ways = {way: arguments_of(way) for way in ("ours", *LAYERS)}
        result["turns"] = turns(workload, task, max(10, count // 12), ways)
    elif way == "loop":
        result["trips_per_second"] = loop(workload, task, max(10, few))
    elif way == "central":
        result["trips_per_second"] = central(workload, task, max(10, few))
    elif way.startswith("at-"):
        concurrency, clients = map(int, way.split("-")[1:])
        result["trips_per_second"] = at(workload, task, count, concurrency, clients)
    else:
        engine, workers = way.split("-")
        how = {"engine": "ray"} if engine == "ray" else arguments_of(engine)
        # all trips in flight have started at once, and go on ending in waves: fewer trips than two of these may flatter
        waves = min(2 * CONCURRENCY, workload.trips)
        result["trips_per_second"] = ours(workload, task, max(count, waves), int(workers), **how)
    print(json.dumps(result), flush=True)


def arguments_of(way: str) -> dict[str, Any]:
    """What `simulate` is given for a way to train; nothing for `ours`."""
    if way == "bfloat16":
        return {"training": Training(precision="bfloat16")}
    if way in PRIVATE:
        often = 1 << 20
        privacy = Privacy(1.0, 1e-6, noise_multiplier=1.0, mechanism=PRIVATE[way], max_participations=often, horizon=1 << 16)
        return {"privacy": privacy}
    return {"secure_aggregation": SecureAggregation("enclave", clip=1.0)} if way == "enclave" else {}


if __name__ == "__main__":
    main(*sys.argv[1:])
