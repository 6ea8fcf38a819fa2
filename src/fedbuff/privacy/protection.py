"""A plan at work: its ledger and its noise, for one server with so many clients and weights.

    server = Server(…, protection=protect(plan, clients=20_000, dimension=len(weights), key=os.urandom(32)))

The plan promises; this keeps the promise: nobody takes part more often than planned, no update is longer than the clip, and
every server step has its noise, drawn once.
"""

import math
from typing import TYPE_CHECKING, Any

from fedbuff.core.starting import is_sampled
from fedbuff.core.versions import Vector
from fedbuff.privacy.ledger import Ledger
from fedbuff.privacy.noise import Noise
from fedbuff.privacy.plan import Plan, Planned, Sees

if TYPE_CHECKING:
    from fedbuff.core.server import Server


class Protection:
    """What `core/protection.py` asks for."""

    def __init__(self, plan: Plan, ledger: Ledger, stream: Planned, seeded: bool) -> None:
        self.plan, self.limits, self.seeded = plan, ledger, seeded
        self._stream = stream

    def check(self, server: "Server") -> None:
        check(self.plan, server)

    def factor(self, update: Vector, weight: float) -> float:
        """Not a number for an update that is not finite: whoever adds it up refuses it for that."""
        factor = self.plan.factor(update, weight)
        return math.nan if factor is None else factor

    def over(self, step: int) -> bool:
        return step >= self.plan.horizon

    def refusal(self, client: int, step: int) -> str | None:
        if self.over(step):
            return f"the plan's horizon, {self.plan.horizon} server steps, is reached: there is no noise for more"
        return self.limits.refusal(client, step)

    def admit(self, client: int, step: int) -> None:
        if refused := self.limits.admit(client, step):
            raise ValueError(refused)

    def noise(self, step: int) -> Noise:
        return self._stream.increment(step)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        noted, limits = self.limits.state()
        drawn, noise = self._stream.state()
        return {**noted, **drawn}, {"ledger": limits, "noise": noise}

    def restore(self, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
        self.limits.restore(arrays, facts["ledger"])
        self._stream.restore(arrays, facts["noise"])

    def spent(self, steps: int) -> float:
        """Epsilon after so many server steps, at once: for Poisson cohorts by RDP, an upper bound, as PLD takes seconds."""
        return self.plan.epsilon(steps, "rdp" if self.plan.sampling_rate is not None else None)

    def describe(self, steps: int, sees: Sees = "updates") -> dict[str, Any]:
        """For a run's summary, after so many server steps, of which the server sees no more than that."""
        return self.plan.describe(steps, self.seeded, sees)


def check(plan: Plan, server: "Server") -> None:
    """Refuse a server for which the plan does not hold. A Poisson cohort that claims no amplification is as good as any."""
    weights = server.initial_weights
    if weights is not None and weights.dtype.itemsize < 4:
        raise ValueError(f"weights of {weights.dtype}: rounding to it makes clipped updates longer than clip; use float32")
    plan.check(
        weigh=server.weigh,
        weight_by=server.weight_by,
        mixing=server.mixing,
        buffer_size=server.buffer_size,
        max_staleness=server.max_staleness,
        poisson=plan.sampling_rate is not None and is_sampled(server.start),
    )


def protect(plan: Plan, clients: int, dimension: int, key: bytes | int, seeded: bool = False) -> Protection:
    """A plan for so many clients and weights. `key`: 32 secret random bytes, one key per run, or with `seeded` a number."""
    return Protection(plan, plan.ledger(clients), plan.stream(dimension, key, seeded), seeded)
