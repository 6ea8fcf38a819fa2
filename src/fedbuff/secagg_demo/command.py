"""`fedbuff secagg demo | bench`: the arguments, and what is printed."""

import argparse
import json
import sys
from typing import Any

from fedbuff.core import check
from fedbuff.report.terminal import print_table


def parser(commands: Any) -> None:
    """Add `secagg` to the command line's subparsers."""
    summary = "Secure aggregation: one buffer's messages and the attacks on them, or what it costs."
    secagg = commands.add_parser("secagg", help=summary, description=summary)
    parts = secagg.add_subparsers(required=True, metavar="demo | bench")

    sub = parts.add_parser("demo", help="messages and sizes of one buffer in both modes, and attacks refused")
    sub.set_defaults(command=demo)
    sub.add_argument("--weights", type=int, default=31_594, metavar="N", help="of the model (31,594: the CIFAR CNN)")
    sub.add_argument("--buffer-size", type=int, default=10, metavar="K", help="(10)")
    sub.add_argument("--helpers", default="8,6,3", metavar="N,U,T", help="committee, recovery, privacy (8,6,3)")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")

    sub = parts.add_parser("bench", help="costs per update")
    sub.set_defaults(command=bench)
    sub.add_argument("--weights", default="31594,1000000", metavar="N,…", help="of the models (31594,1000000)")
    sub.add_argument("--repeats", type=int, default=20, help="measurements of each (20)")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")
    sub.add_argument("--quiet", action="store_true", help="no progress")


def demo(args: argparse.Namespace) -> None:
    from fedbuff.secagg.coding import Code
    from fedbuff.secagg_demo import threats
    from fedbuff.secagg_demo.attacks import ATTACKS
    from fedbuff.secagg_demo.demo import enclave, helpers

    check.integer(1, weights=args.weights)
    code = Code(*_integers("--helpers", args.helpers, 3))
    shown = {
        "enclave": enclave(args.weights, args.buffer_size),
        "helpers": helpers(args.weights, args.buffer_size, code),
    }
    outcomes = [attack() for attack in ATTACKS]
    said = {"enclave": threats.ENCLAVE, "helpers": threats.HELPERS}
    if args.json:
        modes = {
            name: {"messages": [line._asdict() for line in mode.lines], "exact": mode.exact, "quantisation_error": mode.error}
            for name, mode in shown.items()
        }
        attacks = [{**vars(outcome), "refused": outcome.refused} for outcome in outcomes]
        print(json.dumps({**modes, "attacks": attacks, "threats": said}, indent=2))
        return
    titles = {
        "enclave": "Enclave: pads' seeds are sealed to a trusted aggregator, a process of its own",
        "helpers": f"Helpers: masks are shared out to {code.helpers}; {code.recovery} name a sum, {code.privacy} know nothing",
    }
    for name, mode in shown.items():
        body = [
            [
                line.message,
                line.route,
                f"{line.number:,}" if line.number else "–",
                f"{line.size:,}",
                _total(line.number * line.size),
            ]
            for line in mode.lines
        ]
        print_table(["message", "from → to", "in a buffer", "bytes each", "bytes in all"], body, titles[name])
        same = "the plain one, bit for bit" if mode.exact else "NOT the plain one"
        moved = f"quantisation moved it by {mode.error:.1g} at most, relatively"
        print(f"{args.buffer_size} updates of {args.weights:,} weights; the decoded sum is {same}; {moved}\n")
    body = [[o.attack, o.party, "refused" if o.refused else "NOT REFUSED", o.reason] for o in outcomes]
    print_table(["attack", "on", "", "why"], body, "Attacks; whoever refuses has not changed by a byte")
    for name, text in said.items():
        print(f"\n{name}: {text}")


def bench(args: argparse.Namespace) -> None:
    from fedbuff.secagg_demo.bench import bench as run_bench

    check.integer(1, repeats=args.repeats)
    lengths = _integers("--weights", args.weights)
    say = (lambda line: None) if args.quiet else (lambda line: print(line, file=sys.stderr, flush=True))
    found = run_bench(lengths, args.repeats, say)
    if args.json:
        print(json.dumps(found, indent=2))
        return
    for mode in ("enclave", "helpers", "simulation"):
        columns: dict[str, dict[str, float]] = {}
        for length, costs in found[mode].items():
            several = costs if mode == "helpers" else {"": costs}
            columns |= {f"{length:,} {name}".strip(): values for name, values in several.items()}
        rows = next(iter(columns.values()))
        body = [[name, *(f"{values[name]:,.4g}" for values in columns.values())] for name in rows]
        print_table(["", *columns], body, f"{mode}, per update")


def _total(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 1e6 else f"{size:,}" if size else "–"


def _integers(option: str, text: str, count: int | None = None) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or (count is not None and len(found) != count):
        raise ValueError(
            f"{option} {text}: expected {'integers' if count is None else f'{count} integers'} above 0 with commas"
        )
    return found
