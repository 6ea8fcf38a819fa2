"""Figure 4: accuracy after one pass over the clients against epsilon, for four private methods.

FedBuff and FedAvgM with DP-FTRL (the paper's tree), FedAvgM with amplified DP-SGD on Poisson cohorts, and FedBuff with a BLT,
which the paper did not have. Every client takes part at most once, in Poisson cohorts once on average; all methods have the
same clip, momentum and four server learning rates to choose from, in proportion to the updates of a step. Staleness is not
weighted: noise is paid for a weight of 1, whatever the weight is.
"""

import math

from fedbuff.paper.draw import panels
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Number, Pair, Result, spread
from fedbuff.privacy import prefix, sensitivity
from fedbuff.report.plot import COLOURS, Plot
from fedbuff.toml import Table

METHODS = {
    "fedbuff-blt": "FedBuff + BLT",
    "fedbuff-tree": "FedBuff + DP-FTRL",
    "fedavgm-tree": "FedAvgM + DP-FTRL",
    "fedavgm-sgd": "FedAvgM + DP-SGD",
}
EPSILONS = (6.0, 12.0, 24.0, math.inf)
RATES = (0.1, 0.2, 0.3, 0.5)  # of FedBuff's server; a cohort's are larger as the cohort is larger than the buffer
K, COHORT, CLIP, DELTA, BETA = 10, 100, 0.1, 1e-5, 0.9
TRIPS = {"sent140": 40_000, "synthetic-iid": 20_000}
QUICK = 6_000
NEAR = 0.01  # of accuracy: what seeds differ by


def cells(ask: Ask) -> dict[str, Table]:
    return {
        f"{method}-{epsilon:g}-{rate:g}": tables(ask, method, epsilon, rate)
        for epsilon in epsilons(ask)
        for method in METHODS
        for rate in (RATES[1:3] if ask.quick else RATES)
    }


def epsilons(ask: Ask) -> tuple[float, ...]:
    return EPSILONS[::3] if ask.quick else EPSILONS


def trips(ask: Ask) -> int:
    return QUICK if ask.quick else TRIPS.get(ask.dataset.name, 20_000)


def tables(ask: Ask, method: str, epsilon: float, rate: float) -> Table:
    """The settings of one run. Without a bound on epsilon there still is a clip, and next to no noise."""
    size = K if method.startswith("fedbuff") else COHORT
    steps = trips(ask) // size
    name = method.split("-")[0]
    noise: Table = {"noise_multiplier": 1e-6} if math.isinf(epsilon) else {"epsilon": epsilon}
    made: Table = {
        "name": method,
        "task": ask.dataset.task if ask.dataset.name != "sent140" else {"sent140": {"model": {"linear": {}}}},
        "algorithm": {name: {"concurrency": COHORT, "lr": rate * size / K, "beta": BETA}},
        "client": {"lr": 1.0, "batch_size": 32},
        "until": {"server_steps": steps},
        "target": ask.dataset.target,
        "evaluate_every": 1 << 40,
        "server": {"weigh": {"constant": {"value": 1.0}}},
        "privacy": {"clip": CLIP, "delta": DELTA, "horizon": steps, "noise": "seeded", **noise},
    }
    if name == "fedbuff":
        made["algorithm"][name]["buffer_size"] = K
    if method == "fedavgm-sgd":
        made["server"]["start"] = {"cohort": {"size": COHORT, "poisson": True}}
        made["privacy"] |= {"mechanism": "gaussian"}
    else:
        made["privacy"] |= {"mechanism": method.split("-")[1], "max_participations": 1}
    return made


def accuracies(ask: Ask, found: Cells) -> dict[str, dict[float, Number]]:
    """Of each method at each epsilon, with the learning rate that was best on average."""
    chosen: dict[str, dict[float, Number]] = {method: {} for method in METHODS}
    for method in METHODS:
        for epsilon in epsilons(ask):
            tried = [group for key, group in found.items() if key.startswith(f"{method}-{epsilon:g}-")]
            reached = [[100 * next(iter(cell.summary["metrics"].values()))["accuracy"] for cell in group] for group in tried]
            chosen[method][epsilon] = max((spread(values) for values in reached), key=lambda n: n.mean)
    return chosen


def result(ask: Ask, found: Cells) -> Result:
    accuracy = accuracies(ask, found)
    pairs = [
        Pair(f"{method}-{epsilon:g}", f"{title}, ε = {shown(epsilon)}", None, accuracy[method][epsilon])
        for epsilon in epsilons(ask)
        for method, title in METHODS.items()
    ]
    steps = trips(ask) // K
    blt, tree = largest_noise(steps)
    behind = {e: accuracy["fedbuff-tree"][e].mean - accuracy["fedavgm-tree"][e].mean for e in epsilons(ask)}
    facts = ", ".join(f"{difference:+.1f} at ε = {shown(e)}" for e, difference in behind.items())
    checks = [
        Check(
            "at equal epsilon, the noise of BLT's prefix sums is below the tree's",
            blt < tree,
            f"at most {blt:.2f} and {tree:.2f} times σ · clip of one release, {steps:,} steps",
        ),
        Check(
            f"FedBuff + DP-FTRL reaches the accuracy of FedAvgM + DP-FTRL, to {100 * NEAR:g} point",
            all(difference >= -100 * NEAR for difference in behind.values()),
            f"points of accuracy: {facts}",
        ),
    ]
    notes = [
        f"{trips(ask):,} trips, each client at most once, or once on average in the Poisson cohorts of DP-SGD: "
        f"{steps:,} server steps of FedBuff with K = {K}, "
        f"{trips(ask) // COHORT:,} of FedAvgM with cohorts of {COHORT}",
        f"concurrency {COHORT}, δ = {DELTA:g}, clip {CLIP:g}, β = {BETA:g}, seeded noise",
        "a linear model (on the mean of a tweet's word vectors, on Sent140), not the paper's LSTM: at this number of clients, "
        "noise would drown it",
        "the best of the same server learning rates for each method, times the updates of a step; the search is not in epsilon",
    ]
    return Result(pairs, "% accuracy after one pass", checks, notes, draw(ask, accuracy))


def largest_noise(steps: int) -> tuple[float, float]:
    """The standard deviation of the worst prefix sum, of BLT and of the tree, at the same epsilon."""
    decay, weight = sensitivity.constants(steps)
    blt = prefix.of_blt(decay, weight, steps).max() * sensitivity.of_blt(steps, steps, 1, 1)
    tree = prefix.of_tree(steps).max() * sensitivity.of_tree(steps, 1, 1)
    return math.sqrt(blt), math.sqrt(tree)


def shown(epsilon: float) -> str:
    return "∞" if math.isinf(epsilon) else f"{epsilon:g}"


def draw(ask: Ask, accuracy: dict[str, dict[float, Number]]) -> Plot:
    plot, (axes,) = panels([ask.dataset.title], "epsilon", "accuracy after one pass, %")
    places = range(len(epsilons(ask)))
    for i, ((method, title), colour) in enumerate(zip(METHODS.items(), COLOURS, strict=False)):
        line = list(accuracy[method].values())
        beside = [place + 0.06 * (i - 1.5) for place in places]  # so that no bar hides another
        axes.errorbar(
            beside, [n.mean for n in line], yerr=[n.std or 0.0 for n in line], color=colour, label=title, marker="o", capsize=3
        )
    axes.set_xticks(list(places), [shown(epsilon) for epsilon in epsilons(ask)])
    axes.legend(frameon=False)
    return plot


FIG_DP = Experiment(
    "fig-dp",
    "Figure 4",
    "Accuracy under differential privacy",
    "FedBuff with DP-FTRL outperforms FedAvgM with amplified DP-SGD and with DP-FTRL at large epsilon, and is competitive at "
    "smaller ones.",
    result,
    cells,
    datasets=("sent140", "synthetic-iid"),
    quick="synthetic-iid",
    beside="sent140",
    trips={"sent140": 2560, "synthetic-iid": 1280},
    linear=True,
)
