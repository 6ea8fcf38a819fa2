"""Seeing a run that is being served: status.json in its folder, now and then."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from fedbuff.deploy.dispatch import Dispatch
from fedbuff.deploy.settings import Deployment
from fedbuff.sim.simulation import Status


@contextlib.contextmanager
def watch(folder: Path, deployment: Deployment | None) -> Iterator[Callable[[Status, Dispatch], None]]:
    yield lambda status, dispatch: None
