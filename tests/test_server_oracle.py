"""`Server` against the oracle, on random orders of good and bad events; then what it promises, one statement a test."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fedbuff as fb
from oracle import Expected, Moment, Settings, cohort_trips, replay, staleness_weight

LENGTH = 3

# --- random settings ---------------------------------------------------------------------------------------------------

WEIGHTS = [
    *(("constant",), ("constant", 0.5), ("polynomial", 0.5), ("polynomial", 2.0), ("hinge", 10.0, 1), ("hinge", 0.5, 0)),
    *(("cutoff", 0), ("cutoff", 1), ("table", 2, 0, 1.5, 0.25)),
]
OPTIMIZERS = [
    *(("sgd", 1.0), ("sgd", 0.1), ("momentum", 1.0, 0.9), ("momentum", 0.3, 0.0)),
    *(("adam", 0.1, 0.9, 0.999, 1e-8, False), ("adam", 0.7, 0.5, 0.9, 1e-3, True)),
]


@st.composite
def random_settings(draw: st.DrawFn, rule: str, optimizer: tuple) -> Settings:
    number = draw(st.sampled_from([9, 12, 20, 5, 3, 2, 1]))
    buffer_most = number
    if rule == "refill":
        start = (rule, draw(st.sampled_from([m for m in (8, 16, 4, 9, 2, 1) if m <= number])))
    elif rule == "cohort":
        choices = [(size, over) for size in range(1, 9) for over in (0.0, 0.1, 0.25, 0.3, 1.0)]
        start = (rule, *draw(st.sampled_from([c for c in choices if cohort_trips(*c) <= number])))
        buffer_most = cohort_trips(*start[1:])
    else:
        start = (rule, draw(st.sampled_from([0.5, 3.0])), draw(st.booleans()))
    return Settings(
        start=start,
        buffer_size=draw(st.integers(1, min(buffer_most, 3)) | st.integers(1, buffer_most)),
        weigh=draw(st.sampled_from(WEIGHTS)),
        optimizer=optimizer,
        threshold=draw(st.none() | st.integers(1, 3)),
        max_staleness=draw(st.none() | st.integers(0, 3)),
        weight_by=draw(st.sampled_from(["uniform", "examples"])),
        mixing=draw(st.booleans()),
        average=draw(st.none() | st.integers(1, 6)),
        clients=draw(st.sampled_from([tuple(range(number)), tuple(f"phone {i}" for i in range(number))])),
        seed=draw(st.integers(0, 100)),
    )


def make_server(chosen: Settings, weights: np.ndarray) -> fb.Server:
    rule, *args = chosen.start
    start = fb.arrivals(rate=args[0], poisson=args[1]) if rule == "arrivals" else getattr(fb, rule)(*args)
    name, *args = chosen.weigh
    weigh = staleness_weight(*chosen.weigh) if name == "table" else getattr(fb, name)(*args)
    name, *args = chosen.optimizer
    optimizer = getattr(fb, name)(*args)
    return fb.Server(
        weights=weights,
        clients=chosen.clients,
        start=start,
        buffer_size=chosen.buffer_size,
        weigh=weigh,
        optimizer=optimizer if chosen.threshold is None else fb.delay_adaptive(optimizer, chosen.threshold),
        max_staleness=chosen.max_staleness,
        weight_by=chosen.weight_by,
        mixing=chosen.mixing,
        average=chosen.average,
        seed=chosen.seed,
    )


# --- random events -----------------------------------------------------------------------------------------------------

BAD_UPDATES = [
    np.ones(LENGTH + 1),
    np.ones(LENGTH - 1),
    np.ones(0),
    np.array(1.0),
    np.array([1.0, math.nan, 1.0]),
    np.array([1.0, 1.0, math.inf]),
    np.array([-math.inf, 1.0, 1.0]),
    np.ones((1, LENGTH)),
    np.ones((LENGTH, LENGTH)),
    np.ones(LENGTH) + 1j,
    np.array(["1", "2", "3"]),
    np.array([1.0, None, 1.0], dtype=object),
    [1.0, [2.0], 3.0],
    "abc",
    b"abc",
    None,
    1.0,
    {},
    object(),
]
NO_TRIPS = [None, "x", -1, True, False, 1.5, 0.0, math.nan, 10**9, [], {}, (0,)]

ACTIONS = {
    "refill": ["report"] * 10 + ["fail", "bad", "unknown", "again", "wake"],
    "cohort": ["report"] * 10 + ["fail", "bad", "unknown", "again", "again", "wake"],
    "arrivals": ["report"] * 10 + ["fail", "bad", "unknown", "again", "wake early"] + ["wake"] * 12,
}


@st.composite
def random_runs(draw: st.DrawFn, rule: str, optimizer: tuple) -> tuple[Settings, list[str], int]:
    """Settings, what to do to the server, and the seed that decides to whom."""
    actions = draw(st.lists(st.sampled_from(ACTIONS[rule]), min_size=20, max_size=100))
    return draw(random_settings(rule, optimizer)), actions, draw(st.integers(0, 10**6))


def play(chosen: Settings, weights: np.ndarray, actions: list[str], seed: int) -> list[Moment]:
    """Do the actions to a server, to trips chosen at random, and write down what it did."""
    server = make_server(chosen, weights)
    rng = np.random.default_rng(seed)
    trace: list[Moment] = []
    trips: list[int] = []
    now, wake_at = 0.0, math.inf

    def feed(event: object) -> None:
        nonlocal wake_at
        commands = server.begin() if event is None else server.handle(event)
        trips.extend(c.trip for c in commands if isinstance(c, fb.StartTrip))
        wake_at = next((c.at for c in commands if isinstance(c, fb.Wake)), wake_at)
        trace.append(
            Moment(event, commands, server.weights, server.model, server.version, server.buffered, dict(server.in_flight))
        )  # server.weights and model themselves, not copies: a later step must not change them

    feed(None)
    for action in actions:
        pick = int(rng.integers(10**6))
        in_flight = sorted(server.in_flight)
        ended = sorted(set(trips) - set(in_flight))
        update = rng.normal(size=LENGTH)
        if action == "again" and ended:
            trip = ended[pick % len(ended)]
            feed(fb.TripFailed(trip, "again", now) if pick % 3 == 0 else fb.UpdateArrived(trip, update, 1, now))
        elif action == "unknown":
            trip = NO_TRIPS[pick % len(NO_TRIPS)]
            feed(fb.TripFailed(trip, "no trip", now) if pick % 5 == 0 else fb.UpdateArrived(trip, update, 1, now))
        elif action == "wake early" or (action == "wake" and wake_at == math.inf):
            feed(fb.Woke(now))
        elif action == "wake" or not in_flight:
            assert wake_at < math.inf, "nobody is in flight, and the server does not ask to be woken"
            now = wake_at
            feed(fb.Woke(now))
        elif action == "fail":
            feed(fb.TripFailed(in_flight[pick % len(in_flight)], "out of battery", now))
        elif action == "bad":
            feed(fb.UpdateArrived(in_flight[pick % len(in_flight)], BAD_UPDATES[pick % len(BAD_UPDATES)], 1, now))
        else:
            feed(fb.UpdateArrived(in_flight[pick % len(in_flight)], update, 1 + pick % 7, now))
    return trace


# --- the comparison ----------------------------------------------------------------------------------------------------


def kinds(moment: Moment, kind: type) -> list:
    return [command for command in moment.commands if isinstance(command, kind)]


def check_as_expected(seen: Moment, expected: Expected) -> None:
    """One moment of the trace against the oracle's."""
    rejections, steps, starts = kinds(seen, fb.UpdateRejected), kinds(seen, fb.StepTaken), kinds(seen, fb.StartTrip)
    assert len(rejections) == expected.rejected
    for rejection in rejections:
        assert rejection.trip is seen.event.trip
        assert rejection.reason
    assert len(steps) == (expected.step is not None)
    for step in steps:
        assert (step.version, step.trips, step.staleness) == (
            expected.step.version,
            expected.step.trips,
            expected.step.staleness,
        )
        assert step.weights == pytest.approx(expected.step.weights, rel=1e-14)
    assert {c.trip for c in kinds(seen, fb.CancelTrip)} == expected.cancelled
    assert len(kinds(seen, fb.CancelTrip)) == len(expected.cancelled)
    assert len(starts) == expected.started
    assert all(start.version == expected.version for start in starts)
    order = [fb.UpdateRejected, fb.StepTaken, fb.CancelTrip, fb.StartTrip, fb.Wake]
    places = [order.index(type(command)) for command in seen.commands]
    assert places == sorted(places)
    assert (seen.version, seen.buffered) == (expected.version, expected.buffered)
    assert seen.in_flight == expected.in_flight
    assert seen.weights.dtype == np.float64
    assert seen.weights.shape == expected.weights.shape
    assert np.abs(seen.weights - expected.weights).max() <= 1e-12 * max(1.0, np.abs(expected.weights).max())
    assert np.abs(seen.model - expected.model).max() <= 1e-12 * max(1.0, np.abs(expected.model).max())


def check_untouched(before: Moment, seen: Moment, expected: Expected) -> None:
    """Only a step changes the weights; a report of no trip changes nothing at all."""
    if expected.step is None:
        assert seen.weights.tobytes() == before.weights.tobytes()
        assert seen.model.tobytes() == before.model.tobytes()
        assert seen.version == before.version
    if expected.rejected:
        assert seen.buffered == before.buffered
        if not (type(seen.event.trip) is int and seen.event.trip in before.in_flight):
            assert seen.in_flight == before.in_flight
            assert len(seen.commands) == 1


def check_invariants(chosen: Settings, trace: list[Moment]) -> None:
    """What must hold whatever happens."""
    started = [start for moment in trace for start in kinds(moment, fb.StartTrip)]
    client_of = {start.trip: start.client for start in started}
    assert [start.trip for start in started] == list(range(len(started)))
    in_buffer: set = set()  # clients
    for moment in trace:
        if kinds(moment, fb.StepTaken):
            in_buffer = set()
        elif isinstance(moment.event, fb.UpdateArrived) and not kinds(moment, fb.UpdateRejected):
            in_buffer.add(client_of[moment.event.trip])
        assert len(in_buffer) == moment.buffered
        in_trips = [client for client, _ in moment.in_flight.values()]
        assert len(in_trips) == len(set(in_trips)), "a client in two trips"
        assert set(in_trips) <= set(chosen.clients)
        assert not in_buffer & set(in_trips), "a client chosen again before the server has stepped"
        for step in kinds(moment, fb.StepTaken):
            contributors = [client_of[trip] for trip in step.trips]
            assert len(contributors) == len(set(contributors)) == chosen.buffer_size
        if chosen.start[0] == "refill":
            assert len(in_trips) == min(chosen.start[1], len(chosen.clients) - moment.buffered)
        if chosen.start[0] == "cohort":
            assert len(in_trips) + moment.buffered == cohort_trips(*chosen.start[1:])
    wakes = [wake.at for moment in trace for wake in kinds(moment, fb.Wake)]
    assert wakes == sorted(set(wakes))
    if chosen.start[0] != "arrivals":
        assert wakes == []
    elif not chosen.start[2]:
        assert wakes == pytest.approx([(i + 1) / chosen.start[1] for i in range(len(wakes))])


EVERY_RULE = pytest.mark.parametrize("rule", ["refill", "cohort", "arrivals"])
EVERY_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)


@EVERY_RULE
@EVERY_OPTIMIZER
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_server_does_what_the_oracle_expects(data: st.DataObject, rule: str, optimizer: tuple) -> None:
    """Whatever the settings and the order of events, every command, version and weight is the oracle's."""
    chosen, actions, seed = data.draw(random_runs(rule, optimizer))
    weights = np.array([0.5, -1.0, 2.0])
    trace = play(chosen, weights, actions, seed)
    expected = replay(chosen, weights, trace)
    for seen, should in zip(trace, expected, strict=True):
        check_as_expected(seen, should)
    for before, seen, should in zip(trace, trace[1:], expected[1:], strict=False):
        check_untouched(before, seen, should)
    check_invariants(chosen, trace)


@EVERY_RULE
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_same_events_give_the_same_run(data: st.DataObject, rule: str) -> None:
    """Two servers with one seed give the same commands and the same weights, bit for bit."""
    chosen, actions, seed = data.draw(random_runs(rule, ("momentum", 1.0, 0.9)))
    first, second = (play(chosen, np.zeros(LENGTH), actions, seed) for _ in range(2))
    # a trip may be nan, which is not equal to itself: compare what is printed
    assert repr([m.commands for m in first]) == repr([m.commands for m in second])
    assert [m.weights.tobytes() for m in first] == [m.weights.tobytes() for m in second]


# --- statements --------------------------------------------------------------------------------------------------------


def small_server(**changed: object) -> fb.Server:
    """Ten clients, three at a time, K = 2, plain SGD."""
    arguments = {"weights": np.zeros(LENGTH), "clients": range(10), "start": fb.refill(concurrency=3), "buffer_size": 2}
    return fb.Server(**(arguments | changed))


def started(commands: list) -> list[int]:
    return [command.trip for command in commands if isinstance(command, fb.StartTrip)]


def test_the_example_of_the_documentation() -> None:
    """A hundred trips start, the tenth update makes a step, and every ended trip is replaced."""
    server = fb.Server(
        weights=np.zeros(LENGTH),
        clients=range(1000),
        start=fb.refill(concurrency=100),
        buffer_size=10,
        weigh=fb.polynomial(0.5),
        optimizer=fb.momentum(lr=1.0, beta=0.9),
        seed=0,
    )
    commands = server.begin()
    assert [(c.trip, c.version) for c in commands] == [(trip, 0) for trip in range(100)]
    for trip in range(9):
        assert started(server.handle(fb.UpdateArrived(trip, np.ones(LENGTH), examples=3))) == [100 + trip]
    assert (server.version, server.buffered) == (0, 9)
    step, start = server.handle(fb.UpdateArrived(9, np.ones(LENGTH), examples=3))
    assert step == fb.StepTaken(version=1, trips=tuple(range(10)), staleness=(0,) * 10, weights=(1.0,) * 10)
    assert (start.trip, start.version) == (109, 1)
    assert server.weights.tolist() == [-1.0] * LENGTH
    assert len(server.in_flight) == 100


def test_the_mean_is_divided_by_k_and_not_by_the_weights() -> None:
    """One step late, s(1) = 1/2 and K = 1: half the update is applied, not the whole."""
    server = small_server(buffer_size=1, weigh=fb.polynomial(1.0))
    server.begin()
    server.handle(fb.UpdateArrived(0, np.zeros(LENGTH)))
    step, *_ = server.handle(fb.UpdateArrived(1, np.ones(LENGTH)))
    assert (step.staleness, step.weights) == ((1,), (0.5,))
    assert server.weights.tolist() == [-0.5] * LENGTH


def test_examples_weigh_updates() -> None:
    """With weight_by="examples" the mean is Σ s n Δ / Σ n."""
    server = small_server(weight_by="examples")
    server.begin()
    server.handle(fb.UpdateArrived(0, np.full(LENGTH, 1.0), examples=1))
    server.handle(fb.UpdateArrived(1, np.full(LENGTH, 5.0), examples=3))
    assert server.weights.tolist() == [-4.0] * LENGTH


def test_mixing_is_an_average_of_models() -> None:
    """K = 1 and SGD: w ← (1 − η s(τ)) w + η s(τ) y, with y the client's model."""
    server = small_server(buffer_size=1, mixing=True, optimizer=fb.sgd(0.5), weigh=fb.polynomial(1.0))
    server.begin()
    server.handle(fb.UpdateArrived(0, np.full(LENGTH, -8.0)))  # y = 8, fresh: the middle of 0 and 8
    assert server.weights.tolist() == [4.0] * LENGTH
    server.handle(fb.UpdateArrived(1, np.full(LENGTH, -8.0)))  # y = 8, one step late: a quarter of the way from 4 to 8
    assert server.weights.tolist() == [5.0] * LENGTH


def test_a_late_wake_up_catches_up() -> None:
    """Clients that arrived while the driver slept start now; those that find nobody free are lost."""
    server = small_server(start=fb.arrivals(rate=2.0))
    assert started(server.begin()) == [0]
    assert server.handle(fb.Woke(time=0.4)) == []
    commands = server.handle(fb.Woke(time=1.6))  # 0.5, 1.0, 1.5
    assert started(commands) == [1, 2, 3]
    assert commands[-1] == fb.Wake(at=2.0)
    commands = server.handle(fb.Woke(time=10.0))
    assert started(commands) == [4, 5, 6, 7, 8, 9]
    assert commands[-1] == fb.Wake(at=10.5)


def test_over_selection_counts_in_decimals() -> None:
    """100 · 1.1 is 110, though 110.00000000000001 in floating point."""
    assert len(small_server(clients=range(200), start=fb.cohort(100, over_selection=0.1)).begin()) == 110
    assert len(small_server(clients=range(1400), start=fb.cohort(1000, over_selection=0.3)).begin()) == 1300


def test_a_late_buffer_slows_the_learning_rate() -> None:
    """delay_adaptive: the largest staleness τ of the buffer counts, min(η, 1/τ), and only in this step."""
    server = small_server(weigh=fb.constant(), optimizer=fb.delay_adaptive(fb.sgd(1.0), threshold=1))
    server.begin()
    for trips, moved in [((0, 3), 1.0), ((1, 4), 1.0), ((2, 7), 0.5), ((8, 9), 1.0)]:  # the largest τ: 0, 1, 2, 1
        before = server.weights
        for trip in trips:
            server.handle(fb.UpdateArrived(trip, np.ones(LENGTH)))
        assert (before - server.weights).tolist() == [moved] * LENGTH


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        fb.sgd(lr=np.float64(0.1)),
        fb.momentum(lr=np.float64(0.1), beta=np.float64(0.9)),
        fb.adam(lr=np.float64(0.1), beta1=np.float64(0.9), beta2=np.float64(0.99), eps=np.float64(1e-8)),
        fb.adam(lr=np.float64(0.1), amsgrad=True),
        fb.delay_adaptive(fb.momentum(lr=np.float64(0.9)), threshold=1),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_weights_keep_their_dtype(dtype: type, optimizer: object, mixing: bool) -> None:
    """float32 stays float32 and float64 float64, even with a float64 learning rate, weight and update."""
    for weight_by in ("uniform", "examples"):
        server = small_server(
            weights=np.zeros(LENGTH, dtype),
            buffer_size=1,
            optimizer=optimizer,
            mixing=mixing,
            weight_by=weight_by,
            weigh=lambda tau: np.float64(1 / (1 + tau)),
        )
        server.begin()
        for trip in range(3):  # staleness 0, 1, 2
            server.handle(fb.UpdateArrived(trip, np.ones(LENGTH, np.float64), examples=3))
            assert server.version == trip + 1
            assert server.weights.dtype == dtype


def test_the_initial_weights_are_not_aliased() -> None:
    """Writing to the array that was passed as weights changes nothing."""
    weights = np.zeros(LENGTH)
    server = small_server(weights=weights)
    weights[:] = 7.0
    server.begin()
    weights[:] = 8.0
    assert server.weights.tolist() == [0.0] * LENGTH
    assert weights.flags.writeable


@pytest.mark.parametrize("mixing", [False, True])
def test_updates_are_not_aliased(mixing: bool) -> None:
    """Writing to the array of an update that is in the buffer changes nothing, and the server does not write to it."""
    server = small_server(mixing=mixing)
    server.begin()
    first, second = np.ones(LENGTH), np.full(LENGTH, 3.0)
    server.handle(fb.UpdateArrived(0, first))
    assert first.tolist() == [1.0] * LENGTH
    first[:] = 100.0
    server.handle(fb.UpdateArrived(1, second))
    assert (first.tolist(), second.tolist()) == ([100.0] * LENGTH, [3.0] * LENGTH)
    second[:] = 100.0
    assert server.weights.tolist() == [-2.0] * LENGTH


def test_weights_are_read_only() -> None:
    """Nobody but the server changes its weights, before or after a step."""
    server = small_server(buffer_size=1, average=np.int64(5))
    server.begin()
    for trip in range(2):
        for vector in (server.weights, server.model):
            with pytest.raises(ValueError, match="read-only"):
                vector[0] = 1.0
        server.handle(fb.UpdateArrived(trip, np.ones(LENGTH)))


def test_weights_of_an_old_version_stay() -> None:
    """Weights that were read before a step still are those of their version after it."""
    server = small_server(buffer_size=1)
    server.begin()
    old = server.weights
    server.handle(fb.UpdateArrived(0, np.ones(LENGTH)))
    assert (old.tolist(), server.weights.tolist()) == ([0.0] * LENGTH, [-1.0] * LENGTH)


def test_a_stale_update_is_refused_and_its_slot_refilled() -> None:
    """max_staleness = 0: after a step the updates of the old version are rejected, and others start."""
    server = small_server(buffer_size=1, max_staleness=0)
    server.begin()
    server.handle(fb.UpdateArrived(0, np.ones(LENGTH)))
    rejected, start = server.handle(fb.UpdateArrived(1, np.ones(LENGTH)))
    assert (rejected.trip, start.trip, start.version) == (1, 4, 1)
    assert (server.version, server.buffered, server.weights.tolist()) == (1, 0, [-1.0] * LENGTH)


def test_a_refused_update_is_not_weighed() -> None:
    """A table of weights need not be longer than max_staleness allows."""
    server = small_server(buffer_size=1, max_staleness=1, weigh=[1.0, 0.5].__getitem__)
    server.begin()
    server.handle(fb.UpdateArrived(0, np.ones(LENGTH)))
    server.handle(fb.UpdateArrived(1, np.ones(LENGTH)))
    assert isinstance(server.handle(fb.UpdateArrived(2, np.ones(LENGTH)))[0], fb.UpdateRejected)


def test_a_failed_trip_is_replaced_by_the_same_client_if_there_is_no_other() -> None:
    """Failing is not contributing: the only client is asked again, or the run would stand still."""
    server = small_server(clients=["only"], start=fb.refill(concurrency=1), buffer_size=1)
    server.begin()
    assert server.handle(fb.TripFailed(0, "out of battery")) == [fb.StartTrip(trip=1, client="only", version=0)]


@pytest.mark.parametrize("examples", [0, -1, 1.5, None, "3", math.nan, math.inf, 10**400], ids=lambda n: repr(n)[:9])
def test_an_impossible_number_of_examples_is_refused(examples: object) -> None:
    """Where the number of examples matters, a wrong one is a fact from outside: rejected, slot refilled, no error."""
    server = small_server(weight_by="examples")
    server.begin()
    rejected, start = server.handle(fb.UpdateArrived(0, np.ones(LENGTH), examples=examples))
    assert isinstance(rejected, fb.UpdateRejected)
    assert (rejected.trip, start.trip, server.buffered, server.version) == (0, 3, 0, 0)


class Unreadable:
    """Something that pretends to be an array."""

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise RuntimeError("no array for you")


@pytest.mark.parametrize("update", [Unreadable(), torch.ones(LENGTH, requires_grad=True)], ids=["unreadable", "with gradient"])
def test_an_update_that_cannot_be_read_is_refused(update: object) -> None:
    """Whatever goes wrong in making an array of an update is the update's fault: rejected, slot refilled, no error."""
    server = small_server()
    server.begin()
    rejected, start = server.handle(fb.UpdateArrived(0, update))
    assert isinstance(rejected, fb.UpdateRejected)
    assert (rejected.trip, start.trip, server.buffered, server.version) == (0, 3, 0, 0)


def test_an_update_too_large_for_float32_is_refused() -> None:
    """1e300 is infinite in float32 weights."""
    server = small_server(weights=np.zeros(LENGTH, np.float32))
    server.begin()
    assert isinstance(server.handle(fb.UpdateArrived(0, np.full(LENGTH, 1e300)))[0], fb.UpdateRejected)
    assert server.buffered == 0


def test_handling_before_the_beginning_raises() -> None:
    """A server that has not begun takes no events."""
    with pytest.raises(RuntimeError, match="begin"):
        small_server().handle(fb.TripFailed(0, "too early"))


def test_beginning_twice_raises() -> None:
    """A server begins once."""
    server = small_server()
    server.begin()
    with pytest.raises(RuntimeError, match="begin"):
        server.begin()


@pytest.mark.parametrize("event", [None, "x", 0, fb.StartTrip(0, 0, 0), (0, np.ones(LENGTH)), fb.UpdateArrived])
def test_handling_what_is_no_event_raises(event: object) -> None:
    """Commands, classes and plain values are no events."""
    server = small_server()
    server.begin()
    with pytest.raises(TypeError):
        server.handle(event)


@pytest.mark.parametrize("weight", [math.nan, -1.0, -math.inf, None])
def test_a_wrong_staleness_weight_raises(weight: float | None) -> None:
    """A staleness weight that is not a number, or negative, is a mistake of the program."""
    with pytest.raises(ValueError):
        server = small_server(weigh=lambda tau: weight)
        server.begin()
        server.handle(fb.UpdateArrived(0, np.ones(LENGTH)))


@pytest.mark.parametrize(
    "setting",
    [
        {"buffer_size": 11},
        {"buffer_size": 0},
        {"buffer_size": 1.5},
        {"start": fb.refill(concurrency=11)},
        {"start": fb.cohort(11)},
        {"start": fb.cohort(10, over_selection=0.1)},
        {"start": fb.cohort(5), "buffer_size": 6},
        {"clients": []},
        {"clients": ["a", "a", "b", "c"]},
        {"max_staleness": -1},
        {"weight_by": "size"},
        {"weights": np.zeros((2, 2))},
        {"weights": np.zeros(3, int)},
    ],
    ids=str,
)
def test_impossible_settings_raise(setting: dict) -> None:
    """Settings that cannot work are refused when the server is made."""
    with pytest.raises(ValueError):
        small_server(**setting)


# --- laws --------------------------------------------------------------------------------------------------------------

M, STEPS = 5, 30


def cohort_run(optimizer: object, updates: np.ndarray, w0: np.ndarray) -> list[np.ndarray]:
    """The weights after each step of a cohort of M with K = M, reporting in a shuffled order."""
    server = fb.Server(
        weights=w0, clients=range(20), start=fb.cohort(M), buffer_size=M, weigh=fb.constant(), optimizer=optimizer
    )
    trips, weights, rng = started(server.begin()), [], np.random.default_rng(1)
    for cohort in updates:
        for trip, update in zip(rng.permutation(trips).tolist(), cohort, strict=True):
            commands = server.handle(fb.UpdateArrived(trip, update))
        trips = started(commands)
        weights.append(server.weights)
    assert server.version == len(updates)
    return weights


@pytest.mark.parametrize(
    ("optimizer", "authority"),
    [
        (fb.sgd(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
        (fb.momentum(lr=0.5, beta=0.9), lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9)),
        (fb.adam(lr=0.1, beta1=0.8, beta2=0.99, eps=1e-6), lambda p: torch.optim.Adam(p, 0.1, (0.8, 0.99), 1e-6)),
        (
            fb.adam(lr=0.1, beta1=0.9, beta2=0.9, eps=1e-8, amsgrad=True),
            lambda p: torch.optim.Adam(p, 0.1, (0.9, 0.9), 1e-8, amsgrad=True),
        ),
    ],
    ids=["FedAvg", "FedAvgM", "FedAdam", "FedAMSGrad"],
)
def test_a_cohort_with_k_equal_to_m_is_torch_on_the_mean_update(optimizer: object, authority: object) -> None:
    """FedAvg, FedAvgM and FedAdam are torch's SGD, SGD with momentum and Adam, with the mean update as gradient."""
    rng = np.random.default_rng(0)
    w0, updates = rng.normal(size=4), rng.normal(size=(STEPS, M, 4)) * np.linspace(2, 0.1, STEPS)[:, None, None]
    parameter = torch.tensor(w0)
    theirs = authority([parameter])
    for ours, cohort in zip(cohort_run(optimizer, updates, w0), updates, strict=True):
        parameter.grad = torch.tensor(cohort.mean(axis=0))
        theirs.step()
        np.testing.assert_allclose(ours, parameter.numpy(), rtol=1e-12, atol=1e-12)


def test_a_cohort_with_k_equal_to_m_is_fedavg() -> None:
    """With constant weights and η = 1 the next model is the mean of the cohort's models: a plain FedAvg loop."""
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(20, LENGTH))  # client c pulls towards targets[c]

    def train(start: np.ndarray, client: int) -> np.ndarray:
        y = start.copy()
        for _ in range(3):
            y -= 0.1 * (y - targets[client])
        return y

    server = fb.Server(weights=np.zeros(LENGTH), clients=range(20), start=fb.cohort(M), buffer_size=M, weigh=fb.constant())
    commands, plain = server.begin(), np.zeros(LENGTH)
    for _ in range(STEPS):
        cohort = [c for c in commands if isinstance(c, fb.StartTrip)]
        plain = np.mean([train(plain, c.client) for c in cohort], axis=0)
        w = server.weights
        for c in cohort:
            commands = server.handle(fb.UpdateArrived(c.trip, w - train(w, c.client)))
        np.testing.assert_allclose(server.weights, plain, rtol=1e-12, atol=1e-12)


def test_one_trip_at_a_time_with_k_equal_to_one_is_sequential_sgd() -> None:
    """With K = 1, one trip in flight and constant weights every client continues where the last one stopped."""
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(20, LENGTH))
    server = fb.Server(
        weights=np.zeros(LENGTH), clients=range(20), start=fb.refill(concurrency=1), buffer_size=1, weigh=fb.constant()
    )
    commands, plain = server.begin(), np.zeros(LENGTH)
    for _ in range(100):
        (start,) = (c for c in commands if isinstance(c, fb.StartTrip))
        plain = plain - 0.1 * (plain - targets[start.client])
        commands = server.handle(fb.UpdateArrived(start.trip, 0.1 * (server.weights - targets[start.client])))
        assert commands[0].staleness == (0,)
        np.testing.assert_allclose(server.weights, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("start", [fb.refill(50), fb.arrivals(50.0), fb.arrivals(50.0, poisson=True)], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_largest_staleness_shrinks_with_the_buffer(start: object, seed: int) -> None:
    """τ_max,K ≤ ⌈τ_max,1 / K⌉ on the same arrivals."""

    def largest(k: int) -> int:
        run = fb.timeline(start=start, buffer_size=k, timing=fb.half_normal(1.0), clients=100_000, trips=3_000, seed=seed)
        return int(np.max(run.staleness))

    largest_of_one = largest(1)
    assert largest_of_one > 50
    for k in (2, 3, 7, 10, 30):
        assert 0 < largest(k) <= math.ceil(largest_of_one / k)


@pytest.mark.parametrize("time", [math.nan, math.inf, None, "noon"])
def test_a_time_that_is_none_raises_before_anything_changes(time: object) -> None:
    """The clock is the driver's own: a wrong one is a mistake of the program, and costs no update."""
    server = small_server(start=fb.arrivals(rate=2.0), buffer_size=1)
    server.begin()
    with pytest.raises(ValueError, match="time="):
        server.handle(fb.UpdateArrived(0, np.ones(LENGTH), time=time))
    assert (server.version, list(server.in_flight)) == (0, [0])


def test_the_type_of_the_number_of_examples_does_not_matter() -> None:
    """A numpy integer gives the same bits as Python's own."""
    weights = []
    for kind in (int, np.int64):
        server = small_server(weights=np.zeros(LENGTH, np.float32), weight_by="examples", buffer_size=2)
        server.begin()
        for trip, n in enumerate((3, 7)):
            server.handle(fb.UpdateArrived(trip, np.full(LENGTH, 0.1, np.float32), examples=kind(n)))
        weights.append(server.weights.tobytes())
    assert weights[0] == weights[1]


def test_the_clients_are_not_aliased() -> None:
    clients = list("abcdefgh")
    server = small_server(clients=clients)
    clients[:] = ["z"] * 8
    assert "z" not in {command.client for command in server.begin()}


def test_weights_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        small_server(weights=np.array([0.0, np.nan, 0.0]))
