"""Timing models: how long a trip takes, from download to upload, in virtual time.

A timing model is any function `(rng, n) -> n durations`; those here also know their mean. Each trip draws anew;
`per_client` adds a fixed speed to every client, `per_example` makes durations proportional to the client's data.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check
from fedbuff.core.random import Draw, generator, unit
from fedbuff.core.staleness import constant
from fedbuff.sim.availability import windows

Durations = NDArray[np.float64]
_NORMAL = NormalDist()
_MOST_EXAMPLES = 1 << 53  # beyond it, integers are not exact as floats


@dataclass(frozen=True)
class half_normal:
    """|N(0, scale²)|: what the paper saw in production."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        check.number(0, above=True, scale=self.scale)

    @property
    def mean(self) -> float:
        return self.scale * math.sqrt(2 / math.pi)

    def __call__(self, rng: np.random.Generator, n: int) -> Durations:
        return np.abs(rng.normal(0.0, self.scale, n))


@dataclass(frozen=True)
class uniform:
    """Uniform between `low` and `high`."""

    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        check.number(0, low=self.low)
        check.number(self.low, above=True, high=self.high)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def __call__(self, rng: np.random.Generator, n: int) -> Durations:
        return rng.uniform(self.low, self.high, n)


@dataclass(frozen=True)
class exponential:
    """Exponential with this mean; `per_example(exponential(λ))` is the paper's straggler model, T_i ~ Exp(1 / (λ n_i))."""

    mean: float = 1.0

    def __post_init__(self) -> None:
        check.number(0, above=True, mean=self.mean)

    def __call__(self, rng: np.random.Generator, n: int) -> Durations:
        return rng.exponential(self.mean, n)


@dataclass(frozen=True)
class lognormal:
    """Log-normal: median · exp(sigma · N(0, 1))."""

    sigma: float = 1.0
    median: float = 1.0

    def __post_init__(self) -> None:
        check.number(0, 20, sigma=self.sigma)
        check.number(0, above=True, median=self.median)

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    def __call__(self, rng: np.random.Generator, n: int) -> Durations:
        return rng.lognormal(math.log(self.median), self.sigma, n)


@dataclass(frozen=True)
class pareto:
    """Pareto: never below `minimum`, P(longer than t) = (minimum / t)^shape. Its mean needs shape > 1."""

    shape: float = 3.0
    minimum: float = 1.0

    def __post_init__(self) -> None:
        check.number(1, above=True, shape=self.shape)
        check.number(0, above=True, minimum=self.minimum)

    @property
    def mean(self) -> float:
        return self.minimum * self.shape / (self.shape - 1)

    def __call__(self, rng: np.random.Generator, n: int) -> Durations:
        return self.minimum * (1.0 + rng.pareto(self.shape, n))


@dataclass(frozen=True)
class trace:
    """Durations drawn with replacement from a CSV file: its column `duration`, or its only column."""

    path: str

    def __post_init__(self) -> None:
        check.instance(str | PathLike, "the path of a CSV file", path=self.path)
        object.__setattr__(self, "_durations", _read_durations(Path(self.path)))

    @property
    def durations(self) -> Durations:
        return self.__dict__["_durations"]  # type: ignore[no-any-return]  # set above; the class is frozen

    @property
    def mean(self) -> float:
        return float(self.durations.mean())

    def __call__(self, rng: np.random.Generator, n: int) -> Durations:
        return rng.choice(self.durations, n)


def _read_durations(path: Path) -> Durations:
    try:
        rows = [row for row in csv.reader(path.read_text(encoding="utf-8").splitlines()) if row]
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"path={str(path)!r}: can't read the trace: {e}") from e
    header = [name.strip() for name in rows[0]] if rows else []
    named = "duration" in header
    column = header.index("duration") if named else 0
    if not named and len(header) > 1:
        raise ValueError(
            f"path={str(path)!r}: a trace with several columns needs one named 'duration', found {', '.join(header)}"
        )
    durations = []
    for line, row in enumerate(rows[1:] if named else rows, 2 if named else 1):
        try:
            durations.append(float(row[column]))
        except (IndexError, ValueError):
            raise ValueError(f"path={str(path)!r}: line {line}: expected a duration, got {','.join(row)!r}") from None
    if not durations or not np.isfinite(durations).all() or min(durations) < 0:
        raise ValueError(f"path={str(path)!r}: expected at least one duration, all finite and >= 0")
    return np.array(durations)


@dataclass(frozen=True)
class per_client:
    """`timing` with a fixed speed per client: its durations are multiplied by exp(spread · z), z ~ N(0, 1) once per client."""

    timing: "Plain | per_example"
    spread: float = 0.5

    def __post_init__(self) -> None:
        check_timing(self.timing)
        check.number(0, 20, spread=self.spread)

    def __call__(self, rng: np.random.Generator, n: int) -> Durations:
        return self.timing(rng, n)

    def factor(self, seed: int, client: int, examples: int) -> float:
        speed = math.exp(self.spread * _NORMAL.inv_cdf(unit(seed, "speed", client)))
        return speed * factor(self.timing, seed, client, examples)


@dataclass(frozen=True)
class per_example:
    """`timing` once per example: durations are multiplied by n_i, the number of examples the client holds."""

    timing: "Plain | per_client"

    def __post_init__(self) -> None:
        check_timing(self.timing)

    def __call__(self, rng: np.random.Generator, n: int) -> Durations:
        return self.timing(rng, n)

    def factor(self, seed: int, client: int, examples: int) -> float:
        return examples * factor(self.timing, seed, client, examples)


Plain = half_normal | uniform | exponential | lognormal | pareto | constant | trace
Timing = Plain | per_client | per_example


def check_timing(timing: Draw, availability: windows | None = None) -> None:
    """Refuse what is no timing model, and no hours of availability."""
    check.function(2, "how long trips take, e.g. fedbuff.half_normal(1.0)", timing=timing)
    expected = "when clients are there, e.g. fedbuff.windows(period=24.0, open=6.0), or None"
    check.instance(windows | None, expected, availability=availability)


def factor(timing: Draw, seed: int, client: int, examples: int) -> float:
    """What a draw of `timing` is multiplied by for this client; 1 for a model that treats all clients alike."""
    of_client: Any = getattr(timing, "factor", None)
    return 1.0 if of_client is None else float(of_client(seed, client, examples))


def mean_duration(timing: Draw, seed: int, clients: int, examples: "Sizes") -> float:
    """E[duration] of a trip by a random client: exact where the model knows its mean, else over 100,000 draws."""
    inner: Any = timing
    while isinstance(inner, per_client | per_example):
        inner = inner.timing
    mean = getattr(inner, "mean", None)
    if mean is None:
        mean = float(np.mean(inner(generator(seed, "mean duration"), 100_000)))
    return float(mean) * float(np.mean(some_factors(timing, seed, clients, examples)))


def some_factors(timing: Draw, seed: int, clients: int, examples: "Sizes") -> list[float]:
    """The factors of all clients, or of 10,000 of them."""
    if not hasattr(timing, "factor"):
        return [1.0]
    sample = range(clients) if clients <= 10_000 else generator(seed, "mean factor").integers(clients, size=10_000).tolist()
    return [factor(timing, seed, client, examples(client)) for client in sample]


class Sizes:
    """How many examples a client holds, by client; asked only for clients that take part."""

    def __init__(self, examples: Any = None) -> None:
        self._examples = examples
        self.asked = callable(examples)
        self.listed: list[int] | None = None if examples is None or self.asked else _listed(examples)

    def __call__(self, client: int) -> int:
        if self.listed is not None:
            return self.listed[client]
        return _count(self._examples(client), "examples({})", client) if self.asked else 1

    def fit(self, clients: int) -> None:
        """Refuse a list for other clients: the compiled plan would read beside it."""
        if self.listed is not None and len(self.listed) != clients:
            raise ValueError(f"examples: a list of {len(self.listed)} for {clients} clients; expected a number for each")


def _listed(examples: Any) -> list[int]:
    given = examples.tolist() if hasattr(examples, "tolist") else examples  # arrays and tensors, as numbers of Python's own
    listed = isinstance(given, Sequence) and not isinstance(given, str | bytes)
    check.fits(listed, "how many each client holds: a list, e.g. [20, 35, 8], or a function of the client", examples=examples)
    plain = all(type(n) is int and 1 <= n <= _MOST_EXAMPLES for n in given)  # a million of them are looked at in no time
    return list(given) if plain else [_count(n, "examples[{}]", client) for client, n in enumerate(given)]


def _count(n: Any, where: str, client: int) -> int:
    """`n`, which a user gave, as what it is expected to be."""
    if isinstance(n, bool) or not isinstance(n, Integral) or not 1 <= int(n) <= _MOST_EXAMPLES:
        raise ValueError(f"{where.format(client)}={check.shown(n)}: expected an integer >= 1, and not absurdly large")
    return int(n)
