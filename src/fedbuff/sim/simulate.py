"""`simulate`: a server over a task in virtual time. Its arguments are put together here; simulation.py plays them."""

import contextlib
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from fedbuff.privacy.plan import Plan as PrivacyPlan
from fedbuff.privacy.protection import Protection, protect
from fedbuff.privacy.settings import Privacy
from fedbuff.report.folder import Folder, forget_key
from fedbuff.report.run import Run, load
from fedbuff.sim.ahead import MEMORY, WORTH, Ahead, steps_ahead
from fedbuff.sim.availability import windows
from fedbuff.sim.fastplan import fastest
from fedbuff.sim.pool import Pool
from fedbuff.sim.refused import check_how, check_parts, check_sampling, check_secure, check_time_passes
from fedbuff.sim.secure import Buffer, SecureAggregation, server_sees
from fedbuff.sim.simulation import Simulation, Status
from fedbuff.sim.timing import Sizes, check_timing, half_normal
from fedbuff.sim.until import Until
from fedbuff.sim.workers import Workers, can_fork, cores

if TYPE_CHECKING:
    from fedbuff.learn.work import Trainer


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
    seed              of everything random, but for the noise of a private run
    until             when to stop, e.g. `accuracy(0.6) | trips(600_000)`
    evaluate_every    trips between evaluations, at the next server step; by default the number of trips in flight, or
    evaluate_share    so many more that evaluating takes about this share of the work at most
    target            note when this accuracy is first reached, without stopping there (`until` stops)
    algorithm         a name for the settings, shown in tables and plots
    out               the run folder; with `resume`, go on with the run it holds
    checkpoint_every  seconds (of real time) between checkpoints, or more where they are large; the result does not depend on it
    progress          told of the run's `Status` after every server step
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

    check_parts(server, task, client, until, training, privacy, secure_aggregation)
    check_timing(timing, availability)
    check_how(
        seed, algorithm, evaluate_every, evaluate_share, resume, checkpoint_every, progress, workers, engine, address, say
    )
    seed, client, timing, until = int(seed), check.plain(client), check.plain(timing), check.plain(until)
    availability = None if availability is None else check.plain(availability)
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
        check_sampling(server, privacy, availability)
        check_time_passes(until, timing, seed, n, task)
        promise = None if privacy is None else check.plain(privacy).plan(server, n, **limits)
        stalest = server.max_staleness
        if secure_aggregation is not None:
            check_secure(check.plain(secure_aggregation), server, privacy)
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
        aggregation, folder = Aggregation(weights, server.optimizer, server.mixing, divisor, server.average), None
        if out is not None:  # before anything that takes time
            needed, data = _disk_needed(aggregation), quick_digests(task, flat.constants())
            folder = at_the_end.enter_context(Folder(Path(out), tables, needed, resume, data))
            if folder.finished:
                forget_key(folder.path)  # it was killed right before
                return load(folder.path)
        protection = protected(promise, privacy, n, len(weights), seed, folder) if promise and privacy else None
        in_flight = min(plan.mean_in_flight(), n)  # nobody is on two trips at once, however long they take
        memory = MEMORY if training.ahead_gib is None else training.ahead_gib * 2**30
        steps, windowed = steps_ahead(in_flight, server.buffer_size, weights.nbytes, memory)
        work = trainer(task, client, seed, training, flat)
        if work.note is not None:
            say(f"fedbuff: trips are trained one at a time, which is slower: {work.note}")
        most = server.buffer_size + round(8 * math.sqrt(server.buffer_size))  # of a Poisson cohort, others have no more
        room = round(4 * in_flight) + 256, (steps + 2) * most + 256, weights, windowed
        pool = _pool(work, task, client, seed, training, room, workers, engine, address)
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
        trips, weights_by_name = plan.trips.arrays(), flat.named(simulation.aggregation.model)
        if folder is not None:
            folder.finish(trips, weights_by_name, simulation.metrics, summary)
        return Run(summary, simulation.metrics, trips, tables, weights_by_name, folder.path if folder else None)


def _pool(
    work: "Trainer",
    task: Task,
    client: LocalSGD,
    seed: int,
    training: Training,
    room: tuple[int, int, Vector, bool],
    workers: int | None,
    engine: str,
    address: str | None,
) -> Pool:
    """Who trains: processes of this machine, or of a Ray cluster.

    room   how many versions and updates to have room for, a vector like them, and whether that is on disk
    """
    from fedbuff.learn.work import trainer

    if engine == "ray":
        from fedbuff.sim.ray import OnRay

        how = training if work.note is None else Training(batched=False)
        make = partial(trainer, sgd=client, seed=seed, how=how, checked=True, constants=work.flat.constants())
        return OnRay(task, make, *room, workers, address)
    alone = not can_fork() or training.device != "cpu"
    return Workers(work, *room, 1 if alone else workers or cores())


def protected(plan: PrivacyPlan, privacy: Privacy, clients: int, weights: int, seed: int, folder: Folder | None) -> Protection:
    """The plan with its noise: from the run's key, which is made here if it is a new run, or from its seed."""
    if privacy.noise == "seeded":
        return protect(plan, clients, weights, seed_for(seed, "noise"), seeded=True)
    return protect(plan, clients, weights, os.urandom(32) if folder is None else folder.key())


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
