"""What `fedbuff.Server` should have done: Algorithm 1 of the paper as a slow, plain loop over a recorded trace.

Written from the specification, without the server's source. It takes from the trace only what is the server's free choice
(which client a trip goes to, when the next client arrives) and computes the rest anew: who is rejected, who is in which step,
how stale and with which weight, how many trips start and stop, and the weights. torch.optim, in float64, is the authority on
optimizers.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from fedbuff import StartTrip, StepTaken, TripFailed, UpdateArrived, Wake, Woke


@dataclass(frozen=True)
class Settings:
    """A server's settings as plain data: ("polynomial", 0.5) is `fb.polynomial(0.5)`."""

    start: tuple[Any, ...] = ("refill", 3)
    buffer_size: int = 2
    weigh: tuple[Any, ...] = ("polynomial", 0.5)
    optimizer: tuple[Any, ...] = ("sgd", 1.0)
    threshold: int | None = None  # of delay_adaptive
    max_staleness: int | None = None
    weight_by: str = "uniform"
    mixing: bool = False
    average: int | None = None
    clients: tuple[Any, ...] = tuple(range(8))
    seed: int = 0


@dataclass(frozen=True)
class Moment:
    """What was seen after one event: the commands given and the server's public state."""

    event: Any  # None: begin()
    commands: list[Any]
    weights: np.ndarray
    model: np.ndarray
    version: int
    buffered: int
    in_flight: dict[int, tuple[Any, int]]


@dataclass(frozen=True)
class Expected:
    """What should be seen after it."""

    rejected: bool
    step: StepTaken | None
    cancelled: set[int]
    started: int
    weights: np.ndarray
    model: np.ndarray
    version: int
    buffered: int
    in_flight: dict[int, tuple[Any, int]]


def staleness_weight(name: str, *args: Any) -> Any:
    """s(τ) by name"""

    def s(tau: int) -> float:
        if name == "constant":
            return args[0] if args else 1.0
        if name == "polynomial":
            return 1 / (1 + tau) ** args[0]
        if name == "hinge":
            a, b = args
            return 1.0 if tau <= b else 1 / (1 + a * (tau - b))
        if name == "cutoff":
            return 1.0 if tau <= args[0] else 0.0
        if name == "table":
            return args[min(tau, len(args) - 1)]
        raise NotImplementedError(name)

    return s


def cohort_trips(size: int, over_selection: float = 0.0) -> int:
    """⌈size · (1 + over_selection)⌉, in exact decimals"""
    return math.ceil(size * (1 + Fraction(str(over_selection))))


class Optimizer:
    """torch.optim on a float64 vector whose gradient is the mean update; the learning rate may change from step to step."""

    def __init__(self, weights: np.ndarray, threshold: int | None, name: str, lr: float, *args: Any) -> None:
        self.parameter = torch.tensor(weights, dtype=torch.float64)
        self.lr, self.threshold = lr, threshold
        if name == "sgd":
            self.torch: torch.optim.Optimizer = torch.optim.SGD([self.parameter], lr)
        elif name == "momentum":
            self.torch = torch.optim.SGD([self.parameter], lr, momentum=args[0])
        elif name == "adam":
            beta1, beta2, eps, amsgrad = args
            self.torch = torch.optim.Adam([self.parameter], lr, betas=(beta1, beta2), eps=eps, amsgrad=amsgrad)
        else:
            raise NotImplementedError(name)

    def step(self, mean: np.ndarray, largest_staleness: int) -> np.ndarray:
        late = self.threshold is not None and largest_staleness > self.threshold
        self.torch.param_groups[0]["lr"] = min(self.lr, 1 / largest_staleness) if late else self.lr
        self.parameter.grad = torch.tensor(mean, dtype=torch.float64)
        self.torch.step()
        return self.parameter.numpy().copy()


def averaged(history: list[np.ndarray], span: int | None) -> np.ndarray:
    """What is evaluated: the newest version, or a mean; once `span` versions are in it, each new one takes 1 / span of it."""
    if span is None or len(history) == 1:
        return history[-1]
    mean = np.mean(history[1 : span + 1], axis=0)
    for w in history[span + 1 :]:
        mean = (1 - 1 / span) * mean + w / span
    return np.asarray(mean)


def is_vector(update: Any, length: int) -> bool:
    """Whether this is an update the server may take: real, flat, of the right length, finite."""
    return (
        isinstance(update, np.ndarray)
        and update.dtype.kind == "f"
        and update.shape == (length,)
        and all(math.isfinite(x) for x in update)
    )


def replay(settings: Settings, weights: np.ndarray, trace: list[Moment]) -> list[Expected]:
    """What should have been seen at each moment of the trace."""
    s = staleness_weight(*settings.weigh)
    optimizer = Optimizer(weights, settings.threshold, *settings.optimizer)
    rule, *rule_args = settings.start
    history = [np.array(weights, dtype=np.float64)]  # the weights of every version, kept forever
    buffer: list[tuple[int, Any, int, int, np.ndarray]] = []  # trip, client, staleness, examples, update
    in_flight: dict[int, tuple[Any, int]] = {}
    next_arrival = math.inf
    expected = []

    for moment in trace:
        event = moment.event
        rejected, step, cancelled, arrived = False, None, set(), 0

        if isinstance(event, UpdateArrived | TripFailed):
            known = type(event.trip) is int and event.trip in in_flight
            if known:
                client, start_version = in_flight.pop(event.trip)
            if isinstance(event, TripFailed):
                rejected = not known
            else:
                version = len(history) - 1
                rejected = not (
                    known
                    and is_vector(event.update, len(weights))
                    and (settings.max_staleness is None or version - start_version <= settings.max_staleness)
                )
                if not rejected:
                    update = np.array(event.update, dtype=np.float64)
                    if settings.mixing:
                        client_model = history[start_version] - update
                        update = history[version] - client_model
                    buffer.append((event.trip, client, version - start_version, event.examples, update))

        if len(buffer) == settings.buffer_size:
            total, count = np.zeros(len(weights)), 0
            for _, _, tau, examples, update in buffer:
                n = examples if settings.weight_by == "examples" else 1
                total += s(tau) * n * update
                count += n
            taus = tuple(tau for _, _, tau, _, _ in buffer)
            history.append(optimizer.step(total / count, max(taus)))
            step = StepTaken(len(history) - 1, tuple(trip for trip, *_ in buffer), taus, tuple(s(tau) for tau in taus))
            buffer = []
            if rule == "cohort":
                cancelled = set(in_flight)
                in_flight = {}

        if rule == "arrivals" and (event is None or (isinstance(event, Woke) and event.time >= next_arrival)):
            arrived = 1
            next_arrival = next(command.at for command in moment.commands if isinstance(command, Wake))

        free = len(settings.clients) - len(in_flight) - len(buffer)
        if rule == "refill":
            wanted = rule_args[0] - len(in_flight)
        elif rule == "cohort":
            wanted = cohort_trips(*rule_args) - len(in_flight) - len(buffer)
        else:
            wanted = arrived
        started = max(0, min(wanted, free))

        for command in moment.commands:  # the server's free choice: the client
            if isinstance(command, StartTrip):
                in_flight[command.trip] = (command.client, len(history) - 1)

        expected.append(
            Expected(
                rejected,
                step,
                cancelled,
                started,
                history[-1],
                averaged(history, settings.average),
                len(history) - 1,
                len(buffer),
                dict(in_flight),
            )
        )
    return expected
