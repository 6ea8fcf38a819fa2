"""Argument checks: the keyword is the name in the message, `buffer_size=0: expected an integer >= 1`."""

import dataclasses
import inspect
import math
import reprlib
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")
_LONG = 100  # characters
_SHOWN = reprlib.Repr()  # does not look at all of a long list
_SHOWN.maxstring = _SHOWN.maxlong = _SHOWN.maxother = _LONG


MOST = 1 << 62  # more than anybody has of anything, and what 64 bits hold


def integer(at_least: int, at_most: float = math.inf, /, **values: Any) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or not at_least <= int(value) <= at_most:
            high = f" and <= {at_most:,}" if isinstance(value, Integral) and int(value) > at_most else ""
            raise ValueError(f"{name}={shown(value)}: expected an integer >= {at_least}{high}")


def switch(**values: Any) -> None:
    """True or False: any other object would count as True, the word "false" too."""
    instance(bool | np.bool_, "True or False", **values)


def number(low: float, high: float = math.inf, /, *, above: bool = False, below: bool = False, **values: Any) -> None:
    """Finite, `low <= value <= high`; `low < value` with `above`, `value < high` with `below`."""
    for name, value in values.items():
        real = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
        if not real or not (low < value if above else low <= value) or not (value < high if below else value <= high):
            bounds = [f"{'>' if above else '>='} {low:g}"] if math.isfinite(low) else []
            bounds += [f"{'<' if below else '<='} {high:g}"] if math.isfinite(high) else []
            endless = not bounds or (isinstance(value, Real) and math.isinf(value))
            kind = "finite number" if endless else "number"
            raise ValueError(f"{name}={shown(value)}: expected a {' '.join([kind, ' and '.join(bounds)]).strip()}")


def one_of(allowed: tuple[str, ...], /, **values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name}={shown(value)}: expected one of {', '.join(map(repr, allowed))}")


def fits(fit: bool, expected: str, /, **values: Any) -> None:
    """For what is neither a number nor a word: `until=100: expected …`."""
    for name, value in values.items():
        if not fit:
            raise ValueError(f"{name}={shown(value)}: expected {expected}")


def instance(kind: Any, expected: str, /, **values: Any) -> None:
    """An object of this class, or of one of these: `task=None: expected …`."""
    for name, value in values.items():
        fits(isinstance(value, kind), expected, **{name: value})


def able(method: str, expected: str, /, **values: Any) -> None:
    """An object with this method, whatever its class; the class itself is a mistake, `timing=half_normal` without brackets."""
    for name, value in values.items():
        fits(hasattr(value, method) and not isinstance(value, type), expected, **{name: value})


def function(count: int, expected: str, /, **values: Any) -> None:
    """A function of so many arguments, or an object that is called like one; its class, given by mistake, is refused."""
    able("__call__", expected, **values)
    takes(count, expected, **values)


def takes(count: int, expected: str, /, **values: Any) -> None:
    """What can be called with so many arguments, if it has a signature to tell by."""
    for name, value in values.items():
        fits(callable(value), expected, **{name: value})
        try:
            signature = inspect.signature(value, follow_wrapped=False)
        except (TypeError, ValueError):  # not every function has one
            continue
        try:
            signature.bind(*range(count))
        except TypeError as e:
            raise ValueError(
                f"{name}={shown(value)}: can't be called with {count or 'no'} arguments ({e}); expected {expected}"
            ) from e


def shown(value: Any) -> str:
    """What was given, in one line that ends; of a dataclass field by field, as one may hold a million clients."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (f"{f.name}={_SHOWN.repr(getattr(value, f.name))}" for f in dataclasses.fields(value))
        text = f"{type(value).__name__}({', '.join(parts)})"
    else:
        text = _SHOWN.repr(value)
    text = " ".join(line.strip() for line in text.splitlines())
    return text if len(text) <= _LONG else f"{text[:_LONG]}…"


def plain(part: T) -> T:
    """A frozen dataclass with its numpy numbers as Python's own: those can be written down, and don't promote float32."""
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    changed = {name: v.item() if isinstance(v, np.generic) else plain(v) for name, v in values.items()}
    return dataclasses.replace(part, **changed) if any(changed[name] is not values[name] for name in values) else part
