"""LEAF's JSON folders: `train/*.json` and `test/*.json`, each with "users" and "user_data": {user: {"x": …, "y": …}}."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.folder import listing, one_line

Part = tuple[str, NDArray[Any], NDArray[Any]]  # where it is from, for error messages; inputs and labels


def read_split(folder: Path) -> list[Part]:
    """The examples of every user that has any, in order of the JSON files' names."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{folder}: expected LEAF's JSON files, found {listing(folder)}")
    listed: dict[str, Path] = {}
    parts = []
    for file in files:
        for user, held in _read_users(file):
            where = f"{file}: user {user!r}"
            if user in listed:
                raise ValueError(f"{where} is listed in {listed[user].name} already; expected every user once")
            listed[user] = file
            x, y = _read_examples(held, where)
            if len(y):
                parts.append((where, x, y))
    if not parts:
        raise ValueError(f"{folder}: expected users with examples, found none in {listing(folder)}")
    return parts


def _read_users(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{file}: not readable as JSON: {e}") from e
    match data:
        case {"users": list(users), "user_data": dict(held)}:
            for user in users:
                if not isinstance(user, str) or user not in held:
                    raise ValueError(f"{file}: not a LEAF file: user_data has nothing for {one_line(user)}, one of its users")
                yield user, held[user]
        case _:
            raise ValueError(
                f"{file}: not a LEAF file: expected a list of users, and user_data with x and y, found {_kind(data)}"
            )


def _read_examples(held: Any, where: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if not isinstance(held, dict) or not held.keys() >= {"x", "y"}:
        raise ValueError(f"{where}: not a LEAF file: expected x and y, found {_kind(held)}")
    try:
        with np.errstate(over="ignore"):  # what float32 can't hold becomes infinite, and is refused as such
            x = np.asarray(held["x"]).astype(np.float32)
        y = np.asarray(held["y"]).astype(np.float64)
    except (TypeError, ValueError, OverflowError) as e:
        raise ValueError(f"{where}: x and y must be numbers, the same shape for every example ({one_line(e)})") from e
    if y.ndim != 1 or x.shape[:1] != y.shape:
        raise ValueError(f"{where}: expected a label for each input, found x of shape {x.shape} and y of shape {y.shape}")
    whole = (y == np.floor(y)) & (y >= 0) & (y < 2**53)  # from there on float64 leaves numbers out
    if not whole.all():
        raise ValueError(f"{where}: expected the numbers of classes, 0, 1, 2, …, as labels, found {y[~whole][0]:g}")
    return x, y.astype(np.int64)


def _kind(found: Any) -> str:
    """What JSON holds instead of what was expected."""
    if not isinstance(found, dict) or not found:
        return type(found).__name__
    return one_line(", ".join(f"{name}: {type(value).__name__}" for name, value in found.items()))
