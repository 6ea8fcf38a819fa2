"""The progress bar: rate, time left, accuracy and staleness; nothing at all when nobody is watching."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedbuff.sim.simulation import Status
    from fedbuff.sim.until import Until

_EVERY = 0.1  # seconds between two looks


@contextmanager
def bar(title: str, until: "Until", quiet: bool = False) -> "Iterator[Callable[[Status], None] | None]":
    """A function to report a run's `Status` to, or None if stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<12}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        shown = progress.add_task(title, total=1.0, facts="")
        began, last, first = time.monotonic(), 0.0, None

        def report(status: "Status") -> None:
            nonlocal last, first
            now = time.monotonic()
            first = status.trips if first is None else first
            if now - last < _EVERY:
                return
            last = now
            rate = (status.trips - first) / max(now - began, 1e-9)
            facts = f"{status.trips:,} trips ({rate:,.0f}/s), {status.server_steps:,} steps"
            facts += "" if status.accuracy is None else f", accuracy {status.accuracy:.3f}"
            facts += "" if status.staleness is None else f", staleness {status.staleness:.1f}"
            facts += "" if status.epsilon is None else f", ε {status.epsilon:.2f}"
            progress.update(shown, completed=share(status, until), facts=facts)

        yield report
        progress.update(shown, completed=1.0)


def share(status: "Status", until: "Until") -> float:
    """How far a run has come, by the limit it is nearest to; the accuracy is none, as nobody knows how it will go on."""
    limits = ((status.trips, until.trips), (status.server_steps, until.server_steps), (status.virtual_time, until.virtual_time))
    return max((value / limit for value, limit in limits if limit), default=0.0)
