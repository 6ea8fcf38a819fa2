"""The plan: clip, noise, buffer size, horizon, participation limits and accountant in one frozen object.

    p = plan("blt", clip=0.3, buffer_size=10, horizon=2_000, epsilon=6, delta=1e-6, max_participations=1)
    p.check(weigh=server.weigh, weight_by=server.weight_by, mixing=server.mixing, buffer_size=server.buffer_size)
    ledger, stream = p.ledger(clients=20_000), p.stream(len(weights), key=os.urandom(32))

    for every update:    refused = ledger.admit(client, step)
                         factor = p.factor(update, weight)                   # clip first, then s(τ) ≤ 1; None: not finite
                         aggregation.add(update, factor)
    at K of them:        aggregation.step(staleness, noise=stream.increment(step))   # added to the sum, then divided by K

They belong together: the epsilon holds for this clip, this noise, this many steps and these limits, and for no other. So
nobody can scale in between, and what the proof does not cover is refused with the assumption that fails.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from fedbuff.compiled.norm import norm
from fedbuff.core import check
from fedbuff.core.staleness import Weigh
from fedbuff.core.versions import Vector
from fedbuff.privacy import accounting, noise, sensitivity, streams
from fedbuff.privacy.accounting import Accountant
from fedbuff.privacy.clip import clip_factor
from fedbuff.privacy.ledger import Ledger

Mechanism = Literal["tree", "tree-honaker", "blt", "gaussian"]
MECHANISMS: tuple[Mechanism, ...] = ("tree", "tree-honaker", "blt", "gaussian")
ADJACENCY = "zero-out: one client's updates, all of them, replaced by zeros"
SAMPLED_ADJACENCY = "add or remove one client, in Poisson-sampled cohorts"
LIMITS = (
    "Epsilon is for one client's whole contribution replaced by zeros; to replace it by another's, double the clip. "
    "{trust} Who takes part, when, and how stale is taken as public. "
    "The asynchronous path has no amplification by sampling; a cohort's holds only if clients really are Poisson-sampled. "
    "The search for hyper-parameters, and metrics on training clients, are not in epsilon. Limits are per identity: "
    "one person with two accounts is two clients. Noise is float64 and sums are the model's dtype, not exact arithmetic. "
    "An epsilon of 24 is weak."
)
Sees = Literal["updates", "sums", "sums with noise"]  # the server, at most
_TRUST: dict[Sees, str] = {
    "updates": "It trusts the server, which sees the updates and adds the noise.",
    "sums": "It trusts the server, which sees the sum of each buffer and adds the noise.",
    "sums with noise": "It trusts the trusted aggregator, which adds the noise: the server sees each sum with it only.",
}
_ACCOUNTABLE = 1e-100, 1e100  # noise multipliers: beyond, their squares leave float64, and an accountant breaks down
_PROBED = 10_000  # a staleness weight is looked at up to here, and again for every update


@dataclass(frozen=True)
class Plan:
    """What is promised, and what it rests on; made by `plan`, which calibrates the noise to an epsilon.

    noise_multiplier    σ: the noise on the *sum* of a buffer has standard deviation σ · clip (for a tree, in each node)
    buffer_size         K, the constant that sum and noise are divided by
    horizon             server steps planned: no more are released, and a run that ends before has spent less
    max_participations  server steps that one client may contribute to; needed unless cohorts are Poisson-sampled
    min_separation      between any two of them, |i − j| ≥ b; 1 if cohorts are Poisson-sampled
    sampling_rate       gaussian only: each client is in each cohort with this probability, independently
    restart_every       a new tree or matrix after so many steps, for runs longer than planned: dataclasses.replace(plan,
                        horizon=…, restart_every=plan.horizon)
    completion          tree, tree-honaker: fill up a tree before the restart
    """

    mechanism: Mechanism
    clip: float
    noise_multiplier: float
    buffer_size: int
    horizon: int
    delta: float
    max_participations: int | None = None
    min_separation: int = 1
    sampling_rate: float | None = None
    restart_every: int | None = None
    completion: bool = False
    accountant: Accountant = "exact"

    def __post_init__(self) -> None:
        check.one_of(MECHANISMS, mechanism=self.mechanism)
        check.one_of(("exact", "pld", "rdp"), accountant=self.accountant)
        check.number(0, above=True, clip=self.clip, noise_multiplier=self.noise_multiplier)
        check.number(*_ACCOUNTABLE, noise_multiplier=self.noise_multiplier)
        check.number(0, 1, above=True, below=True, delta=self.delta)
        check.integer(1, buffer_size=self.buffer_size, horizon=self.horizon, min_separation=self.min_separation)
        if self.max_participations is not None:
            check.integer(1, max_participations=self.max_participations)
        if self.restart_every is not None:
            check.integer(1, restart_every=self.restart_every)
            if self.mechanism == "gaussian":
                raise ValueError(
                    f"restart_every={self.restart_every}: gaussian noise is independent, it has nothing to restart"
                )
        if self.completion and (self.restart_every is None or not self.mechanism.startswith("tree")):
            raise ValueError("completion=True: it completes a tree before a restart; set restart_every, with a tree mechanism")
        if self.sampling_rate is not None:
            check.number(0, 1, above=True, sampling_rate=self.sampling_rate)
            if self.mechanism != "gaussian":
                raise ValueError(
                    f"sampling_rate={self.sampling_rate}: amplification by sampling is proven for independent noise, not for "
                    f"mechanism={self.mechanism!r}; use 'gaussian', or leave it out"
                )
            if self.accountant == "exact":
                raise ValueError("accountant='exact': there is no formula for sampled cohorts; use 'pld' or 'rdp'")
            for name, limit, none in (
                ("max_participations", self.max_participations, None),
                ("min_separation", self.min_separation, 1),
            ):
                if limit != none:
                    raise ValueError(
                        f"{name}={limit}, sampling_rate={self.sampling_rate}: a client at its limit is passed over, and the "
                        f"others are drawn more often than at this rate; leave {name} out, sampling does it"
                    )
        elif self.max_participations is None:
            sampled = "; amplification by sampling needs a Poisson cohort" if self.mechanism == "gaussian" else ""
            raise ValueError(
                f"max_participations: missing; without a limit, one client may move the model without bound{sampled}"
            )
        if self.mechanism == "blt":
            sensitivity.constants(self.restart_every or self.horizon)

    # ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────

    def check(
        self,
        *,
        weigh: Weigh,
        weight_by: str,
        mixing: bool,
        buffer_size: int,
        max_staleness: int | None = None,
        poisson: bool = False,
        horizon: int | None = None,
    ) -> None:
        """Refuse a server for which epsilon would not hold, naming the assumption that fails.

        `poisson`: each client is in each cohort independently with the same probability. `horizon`: server steps it may take.
        """
        if buffer_size != self.buffer_size:
            raise ValueError(
                f"buffer_size={buffer_size}: the plan divides sum and noise by a constant K={self.buffer_size}; make them equal"
            )
        if weight_by != "uniform":
            raise ValueError(
                f"weight_by={weight_by!r}: dividing by the examples of a buffer, or weighing by them, makes one client's share "
                "depend on the others' data; use 'uniform'"
            )
        if mixing:
            raise ValueError("mixing=True: averaging models adds the server's own weights to an update, which no clip bounds")
        for staleness in range((_PROBED if max_staleness is None else max_staleness) + 1):
            if not 0.0 <= (weight := float(weigh(staleness))) <= 1.0:
                raise ValueError(
                    f"weigh({staleness}) = {weight:g}: a weight above 1 makes a clipped update longer than clip={self.clip:g}"
                )
        if self.sampling_rate is not None and not poisson:
            raise ValueError(
                f"sampling_rate={self.sampling_rate}: amplification needs Poisson-sampled cohorts, in which every client is "
                "independently with this probability; FedBuff's buffers and cohorts of a fixed size are not. Leave it out, and "
                "set max_participations"
            )
        if self.sampling_rate is None and poisson:
            raise ValueError("cohorts are Poisson-sampled, and the plan does not know it: set sampling_rate")
        if horizon is not None and horizon > self.horizon:
            raise ValueError(f"{horizon} server steps: the plan's horizon is {self.horizon}; plan for more, or stop earlier")

    def factor(self, update: Vector, weight: float = 1.0) -> float | None:
        """What to multiply an update by: clipped first, then weighted; None if it is not finite, and must be rejected."""
        if not 0.0 <= weight <= 1.0:
            raise ValueError(f"weight={weight:g}: a staleness weight above 1 would undo the clip; expected 0 to 1")
        clipped = clip_factor(norm(update), self.clip, update.dtype)
        return None if clipped is None else clipped * weight

    # ── noise ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def stream(self, dimension: int, key: bytes | int, seeded: bool = False) -> "Planned":
        """The noise of a run. `key`: 32 secret random bytes, one key per run; with `seeded`, a number that protects nobody."""
        check.integer(1, dimension=dimension)
        draw = noise.seeded(key, dimension) if seeded else noise.secure(key, dimension)  # type: ignore[arg-type]
        return Planned(self, self.mechanism_stream(draw, self.noise_multiplier * self.clip), noise.fingerprint(key))

    def mechanism_stream(self, draw: noise.Draw, scale: float) -> streams.Stream:
        """The mechanism alone, with other noise: to look at what it does."""
        if self.mechanism == "gaussian":
            return streams.gaussian(draw, scale)
        if self.mechanism == "tree":
            return streams.tree(draw, scale, self.restart_every, self.completion)
        if self.mechanism == "tree-honaker":
            return streams.tree_honaker(draw, scale, self.restart_every, self.completion)
        decay, weight = sensitivity.constants(self.restart_every or self.horizon)
        return streams.blt(draw, scale, decay, weight, self.restart_every)

    def largest_increment(self) -> float:
        """What no number of a step's noise exceeds, but for one draw in 10^30: room to keep for it among integers."""
        nodes = (self.restart_every or self.horizon).bit_length() + 1 if self.mechanism.startswith("tree") else 4
        return 12.0 * self.noise_multiplier * self.clip * math.sqrt(nodes)

    def ledger(self, clients: int) -> Ledger:
        """Who may take part, by this plan's limits; for Poisson-sampled cohorts there are none but once in a cohort."""
        return Ledger(clients, self.max_participations, self.min_separation)

    # ── what is promised ─────────────────────────────────────────────────────────────────────────────────────────────

    def sensitivity(self, steps: int | None = None) -> float:
        """How far one client can move everything released in so many steps (by default the horizon), in units of clip."""
        return math.sqrt(self._square(self.horizon if steps is None else steps))

    def epsilon(self, steps: int | None = None, accountant: Accountant | None = None) -> float:
        """Spent once so many steps are released; by default at the horizon."""
        steps, accountant = self.horizon if steps is None else steps, accountant or self.accountant
        if not 0 <= steps <= self.horizon:
            raise ValueError(f"{steps} server steps: the plan's horizon is {self.horizon}; plan for more, or stop earlier")
        if steps == 0:
            return 0.0
        if self.sampling_rate is not None:
            return accounting.sampled_epsilon(self.noise_multiplier, self.sampling_rate, steps, self.delta, accountant)
        return accounting.epsilon(self.noise_multiplier / math.sqrt(self._square(steps)), self.delta, accountant)

    def _square(self, steps: int) -> float:
        k, b = self.max_participations, self.min_separation
        if k is None:
            return 1.0  # of one step of a sampled cohort, which is what the accountant composes
        k = min(k, -(-steps // b))  # more often nobody can
        if self.mechanism == "gaussian":
            return sensitivity.of_gaussian(steps, k, b)
        if self.restart_every is None or steps <= self.restart_every:
            return self._one(steps, k)
        whole, rest = divmod(steps, self.restart_every)
        lengths = [self.restart_every] * whole + [rest] * (rest > 0)
        at_most = min(k, -(-self.restart_every // b))  # times in one tree
        # completed trees have a few nodes more: as if they had been filled with clients' updates
        filled = [_completed(n) if self.completion and i < len(lengths) - 1 else n for i, n in enumerate(lengths)]
        squares = {n: [0.0] + [self._one(n, j) for j in range(1, at_most + 1)] for n in set(filled)}
        return sensitivity.of_restarts([squares[n] for n in filled], k)

    def _one(self, steps: int, times: int) -> float:
        if self.mechanism == "blt":
            return sensitivity.of_blt(self.restart_every or self.horizon, steps, times, self.min_separation)
        return sensitivity.of_tree(steps, times, self.min_separation)

    def describe(self, steps: int | None = None, seeded: bool | None = None, sees: Sees = "updates") -> dict[str, Any]:
        """For a run's summary: what was promised, what was spent after `steps`, and what the promise does not cover."""
        spent = {} if steps is None else {"server_steps": steps, "epsilon": self.epsilon(steps)}
        seeds = "seeded, for experiments: whoever knows the seed can subtract the noise"
        return {
            "mechanism": self.mechanism,
            **spent,
            "epsilon_at_horizon": self.epsilon(),
            "epsilon_rdp": self.epsilon(accountant="rdp"),
            "accountant": self.accountant,
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "clip": self.clip,
            "buffer_size": self.buffer_size,
            "horizon": self.horizon,
            "sensitivity": self.sensitivity(),
            "max_participations": self.max_participations,
            "min_separation": self.min_separation,
            "sampling_rate": self.sampling_rate,
            "restart_every": self.restart_every,
            "completion": self.completion,
            "adjacency": ADJACENCY if self.sampling_rate is None else SAMPLED_ADJACENCY,
            **({} if seeded is None else {"noise": seeds if seeded else "AES-256 in counter mode, secret key"}),
            "limits": LIMITS.format(trust=_TRUST[sees]),
        }


class Planned:
    """A plan's noise stream: it ends at the horizon, and goes on with its own key only."""

    def __init__(self, plan: Plan, stream: streams.Stream, key: str) -> None:
        self.plan = plan
        self._stream, self._key = stream, key
        self._released = 0  # server steps, all before this one

    def increment(self, step: int) -> noise.Noise:
        """The noise to add to the sum of server step 0, 1, 2, …, in float64 and in the units of an update."""
        if step >= self.plan.horizon:
            raise ValueError(
                f"step {step}: the plan's horizon is {self.plan.horizon} server steps, and its epsilon is spent then; "
                "plan for more steps with restart_every"
            )
        increment = self._stream.increment(step)
        self._released = max(self._released, step + 1)
        return increment

    def state(self) -> tuple[dict[str, noise.Noise], dict[str, Any]]:
        """Everything `restore` needs but the key: arrays, as secret as the key, and facts ready for JSON."""
        arrays, facts = self._stream.state()
        begun = {"restart_every": self.plan.restart_every, "released": self._released}
        return arrays, {**facts, "key": self._key, **self._fixed(), **begun}

    def restore(self, arrays: dict[str, noise.Noise], facts: dict[str, Any]) -> None:
        """Go on from a state, with the same plan or a longer one.

        A state does not know what was released after it was taken: who begins to restart does so at the old horizon.
        """
        for name, value in self._fixed().items():
            if facts[name] != value:
                raise ValueError(f"{name}={value}: this run began with {name}={facts[name]}, and its epsilon is for that")
        if facts["key"] != self._key:
            raise ValueError(
                "noise key: this run began with another one; with a new key, its noise would be drawn a second time"
            )
        self._check_restarts(facts["restart_every"], facts["released"])
        self._stream.restore(arrays, facts)
        self._released = facts["released"]

    def _check_restarts(self, before: int | None, released: int) -> None:
        """A tree that was begun stays as it is: restarts may only be added, and not where something was released."""
        every = self.plan.restart_every
        if every == before:
            return
        if before is None and every is not None and every >= released:
            return
        later = f", or {released} or more" if before is None and released else ""
        began = f"this run began with restart_every={before}, and it released {released} steps"
        raise ValueError(f"restart_every={every}: {began}; expected {before}{later}")

    def _fixed(self) -> dict[str, Any]:
        """What may not change within a run; the horizon may, and restarts may begin, for one that becomes longer."""
        return {name: getattr(self.plan, name) for name in ("mechanism", "clip", "noise_multiplier", "buffer_size")}


def plan(
    mechanism: Mechanism,
    *,
    clip: float,
    buffer_size: int,
    horizon: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    max_participations: int | None = None,
    min_separation: int = 1,
    sampling_rate: float | None = None,
    restart_every: int | None = None,
    completion: bool = False,
    accountant: Accountant | None = None,
) -> Plan:
    """A plan with this noise, or with as little noise as this epsilon allows."""
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError("epsilon, noise_multiplier: expected one of them, the other follows from it")
    made = Plan(
        mechanism,
        clip,
        1.0 if noise_multiplier is None else noise_multiplier,
        buffer_size,
        horizon,
        delta,
        max_participations,
        min_separation,
        sampling_rate,
        restart_every,
        completion,
        accountant or ("exact" if sampling_rate is None else "pld"),
    )
    if epsilon is None:
        return made
    check.number(0, above=True, epsilon=epsilon)
    if sampling_rate is None:
        sigma = accounting.effective_noise(epsilon, delta, made.accountant) * made.sensitivity()
    else:
        sigma = accounting.sampled_noise(epsilon, sampling_rate, horizon, delta, made.accountant)
    return replace(made, noise_multiplier=float(np.float64(sigma)))


def _completed(leaves: int) -> int:
    return 1 << (leaves - 1).bit_length()
