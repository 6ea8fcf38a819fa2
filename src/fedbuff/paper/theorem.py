"""Theorem 1 and Appendix A, checked on a problem whose constants are known.

Client i holds points z_ij, and F_i(w) = mean_j Σ_d L (√(1 + (w_d − z_ijd)²) − 1): L-smooth, with every gradient's coordinates
between −L and L, so that G and the variances are bounded for all w. The timeline says which client trains on which version and
which server step uses it; local steps and the server's aggregation are played on it, and ‖∇f(w^t)‖² is noted at every step.

    (1/T) Σ ‖∇f(w^t)‖² ≤ 2 (f(w⁰) − f*) / (η_g η_l Q T) + (L/2) η_g η_l σ_l² + 3 L² Q² η_l² (η_g² τ_max² + 1) (σ_l² + σ_g² + G)

with η_l = 1 / (K √(TQ)), η_g = K as in Corollary 1. The theorem is for updates that weigh the same: no staleness weights here.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.aggregate import Aggregation
from fedbuff.core.optimizers import sgd
from fedbuff.core.random import generator
from fedbuff.core.staleness import constant
from fedbuff.core.starting import refill
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Number, Pair, Result
from fedbuff.sim.timeline import Timeline, timeline
from fedbuff.sim.timing import half_normal

CLIENTS, POINTS, DIMENSIONS, L = 200, 8, 10, 1.0
BUFFERS = (1, 2, 5, 10, 20, 50)
# concurrency M, buffer size K, local steps Q
CASES = ((10, 1, 1), (10, 10, 1), (10, 10, 4), (50, 10, 1), (50, 10, 4))
STEPS = (250, 1000, 4000)

Floats = NDArray[np.floating]


@dataclass(frozen=True)
class Constants:
    """What the bound is made of."""

    variance: float  # σ_l²
    heterogeneity: float  # σ_g²
    largest: float  # G

    def __add__(self, other: "Constants") -> "Constants":
        """The larger of each."""
        pairs = ((self.variance, other.variance), (self.heterogeneity, other.heterogeneity), (self.largest, other.largest))
        return Constants(*(max(pair) for pair in pairs))


ANYWHERE = Constants(L**2 * DIMENSIONS, L**2 * DIMENSIONS, L**2 * DIMENSIONS)  # true for every w


def bound(gap: float, eta_g: float, eta_l: float, q: int, steps: int, staleness: int, c: Constants) -> float:
    """The right-hand side of Theorem 1 with a constant client learning rate."""
    noise = c.variance + c.heterogeneity + c.largest
    start = 2 * gap / (eta_g * eta_l * q * steps)
    drift = 3 * L**2 * q**2 * eta_l**2 * (eta_g**2 * staleness**2 + 1) * noise
    return start + L / 2 * eta_g * eta_l * c.variance + drift


ABOUT = 0.4  # "about as fast as 1/√T": a slope over a factor of 4 to 16 of T wavers by a few hundredths from seed to seed


def points(seed: int) -> Floats:
    """Points of all clients: each client's around a centre of its own."""
    rng = generator(seed, "theorem")
    return rng.normal(0.0, 1.0, (CLIENTS, 1, DIMENSIONS)) + rng.normal(0.0, 0.5, (CLIENTS, POINTS, DIMENSIONS))


def loss(w: Floats, z: Floats) -> float:
    return float((L * (np.sqrt(1 + (w - z) ** 2) - 1)).sum(-1).mean())


def gradient(w: Floats, z: Floats) -> Floats:
    """Of one point's loss, for any shape of points."""
    u = w - z
    slope: Floats = L * u / np.sqrt(1 + u**2)
    return slope


def minimum(z: Floats) -> float:
    """f*: f is convex, and L-smooth, so that plain gradient descent finds it."""
    w = z.mean((0, 1))
    for _ in range(2000):
        w = w - gradient(w, z).mean((0, 1)) / L
    return loss(w, z)


def constants_at(w: Floats, z: Floats) -> tuple[float, Constants]:
    """‖∇f(w)‖², and σ_l², σ_g² and G as they are at w."""
    each = gradient(w, z)
    of_client = each.mean(1)
    whole = of_client.mean(0)
    variance = float(((each - of_client[:, None]) ** 2).sum(-1).mean(1).max())
    spread = float(((of_client - whole) ** 2).sum(-1).mean())
    return float(whole @ whole), Constants(variance, spread, float((of_client**2).sum(-1).max()))


def play(t: Timeline, z: Floats, k: int, q: int, steps: int, eta_g: float, eta_l: float, seed: int) -> tuple[float, Constants]:
    """The mean of ‖∇f(w^t)‖² over `steps` server steps on a timeline, and the largest constants met on the way."""
    used = np.flatnonzero((t.outcome == "used") & (t.server_step <= steps))
    order = used[np.lexsort((t.end_time[used], t.server_step[used]))].reshape(steps, k)
    rng = generator(seed, "theorem steps", k, q, steps)
    server = Aggregation(np.full(DIMENSIONS, 3.0), sgd(eta_g))
    versions, total, met = [server.weights.copy()], 0.0, Constants(0.0, 0.0, 0.0)
    for trips in order:
        squared, here = constants_at(server.weights, z)
        total, met = total + squared, met + here
        start = np.stack([versions[v] for v in t.start_version[trips]])
        y = start.copy()
        for _ in range(q):
            y -= eta_l * gradient(y, z[t.client[trips], rng.integers(POINTS, size=k)])
        for update in start - y:
            server.add(update, 1.0)
        versions.append(server.step(int(t.staleness[trips].max())).copy())
    return total / steps, met


def run(m: int, k: int, steps: int, seed: int) -> Timeline:
    return timeline(
        start=refill(m),
        buffer_size=k,
        timing=half_normal(1.0),
        clients=CLIENTS,
        trips=steps * k + 20 * m,
        weigh=constant(),
        seed=seed,
    )


def result(ask: Ask, found: Cells) -> Result:
    seed, pairs, checks = ask.seeds[0], [], []
    z = points(seed)
    gap = loss(np.full(DIMENSIONS, 3.0), z) - minimum(z)
    horizons = STEPS[:2] if ask.quick else STEPS
    within: list[float] = []
    for m, k, q in CASES:
        means = []
        for steps in horizons:
            t = run(m, k, steps, seed)
            eta_g, eta_l = float(k), 1 / (k * math.sqrt(steps * q))
            assert eta_g * eta_l * q <= 1 / L
            measured, met = play(t, z, k, q, steps, eta_g, eta_l, seed)
            staleness = int(t.staleness[(t.outcome == "used") & (t.server_step <= steps)].max())
            tight, known = (bound(gap, eta_g, eta_l, q, steps, staleness, c) for c in (met, ANYWHERE))
            means.append(measured)
            within += [measured / tight, measured / known]
            label = f"M = {m}, K = {k}, Q = {q}, T = {steps:,} (τ_max {staleness}): mean ‖∇f‖²"
            pairs.append(Pair(f"m{m}-k{k}-q{q}-t{steps}", label, Number(tight), Number(measured), group="", digits=3))
        slope = math.log(means[-1] / means[0]) / math.log(horizons[-1] / horizons[0])
        facts = f"‖∇f‖² ~ T^{slope:.2f} from T = {horizons[0]:,} to {horizons[-1]:,}"
        checks.append(Check(f"M = {m}, K = {k}, Q = {q}: falls about as fast as 1/√T, or faster", slope <= -ABOUT, facts))
    facts = f"at most {max(within):.2g} of it in {len(within) // 2} cases; also with constants that hold for every w"
    checks.insert(0, Check("Theorem 1: the mean squared gradient stays below its bound", max(within) <= 1.0, facts))
    notes = NOTES + (["quick: fewer server steps and arrivals than the full version"] if ask.quick else [])
    stale, stale_checks = staleness_bound(seed, 20_000 if ask.quick else 100_000)
    return Result(pairs + stale, "", checks + stale_checks, notes=notes, beside="bound")


def staleness_bound(seed: int, trips: int, m: int = 100) -> tuple[list[Pair], list[Check]]:
    """Appendix A: τ_max,K ≤ ⌈τ_max,1 / K⌉ and mean τ_K ≤ mean τ_1 / K on the same arrivals."""
    of = {k: run(m, k, trips // k, seed) for k in BUFFERS}
    first = of[1].staleness[:trips]
    pairs, largest, average = [], True, True
    for k, t in of.items():
        if not np.array_equal(t.end_time[:trips], of[1].end_time[:trips]):
            raise AssertionError("the buffer size changed when trips arrive")
        limit, found = math.ceil(int(first.max()) / k), int(t.staleness[:trips].max())
        mean, mean_limit = float(t.staleness[:trips].mean()), float(first.mean()) / k
        largest, average = largest and found <= limit, average and mean <= mean_limit * 1.001 + 1e-9
        pairs.append(
            Pair(f"max-k{k}", f"M = {m}, K = {k}: largest staleness", Number(limit), Number(found), group="", digits=0)
        )
        pairs.append(
            Pair(f"mean-k{k}", f"M = {m}, K = {k}: mean staleness", Number(mean_limit), Number(mean), group="", digits=2)
        )
    facts = f"K = {', '.join(map(str, BUFFERS))} on the same {trips:,} arrivals"
    return pairs, [
        Check("Appendix A: the largest staleness is at most ⌈τ_max,1 / K⌉", largest, facts),
        Check("Appendix A: the mean staleness is at most τ_mean,1 / K", average, facts),
    ]


NOTES = [
    f"{CLIENTS} clients with {POINTS} points each in {DIMENSIONS} dimensions, L = {L:g}; η_l = 1 / (K √(TQ)), η_g = K; "
    "the bound shown takes σ_l², σ_g² and G as the largest met on the way, which is less than what holds for every w",
    "staleness counts from 0 for a fresh update; the proof counts from 1, so its own bound is larger than the one shown",
]

THEOREM = Experiment(
    "theorem",
    "Theorem 1, Appendix A",
    "The convergence bound and the staleness bound, measured",
    "The mean squared gradient of the first T server steps is below the bound of Theorem 1, which falls as 1/√T; staleness "
    "falls as 1/K.",
    result,
    datasets=(),
    one_seed=True,
)
