"""The virtual clock: durations have the distribution they claim, and everything that can go wrong with a trip does."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import fedbuff as fb
from fedbuff.core.random import Stream, generator, unit, units
from fedbuff.core.schedule import Schedule
from fedbuff.sim.clock import WAKES, Clock
from fedbuff.sim.timing import Sizes, mean_duration

PLAIN = {
    "half_normal": (fb.half_normal(1.5), stats.halfnorm(scale=1.5)),
    "uniform": (fb.uniform(0.5, 2.0), stats.uniform(0.5, 1.5)),
    "exponential": (fb.exponential(0.7), stats.expon(scale=0.7)),
    "lognormal": (fb.lognormal(0.8, median=2.0), stats.lognorm(0.8, scale=2.0)),
    "pareto": (fb.pareto(3.0, minimum=0.5), stats.pareto(3.0, scale=0.5)),
}


def durations(timing, *, trips=20_000, seed=0, **how) -> np.ndarray:
    t = fb.timeline(start=fb.refill(50), buffer_size=5, timing=timing, clients=2000, trips=trips, seed=seed, **how)
    return t.end_time - t.start_time


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize(
    "start", [fb.refill(50), fb.cohort(50), fb.arrivals(concurrency=50), fb.arrivals(concurrency=50, poisson=True)]
)
def test_durations_of_a_timeline_follow_the_timing_model(name, start):
    """Kolmogorov–Smirnov, for every model under every starting rule."""
    timing, expected = PLAIN[name]
    size = 50 if isinstance(start, fb.cohort) else 5
    t = fb.timeline(start=start, buffer_size=size, timing=timing, clients=2000, trips=20_000, seed=3)
    assert stats.kstest(t.end_time - t.start_time, expected.cdf).pvalue > 0.001


@pytest.mark.parametrize("name", PLAIN)
def test_the_mean_of_a_timing_model_is_right(name):
    timing, expected = PLAIN[name]
    assert timing.mean == pytest.approx(expected.mean(), rel=1e-12)


def test_constant_durations_are_constant():
    assert np.allclose(durations(fb.constant(2.0), trips=500), 2.0)


def test_a_straggler_takes_exponentially_long_with_mean_lambda_n():
    """T_i ~ Exp(1 / (λ n_i)), Appendix "Wall-Clock Time Simulation": divided by λ n_i, all are Exp(1)."""
    sizes = 1 + np.arange(2000) % 7
    t = fb.timeline(
        start=fb.refill(50),
        buffer_size=5,
        timing=fb.per_example(fb.exponential(0.3)),
        clients=2000,
        trips=20_000,
        examples=sizes,
    )
    assert np.array_equal(t.examples, sizes[t.client])
    assert stats.kstest((t.end_time - t.start_time) / (0.3 * t.examples), "expon").pvalue > 0.001


def test_a_client_keeps_its_speed():
    """With a spread, a client's trips differ only by the factor that is its own, and the factors are log-normal."""
    t = fb.timeline(
        start=fb.refill(50), buffer_size=5, timing=fb.per_client(fb.constant(1.0), spread=0.5), clients=2000, trips=20_000
    )
    factors = {}
    for client, duration in zip(t.client.tolist(), (t.end_time - t.start_time).tolist(), strict=True):
        assert factors.setdefault(client, duration) == pytest.approx(duration, rel=1e-9)
    assert stats.kstest(np.log(list(factors.values())) / 0.5, "norm").pvalue > 0.001


def test_a_trace_is_drawn_from_its_file(tmp_path: Path):
    (tmp_path / "trace.csv").write_text("client,duration\n7,1.5\n8,2.5\n")
    (tmp_path / "bare.csv").write_text("3\n")
    assert set(durations(fb.trace(str(tmp_path / "trace.csv")), trips=300).round(9)) == {1.5, 2.5}
    assert fb.trace(str(tmp_path / "trace.csv")).mean == 2.0
    assert fb.trace(str(tmp_path / "bare.csv")).mean == 3.0


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "at least one duration"),
        ("duration\n", "at least one duration"),
        ("duration\n-1\n", "finite and >= 0"),
        ("duration\nnan\n", "finite and >= 0"),
        ("duration\nx\n", "line 2: expected a duration, got 'x'"),
        ("a,b\n1,2\n", "one named 'duration', found a, b"),
    ],
)
def test_a_bad_trace_is_refused(tmp_path: Path, text: str, complaint: str):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        fb.trace(str(tmp_path / "bad.csv"))


def test_any_function_that_draws_durations_is_a_timing_model():
    assert (durations(lambda rng, n: rng.integers(1, 4, n) / 1.0, trips=500) < 3.5).all()


def test_a_negative_duration_is_refused():
    with pytest.raises(ValueError, match=r"drew the duration -1\.0"):
        durations(lambda rng, n: np.full(n, -1.0), trips=5)


@given(st.integers(1, 40), st.floats(0, 1.5), st.integers(0, 2**32))
def test_a_synchronous_round_takes_as_long_as_its_last_wanted_trip(size: int, over: float, seed: int):
    """R_t = T_(C_t), the order statistic of Appendix "Wall-Clock Time Simulation"."""
    start = fb.cohort(size, over_selection=over)
    t = fb.timeline(
        start=start, buffer_size=size, timing=fb.exponential(1.0), clients=200, trips=4 * start.at_once(), seed=seed
    )
    draws = Stream(seed, "duration", fb.exponential(1.0))
    clock = 0.0
    for round_number in range(4):
        trips = range(round_number * start.at_once(), (round_number + 1) * start.at_once())
        assert t.start_time[trips] == pytest.approx(clock)
        clock += sorted(draws[i] for i in trips)[size - 1]
        used = t.outcome[trips] == "used"
        assert used.sum() == size
        assert (t.outcome[trips][~used] == "cancelled").all()
        assert t.end_time[trips].max() == pytest.approx(clock)


def test_over_selection_starts_30_percent_more():
    assert [fb.cohort(size, over_selection=0.3).at_once() for size in (10, 100, 1000, 7)] == [13, 130, 1300, 10]


def test_clients_drop_out_as_often_as_said_at_a_random_moment():
    t = fb.timeline(start=fb.refill(50), buffer_size=5, timing=fb.constant(1.0), clients=2000, trips=20_000, dropout=0.2)
    dropped = t.outcome == "dropped"
    assert stats.binomtest(int(dropped.sum()), 20_000, 0.2).pvalue > 0.001
    assert stats.kstest((t.end_time - t.start_time)[dropped], "uniform").pvalue > 0.001
    assert (t.weight[dropped] == 0).all()
    assert (t.server_step[dropped] == -1).all()


def test_a_trip_is_given_up_at_its_timeout():
    t = fb.timeline(start=fb.refill(50), buffer_size=5, timing=fb.exponential(1.0), clients=2000, trips=20_000, timeout=2.0)
    late = t.outcome == "late"
    assert (t.end_time - t.start_time)[late] == pytest.approx(2.0)
    assert (t.end_time - t.start_time)[~late].max() <= 2.0
    assert stats.binomtest(int(late.sum()), 20_000, math.exp(-2)).pvalue > 0.001


def test_too_stale_updates_are_late_and_make_no_step():
    t = fb.timeline(
        start=fb.refill(50), buffer_size=5, timing=fb.exponential(1.0), clients=2000, trips=20_000, max_staleness=15
    )
    assert t.staleness[t.outcome == "used"].max() == 15
    assert t.staleness[t.outcome == "late"].min() == 16


def test_trips_start_and_end_inside_their_clients_window():
    window = fb.windows(period=24.0, open=6.0)
    t = fb.timeline(
        start=fb.refill(50), buffer_size=5, timing=fb.exponential(1.0), clients=2000, trips=5000, availability=window
    )
    for client, begin, end, outcome in zip(t.client.tolist(), t.start_time, t.end_time, t.outcome, strict=True):
        assert window(client, begin)
        closes = window.closes(client, begin)
        assert end <= closes + 1e-9
        assert outcome != "dropped" or end == pytest.approx(closes)
    assert (t.outcome == "dropped").any()


def test_slots_wait_while_nobody_is_there():
    """Three clients, open a tenth of the day: most of the time nothing is in flight, and yet the run goes on."""
    t = fb.timeline(
        start=fb.refill(2), buffer_size=1, timing=fb.constant(0.5), clients=3, trips=50, availability=fb.windows(24.0, 2.4)
    )
    assert (t.outcome == "used").sum() > 25


def test_looking_for_somebody_does_not_multiply():
    """However many events find a slot they can't fill, one wake-up is pending."""
    window = fb.windows(24.0, 2.4)
    schedule, clock = Schedule(fb.refill(100), 5, 500, 0, window), Clock(fb.exponential(1.0), 0, Sizes(), availability=window)
    started = schedule.begin(0.0)
    for _ in range(2000):
        for trip in started:
            clock.start(trip, schedule.in_flight[trip][0])
        at = schedule.wake()
        if at is not None:
            clock.wake(at)
        assert sum(ending == WAKES for _, _, ending in clock.state()["ends"]) <= 1
        now, trip, ending = clock.next()
        if ending != WAKES:
            schedule.ended(trip)
        started = schedule.start_trips(now)


def test_many_clients_who_are_mostly_away_still_fill_the_slots():
    t = fb.timeline(
        start=fb.refill(20),
        buffer_size=5,
        timing=fb.constant(0.01),
        clients=200_000,
        trips=200,
        availability=fb.windows(24.0, 0.24),
    )
    assert t.summary()["concurrency_mean"] == pytest.approx(20, rel=0.01)


def test_nobody_ever_there_is_an_error():
    class Closed(fb.windows):
        def __call__(self, client, time):
            return False

    with pytest.raises(ValueError, match="nobody was available"):
        fb.timeline(start=fb.refill(2), buffer_size=1, clients=3, trips=5, availability=Closed(24.0, 12.0))


@pytest.mark.parametrize("how", [{"dropout": 0.5}, {"timeout": 0.5}, {"availability": fb.windows(24.0, 2.0)}])
def test_arrivals_keep_their_concurrency_whatever_goes_wrong(how):
    t = fb.timeline(
        start=fb.arrivals(concurrency=100), buffer_size=10, timing=fb.exponential(1.0), clients=20_000, trips=20_000, **how
    )
    assert t.summary()["concurrency_mean"] == pytest.approx(100, rel=0.05)


def test_the_summary_of_a_timeline_ends_when_its_last_trip_starts():
    """Heavy tails: waiting for the last trip to end is not part of what is measured."""
    t = fb.timeline(start=fb.refill(100), buffer_size=10, timing=fb.pareto(1.5), clients=5000, trips=20_000)
    assert t.summary()["server_steps"] == pytest.approx(2000, rel=0.02)
    assert t.summary()["virtual_time"] == t.start_time.max()
    rounds = fb.timeline(start=fb.cohort(10), buffer_size=10, clients=50, trips=10)
    assert rounds.summary()["server_steps"] == 1


def test_mean_duration_counts_the_clients_in():
    sizes = Sizes([1, 2, 6])
    assert mean_duration(fb.per_example(fb.exponential(2.0)), 0, 3, sizes) == pytest.approx(6.0)
    assert mean_duration(lambda rng, n: rng.uniform(0, 2, n), 0, 3, sizes) == pytest.approx(1.0, rel=0.02)


def test_arrivals_keep_the_mean_concurrency_that_was_asked_for():
    """Little's law, for the paper's constant rate and for a Poisson process."""
    for poisson in (False, True):
        t = fb.timeline(
            start=fb.arrivals(concurrency=80, poisson=poisson),
            buffer_size=10,
            timing=fb.lognormal(0.5),
            clients=5000,
            trips=50_000,
        )
        assert t.summary()["concurrency_mean"] == pytest.approx(80, rel=0.03)
        gaps = np.diff(t.start_time)
        mean_gap = fb.lognormal(0.5).mean / 80
        if poisson:
            assert stats.kstest(gaps / mean_gap, "expon").pvalue > 0.001
        else:
            assert gaps == pytest.approx(mean_gap)


def test_an_arrival_is_lost_when_everybody_is_busy():
    t = fb.timeline(start=fb.arrivals(rate=10.0), buffer_size=1, timing=fb.constant(1.0), clients=3, trips=30)
    assert len(np.unique(t.client)) == 3
    assert t.summary()["concurrency_mean"] <= 3


@given(st.integers(0, 2**40), st.lists(st.integers(0, 20_000), min_size=1, max_size=20))
def test_a_stream_is_addressed_by_index_whatever_was_asked_before(seed: int, indices: list[int]):
    wandering, fresh = Stream(seed, "x"), [Stream(seed, "x")[i] for i in indices]
    assert [wandering[i] for i in indices] == fresh


def test_units_of_different_purposes_and_seeds_are_independent():
    def many(seed, purpose):
        return np.array([unit(seed, purpose, i) for i in range(5000)])

    a, b, c = many(0, "speed"), many(0, "window"), many(1, "speed")
    assert stats.kstest(a, "uniform").pvalue > 0.001
    assert abs(np.corrcoef(np.stack([a, b, c, np.roll(a, 1)])) - np.eye(4)).max() < 0.05
    assert generator(0, "a").random() != generator(0, "b").random()


@pytest.mark.parametrize(
    ("clients", "concurrency", "spread"), [(60, 20, 1.5), (1000, 20, 1.5), (1000, 300, 0.5), (60, 20, 0.0)]
)
def test_arrivals_keep_their_concurrency_though_slow_clients_are_seldom_free(clients, concurrency, spread):
    timing = fb.per_client(fb.exponential(1.0), spread)
    t = fb.timeline(start=fb.arrivals(concurrency=concurrency), buffer_size=5, clients=clients, trips=40_000, timing=timing)
    assert t.summary()["concurrency_mean"] == pytest.approx(concurrency, rel=0.05)


@pytest.mark.parametrize(
    ("timing", "timeout", "clients"),
    [
        (fb.per_client(fb.exponential(1.0), 1.2), 1.0, 200),
        (fb.per_client(fb.exponential(1.0), 2.5), 1.0, 200),
        (fb.per_client(fb.exponential(1.0), 2.5), 1.0, 5000),
        (fb.per_example(fb.exponential(0.3)), 1.5, 200),
        (fb.per_client(fb.exponential(1.0), 1.0), None, 50),
    ],
)
def test_arrivals_keep_their_concurrency_though_slow_trips_are_cut_off(timing, timeout, clients):
    """As many as there are clients can't be under way all the time: then it is a few fewer."""
    sizes = np.random.default_rng(0).integers(1, 20, clients)
    t = fb.timeline(
        start=fb.arrivals(concurrency=50), buffer_size=1, clients=clients, trips=40_000, timing=timing, timeout=timeout,
        examples=sizes,
    )  # fmt: skip
    assert t.summary()["concurrency_mean"] == pytest.approx(50, rel=0.07)


def test_where_few_clients_are_there_the_same_ones_start_as_by_one_draw_after_another():
    """`which` only saves time: who is asked for, and what is drawn, is the same for an availability without it."""

    class Slow:
        def __init__(self, hours):
            self.hours, self.share, self.retry = hours, hours.share, hours.retry

        def __call__(self, client, time):
            return self.hours(client, time)

    for clients, share in ((40, 0.05), (40, 0.6), (120_000, 0.01)):
        hours = fb.windows(10.0, 10.0 * share)
        fast, slow = (Schedule(fb.refill(30), 2, clients, 1, available) for available in (hours, Slow(hours)))
        assert fast.begin(0.0) == slow.begin(0.0)
        for number in range(30):
            for schedule in (fast, slow):
                if schedule.in_flight:
                    schedule.ended(min(schedule.in_flight))
                schedule.start_trips(0.3 * number)
            assert fast.state() == slow.state()


@given(st.integers(0, 2**63), st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
def test_numbers_of_many_indices_are_those_of_each(seed, indices):
    assert units(seed, "window", np.array(indices)).tolist() == [unit(seed, "window", i) for i in indices]


@given(st.integers(0, 20_000), st.integers(0, 9_000))
def test_numbers_of_a_stream_at_once_are_those_one_by_one(first, count):
    stream = Stream(3, "choice")
    found = stream.between(first, first + count)
    assert len(found) == count
    assert all(found[i] == stream[first + i] for i in range(0, count, 997))
