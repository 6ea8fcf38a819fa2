"""`fedbuff tune`: a search for learning rates, momentum and proximal term."""

import argparse
import json
from pathlib import Path
from typing import Any

from fedbuff import settings
from fedbuff.arguments import add_data, add_set, changed, check_positive, say_to
from fedbuff.toml import Table


def parser(commands: Any) -> None:
    """`fedbuff tune` for the command line's own parser."""
    summary = "Search learning rates, momentum and proximal term for the fewest trips to the target."
    sub: argparse.ArgumentParser = commands.add_parser("tune", help=summary, description=summary)
    sub.set_defaults(command=tune)
    sub.add_argument("settings", type=Path, metavar="SETTINGS.toml")
    add_set(sub)
    add_data(sub)
    sub.add_argument("--seed", type=int, help="of the runs and the search (100)")
    add_tuning(sub)
    sub.add_argument("--workers", type=int, metavar="N", help="processes, each with a trial of its own (1)")
    sub.add_argument("--out", type=Path, metavar="DIR", help="where the study is kept, and goes on (default: under runs/)")
    sub.add_argument("--json", action="store_true", help="print the study as JSON")
    sub.add_argument("--quiet", action="store_true", help="no progress")


def add_tuning(sub: argparse._ActionsContainer) -> None:
    """--trials and --ranges."""
    sub.add_argument("--trials", type=int, default=30, help="until the study has so many (30)")
    sub.add_argument("--ranges", choices=("narrow", "paper", "one-step"), default="narrow", help="of η_l, η_g, β, μ (narrow)")


def tune(args: argparse.Namespace) -> None:
    from fedbuff.tune.study import tune as run_study

    check_positive(args, "trials", "workers")
    tables = changed(settings.read(args.settings), args)
    out = args.out or Path("runs") / f"tune-{args.settings.stem}"
    study = run_study(
        tables,
        out,
        trials=args.trials,
        ranges=args.ranges,
        workers=args.workers or 1,
        seed=100 if args.seed is None else args.seed,
        say=say_to(args),
    )
    if args.json:
        print(json.dumps(study, indent=2))
        return
    print_study(study)
    print(f"settings: {out / 'best.toml'}" if study["best"] else f"study: {out}")


def print_study(study: Table) -> None:
    best = study["best"]
    print(f"{study['trials']} trials, {study['given_up']} given up; target {study['target']:g} within {study['trips']:,} trips")
    if best is not None:
        found = f"{best['cost']:,.0f} trips" if best["reached"] else "target not reached"
        print(f"best: {found}; " + ", ".join(f"{path} = {value:.4g}" for path, value in best["values"].items()))
