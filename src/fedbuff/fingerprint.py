"""What code a function is, in a few letters: a run must not go on with another one of the same name."""

import functools
import hashlib
import inspect
from types import CodeType
from typing import Any


def fingerprint(function: Any) -> str:
    """Eight hex digits of a function's code, its defaults and what it closes over; the globals it uses are not looked at.

    >>> fingerprint(lambda tau: 0.9**tau) == fingerprint(lambda tau: 0.9**tau)
    True
    >>> fingerprint(lambda tau: 0.9**tau) == fingerprint(lambda tau: 0.1**tau)
    False
    """
    return hashlib.sha256(repr(_parts(function, ())).encode()).hexdigest()[:8]


def _parts(value: Any, inside: tuple[int, ...]) -> Any:
    """A value as nested tuples whose text is the same in every process; `inside` are the ids of what it is a part of."""
    if id(value) in inside:  # a function that calls itself
        return "..."
    inside = (*inside, id(value))
    if isinstance(value, CodeType):
        return value.co_code.hex(), value.co_names, _parts(value.co_consts, inside)
    if inspect.isfunction(value):
        closed = tuple(cell.cell_contents for cell in value.__closure__ or ())
        return _parts((value.__code__, value.__defaults__, value.__kwdefaults__, closed), inside)
    if inspect.ismethod(value):
        return _parts((value.__func__, value.__self__), inside)
    if isinstance(value, functools.partial):
        return _parts((value.func, value.args, value.keywords), inside)
    if isinstance(value, tuple | list):
        return tuple(_parts(item, inside) for item in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(_parts(item, inside)) for item in value))
    if isinstance(value, dict):
        return tuple((repr(key), _parts(item, inside)) for key, item in value.items())
    if isinstance(value, type) or inspect.isroutine(value):
        return value.__qualname__
    if not repr(value).endswith(f" at {hex(id(value))}>"):  # where it lies in memory says nothing
        return repr(value)
    call = type(value).__call__ if callable(value) else None
    return type(value).__qualname__, _parts(call, inside), _parts(getattr(value, "__dict__", {}), inside)
