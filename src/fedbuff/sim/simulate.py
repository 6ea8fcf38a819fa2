"""`simulate`: a server over a task in virtual time. Arguments are checked and put together here; simulation.py plays them."""

import contextlib
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedbuff import toml
from fedbuff.core import check
from fedbuff.core.aggregate import Aggregation
from fedbuff.core.random import Draw, seed_for
from fedbuff.core.server import SETTINGS, Server
from fedbuff.core.starting import is_sampled
from fedbuff.core.versions import Vector
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.data import quick_digests
from fedbuff.learn.task import Task
from fedbuff.learn.training import Training
from fedbuff.privacy.plan import Plan
from fedbuff.privacy.protection import Protection, protect
from fedbuff.privacy.settings import Privacy
from fedbuff.report.folder import Folder, forget_key
from fedbuff.report.run import Run, load
from fedbuff.sim.ahead import MEMORY, WORTH, Ahead, horizon
from fedbuff.sim.availability import windows
from fedbuff.sim.fastplan import fastest
from fedbuff.sim.pool import Pool
from fedbuff.sim.secure import Buffer, SecureAggregation, server_sees
from fedbuff.sim.simulation import Simulation, Status
from fedbuff.sim.timing import Sizes, check_timing, half_normal, mean_duration
from fedbuff.sim.until import Until
from fedbuff.sim.workers import Workers, can_fork, cores

_PROCESSES = 1024  # on one machine: more would only wait for each other


def simulate(
    server: Server,
    task: Task,
    *,
    client: LocalSGD,
    until: Until,
    timing: Draw = half_normal(1.0),
    seed: int = 0,
    dropout: float = 0.0,
    timeout: float | None = None,
    availability: windows | None = None,
    privacy: Privacy | None = None,
    secure_aggregation: SecureAggregation | None = None,
    evaluate_every: int | None = None,
    evaluate_share: float = 0.1,
    target: float | None = None,
    algorithm: str = "custom",
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint_every: float = 10.0,
    progress: Callable[[Status], None] | None = None,
    training: Training = Training(),
    workers: int | None = None,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
) -> Run:
    """Run `server` over `task` in virtual time.

    client, timing, dropout, timeout, availability   what clients do, how long it takes, and what goes wrong
    privacy           differential privacy: how much, and by which mechanism
    secure_aggregation   how a buffer is added up without seeing its updates
    until             when to stop, e.g. `accuracy(0.6) | trips(600_000)`
    evaluate_every    trips between evaluations, at the next server step; by default the number of trips in flight, or
    evaluate_share    so many more that evaluating takes about this share of the work at most
    target            note when this accuracy is first reached, without stopping there (`until` stops)
    out               the run folder; with `resume`, go on with the run it holds
    checkpoint_every  seconds (of real time) between checkpoints, or more where they are large; the result does not depend on it
    training          how trips are computed, e.g. `Training(batched=False)` for the obvious loop
    workers           processes that train, this one included, by default one for each core; the result is the same
    engine, address   "ray" trains on a Ray cluster: on the one at `address`, or one started here; the result is the same
    say               told in a line what a user should know

    Weights given to the server are where it starts; otherwise the model's own, drawn from the seed. The same arguments and
    seed give the same weights and trips, bit for bit, on the same machine.
    """
    import torch

    from fedbuff.learn.cost import multiplications
    from fedbuff.learn.evaluate import blocks
    from fedbuff.learn.first_look import first_look
    from fedbuff.learn.kernels.room import give_back
    from fedbuff.learn.local import initial_weights
    from fedbuff.learn.work import settle, trainer

    _check_parts(server, task, client, until, training, privacy, secure_aggregation)
    check_timing(timing, availability)
    check.instance(str, "a name for the run's settings, e.g. 'fedbuff'", algorithm=algorithm)
    check.function(1, "a function of a line, e.g. print", say=say)
    if progress is not None:
        check.function(1, "a function of the run's status, or None", progress=progress)
    check.integer(0, seed=seed)
    check.number(0, checkpoint_every=checkpoint_every)
    check.one_of(("local", "ray"), engine=engine)
    if workers is not None:
        check.integer(1, _PROCESSES if engine == "local" else math.inf, workers=workers)
    if address is not None and engine != "ray":
        raise ValueError(f"address={address!r} is a Ray cluster's: give engine='ray' with it")
    seed, client, timing, until = int(seed), check.plain(client), check.plain(timing), check.plain(until)
    availability = None if availability is None else check.plain(availability)
    if evaluate_every is not None:
        check.integer(1, evaluate_every=evaluate_every)
    check.number(1e-9, 1, evaluate_share=evaluate_share)
    check.switch(resume=resume)
    target = until.accuracy if target is None else target
    if target is not None:
        check.number(0, 1, target=target)
        target = float(target)
        if task.accuracy is None:
            raise ValueError(f"target={target}: the task {task.name!r} has no accuracy to reach it with")
    with contextlib.ExitStack() as at_the_end:
        at_the_end.callback(torch.set_num_threads, settle())
        at_the_end.callback(give_back)
        at_the_end.enter_context(torch.inference_mode(False))
        at_the_end.enter_context(torch.enable_grad())  # whatever the caller is at
        at_the_end.enter_context(np.errstate(over="ignore", invalid="ignore"))  # divergence is noticed, and said
        n = len(task.clients)
        limits = {"server_steps": until.server_steps, "trips": until.trips}
        sampled_by_all(server, privacy, availability)
        time_passes(until, timing, seed, n, task)
        promise = None if privacy is None else check.plain(privacy).plan(server, n, **limits)
        stalest = server.max_staleness
        if secure_aggregation is not None:
            agree(check.plain(secure_aggregation), server, privacy)
            stalest = secure_aggregation.stalest(server)
        flat, drawn = initial_weights(task, seed)
        first_look(task, flat, training.device)
        weights = _starting_point(server, drawn)
        plan = fastest(
            start=server.start,
            buffer_size=server.buffer_size,
            weigh=server.weigh,
            max_staleness=stalest,
            clients=n,
            sizes=Sizes(task.sizes() or task.examples),
            timing=timing,
            seed=seed,
            dropout=dropout,
            timeout=timeout,
            availability=availability,
            ledger=promise.ledger(n) if promise else None,
        )
        tables = describe(
            dict(task.settings) if task.settings else {"python": {"object": task.name, "clients": n, "weights": len(weights)}},
            server,
            client,
            until,
            timing,
            availability,
            training,
            privacy,
            secure_aggregation,
            name=algorithm,
            seed=seed,
            dropout=dropout,
            timeout=timeout,
            evaluate_every=evaluate_every,
            evaluate_share=evaluate_share,
            target=None if target == until.accuracy else target,
        )
        sampled = is_sampled(server.start)
        divisor = server.buffer_size if sampled else None  # whatever the size of a cohort
        aggregation, folder = Aggregation(weights, server.optimizer, server.mixing, divisor), None
        if out is not None:  # before anything that takes time
            needed, data = _disk_needed(aggregation), quick_digests(task, flat.constants())
            folder = at_the_end.enter_context(Folder(Path(out), tables, needed, resume, data))
            if folder.finished:
                forget_key(folder.path)  # it was killed right before
                return load(folder.path)
        protection = protected(promise, privacy, n, len(weights), seed, folder) if promise else None
        in_flight = min(plan.mean_in_flight(), n)  # nobody is on two trips at once, however long they take
        memory = MEMORY if training.ahead_gib is None else training.ahead_gib * 2**30
        steps, windowed = horizon(in_flight, server.buffer_size, weights.nbytes, memory)
        work = trainer(task, client, seed, training, flat)
        if work.note is not None:
            say(f"fedbuff: trips are trained one at a time, which is slower: {work.note}")
        most = server.buffer_size + round(8 * math.sqrt(server.buffer_size))  # of a Poisson cohort, others have no more
        versions, updates = round(4 * in_flight) + 256, (steps + 2) * most + 256
        if engine == "ray":
            from fedbuff.sim.ray import OnRay

            how = training if work.note is None else Training(batched=False)
            make = partial(trainer, sgd=client, seed=seed, how=how, checked=True, constants=flat.constants())
            pool: Pool = OnRay(task, make, versions, updates, weights, windowed, workers, address)
        else:
            alone = not can_fork() or training.device != "cpu"
            pool = Workers(work, versions, updates, weights, windowed, 1 if alone else workers or cores())
        at_the_end.callback(pool.close)
        simulation = Simulation(
            plan=plan,
            ahead=Ahead(
                plan,
                pool,
                steps,
                server.buffer_size,
                server.mixing,
                multiplications(task, flat),
                _mean_examples(task),
                WORTH // 2 if work.one_call else WORTH,
            ),
            pool=pool,
            aggregation=aggregation,
            protection=protection,
            secure=partial(unseen, secure_aggregation, server, len(weights), seed, protection, say)
            if secure_aggregation
            else None,
            by_examples=server.weight_by == "examples",
            mixing=server.mixing,
            task=task,
            blocks=blocks(task),
            until=until | Until(server_steps=promise.horizon) if promise else until,
            target=target,
            evaluate_every=evaluate_every or max(1, round(in_flight), _seldom(task, evaluate_share)),
            settings=tables,
        )
        simulation.run(folder, checkpoint_every, progress)
        seen = server_sees(secure_aggregation)
        summary = {"algorithm": algorithm, "task": task.name, "seed": seed, **simulation.summary(seen)}
        trips, weights_by_name = plan.trips.arrays(), flat.named(simulation.aggregation.weights)
        if folder is not None:
            folder.finish(trips, weights_by_name, simulation.metrics, summary)
        return Run(summary, simulation.metrics, trips, tables, weights_by_name, folder.path if folder else None)


def _check_parts(
    server: Server,
    task: Task,
    client: LocalSGD,
    until: Until,
    training: Training,
    privacy: Privacy | None,
    secure_aggregation: SecureAggregation | None,
) -> None:
    """Refuse what is not what it stands for."""
    check.instance(
        Server, "who aggregates, e.g. fedbuff.Server(start=fedbuff.refill(concurrency=100), buffer_size=10)", server=server
    )
    check.instance(Task, "what is learned, e.g. fedbuff.tasks.digits() or a fedbuff.Task of your own", task=task)
    check.instance(Until, "when to stop, e.g. fedbuff.trips(1000)", until=until)
    check.instance(LocalSGD, "what a client does, e.g. fedbuff.LocalSGD(lr=0.1)", client=client)
    check.instance(Training, "how trips are computed, e.g. fedbuff.Training(batched=True)", training=training)
    private = "how much privacy, e.g. fedbuff.Privacy(clip=1.0, epsilon=8.0, delta=1e-5), or None"
    check.instance(Privacy | None, private, privacy=privacy)
    unseen_by = "how updates are added up, e.g. fedbuff.SecureAggregation(mode='enclave', clip=1.0), or None"
    check.instance(SecureAggregation | None, unseen_by, secure_aggregation=secure_aggregation)
    if server.live:
        raise ValueError(
            f"server: {', '.join(server.live)} is for a server that is driven by events; give simulate privacy=…, "
            "secure_aggregation=… or availability=… instead"
        )


def protected(plan: Plan, privacy: Privacy | None, clients: int, weights: int, seed: int, folder: Folder | None) -> Protection:
    """The plan with its noise: from the run's key, which is made here if it is a new run, or from its seed."""
    if privacy is None or privacy.noise == "seeded":
        return protect(plan, clients, weights, seed_for(seed, "noise"), seeded=True)
    return protect(plan, clients, weights, os.urandom(32) if folder is None else folder.key())


def agree(secure: SecureAggregation, server: Server, privacy: Privacy | None) -> None:
    """Check that a server, secure aggregation and privacy go together."""
    secure.check(server)
    if privacy is not None and privacy.clip != secure.clip:
        raise ValueError(
            f"privacy.clip={privacy.clip:g}, secure_aggregation.clip={secure.clip:g}: clients clip once, make them equal"
        )


def sampled_by_all(server: Server, privacy: Privacy | None, availability: windows | None) -> None:
    """Refuse amplification by sampling where only some clients can be drawn: those are drawn more often than accounted for."""
    poisson = is_sampled(server.start)
    if privacy is not None and poisson and availability is not None and availability.share < 1:
        raise ValueError(
            f"poisson=True, availability.open={availability.open:g} of {availability.period:g}: who is not there can't be in a "
            "cohort, and the others are drawn the more often, so it is no Poisson sample; leave availability out"
        )


def time_passes(until: Until, timing: Draw, seed: int, clients: int, task: Task) -> None:
    """Refuse to wait for a moment that never comes."""
    endless = until.virtual_time and until.trips is None and until.server_steps is None
    if endless and not mean_duration(timing, seed, clients, Sizes(task.sizes() or task.examples)) > 0:
        raise ValueError(f"until: with {timing} no virtual time passes; give trips or server_steps as well")


def unseen(
    secure: SecureAggregation,
    server: Server,
    weights: int,
    seed: int,
    protection: Protection | None,
    say: Callable[[str], None],
    version: int,
) -> Buffer:
    """The parties of secure aggregation, from this version on."""
    bound = protection.plan.largest_increment() if protection else 0.0
    noise = protection.noise if protection else None
    return secure.buffer(weights, server.buffer_size, server.weigh, seed, version, noise, bound, say)


def describe(
    task: toml.Table,
    server: Server,
    client: LocalSGD,
    until: Until,
    timing: Draw,
    availability: windows | None,
    training: Training,
    privacy: Privacy | None = None,
    secure_aggregation: SecureAggregation | None = None,
    **plain: Any,
) -> toml.Table:
    """The complete tables of a settings file: every setting, defaults included, None left out."""
    return {
        **toml.encode(plain),
        "task": task,
        "server": toml.encode({name: getattr(server, name) for name in SETTINGS}),
        "client": toml.fields_of(client),
        "timing": toml.encode(timing),
        **({"availability": toml.fields_of(availability)} if availability else {}),
        **({"privacy": toml.fields_of(privacy)} if privacy else {}),
        **({"secure_aggregation": toml.fields_of(secure_aggregation)} if secure_aggregation else {}),
        "until": toml.fields_of(until),
        "training": toml.fields_of(training),
    }


def _seldom(task: Task, share: float) -> int:
    """Trips between evaluations so that they take about `share` of the work: a trip passes its examples forwards and twice
    as much backwards, and costs about ten examples besides.
    """
    rows = sum(len(y) for _, y in task.splits.values())
    return math.ceil(rows / (share * (3 * _mean_examples(task) + 10)))


def _mean_examples(task: Task) -> float:
    """How many examples a client has on average, by a look at some."""
    n = len(task.clients)
    some = np.linspace(0, n - 1, min(n, 50)).astype(int)
    return sum(task.examples(int(client)) for client in some) / len(some)


def _disk_needed(aggregation: Aggregation) -> int:
    """A first checkpoint twice over, and a megabyte; more is needed as updates, versions and trips add up."""
    return 2 * sum(a.nbytes for a in aggregation.state()[0].values()) + aggregation.weights.nbytes + (1 << 20)


def _starting_point(server: Server, drawn: Vector) -> Vector:
    """The weights given to the server, if they fit the model, else those drawn for it."""
    given = server.initial_weights
    if given is None:
        return drawn
    if given.shape != drawn.shape:
        raise ValueError(f"weights: the server has a vector of shape {given.shape}, the task's model {drawn.shape}")
    return given.astype(drawn.dtype)
