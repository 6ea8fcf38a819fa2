"""What `simulate` refuses: arguments that are not what they stand for, or that don't go together."""

import math
from collections.abc import Callable

from fedbuff.core import check
from fedbuff.core.random import Draw
from fedbuff.core.server import Server
from fedbuff.core.starting import is_sampled
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.task import Task
from fedbuff.learn.training import Training
from fedbuff.privacy.settings import Privacy
from fedbuff.sim.availability import windows
from fedbuff.sim.secure import SecureAggregation
from fedbuff.sim.simulation import Status
from fedbuff.sim.timing import Sizes, mean_duration
from fedbuff.sim.until import Until

_PROCESSES = 1024  # on one machine: more would only wait for each other


def check_parts(
    server: Server,
    task: Task,
    client: LocalSGD,
    until: Until,
    training: Training,
    privacy: Privacy | None,
    secure_aggregation: SecureAggregation | None,
) -> None:
    """What is run: each part is of its kind."""
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


def check_how(
    seed: int,
    algorithm: str,
    evaluate_every: int | None,
    evaluate_share: float,
    resume: bool,
    checkpoint_every: float,
    progress: Callable[[Status], None] | None,
    workers: int | None,
    engine: str,
    address: str | None,
    say: Callable[[str], None],
) -> None:
    """How it is run."""
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
    if evaluate_every is not None:
        check.integer(1, evaluate_every=evaluate_every)
    check.number(1e-9, 1, evaluate_share=evaluate_share)
    check.switch(resume=resume)


def check_secure(secure: SecureAggregation, server: Server, privacy: Privacy | None) -> None:
    """Whether a server, secure aggregation and privacy go together."""
    secure.check(server)
    if privacy is not None and privacy.clip != secure.clip:
        raise ValueError(
            f"privacy.clip={privacy.clip:g}, secure_aggregation.clip={secure.clip:g}: clients clip once, make them equal"
        )


def check_sampling(server: Server, privacy: Privacy | None, availability: windows | None) -> None:
    """Refuse amplification by sampling where only some clients can be drawn: those are drawn more often than accounted for."""
    poisson = is_sampled(server.start)
    if privacy is not None and poisson and availability is not None and availability.share < 1:
        raise ValueError(
            f"poisson=True, availability.open={availability.open:g} of {availability.period:g}: who is not there can't be in a "
            "cohort, and the others are drawn the more often, so it is no Poisson sample; leave availability out"
        )


def check_time_passes(until: Until, timing: Draw, seed: int, clients: int, task: Task) -> None:
    """Refuse to wait for a moment that never comes."""
    endless = until.virtual_time and until.trips is None and until.server_steps is None
    if endless and not mean_duration(timing, seed, clients, Sizes(task.sizes() or task.examples)) > 0:
        raise ValueError(f"until: with {timing} no virtual time passes; give trips or server_steps as well")
