"""Follow a run in MLflow (extra `fedbuff[mlflow]`); steps are client trips.

A thread of its own talks to the tracking server, so a slow one does not slow the run, and one that goes away does not end it.
"""

import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbuff import toml
from fedbuff.report.html import flat
from fedbuff.report.scalars import scalars

if TYPE_CHECKING:
    from fedbuff.sim.simulate import Status

_EXPERIMENT = "fedbuff"
_PATIENCE = 30.0  # seconds to wait, at the end, for what is still to be sent


@contextmanager
def mlflow(
    uri: str, folder: Path, tables: Mapping[str, Any], resume: bool = False, say: Callable[[str], None] = print
) -> "Iterator[Callable[[Status], None]]":
    """Send evaluations and settings to the tracking server at `uri`; a function to report the run's `Status` to.

    The run is named like `folder`, in the experiment "fedbuff", or the one that MLFLOW_EXPERIMENT_NAME names. With `resume`,
    MLflow's own run goes on as well.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run tells nobody but whom it was told to tell
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException
    except ImportError as e:
        raise ValueError("--mlflow needs MLflow: pip install 'fedbuff[mlflow]'") from e
    try:  # now, so that a mistake is found before the run starts
        client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _EXPERIMENT)
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
    except (MlflowException, ImportError, OSError) as e:
        raise ValueError(f"--mlflow {uri}: {e}") from e
    same = hashlib.sha256(f"{folder.resolve()}\n{toml.dumps(dict(tables))}".encode()).hexdigest()

    def send() -> None:
        """Until told None: (trips, numbers), in order."""
        run, sent = None, -1
        try:
            if resume:
                earlier = client.search_runs(
                    [experiment], f"tags.fedbuff_run = '{same}' and status != 'FINISHED'", max_results=1
                )
                run = earlier[0].info.run_id if earlier else None
            if run is not None:
                client.update_run(run, status="RUNNING")
                sent = max((m.step for m in client.get_metric_history(run, "run/server_steps")), default=-1)
            else:
                run = client.create_run(experiment, run_name=folder.name, tags={"fedbuff_run": same}).info.run_id
                # MLflow's own limits: 100 parameters at once, 6000 characters each
                settings = [Param(key, value[:6000]) for key, value in flat(tables).items()]
                for some in range(0, len(settings), 100):
                    client.log_batch(run, params=settings[some : some + 100], tags=[RunTag("fedbuff_folder", str(folder))])
            while (news := waiting.get()) is not None:
                trips, values = news
                if trips > sent:
                    now = int(1000 * time.time())
                    client.log_batch(run, metrics=[Metric(key, value, now, trips) for key, value in values.items()])
            client.set_terminated(run, outcome)
        except Exception as e:  # whatever MLflow raises, the run is not its business
            say(f"mlflow: {' '.join(str(e).split())}; the run goes on without it")

    waiting: queue.SimpleQueue[tuple[int, dict[str, float]] | None] = queue.SimpleQueue()
    sender = threading.Thread(target=send, daemon=True, name="mlflow")
    outcome, written = "FINISHED", 0

    def report(status: "Status") -> None:
        nonlocal written
        if not sender.is_alive() and sender.ident is None:
            sender.start()  # only now: the run's worker processes were forked from a process without threads
        if len(status.metrics) == written:
            return
        for trips, values in list(scalars(status.metrics))[written:]:
            waiting.put((trips, values))
        if status.staleness is not None:
            waiting.put((status.trips, {"run/staleness_mean": status.staleness}))
        written = len(status.metrics)

    try:
        yield report
    except BaseException as e:
        outcome = "KILLED" if isinstance(e, KeyboardInterrupt) else "FAILED"
        raise
    finally:
        waiting.put(None)
        if sender.ident is not None:
            sender.join(_PATIENCE)
            if sender.is_alive():
                say(f"mlflow: {uri} did not take everything within {_PATIENCE:g} s; the run folder has it all")
