"""`fedbuff bench`: how fast this machine is."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fedbuff import toml
from fedbuff.arguments import check_positive, say_to
from fedbuff.report.files import write_json
from fedbuff.toml import SettingsError


def parser(commands: Any) -> None:
    """`fedbuff bench` for the command line's own parser."""
    summary = "How fast this machine trains, beside a per-client loop and centralised training."
    sub: argparse.ArgumentParser = commands.add_parser("bench", help=summary, description=summary)
    sub.set_defaults(command=bench)
    sub.add_argument(
        "--only", metavar="A,B", help="cifar, sent140, tweets, celeba, logistic, large, layers, engine, flat (all)"
    )
    sub.add_argument("--repeats", type=int, default=5, help="measurements of each, alternating (5)")
    sub.add_argument("--share", type=float, default=1.0, help="of the usual number of trips (1.0)")
    sub.add_argument("--workers", type=int, metavar="N", help="beside one worker (default: one per core)")
    sub.add_argument("--ray", action="store_true", help="on Ray as well")
    sub.add_argument("--bfloat16", action="store_true", help="with products of bfloat16 as well")
    sub.add_argument("--out", type=Path, default=Path("results/bench"), metavar="DIR", help="where to keep it (results/bench)")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")
    sub.add_argument("--quiet", action="store_true", help="no progress")


def bench(args: argparse.Namespace) -> None:
    from fedbuff.bench.bench import SPEED, file_name, tables
    from fedbuff.bench.bench import bench as run_bench
    from fedbuff.sim.workers import cores

    parts = (*SPEED, "large", "layers", "engine", "flat")
    chosen = parts if args.only is None else args.only.split(",")
    for name in chosen:
        if name not in parts:
            raise SettingsError(f"--only {name}: unknown; {toml.suggest(name, dict.fromkeys(parts))}")
    check_positive(args, "repeats", "share", "workers")
    args.out.mkdir(parents=True, exist_ok=True)  # before an hour of measuring
    ways = {"ray": args.ray, "bfloat16": args.bfloat16}
    result = run_bench(chosen, args.repeats, args.share, args.workers or cores(), say_to(args), **ways)
    print(json.dumps(result, indent=2) if args.json else tables(result), end="")
    write_json(args.out / file_name(result), result)
    print(f"kept in {args.out / file_name(result)}", file=sys.stderr)
