"""Figure 2: active clients over time, synchronous and asynchronous. Timeline only: nothing is trained."""

import numpy as np
from numpy.typing import NDArray

from fedbuff.core.starting import StartingRule, cohort, refill
from fedbuff.paper.draw import BY_METHOD, OVER_SELECTION, panels
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Pair, Result, spread
from fedbuff.sim.timeline import Timeline, timeline
from fedbuff.sim.timing import half_normal

M, UNTIL = 100, 12.0
RULES: dict[str, tuple[str, StartingRule, int, str]] = {
    "fedbuff": ("asynchronous (FedBuff, K = 10)", refill(M), 10, BY_METHOD["fedbuff"]),
    "fedavgm": ("synchronous", cohort(M), M, BY_METHOD["fedavgm"]),
    "over-selection": ("synchronous, 30 % over-selection", cohort(M, 0.3), M, OVER_SELECTION),
}


def active(t: Timeline, times: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many trips are in flight at each of `times`."""
    starts, ends = np.sort(t.start_time), np.sort(t.end_time)
    return np.searchsorted(starts, times, "right") - np.searchsorted(ends, times, "right")


def result(ask: Ask, found: Cells) -> Result:
    times = np.linspace(0.0, UNTIL, 2400, endpoint=False)
    plot, axes = panels([title for title, *_ in RULES.values()], "virtual time", "active clients", share_y=True)
    pairs, shares = [], {}
    for (key, (title, start, k, colour)), ax in zip(RULES.items(), axes, strict=True):
        shared = []
        for seed in ask.seeds:
            t = timeline(start=start, buffer_size=k, timing=half_normal(1.0), clients=100 * M, trips=40 * M, seed=seed)
            count = active(t, times)
            shared.append(float(count.mean()) / start.at_once())
            if seed == ask.seeds[0]:
                ax.fill_between(times, count, step="post", color=colour, alpha=0.25, linewidth=0)
                ax.step(times, count, where="post", color=colour, linewidth=1.2)
        shares[key] = spread(shared)
        pairs.append(Pair(key, f"{title}: mean active / started", None, shares[key], digits=2))
    axes[0].set_ylim(0, 1.4 * M)
    idle = shares["fedavgm"].mean
    checks = [
        Check(
            "asynchronous: always as many clients as there may be", shares["fedbuff"].mean > 0.999, shares["fedbuff"].text(3)
        ),
        Check("synchronous: clients wait for the slowest", idle < 0.5, f"{100 * idle:.0f} % of them are active on average"),
    ]
    return Result(pairs, "", checks, [f"concurrency {M}, half-normal durations, virtual time up to {UNTIL:g}"], plot)


FIG_PROGRESS = Experiment(
    "fig-progress",
    "Figure 2",
    "Active clients over time",
    "In synchronous learning the number of active clients falls towards the end of each round; in asynchronous learning it "
    "stays constant.",
    result,
    datasets=(),
)
