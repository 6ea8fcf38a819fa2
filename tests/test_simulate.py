"""The simulator: the server, the clock and training together."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedbuff as fb
from conftest import same_arrays
from fedbuff.learn.local import Job, initial_weights, one_at_a_time
from fedbuff.report.compare import comparison, markdown

CLIENT = fb.LocalSGD(lr=0.2, batch_size=4)
SERVERS = {
    "fedbuff": fb.Server(start=fb.refill(10), buffer_size=3, optimizer=fb.momentum(0.5, 0.5)),
    "fedasync": fb.Server(start=fb.refill(10), buffer_size=1),
    "mixing": fb.Server(start=fb.refill(10), buffer_size=1, optimizer=fb.sgd(0.6), mixing=True),
    "arrivals": fb.Server(start=fb.arrivals(concurrency=10), buffer_size=3, weigh=fb.constant()),
    "poisson": fb.Server(start=fb.arrivals(concurrency=10, poisson=True), buffer_size=3),
    "cohort": fb.Server(start=fb.cohort(8), buffer_size=8, weigh=fb.constant(), weight_by="examples"),
    "over-selection": fb.Server(start=fb.cohort(8, 0.3), buffer_size=8, optimizer=fb.adam(0.05)),
    "average": fb.Server(start=fb.refill(10), buffer_size=3, average=7),
    "max staleness": fb.Server(start=fb.refill(10), buffer_size=2, max_staleness=4),
}


def run(server, task, *, trips=120, seed=0, **how) -> fb.Run:
    return fb.simulate(server, task, client=CLIENT, until=fb.trips(trips), seed=seed, **how)


@pytest.mark.parametrize("name", SERVERS)
def test_a_run_trains_exactly_the_timeline(name, small_task):
    """The clock does not need the model: the trips of a run are those of the timeline, column by column."""
    how = {"dropout": 0.1, "timeout": 2.0, "timing": fb.per_example(fb.exponential(0.2))}
    server, n = SERVERS[name], len(small_task.clients)
    trips = run(server, small_task, seed=4, **how).trips
    alone = fb.timeline(
        start=server.start,
        buffer_size=server.buffer_size,
        weigh=server.weigh,
        max_staleness=server.max_staleness,
        clients=n,
        examples=small_task.examples,
        trips=int(trips["trip"].max()) + 1,
        seed=4,
        **how,
    )
    last_step = trips["server_step"].max()
    for column, values in trips.items():
        expected = getattr(alone, column)[trips["trip"]]
        if column in ("weight", "server_step", "outcome"):  # the timeline goes on and steps on the last buffer as well
            settled = alone.server_step[trips["trip"]] <= last_step
            values, expected = values[settled], expected[settled]
        assert np.array_equal(values, expected), column


@pytest.mark.parametrize("name", SERVERS)
def test_a_run_repeats_bit_for_bit(name, small_task):
    a, b, other = (run(SERVERS[name], small_task, seed=seed) for seed in (7, 7, 8))
    assert same_arrays(a.weights, b.weights)
    assert same_arrays(a.trips, b.trips)
    assert a.metrics == b.metrics
    assert not same_arrays(a.weights, other.weights)


def test_a_run_leaves_the_callers_server_and_torch_alone(small_task):
    server = fb.Server(start=fb.refill(5), buffer_size=2)
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    a, b = run(server, small_task), run(server, small_task)
    assert same_arrays(a.weights, b.weights)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_cohort_of_everyone_is_plain_fedavg(small_task):
    """Cohort, K = cohort: a FedAvg loop written independently, with the clients the run chose."""
    server = fb.Server(start=fb.cohort(6), buffer_size=6, weigh=fb.constant(), optimizer=fb.sgd(0.7))
    got = run(server, small_task, trips=30, seed=2)
    flat, w = initial_weights(small_task, 2)
    train = one_at_a_time(small_task, CLIENT, 2, flat)
    for step in range(1, 6):
        trips = got.trips["trip"][got.trips["server_step"] == step].tolist()
        assert len(trips) == 6
        models = [w - train([Job(t, int(got.trips["client"][t]), w)])[0] for t in trips]
        w = w + 0.7 * (np.mean(models, axis=0) - w)
    assert np.concatenate([a.ravel() for a in got.weights.values()]) == pytest.approx(w, abs=1e-5)


def test_every_trip_trains_from_the_version_it_started_on(small_task):
    """An asynchronous run replayed from its table of trips: w ← w − η_g / K Σ s(τ_i) Δ_i, Δ_i from the version at its start."""
    k, lr = 3, 0.8
    server = fb.Server(start=fb.refill(10), buffer_size=k, weigh=fb.polynomial(0.5), optimizer=fb.sgd(lr))
    got = run(server, small_task, trips=90, seed=6)
    assert got.summary["staleness_max"] >= 4
    flat, w = initial_weights(small_task, 6)
    train = one_at_a_time(small_task, CLIENT, 6, flat)
    versions, t = [w], got.trips
    for step in range(1, got.summary["server_steps"] + 1):
        rows = np.flatnonzero(t["server_step"] == step)
        assert len(rows) == k
        jobs = [Job(int(t["trip"][i]), int(t["client"][i]), versions[t["start_version"][i]]) for i in rows]
        scales = [(1 + step - 1 - t["start_version"][i]) ** -0.5 for i in rows]
        assert t["weight"][rows] == pytest.approx(scales)
        versions.append(versions[-1] - lr * sum(s * update for s, update in zip(scales, train(jobs), strict=True)) / k)
    final = np.concatenate([a.ravel() for a in got.weights.values()])
    assert final == pytest.approx(versions[-1], abs=1e-5)
    assert abs(final - versions[0]).max() > 0.01


def test_evaluations_come_as_often_as_asked(small_task):
    got = run(fb.Server(start=fb.refill(5), buffer_size=1), small_task, trips=60, evaluate_every=20)
    assert [m["trips"] for m in got.metrics] == [0, 20, 40, 60]
    often = run(fb.Server(start=fb.refill(15), buffer_size=1), small_task, trips=60, evaluate_share=1.0)
    rows, mean = 30 * 50, np.mean([small_task.examples(c) for c in range(30)])
    every = max(15, int(np.ceil(rows / (3 * mean + 10))))  # a trip passes its examples forwards, and twice backwards
    assert [m["trips"] for m in often.metrics] == sorted({*range(0, 61, every), 60})
    seldom = run(fb.Server(start=fb.refill(15), buffer_size=1), small_task, trips=60)
    assert [m["trips"] for m in seldom.metrics] == [0, 60]


def test_one_trip_at_a_time_is_sequential_sgd():
    """M = K = 1, s = 1, one local step on one example: centralised SGD over the same examples in the same order."""
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(1, 3)).astype(np.float32), rng.integers(0, 2, 1)) for _ in range(20)]
    task = fb.Task(
        model=lambda: torch.nn.Linear(3, 2), loss=torch.nn.functional.cross_entropy, clients=clients, evaluate=clients[0]
    )
    got = fb.simulate(fb.Server(start=fb.refill(1), buffer_size=1), task, client=fb.LocalSGD(lr=0.1), until=fb.trips(50))
    _, w = initial_weights(task, 0)
    model = torch.nn.Linear(3, 2)
    torch.nn.utils.vector_to_parameters(torch.tensor(w), model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for client in got.trips["client"]:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(torch.tensor(clients[client][0])), torch.tensor(clients[client][1])).backward()
        optimizer.step()
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    assert np.concatenate([a.ravel() for a in got.weights.values()]) == pytest.approx(expected, abs=1e-6)
    assert got.summary["staleness_max"] == 0


def test_summary_metrics_and_trips_agree(small_task):
    got = run(SERVERS["over-selection"], small_task, trips=100, target=0.01, evaluate_every=20, dropout=0.1)
    s, trips = got.summary, got.trips
    assert len(trips["trip"]) == s["trips"] >= 100
    used = trips["outcome"] == "used"
    assert used.sum() == s["server_steps"] * 8
    assert trips["staleness"][used].mean() == s["staleness_mean"]
    assert trips["staleness"][used].max() == s["staleness_max"]
    assert {"cancelled", "dropped", "used"} <= set(trips["outcome"].tolist())
    assert trips["end_time"].max() == s["virtual_time"]
    first = next(m for m in got.metrics if m["accuracy"] >= 0.01)
    assert (s["trips_to_target"], s["server_steps_to_target"]) == (first["trips"], first["server_steps"])
    assert got.metrics[0]["server_steps"] == 0
    assert got.metrics[-1]["server_steps"] == s["server_steps"]
    assert s["metrics"]["test"] == {name: got.metrics[-1][name] for name in ("loss", "accuracy")}
    assert str(s["trips"]) in repr(got)


@pytest.mark.parametrize(
    ("until", "reason"),
    [
        (fb.trips(50), "reached 50 trips"),
        (fb.server_steps(7), "reached 7 server steps"),
        (fb.virtual_time(3.0), "reached virtual time 3"),
        (fb.accuracy(0.01) | fb.trips(50), "reached accuracy 0.01"),
        (fb.trips(500) | fb.server_steps(5), "reached 5 server steps"),
    ],
)
def test_a_run_stops_at_the_first_limit(until, reason, small_task):
    got = fb.simulate(SERVERS["fedbuff"], small_task, client=CLIENT, until=until)
    assert got.summary["stopped_by"] == reason
    if until.virtual_time:
        assert got.trips["end_time"].max() <= 3.0 == got.summary["virtual_time"]
    if until.trips == 50 and until.accuracy is None:
        assert got.summary["trips"] == 50


def test_the_last_partial_buffer_is_dropped(small_task):
    got = run(fb.Server(start=fb.refill(10), buffer_size=7), small_task, trips=30)
    assert got.summary["server_steps"] == 4
    assert (got.trips["outcome"] == "unused").sum() == 2
    assert got.summary["in_flight"] == 10


def test_a_diverging_run_stops_and_says_so(small_task):
    got = fb.simulate(
        fb.Server(start=fb.refill(5), buffer_size=2, optimizer=fb.sgd(1e30)),
        small_task,
        client=fb.LocalSGD(lr=1e30),
        until=fb.trips(5000),
    )
    assert got.summary["trips"] == 5000 or got.summary["stopped_by"].startswith("diverged")
    assert (got.trips["outcome"] == "failed").any() or got.summary["stopped_by"].startswith("diverged")


def test_a_run_in_which_nothing_can_succeed_ends_with_an_error(small_task):
    with pytest.raises(ValueError, match="no server step in"):
        fb.simulate(
            fb.Server(start=fb.refill(5), buffer_size=2), small_task, client=CLIENT, until=fb.server_steps(1), dropout=1.0
        )


def test_no_more_room_is_made_than_clients_can_fill(small_task):
    """Durations with such a tail mean that millions would be in flight, if there were so many."""
    server = fb.Server(start=fb.arrivals(rate=50.0), buffer_size=1)
    done = fb.simulate(server, small_task, client=fb.LocalSGD(lr=0.1), timing=fb.lognormal(6.0), until=fb.trips(60), workers=1)
    assert done.summary["trips"] == 60
    assert done.summary["peak_memory_mb"] < 4000


@pytest.mark.parametrize("batched", [True, False])
def test_runs_in_several_threads_are_each_what_they_are_alone(batched, small_task):
    def weights(seed: int) -> dict[str, np.ndarray]:
        how = {"training": fb.Training(batched=batched), "workers": 1, "evaluate_every": 50}
        return run(SERVERS["fedbuff"], small_task, seed=seed, trips=200, **how).weights

    alone = [weights(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(weights, range(3)))
    assert all(same_arrays(a, b) for a, b in zip(together, alone, strict=True))


class Noisy(torch.nn.Module):
    """A model that draws random numbers though it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.end = torch.nn.Linear(5, 3)

    def forward(self, x):
        return self.end(x + 0.3 * torch.randn_like(x))


@pytest.mark.parametrize("workers", [1, 2])
def test_evaluations_draw_the_same_random_numbers_every_time(workers, small_task):
    task = replace(small_task, model=Noisy)
    a, b = (run(SERVERS["fedbuff"], task, evaluate_every=30, workers=w, say=lambda line: None) for w in (1, workers))
    assert a.metrics == b.metrics


def test_what_only_a_server_of_its_own_looks_at_is_refused(small_task):
    sealed = fb.Server(start=fb.refill(10), buffer_size=3, sealed=True)
    open_at_night = fb.Server(start=fb.refill(10), buffer_size=3, available=lambda client, time: None)
    for server, name in ((sealed, "sealed"), (open_at_night, "available")):
        with pytest.raises(ValueError, match=f"server: {name} is for a server that is driven by events"):
            run(server, small_task)


def test_a_moment_that_never_comes_is_not_waited_for(small_task):
    with pytest.raises(ValueError, match="no virtual time passes; give trips or server_steps"):
        fb.simulate(SERVERS["fedbuff"], small_task, client=CLIENT, timing=fb.constant(0.0), until=fb.virtual_time(1.0))


def test_a_weight_that_is_no_number_is_said_to_be_none(small_task):
    with pytest.raises(ValueError, match=r"weigh\(0\) returned no number"):
        run(fb.Server(start=fb.refill(10), buffer_size=3, weigh=lambda tau: None), small_task)


def test_numbers_of_numpy_can_be_written_down(small_task, tmp_path):
    how = {"target": np.float32(0.5), "availability": fb.windows(10.0, 4.0, np.int64(1))}
    assert run(SERVERS["fedbuff"], small_task, out=tmp_path / "run", **how).summary["target"] == 0.5


def test_a_model_that_wants_more_than_one_row_is_trained_all_the_same():
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(8, 5)).astype(np.float32), rng.integers(0, 3, 8)) for _ in range(20)]
    norm = lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(5, track_running_stats=False), torch.nn.Linear(5, 3))  # noqa: E731
    task = fb.Task(model=norm, loss=torch.nn.functional.cross_entropy, clients=clients, evaluate=clients[0])
    assert run(SERVERS["fedbuff"], task, say=lambda line: None).summary["trips"] == 120


def test_a_server_with_weights_starts_from_them(small_task):
    _, drawn = initial_weights(small_task, 0)
    server = fb.Server(start=fb.refill(5), buffer_size=2, optimizer=fb.sgd(0.0), weights=np.full_like(drawn, 0.25))
    got = run(server, small_task, trips=10)
    assert all((w == 0.25).all() for w in got.weights.values())
    with pytest.raises(ValueError, match="the task's model"):
        run(fb.Server(start=fb.refill(5), buffer_size=2, weights=np.zeros(3)), small_task)


def test_numpy_numbers_change_nothing(small_task):
    """A sweep over np.logspace or np.arange gives the same bits as Python's own numbers."""
    ours = fb.Server(start=fb.refill(5), buffer_size=2, optimizer=fb.momentum(0.5, 0.5))
    numpys = fb.Server(
        start=fb.refill(np.int64(5)), buffer_size=np.int64(2), optimizer=fb.momentum(np.float64(0.5), np.float64(0.5))
    )
    a = run(ours, small_task, seed=3, timing=fb.per_client(fb.half_normal(1.0)))
    b = run(numpys, small_task, seed=np.int64(3), timing=fb.per_client(fb.half_normal(np.float64(1.0))))
    assert same_arrays(a.weights, b.weights)
    assert a.settings == b.settings


def test_an_unbound_server_says_what_it_lacks():
    for ask in (lambda s: s.weights, lambda s: s.version, lambda s: s.buffered, lambda s: s.begin()):
        with pytest.raises(RuntimeError, match="no weights or no clients"):
            ask(fb.Server(start=fb.refill(5), buffer_size=2))


def test_a_state_is_restored_as_it_was_begun_or_not_and_only_into_the_same_model():
    def server(n: int) -> fb.Server:
        return fb.Server(weights=np.zeros(n), clients=10, start=fb.refill(4), buffer_size=2)

    state = server(3).state()
    restored = server(3)
    restored.restore(*state)
    assert len(restored.begin()) == 4
    with pytest.raises(ValueError, match="3 weights, and this server has 5"):
        server(5).restore(*state)


def test_a_restored_server_tells_the_pending_wake_up():
    """A driver that was restarted does not remember when the next client arrives."""
    server = fb.Server(weights=np.zeros(2), clients=9, start=fb.arrivals(rate=2.0), buffer_size=1)
    wake = server.begin()[-1]
    again = fb.Server(weights=np.zeros(2), clients=9, start=fb.arrivals(rate=2.0), buffer_size=1)
    assert again.restore(*server.state()) == [wake] == [fb.Wake(0.5)]


def test_an_interrupted_run_lets_go_of_its_folder(small_task, tmp_path):
    """As in a notebook: Ctrl-C, then resume, while the exception is still around."""

    def interrupt(status):
        if status.trips >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        run(SERVERS["fedbuff"], small_task, out=tmp_path / "run", progress=interrupt, checkpoint_every=0)
    resumed = run(SERVERS["fedbuff"], small_task, out=tmp_path / "run", resume=True)
    assert kept.value is not None
    assert same_arrays(resumed.weights, run(SERVERS["fedbuff"], small_task).weights)


@pytest.mark.parametrize("name", SERVERS)
def test_a_run_interrupted_again_and_again_ends_the_same(name, small_task, tmp_path):
    """Every starting rule, with everything that can go wrong, stopped and resumed every 15 trips."""
    how = {"dropout": 0.1, "timeout": 2.0, "availability": fb.windows(12.0, 1.0), "evaluate_every": 10, "target": 0.3}
    whole = run(SERVERS[name], small_task, **how)
    stops = iter(range(15, 1000, 15))
    stop = next(stops)

    def interrupt(status):
        nonlocal stop
        if status.trips >= stop:
            stop = next(stops)
            raise KeyboardInterrupt

    got, interruptions = None, 0
    while got is None:
        try:
            got = run(
                SERVERS[name], small_task, out=tmp_path / "run", resume=True, progress=interrupt, checkpoint_every=0, **how
            )
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 7
    assert same_arrays(got.weights, whole.weights)
    assert same_arrays(got.trips, whole.trips)
    assert got.metrics == whole.metrics
    real = ("wall_seconds", "trips_per_second", "peak_memory_mb")
    assert {k: v for k, v in got.summary.items() if k not in real} == {k: v for k, v in whole.summary.items() if k not in real}


def test_bounds_are_honest_when_only_some_seeds_arrive(small_task):
    """Seeds that reached the target count with what they took, the others with all they had."""
    lucky, unlucky = (run(SERVERS["fedbuff"], small_task, trips=100, target=target) for target in (0.0, 1.0))
    (row,) = comparison({"ours": [lucky, unlucky]})
    assert row["trips"] is None
    assert row["trips_limit"] == 50
    assert row["reached"] == 1


def test_one_seed_has_no_spread(small_task):
    rows = comparison({"ours": [run(SERVERS["fedbuff"], small_task, trips=100, target=0.0)]})
    assert rows[0]["trips"] == {"mean": 0, "std": None}
    assert "±" not in markdown(rows)
    assert rows[0]["task"] == small_task.name


def test_versions_are_dropped_when_no_trip_needs_them(small_task):
    """Memory follows the versions in flight, not the number of steps."""
    w = np.zeros(10)
    server = fb.Server(weights=w, clients=100, start=fb.refill(10), buffer_size=1)
    in_flight = [c.trip for c in server.begin()]
    for _ in range(200):
        commands = server.handle(fb.UpdateArrived(in_flight.pop(0), w))
        in_flight += [c.trip for c in commands if isinstance(c, fb.StartTrip)]
        assert set(server.versions) == {version for _, version in server.in_flight.values()} | {server.version}
    assert len(server.versions) <= 11


def test_presets_are_the_settings_they_claim():
    server, client = fb.presets.fedprox(fb.LocalSGD(lr=0.1), concurrency=20, mu=0.3)
    assert client.proximal == 0.3
    assert (server.start, server.buffer_size) == (fb.cohort(20), 20)
    server, client = fb.presets.fedasync_mixing(fb.LocalSGD(lr=0.1), concurrency=20)
    assert (server.mixing, server.buffer_size, client.proximal) == (True, 1, 0.005)
    server, _ = fb.presets.fedbuff(fb.LocalSGD(lr=0.1), concurrency=20, beta=0.9)
    assert (server.start, server.weigh, server.optimizer) == (fb.refill(20), fb.polynomial(0.5), fb.momentum(1.0, 0.9))


@pytest.mark.parametrize("name", fb.presets.PRESETS)
def test_every_preset_learns(name):
    """Each algorithm halves the error it starts with on an easy problem: digits dealt out at random."""
    task = fb.tasks.digits(clients=100, split=fb.iid(), model=fb.models.linear())
    arguments = {"fedadam": {"lr": 0.1}, "fadas": {"lr": 0.1}, "fedasync_mixing": {}}.get(name, {"lr": 1.0})
    server, client = fb.presets.PRESETS[name](fb.LocalSGD(lr=0.3, batch_size=8), concurrency=10, **arguments)
    got = fb.simulate(server, task, client=client, until=fb.trips(400), algorithm=name)
    assert got.metrics[-1]["loss"] < got.metrics[0]["loss"]
    assert 1 - got.metrics[-1]["accuracy"] < 0.5 * (1 - got.metrics[0]["accuracy"])


def test_a_plot_has_a_point_per_evaluation(small_task, tmp_path):
    got = run(SERVERS["fedbuff"], small_task)
    plot = got.plot("loss", against="virtual_time")
    (line,) = plot.figure.axes[0].get_lines()
    assert len(line.get_xdata()) == len(got.metrics)
    first, second = (got.plot("accuracy").save(tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second
    with pytest.raises(ValueError, match="against='steps'"):
        got.plot(against="steps")
