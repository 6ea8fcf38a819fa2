"""What torch does slowly for rows of many clients, in C++: float32, one thread. Here it is called, with tensors.

With `low`, the factors of products are rounded to bfloat16; what goes in and comes out is float32 all the same.

Every function has a twin in plain torch that the tests compare it with.

Without a compiler, or with FEDBUFF_KERNELS=off, `library()` is None and callers go through torch: slower, and equal up
to rounding (with bfloat16, to that of sums as well).
"""

import contextlib
import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedbuff.compiled import load
from fedbuff.learn.kernels.room import room

SOURCE = Path(__file__).parent
# nothing here may assume finite numbers: a diverged client must be seen to
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno")

# for each function, its arguments
_FUNCTIONS = {
    "convolve": "ppppipiipii",
    "convolution_weights": "pppippiipi",
    "norm_pool": "pppppppipipi",
    "norm_pool_back": "ppppppppppipipi",
    "lstm": "ppppppppipiiiiiiiiii",
    "lstm_back": "ppppppipiiiiiii",
    "lstm_weights": "pppippiiiiiiiiii",
    "outer_products": "pppippiiiii",
    "client_sums": "ppippiii",
    "low_linear": "ppppipiiiii",
    "seed_twisters": "ppi",
    "draw_masks": "pppipiid",
    "train_trips": "ipppppppiuippp->i",
    "train_words": "ipppppppiuuppi->i",
}

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None, having said why on stderr once."""
    return load(SOURCE, FLAGS, _FUNCTIONS, "training goes through torch")


def tune_allocator() -> None:
    """Let malloc keep what it freed: a step's activations otherwise cost as much in page faults as in arithmetic.

    For processes that train; it makes them hold on to memory. Nothing happens where malloc is not glibc's.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    _ = mallopt(_M_MMAP_THRESHOLD, 1 << 30) or mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # the most that an older glibc takes
    mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def trim_allocator() -> None:
    """Return what malloc kept to the system, once: it would be copied into worker processes, though nobody uses it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Shape(ctypes.Structure):
    """A convolution: input, output, kernel, stride, padding, dilation."""

    _fields_ = [
        (name, ctypes.c_int64) for name in ["h", "w", "c", "oh", "ow", "oc", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw"]
    ]


class Norm(ctypes.Structure):
    """A group norm of channels-last images."""

    _fields_ = [*((name, ctypes.c_int64) for name in ["h", "w", "c", "groups"]), ("eps", ctypes.c_float)]


class Sgd(ctypes.Structure):
    """LocalSGD, as the kernels want it."""

    _fields_ = [
        *((name, ctypes.c_float) for name in ["lr", "momentum", "weight_decay", "proximal"]),
        *((name, ctypes.c_int64) for name in ["batch_size", "epochs", "steps", "lr_norm"]),
    ]


class Words(ctypes.Structure):
    """The paper's network for text, see words.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ["words", "features", "time", "hidden", "layers", "width", "classes"]),
        ("vectors", ctypes.c_void_p),
        ("keep", ctypes.c_double),
    ]


Ranges = Sequence[tuple[int, int]]
Numbers = ctypes.Array[ctypes.c_int64]


class Into(NamedTuple):
    """Where gradients go: the i-th client's to rows[places[i]], which it overwrites (β = 0) or adds to (β = 1)."""

    rows: Tensor
    places: Numbers
    beta: int

    def each(self) -> list[Tensor]:
        return [self.rows[place] for place in self.places]


def numbers(values: Sequence[int]) -> Numbers:
    return (ctypes.c_int64 * len(values))(*values)


def usable(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernels, if they are there and these are tensors for them."""
    fits = all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    return library() if fits else None


def needed() -> ctypes.CDLL:
    """The kernels, that are known to be there."""
    kernels = library()
    assert kernels is not None
    return kernels


def ends(ranges: Ranges) -> Numbers:
    """Where each of some adjacent ranges ends."""
    return numbers([b for _, b in ranges])


def channels_last(x: Tensor) -> Tensor:
    if x.is_contiguous(memory_format=torch.channels_last) or usable(x) is None:
        return x.contiguous(memory_format=torch.channels_last)
    return room(*x.shape, memory_format=torch.channels_last).copy_(x)


def convolve(
    kernels: ctypes.CDLL,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    groups: Ranges,
    shape: Shape,
    *,
    flipped: bool = False,
    low: bool = False,
) -> Tensor:
    """Each group's rows convolved with its own w [group, …] and b [group, …]; images are channels-last, as the result is."""
    y = room(len(x), shape.oc, shape.oh, shape.ow, memory_format=torch.channels_last)
    kernels.convolve(
        x.data_ptr(), w.data_ptr(), None if b is None else b.data_ptr(), y.data_ptr(), len(groups), ends(groups),
        w.stride(0), 0 if b is None else b.stride(0), ctypes.byref(shape), int(flipped), int(low),
    )  # fmt: skip
    return y


def convolution_weights(
    kernels: ctypes.CDLL, x: Tensor, dy: Tensor, into: Into, clients: Ranges, shape: Shape, low: bool = False
) -> None:
    """For each client the gradient of a convolution's weights over its rows."""
    kernels.convolution_weights(
        x.data_ptr(), dy.data_ptr(), into.rows.data_ptr(), len(clients), ends(clients), into.places, into.rows.stride(0),
        into.beta, ctypes.byref(shape), int(low),
    )  # fmt: skip


def norm_pool(
    kernels: ctypes.CDLL, x: Tensor, gamma: Tensor | None, beta: Tensor | None, groups: Ranges, norm: Norm, pool: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Group norm, ReLU and max pool of channels-last images: y (channels first), mean, 1/σ, and where each maximum was."""
    n, c = len(x), x.shape[1]
    if gamma is not None and beta is not None and gamma.stride(0) != beta.stride(0):  # one of them is frozen
        gamma, beta = gamma.contiguous(), beta.contiguous()
    y = room(n, c, x.shape[2] // pool, x.shape[3] // pool)
    mean, rstd, where = room(n, c), room(n, c), room(y.numel(), dtype=torch.uint8)
    kernels.norm_pool(
        x.data_ptr(), None if gamma is None else gamma.data_ptr(), None if beta is None else beta.data_ptr(), y.data_ptr(),
        mean.data_ptr(), rstd.data_ptr(), where.data_ptr(), len(groups), ends(groups), 0 if gamma is None else gamma.stride(0),
        ctypes.byref(norm), pool,
    )  # fmt: skip
    return y, mean, rstd, where


def norm_pool_back(
    kernels: ctypes.CDLL, x: Tensor, dy: Tensor, saved: tuple[Tensor, Tensor, Tensor], gamma: Tensor | None, groups: Ranges,
    norm: Norm, pool: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, and for each row and channel dγ, dβ and Σ dx."""
    mean, rstd, where = saved
    dx = room(*x.shape, memory_format=torch.channels_last)
    dgamma, dbeta, dsum = torch.empty_like(mean), torch.empty_like(mean), torch.empty_like(mean)
    kernels.norm_pool_back(
        x.data_ptr(), dy.data_ptr(), where.data_ptr(), None if gamma is None else gamma.data_ptr(), mean.data_ptr(),
        rstd.data_ptr(), dx.data_ptr(), dgamma.data_ptr(), dbeta.data_ptr(), dsum.data_ptr(), len(groups), ends(groups),
        0 if gamma is None else gamma.stride(0), ctypes.byref(norm), pool,
    )  # fmt: skip
    return dx, dgamma, dbeta, dsum


def lstm(
    kernels: ctypes.CDLL,
    x: Tensor,
    w_in: Tensor,
    w: Tensor,
    b: Tensor | None,
    groups: Ranges,
    backwards: bool,
    time_first: bool,
    low: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All h, the gates, c and tanh c, each [rows, time, …]; h lies time first in memory, if wished."""
    rows, time, features = x.shape
    hidden = w.shape[2]
    gates = room(rows, time, 4 * hidden)
    c, tanh_c = room(rows, time, hidden), room(rows, time, hidden)
    h = room(time, rows, hidden).transpose(0, 1) if time_first else room(rows, time, hidden)
    kernels.lstm(
        x.data_ptr(), w_in.data_ptr(), gates.data_ptr(), w.data_ptr(), None if b is None else b.data_ptr(), h.data_ptr(),
        c.data_ptr(), tanh_c.data_ptr(), len(groups), ends(groups), w_in.stride(0), w.stride(0),
        0 if b is None else b.stride(0), time, features, hidden, int(backwards), h.stride(0), h.stride(1), int(low),
    )  # fmt: skip
    return h, gates, c, tanh_c


def lstm_back(
    kernels: ctypes.CDLL, gates: Tensor, w: Tensor, c: Tensor, tanh_c: Tensor, dh: Tensor, dc: Tensor, groups: Ranges,
    backwards: bool, low: bool = False,
) -> None:  # fmt: skip
    """Put into the place of the gates the gradients of what they were made of; dc, that of the last state, is used up."""
    _rows, time, four = gates.shape
    kernels.lstm_back(
        gates.data_ptr(), w.data_ptr(), c.data_ptr(), tanh_c.data_ptr(), dh.data_ptr(), dc.data_ptr(), len(groups),
        ends(groups), w.stride(0), time, four // 4, int(backwards), dh.stride(0), dh.stride(1), int(low),
    )  # fmt: skip


def lstm_weights(
    kernels: ctypes.CDLL, dgates: Tensor, x: Tensor, into: Into, clients: Ranges, backwards: bool, before: bool,
    low: bool = False,
) -> None:  # fmt: skip
    """For each client the gradient of weights that saw x [rows, time, …], or with `before` what x was a step earlier."""
    time, four = dgates.shape[1:]
    kernels.lstm_weights(
        dgates.data_ptr(), x.data_ptr(), into.rows.data_ptr(), len(clients), ends(clients), into.places, into.rows.stride(0),
        into.beta, time, x.shape[2], four // 4, int(backwards), int(before), x.stride(0), x.stride(1), int(low),
    )  # fmt: skip


def outer_products(kernels: ctypes.CDLL, a: Tensor, b: Tensor, into: Into, clients: Ranges, low: bool = False) -> None:
    """For each client aᵀ b over its rows."""
    a, b = a.contiguous(), b.contiguous()
    kernels.outer_products(
        a.data_ptr(), b.data_ptr(), into.rows.data_ptr(), len(clients), ends(clients), into.places, into.rows.stride(0),
        a.shape[1], b.shape[1], into.beta, int(low),
    )  # fmt: skip


def low_linear(kernels: ctypes.CDLL, x: Tensor, w: Tensor, b: Tensor | None, groups: Ranges) -> Tensor:
    """Each group's rows of x times its own wᵀ, plus b, with products of bfloat16; w is [group, out, in], or such a view."""
    x, turned = x.contiguous(), w.stride(2) == 1
    if not turned and w.stride(1) != 1:
        w, turned = w.contiguous(), True
    y = room(len(x), w.shape[1])
    kernels.low_linear(
        x.data_ptr(), w.data_ptr(), None if b is None else b.data_ptr(), y.data_ptr(), len(groups), ends(groups), x.shape[1],
        w.shape[1], w.stride(0), 0 if b is None else b.stride(0), int(turned),
    )  # fmt: skip
    return y


def client_sums(kernels: ctypes.CDLL, values: Tensor, into: Into, clients: Ranges) -> None:
    """For each client Σ values over its rows."""
    values = values.contiguous()
    kernels.client_sums(
        values.data_ptr(), into.rows.data_ptr(), len(clients), ends(clients), into.places, into.rows.stride(0),
        values.numel() // len(values), into.beta,
    )  # fmt: skip


class Twisters:
    """torch's generators of some clients, rebuilt: the same masks, several times faster."""

    def __init__(self, kernels: ctypes.CDLL, seeds: Sequence[int]) -> None:
        self.kernels = kernels
        self.states = torch.empty(len(seeds), 624 + 1, dtype=torch.int64)
        kernels.seed_twisters(self.states.data_ptr(), numbers(seeds), len(seeds))

    def draw(self, like: Tensor, keep: float, whose: Sequence[int], clients: Ranges, time_first: bool) -> Tensor:
        """1/keep with probability `keep`, else 0; with `time_first` as if `like`, [rows, time, …], were [time, rows, …].

        The rows of the i-th range are drawn by the twister whose[i].
        """
        mask = room(*like.shape)
        time = like.shape[1] if time_first else 0
        size = mask.numel() // len(mask)
        self.kernels.draw_masks(
            self.states.data_ptr(), numbers(whose), mask.data_ptr(), len(clients), ends(clients), size, time, keep
        )  # fmt: skip
        return mask


def twisters_agree() -> bool:
    """Whether torch still draws its masks as we do."""
    kernels = library()
    return kernels is not None and _draw_as_torch(kernels)


@cache
def _draw_as_torch(kernels: ctypes.CDLL) -> bool:
    expected = room(1000).bernoulli_(0.3, generator=torch.Generator().manual_seed(12345678901234567))
    found = Twisters(kernels, [12345678901234567]).draw(expected[:, None], 0.3, [0], [(0, 1000)], time_first=False)
    return torch.equal(found[:, 0] != 0, expected != 0)
