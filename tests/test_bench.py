"""The benchmark measures what it says; how fast it is, is not for a test to judge."""

import json
import time
from itertools import pairwise

import pytest

from fedbuff.bench import measure
from fedbuff.bench.engine import Case, microseconds_per_trip
from fedbuff.bench.workloads import WORKLOADS


def test_the_network_is_flsims():
    assert sum(p.numel() for p in WORKLOADS["cifar"].task().model().parameters()) == 31_594


def test_large_is_ten_million_weights():
    assert sum(p.numel() for p in WORKLOADS["large"].task().model().parameters()) == pytest.approx(10e6, rel=0.01)


def test_the_engine_can_be_measured_without_training():
    cases = [Case(concurrency=50, clients=500, weights=20), Case(concurrency=5, clients=500, weights=20)]
    found = microseconds_per_trip(cases, count=500, rounds=3)
    assert [len(times) for times in found] == [3, 3]
    assert all(0 < time < 100_000 for times in found for time in times)


def test_bench_prints_ratios_and_keeps_them(fedbuff, tmp_path):
    done = fedbuff("bench", "--only", "logistic", "--repeats", 1, "--share", 0.01, "--json", "--out", tmp_path / "kept")
    result = json.loads(done.stdout)
    found = result["workloads"]["logistic"]
    rates = found["trips_per_second"]
    assert found["ours / loop"] == pytest.approx(rates[f"ours-{result['workers']}"] / rates["loop"])
    assert min(rates.values()) > 0
    assert found["peak_mb_beyond_data"]["ours-1"] > 50
    assert result["machine"]["cores"] >= 1
    (kept,) = (tmp_path / "kept").iterdir()
    assert json.loads(kept.read_text()) == result


def test_a_run_is_measured_with_as_many_trips_in_flight_and_clients_as_asked_for(monkeypatch):
    seen, under_way = [], measure.under_way

    def watched(workload, task, workers, watch, **how):
        def also(status):
            seen.append((status.trips, status.in_flight, len(task.clients)))
            watch(status)

        under_way(workload, task, workers, also, **how)

    monkeypatch.setattr(measure, "under_way", watched)
    monkeypatch.setattr(measure, "AFTER", 5000)
    workload = WORKLOADS["logistic"]
    assert measure.at(workload, workload.task(), 500, concurrency=2500, clients=30_000) > 0
    assert {(active, clients) for _, active, clients in seen} == {(2500, 30_000)}
    assert seen[-1][0] >= 5000 + 500, "it began before all trips had turned over"


def test_layers_take_turns_and_what_costs_time_shows(monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 5)
    task, went, under_way = WORKLOADS["logistic"].task(), [], measure.under_way

    def watched(workload, task, workers, watch, slow):
        def also(status):
            before = len(went)
            went.append(slow)
            time.sleep(0.02 * slow)
            assert len(went) == before + 1, "two runs went on at a time"
            watch(status)

        under_way(workload, task, workers, also)

    monkeypatch.setattr(measure, "under_way", watched)
    found = measure.turns(WORKLOADS["logistic"], task, 100, {"ours": {"slow": 0}, "slow": {"slow": 1}})
    assert [len(turns) for turns in found.values()] == [5, 5]
    elapsed = {way: [turn[0] for turn in turns] for way, turns in found.items()}
    cpu = {way: sum(turn[1] for turn in turns) for way, turns in found.items()}
    assert min(elapsed["slow"]) >= 20 / measure.BUFFER_SIZE  # milliseconds: it slept at every server step,
    assert cpu["slow"] < sum(elapsed["slow"]) / 2  # which takes no CPU
    assert sum(a != b for a, b in pairwise(went)) > 5  # both in every round


def test_a_layer_that_fails_ends_the_turns(monkeypatch):
    def fails(*args, **how):
        raise ValueError("secure aggregation needs cryptography")

    monkeypatch.setattr(measure, "under_way", fails)
    with pytest.raises(ValueError, match="cryptography"):
        measure.turns(WORKLOADS["logistic"], None, 100, {"ours": {}, "enclave": {}})


def test_an_unknown_workload_is_one_line(fedbuff):
    done = fedbuff("bench", "--only", "cifer", code=2)
    assert "cifar" in done.stderr
    assert len(done.stderr.splitlines()) == 1
