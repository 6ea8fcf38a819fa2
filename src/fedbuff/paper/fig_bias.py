"""Figure 7: examples held by the clients that take part, when a trip takes T_i ~ Exp(1 / (λ n_i)).

Timeline only: nothing is trained. Over-selection throws away the slowest trips, which are those of clients with many examples;
FedBuff waits for them without holding up anybody.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.starting import StartingRule, cohort, refill
from fedbuff.paper.draw import BY_METHOD, OVER_SELECTION, panels
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.methods import K
from fedbuff.paper.result import Check, Number, Pair, Result
from fedbuff.report.plot import Plot
from fedbuff.sim.timeline import timeline
from fedbuff.sim.timing import exponential, per_example

LAMBDAS = (0.5, 1.0, 2.0)
UPDATES = 20_000
M = 1000


class Part(NamedTuple):
    title: str
    start: StartingRule
    k: int
    colour: str


PARTS = {
    "fedbuff": Part("FedBuff, K = 10", refill(M), K, BY_METHOD["fedbuff"]),
    "fedavgm": Part("FedAvgM", cohort(M), M, BY_METHOD["fedavgm"]),
    "over-selection": Part("FedAvgM, 30 % over-selection", cohort(M, 0.3), M, OVER_SELECTION),
}


def examples_used(part: Part, sizes: list[int], scale: float, seed: int) -> NDArray[np.int64]:
    """The examples behind `UPDATES` updates that were used, one server step after another.

    FedBuff's first steps are left out: who is fast arrives first, until those do who take longest on average.
    """
    steps = UPDATES // part.k
    before, each = (0, part.start.at_once()) if part.start.cancels else (first_steps(sizes), part.k)
    t = timeline(
        start=part.start,
        buffer_size=part.k,
        timing=per_example(exponential(scale)),
        clients=len(sizes),
        examples=sizes,
        trips=(before + steps) * each + (0 if part.start.cancels else M),  # those in flight at the last step
        seed=seed,
    )
    counted = (t.outcome == "used") & (t.server_step > before) & (t.server_step <= before + steps)
    found: NDArray[np.int64] = t.examples[counted]
    assert len(found) == UPDATES
    return found


def first_steps(sizes: list[int]) -> int:
    """FedBuff's server steps in three times the mean duration of the longest trips."""
    return math.ceil(3 * max(sizes) * len(sizes) / sum(sizes) * M / K)


def result(ask: Ask, found: Cells) -> Result:
    from scipy.stats import ks_2samp

    sizes = ask.sizes
    if len(set(sizes)) == 1:
        raise ValueError(
            f"fig-bias: every client of {ask.dataset.title} holds {sizes[0]} examples; there is nothing to be biased by"
        )
    everybody = np.array(sizes)
    many = max(2, int(np.quantile(everybody, 0.9)))  # at least so many examples: "many"
    pairs = [Pair("all", "all clients: mean examples", None, Number(float(everybody.mean())), digits=2, group="")]
    pairs += [
        Pair("all-many", f"all clients: share with {many} or more", None, Number(float((everybody >= many).mean())), digits=3)
    ]
    taken, checks = {}, []
    for key, part in PARTS.items():
        by_scale = [examples_used(part, sizes, scale, ask.seeds[0]) for scale in LAMBDAS]
        taken[key] = by_scale[1]
        if not all(np.array_equal(by_scale[1], other) for other in by_scale):
            raise AssertionError("λ changed who takes part, though it only scales the clock")
        share = float((taken[key] >= many).mean())
        pairs.append(Pair(key, f"{part.title}: mean examples", None, Number(float(taken[key].mean())), digits=2, group=""))
        pairs.append(Pair(f"{key}-many", f"{part.title}: share with {many} or more", None, Number(share), digits=3))
        test = ks_2samp(taken[key], everybody)
        left = share / float((everybody >= many).mean())
        facts = f"Kolmogorov–Smirnov D = {test.statistic:.4f}, p = {test.pvalue:.2g}; {left:.2f} of their share of clients"
        if key == "over-selection":
            lost = left < 0.9 and test.pvalue < 1e-3
            checks.append(Check("over-selection loses clients with many examples", lost, facts))
        else:
            checks.append(Check(f"{part.title} keeps clients with many examples", left > 0.9 and test.pvalue >= 1e-3, facts))
    notes = [
        f"λ = {', '.join(f'{x:g}' for x in LAMBDAS)}: the same clients take part, trip for trip, as λ only scales the clock"
    ]
    notes.append(f"updates are counted as they arrive, FedBuff's after {first_steps(sizes):,} server steps")
    rare = f"about {M:,} / {len(sizes):,} · n / {everybody.mean():.1f} of its chances"
    notes.append(f"nobody is chosen while training, so with FedBuff a client with n examples misses {rare}")
    return Result(pairs, "examples", checks, notes, draw(everybody, taken))


def draw(everybody: NDArray[np.int64], taken: dict[str, NDArray[np.int64]]) -> Plot:
    plot, (axes,) = panels(["who takes part"], "examples n held by a client", "share of updates from clients with at least n")
    for title, values, colour, style in (
        ("all clients", everybody, "0.3", "--"),
        *((PARTS[key].title, values, PARTS[key].colour, "-") for key, values in taken.items()),
    ):
        x, counts = np.unique(values, return_counts=True)
        at_least = 1.0 - np.concatenate([[0], np.cumsum(counts)[:-1]]) / len(values)
        axes.step(x, at_least, where="pre", color=colour, linestyle=style, label=title, linewidth=1.6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=5 / UPDATES)
    axes.legend(frameon=False)
    return plot


FIG_BIAS = Experiment(
    "fig-bias",
    "Figure 7",
    "Examples held by the clients that take part",
    "FedBuff includes clients with many examples whatever λ; synchronous learning with over-selection drops them.",
    result,
    datasets=("sent140",),
    quick="synthetic",
    one_seed=True,
)
