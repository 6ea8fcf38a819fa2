"""Figures 9 to 11: learning curves under the three delay distributions. The runs are those of Table 5."""

import numpy as np

from fedbuff.paper import methods
from fedbuff.paper.cells import Cell, to_target
from fedbuff.paper.draw import BY_METHOD, panels
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Pair, Result, exceeds
from fedbuff.paper.table_delays import TIMINGS
from fedbuff.paper.table_delays import cells as cells  # the same runs

METHODS = ("fedbuff", "fedasync", "fedavgm")


def result(ask: Ask, found: Cells) -> Result:
    plot, axes = panels([f"{name} delays" for name in TIMINGS], "thousand trips", "accuracy", share_y=True)
    pairs, checks = [], []
    for name, ax in zip(TIMINGS, axes, strict=True):
        trips = {}
        for method in METHODS:
            group = found["fedavgm" if method == "fedavgm" else f"{method}-{name}"]
            trips[method] = to_target(group, "trips", 1000)
            x, y = mean_curve(group)
            ax.plot(x / 1000, y.mean(0), color=BY_METHOD[method], label=methods.TITLES[method], linewidth=1.6)
            ax.fill_between(x / 1000, y.min(0), y.max(0), color=BY_METHOD[method], alpha=0.15, linewidth=0)
            pairs.append(Pair(f"{name}-{method}", f"{name}: {methods.TITLES[method]}", None, trips[method], group=name))
        ax.axhline(ask.dataset.target, color="0.4", linewidth=1, linestyle="--")
        ax.set_xlim(left=0)
        ours, rival = trips["fedbuff"], trips["fedavgm"]
        facts = f"{ours.text()} and {rival.text()} thousand trips"
        checks.append(Check(f"{name}: FedBuff is there before FedAvgM", exceeds(rival, ours), facts))
    axes[0].legend(frameon=False, loc="lower right")
    notes = ["mean and range over seeds; a run ends when it reaches the target, and then keeps its last value"]
    return Result(pairs, "thousand trips to the target", checks, notes, plot)


def mean_curve(
    group: list[Cell],
) -> "tuple[np.ndarray[tuple[int], np.dtype[np.float64]], np.ndarray[tuple[int, int], np.dtype[np.float64]]]":
    """Trips, and the accuracy of every seed there."""
    lines = [
        tuple(zip(*((t, a) for t, a in zip(c.curve["trips"], c.curve["accuracy"], strict=True) if a is not None), strict=True))
        for c in group
    ]
    x = np.unique(np.concatenate([np.array(ts, float) for ts, _ in lines]))
    return x, np.stack([np.interp(x, np.array(ts, float), np.array(accuracies, float)) for ts, accuracies in lines])


FIG_CURVES = Experiment(
    "fig-curves",
    "Figures 9 to 11",
    "Learning curves",
    "FedBuff is robust to the distribution of delays; the synchronous methods don't depend on it.",
    result,
    cells,
    trips={"cifar10": 545, "celeba": 311, "sent140": 1517},
)
