"""How every peer is measured: trips per second once it is under way, and the peak memory of all its processes.

    meter = Meter("name", "1.0", seconds=30)     # memory is watched from here on
    ... set up ...
    meter.done(trips)                            # the first call is the warm-up: it starts the clock
    meter.done(trips)                            # each later one counts; raises TimeUp after the given seconds
    meter.report()                               # one JSON line

Only the standard library is needed. The memory is read from /proc, so Linux only.
"""

import json
import os
import threading
import time
from pathlib import Path


class TimeUp(Exception):  # noqa: N818 - not an error
    """The measurement is complete."""


def tree(root: int) -> set[int]:
    """The process and its descendants."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    family = {root}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def pss(pids: set[int]) -> float:
    """Proportional set size in MB: a page shared by n processes counts 1/n in each."""
    kilobytes = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        kilobytes += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kilobytes / 1024


class Meter:
    def __init__(self, peer: str, version: str, seconds: float, root: int | None = None) -> None:
        self.peer, self.version, self.limit = peer, version, seconds
        self.trips, self.began, self.seconds, self.peak = 0, 0.0, 0.0, 0.0
        threading.Thread(target=self._watch, args=(root or os.getpid(),), daemon=True).start()

    def _watch(self, root: int) -> None:
        while True:
            self.peak = max(self.peak, pss(tree(root)))
            time.sleep(1)

    def done(self, trips: int) -> None:
        now = time.perf_counter()
        if not self.began:
            self.began = now
            return
        self.trips += trips
        self.seconds = now - self.began
        if self.seconds >= self.limit:
            raise TimeUp

    def report(self) -> None:
        line = {"peer": self.peer, "trips": self.trips, "seconds": round(self.seconds, 2)}
        line |= {"trips_per_second": round(self.trips / self.seconds, 2), "peak_memory_mb": round(self.peak)}
        print("\n" + json.dumps(line | {"version": self.version}), flush=True)
