"""Figure 3: client trips to the target against concurrency, FedBuff and FedAvgM.

Tuned learning rates are those of the largest concurrency. For a smaller one, each method has the best of three server learning
rates: η_g · (M / M_max)^p with p = 0, ½, 1 (fresher updates and smaller cohorts want smaller steps).
"""

from fedbuff.paper import methods
from fedbuff.paper.cells import to_target
from fedbuff.paper.draw import BY_METHOD, concurrencies, panels
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Number, Pair, Result, exceeds, ratio
from fedbuff.report.plot import Plot
from fedbuff.toml import Table

POWERS = (0.0, 0.5, 1.0)
METHODS = ("fedbuff", "fedavgm")


def cells(ask: Ask) -> dict[str, Table]:
    return {key: table for method in METHODS for key, table in sweep(ask, method).items()}


def sweep(ask: Ask, method: str) -> dict[str, Table]:
    """Every concurrency, with each of the server learning rates."""
    most = ask.dataset.concurrency
    return {
        f"{method}-{m}-{p:g}": ask.tables(method, concurrency=m, scale=(m / most) ** p)
        for m in ask.dataset.sweep
        for p in (POWERS if m < most else (0.0,))
    }


def best(ask: Ask, found: Cells, method: str, cost: str, unit: float = 1.0) -> dict[int, Number]:
    """By concurrency, the cost to the target with the learning rate that took the fewest trips."""
    chosen = {}
    for m in ask.dataset.sweep:
        tried = [found[key] for p in POWERS if (key := f"{method}-{m}-{p:g}") in found]
        by_trips = [to_target(group, "trips") for group in tried]
        i = min(range(len(tried)), key=lambda i: (by_trips[i].bound, by_trips[i].mean))
        chosen[m] = to_target(tried[i], cost, unit)
    return chosen


def result(ask: Ask, found: Cells) -> Result:
    trips = {method: best(ask, found, method, "trips", 1000) for method in METHODS}
    pairs = [
        Pair(f"{method}-{m}", f"{methods.TITLES[method]}, M = {m:,}", None, trips[method][m])
        for method in METHODS
        for m in ask.dataset.sweep
    ]
    few, many = ask.dataset.sweep[0], ask.dataset.sweep[-1]
    times = {m: ratio(trips["fedavgm"][m], trips["fedbuff"][m]) for m in ask.dataset.sweep}
    at_few, at_many = times[few], times[many]
    grows, facts = False, "not every seed of FedBuff got there"
    if at_few is not None and at_many is not None:
        grows = exceeds(at_many, at_few)
        facts = "FedAvgM / FedBuff: " + ", ".join(f"{n.text(2) if n else '–'} at M = {m:,}" for m, n in times.items())
    checks = [Check(f"FedBuff's advantage is larger at M = {many:,} than at M = {few:,}", grows, facts)]
    notes = ["at each concurrency the best of three server learning rates, η_g · (M / M_max)^p with p = 0, ½, 1"]
    return Result(pairs, "thousand trips to the target", checks, notes, draw(ask, trips))


def draw(ask: Ask, trips: dict[str, dict[int, Number]]) -> Plot:
    plot, (axes,) = panels([f"{ask.dataset.title}, to {100 * ask.dataset.target:g} %"], "concurrency M", "thousand trips")
    for method, by_m in trips.items():
        line = [by_m[m] for m in ask.dataset.sweep]
        axes.errorbar(
            ask.dataset.sweep,
            [n.mean for n in line],
            yerr=[n.std or 0.0 for n in line],
            color=BY_METHOD[method],
            label=methods.TITLES[method],
            marker="o",
            capsize=3,
        )
        for m, n in by_m.items():
            if n.bound:
                axes.annotate("not reached", (m, n.mean), textcoords="offset points", xytext=(0, 6), ha="center", fontsize=8)
    concurrencies(axes, ask.dataset.sweep)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return plot


FIG_CONCURRENCY = Experiment(
    "fig-concurrency",
    "Figure 3",
    "Client trips against concurrency",
    "At low concurrency FedBuff and FedAvgM need about the same trips; as concurrency grows, FedAvgM needs ever more, FedBuff "
    "hardly.",
    result,
    cells,
    trips={"cifar10": 1500, "celeba": 1100, "sent140": 3000},
)
