"""Squared sensitivity of what a mechanism releases, in units of clip²: how far one client can move it, over all its steps.

A client takes part in at most k server steps, any two at least b apart. All its updates are at most `clip` long and at worst
point the same way, so the square is Σ_ij ⟨c_i, c_j⟩ over the steps i, j it takes part in, for the columns c of the strategy
matrix C: for the tree, c_i has a one for every completed node above leaf i.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedbuff.privacy.constants import BLT

Matrix = NDArray[np.float64]

_EXACT = 32  # up to this min_separation, and
_OFTEN = 8  # this many participations, the tree's is computed exactly
_MANY = 1000  # participations beyond which blt's are added up by running sums


def levels(steps: int) -> int:
    """Of a tree whose first `steps` leaves are filled: the most completed nodes above a leaf. Not ⌈log2⌉.

    >>> levels(65_535), levels(65_536), levels(66_012)
    (16, 17, 17)
    """
    return steps.bit_length()


def of_gaussian(steps: int, max_participations: int, min_separation: int = 1) -> float:
    return float(_times(steps, max_participations, min_separation))


def of_tree(steps: int, max_participations: int = 1, min_separation: int = 1) -> float:
    """The tree's, of all its nodes: what Honaker's averages release. Exact if b ≤ 32 and k ≤ 8 or k = 1, else a bound."""
    k = _times(steps, max_participations, min_separation)
    if k <= 1:
        return float(levels(steps) * k)
    if min_separation <= _EXACT and k <= _OFTEN:
        return _exact(steps, k, min_separation)
    return tree_bound(steps, k, min_separation)


def tree_bound(steps: int, times: int, min_separation: int) -> float:
    """Two leaves that are m apart have no common node on the first ⌈log2(m + 1)⌉ levels.

    So Σ_ij ≤ k h + 2 Σ_m (k − m) · (h − ⌈log2(m b + 1)⌉), since the i-th and the j-th time are at least |i − j| · b apart.
    """
    h = levels(steps)
    common = [max(0, h - (m * min_separation).bit_length()) for m in range(1, times)]
    return float(times * h + 2 * sum((times - m) * shared for m, shared in enumerate(common, 1)))


def of_blt(horizon: int, steps: int, max_participations: int = 1, min_separation: int = 1) -> float:
    """Of the first `steps` steps with the constants for `horizon`.

    The coefficients fall and are not negative, so the worst times are 0, b, 2b, … (Kalinin and Lampert, 2024).
    """
    c = coefficients(*constants(horizon), steps)
    if (c < 0).any() or (np.diff(c) > 0).any():
        raise ValueError(f"the blt constants for {horizon} steps do not fall from 1 to 0: their sensitivity is not known")
    times = _times(steps, max_participations, min_separation)
    moved = _moved(c, times, min_separation) if times <= _MANY else _moved_often(c, times, min_separation)
    return float(np.dot(moved, moved))


def _moved(c: Matrix, times: int, separation: int) -> Matrix:
    """How far a client that takes part in steps 0, b, 2b, … moves each of them."""
    moved = np.zeros_like(c)
    for i in range(times):
        moved[i * separation :] += c[: len(c) - i * separation]
    return moved


def _moved_often(c: Matrix, times: int, separation: int) -> Matrix:
    """The same by running sums, for many times."""
    rows = -(-len(c) // separation)
    by_rows = np.zeros((rows, separation))
    by_rows.ravel()[: len(c)] = c
    sums = np.cumsum(by_rows, axis=0)
    sums[times:] -= sums[: rows - times].copy()
    found: Matrix = sums.ravel()[: len(c)]
    return found


def constants(horizon: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Decay and weight of the buffers: those made for this horizon, or for the next longer one that there is."""
    fitting = [n for n in BLT if n >= horizon]
    if not fitting:
        raise ValueError(
            f"horizon={horizon}: there are blt constants for up to {max(BLT)} steps; set restart_every, or use a tree"
        )
    return BLT[min(fitting)]


def coefficients(decay: tuple[float, ...], weight: tuple[float, ...], steps: int) -> Matrix:
    """C's first column: c_0 = 1, c_i = Σ_j ω_j θ_j^(i−1)."""
    c = np.zeros(steps)
    for theta, omega in zip(decay, weight, strict=True):
        c[1:] += omega * theta ** np.arange(max(steps - 1, 0))
    c[:1] = 1.0
    return c


def of_restarts(one: list[list[float]], max_participations: int) -> float:
    """Several trees one after another share no node, so their squares add up: the worst way to share k times among them.

    `one[i][j]` is the square of tree i for j participations.
    """
    best = [0.0] * (max_participations + 1)
    for squares in one:
        most = len(squares) - 1  # more often makes no difference
        best = [max(best[k - j] + squares[j] for j in range(min(k, most) + 1)) for k in range(len(best))]
    return best[-1]


def _times(steps: int, max_participations: int, min_separation: int) -> int:
    """How often a client really can take part in so many steps."""
    return min(max_participations, -(-steps // min_separation))


# ── the tree, exactly ────────────────────────────────────────────────────────────────────────────────────────────────
#
# best[c, f, l]: the largest Σ (number of times below a node)² in a stretch of leaves of which c take part, with f free leaves
# before the first of them and l after the last; b − 1 or more are all the same. Equal subtrees are computed once.


def _exact(steps: int, times: int, separation: int) -> float:
    best: Matrix | None = None
    length = 0
    for level in reversed(range(steps.bit_length())):  # a forest of complete trees, the largest first
        if steps >> level & 1:
            tree = _complete(level, times, separation)
            best = tree if best is None else _beside(best, length, tree, 1 << level, separation)
            length += 1 << level
    assert best is not None
    return float(best[1:].max())


@cache
def _complete(level: int, times: int, separation: int) -> Matrix:
    if level == 0:
        leaf = np.full((times + 1, separation, separation), -np.inf)
        leaf[1, 0, 0] = 1.0
        return leaf
    half = _complete(level - 1, times, separation)
    both = _beside(half, 1 << level - 1, half, 1 << level - 1, separation)
    return both + np.arange(times + 1)[:, None, None] ** 2.0  # the node itself


def _beside(left: Matrix, left_length: int, right: Matrix, right_length: int, separation: int) -> Matrix:
    """Two stretches of leaves, one after the other. That nobody takes part in one is not in its table."""
    cap = separation - 1
    out = np.full_like(left, -np.inf)
    for f in range(separation):  # only the right one
        np.maximum(out[:, min(f + left_length, cap)], right[:, f], out=out[:, min(f + left_length, cap)])
    for after in range(separation):  # only the left one
        at = min(after + right_length, cap)
        np.maximum(out[:, :, at], left[:, :, after], out=out[:, :, at])
    # both: a left one with `after` free leaves at its end goes with a right one that has at least cap − after at its start
    enough = np.maximum.accumulate(right[:, ::-1], axis=1)[:, ::-1]
    for a in range(1, len(left)):
        for b in range(1, len(left) - a):
            pairs = left[a][:, :, None] + enough[b][::-1][None, :, :]  # first, after, last
            np.maximum(out[a + b], pairs.max(axis=1), out=out[a + b])
    return out
