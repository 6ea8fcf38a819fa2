"""The worker behind Flower's short-lived ClientApp: started once, warm from then on, and back after a kill −9."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

import fedbuff as fb
from fedbuff import toml
from fedbuff.deploy import worker
from fedbuff.deploy.serve import digest_of
from fedbuff.deploy.wire import Order, Orders, Report
from fedbuff.learn.local import initial_weights

TABLES = {
    "task": {"digits": {"clients": 20}},
    "algorithm": {"fedbuff": {"concurrency": 4, "buffer_size": 2}},
    "client": {"lr": 0.1},
    "until": {"trips": 100},
}
SGD = fb.LocalSGD(lr=0.1)


def digits() -> fb.Task:
    return fb.tasks.digits(clients=20)


WEIGHTS = initial_weights(digits(), 0)[1]


def orders(*trips: int, sgd: str | None = None) -> bytes:
    """Orders for trips of clients of the same numbers."""
    made = tuple(Order(trip, trip % 10, 0) for trip in trips)
    return Orders("a job", made, {0: WEIGHTS}, sgd=sgd or digest_of(SGD, 0, len(WEIGHTS))).to_bytes()


@pytest.fixture
def place(tmp_path):
    """A node's folder; whatever works there is ended."""
    yield tmp_path
    for pid in workers(tmp_path):
        os.kill(pid, signal.SIGKILL)
    for process in worker._started:
        process.wait()
    worker._started.clear()


def workers(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes()
        except OSError:
            continue
        if b"fedbuff.deploy.worker" in line and str(folder).encode() in line and b"sh\0-c" not in line:
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def settings(place):
    path = place / "settings.toml"
    path.write_text(toml.dumps(TABLES))
    return path


def asked(task, place, *trips, client=None):
    return Report.from_bytes(worker.ask(orders(*trips), task, client, 0, {"clients": "0-9", "folder": str(place)}))


def test_one_worker_answers_message_after_message(settings, place):
    first = asked(settings, place, 1, 2)
    pids = workers(place)
    assert len(pids) == 1
    second = asked(settings, place, 3)
    assert workers(place) == pids
    assert [r.trip for r in first.results] == [1, 2]
    assert [r.trip for r in second.results] == [3]
    assert second.holding == (1, 2)


def test_a_worker_that_was_killed_comes_back_with_its_outbox(settings, place):
    before = asked(settings, place, 5)
    for pid in workers(place):
        os.kill(pid, signal.SIGKILL)
    after = asked(settings, place, 5)
    assert bytes(after.results[0].payload) == bytes(before.results[0].payload)
    assert after.results[0].seconds == before.results[0].seconds  # it was not trained a second time


def test_what_a_worker_trains_is_what_the_simulator_trains(settings, place):
    from fedbuff.learn.training import Training
    from fedbuff.learn.work import trainer

    found = asked(settings, place, 1, 7).results
    expected = np.empty((2, len(WEIGHTS)), WEIGHTS.dtype)
    trainer(digits(), SGD, 0, Training()).train(expected, [0, 1], [1, 7], [1, 7], [WEIGHTS, WEIGHTS])
    for result, row in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.frombuffer(result.payload, WEIGHTS.dtype), row)


def test_a_function_that_makes_a_task_is_found_by_the_worker(place, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    report = asked(digits, place, 2, client=SGD)
    assert report.results[0].payload
    assert len(workers(place)) == 1


def test_a_task_itself_is_trained_on_the_spot(place):
    report = asked(digits(), place, 2, client=SGD)
    assert report.results[0].payload
    assert not workers(place)


def test_a_worker_in_a_folder_with_a_long_name_is_found_too(place, settings):
    deep = place / ("a" * 100)
    assert asked(settings, deep, 1).results[0].payload
    assert (deep / "worker.log").exists()


def test_a_worker_that_can_not_start_says_where_to_look(place):
    broken = place / "broken.toml"
    broken.write_text("[task.digits]\nclients = 0\n")
    with pytest.raises(RuntimeError, match=r"could not start: see .*worker\.log"):
        asked(broken, place, 1)
    assert "Traceback" in (place / "worker.log").read_text()


def test_other_settings_than_the_servers_are_a_problem_and_nothing_is_trained(place):
    config = {"clients": "0-9", "folder": str(place)}
    report = Report.from_bytes(worker.ask(orders(1, sgd="others"), digits(), SGD, 0, config))
    assert "other settings" in report.problem
    assert not report.results


@pytest.mark.parametrize(
    ("config", "clients"),
    [({"clients": "0-4,9"}, ((0, 4), (9, 9))), ({"partition-id": 3, "num-partitions": 10}, ((3, 3),))],
)
def test_a_nodes_clients_are_in_its_config(config, clients):
    assert worker.clients_of(config) == clients


def test_a_node_without_clients_is_told_how_to_name_them():
    with pytest.raises(ValueError, match="--node-config"):
        worker.clients_of({})


def test_the_client_app_answers_a_message_of_flowers(place, monkeypatch):
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):  # as in a process of Flower's
        monkeypatch.setattr(TaskIdentity, name, 1)
    from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict

    from fedbuff.deploy.flower import client_app, report_in

    app = client_app(digits(), client=SGD)
    message = Message(RecordDict({"fedbuff": ConfigRecord({"orders": orders(4)})}), 1, MessageType.TRAIN)
    message.metadata.__dict__["_message_id"] = "m"
    context = Context(
        run_id=1, node_id=1, node_config={"partition-id": 4, "folder": str(place)}, state=RecordDict(), run_config={}
    )
    report = Report.from_bytes(report_in(app(message, context)))
    assert [(r.trip, r.client) for r in report.results] == [(4, 4)]
    assert report.clients == ((4, 4),)
