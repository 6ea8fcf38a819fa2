"""The laws of design.md that need no training."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedbuff as fb

TIMINGS = {
    "half_normal": fb.half_normal(1.0),
    "uniform": fb.uniform(0.0, 2.0),
    "exponential": fb.exponential(1.0),
    "per_example": fb.per_example(fb.exponential(1.0)),
    "lognormal": fb.lognormal(1.0),
    "pareto": fb.pareto(3.0),
    "constant": fb.constant(1.0),
    "per_client": fb.per_client(fb.half_normal(1.0), spread=0.5),
    "custom": lambda rng, n: rng.gamma(2.0, size=n),
}


@pytest.mark.parametrize("name", TIMINGS)
def test_mean_staleness_is_concurrency_minus_one_over_k(name):
    """(M − 1) / K whatever the timing: each server step ages the M − 1 other trips in flight."""
    m, k = 100, 10
    t = fb.timeline(
        start=fb.refill(m),
        buffer_size=k,
        timing=TIMINGS[name],
        clients=10_000,
        trips=200_000,
        seed=1,
        examples=lambda c: 1 + c % 5,
    )
    assert len(t.staleness) == 200_000
    assert t.staleness.mean() == pytest.approx((m - 1) / k, rel=0.01)


@given(
    st.integers(2, 60),
    st.integers(2, 12),
    st.integers(0, 2**32),
    st.sampled_from(["half_normal", "uniform", "lognormal", "pareto", "constant"]),
)
def test_staleness_with_k_is_at_most_that_with_1_divided_by_k(m: int, k: int, seed: int, name: str):
    """τ_max,K ≤ ⌈τ_max,1 / K⌉ on the same arrivals, and trip by trip (Appendix A)."""
    one, many = (
        fb.timeline(start=fb.refill(m), buffer_size=size, timing=TIMINGS[name], clients=500, trips=1000, seed=seed)
        for size in (1, k)
    )
    assert np.array_equal(one.end_time, many.end_time)
    assert many.staleness.max() <= math.ceil(one.staleness.max() / k)
    assert (many.staleness <= np.ceil(one.staleness / k)).all()


@given(st.data())
def test_no_client_is_twice_in_a_buffer_or_in_two_trips_at_once(data):
    clients = data.draw(st.integers(5, 40))
    m = data.draw(st.integers(1, clients))
    k = data.draw(st.integers(1, clients))
    start = data.draw(st.sampled_from([fb.refill(m), fb.arrivals(rate=float(m)), fb.cohort(max(m, k))]))
    dropout = data.draw(st.sampled_from([0.0, 0.3]))
    t = fb.timeline(
        start=start,
        buffer_size=k,
        timing=fb.exponential(1.0),
        clients=clients,
        trips=400,
        seed=data.draw(st.integers(0, 999)),
        dropout=dropout,
    )
    used = t.outcome == "used"
    pairs = np.stack([t.server_step[used], t.client[used]])
    assert pairs.shape[1] == len(np.unique(pairs, axis=1).T)
    for client in range(clients):
        mine = t.client == client
        begin, end = t.start_time[mine], t.end_time[mine]
        assert (begin[1:] >= end[:-1]).all()
        # not chosen again before the server has stepped on its update
        assert (t.start_version[mine][1:] >= t.server_step[mine][:-1]).all()


def test_every_free_client_is_equally_likely():
    t = fb.timeline(start=fb.refill(10), buffer_size=5, timing=fb.exponential(1.0), clients=50, trips=50_000)
    counts = np.bincount(t.client, minlength=50)
    assert abs(counts / counts.mean() - 1).max() < 0.1


def test_as_many_clients_as_trips_in_flight_is_enough():
    """Every client is always in flight or in the buffer: slots wait for the server step."""
    t = fb.timeline(start=fb.refill(20), buffer_size=20, timing=fb.half_normal(1.0), clients=20, trips=2000)
    assert (t.outcome == "used").sum() >= 1980
    assert t.staleness.max() == 0


def test_concurrency_is_what_refill_says_at_every_moment():
    t = fb.timeline(start=fb.refill(30), buffer_size=10, timing=fb.lognormal(1.0), clients=1000, trips=3000)
    times = np.sort(t.start_time)[100:-100:50] + 1e-9
    times = times[times < t.start_time.max()]
    active = [(t.start_time <= now).sum() - (t.end_time <= now).sum() for now in times]
    assert set(active) == {30}


def test_the_timeline_repeats_exactly_and_differs_by_seed():
    def make(seed):
        return fb.timeline(start=fb.refill(30), buffer_size=10, clients=1000, trips=3000, seed=seed)

    a, b, c = make(0), make(0), make(1)
    assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in a.__dataclass_fields__)
    assert not np.array_equal(a.end_time, c.end_time)


def test_ten_million_clients_cost_no_memory():
    """Choosing among them keeps only those who are busy."""
    t = fb.timeline(start=fb.refill(100), buffer_size=10, clients=10_000_000, trips=2000)
    assert t.client.max() > 9_000_000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"start": fb.refill(11), "buffer_size": 1}, "10 clients are too few for refill"),
        ({"start": fb.refill(1), "buffer_size": 11}, "at least 11"),
        ({"start": fb.cohort(5), "buffer_size": 6}, "never reached"),
        ({"start": fb.refill(1), "buffer_size": 0}, "buffer_size=0: expected an integer >= 1"),
        ({"start": fb.refill(1), "buffer_size": 1, "trips": 0}, "trips=0"),
        ({"start": fb.refill(1), "buffer_size": 1, "dropout": 1.5}, "dropout=1.5: expected a number >= 0 and <= 1"),
    ],
)
def test_impossible_timelines_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        fb.timeline(**{"clients": 10, "trips": 10, **arguments})
