"""Argument checks: the keyword is the name in the message, `buffer_size=0: expected an integer >= 1`."""

import math
from numbers import Integral, Real
from typing import Any


def integer(at_least: int, /, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
            raise ValueError(f"{name}={value!r}: expected an integer >= {at_least}")


def number(low: float, high: float = math.inf, /, *, above: bool = False, **values: Any) -> None:
    """Finite, `low <= value <= high`, or `low < value` with `above`."""
    for name, value in values.items():
        fits = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or not (low < value if above else low <= value) or value > high:
            sign = ">" if above else ">="
            bound = f" and <= {high:g}" if math.isfinite(high) else ""
            raise ValueError(f"{name}={value!r}: expected a number {sign} {low:g}{bound}")


def one_of(allowed: tuple[str, ...], /, **values: Any) -> None:
    for name, value in values.items():
        if value not in allowed:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, allowed))}")
