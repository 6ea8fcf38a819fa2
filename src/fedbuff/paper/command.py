"""`fedbuff paper NAME | list | all | report | tune`: the paper's tables and figures from the command line."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedbuff import toml
from fedbuff.arguments import add_data, check_positive, say_to, seeds_of
from fedbuff.report.files import write_text
from fedbuff.report.terminal import print_table
from fedbuff.toml import SettingsError, Table
from fedbuff.tune.command import add_tuning, print_study


def parser(commands: Any) -> None:
    """`fedbuff paper` for the command line's own parser."""
    summary = "A table or figure of the paper, with our numbers beside the paper's."
    sub: argparse.ArgumentParser = commands.add_parser("paper", help=summary, description=summary)
    sub.set_defaults(command=paper)
    sub.add_argument("name", metavar="NAME", help="table1, fig-bias, …; list, all, report, tune")
    sub.add_argument("--dataset", metavar="NAME", help="cifar10, celeba or sent140 (default: all that the table has)")
    sub.add_argument("--seeds", default="0,1,2", metavar="0,1,2")
    sub.add_argument(
        "--target", type=float, metavar="0.85", help="another accuracy than the paper's, where the data at hand allows no more"
    )
    sub.add_argument("--quick", action="store_true", help="minutes instead of hours, on data that stands in for the paper's")
    sub.add_argument(
        "--so-far", action="store_true", help="run nothing: a table of what was run before, where a table can do with some"
    )
    add_data(sub)
    sub.add_argument(
        "--out",
        type=Path,
        default=Path("results/paper"),
        metavar="DIR",
        help="what was run before, and what comes out (results/paper)",
    )
    sub.add_argument(
        "--page", type=Path, default=Path("docs/paper.md"), metavar="FILE", help="all, report: what to write (docs/paper.md)"
    )
    sub.add_argument("--workers", type=int, metavar="N", help="processes that train (default: one per core; tune: 1)")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")
    sub.add_argument("--quiet", action="store_true", help="no progress")
    group = sub.add_argument_group("tune")
    group.add_argument("--method", metavar="NAME", help="fedbuff, fedasync, fedavgm, fedavg or fedprox")
    group.add_argument("--buffer-size", type=int, metavar="K", help="of FedBuff (10)")
    group.add_argument("--trips", type=int, help="at most so many in a trial (default: the dataset's 600,000)")
    add_tuning(group)


def paper(args: argparse.Namespace) -> None:
    from fedbuff.paper import experiments, report
    from fedbuff.paper.datasets import DATASETS

    check_positive(args, "workers", "trials", "trips", "buffer-size")
    if args.dataset is not None and args.dataset not in DATASETS:
        raise SettingsError(f"--dataset {args.dataset}: unknown; {toml.suggest(args.dataset, DATASETS)}")
    if args.target is not None and not 0 < args.target < 1:
        raise SettingsError(f"--target {args.target:g}: expected an accuracy between 0 and 1, e.g. 0.85")
    seeds = seeds_of(args.seeds)
    quiet = args.quiet or args.json
    request = experiments.Request(args.out, args.dataset, seeds, args.quick, args.workers, quiet, args.so_far, args.target)
    if args.name == "list":
        print_list(experiments.status(request), experiments.estimate, args)
        return
    if args.name == "tune":
        tune_one(args)
        return
    results = []
    if args.name == "all":
        results = experiments.all_of(request, say_to(args))
    elif args.name != "report":
        experiment = experiments.find(args.name)
        if args.dataset is not None and not experiment.datasets:
            raise SettingsError(f"--dataset {args.dataset}: {args.name} needs no data; leave it out")
        results = experiments.run(experiment, request, say_to(args))
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        for kept in results:
            print_result(kept)
    if args.name == "report" and not args.out.is_dir():
        raise SettingsError(f"--out {args.out}: no such folder, so there is nothing to report")
    if args.name in ("all", "report"):
        text, missing = report.report(args.out, args.page)
        args.page.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.page, text)
        unexplained = f"; unexplained: {', '.join(missing)} (sentences go into {args.out / report.WHY})" if missing else ""
        print(f"report: {args.page}{unexplained}", file=sys.stderr if args.json else sys.stdout)


def tune_one(args: argparse.Namespace) -> None:
    from fedbuff.paper.datasets import DATASETS
    from fedbuff.paper.tuning import tune_method

    if args.dataset is None or args.method is None:
        raise SettingsError("paper tune: give --dataset and --method, e.g. --dataset cifar10 --method fedavgm")
    path, study = tune_method(
        DATASETS[args.dataset],
        args.method,
        args.out,
        buffer_size=args.buffer_size,
        trials=args.trials,
        trips=args.trips,
        target=args.target,
        ranges=args.ranges,
        workers=args.workers or 1,
        say=say_to(args),
    )
    if args.json:
        print(json.dumps(study, indent=2))
        return
    print_study(study)
    print(f"settings: {path}")


def print_list(rows: list[Table], estimate: Callable[[Table], str], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    header = [
        "fedbuff paper …",
        "in the paper",
        "--dataset",
        f"about, {len(args.seeds.split(','))} seeds",
        "runs cached",
        "results kept",
    ]
    body = []
    for row in rows:
        runs = "no training" if row["runs"] == 0 else f"{row['cached']} of {'?' if row['runs'] is None else row['runs']}"
        body.append([row["name"], row["where"], row["dataset"], estimate(row), runs, ", ".join(row["results"]) or "–"])
    print_table(
        header, body, caption="--quick takes minutes on stand-in data; `all` makes them all, `report` writes docs/paper.md"
    )


def print_result(kept: Table) -> None:
    from fedbuff.paper.result import lines

    header, body = lines(kept)
    print(f"{kept['where']}: {kept['title']}")
    print_table(header, body, caption=". ".join([kept["data"], *kept["caveats"], *kept["notes"]]))
    for check in kept["checks"]:
        otherwise = "not shown so far" if kept.get("so_far") else "DOES NOT HOLD"
        print(f"{'holds' if check['holds'] else otherwise}: {check['claim']} ({check['facts']})")
    print()
