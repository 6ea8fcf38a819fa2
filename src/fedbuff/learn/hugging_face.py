"""Hugging Face `datasets` as arrays: any object with `column_names`, `len`, and `with_format("numpy")[:]` as theirs have."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def from_disk(folder: str, argument: str) -> Any:
    try:
        import datasets
    except ImportError as e:
        raise ValueError("Hugging Face's folders are read by its library: pip install 'fedbuff[datasets]'") from e
    try:
        return datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError) as e:
        raise ValueError(f"{argument}={folder!r}: not a folder that Dataset.save_to_disk wrote ({e})") from e


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
    columns = dataset.with_format("numpy")[:]
    x, y = np.asarray(columns[inputs]), np.asarray(columns[label])
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "biu" or y.ndim != 1:
        kinds = f"{inputs} of {x.dtype} and {label} of {y.dtype}"
        raise ValueError(
            f"{where}: expected inputs of numbers, the same shape for every example, and whole labels, found {kinds}"
        )
    if y.min() < 0:
        raise ValueError(f"{where}: expected labels from 0 on, found {y.min()} in {label}")
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        x = (x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)) / 255
    return x.astype(np.float32), y.astype(np.int64)
