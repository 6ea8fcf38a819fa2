"""Server optimizers: how the weights move, given the mean update of a full buffer.

An optimizer is a pair of functions, `init(weights) -> state` and `step(weights, update, state, staleness) ->
(weights, state)`. Both are pure: they return new arrays, so that trips in flight keep the version they started
on, and a state is a dict of arrays, so that it can be saved. `update` points *from* the goal (Δ = y_0 − y_Q), as a
gradient does; `staleness` is the largest in the buffer.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from fedbuff.core import check
from fedbuff.core.versions import Vector

State = dict[str, Vector]


class Optimizer(Protocol):
    def init(self, weights: Vector) -> State: ...

    def step(self, weights: Vector, update: Vector, state: State, staleness: int) -> tuple[Vector, State]: ...


@dataclass(frozen=True)
class sgd:
    """w ← w − η_g Δ̄, Algorithm 1."""

    lr: float = 1.0

    def __post_init__(self) -> None:
        check.number(0, lr=self.lr)

    def init(self, weights: Vector) -> State:
        return {}

    def step(self, weights: Vector, update: Vector, state: State, staleness: int) -> tuple[Vector, State]:
        return weights - self.lr * update, {}


@dataclass(frozen=True)
class momentum:
    """v ← β v + Δ̄, w ← w − η_g v: FedAvgM's, and torch.optim.SGD's."""

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        check.number(0, lr=self.lr)
        check.number(0, 1, beta=self.beta)

    def init(self, weights: Vector) -> State:
        return {"velocity": np.zeros_like(weights)}

    def step(self, weights: Vector, update: Vector, state: State, staleness: int) -> tuple[Vector, State]:
        velocity = self.beta * state["velocity"] + update
        return weights - self.lr * velocity, {"velocity": velocity}


@dataclass(frozen=True)
class adam:
    """torch.optim.Adam on the mean update (FedAdam); with `amsgrad`, the server half of FADAS (Wang et al., 2024)."""

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        check.number(0, lr=self.lr)
        check.number(0, 1, below=True, beta1=self.beta1, beta2=self.beta2)
        check.number(0, above=True, eps=self.eps)
        check.switch(amsgrad=self.amsgrad)

    def init(self, weights: Vector) -> State:
        moments = ("mean", "square", "largest") if self.amsgrad else ("mean", "square")
        return {"steps": np.zeros(1, np.int64), **{name: np.zeros_like(weights) for name in moments}}

    def step(self, weights: Vector, update: Vector, state: State, staleness: int) -> tuple[Vector, State]:
        t = int(state["steps"][0]) + 1
        mean = self.beta1 * state["mean"] + (1 - self.beta1) * update
        square = self.beta2 * state["square"] + (1 - self.beta2) * update**2
        new: State = {"steps": np.array([t]), "mean": mean, "square": square}
        if self.amsgrad:
            new["largest"] = square = np.maximum(state["largest"], square)
        size = np.sqrt(square) / (1 - self.beta2**t) ** 0.5 + self.eps
        return weights - self.lr / (1 - self.beta1**t) * mean / size, new


@dataclass(frozen=True)
class delay_adaptive:
    """`optimizer` with η_g ← min(η_g, 1/τ) whenever a buffer's largest staleness τ exceeds `threshold`.

    The rule of FADAS (Wang et al., 2024), after Koloskova et al. (2022).
    """

    optimizer: sgd | momentum | adam
    threshold: int

    def __post_init__(self) -> None:
        check.integer(0, threshold=self.threshold)
        check.instance(sgd | momentum | adam, "whose rate is lowered, e.g. fedbuff.adam(0.01)", optimizer=self.optimizer)

    def init(self, weights: Vector) -> State:
        return self.optimizer.init(weights)

    def step(self, weights: Vector, update: Vector, state: State, staleness: int) -> tuple[Vector, State]:
        lr = self.optimizer.lr if staleness <= self.threshold else min(self.optimizer.lr, 1.0 / staleness)
        return replace(self.optimizer, lr=lr).step(weights, update, state, staleness)
