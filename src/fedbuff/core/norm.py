"""The length of an update, as clipping needs it: exact enough, and never wrong about what is not finite."""

import math

import numpy as np

from fedbuff.core.versions import Vector


def norm(update: Vector) -> float:
    """The L2 norm over the whole update, added up in float64; not finite if anything in it is not."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # not np.dot, which starts threads for vectors of this size, and they wait for one another on a busy machine
        square = float(np.einsum("i,i->", update, update, dtype=np.float64))
        if 1e-280 < square < math.inf or not len(update):
            return math.sqrt(square)
        x = update.astype(np.float64, copy=False)
        largest = float(np.abs(x).max())  # squares that over- or underflow, unless it is all zeros or not finite
        return largest * math.sqrt(float(np.sum((x / largest) ** 2))) if 0.0 < largest < math.inf else largest
