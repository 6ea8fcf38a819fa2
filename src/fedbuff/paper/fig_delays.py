"""Figure 5: delays and the staleness they make at concurrency 1000 and K = 100. Timeline only: nothing is trained."""

import numpy as np

from fedbuff.core.starting import refill
from fedbuff.paper.draw import panels
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Number, Pair, Result
from fedbuff.report.plot import COLOURS
from fedbuff.sim.timeline import timeline
from fedbuff.sim.timing import Plain, exponential, half_normal, uniform

M, K = 1000, 100
# all with the mean of half_normal(1.0), so that their delays can be drawn on one axis
TIMINGS: dict[str, Plain] = {
    "half-normal": half_normal(1.0),
    "uniform": uniform(0.0, 2 * half_normal(1.0).mean),
    "exponential": exponential(half_normal(1.0).mean),
}


def result(ask: Ask, found: Cells) -> Result:
    plot, (left, right) = panels(
        ["delay between download and upload", f"staleness at M = {M:,}, K = {K}"],
        ["virtual time", "staleness (server steps)"],
        "share of updates",
    )
    pairs, checks = [], []
    law = (M - 1) / K
    for (name, timing), colour in zip(TIMINGS.items(), COLOURS, strict=False):
        t = timeline(
            start=refill(M),
            buffer_size=K,
            timing=timing,
            clients=100 * M,
            trips=30_000 if ask.quick else 200_000,
            seed=ask.seeds[0],
        )
        settled = t.start_time > np.quantile(t.start_time, 0.1)  # the first trips meet a server that has not stepped yet
        delay, staleness = (t.end_time - t.start_time)[settled], t.staleness[settled]
        width = 0.1
        left.hist(
            delay,
            bins=np.arange(0, 4.5 + width, width).tolist(),
            weights=np.full(len(delay), 1 / len(delay)).tolist(),
            histtype="step",
            color=colour,
            linewidth=1.6,
            label=name,
        )
        counts = np.bincount(staleness) / len(staleness)
        right.step(np.arange(len(counts)), counts, where="mid", color=colour, linewidth=1.6, label=name)
        mean = float(staleness.mean())
        pairs.append(Pair(f"{name}-mean", f"{name}: mean staleness", None, Number(mean), digits=2))
        for q in (50, 99):
            pairs.append(
                Pair(
                    f"{name}-p{q}",
                    f"{name}: {q} % of updates at most",
                    None,
                    Number(float(np.percentile(staleness, q))),
                    digits=0,
                )
            )
        facts = f"{mean:.2f}, (M − 1) / K = {law:.2f}"
        checks.append(Check(f"{name}: the mean staleness is (M − 1) / K", abs(mean / law - 1) < 0.03, facts))
    right.set_xlim(0, 60)
    left.legend(frameon=False)
    notes = [
        "the paper's figure shows Meta's production delays, which are not published as numbers; it finds the half-normal "
        "close to them. Here: what that choice and the two others mean for staleness"
    ]
    notes += ["quick: 30,000 trips of each instead of 200,000"] if ask.quick else []
    return Result(pairs, "server steps", checks, notes, plot)


FIG_DELAYS = Experiment(
    "fig-delays",
    "Figure 5",
    "Delays and staleness",
    "Delays in production look half-normal; with concurrency 1000 and K = 100 most updates are a few server steps stale.",
    result,
    datasets=(),
    one_seed=True,
)
