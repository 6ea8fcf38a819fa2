"""What several tests share: a small task, and the command line as a real process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

import fedbuff as fb

Done = subprocess.CompletedProcess[str]

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile("default")


@pytest.fixture
def small_task() -> fb.Task:
    """30 clients with 1 to 12 examples each of a three-class problem in five dimensions."""
    return fb.tasks.synthetic(clients=30, features=5, classes=3, max_examples=12, model=fb.models.mlp((4,), dropout=0.2))


@pytest.fixture
def settings_file(tmp_path: Path) -> Path:
    """A settings file whose run takes about a second."""
    path = tmp_path / "small.toml"
    path.write_text(
        """
        [task.synthetic]
        clients = 60
        features = 8
        classes = 4
        max_examples = 20
        model.mlp = {hidden = [8], dropout = 0.1}

        [algorithm.fedbuff]
        concurrency = 20
        buffer_size = 4
        beta = 0.5

        [client]
        lr = 0.1
        batch_size = 8

        [until]
        trips = 400
        """
    )
    return path


@pytest.fixture(scope="session")
def run_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of real runs: FedBuff over three seeds, and FedAvg that over-selects and loses some clients, over two."""
    folder = tmp_path_factory.mktemp("runs") / "both"
    task = fb.tasks.synthetic(clients=60, features=8, classes=4, max_examples=20)
    servers = {
        "FedBuff": fb.Server(start=fb.refill(20), buffer_size=4, optimizer=fb.sgd(2.0)),
        "FedAvg": fb.Server(start=fb.cohort(20, over_selection=0.3), buffer_size=20, weigh=fb.constant()),
    }
    how = {"client": fb.LocalSGD(lr=0.1), "timing": fb.per_example(fb.half_normal(0.2)), "evaluate_every": 20, "workers": 1}
    for name, seeds in (("FedBuff", (0, 1, 2)), ("FedAvg", (0, 1))):
        for seed in seeds:
            out = folder / f"{name}-seed{seed}"
            lost = 0.1 if name == "FedAvg" else 0.0
            fb.simulate(
                servers[name], task, until=fb.trips(480), target=0.4, seed=seed, dropout=lost, algorithm=name, out=out, **how
            )
    return folder


@pytest.fixture(scope="session")
def ready() -> Iterator[Callable[[Path, Sequence[object]], Done]]:
    """Commands as forks of a process that has imported everything."""
    with subprocess.Popen(
        [sys.executable, Path(__file__).parent / "ready.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(folder: Path, arguments: Sequence[object]) -> Done:
            with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
                asked = {"folder": str(folder), "environment": dict(os.environ), "out": out.name, "err": err.name}
                print(json.dumps({**asked, "arguments": [*map(str, arguments)]}), file=process.stdin, flush=True)
                code = int(process.stdout.readline())
                return subprocess.CompletedProcess(command(arguments), code, out.read(), err.read())

        yield run
        process.stdin.close()


@pytest.fixture
def fedbuff(tmp_path: Path, ready: Callable[..., Done]) -> Callable[..., Done]:
    """Run the command line in a process of its own, in a folder of its own; a new one if `Popen` has to be told anything."""

    def run(*arguments: object, code: int = 0, **popen: object) -> Done:
        if popen:
            done = subprocess.run(command(arguments), capture_output=True, text=True, cwd=tmp_path, timeout=300, **popen)  # type: ignore[call-overload]
        else:
            done = ready(tmp_path, arguments)
        assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
        return done

    return run


def command(arguments: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "fedbuff", *map(str, arguments)]


def same_arrays(a: object, b: object) -> bool:
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(a.values(), b.values(), strict=True))  # type: ignore[attr-defined]


os.environ.setdefault("OMP_NUM_THREADS", "1")
