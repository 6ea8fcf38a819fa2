"""Arguments that several commands of the command line share, and what becomes of them."""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from fedbuff import settings
from fedbuff.toml import SettingsError, Table


def add_set(sub: argparse._ActionsContainer) -> None:
    """--set KEY=VALUE, which `changed` applies."""
    sub.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting, e.g. server.buffer_size=10"
    )


def add_data(sub: argparse._ActionsContainer) -> None:
    """--data DIR."""
    sub.add_argument("--data", type=Path, metavar="DIR", help="where the datasets are (default: $FEDBUFF_DATA)")


def changed(tables: Table, args: argparse.Namespace) -> Table:
    """The file's tables with --set and --seed applied."""
    for assignment in args.set:
        tables = settings.change(tables, assignment)
    return tables if getattr(args, "seed", None) is None else {**tables, "seed": args.seed}


def seeds_of(text: str) -> tuple[int, ...]:
    """--seeds 0,1,2."""
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        seeds = ()
    if not seeds or len(set(seeds)) < len(seeds) or min(seeds) < 0:
        raise SettingsError(f"--seeds {text}: expected different integers with commas, e.g. 0,1,2")
    return seeds


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Refuse arguments of these names that are 0 or less, or no finite numbers."""
    for name in names:
        if (value := getattr(args, name.replace("-", "_"))) is not None and not 0 < value < math.inf:
            raise SettingsError(f"--{name} {value}: expected more than 0")


def say_to(args: argparse.Namespace) -> Callable[[str], None]:
    """Where progress in lines goes: to stderr, or nowhere."""
    return (lambda line: None) if args.quiet else (lambda line: print(line, file=sys.stderr, flush=True))
