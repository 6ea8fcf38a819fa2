"""How much memory processes take, pages that they share counted once."""

import resource
import sys
from collections.abc import Iterable
from pathlib import Path


def own_peak_mb() -> float:
    """The most that this process has taken so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def together_mb(pids: Iterable[int]) -> float | None:
    """What processes take now: the sum of their proportional shares. None where the system does not tell."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
        except OSError:
            return None
        total += next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return total / 1024
