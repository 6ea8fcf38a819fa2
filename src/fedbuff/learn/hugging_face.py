"""Hugging Face `datasets` as arrays: any object with `column_names`, `len`, and `with_format("numpy")[:]` as theirs have."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.learn.folder import one_line
from fedbuff.learn.partition import by_key

_WHITE = {"u1": 255, "u2": 65_535, "i4": 65_535}  # the brightest that images of these numbers can be


def from_disk(folder: str, argument: str) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise ValueError("Hugging Face's folders are read by its library: pip install 'fedbuff[datasets]'") from e
    try:
        found = datasets.load_from_disk(folder)
    except IndexError as e:  # of a dataset without examples it writes no file of them
        raise ValueError(f"{argument}={folder!r}: holds no examples") from e
    except Exception as e:  # a damaged folder can raise nearly anything
        raise ValueError(f"{argument}={folder!r}: not a folder that Dataset.save_to_disk wrote ({one_line(e)})") from e
    if isinstance(found, Mapping):
        one = f"{folder}/{next(iter(found), '')}"
        raise ValueError(
            f"{argument}={folder!r}: holds several splits, {', '.join(found)}; name the folder of one, like {one!r}"
        )
    return found


def in_parts(train: Any) -> list[tuple[str, Any]]:
    """The datasets that `train` consists of, itself or one for each client, with their names for error messages."""
    if hasattr(train, "column_names") or isinstance(train, Mapping) or not isinstance(train, Iterable):
        return [("train", train)]
    parts = [(f"train[{i}]", part) for i, part in enumerate(train)]
    if not parts:
        raise ValueError("train: expected at least one partition, found none")
    return parts


def check_dataset(dataset: Any, where: str) -> None:
    if isinstance(dataset, Mapping):
        one = f"data[{next(iter(dataset), '')!r}]"
        raise ValueError(f"{where}: holds several splits, {', '.join(map(str, dataset))}; give one of them, like {one}")
    if not all(hasattr(dataset, name) for name in ("column_names", "with_format", "__len__")):
        found = type(dataset).__name__
        raise ValueError(f"{where}: expected a datasets.Dataset, loaded without streaming, found {found}")


def read(dataset: Any, where: str) -> Any:
    """All of its columns."""
    try:
        return dataset.with_format("numpy")[:]
    except Exception as e:  # images that are none, and whatever else decoding brings up
        raise ValueError(f"{where}: can't be read ({one_line(e)})") from e


def check_column(dataset: Any, by: str) -> None:
    if by not in dataset.column_names:
        raise ValueError(f"by={by!r}: no such column; there are {', '.join(dataset.column_names)}")


def by_column(dataset: Any, by: str) -> list[NDArray[np.int64]]:
    """Which examples belong to each value of the column."""
    keys = list(np.asarray(read(dataset, f"by={by!r}")[by]))
    if nobody := sum(key is None or (isinstance(key, float | np.floating) and bool(np.isnan(key))) for key in keys):
        raise ValueError(
            f"by={by!r}: {nobody:,} of {len(keys):,} examples have none (None or NaN); leave them out, or name somebody"
        )
    try:
        return by_key(keys)
    except TypeError as e:  # lists have no hash
        found = type(keys[0]).__name__
        raise ValueError(f"by={by!r}: expected a column with a number or a name for each example, found {found}") from e


def input_column(names: list[str], label: str, by: str | None) -> str:
    if label not in names:
        raise ValueError(f"label={label!r}: no such column; there are {', '.join(names)}")
    others = [name for name in names if name not in (label, by)]
    if len(others) != 1:
        raise ValueError(f"inputs: name one of the columns {', '.join(others)}")
    return others[0]


def columns(dataset: Any, inputs: str, label: str, where: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Inputs as floats, images with their channels first, and labels, of a dataset that is small enough for memory."""
    for name in (inputs, label):
        if name not in dataset.column_names:
            raise ValueError(f"{where}: no column {name!r}; there are {', '.join(dataset.column_names)}")
    if len(dataset) == 0:
        raise ValueError(f"{where}: holds no examples")
    columns = read(dataset, where)
    x, y = np.asarray(columns[inputs]), np.asarray(columns[label])
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "biu" or y.ndim != 1:
        kinds = f"{inputs} of {x.dtype} and {label} of {y.dtype}"
        raise ValueError(
            f"{where}: expected inputs of numbers, the same shape for every example, and whole labels, found {kinds}"
        )
    if y.min() < 0:
        raise ValueError(f"{where}: expected labels from 0 on, found {y.min()} in {label}")
    if x.ndim in (3, 4) and (x.dtype == np.uint8 or type(_feature(dataset, inputs)).__name__ == "Image"):
        x = (x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)) / _WHITE.get(x.dtype.str[1:], 1)
    return x.astype(np.float32), y.astype(np.int64)


def check_names(parts: Sequence[tuple[str, Any]], label: str) -> None:
    """Classes that have names have the same ones in all datasets, in the same order: labels are their numbers."""
    first, expected = "", None
    for where, dataset in parts:
        names = getattr(_feature(dataset, label), "names", None)
        if expected is None:
            first, expected = where, names
        elif names is not None and names != expected:
            raise ValueError(
                f"{where}: its classes are {_some(names)}, those of {first} {_some(expected)}; "
                f"give them the same numbers, e.g. by cast_column({label!r}, …features[{label!r}])"
            )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(str, names[:5])) + (" …" if len(names) > 5 else "")


def _feature(dataset: Any, column: str) -> Any:
    return (getattr(dataset, "features", None) or {}).get(column)
