"""The compiled plan is the plan: trip for trip and step for step, whatever the settings, after every restore."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedbuff as fb
from fedbuff.core.trips import COLUMNS
from fedbuff.sim.fastplan import FastPlan, fastest
from fedbuff.sim.plan import Plan
from fedbuff.sim.timing import Sizes

TIMINGS = [
    fb.half_normal(1.0),
    fb.constant(1.0),  # ties everywhere
    fb.pareto(1.2),
    fb.per_client(fb.uniform(0.0, 2.0), spread=1.0),
    fb.per_example(fb.exponential(0.1)),
]
RULES = st.one_of(
    st.builds(fb.refill, st.integers(1, 20)),
    st.builds(fb.cohort, st.integers(1, 10), over_selection=st.sampled_from([0.0, 0.3, 1.0])),
    st.builds(lambda c, poisson: fb.arrivals(concurrency=c, poisson=poisson), st.floats(0.5, 15), st.booleans()),
)
SETTINGS = st.fixed_dictionaries(
    {
        "start": RULES,
        "buffer_size": st.integers(1, 6),
        "weigh": st.sampled_from([fb.polynomial(0.5), fb.constant(1.0)]),
        "max_staleness": st.sampled_from([None, None, 3]),
        "clients": st.integers(20, 40) | st.just(5000),
        "sizes": st.sampled_from([None, "listed", "asked"]),
        "timing": st.sampled_from(TIMINGS),
        "seed": st.integers(0, 5),
        "dropout": st.sampled_from([0.0, 0.2]),
        "timeout": st.sampled_from([None, 1.5]),
    }
)


def both(given):
    """The plan, and the compiled one."""
    sizes = {None: None, "listed": [1 + c % 7 for c in range(given["clients"])], "asked": lambda c: 1 + c % 7}[given["sizes"]]
    made = {**given, "sizes": Sizes(sizes)}
    try:
        slow = Plan(**made)
    except ValueError:
        return None  # a cohort that never fills its buffer, say
    fast = fastest(**made)
    assert isinstance(fast, FastPlan), "no C++ compiler here"
    return slow, fast


def rows(plan):
    return {name: list(getattr(plan.trips, name)[: len(plan.trips)]) for name in COLUMNS}, list(
        plan.trips.order[: plan.trips.ended]
    )


def same(slow, fast):
    assert list(slow.steps) == list(fast.steps)
    assert rows(slow) == rows(fast)
    assert (slow.version, slow.in_flight, slow.now) == (fast.version, fast.in_flight, fast.now)
    a, b = slow.state(), fast.state()
    for state in (a, b):
        state["clock"]["ends"] = sorted(tuple(end) for end in state["clock"]["ends"])
    assert a == b


@settings(deadline=None, max_examples=150)
@given(SETTINGS, st.integers(1, 40), st.sampled_from([math.inf, 30]), st.sampled_from([math.inf, 5.0]))
def test_the_same_trips_and_steps(given, version, most_trips, before):
    plans = both(given)
    if plans is None:
        return
    for plan in plans:
        plan.begin()
    told = [plan.run(version, most_trips, before) for plan in plans]
    assert told[0] == told[1]
    same(*plans)
    assert plans[0].upcoming() == plans[1].upcoming()


@settings(deadline=None, max_examples=100)
@given(SETTINGS, st.integers(1, 15), st.sets(st.integers(0, 200), max_size=60))
def test_each_takes_over_the_other_s_state(given, version, failed):
    """Also with trips that turn out to fail, as when the server refuses an update."""
    first, second = both(given) or (None, None), both(given) or (None, None)
    if None in first:
        return
    for plan in (*first, *second):
        plan.begin()
    (slow, fast), (other_slow, other_fast) = first, second
    slow.run(version), fast.run(version)
    for taker, giver in ((other_fast, slow), (other_slow, fast)):
        taker.trips.restore(giver.trips.state())
        taker.restore(json.loads(json.dumps(giver.state())), failed)
        taker.steps.clear()
    slow.restore(slow.state(), failed)
    for plan in (slow, other_fast, other_slow):
        plan.steps.clear()
        plan.run(version + 20)
    same(slow, other_fast)
    same(slow, other_slow)


@pytest.mark.parametrize("start", [fb.refill(30), fb.cohort(20, 0.3), fb.arrivals(rate=10.0, poisson=True)])
def test_followed_to_the_end(start):
    given = {"start": start, "buffer_size": 5, "weigh": fb.polynomial(0.5), "max_staleness": None, "clients": 60}
    slow, fast = both({**given, "sizes": None, "timing": fb.half_normal(1.0), "seed": 3})
    for plan in (slow, fast):
        plan.begin()
        plan.follow(10_000)
    assert rows(slow) == rows(fast)


def test_rewound_and_played_again():
    slow, fast = both(
        {"start": fb.refill(50), "buffer_size": 5, "weigh": fb.polynomial(0.5), "max_staleness": None, "clients": 500}
        | {"sizes": "listed", "timing": fb.exponential(1.0), "seed": 0}
    )
    for plan in (slow, fast):
        plan.begin()
        plan.run(10)
        state, started, ended = plan.state(), len(plan.trips), plan.trips.ended
        plan.run(40)
        plan.trips.rewind(started, ended)
        plan.restore(state, failed={started - 3, started - 2})
        plan.steps.clear()
        plan.run(40)
    assert "failed" in fast.trips.arrays()["outcome"]
    same(slow, fast)


def mistaken(staleness):
    raise ZeroDivisionError("of the user's own")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"timing": lambda rng, n: rng.normal(size=n)}, ValueError, "expected a finite one >= 0"),
        ({"weigh": mistaken}, ZeroDivisionError, "of the user's own"),
        ({"weigh": lambda staleness: -1.0}, ValueError, "returned -1.0; a staleness weight is finite"),
        ({"dropout": 1.0}, ValueError, "no server step in 20,001 trips"),
        ({"sizes": Sizes(lambda client: 1 / 0)}, ZeroDivisionError, "division"),
        ({"timing": lambda rng, n: np.ones(n - 1)}, ValueError, "asked for 4096 numbers"),
    ],
)
def test_the_same_errors(changes, error, says):
    made = {"start": fb.refill(10), "buffer_size": 5, "weigh": fb.polynomial(0.5), "max_staleness": None, "clients": 50}
    made |= {"sizes": Sizes(), "timing": fb.half_normal(1.0), "seed": 0, **changes}
    said = []
    for plan in (Plan(**made), fastest(**made)):
        with pytest.raises(error, match=says) as caught:
            plan.begin()
            plan.run(1000)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_what_it_can_not_do_is_left_to_python():
    made = {"start": fb.refill(10), "buffer_size": 5, "weigh": fb.polynomial(0.5), "max_staleness": None, "clients": 50}
    made |= {"sizes": Sizes(), "timing": fb.half_normal(1.0), "seed": 0}
    assert type(fastest(**made, availability=fb.windows(24.0, 6.0))) is Plan


def scales(rng, count):
    """Durations of six orders of magnitude: most ends are near, some come many thousand buckets of time later."""
    return 10 ** rng.uniform(-3, 3, count)


def edge(rng, count):
    """One in 32 takes sixteen times the mean: it ends 4,096 buckets later, the first that is far."""
    return np.where(np.arange(count) % 32 == 31, 31.0, 1.0)


@pytest.mark.parametrize("timing", [scales, edge])
@pytest.mark.parametrize("concurrency", [1, 7, 60])
def test_ends_come_in_order_however_far_apart_they_are(concurrency, timing):
    given = {"start": fb.refill(concurrency), "buffer_size": 3, "clients": 100, "timing": timing, "seed": 1}
    slow, fast = both({"weigh": fb.polynomial(0.5), "max_staleness": None, "sizes": None, **given})
    for plan in (slow, fast):
        plan.begin()
        plan.run(400)
    same(slow, fast)
    fast.restore(json.loads(json.dumps(slow.state())))  # from where all but the nearest are far
    for plan in (slow, fast):
        plan.run(600)
    same(slow, fast)
