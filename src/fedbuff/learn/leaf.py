"""LEAF's JSON folders: `train/*.json` and `test/*.json`, each with "users" and "user_data": {user: {"x": …, "y": …}}."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.cache import New
from fedbuff.learn.folder import listing, one_line
from fedbuff.learn.parts import Part, check_inputs, count_classes

VERSION = 1  # of what `prepare` makes


def files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The JSON files of `train` and `test`; what is wrong with the first is said first."""
    train, test = (sorted((folder / split).glob("*.json")) for split in ("train", "test"))
    if lost := [path for path in (*train, *test) if not path.is_file()]:
        raise ValueError(f"{lost[0]}: no file; a link to nowhere, or a folder?")
    if train and not test:
        read_split(train)
    if not train or not test:
        absent = folder / ("test" if train else "train")
        raise ValueError(f"{absent}: expected LEAF's JSON files, found {listing(absent)}")
    return train, test


def prepare(train: list[Path], test: list[Path], new: New) -> None:
    """train_x, train_y, test_x and test_y, user by user; train_sizes and test_sizes, how many each has; classes."""
    splits = {"train": read_split(train), "test": read_split(test)}
    everything = [part for parts in splits.values() for part in parts]
    check_inputs(everything)
    new("classes", (1,), np.int64)[:] = count_classes(everything)
    for split, parts in splits.items():
        count, shape = sum(len(y) for _, _, y in parts), parts[0][1].shape[1:]
        np.concatenate([x for _, x, _ in parts], out=new(f"{split}_x", (count, *shape), np.float32))
        np.concatenate([y for _, _, y in parts], out=new(f"{split}_y", (count,), np.int64))
        new(f"{split}_sizes", (len(parts),), np.int64)[:] = [len(y) for _, _, y in parts]


def read_split(files: list[Path]) -> list[Part]:
    """The examples of every user that has any, file by file."""
    listed: dict[str, Path] = {}
    parts = []
    for file in files:
        for user, held, count in _read_users(file):
            where = f"{file}: user {user!r}"
            if user in listed:
                raise ValueError(f"{where} is listed in {listed[user].name} already; expected every user once")
            listed[user] = file
            x, y = _read_examples(held, where)
            if count is not None and (count != len(y) or isinstance(count, bool)):
                raise ValueError(f"{where}: expected {one_line(repr(count))} examples, as num_samples says, found {len(y)}")
            if len(y):
                parts.append((where, x, y))
    if not parts:
        folder = files[0].parent
        raise ValueError(f"{folder}: expected users with examples, found none in {listing(folder)}")
    return parts


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, whose keys may be there once: Python's own reader takes the last of them."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{one_line(twice)} is there twice")
    return found


def _read_users(file: Path) -> Iterator[tuple[str, Any, Any]]:
    """Name, examples, and how many they are if the file says so, of every user."""
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=_once)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{file}: not readable as JSON: {e}") from e
    match data:
        case {"users": list(users), "user_data": dict(held)}:
            counts = data.get("num_samples")
            if counts is not None and not (isinstance(counts, list) and len(counts) == len(users)):
                raise ValueError(f"{file}: not a LEAF file: expected num_samples for each of its {len(users)} users")
            for user in users:
                if not isinstance(user, str) or user not in held:
                    raise ValueError(f"{file}: not a LEAF file: user_data has nothing for {one_line(user)}, one of its users")
            if unlisted := held.keys() - set(users):
                raise ValueError(f"{file}: not a LEAF file: user_data has {one_line(min(unlisted))}, who is none of its users")
            for number, user in enumerate(users):
                yield user, held[user], counts and counts[number]
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
