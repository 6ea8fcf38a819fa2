"""Whether trips can be trained together: a few are tried at the start of a run, in batches and one at a time.

Layers have twins that know how they are trained in batches, but a model is more than its layers: it may mix the rows of
a batch, draw random numbers itself, or have a loss that is no mean. All of this shows in the updates.
"""

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedbuff.core.versions import Vector
from fedbuff.learn.batched import batched, kind_of, norms, row_losses
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.flat import Flat, as_tensor
from fedbuff.learn.generator import default_generator
from fedbuff.learn.local import Job, Matrix, Train, one_at_a_time
from fedbuff.learn.task import Task
from fedbuff.learn.twins import why_no_twin
from fedbuff.learn.words import whole_trips

# The trial: both ways must agree on a few trips before the fast one is used.
_TRIAL_TRIPS = 4  # trips, or fewer
_TRIAL_WEIGHTS = 1 << 22  # if all of them together would have more weights than this: they take memory
_SECOND_VERSION = 0.1  # half of them start this far from the initial weights, in units of a weight's typical size
_TRIAL_CLIENTS = 64  # the trips are of clients among these, spread from the first to the last;
_TRIAL_ROWS = 256  # the loss is tried on so many of their rows
_TOLERANCE = 1e-4  # of an update's norm: rounding is far below, a mask or a row gone wrong far above
_TOLERANCE_OF_TIES = 0.05  # the same where a maximum is a tie but for rounding (ReLU, max pooling): either side may win


def way_to_train(
    task: Task, sgd: LocalSGD, seed: int, flat: Flat, *, device: str = "cpu", precision: str = "float32"
) -> tuple[Train, str | None]:
    """The fastest way to train this task, and if that is the slow loop, a sentence why."""
    reason = why_not(task, sgd, seed, flat)
    if reason is not None:
        return one_at_a_time(task, sgd, seed, flat), reason
    if precision == "bfloat16" and device == "cpu":
        check_bfloat16(task, sgd, seed, flat)
    return batched(task, sgd, seed, flat, device=device, precision=precision), None


def why_not(task: Task, sgd: LocalSGD, seed: int, flat: Flat) -> str | None:
    """A sentence saying why this task can't be trained in batches of trips, or None: a few trips are tried both ways."""
    if reason := why_no_twin(flat.module):
        return reason
    weights, (some, unsound) = flat.weights(), _some(task, flat)
    jobs = _trial(task, flat, some)
    short = replace(sgd, batch_size=min(sgd.batch_size, 4), epochs=1, steps=2)
    # what the loop can't train either is an error, here and now
    short, expected = _tame(task, short, seed, flat, jobs)
    flat.load(weights)
    if not np.isfinite(expected).all():
        return "a few trips, tried at the start, had updates that are not finite, so that no two ways could be compared"
    try:
        if not _loss_is_a_mean(task, flat, some):
            return "the loss of a batch is not the mean over its rows"
        found, drew = _tried(task, short, seed, flat, jobs)
        if drew:
            return "the model draws random numbers itself"
        both = [(found, expected), *_one_step(task, short, seed, flat, jobs)]
        if unsound is not None:
            beside, _ = _tried(task, short, seed, flat, [*jobs, Job(len(jobs), unsound, jobs[0].weights)])
            if not _agree(beside[:-1], found, weights):
                return "a client whose inputs are not finite changes the updates of those it is trained together with"
        if all(_agree(*pair, weights) for pair in both):
            return None
        # a number that is the larger of two by a hair may be the smaller one after other rounding, and change an update
        # visibly; in double precision it does not happen, so that a difference there is a real one
        exact = replace(task, loss=copy.deepcopy(task.loss).double() if isinstance(task.loss, nn.Module) else task.loss)
        double = Flat(copy.deepcopy(flat.module).double())
        start = double.weights()
        again = _trial(task, double, some)
        doubled = one_at_a_time(exact, short, seed, double)(again)
        double.load(start)  # the loop left its own there
        # but kernels know single precision only: what is far off there is their mistake
        near = all(_agree(*pair, weights, _TOLERANCE_OF_TIES) for pair in both)
        if near and _agree(_tried(exact, short, seed, double, again)[0], doubled, start):
            return None
    except Exception as error:
        return f"training several trips at once failed with {type(error).__name__}: {error}"
    repeated = one_at_a_time(task, short, seed, flat)(jobs)
    flat.load(weights)
    if not np.array_equal(repeated, expected):
        return (
            "the model gives other updates each time that it is trained, as it draws random numbers that are not torch's or "
            "remembers something: no two runs will be the same"
        )
    return (
        "training several trips at once gave other updates than one at a time: the model mixes rows of a batch or draws "
        "random numbers itself, or the loss is not a mean over rows"
    )


def check_bfloat16(task: Task, sgd: LocalSGD, seed: int, flat: Flat) -> None:
    """Refuse bfloat16 where updates are further from those of float32 than no update at all would be.

    It is coarse by its nature, so that only what is quite wrong can be told.
    """
    jobs, weights = _trial(task, flat, _some(task, flat)[0]), flat.weights()
    one, updates = _tame(task, replace(sgd, batch_size=min(sgd.batch_size, 4), epochs=1, steps=1), seed, flat, jobs)
    size = norms(updates).max() / np.linalg.norm(weights)
    if not 0 < size < np.inf:
        return
    one = replace(one, lr=one.lr * 1e-3 / size)  # so small that a second step is taken where the first one was
    for how in (one, replace(one, steps=2)):  # some networks have a kernel of their own for one step
        full = batched(task, how, seed, flat)(jobs)
        low = batched(task, how, seed, flat, precision="bfloat16")(jobs)
        if np.isfinite(full).all() and not _agree(low, full, weights, tolerance=1.0):
            raise ValueError(
                "precision: in bfloat16 an update of this model is further from that of float32 than no update at all would be "
                "(in a few trips, tried at the start); use float32"
            )


def _tame(task: Task, sgd: LocalSGD, seed: int, flat: Flat, jobs: list[Job]) -> tuple[LocalSGD, Matrix]:
    """The loop's updates in a trial, at a learning rate with which they stand out from the rounding of weights, and are finite.

    The one of `sgd` may be too small for the one, and 0.1 too large for the other.
    """
    weights = flat.weights()
    for lr in (max(sgd.lr, 0.1), 1e-3, 1e-5, 1e-7, sgd.lr):
        sgd = replace(sgd, lr=lr)
        updates = one_at_a_time(task, sgd, seed, flat)(jobs)
        flat.load(weights)
        if norms(updates).max() <= 1e3 * np.linalg.norm(weights):  # and not NaN
            break
    return sgd, updates


def _some(task: Task, flat: Flat) -> tuple[list[int], int | None]:
    """Clients from the first to the last, as neighbours may be alike, and one whose inputs are not finite, if any is there."""
    every: list[int] = np.linspace(0, len(task.clients) - 1, min(_TRIAL_CLIENTS, len(task.clients))).astype(int).tolist()
    unsound = [c for c in every if not torch.isfinite(as_tensor(task.clients[c][0], like=flat.vector)).all()]
    some = [c for c in every if c not in unsound]
    return (some, unsound[0] if unsound else None) if some else (every, None)


def _loss_is_a_mean(task: Task, flat: Flat, some: list[int]) -> bool:
    """Whether the loss of rows of many clients is the mean of what `row_losses` gives for each."""
    every = [tuple(as_tensor(part[:_TRIAL_ROWS], like=flat.vector) for part in task.clients[client]) for client in some]
    alike = [(x, y) for x, y in every if kind_of(x, y) == kind_of(*every[0])]
    each = max(1, _TRIAL_ROWS // len(alike))
    x, y = (torch.cat([part[i][:each] for part in alike]) for i in (0, 1))
    training, weights, right = flat.module.training, flat.weights(), True
    flat.module.eval()
    for version in (weights, _elsewhere(flat)):
        flat.load(version)
        with torch.no_grad(), default_generator():
            output = flat.module(x)
        losses, counted = row_losses(task.loss)(output, y)
        mean = losses.sum() / (len(losses) if counted is None else counted.sum())
        whole = task.loss(output, y)
        near = torch.isclose(mean.double(), whole.double(), rtol=1e-3, atol=1e-6)
        right = right and (bool(near) or not bool(torch.isfinite(whole)))
    flat.load(weights)
    flat.module.train(training)
    return right


def _trial(task: Task, flat: Flat, some: list[int]) -> list[Job]:
    """Trips of two versions, different clients in one of them, all of many examples: a sum is a mean for a client of one."""
    few = max(2, min(_TRIAL_TRIPS, _TRIAL_WEIGHTS // len(flat.vector)))
    largest = sorted(some, key=lambda client: -task.examples(client))[:few]
    clients = [*(largest if len(largest) > 1 else 2 * largest), largest[-1]]
    versions = flat.weights(), _elsewhere(flat)
    last = len(clients) - 1
    return [Job(trip, client, versions[trip % 2 if trip < last else 0]) for trip, client in enumerate(clients)]


def _elsewhere(flat: Flat) -> Vector:
    """Other weights than the initial ones: where those are zero, all rows look alike, and whatever is made of them."""
    weights, rng = flat.weights(), np.random.default_rng(0)
    for part in np.split(weights, np.cumsum([p.numel() for p in flat.parameters.values()])[:-1]):
        typical = float(np.sqrt(np.mean(part * part))) or 1.0
        part += (_SECOND_VERSION * typical * rng.standard_normal(len(part))).astype(part.dtype)
    return weights


def _tried(task: Task, sgd: LocalSGD, seed: int, flat: Flat, jobs: list[Job]) -> tuple[Matrix, bool]:
    """The updates, and whether the model drew from torch's generator, which is not a trip's own here: twins have theirs."""
    with default_generator() as generator:
        train, before = batched(task, sgd, seed, flat), generator.get_state()
        updates = train(jobs)
        return updates, not torch.equal(before, generator.get_state())


def _one_step(task: Task, sgd: LocalSGD, seed: int, flat: Flat, jobs: list[Job]) -> list[tuple[Matrix, Matrix]]:
    """Found and expected updates of trips of one local step, if these have a kernel of their own."""
    once, weights = replace(sgd, steps=1), flat.weights()
    if whole_trips(task, once, seed, flat) is None:
        return []
    expected = one_at_a_time(task, once, seed, flat)(jobs)
    flat.load(weights)
    return [(_tried(task, once, seed, flat, jobs)[0], expected)]


def _agree(found: Matrix, expected: Matrix, weights: Vector, tolerance: float = _TOLERANCE) -> bool:
    """Up to a part of the update's norm, and the rounding of weights."""
    rounding = 8 * float(np.finfo(weights.dtype).eps) * float(np.linalg.norm(weights))
    near = np.linalg.norm(found - expected, axis=1) <= tolerance * np.linalg.norm(expected, axis=1) + rounding
    return bool(near.all())
