"""What the network costs: trips per second through one SuperLink, and how long one trip takes, with clients that train nothing.

    python benchmarks/deploy/run.py [--gateways 8] [--concurrency 1400] [--seconds 60] [--memory]
    python benchmarks/deploy/run.py --round-trip

Real processes on this machine: SuperLink, SuperExec, ServerApp, gateways. The model is of the size of the CIFAR-10 CNN. The
table has trips per second, the time from order to arrival, and who used the processor for how long per trip.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fedbuff import toml

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gateways", type=int, default=8)
    parser.add_argument("--clients", type=int, default=200, help="behind each gateway")
    parser.add_argument("--concurrency", type=int, default=1400)
    parser.add_argument("--buffer-size", type=int, default=10)
    parser.add_argument("--trips-per-message", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--memory", action="store_true", help="the SuperLink's database in memory")
    parser.add_argument("--round-trip", action="store_true", help="one gateway, one trip at a time")
    parser.add_argument("--port", type=int, default=21500)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave logs and folders there")
    args = parser.parse_args()
    if args.round_trip:
        args.gateways, args.clients, args.concurrency, args.buffer_size = 1, 10, 1, 1
    if args.keep:
        args.keep.mkdir(parents=True)
        print(json.dumps(measure(args, args.keep.resolve()), indent=2))
        return
    with tempfile.TemporaryDirectory() as place:
        found = measure(args, Path(place))
    print(json.dumps(found, indent=2))


def measure(args: argparse.Namespace, place: Path) -> dict[str, object]:
    settings = place / "settings.toml"
    settings.write_text(toml.dumps(tables(args)), encoding="utf-8")
    home = place / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{args.port}"\ninsecure = true\n',
        encoding="utf-8",
    )
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FEDBUFF_BENCH": str(settings),
        "FEDBUFF_FOLDER": str(place / "run"),
        "OMP_NUM_THREADS": "1",
    }
    link = f"127.0.0.1:{args.port}"
    with contextlib.ExitStack() as running:

        def start(name: str, *command: str) -> subprocess.Popen[bytes]:
            return running.enter_context(started(place / f"{name}.log", environment, command))

        database = [] if args.memory else ["--database", str(place / "link.db")]
        processes = {
            "superlink": [
                start(
                    "superlink", "flower-superlink", "--insecure", "--isolation", "process", "--port", str(args.port), *database
                )
            ],
        }
        time.sleep(5)
        start("superexec", "flower-superexec", "--insecure", "--runtime-api-address", link)
        processes["gateways"] = [
            start(
                f"gateway-{i}", sys.executable, str(HERE / "gateway.py"), str(settings), link,
                f"{i * args.clients}-{(i + 1) * args.clients - 1}", str(place / f"gateway-{i}"),
            )
            for i in range(args.gateways)
        ]  # fmt: skip
        time.sleep(10)
        subprocess.run(
            ["flwr", "run", str(HERE / "app"), "here", "--format", "json"], env=environment, check=True, stdout=sys.stderr
        )
        wait_for(lambda: count(place / "run") > 10, 120)
        time.sleep(5)
        before, spent, began = count(place / "run"), cpu(processes), time.monotonic()
        server = serverapp()
        spent_server = cpu_of(server)
        time.sleep(args.seconds)
        trips, seconds = count(place / "run") - before, time.monotonic() - began
        used = {name: (value - spent[name]) / trips * 1000 for name, value in cpu(processes).items()}
        used["serverapp"] = (cpu_of(server) - spent_server) / trips * 1000
    delays = durations(place / "run")
    return {
        "gateways": args.gateways,
        "concurrency": args.concurrency,
        "trips_per_second": trips / seconds,
        "cpu_ms_per_trip": used,
        "seconds_from_order_to_arrival": {"median": delays[len(delays) // 2], "p95": delays[int(0.95 * len(delays))]},
    }


def tables(args: argparse.Namespace) -> toml.Table:
    clients = args.gateways * args.clients
    return {
        "task": {"python": {"file": str(HERE / "task.py"), "arguments": {"clients": clients}}},
        "server": {
            "start": {"refill": {"concurrency": args.concurrency}},
            "buffer_size": args.buffer_size,
            "optimizer": {"sgd": {"lr": 0.0}},
        },
        "client": {"lr": 0.0},
        "until": {"trips": 10_000_000},
        "evaluate_every": 1_000_000,
        "deploy": {"trips_per_message": args.trips_per_message, "results_per_minute": 1_000_000, "deadline": 600.0},
    }


@contextlib.contextmanager
def started(log: Path, environment: dict[str, str], command: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as out,
        subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)


def count(run: Path) -> int:
    """Trips that have ended, as the server says once a second."""
    try:
        return int(json.loads((run / "status.json").read_text(encoding="utf-8"))["trips"])
    except (OSError, ValueError):
        return 0


def durations(run: Path) -> list[float]:
    """Seconds of every trip, by letting the journal happen once more."""
    from fedbuff.deploy.journal import read
    from fedbuff.deploy.serve import opened
    from fedbuff.settings import from_tables

    found, books = [], None
    for facts, blob in read(run / "journal"):
        if facts["kind"] == "header":
            import numpy as np

            settings = from_tables(facts["settings"])
            make, arguments = settings.task
            books, _, _ = opened(settings, np.frombuffer(blob, facts["dtype"]), len(make(**arguments).clients), None)
            continue
        books.apply(facts, blob)
        if facts["kind"] == "update":
            found.append(books.trips.end_time[facts["trip"]] - books.trips.start_time[facts["trip"]])
    return sorted(found[len(found) // 4 :])


def cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu(processes: dict[str, list[subprocess.Popen[bytes]]]) -> dict[str, float]:
    return {name: sum(cpu_of(p.pid) for p in some) for name, some in processes.items()}


def serverapp() -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"flwr-serverapp" in path.read_bytes():
                return int(path.parent.name)
    raise RuntimeError("no ServerApp is running")


def wait_for(condition, seconds: float) -> None:  # type: ignore[no-untyped-def]
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError("nothing has arrived: see the logs")
        time.sleep(0.5)


if __name__ == "__main__":
    main()
