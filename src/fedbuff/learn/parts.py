"""Parts of a dataset, one for each client or split: what all of them must have in common."""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

Part = tuple[str, NDArray[Any], NDArray[Any]]  # where it is from, for error messages; inputs and labels

_CLASSES = 100_000  # are believed, however few the examples: a vocabulary may have so many words


def check_inputs(parts: Sequence[Part]) -> None:
    """Inputs are finite, and of one shape."""
    first, expected = parts[0][0], parts[0][1].shape[1:]
    for where, x, _ in parts:
        if x.shape[1:] != expected:
            raise ValueError(f"{where}: expected inputs of shape {expected} as in {first}, found {x.shape[1:]}")
        if not np.isfinite(x).all():
            raise ValueError(f"{where}: expected inputs that are finite in float32, found {x[~np.isfinite(x)][0]}")


def count_classes(parts: Sequence[Part]) -> int:
    """One more than the largest label."""
    where, largest = max(((where, int(y.max())) for where, _, y in parts), key=itemgetter(1))
    examples = sum(len(y) for _, _, y in parts)
    if largest >= max(examples, _CLASSES):
        raise ValueError(
            f"{where}: label {largest} would make {largest + 1:,} classes for {examples:,} examples; "
            "number the classes anew, 0, 1, 2, …"
        )
    return 1 + largest
