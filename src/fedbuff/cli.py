"""The command line: `fedbuff run | compare | demo | timeline | show | report | tune | paper | bench | privacy | secagg | …`.

Everything here is thin: it reads settings, calls what the Python API calls, and prints. A user's mistake is one line on
stderr and exit code 2.
"""

import argparse
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from fedbuff import privacy_command, settings, toml
from fedbuff.arguments import add_data, add_set, changed, seeds_of
from fedbuff.bench import command as bench_command
from fedbuff.demo import DEMO
from fedbuff.deploy import command as deploy_command
from fedbuff.deploy import replay
from fedbuff.deploy.doctor import command as doctor_command
from fedbuff.paper import command as paper_command
from fedbuff.presets import PRESETS
from fedbuff.report.compare import cells, comparison, markdown, on_what
from fedbuff.report.files import FolderError, write_json, write_text
from fedbuff.report.folder import write_trips
from fedbuff.report.progress import bar
from fedbuff.report.run import Run, load
from fedbuff.report.terminal import print_table
from fedbuff.secagg_demo.command import parser as secagg
from fedbuff.settings import Settings, from_tables
from fedbuff.sim.simulation import Status
from fedbuff.toml import SettingsError, Table
from fedbuff.tune import command as tune_command
from fedbuff.version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        _set_data(args)
        args.command(args)
    except BrokenPipeError:  # `fedbuff … | head`: whoever read has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("fedbuff: interrupted; what was kept is safe (a run goes on with --resume)", file=sys.stderr)
        return 130
    except (SettingsError, FolderError, ValueError) as e:
        return _complain(e, str(e))
    except OSError as e:
        if e.filename is None:
            raise
        return _complain(e, f"{e.filename}: {e.strerror}")  # a folder that is a file, a disk that is full
    return 0


def _complain(error: Exception, text: str) -> int:
    """Say what is wrong in one line."""
    if os.environ.get("FEDBUFF_TRACEBACK"):
        raise error
    print(f"fedbuff: {' '.join(text.split())}", file=sys.stderr)
    return 2


# ── commands ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def run(args: argparse.Namespace) -> None:
    if args.settings is None and not (args.resume and args.out):
        raise SettingsError("give a SETTINGS.toml, or --resume with --out DIR to go on with a run")
    file = args.settings or args.out / "settings.toml"
    experiment = _checked(file, changed(settings.read(file), args))
    out = args.out or Path("runs") / f"{file.stem}-seed{experiment.seed}"
    finished = _run_one(experiment, out, args)
    print(json.dumps(finished.summary, indent=2) if args.json else finished)


def compare(args: argparse.Namespace) -> None:
    tables = _variants(args)
    out = args.out or Path("runs") / args.settings[0].stem
    seeds = _seeds(args)
    experiments = [
        (name, seed, _checked(f"{args.settings[0]}: {name}", changed({**table, "seed": seed}, args)))
        for name, table in tables.items()
        for seed in seeds
    ]
    reused = sum((out / f"{name}-seed{seed}" / "summary.json").exists() for name, seed, _ in experiments)
    runs: dict[str, list[Run]] = {}
    for name, seed, experiment in experiments:  # all settings are checked by now, before the first run starts
        runs.setdefault(name, []).append(_run_one(experiment, out / f"{name}-seed{seed}", args, resume=True))
    rows = comparison(runs)
    write_json(out / "comparison.json", rows)
    write_text(out / "comparison.md", markdown(rows))
    plots = _save_plots(runs, out)
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    header, body = cells(rows)
    if len(names := {run.summary["task"] for group in runs.values() for run in group}) > 1:
        print(f"fedbuff: not the same task: {', '.join(sorted(names))}; their numbers do not compare", file=sys.stderr)
    print_table(header, body, caption=f"{on_what(rows)}; mean ± std over seeds {', '.join(map(str, seeds))}")
    if reused:
        print(f"{reused} of {len(experiments)} runs were finished before and not run again; remove {out} to run them anew")
    print(f"runs and tables in {out}" + "".join(f"\nplot: {path}" for path in plots))


def timeline(args: argparse.Namespace) -> None:
    from fedbuff import timeline as make_timeline

    tables: Table = (
        settings.read(args.settings)
        if args.settings
        else {"server": {"start": {"refill": {"concurrency": 1000}}, "buffer_size": 10}}
    )
    if args.buffer_size is not None:
        tables = settings.change(tables, f"server.buffer_size={args.buffer_size}")
    if args.trace is not None:
        tables = {**tables, "timing": {"trace": {"path": str(args.trace)}}}
    for name in ("privacy", "secure_aggregation"):
        if name in tables:
            print(f"fedbuff: [{name}] is ignored here: clients that its limits would keep away take part", file=sys.stderr)
    began = time.perf_counter()
    tables = changed(tables, args)
    until = tables.get("until")
    asked = until.get("trips") if isinstance(until, dict) else None
    trips = next((number for number in (args.trips, asked) if number is not None), 100_000)
    made = make_timeline(**settings.timeline_arguments(tables, args.clients, args.concurrency), trips=trips)
    s = made.summary() | {"wall_seconds": time.perf_counter() - began}
    if args.out is not None:
        write_trips(args.out, {name: getattr(made, name) for name in made.__dataclass_fields__})
    if args.json:
        print(json.dumps(s, indent=2))
        return
    last = f"virtual time {s['virtual_time']:.4g}, when the last of them started"
    print(f"{s['trips']:,} trips, each to its end; {s['server_steps']:,} server steps up to {last}")
    if s["staleness_mean"] is not None:
        quantiles = f"median {s['staleness_p50']:g}, 99 % {s['staleness_p99']:g}, max {s['staleness_max']}"
        print(f"  staleness    mean {s['staleness_mean']:.2f}, {quantiles}")
    print(f"  concurrency  mean {s['concurrency_mean']:.1f}")
    print(f"  throughput   {s['trips_per_time']:.4g} trips per unit of virtual time")
    print(f"  duration     {s['duration_mean']:.4g} on average")
    print(f"  outcomes     {', '.join(f'{name} {count:,}' for name, count in s['outcomes'].items())}")
    print(f"  took         {s['wall_seconds']:.1f} s")


def show(args: argparse.Namespace) -> None:
    shown = load(args.run)
    if args.json:
        print(json.dumps(shown.summary, indent=2))
        return
    print(shown)
    names = shown.trips["outcome"].tolist()
    counts = ", ".join(f"{name} {names.count(name):,}" for name in dict.fromkeys(sorted(names)))
    print(f"  outcomes      {counts}; {shown.summary['in_flight']:,} in flight at the end\n")
    print(toml.dumps(dict(shown.settings)), end="")


def report(args: argparse.Namespace) -> None:
    from fedbuff.report.pages import report as make_report

    text = make_report(args.runs, args.title, say=_note)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, text)
    print(f"{args.out} ({len(text.encode()) / 1e6:.2f} MB): open it in a browser")


def presets(args: argparse.Namespace) -> None:
    if args.name is None:
        for name, preset in PRESETS.items():
            print(f"{name:<16} {(inspect.getdoc(preset) or '').splitlines()[0]}")
        print("\n`fedbuff presets NAME` prints one as a settings file to start from")
        return
    if args.name not in PRESETS:
        raise SettingsError(f"presets {args.name}: unknown; {toml.suggest(args.name, PRESETS)}")
    tables: Table = {
        "task": {"digits": {}},
        "algorithm": {args.name: {}},
        "client": {"lr": 0.1},
        "until": {"accuracy": 0.9, "trips": 20_000},
    }
    print(f"# {(inspect.getdoc(PRESETS[args.name]) or '').splitlines()[0]}")
    print(toml.dumps(from_tables(tables).tables()), end="")


# ── parts of them ────────────────────────────────────────────────────────────────────────────────────────────────────


def _run_one(experiment: Settings, out: Path, args: argparse.Namespace, resume: bool = False) -> Run:
    with _followed(experiment, out, args, resume or args.resume) as progress:
        return experiment.run(
            out=out,
            resume=resume or args.resume,
            progress=progress,
            checkpoint_every=args.checkpoint_every,
            workers=args.workers,
            engine=args.engine,
            address=args.address,
        )


def _set_data(args: argparse.Namespace) -> None:
    """--data is FEDBUFF_DATA for this process: a place on this machine, and no part of what is run."""
    if (data := getattr(args, "data", None)) is not None:
        if not data.is_dir():
            raise SettingsError(f"--data {data}: no such folder; it should hold datasets as docs/datasets.md says")
        os.environ["FEDBUFF_DATA"] = str(data.resolve())


@contextmanager
def _followed(
    experiment: Settings, out: Path, args: argparse.Namespace, resume: bool
) -> Iterator[Callable[[Status], None] | None]:
    """Whoever follows a run, as one function: the progress bar, the live view, TensorBoard, MLflow."""
    with ExitStack() as following:
        title = f"{experiment.name} {experiment.seed}"
        followers = [following.enter_context(bar(title, experiment.until, args.quiet or args.json))]
        if args.live or args.live_address:
            from fedbuff.report.live import live

            followers.append(following.enter_context(live(out.name, args.live_address or "127.0.0.1:0", _note)))
        if args.tensorboard:
            from fedbuff.report.tensorboard import tensorboard

            followers.append(following.enter_context(tensorboard(args.tensorboard / out.name)))
        if args.mlflow:
            from fedbuff.report.mlflow import mlflow

            followers.append(following.enter_context(mlflow(args.mlflow, out, resume, _note)))
        told = [follower for follower in followers if follower is not None]

        def tell(status: Status) -> None:
            for follower in told:
                follower(status)

        yield tell if told else None


def _note(line: str) -> None:
    print(f"fedbuff: {line}", file=sys.stderr, flush=True)


def _checked(where: object, tables: Table) -> Settings:
    try:
        return from_tables(tables)
    except SettingsError as e:
        raise SettingsError(f"{where}: {e}") from e


def _variants(args: argparse.Namespace) -> dict[str, Table]:
    """What to compare: the variants of a file, several files, or a file with several algorithms."""
    files = [(path.stem, settings.read(path)) for path in args.settings]
    if args.algorithms:
        if len(files) != 1:
            raise SettingsError("--algorithms goes with one SETTINGS.toml")
        tables = {key: value for key, value in files[0][1].items() if key != "compare"}
        changes = {name: {"algorithm": {name: {"concurrency": _concurrency(tables)}}} for name in args.algorithms.split(",")}
        # an algorithm that the file itself spells out, by name, is compared as the file has it
        as_it_is = tables.get("name") if "algorithm" not in tables else None
        return {n: tables if n == as_it_is else {**settings.layer(tables, c), "name": n} for n, c in changes.items()}
    found: list[tuple[str, Table]] = []
    for stem, tables in files:
        found += settings.variants(tables).items() if "compare" in tables else [(stem, {**tables, "name": stem})]
    for name, _ in found:
        if Path(name).name != name:
            raise SettingsError(f"compare: {toml.show(name)}: a name is part of a folder's here; leave out / and ..")
    if len(dict(found)) < len(found):
        raise SettingsError(
            f"compare: the names {', '.join(name for name, _ in found)} are not all different; rename a file or table"
        )
    return dict(found)


def _concurrency(tables: Table) -> int:
    """The concurrency of a file, so that other algorithms can be run at the same; 100 if it has no algorithm."""
    if "algorithm" not in tables and "server" not in tables:
        return 100
    start = from_tables(tables).server.start
    found: float | None = getattr(start, "size", None) or getattr(start, "concurrency", None)
    if found is None:
        raise SettingsError(
            f"--algorithms: {start} does not say a concurrency to run the others at; give server.start.arrivals.concurrency"
        )
    return round(found)


def _seeds(args: argparse.Namespace) -> tuple[int, ...]:
    if any(assignment.split("=")[0].strip() == "seed" for assignment in args.set):
        raise SettingsError("--set seed=…: a comparison takes its seeds from --seeds")
    return seeds_of(args.seeds)


def _save_plots(runs: dict[str, list[Run]], out: Path) -> list[Path]:
    from fedbuff.report.plot import curves

    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    if runs[next(iter(runs))][0].metrics[0].get("accuracy") is None:
        return [curves(runs, "loss", against).save(out / f"loss-by-{against}.svg") for against in ("trips", "virtual_time")]
    return [curves(runs, "accuracy", against).save(out / f"accuracy-by-{against}.svg") for against in ("trips", "virtual_time")]


# ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else here does; its subcommands' parsers too."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fedbuff", description="Asynchronous federated learning with buffered aggregation.")
    parser.add_argument("--version", action="version", version=f"fedbuff {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(function: Any, summary: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(function.__name__, help=summary, description=summary)
        sub.set_defaults(command=function)
        return sub

    def running(sub: argparse.ArgumentParser) -> None:
        add_set(sub)
        add_data(sub)
        sub.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: under runs/)")
        sub.add_argument(
            "--checkpoint-every", type=float, default=10.0, metavar="SECONDS", help="real time between checkpoints (10)"
        )
        sub.add_argument("--workers", type=int, metavar="N", help="processes that train (default: one per core)")
        sub.add_argument("--engine", choices=("local", "ray"), default="local", help="train here, or on a Ray cluster")
        sub.add_argument("--address", metavar="HOST:PORT", help="the Ray cluster (default: one started here)")
        sub.add_argument("--json", action="store_true", help="print the result as JSON")
        sub.add_argument("--quiet", action="store_true", help="no progress bar")
        sub.set_defaults(resume=False, live=False, live_address=None, tensorboard=None, mlflow=None)

    sub = command(run, "Run one experiment.")
    sub.add_argument("settings", type=Path, nargs="?", metavar="SETTINGS.toml")
    sub.add_argument("--seed", type=int)
    running(sub)
    sub.add_argument("--resume", action="store_true", help="go on with the run in --out")
    sub.add_argument("--live", action="store_true", help="show the report in a browser while it trains")
    sub.add_argument("--live-address", metavar="HOST:PORT", help="where to serve it (default: a free port of this machine)")
    sub.add_argument("--tensorboard", type=Path, metavar="DIR", help="follow it in TensorBoard")
    sub.add_argument("--mlflow", metavar="URI", help="follow it in MLflow, e.g. http://localhost:5000 or sqlite:///mlflow.db")

    sub = command(compare, "Run several algorithms or settings over several seeds, and print one table.")
    sub.add_argument(
        "settings", type=Path, nargs="+", metavar="SETTINGS.toml", help="with [compare.NAME] tables, or several files"
    )
    sub.add_argument("--algorithms", metavar="A,B,…", help="presets to compare on one file's task, at its concurrency")
    sub.add_argument("--seeds", default="0", metavar="0,1,2")
    running(sub)

    sub = commands.add_parser("demo", help="FedBuff against its rivals on real data, in half a minute.")
    sub.set_defaults(command=compare, settings=[DEMO], algorithms=None)
    sub.add_argument("--seeds", default="0,1,2", metavar="0,1,2")
    running(sub)

    sub = command(timeline, "Who trains when and how stale, without training anything.")
    sub.add_argument("settings", type=Path, nargs="?", metavar="SETTINGS.toml")
    sub.add_argument("--trips", type=int, help="(until.trips of the settings, or 100,000)")
    sub.add_argument("--concurrency", type=int, help="trips in flight (1000)")
    sub.add_argument("--buffer-size", type=int, help="K (10)")
    sub.add_argument("--clients", type=int, help="how many clients there are (100 times the concurrency)")
    sub.add_argument("--trace", type=Path, metavar="FILE.csv", help="how long trips take: what `fedbuff replay --trace` wrote")
    sub.add_argument("--seed", type=int)
    sub.add_argument("--out", type=Path, metavar="FILE.parquet", help="write the trips, as in a run's trips.parquet")
    sub.add_argument("--json", action="store_true", help="print the result as JSON")
    add_set(sub)

    sub = command(show, "What a finished run did.")
    sub.add_argument("run", type=Path, metavar="RUN")
    sub.add_argument("--json", action="store_true", help="print its summary.json")

    tune_command.parser(commands)
    paper_command.parser(commands)

    sub = command(report, "Runs on one page: a single HTML file that opens offline.")
    sub.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, or folders of runs")
    sub.add_argument("-o", "--out", type=Path, default=Path("report.html"), metavar="FILE.html", help="(report.html)")
    sub.add_argument("--title", help="of the page (default: the folders' names)")

    bench_command.parser(commands)
    privacy_command.parser(commands)
    secagg(commands)
    deploy_command.parser(commands)
    doctor_command.parser(commands)
    replay.parser(commands)

    sub = command(presets, "The algorithms by name, or one of them as a settings file.")
    sub.add_argument("name", nargs="?", metavar="NAME")
    return parser
