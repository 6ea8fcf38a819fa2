"""Follow a run in MLflow (extra `fedbuff[mlflow]`); steps are client trips.

A thread of its own talks to the tracking server, so a slow one does not slow the run, and one that goes away does not end it.
"""

import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedbuff import toml
from fedbuff.report.scalars import scalars

if TYPE_CHECKING:
    from fedbuff.sim.simulation import Status

_EXPERIMENT = "fedbuff"
_EVERY = 1.0  # seconds between two messages
_PATIENCE = 30.0  # seconds to wait, at the end, for what is still to be sent
_LONGEST = 6000  # characters of a parameter, MLflow's own limit

_News = tuple[int, int, dict[str, float]]  # milliseconds since 1970, trips, numbers


@contextmanager
def mlflow(
    uri: str, folder: Path, resume: bool = False, say: Callable[[str], None] = print
) -> "Iterator[Callable[[Status], None]]":
    """Send evaluations and settings to the tracking server at `uri`; a function to report the run's `Status` to.

    The run is named like `folder`, in the experiment "fedbuff", or the one that MLFLOW_EXPERIMENT_NAME names. With `resume`,
    MLflow's own run goes on as well.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run tells nobody but whom it was told to tell
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # seven take minutes, in which nothing is said
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
    except ImportError as e:
        raise ValueError("--mlflow needs MLflow: pip install 'fedbuff[mlflow]'") from e
    logging.getLogger("mlflow").setLevel(logging.WARNING)  # it would tell of every table it makes
    try:  # now, so that a mistake is found before the run starts
        client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
    except Exception as e:  # MLflow lets through what its database, network and files raise
        raise ValueError(f"--mlflow {uri}: {(str(e).strip() or type(e).__name__).splitlines()[0]}") from e

    def send(settings: toml.Table) -> None:
        """What is waiting, every second, until the run is over."""
        try:
            run, sent = begin(settings)
            last = False
            while not last:
                last = over.wait(_EVERY)
                metrics = [
                    Metric(name, value, now, trips)
                    for now, trips, values in _drained(waiting)
                    for name, value in values.items()
                    if trips > sent
                ]
                for some in range(0, len(metrics), 1000):
                    client.log_batch(run, metrics=metrics[some : some + 1000])
            client.set_terminated(run, outcome)
        except Exception as e:  # whatever MLflow raises, the run is not its business
            say(f"mlflow: {' '.join(str(e).split())}; the run goes on without it")

    def begin(settings: toml.Table) -> tuple[str, int]:
        """MLflow's run, and up to which trip it knows everything."""
        same = hashlib.sha256(f"{folder.resolve()}\n{toml.dumps(settings)}".encode()).hexdigest()
        if resume and (
            earlier := client.search_runs([experiment], f"tags.fedbuff_run = '{same}' and status != 'FINISHED'", max_results=1)
        ):
            run = earlier[0].info.run_id
            client.update_run(run, status="RUNNING")
            return run, max((m.step for m in client.get_metric_history(run, "run/server_steps")), default=-1)
        tags = {"fedbuff_run": same, "fedbuff_folder": str(folder)}
        run = client.create_run(experiment, run_name=folder.name, tags=tags).info.run_id
        params = [Param(key, value[:_LONGEST]) for key, value in toml.dotted(settings).items()]
        for some in range(0, len(params), 100):
            client.log_batch(run, params=params[some : some + 100])
        return run, -1

    waiting: queue.SimpleQueue[_News] = queue.SimpleQueue()
    over, outcome, written = threading.Event(), "FINISHED", 0
    sender: threading.Thread | None = None

    def report(status: "Status") -> None:
        nonlocal sender, written
        if sender is None:  # only now: the run's worker processes were forked from a process without threads
            sender = threading.Thread(target=send, args=(status.settings,), daemon=True, name="mlflow")
            sender.start()
        if len(status.metrics) == written:
            return
        now = int(1000 * time.time())
        for trips, values in scalars(status.metrics, written):
            waiting.put((now, trips, values))
        if status.staleness is not None:
            waiting.put((now, status.trips, {"run/staleness_mean": status.staleness}))
        written = len(status.metrics)

    try:
        yield report
    except BaseException as e:
        outcome = "KILLED" if isinstance(e, KeyboardInterrupt) else "FAILED"
        raise
    finally:
        over.set()
        if sender is not None:
            sender.join(_PATIENCE)
            if sender.is_alive():
                say(f"mlflow: {uri} did not take everything within {_PATIENCE:g} s; the run folder has it all")


def _drained(waiting: "queue.SimpleQueue[_News]") -> Iterator[_News]:
    while not waiting.empty():
        yield waiting.get()
