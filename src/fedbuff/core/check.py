"""Argument checks: the keyword is the name in the message, `buffer_size=0: expected an integer >= 1`."""

import dataclasses
import math
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


def integer(at_least: int, /, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
            raise ValueError(f"{name}={value!r}: expected an integer >= {at_least}")


def number(low: float, high: float = math.inf, /, *, above: bool = False, below: bool = False, **values: Any) -> None:
    """Finite, `low <= value <= high`; `low < value` with `above`, `value < high` with `below`."""
    for name, value in values.items():
        real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not real or not (low < value if above else low <= value) or not (value < high if below else value <= high):
            bounds = [f"{'>' if above else '>='} {low:g}"] if math.isfinite(low) else []
            bounds += [f"{'<' if below else '<='} {high:g}"] if math.isfinite(high) else []
            endless = not bounds or (isinstance(value, Real) and math.isinf(value))
            kind = "finite number" if endless else "number"
            raise ValueError(f"{name}={value!r}: expected a {' '.join([kind, ' and '.join(bounds)]).strip()}")


def one_of(allowed: tuple[str, ...], /, **values: Any) -> None:
    for name, value in values.items():
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def fits(fit: bool, expected: str, /, **values: Any) -> None:
    """For what is neither a number nor a word: `until=100: expected …`."""
    for name, value in values.items():
        if not fit:
            raise ValueError(f"{name}={value!r}: expected {expected}")


def plain(part: T) -> T:
    """A frozen dataclass with its numpy numbers as Python's own: those can be written down, and don't promote float32."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    changed = {name: v.item() if isinstance(v, np.generic) else plain(v) for name, v in values.items()}
    return dataclasses.replace(part, **changed) if any(changed[name] is not values[name] for name in values) else part
