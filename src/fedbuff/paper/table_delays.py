"""Table 5: FedBuff's speed-up over FedAvgM and FedAsync under three distributions of delay."""

from itertools import pairwise

from fedbuff.paper.cells import over_shared_seeds, times, to_target
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Number, Pair, Result, exceeds
from fedbuff.toml import Table

TIMINGS: dict[str, Table] = {
    "uniform": {"uniform": {"low": 0.0, "high": 2.0}},
    "half-normal": {"half_normal": {"scale": 1.0}},
    "exponential": {"exponential": {"mean": 1.0}},
}

# (FedAvgM / FedBuff, FedAsync / FedBuff) in trips; CIFAR-10 is not in this table, but its half-normal row is in Table 1
PAPER = {
    "celeba": {"uniform": (4.7, 1.6), "half-normal": (3.3, 1.2), "exponential": (4.3, 1.1)},
    "sent140": {"uniform": (1.3, 1.2), "half-normal": (1.7, 2.5), "exponential": (1.4, 2.0)},
    "cifar10": {"half-normal": (1.8, 1.1)},
}


def cells(ask: Ask) -> dict[str, Table]:
    """FedAvgM waits for everybody: how long that takes changes its clock, not its trips, so one distribution will do."""
    found = {"fedavgm": ask.tables("fedavgm")}
    for name, timing in TIMINGS.items():
        found |= {f"{method}-{name}": ask.tables(method, timing=timing) for method in ("fedbuff", "fedasync")}
    return found


def result(ask: Ask, found: Cells) -> Result:
    pairs, checks, orders = [], [], []
    for name in TIMINGS:
        ours = to_target(found[f"fedbuff-{name}"], "trips", 1000)
        theirs = PAPER[ask.dataset.paper].get(name)
        for i, (key, title, rival) in enumerate(
            (("fedavgm", "FedAvgM", "fedavgm"), ("fedasync", "FedAsync", f"fedasync-{name}"))
        ):
            paper = None if theirs is None else Number(theirs[i])
            over = times(found[rival], found[f"fedbuff-{name}"], "trips")
            pairs.append(Pair(f"{name}-{key}", f"{name}: {title} / FedBuff", paper, over, group=name))
        pairs.append(Pair(f"{name}-fedbuff", f"{name}: FedBuff, thousand trips", None, ours, group=""))
        both = [found[f"fedbuff-{name}"], found["fedavgm"]]
        mine, avgm = over_shared_seeds("trips", *both, unit=1000)
        facts = f"{mine.text()} and {avgm.text()} thousand"
        checks.append(Check(f"FedBuff takes fewer trips than FedAvgM, {name} delays", exceeds(avgm, mine), facts))
        three = over_shared_seeds("trips", *both, found[f"fedasync-{name}"], unit=1000)
        orders.append(dict(zip(("FedBuff", "FedAvgM", "FedAsync"), three, strict=True)))
    ranked = [sorted(order, key=lambda method: (order[method].bound, order[method].mean)) for order in orders]
    known = all(exceeds(order[b], order[a]) for order, names in zip(orders, ranked, strict=True) for a, b in pairwise(names))
    told = "; ".join(f"{name}: {' < '.join(names)}" for name, names in zip(TIMINGS, ranked, strict=True))
    same = known and all(names == ranked[0] for names in ranked)
    checks.append(Check("the order is the same under all three", same, told if known else "not known"))
    return Result(pairs, "times FedBuff's trips", checks)


TABLE_DELAYS = Experiment(
    "table-delays",
    "Table 5",
    "FedBuff's speed-up under three delay distributions",
    "FedBuff's speed-up is consistent across delay distributions.",
    result,
    cells,
    trips={"cifar10": 545, "celeba": 311, "sent140": 1517},
    so_far=True,
)
