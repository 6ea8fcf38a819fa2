"""What differential privacy adds to a server step: ten clips, one increment of noise, and its addition. CPU time, one core.

    python benchmarks/privacy.py

To compare with: training the ten trips of a step takes about 33 ms of one core for the CIFAR-10 CNN of 31,594 weights.
"""

import time
from itertools import count

import numpy as np

from fedbuff.core.aggregate import Aggregation
from fedbuff.core.optimizers import sgd
from fedbuff.privacy.plan import MECHANISMS, plan

K = 10


def main() -> None:
    print("| weights | mechanism | ms per server step | of it noise |\n|---|---|---|---|")
    for weights in (31_594, 1_000_000):
        plain = step_time(weights, None)[0]
        for mechanism in MECHANISMS:
            whole, noise = step_time(weights, mechanism)
            print(f"| {weights:,} | {mechanism} | {1e3 * (whole - plain):.2f} | {1e3 * noise:.2f} |", flush=True)


def step_time(weights: int, mechanism: str | None, steps: int = 64) -> tuple[float, float]:
    """Seconds of CPU for a server step of ten updates in float32, and for its noise."""
    updates = np.random.default_rng(0).standard_normal((K, weights)).astype(np.float32)
    aggregation = Aggregation(np.zeros(weights, np.float32), sgd(1.0))
    private = mechanism and plan(
        mechanism, clip=1.0, buffer_size=K, horizon=1000, delta=1e-6, noise_multiplier=1.0, max_participations=1
    )
    stream = private.stream(weights, bytes(32)) if private else None
    spent, drawn, counted = [], [], count()
    for _ in range(4):
        began, noise_time = time.process_time(), 0.0
        for _ in range(steps // 4):
            for update in updates:
                aggregation.add(update, private.factor(update, 0.5) if private else 0.5)
            before = time.process_time()
            noise = stream.increment(next(counted)) if stream else None
            noise_time += time.process_time() - before
            aggregation.step(0, noise)
        spent.append((time.process_time() - began) / (steps // 4))
        drawn.append(noise_time / (steps // 4))
    return min(spent), min(drawn)


if __name__ == "__main__":
    main()
