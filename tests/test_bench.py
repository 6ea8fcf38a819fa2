"""The benchmark measures what it says; how fast it is, is not for a test to judge."""

import json

import pytest

from fedbuff.bench.engine import microseconds_per_trip
from fedbuff.bench.workloads import WORKLOADS


def test_the_network_is_flsims():
    assert sum(p.numel() for p in WORKLOADS["cifar"].task().model().parameters()) == 31_594


def test_large_is_ten_million_weights():
    assert sum(p.numel() for p in WORKLOADS["large"].task().model().parameters()) == pytest.approx(10e6, rel=0.01)


def test_the_engine_can_be_measured_without_training():
    assert 0 < microseconds_per_trip(concurrency=50, clients=500, weights=20, count=500) < 100_000


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


def test_an_unknown_workload_is_one_line(fedbuff):
    done = fedbuff("bench", "--only", "cifer", code=2)
    assert "cifar" in done.stderr
    assert len(done.stderr.splitlines()) == 1
