"""`make soak`: a deployment in real processes that are killed, again and again, at random moments, until the run is finished.

    python tests/soak.py [--kills 20] [--gateways 4] [--clients 50] [--seed 0]

SuperLink, SuperExec with the ServerApp, gateways and keeper are killed with −9 in turn and started again. In the end the run
must be at its target, and the journals of both sides must say that no accepted update was lost or applied twice.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

from deployment import Deployment, check_journals, check_replay

SETTINGS = """
target = 0.9
evaluate_every = 200

[task.digits]
clients = {clients}

[algorithm.fedbuff]
concurrency = {concurrency}
buffer_size = 5
lr = 1.0

[client]
lr = 0.1

[until]
accuracy = 0.9
trips = 100_000

[deploy]
deadline = 120.0
checkpoint_every = 5.0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--clients", type=int, default=50, help="behind each gateway")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=1.0, help="to give up after")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    began = time.monotonic()
    total = args.gateways * args.clients
    settings = SETTINGS.format(clients=total, concurrency=total // 2)
    if args.kills:  # so that there is something left to kill: the target ends the run only after the last kill
        settings = settings.replace("accuracy = 0.9\n", "")
        settings = settings.replace("trips = 100_000", f"trips = {4000 + 600 * args.kills}")
    with (
        tempfile.TemporaryDirectory() as place,
        Deployment(
            Path(place) / "d", gateways=args.gateways, clients_per_gateway=args.clients, settings=settings
        ) as deployment,
    ):
        deployment.start_all()
        deployment.until(lambda: deployment.updates() > 0, "no update has arrived", 300)
        say(began, "the first updates are there")
        victims = ["serverapp", "superlink", *deployment.gateways, "superexec", "keeper"]
        for number in range(args.kills):
            name = victims[number % len(victims)]
            before = deployment.updates()
            time.sleep(rng.uniform(0.0, 8.0))
            if deployment.finished():
                break
            deployment.kill(name)
            time.sleep(rng.uniform(0.0, 4.0))
            if name != "serverapp":  # which the keeper has started again
                deployment.start(name)
            deployment.until(
                lambda before=before: deployment.updates() > before + 20 or deployment.finished(),
                f"no update since {name} was killed",
                400,
            )
            say(began, f"kill {number + 1}: {name}; {deployment.updates():,} updates")
        deployment.until(deployment.finished, "the run is not finished", args.hours * 3600)
        summary, counts = deployment.summary(), check_journals(deployment)
        check_replay(deployment)
    say(
        began,
        json.dumps(
            {
                "counts": counts,
                **{
                    k: summary[k]
                    for k in (
                        "stopped_by",
                        "trips",
                        "server_steps",
                        "metrics",
                        "refused",
                        "trips_per_second",
                        "trips_to_target",
                    )
                },
            }
        ),
    )
    if summary["trips_to_target"] is None:
        sys.exit("the target was not reached")


def say(began: float, what: str) -> None:
    print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)


if __name__ == "__main__":
    main()
