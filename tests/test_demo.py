"""What the demo shows: on real digits, at the same concurrency, FedBuff needs fewer trips than its synchronous rivals."""

import json
from statistics import mean

import fedbuff as fb
from fedbuff import settings
from fedbuff.demo import DEMO


def test_fedbuff_needs_fewer_trips_than_fedavgm_on_digits():
    """The demo's own settings, averaged over seeds 0, 1 and 2, with at least 100 trips in flight."""
    variants = settings.variants(settings.read(DEMO))
    trips = {}
    for name in ("FedBuff", "FedAvgM"):
        runs = [settings.from_tables({**variants[name], "seed": seed}).run() for seed in (0, 1, 2)]
        assert all(run.summary["trips_to_target"] is not None for run in runs)
        trips[name] = mean(run.summary["trips_to_target"] for run in runs)
    assert trips["FedBuff"] < trips["FedAvgM"]
    starts = [settings.from_tables(variants[name]).server.start for name in ("FedBuff", "FedAvgM")]
    assert starts[0].concurrency == starts[1].size >= 100


def test_the_demo_compares_all_rivals_at_one_concurrency():
    found = {name: settings.from_tables(table) for name, table in settings.variants(settings.read(DEMO)).items()}
    assert list(found) == ["FedBuff", "FedAsync", "FedAvgM", "FedAvg", "FedProx"]
    assert len({s.server.start.at_once() for s in found.values()}) == 1
    assert found["FedBuff"].server.buffer_size == 10
    assert found["FedAsync"].server.buffer_size == 1
    assert found["FedProx"].client.proximal > 0
    assert all(isinstance(found[name].server.start, fb.cohort) for name in ("FedAvgM", "FedAvg", "FedProx"))


def test_the_demo_ends_with_a_table_and_plots(fedbuff, tmp_path):
    """In miniature: one seed, 600 trips, so that most don't get there."""
    done = fedbuff("demo", "--seeds", "7", "--set", "until.trips=600", "--out", "demo")
    assert "FedBuff" in done.stdout
    assert "> 600" in done.stdout or "±" in done.stdout
    assert len(json.loads((tmp_path / "demo" / "comparison.json").read_text())) == 5
    assert (tmp_path / "demo" / "accuracy-by-virtual_time.svg").exists()
