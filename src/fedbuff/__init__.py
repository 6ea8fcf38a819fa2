"""fedbuff: asynchronous federated learning with buffered aggregation (Nguyen et al., AISTATS 2022).

    import fedbuff as fb

    task = fb.tasks.digits(clients=400, split=fb.dirichlet(0.1))
    server = fb.Server(start=fb.refill(concurrency=100), buffer_size=10, optimizer=fb.momentum(lr=1.0, beta=0.9))
    run = fb.simulate(server, task, client=fb.LocalSGD(lr=0.1), until=fb.accuracy(0.9) | fb.trips(20_000))
    print(run)

torch is imported when the first model is made, not before.
"""

from fedbuff import presets as presets
from fedbuff.core.events import (
    CancelTrip,
    OpenBuffer,
    StartTrip,
    StepTaken,
    SumOpened,
    TripFailed,
    TripLeft,
    UpdateArrived,
    UpdateRejected,
    UpdateSealed,
    Wake,
    Woke,
)
from fedbuff.core.optimizers import adam, delay_adaptive, momentum, sgd
from fedbuff.core.server import Server
from fedbuff.core.staleness import constant, cutoff, hinge, polynomial
from fedbuff.core.starting import arrivals, cohort, refill
from fedbuff.learn import models as models
from fedbuff.learn import tasks as tasks
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.partition import by_key, dirichlet, iid, shards, split_examples
from fedbuff.learn.task import Task
from fedbuff.learn.training import Training
from fedbuff.privacy.settings import Privacy
from fedbuff.report.files import FolderError
from fedbuff.report.run import Run, load
from fedbuff.sim.availability import windows
from fedbuff.sim.secure import SecureAggregation
from fedbuff.sim.simulate import simulate
from fedbuff.sim.timeline import Timeline, timeline
from fedbuff.sim.timing import (
    exponential,
    half_normal,
    lognormal,
    pareto,
    per_client,
    per_example,
    trace,
    uniform,
)
from fedbuff.sim.until import Until, accuracy, server_steps, trips, virtual_time
from fedbuff.toml import SettingsError
from fedbuff.version import __version__

__all__ = [
    "CancelTrip",
    "FolderError",
    "LocalSGD",
    "OpenBuffer",
    "Privacy",
    "Run",
    "SecureAggregation",
    "Server",
    "SettingsError",
    "StartTrip",
    "StepTaken",
    "SumOpened",
    "Task",
    "Timeline",
    "Training",
    "TripFailed",
    "TripLeft",
    "Until",
    "UpdateArrived",
    "UpdateRejected",
    "UpdateSealed",
    "Wake",
    "Woke",
    "__version__",
    "accuracy",
    "adam",
    "arrivals",
    "by_key",
    "cohort",
    "constant",
    "cutoff",
    "delay_adaptive",
    "dirichlet",
    "exponential",
    "half_normal",
    "hinge",
    "iid",
    "load",
    "lognormal",
    "models",
    "momentum",
    "pareto",
    "per_client",
    "per_example",
    "polynomial",
    "presets",
    "refill",
    "server_steps",
    "sgd",
    "shards",
    "simulate",
    "split_examples",
    "tasks",
    "timeline",
    "trace",
    "trips",
    "uniform",
    "virtual_time",
    "windows",
]
