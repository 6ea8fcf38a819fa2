"""Who took part when: what the accountant assumes about clients, enforced.

A client may contribute to at most `max_participations` server steps, any two of them at least `min_separation` apart,
|i − j| ≥ b. (TensorFlow Privacy counts the steps in between: its min_separation is ours − 1.) So a client is never twice in
one buffer. Two numbers for each client are enough, eight bytes: ten million clients take 80 MB.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedbuff.core import check


class Ledger:
    """Ask `allowed` before a trip starts, and `admit` its update to the buffer of the server step that it will be part of.

    A client that is allowed when a trip starts still is when it arrives, unless it took part in between.
    """

    def __init__(self, clients: int, max_participations: int | None, min_separation: int = 1) -> None:
        check.integer(1, clients=clients, min_separation=min_separation)
        if max_participations is not None:
            check.integer(1, max_participations=max_participations)
        self.max_participations, self.min_separation = max_participations, min_separation
        self._times = np.zeros(clients, np.uint32)
        self._last = np.full(clients, -1, np.int32)

    def allowed(self, client: int, step: int) -> bool:
        return self.refusal(client, step) is None

    def admit(self, client: int, step: int) -> str | None:
        """Note that `client` takes part in `step`, or say why it may not: then nothing has changed."""
        refused = self.refusal(client, step)
        if refused is None:
            self._times[client] += 1
            self._last[client] = step
        return refused

    def refusal(self, client: int, step: int) -> str | None:
        """Why `client` may not take part in `step`, or None."""
        if not 0 <= client < len(self._times):
            raise ValueError(f"client {client}: the ledger has clients 0 to {len(self._times) - 1}")
        times, last = int(self._times[client]), int(self._last[client])
        if self.max_participations is not None and times >= self.max_participations:
            return f"client {client} took part {times} times, and max_participations={self.max_participations}"
        if times and step - last < self.min_separation:
            return (
                f"client {client} took part in step {last}, and step {step} is not min_separation={self.min_separation} later"
            )
        return None

    def free(self, step: int) -> NDArray[np.bool_]:
        """Which clients may take part in `step`: `allowed` for all of them at once."""
        free: NDArray[np.bool_] = (self._times == 0) | (step - self._last.astype(np.int64) >= self.min_separation)
        if self.max_participations is not None:
            free &= self._times < self.max_participations
        return free

    def times(self, client: int) -> int:
        """How often a client took part."""
        return int(self._times[client])

    def left(self) -> int:
        """How many clients have not taken part as often as they may."""
        return len(self._times) if self.max_participations is None else int((self._times < self.max_participations).sum())

    def ended(self, step_size: int) -> str:
        """Why nobody may take part any more, in a run whose server steps take so many updates: a sentence."""
        if self.min_separation > 1 and self.left() >= max(step_size, 1):
            return "too few clients: nobody may take part again so soon, see privacy.min_separation"
        return "every client has taken part as often as it may: see privacy.max_participations"

    def rewrite(self, clients: NDArray[np.int64], steps: NDArray[np.int64]) -> None:
        """Begin anew, as if these clients had been admitted to these steps: for who keeps a list of them elsewhere."""
        self._times[:], self._last[:] = 0, -1
        np.add.at(self._times, clients, 1)
        np.maximum.at(self._last, clients, steps.astype(np.int32))

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Everything `restore` needs: arrays, of those only who took part, and facts ready for JSON."""
        who = np.flatnonzero(self._times)
        facts = {
            "clients": len(self._times),
            "max_participations": self.max_participations,
            "min_separation": self.min_separation,
        }
        return {"ledger.client": who, "ledger.times": self._times[who], "ledger.last": self._last[who]}, facts

    def restore(self, arrays: dict[str, NDArray[Any]], facts: dict[str, Any]) -> None:
        """Take over the state of a ledger with the same limits."""
        own = self.state()[1]
        if differs := [name for name in own if own[name] != facts[name]]:
            name = differs[0]
            raise ValueError(
                f"{name}={own[name]}: this run began with {name}={facts[name]}, and its budget was planned for that"
            )
        self._times[:], self._last[:] = 0, -1
        self._times[arrays["ledger.client"]] = arrays["ledger.times"]
        self._last[arrays["ledger.client"]] = arrays["ledger.last"]
