"""On Ray: the same weights as here, on two nodes, and after a worker was killed."""

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fedbuff as fb
from conftest import same_arrays
from fedbuff.sim.shared import Place, Rows
from test_simulate import SERVERS, run

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Of two nodes with one core each, both on this machine."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def address(cluster: Any) -> str:
    return str(cluster.address)


@pytest.mark.parametrize("name", ["fedbuff", "mixing", "over-selection", "average"])
def test_a_run_on_ray_gives_the_same_bits_as_here(name, address, small_task):
    here = run(SERVERS[name], small_task, evaluate_every=30)
    there = run(SERVERS[name], small_task, evaluate_every=30, engine="ray", address=address)
    assert same_arrays(there.weights, here.weights)
    assert same_arrays(there.trips, here.trips)
    assert there.metrics == here.metrics


def test_a_worker_on_our_node_reads_and_writes_where_we_do_and_one_elsewhere_sends(address, small_task, monkeypatch):
    from fedbuff.sim import ray as on_ray

    here = run(SERVERS["fedbuff"], small_task, trips=400)
    results: list[object] = []
    places: dict[object, list[type]] = {}  # of the versions that a worker was told of
    found_by = on_ray.OnRay._found_by

    def watched(pool: on_ray.OnRay, actor: object, version: int) -> object:
        place = found_by(pool, actor, version)
        places.setdefault(actor, []).append(type(place))
        return place

    def get(coming: object) -> object:
        results.append(ray.get(coming))
        return results[-1]

    monkeypatch.setattr(on_ray, "ray", SimpleNamespace(**{**vars(ray), "get": get}))
    monkeypatch.setattr(on_ray.OnRay, "_found_by", watched)
    for _ in range(5):  # on a busy machine an actor may come up when the other has done all the work
        there = run(SERVERS["fedbuff"], small_task, trips=400, engine="ray", address=address)
        if {type(result) for result in results} >= {type(None), np.ndarray}:
            break
    assert any(result is None for result in results)
    assert any(isinstance(result, np.ndarray) for result in results)
    rows = [[kind is int for kind in kinds] for kinds in places.values()]
    assert all(kinds == sorted(kinds) for kinds in rows), "once it is known where a worker is, that is where it is"
    assert any(kinds[-1] for kinds in rows)
    assert any(not any(kinds) for kinds in rows)
    assert same_arrays(there.weights, here.weights)


def test_memory_that_is_out_of_reach_is_done_without(address, small_task, monkeypatch):
    here = run(SERVERS["fedbuff"], small_task)
    monkeypatch.setattr(Rows, "place", lambda rows: Place("/nowhere", "", *rows.matrix.shape, "<f4", False))
    there = run(SERVERS["fedbuff"], small_task, engine="ray", address=address)
    assert same_arrays(there.weights, here.weights)


def test_a_killed_ray_worker_changes_nothing(address, small_task):
    """SIGKILL for the processes that train, while they do."""
    here = run(SERVERS["fedbuff"], small_task, trips=400)
    killed: list[int] = []
    over = threading.Event()

    def hunt() -> None:
        while not over.is_set() and len(killed) < 2:
            time.sleep(0.2)
            for pid in workers_of_ray():
                if pid not in killed and len(killed) < 2:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    there = run(SlowServer, slow(small_task), trips=400, engine="ray", address=address)
    over.set()
    hunter.join()
    assert len(killed) == 2
    assert same_arrays(there.weights, here.weights)


def test_a_node_that_dies_changes_nothing(cluster, address, small_task):
    """Nor is anybody waited for who has no node to come up on."""
    here = run(SERVERS["fedbuff"], small_task, trips=400)
    nodes = [cluster.add_node(num_cpus=1)]

    def kill(status: Any) -> None:
        if status.trips >= 100 and nodes:
            cluster.remove_node(nodes.pop(), allow_graceful=False)

    there = run(SlowServer, slow(small_task), trips=400, engine="ray", address=address, workers=3, progress=kill)
    assert not nodes
    assert same_arrays(there.weights, here.weights)


def test_cores_that_others_use_are_not_waited_for(address, small_task):
    class Other:
        """Somebody else's work."""

        def there(self) -> bool:
            return True

    here = run(SERVERS["fedbuff"], small_task)
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        other = ray.remote(num_cpus=1)(Other).remote()
        ray.get(other.there.remote())
        there = run(SERVERS["fedbuff"], small_task, engine="ray")
        with pytest.raises(ValueError, match="connected to another Ray cluster"):
            run(SERVERS["fedbuff"], small_task, engine="ray", address="127.0.0.1:1")
    finally:
        ray.shutdown()
    assert same_arrays(there.weights, here.weights)


def test_without_an_address_a_cluster_is_started_though_another_one_is_running(address, fedbuff, tmp_path):
    """In a process of its own: once Ray has started a cluster it wants its token from all others."""
    settings = 'task.digits = {clients = 40, model = "linear"}\nalgorithm.fedbuff.concurrency = 8\nclient.lr = 0.1\n'
    (tmp_path / "s.toml").write_text(f"{settings}until.trips = 60\n")
    fedbuff("run", "s.toml", "--quiet", "--out", "here")
    fedbuff("run", "s.toml", "--quiet", "--out", "there", "--engine", "ray", "--workers", 1)
    here, there = fb.load(tmp_path / "here"), fb.load(tmp_path / "there")
    assert same_arrays(there.weights, here.weights)


def test_a_task_that_can_not_travel_is_a_mistake_that_leaves_no_ray_behind(address, small_task):
    class Locked(list):
        def __init__(self, *clients: Any) -> None:
            super().__init__(*clients)
            self.lock = threading.Lock()

    with pytest.raises(ValueError, match=r"task: it can't be sent to Ray's workers.*lock"):
        run(SERVERS["fedbuff"], replace(small_task, clients=Locked(small_task.clients)), engine="ray", address=address)
    assert not ray.is_initialized()


SlowServer = SERVERS["fedbuff"]


def slow(task: fb.Task) -> fb.Task:
    """The same task, with a loss that takes its time."""

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        return torch.nn.functional.cross_entropy(output, label)

    return fb.Task(model=task.model, loss=loss, clients=task.clients, evaluate=task.evaluate, name=task.name)


def workers_of_ray() -> list[int]:
    """Processes that are an actor of ours."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8") as line:  # noqa: PTH123
                if line.read().startswith("ray::_Worker"):
                    found.append(int(pid))
        except OSError:
            continue
    return found


def test_what_is_frozen_is_the_same_everywhere_though_it_was_drawn_at_random(address, small_task):
    def model() -> torch.nn.Module:
        made = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).requires_grad_(True)
        made[0].weight.requires_grad_(False)
        made.register_buffer("shift", torch.zeros(1))
        with torch.no_grad():
            made[0].weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=(4, 5))))
        return made

    first = model()
    here, there = (
        run(SERVERS["fedbuff"], replace(small_task, model=lambda: copy.deepcopy(first)), trips=100),
        run(
            SERVERS["fedbuff"],
            replace(small_task, model=OnceHereThenAnew(first, model)),
            trips=100,
            engine="ray",
            address=address,
        ),
    )
    assert same_arrays(there.weights, here.weights)


class OnceHereThenAnew:
    """A model that is drawn anew wherever it is made but in this process."""

    def __init__(self, first: torch.nn.Module, model) -> None:
        self.first, self.model, self.pid = first, model, os.getpid()

    def __call__(self) -> torch.nn.Module:
        return copy.deepcopy(self.first) if os.getpid() == self.pid else self.model()


def test_an_error_on_ray_is_the_users_to_see(address, small_task):
    parent = os.getpid()

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if os.getpid() != parent:
            raise ArithmeticError("seven")
        return torch.nn.functional.cross_entropy(output, label)

    task = fb.Task(model=small_task.model, loss=loss, clients=small_task.clients, evaluate=small_task.evaluate)
    with pytest.raises(ArithmeticError, match="seven"):
        run(SERVERS["fedbuff"], task, engine="ray", address=address)


def test_more_workers_than_the_cluster_has_cores_is_a_mistake(address, small_task):
    with pytest.raises(ValueError, match=r"the Ray cluster has [23] CPUs"):  # Ray may not know yet that a node has died
        run(SERVERS["fedbuff"], small_task, engine="ray", address=address, workers=7)


def test_an_address_without_ray_is_a_mistake(small_task):
    with pytest.raises(ValueError, match="engine='ray'"):
        run(SERVERS["fedbuff"], small_task, address="somewhere:1")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "no such host:6379", "127.0.0.1:99999"])
def test_an_address_that_nobody_answers_at_is_one_line(address, small_task):
    ray.shutdown()  # a cluster that this process is connected to would be used, whatever the address
    with pytest.raises(ValueError, match=r"nobody answers there .* HOST:PORT"):
        run(SERVERS["fedbuff"], small_task, engine="ray", address=address)
