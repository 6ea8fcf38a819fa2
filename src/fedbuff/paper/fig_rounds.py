"""Figure 1: rounds of FedAvgM to the target against concurrency. The runs are those of Figure 3."""

from fedbuff.paper.draw import BY_METHOD, concurrencies, panels
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.fig_concurrency import best, sweep
from fedbuff.paper.result import Check, Number, Pair, Result, exceeds, ratio
from fedbuff.toml import Table


def cells(ask: Ask) -> dict[str, Table]:
    return sweep(ask, "fedavgm")


def result(ask: Ask, found: Cells) -> Result:
    rounds = best(ask, found, "fedavgm", "server_steps")
    pairs = [Pair(f"fedavgm-{m}", f"M = {m:,}", None, n, digits=0) for m, n in rounds.items()]
    last, before = ask.dataset.sweep[-1], ask.dataset.sweep[-2]
    gain, more, left = ratio(rounds[before], rounds[last]), last / before, ratio(rounds[last], rounds[before])
    less, facts = False, f"not every seed got there with {last:,} clients"
    if gain is not None and left is not None:
        less = exceeds(Number(0.9 * more), gain)
        facts = f"{before:,} → {last:,} clients: {more:.2g} times the clients, {left.text(2)} times the rounds"
    checks = [Check("more clients per round bring diminishing returns", less, facts)]
    plot, (axes,) = panels([f"FedAvgM on {ask.dataset.title}, to {100 * ask.dataset.target:g} %"], "concurrency M", "rounds")
    line = [rounds[m].mean for m in ask.dataset.sweep]
    axes.plot(ask.dataset.sweep, line, color=BY_METHOD["fedavgm"], marker="o", label="FedAvgM")
    ideal = [line[0] * ask.dataset.sweep[0] / m for m in ask.dataset.sweep]
    axes.plot(ask.dataset.sweep, ideal, color="0.5", linestyle="--", label="if twice the clients halved the rounds")
    concurrencies(axes, ask.dataset.sweep)
    axes.set_yscale("log")
    axes.legend(frameon=False)
    notes = ["at each concurrency the best of three server learning rates, as in fig-concurrency"]
    return Result(pairs, "rounds to the target", checks, notes, plot)


FIG_ROUNDS = Experiment(
    "fig-rounds",
    "Figure 1",
    "Rounds against concurrency",
    "Synchronous methods show diminishing returns: ten times the clients per round (100 to 1000) reduce the rounds by less "
    "than two times.",
    result,
    cells,
    trips={"cifar10": 800, "celeba": 700, "sent140": 1500},
)
