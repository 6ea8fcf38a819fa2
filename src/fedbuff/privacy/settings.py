"""What a user asks for: `[privacy]` of a settings file, from which a plan is made for the server at hand."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedbuff.core import check
from fedbuff.core.starting import is_sampled
from fedbuff.privacy import protection
from fedbuff.privacy.plan import Mechanism, Plan, plan

if TYPE_CHECKING:
    from fedbuff.core.server import Server


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of whole clients: give `epsilon` and get the noise, or `noise_multiplier` and get epsilon.

    clip                 L2 norm that an update is cut down to before it is weighted
    delta                should be well below one over the number of clients
    mechanism            "blt", or the paper's "tree", "tree-honaker"; "gaussian" for Poisson cohorts, or as a rival
    max_participations   server steps that a client may contribute to; not for Poisson cohorts, where sampling does it
    min_separation       server steps between two of them, |i − j|; not for Poisson cohorts either
    horizon              server steps that the noise is planned for, by default the run's limit; a run ends there
    restart_every        a new tree (or matrix) after so many steps, for a horizon beyond the planned one
    noise                "secure": from a secret key, made for the run; "seeded": from the run's seed, for experiments
    """

    clip: float
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    mechanism: Mechanism = "blt"
    max_participations: int | None = None
    min_separation: int = 1
    horizon: int | None = None
    restart_every: int | None = None
    completion: bool = False
    accountant: Literal["exact", "pld", "rdp"] | None = None
    noise: Literal["secure", "seeded"] = "secure"

    def __post_init__(self) -> None:
        check.one_of(("secure", "seeded"), noise=self.noise)
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError(
                f"epsilon: give it or noise_multiplier, one of them (epsilon={self.epsilon}, "
                f"noise_multiplier={self.noise_multiplier})"
            )
        if self.horizon is not None:
            check.integer(1, horizon=self.horizon)

    def plan(self, server: "Server", clients: int, *, server_steps: int | None = None, trips: int | None = None) -> Plan:
        """The plan for this server; `server_steps` and `trips` are the run's limits, for want of a horizon."""
        size = server.buffer_size
        limits = [n for n in (server_steps, None if trips is None else math.ceil(trips / size)) if n is not None]
        horizon = self.horizon or min(limits, default=0)
        if not horizon:
            raise ValueError("privacy.horizon: missing; give it, or limit the run by server_steps or trips")
        poisson = is_sampled(server.start)
        if poisson and self.max_participations is None and self.mechanism != "gaussian":
            raise ValueError(
                f"privacy.mechanism={self.mechanism!r}: for Poisson cohorts, amplification by sampling is proven for "
                "independent noise only; use 'gaussian', or do without it and set max_participations"
            )
        try:
            made = plan(
                self.mechanism,
                clip=self.clip,
                buffer_size=size,
                horizon=horizon,
                delta=self.delta,
                epsilon=self.epsilon,
                noise_multiplier=self.noise_multiplier,
                max_participations=self.max_participations,
                min_separation=self.min_separation,
                sampling_rate=size / clients if poisson and self.max_participations is None else None,
                restart_every=self.restart_every,
                completion=self.completion,
                accountant=self.accountant,
            )
        except ValueError as e:
            raise ValueError(f"privacy.{e}") from e
        protection.check(made, server)
        return made
