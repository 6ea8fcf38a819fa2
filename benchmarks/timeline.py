"""How fast the timeline is: time and memory for a million trips, at several concurrencies and numbers of clients.

    python benchmarks/timeline.py [--trips 1000000]

Each line runs in a process of its own, so that the memory is its own.
"""

import argparse
import json
import subprocess
import sys

CASES = [(100, 10_000), (1_000, 100_000), (10_000, 1_000_000), (10_000, 10_000_000), (100_000, 10_000_000)]

MEASURE = """
import json, resource, sys, time
import fedbuff as fb
m, n, trips = map(int, sys.argv[1:])
began = time.perf_counter()
t = fb.timeline(start=fb.refill(m), buffer_size=10, timing=fb.half_normal(1.0), clients=n, trips=trips)
seconds = time.perf_counter() - began
megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([seconds, megabytes, float(t.staleness.mean())]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trips", type=int, default=1_000_000)
    trips = parser.parse_args().trips
    print(f"| concurrency | clients | trips | seconds | µs per trip | peak MB | mean staleness | (M − 1) / K |\n|{'---:|' * 8}")
    for m, n in CASES:
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(m), str(n), str(trips)], capture_output=True, text=True, check=True
        )
        seconds, megabytes, staleness = json.loads(done.stdout)
        cells = (f"{m:,}", f"{n:,}", f"{trips:,}", f"{seconds:.1f}", f"{1e6 * seconds / trips:.1f}")
        print("|", " | ".join((*cells, f"{megabytes:.0f}", f"{staleness:.1f}", f"{(m - 1) / 10:.1f}")), "|", flush=True)


if __name__ == "__main__":
    main()
