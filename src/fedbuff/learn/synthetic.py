"""synthetic(α, β): LEAF's heterogeneous classification task (Li et al., 2018), made client by client when asked.

Client k labels its own inputs with its own softmax model: α controls how much the models differ between clients,
β how much the inputs do; with `iid` all have the same model, and inputs around zero (Li et al.'s Synthetic-IID). Nothing is
stored, so a million clients cost no memory.
"""

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.random import generator

Examples = tuple[NDArray[np.float32], NDArray[np.int64]]


class SyntheticClients(Sequence[Examples]):
    """A sequence of clients that generates each when it is asked for."""

    def __init__(
        self,
        alpha: float,
        beta: float,
        clients: int,
        features: int,
        classes: int,
        max_examples: int,
        seed: int,
        iid: bool = False,
    ) -> None:
        self.alpha, self.beta, self.features, self.classes = alpha, beta, features, classes
        self._clients, self._max_examples, self._seed = clients, max_examples, seed
        self._scale = np.arange(1, features + 1) ** -0.6  # Σ_jj = j^−1.2
        rng = generator(seed, "synthetic model of all")
        self._shared = (rng.normal(size=(features, classes)), rng.normal(size=classes)) if iid else None

    def __len__(self) -> int:
        return self._clients

    @overload
    def __getitem__(self, client: int) -> Examples: ...
    @overload
    def __getitem__(self, client: slice) -> Sequence[Examples]: ...
    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[c] for c in range(*client.indices(self._clients))]
        if not 0 <= client < self._clients:
            raise IndexError(f"client {client} of {self._clients}")
        return self.draw(client, self.examples(client), "train")

    def examples(self, client: int) -> int:
        """Log-normally many, as in LEAF's generator, between 1 and `max_examples`."""
        return int(min(self._max_examples, 1 + generator(self._seed, "synthetic size", client).lognormal(3.0, 1.0)))

    def draw(self, client: int, n: int, split: str) -> Examples:
        """`n` examples of a client's own distribution, other ones for every split."""
        if self._shared is not None:
            w, b = self._shared
            x = self._scale * generator(self._seed, f"synthetic {split}", client).normal(size=(n, self.features))
            return x.astype(np.float32), (x @ w + b).argmax(1)
        rng = generator(self._seed, "synthetic model", client)
        model_shift, input_shift = rng.normal(0, self.alpha**0.5), rng.normal(0, self.beta**0.5)
        w = rng.normal(model_shift, 1, (self.features, self.classes))
        b = rng.normal(model_shift, 1, self.classes)
        centre = rng.normal(input_shift, 1, self.features)
        x = centre + self._scale * generator(self._seed, f"synthetic {split}", client).normal(size=(n, self.features))
        return x.astype(np.float32), (x @ w + b).argmax(1)
