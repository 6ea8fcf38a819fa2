"""Beyond the paper: client trips to the target when the mean of the last versions is evaluated, not the newest one.

A step of FedBuff is over ten clients, so a single version of it wavers; one of FedAvgM is over a thousand, with momentum, and
hardly does. The runs are those of Table 1, with the same rates: only what is evaluated differs.
"""

from fedbuff.paper import methods, table1
from fedbuff.paper.cells import over_shared_seeds, times, to_target
from fedbuff.paper.experiment import Ask, Cells, Experiment
from fedbuff.paper.result import Check, Pair, Result, exceeds
from fedbuff.toml import Table

METHODS = ("fedbuff", "fedasync", "fedavgm")
TURNS = 2  # the mean is over so many times the trips in flight


def cells(ask: Ask) -> dict[str, Table]:
    newest = {method: ask.tables(method) for method in METHODS}
    return newest | {averaged(m): ask.tables(m, average=TURNS * ask.dataset.concurrency) for m in METHODS}


def averaged(method: str) -> str:
    return f"{method}-averaged"


def result(ask: Ask, found: Cells) -> Result:
    trips = {key: to_target(group, "trips", 1000) for key, group in found.items()}
    pairs = []
    for method in METHODS:
        title = methods.TITLES[method]
        pairs.append(Pair(method, title, table1.beside(ask, method), trips[method], group="newest"))
        pairs.append(Pair(averaged(method), f"{title}, averaged", None, trips[averaged(method)], group="averaged"))
    for method in METHODS[1:]:
        label = f"{methods.TITLES[method]} / FedBuff"
        pairs.append(Pair(f"{method}-speedup", label, None, times(found[method], found["fedbuff"], "trips"), group=""))
        ours = times(found[averaged(method)], found[averaged("fedbuff")], "trips")
        pairs.append(Pair(f"{averaged(method)}-speedup", f"{label}, both averaged", None, ours, group=""))
    newest, mean = over_shared_seeds("trips", found["fedbuff"], found[averaged("fedbuff")], unit=1000)
    check = Check(
        "averaged, FedBuff takes fewer trips", exceeds(newest, mean), f"{mean.text()} in place of {newest.text()} thousand"
    )
    return Result(pairs, "thousand trips to the target", [check], ["the averaged runs have Table 1's rates, tuned without it"])


TABLE_AVERAGE = Experiment(
    "table-average",
    "Beyond the paper",
    "Client trips when the mean of the last versions is evaluated",
    "evaluates single versions. Here runs of their own evaluate a mean of the last, of twice as many trips as are in flight.",
    result,
    cells,
    trips={"cifar10": 530, "celeba": 350, "sent140": 1300},
    so_far=True,
)
