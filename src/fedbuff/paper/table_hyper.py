"""Table 4: the best hyperparameters of Table 1's runs, the paper's beside those of our own tuning."""

from fedbuff.paper import methods
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Number, Pair, Result

# client learning rate, server learning rate, and β or μ
PAPER = {
    "celeba": {
        "fedbuff": methods.Rates(4.7e-6, 1.0e3, beta=0.3),
        "fedasync": methods.Rates(5.7, 2.8e-3),
        "fedavgm": methods.Rates(1.1e-1, 2.4e-1, beta=0.83),
        "fedavg": methods.Rates(1.0e2, 1.6e-3),
        "fedprox": methods.Rates(4.9e-4, 1.0e2, mu=1.0e-2),
    },
    "sent140": {
        "fedbuff": methods.Rates(1.3e1, 4.9e-2, beta=0.5),
        "fedasync": methods.Rates(1.7e1, 1.5e-2),
        "fedavgm": methods.Rates(1.5, 3.4e-1, beta=0.9),
        "fedavg": methods.Rates(2.6e-3, 1.0e3),
        "fedprox": methods.Rates(2.0e-3, 1.0e3, mu=1.0e-3),  # "1.0^3" in the paper
    },
    "cifar10": {
        "fedbuff": methods.Rates(1.95e-4, 4.09e1, beta=0.0),
        "fedasync": methods.Rates(1.0e2, 6.4e-5),
        "fedavgm": methods.Rates(1.0e1, 1.02e-3, beta=0.9),
        "fedavg": methods.Rates(1.0e1, 1.02e-3),
        "fedprox": methods.Rates(1.0e1, 1.02e-3, mu=1.0e-3),
    },
}
NAMES = {"client": "η_l", "server": "η_g", "beta": "β", "mu": "μ"}


def result(ask: Ask, found: Cells) -> Result:
    pairs, notes, tuned, budgets = [], [], [], {}
    for method, title in methods.TITLES.items():
        ours, theirs = methods.rates(ask.at_hand, ask.tuned, method), PAPER[ask.dataset.paper][method]
        for name, letter in NAMES.items():
            values = [getattr(rates, name) for rates in (theirs, ours)]
            if values != [None, None]:
                paper, own = (None if value is None else Number(value) for value in values)
                pairs.append(Pair(f"{method}-{name}", f"{title} {letter}", paper, own, group="", digits=-1))
        if (other := methods.same_as(ask.at_hand, method)) != method:
            notes.append(f"{title}: not tuned; with one local step it is {methods.TITLES[other]}, whose rates it has")
            continue
        tuned.append(method)
        study = methods.study(ask.tuned / ask.dataset.name / f"{method}.toml")
        if study is not None:
            budgets[method] = tuple(study[name] for name in ("trials", "trips", "ranges", "target"))
            seeds = f"seeds {study['seeds'][0]} and {study['seeds'][1]}"
            best = f"it took {study['best']:,.0f} to the target"
            best = best if study["reached"] else "none reached the target, so it is the one with the best accuracy"
            notes.append(f"{title}: the best of {study['trials']} trials of at most {study['trips']:,} trips; {best} ({seeds})")
    notes.append(
        "The paper adds up FedBuff's updates where we average them, so its η_g is to be multiplied by K before it is compared. "
        "Most clients take a single local step, on which only η_l · η_g counts"
    )
    equal = len(budgets) == len(tuned) and len(set(budgets.values())) == 1
    facts = "; ".join(
        f"{methods.TITLES[m]} {trials} × {trips:,} trips, {ranges} ranges, to {100 * target:g} %"
        for m, (trials, trips, ranges, target) in budgets.items()
    )
    return Result(
        pairs, "", [Check("every method was tuned with the same budget", equal, facts or "none was tuned yet")], notes
    )


TABLE_HYPER = Experiment(
    "table-hyper",
    "Table 4",
    "The best hyperparameters",
    "Each method is compared at the best client and server learning rates, momentum and proximal term found for it.",
    result,
)
