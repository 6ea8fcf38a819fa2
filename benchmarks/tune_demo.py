"""How the demo's learning rates were chosen: the same random search for every algorithm.

    python benchmarks/tune_demo.py [--trials 30] [--out results/demo-tuning.json]

Each trial draws η_l, η_g and (where there is one) β or μ from the same ranges, runs seeds 100 and 101 (not those of the
demo), and is judged by the mean number of trips to the target; those that miss it within 15,000 come last,
by the accuracy they had then.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from fedbuff import settings
from fedbuff.core.random import generator
from fedbuff.demo import DEMO

RANGES = {"lr": (0.05, 10.0), "client_lr": (0.03, 1.0)}
EXTRA = {"fedbuff": "beta", "fedavgm": "beta", "fedprox": "mu"}
CHOICES = {"beta": (0.0, 0.3, 0.5, 0.7, 0.9), "mu": (0.001, 0.01, 0.1, 1.0)}
LIMIT = 15_000


def trial(algorithm: str, number: int) -> dict[str, float]:
    rng = generator(1, "tune " + algorithm, number)
    drawn = {name: float(np.exp(rng.uniform(np.log(low), np.log(high)))) for name, (low, high) in RANGES.items()}
    if algorithm in EXTRA:
        drawn[EXTRA[algorithm]] = float(rng.choice(CHOICES[EXTRA[algorithm]]))
    arguments = {name: value for name, value in drawn.items() if name != "client_lr"}
    tables = settings.merge(
        {k: v for k, v in settings.read(DEMO).items() if k != "compare"},
        {
            "algorithm": {algorithm: {"concurrency": 300, **arguments}},
            "client": {"lr": drawn["client_lr"]},
            "until": {"trips": LIMIT},
        },
    )
    found, accuracies = [], []
    for seed in (100, 101):
        summary = settings.from_tables({**tables, "seed": seed}).run().summary
        found.append(summary["trips_to_target"] or 2 * LIMIT)
        accuracies.append(summary["metrics"]["test"]["accuracy"])
        if found[-1] > LIMIT:
            break
    return {**drawn, "trips": float(np.mean(found)), "accuracy": float(np.mean(accuracies))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--algorithms", default="fedbuff,fedasync,fedavgm,fedavg,fedprox")
    parser.add_argument("--out", type=Path, default=Path("results/demo-tuning.json"))
    args = parser.parse_args()
    results = {}
    for algorithm in args.algorithms.split(","):
        trials = sorted((trial(algorithm, n) for n in range(args.trials)), key=lambda t: (t["trips"], -t["accuracy"]))
        results[algorithm] = {"best": trials[0], "next": trials[1:5], "trials": args.trials}
        print(algorithm, trials[:3], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
