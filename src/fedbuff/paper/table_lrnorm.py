"""Table 7: LR-Norm against weighting updates by examples, and against not weighting them."""

from fedbuff.paper.cells import to_target
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.methods import BATCH_SIZE
from fedbuff.paper.result import Check, Number, Pair, Result
from fedbuff.toml import Table

SIZES = (1, 10, 100)
WEIGHTINGS = {"lr-norm": "LR-Norm", "examples": "example weight", "uniform": "uniform weight"}

# thousands of trips: LR-Norm, example weight, uniform weight
PAPER = {
    "celeba": {1: (20.8, 23.9, 20.7), 10: (27.1, 25.5, 28.7), 100: (57.6, 57.6, 54.4)},
    "sent140": {1: (190.0, 201.9, 201.9), 10: (124.7, 207.9, 136.6), 100: (178.2, 570.3, 231.7)},
}


def cells(ask: Ask) -> dict[str, Table]:
    """The other two weightings take full steps on small batches: their client learning rate is LR-Norm's mean one."""
    usual = sum(min(n, BATCH_SIZE) for n in ask.sizes) / len(ask.sizes) / BATCH_SIZE
    return {
        f"k{k}-{weighting}": ask.tables(
            "fedbuff", buffer_size=k, weighting=weighting, client_scale=1.0 if weighting == "lr-norm" else usual
        )
        for k in SIZES
        for weighting in WEIGHTINGS
    }


def result(ask: Ask, found: Cells) -> Result:
    pairs, trips = [], {key: to_target(group, "trips", 1000) for key, group in found.items()}
    for k in SIZES:
        theirs = PAPER.get(ask.dataset.paper, {}).get(k)
        for i, (weighting, title) in enumerate(WEIGHTINGS.items()):
            paper = None if theirs is None else Number(theirs[i])
            pairs.append(Pair(f"k{k}-{weighting}", f"K = {k}, {title}", paper, trips[f"k{k}-{weighting}"], group=f"k{k}"))
    ours, others = trips["k10-lr-norm"], [trips[f"k10-{weighting}"] for weighting in ("examples", "uniform")]
    best = not ours.bound and all(ours.mean <= 1.1 * n.mean for n in others)
    facts = f"{ours.text()}, {others[0].text()} and {others[1].text()} thousand trips"
    check = Check("at K = 10 LR-Norm is the best weighting, or within 10 % of it", best, facts)
    spread = len(set(ask.sizes)) > 1
    notes = [] if spread else ["every client holds the same number of examples here: the three weightings are one algorithm"]
    return Result(pairs, "thousand trips to the target", [check], notes)


TABLE_LRNORM = Experiment(
    "table-lrnorm",
    "Table 7",
    "LR-Norm against example and uniform weights",
    "Where clients hold very different numbers of examples (Sent140), LR-Norm beats both; on CelebA the three are alike.",
    result,
    cells,
    datasets=("celeba", "sent140"),
    beside="sent140",
    trips={"celeba": 316, "sent140": 1844},
)
