"""Python arguments as TOML tables, and back: one shape for both, read off the signatures.

    optimizer=momentum(lr=1.0, beta=0.9)      optimizer.momentum = {lr = 1.0, beta = 0.9}

A value that is one of several kinds (a union of dataclasses) is a table with the kind's name as its only key; a kind
without arguments may be just its name. Mistakes raise `SettingsError`, one line with the key, the value, what is
allowed, and the nearest valid key.
"""

import dataclasses
import difflib
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

from fedbuff.fingerprint import fingerprint

Table = dict[str, Any]
PYTHON = "python: "  # what a user's own function is called in a file


class SettingsError(ValueError):
    """A setting that can't be used, in one line."""


# ── tables to objects ────────────────────────────────────────────────────────────────────────────────────────────────


def decode(make: Callable[..., Any], table: Any, path: str) -> Any:
    """Call `make` with the table's values as keyword arguments, each checked against its annotation."""
    arguments = decode_arguments(make, table, path)
    try:
        return make(**arguments)
    except ValueError as e:
        raise SettingsError(f"{path}.{e}" if path else str(e)) from e


def decode_arguments(make: Callable[..., Any], table: Any, path: str) -> Table:
    if not isinstance(table, dict):
        raise SettingsError(f"{path} = {show(table)}: expected a table with {_keys(make)}")
    kinds = typing.get_type_hints(getattr(make, "func", make))  # a functools.partial hides its annotations
    names = parameters(make)
    for key in table:
        if key not in names:
            raise SettingsError(f"{_join(path, key)} = {show(table[key])}: unknown key; {suggest(key, names, path)}")
    for name, parameter in names.items():
        if name not in table and parameter.default is inspect.Parameter.empty:
            raise SettingsError(f"{_join(path, name)}: missing; it is required here (allowed: {', '.join(names)})")
    return {key: decode_value(kinds[key], value, _join(path, key)) for key, value in table.items()}


def decode_value(kind: Any, value: Any, path: str) -> Any:
    origin, options = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        choices: dict[str, Callable[..., Any]] = {
            c.__name__: c for c in options if isinstance(c, type) and dataclasses.is_dataclass(c)
        }
        if choices:
            return decode_choice(choices, value, path)
        plain = [option for option in options if option is not type(None)]
        return decode_value(plain[0], value, path)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return decode(kind, value, path)
    if origin is Literal:
        return _expect(value in options, value, path, "one of " + ", ".join(map(show, options)))
    if origin is tuple:
        _expect(isinstance(value, list | tuple), value, path, "a list")
        return tuple(decode_value(options[0], item, path) for item in value)
    if origin is dict or kind is Any:
        return value
    if kind is bool:
        return _expect(isinstance(value, bool), value, path, "true or false")
    if kind is int:
        return _expect(isinstance(value, int) and not isinstance(value, bool), value, path, "an integer")
    if kind is float:
        return float(_expect(isinstance(value, int | float) and not isinstance(value, bool), value, path, "a number"))
    if kind is str:
        return _expect(isinstance(value, str), value, path, "a string")
    raise TypeError(f"{path}: fedbuff does not know how to read a {kind} from TOML")


def decode_choice(choices: Mapping[str, Callable[..., Any]], value: Any, path: str, call: bool = True) -> Any:
    """One of several kinds; with `call=False` checked, but left as (make, arguments)."""
    if isinstance(value, str):
        value = {value: {}}
    allowed = ", ".join(choices)
    if not isinstance(value, dict) or len(value) != 1:
        raise SettingsError(f"{path} = {show(value)}: choose one of {allowed}")
    ((name, table),) = value.items()
    if name.startswith(PYTHON):
        raise SettingsError(
            f"{path} = {show(name)}: a function of a Python program, which a file can't hold; run it from there"
        )
    if name not in choices:
        raise SettingsError(f"{path} = {show(name)}: unknown; {suggest(name, choices, path)}")
    make = choices[name]
    return decode(make, table, _join(path, name)) if call else (make, decode_arguments(make, table, _join(path, name)))


def suggest(key: str, allowed: Mapping[str, Any], path: str = "") -> str:
    near = difflib.get_close_matches(key, allowed, n=1, cutoff=0.6)
    listed = f"allowed: {', '.join(allowed)}"
    return f"did you mean {_join(path, near[0])}? ({listed})" if near else listed


def parameters(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(make).parameters)


def _expect(fits: bool, value: Any, path: str, what: str) -> Any:
    if not fits:
        raise SettingsError(f"{path} = {show(value)}: expected {what}")
    return value


def _keys(make: Callable[..., Any]) -> str:
    return ", ".join(parameters(make)) or "no keys"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


# ── objects to tables ────────────────────────────────────────────────────────────────────────────────────────────────


def encode(value: Any) -> Any:
    """A value as TOML can hold it: a dataclass as {its name: {field: …}}, None left out.

    A user's own function becomes the string "python: its name (its fingerprint)": true to say, though it can't be read back.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: fields_of(value)}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {key: encode(item) for key, item in value.items() if item is not None}
    return f"{PYTHON}{getattr(value, '__qualname__', type(value).__qualname__)} ({fingerprint(value)})"


def table_of(make: Callable[..., Any], arguments: Table) -> Table:
    """A call of `make` as a table: {its name: {argument: …}}, defaults included."""
    defaults = {name: p.default for name, p in parameters(make).items()}
    return {make.__name__: encode({**defaults, **arguments})}


def fields_of(value: Any) -> Table:
    """The fields of a dataclass as a table, None left out."""
    pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return {name: encode(field) for name, field in pairs if field is not None}


# ── tables to text ───────────────────────────────────────────────────────────────────────────────────────────────────


def dumps(table: Table) -> str:
    """A TOML document; top-level tables as [sections], what is inside them on dotted lines.

    >>> print(dumps({"seed": 0, "server": {"start": {"refill": {"concurrency": 9}}, "buffer_size": 3}}), end="")
    seed = 0
    <BLANKLINE>
    [server]
    start.refill.concurrency = 9
    buffer_size = 3
    """
    lines = [f"{_key(key)} = {show(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += ["", f"[{_key(key)}]", *(f"{path} = {text}" for path, text in dotted(value).items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def dotted(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A table's leaves by their dotted paths, as they stand in TOML.

    >>> dotted({"seed": 0, "server": {"optimizer": {"sgd": {"lr": 1.0}}}})
    {'seed': '0', 'server.optimizer.sgd.lr': '1.0'}
    """
    found: dict[str, str] = {}
    for key, value in table.items():
        inner = isinstance(value, Mapping) and value
        found |= dotted(value, f"{prefix}{_key(key)}.") if inner else {f"{prefix}{_key(key)}": show(value)}
    return found


def show(value: Any) -> str:
    """A value as it stands in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {show(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show, value)) + "]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _key(key: str) -> str:
    bare = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if bare else _quoted(key)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML forbids DEL, JSON does not
