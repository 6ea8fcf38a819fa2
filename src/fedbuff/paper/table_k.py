"""Table 2: client trips to the target accuracy with FedBuff, for buffer sizes K = 1, 10 and 100."""

from fedbuff.paper.cells import over_shared_seeds, to_target
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Number, Pair, Result
from fedbuff.toml import Table

SIZES = (1, 10, 100)

# thousands of trips, mean and standard deviation over three seeds
PAPER = {
    "celeba": {1: (32.4, 2.0), 10: (31.9, 8.9), 100: (71.6, 6.8)},
    "sent140": {1: (190.0, 11.9), 10: (124.7, 25.8), 100: (178.2, 13.1)},
    "cifar10": {1: (76.7, 9.6), 10: (67.5, 7.4), 100: (102.5, 2.0)},
}


def cells(ask: Ask) -> dict[str, Table]:
    return {f"k{k}": ask.tables("fedbuff", buffer_size=k) for k in SIZES}


def result(ask: Ask, found: Cells) -> Result:
    trips = {k: to_target(found[f"k{k}"], "trips", 1000) for k in SIZES}
    pairs = [Pair(f"k{k}", f"K = {k}", Number(*PAPER[ask.dataset.paper][k]), trips[k]) for k in SIZES]
    ten, hundred = over_shared_seeds("trips", found["k10"], found["k100"], unit=1000)
    better = not ten.bound and ten.mean <= hundred.mean
    check = Check("K = 10 takes at most K = 100's trips", better, f"{ten.text()} and {hundred.text()} thousand")
    return Result(pairs, "thousand trips to the target", [check])


TABLE_K = Experiment(
    "table-k",
    "Table 2",
    "Client trips for buffer sizes K = 1, 10, 100",
    "K = 10 is a good setting across benchmarks: smaller buffers step on noise, larger ones step too seldom.",
    result,
    cells,
    trips={"cifar10": 247, "celeba": 136, "sent140": 493},
    so_far=True,
)
