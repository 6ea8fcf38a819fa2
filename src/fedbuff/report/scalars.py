"""Evaluations as named numbers, for TensorBoard and MLflow: `accuracy/test`, `loss/test`, `run/virtual_time`, …"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedbuff.report.compare import COSTS


def scalars(metrics: Sequence[Mapping[str, Any]], since: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
    """From row `since` on, for each evaluation and split: the number of trips, and what was found; not what was not finite.

    >>> list(scalars([{"trips": 40, "server_steps": 4, "virtual_time": 1.5, "split": "test", "loss": 0.7}]))
    [(40, {'loss/test': 0.7, 'run/server_steps': 4.0, 'run/virtual_time': 1.5})]
    """
    for m in metrics[since:]:
        found = {_name(f"{key}/{m['split']}"): value for key, value in m.items() if key not in COSTS and key != "split"}
        if m["split"] == metrics[0]["split"]:  # once, however many splits there are
            found |= {f"run/{cost}": m[cost] for cost in COSTS if cost != "trips"}
        yield m["trips"], {name: float(value) for name, value in found.items() if value is not None}


def _name(name: str) -> str:
    """With the letters that both allow."""
    return re.sub(r"[^\w\-. /]", "_", name)
