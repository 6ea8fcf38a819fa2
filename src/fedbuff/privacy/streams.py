"""Noise streams: what is added to the sum of a buffer, server step by server step.

    stream = tree(draw, scale=noise_multiplier * clip)
    noisy_sum = sum_of_clipped_updates + stream.increment(step)     # step 0, 1, 2, …; then divide by K

What is private is every *prefix sum* of the noisy increments, so momentum, Adam and whatever else is computed from them is
post-processing. With z independent N(0, scale²), the increments are C⁻¹ z for the mechanism's own lower triangular C:

    gaussian       C = I: independent noise, which adds up in the prefix sums: T after T steps
    tree           the paper's binary tree: a prefix sum of t steps has as many nodes' noise as t has ones in binary
    tree_honaker   the same nodes, each averaged with the two below it (Honaker, 2015): about half the variance
    blt            a buffered linear Toeplitz matrix (McMahan et al., 2024): less again, and four vectors of state

A stream goes forward only. `state()` and `restore()` let a killed run go on bit for bit; a step that was released before is
never drawn anew. With `restart_every`, a new tree (or matrix) begins after so many steps, and the noise of the last prefix sum
stays in; `completion` first fills up a tree to the next power of two, so that what stays in is the noise of one node.
"""

from typing import Any, Protocol

import numpy as np

from fedbuff.compiled.toeplitz import filtered
from fedbuff.privacy.noise import Draw, Noise

_KEPT = 4  # levels of nodes that are remembered: they leave the prefix sum soon, and are 15 of 16


class Stream(Protocol):
    def increment(self, step: int) -> Noise: ...

    def state(self) -> tuple[dict[str, Noise], dict[str, Any]]: ...

    def restore(self, arrays: dict[str, Noise], facts: dict[str, Any]) -> None: ...


class gaussian:
    """Independent noise for every server step; any step may be asked for at any time."""

    def __init__(self, draw: Draw, scale: float) -> None:
        self._draw, self._scale = draw, scale

    def increment(self, step: int) -> Noise:
        return self._scale * self._draw(0, 0, _counted(step))

    def state(self) -> tuple[dict[str, Noise], dict[str, Any]]:
        return {}, {}

    def restore(self, arrays: dict[str, Noise], facts: dict[str, Any]) -> None:
        pass


class tree:
    """InitializeTree, AddToTree and GetSum of the paper. It has no state: nodes are drawn again when they leave the sum."""

    def __init__(self, draw: Draw, scale: float, restart_every: int | None = None, completion: bool = False) -> None:
        self._draw, self._scale, self._restart_every, self._completion = draw, scale, restart_every, completion
        self._recent: dict[int, tuple[tuple[int, int], Noise]] = {}  # level -> the last node on it

    def increment(self, step: int) -> Noise:
        number, leaf = _where(step, self._restart_every)
        out = self._entering(number, _lowest(leaf + 1), leaf >> _lowest(leaf + 1)).copy()
        for level in range(_lowest(leaf + 1)):  # the nodes below it that it takes the place of
            out -= self._node(number, level, (leaf >> level) - 1)
        if leaf == 0 and number > 0 and self._completion:
            out += self._completed(number - 1)
        out *= self._scale
        return out

    def state(self) -> tuple[dict[str, Noise], dict[str, Any]]:
        return {}, {}

    def restore(self, arrays: dict[str, Noise], facts: dict[str, Any]) -> None:
        pass

    def _completed(self, number: int) -> Noise:
        """What turns the noise of a whole tree's prefix sum into that of its root."""
        leaves = self._restart_every or 0
        if leaves & (leaves - 1) == 0:
            return np.zeros_like(self._draw(number, 0, 0))
        out = self._draw(number, leaves.bit_length(), 0)
        for level in _ones(leaves):
            out -= self._node(number, level, (leaves >> level) - 1)
        return out

    def _entering(self, number: int, level: int, index: int) -> Noise:
        node = self._node(number, level, index)
        if level < _KEPT:
            self._recent[level] = (number, index), node
        return node

    def _node(self, number: int, level: int, index: int) -> Noise:
        address, node = self._recent.get(level, (None, None))
        return node if node is not None and address == (number, index) else self._draw(number, level, index)


class tree_honaker:
    """The tree's nodes, each the mean of itself and of the two below it, weighted by their precision.

    Its state is the averaged nodes of the current prefix sum: at most one vector for each level.
    """

    def __init__(self, draw: Draw, scale: float, restart_every: int | None = None, completion: bool = False) -> None:
        self._draw, self._scale, self._restart_every, self._completion = draw, scale, restart_every, completion
        self._next = 0
        self._nodes: dict[int, Noise] = {}  # level -> averaged noise of the node in the prefix sum

    def increment(self, step: int) -> Noise:
        for skipped in _ahead(self._next, step):
            self._advance(skipped)
        return self._advance(step)

    def _advance(self, step: int) -> Noise:
        number, leaf = _where(step, self._restart_every)
        before: Noise | float = 0.0
        if leaf == 0:
            if number > 0 and self._completion:
                before = self._completed(number - 1)
            self._nodes = {}
        node, level = self._draw(number, 0, leaf), 0
        removed: Noise | float = 0.0
        while level in self._nodes:
            left = self._nodes.pop(level)
            removed = left + removed
            level += 1
            node = _average(self._draw(number, level, leaf >> level), left + node, 2 * _variance(level - 1))
        self._nodes[level] = node
        self._next = step + 1
        return self._scale * (before + (node - removed))

    def _completed(self, number: int) -> Noise:
        """As in `tree`: what is missing in the last tree is known to be zero, so it adds no variance."""
        leaves = self._restart_every or 0
        if leaves & (leaves - 1) == 0:
            return np.zeros_like(next(iter(self._nodes.values())))
        lowest = min(self._nodes)
        node, variance, last = np.zeros_like(self._nodes[lowest]), 0.0, np.zeros_like(self._nodes[lowest])
        for level in range(lowest, leaves.bit_length()):
            if level in self._nodes:
                node = node + self._nodes[level]
                last += self._nodes[level]
                variance += _variance(level)
            # the node above, of which this is all that is not known to be zero
            node = _average(self._draw(number, level + 1, leaves - 1 >> level + 1), node, variance)
            variance /= 1 + variance
        return node - last

    def state(self) -> tuple[dict[str, Noise], dict[str, Any]]:
        return {f"noise.{level}": node for level, node in self._nodes.items()}, {"step": self._next}

    def restore(self, arrays: dict[str, Noise], facts: dict[str, Any]) -> None:
        self._nodes = {int(name[6:]): np.array(node) for name, node in arrays.items() if name.startswith("noise.")}
        self._next = facts["step"]


class blt:
    """x = z − Σ_j ω_j b_j, then b_j ← θ_j b_j + x: the inverse of the Toeplitz matrix c_0 = 1, c_i = Σ_j ω_j θ_j^(i−1)."""

    def __init__(
        self, draw: Draw, scale: float, decay: tuple[float, ...], weight: tuple[float, ...], restart_every: int | None = None
    ) -> None:
        self._draw, self._scale, self._restart_every = draw, scale, restart_every
        self._decay, self._weight = decay, weight
        self._next = 0
        self._buffers: list[Noise] = []

    def increment(self, step: int) -> Noise:
        for skipped in _ahead(self._next, step):
            self._advance(skipped)
        return self._advance(step)

    def _advance(self, step: int) -> Noise:
        number, leaf = _where(step, self._restart_every)
        x = self._draw(number, 0, leaf)
        if leaf == 0:
            self._buffers = [np.zeros_like(x) for _ in self._decay]
        self._next = step + 1
        return filtered(x, self._buffers, self._weight, self._decay, self._scale)

    def state(self) -> tuple[dict[str, Noise], dict[str, Any]]:
        facts = {"step": self._next, "decay": list(self._decay), "weight": list(self._weight)}
        return {f"noise.{j}": buffer.copy() for j, buffer in enumerate(self._buffers)}, facts

    def restore(self, arrays: dict[str, Noise], facts: dict[str, Any]) -> None:
        if [*facts["decay"], *facts["weight"]] != [*self._decay, *self._weight]:
            raise ValueError("blt: this run began with other constants, and its noise goes on with those only")
        self._buffers = [np.array(arrays[f"noise.{j}"]) for j in range(len(self._decay)) if f"noise.{j}" in arrays]
        self._next = facts["step"]


def _where(step: int, restart_every: int | None) -> tuple[int, int]:
    """The number of the tree, and of the leaf in it."""
    return (0, _counted(step)) if restart_every is None else divmod(_counted(step), restart_every)


def _counted(step: int) -> int:
    if step < 0:
        raise ValueError(f"step {step}: server steps are counted from 0")
    return step


def _ahead(following: int, step: int) -> range:
    if _counted(step) < following:
        raise ValueError(f"step {step}: its noise was released before (the next is step {following}); restore an earlier state")
    return range(following, step)


def _lowest(t: int) -> int:
    """The place of the lowest one of t in binary."""
    return (t & -t).bit_length() - 1


def _ones(t: int) -> list[int]:
    return [level for level in range(t.bit_length()) if t >> level & 1]


def _variance(level: int) -> float:
    """Of an averaged node of 2^level leaves, in units of one node's."""
    return 1.0 / (2.0 - 2.0**-level)


def _average(own: Noise, below: Noise, variance: float) -> Noise:
    """The mean of a node's own noise, of variance 1, and that of the sum below it, weighted by their precision."""
    share = variance / (1.0 + variance)
    return share * own + (1.0 - share) * below
