"""Figure 6: wall-clock time and trips to the target against concurrency, when a trip takes T_i ~ Exp(1 / (λ n_i)).

As in the paper, learning and clock are put together: Figure 3's runs say how many updates (FedBuff) or rounds (FedAvgM) a
target takes, the timeline with the clients' real numbers of examples says when they are there. Over-selection is given
FedAvgM's rounds.
"""

import numpy as np

from fedbuff.core.starting import StartingRule, cohort, refill
from fedbuff.paper.draw import BY_METHOD, OVER_SELECTION, concurrencies, panels
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.fig_concurrency import best
from fedbuff.paper.fig_concurrency import cells as cells  # the same runs
from fedbuff.paper.methods import K
from fedbuff.paper.result import Check, Number, Pair, Result, exceeds, ratio
from fedbuff.sim.timeline import timeline
from fedbuff.sim.timing import exponential, per_example

LAMBDA, EXTRA = 1.0, 0.3
TITLES = {"fedbuff": "FedBuff", "fedavgm": "FedAvgM", "over-selection": "FedAvgM, over-selection"}
COLOUR = {"fedbuff": BY_METHOD["fedbuff"], "fedavgm": BY_METHOD["fedavgm"], "over-selection": OVER_SELECTION}
MOST = 50  # server steps of the synchronous timelines; the rest take as long on average


def result(ask: Ask, found: Cells) -> Result:
    steps = {method: best(ask, found, method, "server_steps") for method in ("fedbuff", "fedavgm")}
    time: dict[str, dict[int, Number]] = {key: {} for key in TITLES}
    trips: dict[str, dict[int, Number]] = {key: {} for key in TITLES}
    for m in ask.dataset.sweep:
        for key, start, k, needed in (
            ("fedbuff", refill(m), K, steps["fedbuff"][m]),
            ("fedavgm", cohort(m), m, steps["fedavgm"][m]),
            ("over-selection", cohort(m, EXTRA), m, steps["fedavgm"][m]),
        ):
            each = start.at_once() if key != "fedbuff" else k
            trips[key][m] = Number(needed.mean * each / 1000, bound=needed.bound)
            time[key][m] = Number(needed.mean * step_time(ask, start, k), bound=needed.bound)
    pairs = []
    for key, title in TITLES.items():
        for m in ask.dataset.sweep:
            pairs.append(Pair(f"{key}-{m}-time", f"{title}, M = {m:,}: wall-clock", None, time[key][m], group="time", digits=0))
            pairs.append(Pair(f"{key}-{m}-trips", f"{title}, M = {m:,}: thousand trips", None, trips[key][m], group="trips"))
    most = ask.dataset.sweep[-1]
    checks = []
    for key in ("fedavgm", "over-selection"):
        faster, thriftier = ratio(time[key][most], time["fedbuff"][most]), ratio(trips[key][most], trips["fedbuff"][most])
        better, facts = False, "not every seed of FedBuff got there"
        if faster is not None and thriftier is not None:
            better = exceeds(time[key][most], time["fedbuff"][most]) and exceeds(trips[key][most], trips["fedbuff"][most])
            facts = f"{faster.text(2)} times the time, {thriftier.text(2)} times the trips"
        checks.append(Check(f"at M = {most:,} FedBuff is faster than {TITLES[key]}, and takes fewer trips", better, facts))
    plot, axes = panels(
        [f"time to {100 * ask.dataset.target:g} % on {ask.dataset.title}", "trips"],
        "concurrency M",
        ["wall-clock, mean durations of a trip", "thousand trips"],
    )
    for ax, values in zip(axes, (time, trips), strict=True):
        for key, title in TITLES.items():
            line = [values[key][m].mean for m in ask.dataset.sweep]
            ax.plot(ask.dataset.sweep, line, color=COLOUR[key], marker="o", label=title)
        concurrencies(ax, ask.dataset.sweep)
    axes[0].set_yscale("log")
    axes[1].set_ylim(bottom=0)
    axes[0].legend(frameon=False)
    notes = [f"λ = {LAMBDA:g}: it scales every duration alike, so it cancels in units of the mean duration"]
    return Result(pairs, "mean durations of a trip", checks, notes, plot)


def step_time(ask: Ask, start: StartingRule, k: int) -> float:
    """Mean durations of a trip between two server steps, with the clients' numbers of examples."""
    timing, sizes = per_example(exponential(LAMBDA)), ask.sizes
    steps = MOST if start.cancels else 2 * MOST * max(1, start.at_once() // k)
    trips = (steps + 1) * (start.at_once() if start.cancels else k) + (0 if start.cancels else 2 * start.at_once())
    t = timeline(start=start, buffer_size=k, timing=timing, clients=len(sizes), examples=sizes, trips=trips, seed=ask.seeds[0])
    used = t.outcome == "used"
    ends = [float(t.end_time[used & (t.server_step == step)].max()) for step in (1, steps)]
    return (ends[1] - ends[0]) / (steps - 1) / (LAMBDA * float(np.mean(sizes)))


FIG_STRAGGLERS = Experiment(
    "fig-stragglers",
    "Figure 6",
    "Wall-clock time and trips with stragglers",
    "FedBuff is faster than FedAvgM, even with over-selection, and up to three times more resource efficient as concurrency "
    "grows.",
    result,
    cells,
    trips={"cifar10": 1500, "celeba": 1100, "sent140": 3000},
)
