"""Local training of many trips at once, equal to the loop of `local.py` up to rounding.

The rows of all trips of a chunk form one batch. In their first local step all trips of a version see the same weights,
so a layer is one multiplication for all of them; from the second step on every trip has weights of its own, stacked.
Only the gradients of weights are computed trip by trip; see `twins` for how, and `trial.why_not` for what can't be batched.

Everything is kept as Δ = w − y, the update so far: the weights of a trip are y = w − Δ, a step adds η_l·g to Δ.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedbuff.core.versions import Vector
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.flat import Buffers, Flat, cast
from fedbuff.learn.generator import default_generator
from fedbuff.learn.kernels import library, numbers, usable
from fedbuff.learn.local import Job, Matrix, Train, room_for
from fedbuff.learn.losses import MEANS, is_mean_cross_entropy
from fedbuff.learn.shuffle import Indices, all_batches, dropout_seeds
from fedbuff.learn.small import small
from fedbuff.learn.task import Task
from fedbuff.learn.twins import twin_of, why_no_twin
from fedbuff.learn.twins.convolution import ConvTwin
from fedbuff.learn.twins.dropout import Draws
from fedbuff.learn.twins.step import LocalStep
from fedbuff.learn.words import whole_trips

Rows = Tensor | NDArray[Any]  # examples, or their labels

_ROWS = 128  # at most so many rows at a time (but a whole trip's): what a convolution writes should stay near the cache


def batched(task: Task, sgd: LocalSGD, seed: int, flat: Flat, *, device: str = "cpu", precision: str = "float32") -> Train:
    """A function that trains the trips of a chunk together; each depends on (seed, client, trip) only, up to rounding.

    device      other ones than "cpu" go through plain torch operations; they are not tested here
    precision   "bfloat16" rounds the factors of products to it, but for perceptrons that are trained whole
    """
    if reason := why_no_twin(flat.module):
        raise ValueError(f"the model can't be trained in batches of trips: {reason}; use one_at_a_time")
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"precision: expected float32 or bfloat16, not {precision!r}")
    together = partial(Together, task, sgd, seed, flat, torch.device(device))
    if device == "cpu" and (whole := small(task, sgd, seed, flat, together)) is not None:
        return whole
    if precision == "bfloat16" and device == "cpu":
        try_bfloat16()
    return together(low=precision == "bfloat16")


# torch's products, and those of the kernels, whose path is given if there are any
_TRIAL = """
import ctypes, sys, torch
a = torch.ones(1, 8, 8, 8).bfloat16()
torch.conv2d(a, a[:, :, :3, :3]), a[0, 0] @ a[0, 1]
if sys.argv[1:]:
    rows, sums = (ctypes.c_float * 64)(), (ctypes.c_float * 1024)()
    ends, places = (ctypes.c_int64 * 1)(2), (ctypes.c_int64 * 1)(0)
    stride, columns, beta, low = (ctypes.c_int64(n) for n in (1024, 32, 0, 1))
    outer_products = ctypes.CDLL(sys.argv[1]).outer_products
    outer_products(rows, rows, sums, ctypes.c_int64(1), ends, places, stride, columns, columns, beta, low)
"""


@cache
def try_bfloat16() -> None:
    """Compute a little in bfloat16 in another process: some processors announce instructions that they die of."""
    kernels = library()
    command = [sys.executable, "-c", _TRIAL, *([] if kernels is None else [kernels._name])]
    code = subprocess.run(command, capture_output=True, timeout=120).returncode
    if code:
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise ValueError(f"precision: bfloat16 does not work on this processor, a trial {ended}; use float32")


def norms(updates: Matrix) -> Vector:
    """The Euclidean norm of each update."""
    squares: Vector = np.einsum("ij,ij->i", updates, updates, dtype=np.float64)
    return np.sqrt(squares)


def is_known(loss: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether it is one of torch's losses, whose mean over rows is known, or one of somebody's own."""
    return is_mean_cross_entropy(loss) or loss in MEANS


def row_losses(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]:
    """The loss as a function that gives one loss for each row, and the row's weight in the mean; None if all weigh 1.

    The loss of some rows is then the sum of these losses divided by the sum of weights, or by how many rows there are.
    """

    def by_vmap(output: Tensor, label: Tensor) -> tuple[Tensor, None]:
        return torch.func.vmap(lambda o, y: loss(o[None], y[None]), randomness="error")(output, label), None

    def known(output: Tensor, label: Tensor) -> tuple[Tensor, None]:
        if output.shape != label.shape:
            return by_vmap(output, label)
        each = loss(output, label, reduction="none")  # type: ignore[call-arg]
        return each.flatten(1).mean(1) if each.dim() > 1 else each, None

    def cross_entropy(how: nn.CrossEntropyLoss, output: Tensor, label: Tensor) -> tuple[Tensor, Tensor | None]:
        ignored, weight = how.ignore_index, None if how.weight is None else how.weight.to(output)
        smooth = how.label_smoothing
        each = F.cross_entropy(output, label, weight, ignore_index=ignored, reduction="none", label_smoothing=smooth)
        plain = weight is None and ignored < 0 and each.dim() == 1
        if label.is_floating_point() or (plain and int(label.min()) >= 0):
            return each if each.dim() == 1 else each.flatten(1).mean(1), None
        counted = label != ignored  # torch's mean leaves these labels out, and weighs the others
        if weight is not None:
            counted = counted * weight[label.where(counted, 0)]
        return each.reshape(len(each), -1).sum(1), counted.reshape(len(each), -1).sum(1)

    if is_mean_cross_entropy(loss):
        return partial(cross_entropy, loss if isinstance(loss, nn.CrossEntropyLoss) else nn.CrossEntropyLoss())
    return known if loss in MEANS else by_vmap


class Together:
    """Trains chunks of trips with one copy of the model, whose layers were replaced by twins."""

    def __init__(self, task: Task, sgd: LocalSGD, seed: int, flat: Flat, device: torch.device, low: bool = False) -> None:
        self.task, self.sgd, self.seed, self.flat, self.device, self.low = task, sgd, seed, flat, device, low
        flat.buffers.reset()
        self.module, self.current = twin_of(flat, device)
        self.module.train()
        self.loss, self.own = row_losses(task.loss), not is_known(task.loss)
        self.dtype = flat.weights().dtype
        self.buffers = Buffers(self.module)
        sizes = [p.numel() for p in flat.parameters.values()]
        self.parameters = list(zip(accumulate(sizes[:-1], initial=0), sizes, strict=True))  # offset, size
        self.current.plain = not self.takes_channels_last()
        self.whole = whole_trips(task, sgd, seed, flat, low) if device.type == "cpu" else None

    def __call__(self, jobs: Sequence[Job], out: Matrix | None = None) -> Matrix:
        """The updates of the jobs, row by row; the same for the same chunk in any process."""
        updates = room_for(jobs, self.flat) if out is None else out
        self.into(updates, range(len(jobs)), jobs)
        return updates

    def into(self, updates: Matrix, rows: Sequence[int], jobs: Sequence[Job]) -> None:
        """Write the updates of the jobs into these rows."""
        if self.whole is not None and jobs and self.whole.into(updates, rows, *map(list, zip(*jobs, strict=True))):
            return
        # our kernels write to where updates belong; torch's products would, but round by where that is (modulo 16 bytes)
        mine = updates.dtype == self.dtype and updates.strides[1] == updates.itemsize and self.device.type == "cpu"
        mine = mine and usable(self.flat.vector) is not None
        versions = {id(job.weights): None for job in jobs}
        rank = {version: number for number, version in enumerate(versions)}
        examples = [self.examples(job.client) for job in jobs]
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(kind_of(*both) for both in examples))}
        kind = [kinds[kind_of(*both)] for both in examples]
        by_version = sorted(range(len(jobs)), key=lambda i: (kind[i], rank[id(jobs[i].weights)]))
        plans = (
            all_batches(
                self.seed, [job.client for job in jobs], [job.trip for job in jobs], [len(y) for _, y in examples], self.sgd
            )
            if jobs
            else []
        )
        for part in split(by_version, [len(plan[0]) for plan in plans], kind):
            batch = Batch([jobs[i] for i in part], [examples[i] for i in part], [plans[i] for i in part])
            places = [rows[i] for i in part]
            if mine and self.at_once(batch):
                self.together(batch, torch.from_numpy(updates), places)
            else:
                found = torch.empty(len(part), len(self.flat.vector), dtype=self.flat.vector.dtype, device=self.device)
                self.together(batch, found, range(len(part)))
                updates[places] = found.cpu().numpy()

    def outputs(self, weights: Vector, x: Tensor) -> Tensor:
        """What the model with these weights says of rows, as in evaluation: without dropout, in full precision."""
        w = torch.from_numpy(np.array(weights)[None]).to(self.device)
        self.module.eval()
        try:
            with torch.no_grad():
                return torch.cat([self.look_at(w, part.to(self.device)) for part in torch.split(x, _ROWS)]).cpu()
        finally:
            self.module.train()

    def look_at(self, w: Tensor, x: Tensor) -> Tensor:
        self.buffers.reset()
        everyone = [(0, len(x))]
        self.current.step = LocalStep(everyone, everyone, w, w, numbers([0]), Draws([0], self.device), [0], len(x))
        return of_rows(self.module(x))

    def takes_channels_last(self) -> bool:
        """Whether the model's own code can do with channels-last images.

        x.view(len(x), -1) can't, and dropout of a part of them, or of x.flatten(2), would draw its masks in another order.
        """
        if not any(isinstance(part, ConvTwin) for part in self.module.modules()):
            return True
        w, x = self.flat.vector.detach()[None].to(self.device), self.joined([self.examples(0)[0][:1]])
        orders = []
        with torch.no_grad(), default_generator():
            for plain in (True, False):
                self.current.plain = plain
                try:
                    self.look_at(w, x)
                except (RuntimeError, ValueError):
                    return False
                orders.append(self.current.step.draws.orders)
        return orders[0] == orders[1]

    def examples(self, client: int) -> tuple[Rows, Rows]:
        x, y = self.task.clients[client]
        return x if isinstance(x, Tensor) else np.asarray(x), y if isinstance(y, Tensor) else np.asarray(y)

    def joined(self, parts: list[Rows]) -> Tensor:
        """One tensor of several clients' rows, of one kind. A tensor for each of them would take longer than to copy them."""
        both = torch.cat(parts).detach() if isinstance(parts[0], Tensor) else torch.from_numpy(np.concatenate(parts))  # type: ignore[arg-type]
        return cast(both, like=self.flat.vector).to(self.device)

    def at_once(self, batch: "Batch") -> bool:
        """Whether these trips' updates are gradients, so that these can be written to where updates belong."""
        return not self.sgd.momentum and not self.sgd.weight_decay and all(len(plan) == 1 for plan in batch.plans)

    def together(self, batch: "Batch", update: Tensor, places: Sequence[int]) -> None:
        """Δ for trips sorted by version: into these rows of `update`, which must be all it has unless `at_once`."""
        sgd, count = self.sgd, len(batch.jobs)
        versions, version_of, groups = batch.versions()
        w = torch.from_numpy(np.stack(versions)).to(self.device)
        of = torch.tensor(version_of, device=self.device)
        seeds = dropout_seeds(self.seed, [job.client for job in batch.jobs], [job.trip for job in batch.jobs])
        draws = Draws(seeds, self.device)
        self.buffers.reset()
        # without momentum the learning rate goes into the loss, and gradients are steps already
        folded = not sgd.momentum
        velocity = w.new_zeros(0)
        for q in range(max(len(plan) for plan in batch.plans)):
            active = [j for j in range(count) if q < len(batch.plans[j])]
            which = torch.tensor(active, device=self.device)
            sizes = [len(batch.plans[j][q]) for j in active]
            lr = torch.tensor(
                [sgd.lr * n / sgd.batch_size if sgd.lr_norm else sgd.lr for n in sizes], device=self.device, dtype=w.dtype
            )
            scale = lr if folded else torch.ones_like(lr)
            ends = [0, *accumulate(sizes)]
            clients = list(pairwise(ends))
            if q == 0:
                y, shared = w, [(clients[a][0], clients[b - 1][1]) for a, b in groups]
                gradient, where = update, numbers(places)
            else:
                y, shared = w[of[which]] - update[which], clients
                gradient, where = torch.empty_like(y), numbers(range(len(active)))
            step = LocalStep(clients, shared, y, gradient, where, draws, active, ends[-1], self.low)
            x, label = (self.joined(parts) for parts in batch.rows(active, q))
            self.gradients(step, x, label, scale, sizes)
            if sgd.weight_decay:
                gradient.add_((y[of] if q == 0 else y) * scale[:, None], alpha=sgd.weight_decay)
            if sgd.proximal and q > 0:
                gradient.sub_(update[which] * scale[:, None], alpha=sgd.proximal)
            if not folded:
                if q == 0:
                    velocity = gradient.clone()
                else:
                    velocity[which] = velocity[which].mul_(sgd.momentum).add_(gradient)
                gradient.copy_(velocity[which]).mul_(lr[:, None])
            if q > 0:
                update.index_add_(0, which, gradient)

    def gradients(self, step: LocalStep, x: Tensor, label: Tensor, scale: Tensor, sizes: list[int]) -> None:
        """Fill the step's gradient with that of each client's mean loss, times its scale."""
        self.current.step = step
        n, output = torch.tensor(sizes, device=self.device), of_rows(self.module(x))
        if self.own and not label.is_floating_point() and int(label.min()) < 0:
            # labels below 0 may be left out of the mean, and a loss of one's own does not say so: client by client
            pairs = zip(torch.split(output, sizes), torch.split(label, sizes), strict=True)
            losses = torch.stack([self.task.loss(*pair) for pair in pairs]) * scale
        else:
            each, counted = self.loss(output, label)
            total = n if counted is None else torch.stack([part.sum() for part in torch.split(counted, sizes)])
            losses = each * (scale / total).repeat_interleave(n, output_size=len(label))
        losses.sum().backward()  # type: ignore[no-untyped-call]
        del self.current.step  # as large as all of these updates
        for offset, size in self.parameters:
            if offset not in step.written:
                step.gradient[list(step.places), offset : offset + size] = 0


def of_rows(output: Tensor) -> Tensor:
    """What a model said of some rows; one that ends in squeeze() says a single number of a single row."""
    return output[None] if isinstance(output, Tensor) and output.dim() == 0 else output


class Batch:
    """Some jobs, sorted by version, with their examples and the plan of their local steps."""

    def __init__(self, jobs: list[Job], examples: list[tuple[Rows, Rows]], plans: list[list[Indices]]) -> None:
        self.jobs, self.examples, self.plans = jobs, examples, plans

    def versions(self) -> tuple[list[Vector], list[int], list[tuple[int, int]]]:
        """The versions in order, the number of each job's version, and the range of jobs of each version."""
        versions: list[Vector] = []
        of: list[int] = []
        for job in self.jobs:
            if not versions or versions[-1] is not job.weights:
                versions.append(job.weights)
            of.append(len(versions) - 1)
        starts = [of.index(v) for v in range(len(versions))]
        return versions, of, list(pairwise([*starts, len(of)]))

    def rows(self, active: list[int], q: int) -> tuple[list[Rows], list[Rows]]:
        """Inputs and labels of local step q, client by client."""
        picked = [(*self.examples[j], self.plans[j][q]) for j in active]
        return [x[i] for x, _, i in picked], [y[i] for _, y, i in picked]


def kind_of(x: Rows, y: Rows) -> tuple[Any, ...]:
    """The shape and type of an example: those of one batch have the same."""
    return tuple(x.shape[1:]), x.dtype, tuple(y.shape[1:]), y.dtype


def split(order: list[int], rows: list[int], kind: list[int]) -> list[list[int]]:
    """The jobs in parts of one kind, and of at most _ROWS rows or one job."""
    parts: list[list[int]] = []
    room = 0
    for i in order:
        if not parts or rows[i] > room or kind[i] != kind[parts[-1][-1]]:
            parts.append([])
            room = _ROWS
        parts[-1].append(i)
        room -= rows[i]
    return parts
