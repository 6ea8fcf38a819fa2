"""Whole trips of the paper's network for text are what the loop makes of them, and what is not for them goes another way."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

import fedbuff as fb
from fedbuff.learn import words
from fedbuff.learn.batched import Together, batched, norms
from fedbuff.learn.kernels import library
from fedbuff.learn.local import Job, initial_weights, one_at_a_time
from fedbuff.learn.networks import WordLSTM
from fedbuff.learn.trial import why_not

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler")
torch.set_num_threads(1)

ONCE = fb.LocalSGD(lr=0.3, batch_size=8)
WORDS, SIZES = 30, (1, 5, 2, 8, 1, 3)


def task_of(sizes=SIZES, *, time=7, features=6, classes=3, hidden=10, layers=2, width=12, dropout=0.2, seed=0, change=None):
    """Clients with so many texts each; `change` is done to the model before it is used."""
    rng = np.random.default_rng(seed)
    vectors = torch.from_numpy(rng.standard_normal((WORDS, features), dtype=np.float32))
    clients = [(rng.integers(0, WORDS, (n, time)), rng.integers(0, classes, n)) for n in sizes]

    def model() -> nn.Module:
        made = WordLSTM(vectors, classes, hidden, layers, width, dropout)
        if change is not None:
            change(made)
        return made

    return fb.Task(model=model, loss=F.cross_entropy, clients=clients, evaluate=clients[0], accuracy=None)


def jobs_of(task, weights, trips=9, versions=2):
    rng = np.random.default_rng(1)
    starts = [weights + v * rng.normal(0, 0.03, len(weights)).astype(np.float32) for v in range(versions)]
    return [Job(7 * t, t % len(task.clients), starts[t % versions]) for t in range(trips)]


def both_ways(task, sgd=ONCE, precision="float32", **how):
    flat, weights = initial_weights(task, 3)
    jobs = jobs_of(task, weights, **how)
    return one_at_a_time(task, sgd, 3, flat)(jobs), batched(task, sgd, 3, flat, precision=precision)(jobs)


def assert_same(task, sgd=ONCE, **how):
    """Up to rounding, that of the weights included, of which the loop's update is a difference."""
    expected, found = both_ways(task, sgd, **how)
    rounding = 1e-6 * np.linalg.norm(initial_weights(task, 3)[1])
    assert norms(found - expected) == pytest.approx(0, abs=1e-5 * norms(expected).max() + rounding)


@pytest.fixture
def only_whole(monkeypatch):
    """Whatever is not trained by the kernel is an error."""

    def refused(*_):
        raise AssertionError("the kernel did not take these trips")

    monkeypatch.setattr(Together, "together", refused)


@pytest.mark.usefixtures("only_whole")
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([3, 8, 17, 100]),
    st.sampled_from([2, 3, 9]),
    st.sampled_from([2, 4, 6, 16, 22, 36, 100]),
    st.integers(1, 3),
    st.sampled_from([1, 7, 8, 20]),
    st.sampled_from([0.0, 0.1, 0.5]),
    st.booleans(),
)
def test_whole_trips_are_the_loops(sizes, time, versions, features, classes, hidden, layers, width, dropout, lr_norm):
    task = task_of(
        sizes, time=time, features=features, classes=classes, hidden=hidden, layers=layers, width=width, dropout=dropout
    )
    assert_same(task, replace(ONCE, lr_norm=lr_norm), versions=versions)


def padded(task, rng):
    """The same task with texts that begin with padding, repeat a few words, and begin alike or are the same."""
    starts = [np.r_[np.zeros(3, np.int64), 4, 5], np.zeros(6, np.int64), np.array([7, 0, 7])]

    def text(time):
        words = rng.integers(1, 5, time)
        words[: rng.integers(0, time + 1)] = 0
        start = starts[rng.integers(3)][:time]
        words[: len(start)] = np.where(rng.random() < 0.5, start, words[: len(start)])
        return words

    clients = [(np.stack([text(x.shape[1]) for _ in x]), y) for x, y in task.clients]
    return replace(task, clients=clients)


@pytest.mark.usefixtures("only_whole")
@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=9),
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 1000),
)
def test_texts_that_are_alike_are_trained_as_if_they_were_not(sizes, time, layers, dropout, seed):
    def silence(model):
        model.embedding.weight.data[0] = 0.0

    task = padded(task_of(sizes, time=time, layers=layers, dropout=dropout, change=silence), np.random.default_rng(seed))
    assert_same(task, trips=12)


@pytest.mark.usefixtures("only_whole")
@pytest.mark.parametrize("changes", [{"steps": 1, "batch_size": 3}, {"proximal": 0.5}, {"momentum": 0.9}, {"lr": 0.0}], ids=str)
def test_one_local_step_of_every_kind(changes):
    assert_same(task_of(), replace(ONCE, **changes))


@pytest.mark.usefixtures("only_whole")
def test_a_chunk_is_the_same_bit_for_bit_whatever_came_before():
    task = task_of(hidden=100, features=50)
    flat, weights = initial_weights(task, 3)
    jobs = jobs_of(task, weights, trips=30, versions=4)
    copies = [job._replace(weights=job.weights.copy()) for job in jobs]  # versions are told apart by their arrays
    train = batched(task, ONCE, 3, flat)
    first = train(jobs)
    train(jobs[3:20])
    assert np.array_equal(train(jobs), first)
    assert np.array_equal(batched(task, ONCE, 3, flat)(jobs), first)
    assert norms(train(copies) - first) == pytest.approx(0, abs=1e-6 * norms(first).max())


@pytest.mark.usefixtures("only_whole")
def test_updates_go_where_they_belong_and_nowhere_else():
    task = task_of()
    flat, weights = initial_weights(task, 3)
    train, jobs = batched(task, ONCE, 3, flat), jobs_of(task, weights, trips=4)
    wide = np.full((9, len(weights) + 3), 7.0, np.float32)
    train.into(wide[:, :-3], [5, 0, 8, 2], jobs)
    assert np.array_equal(wide[[5, 0, 8, 2], :-3], train(jobs))
    wide[[5, 0, 8, 2], :-3] = 7.0
    assert (wide == 7.0).all()


@pytest.mark.usefixtures("only_whole")
def test_texts_may_be_of_any_kind_of_integer_and_lie_anyhow():
    task = task_of()
    other = [(torch.from_numpy(x.astype(np.int32)), list(y)) for x, y in task.clients]
    turned = [(np.asfortranarray(x.astype(np.int16)), y.astype(np.uint8)) for x, y in task.clients]
    apart = [(np.repeat(x, 2, axis=1)[:, ::2], np.repeat(y, 2)[::2]) for x, y in task.clients]
    for clients in (other, turned, apart):
        changed = replace(task, clients=clients)
        assert np.array_equal(both_ways(changed)[1], both_ways(task)[1])


@pytest.mark.parametrize("changes", [{"batch_size": 4}, {"epochs": 2}, {"steps": 2}, {"weight_decay": 0.1}], ids=str)
def test_more_than_one_step_goes_another_way(changes):
    assert_same(task_of(), replace(ONCE, **changes))


def freeze(part):
    return lambda model: getattr(model, part).requires_grad_(False)


def wake(model):
    model.embedding.weight.requires_grad_(True)


def tie(model):
    model.lstm.weight_hh_l1 = model.lstm.weight_hh_l0


def other_dropout(model):
    model.lstm.dropout = 0.5


def sigmoid(model):
    model.head[1] = nn.Sigmoid()


def other_order(model):
    """What pruning leaves behind: the same weights, but the bias comes first."""
    weight = model.head[0].weight
    del model.head[0].weight
    model.head[0].weight = weight


def other_order_of_lstm(model):
    weight = model.lstm.weight_ih_l0
    del model.lstm.weight_ih_l0
    model.lstm.weight_ih_l0 = weight


def other_head(model):
    class Twice(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    model.head = Twice(*model.head)


def other_class(model):
    class Negative(WordLSTM):
        def forward(self, x):
            return -super().forward(x)

    model.__class__ = Negative


def bounded(model):
    model.embedding.max_norm = 0.5


FROZEN = freeze("lstm"), freeze("head")
OTHERS = wake, tie, other_dropout, sigmoid, other_order, other_order_of_lstm, other_head, other_class


@pytest.mark.parametrize("change", [*FROZEN, *OTHERS])
def test_another_network_goes_another_way(change):
    task = task_of(change=change)
    flat, _ = initial_weights(task, 3)
    assert words.whole_trips(task, ONCE, 3, flat) is None
    assert_same(task)


def test_vectors_of_a_bounded_norm_go_another_way():
    task = task_of(change=bounded)
    assert words.whole_trips(task, ONCE, 3, initial_weights(task, 3)[0]) is None


def test_an_odd_hidden_size_or_another_loss_goes_another_way():
    task = task_of(hidden=9)
    assert words.whole_trips(task, ONCE, 3, initial_weights(task, 3)[0]) is None
    task = replace(task_of(), loss=nn.CrossEntropyLoss(label_smoothing=0.1))
    assert words.whole_trips(task, ONCE, 3, initial_weights(task, 3)[0]) is None


def changed(client, x=None, y=None):
    """The task, one of whose clients has other texts or labels."""
    task = task_of()
    old_x, old_y = task.clients[client]
    task.clients[client] = old_x if x is None else x, old_y if y is None else y
    return task


@pytest.mark.parametrize(
    "task",
    [
        changed(2, y=np.array([-100, 1])),
        changed(5, x=np.zeros((3, 9), np.int64)),
        changed(5, x=np.zeros((3, 3), np.int64)),
        changed(3, x=np.ones((40, 7), np.int64), y=np.arange(40) % 3),
    ],
    ids=["a label that does not count", "longer texts", "shorter texts", "more than a batch"],
)
def test_what_is_not_for_the_kernel_goes_another_way(task):
    assert_same(task)


@pytest.mark.parametrize("word", [WORDS, -1, 1 << 40])
def test_a_word_that_has_no_vector_is_an_error_and_not_a_crash(word):
    x = np.zeros((1, 7), np.int64)
    x[0, 3] = word
    task = changed(0, x=x)
    flat, weights = initial_weights(task, 3)
    with pytest.raises((IndexError, RuntimeError)):
        batched(task, ONCE, 3, flat)(jobs_of(task, weights))


@pytest.mark.parametrize("label", [3, -1, 1 << 40])
def test_a_label_that_is_no_class_is_an_error_and_not_a_crash(label):
    task = changed(0, y=np.array([label]))
    flat, weights = initial_weights(task, 3)
    with pytest.raises((IndexError, RuntimeError)):
        batched(task, ONCE, 3, flat)(jobs_of(task, weights))


def test_texts_without_a_word_or_of_another_shape_are_an_error_and_not_a_crash():
    task = task_of(time=0)
    assert words.whole_trips(task, ONCE, 3, initial_weights(task, 3)[0]) is None
    task = changed(4, x=np.zeros((1, 7, 1), np.int64))
    flat, weights = initial_weights(task, 3)
    with pytest.raises(ValueError, match="batch"):
        batched(task, ONCE, 3, flat)(jobs_of(task, weights))


def test_weights_of_another_length_are_refused():
    task = task_of()
    flat, weights = initial_weights(task, 3)
    with pytest.raises(ValueError, match="vectors of"):
        batched(task, ONCE, 3, flat)(jobs_of(task, weights[:-1].copy(), versions=1))


@pytest.mark.parametrize("layout", ["F", "every other column", "doubles"])
def test_updates_may_lie_in_any_matrix(layout):
    task = task_of()
    flat, weights = initial_weights(task, 3)
    train, jobs = batched(task, ONCE, 3, flat), jobs_of(task, weights, trips=4)
    out = np.zeros(
        (4, 2 * len(weights)), np.float64 if layout == "doubles" else np.float32, order="F" if layout == "F" else "C"
    )
    out = out[:, ::2] if layout == "every other column" else out[:, : len(weights)]
    train(jobs, out)
    assert norms(out - train(jobs)) == pytest.approx(0, abs=1e-5)


class Counted(list):
    """Clients that are made when asked for, and how often that was."""

    asked = 0

    def __getitem__(self, client):
        self.asked += 1
        return super().__getitem__(client)

    def examples(self, client):
        return len(super().__getitem__(client)[1])


class Lazy:
    def __init__(self, clients):
        self.clients = clients

    def __len__(self):
        return len(self.clients)

    def __getitem__(self, client):
        return self.clients[client]

    def examples(self, client):
        return self.clients.examples(client)


@pytest.mark.parametrize("changes", [{}, {"batch_size": 4}, {"epochs": 2}, {"steps": 3}], ids=str)
def test_a_client_is_made_once_for_a_trip(changes):
    task = task_of()
    counted = Counted(task.clients)
    task = replace(task, clients=Lazy(counted))
    flat, weights = initial_weights(task, 3)
    train, jobs = batched(task, replace(ONCE, **changes), 3, flat), jobs_of(task, weights, trips=6)
    counted.asked = 0
    train(jobs)
    assert counted.asked == 6


@pytest.mark.parametrize("batch_size", [sys.maxsize, 1 << 63, 1 << 64])
@pytest.mark.parametrize("task", [task_of(), None], ids=["lstm", "linear"])
def test_a_batch_size_that_no_kernel_can_count_to(batch_size, task):
    if task is None:
        clients = [(np.ones((3, 4), np.float32), np.array([0, 1, 2]))]
        task = fb.Task(model=lambda: nn.Linear(4, 3), loss=F.cross_entropy, clients=clients, evaluate=clients[0], accuracy=None)
    sgd = replace(ONCE, batch_size=batch_size)
    expected, found = both_ways(task, sgd)
    assert norms(expected).min() > 0
    assert norms(found - expected) == pytest.approx(0, abs=1e-5 * norms(expected).max())


def test_nothing_to_train_is_no_error():
    task = task_of()
    flat, weights = initial_weights(task, 3)
    assert batched(task, ONCE, 3, flat)([]).shape == (0, len(weights))


@pytest.mark.parametrize("name", ["lstm.weight_ih_l0", "lstm.bias_hh_l1", "head.0.bias", "head.3.weight"])
def test_what_is_not_finite_stays_so(name):
    task = task_of()
    flat, weights = initial_weights(task, 3)
    sizes = [p.numel() for p in flat.parameters.values()]
    weights[sum(sizes[: list(flat.parameters).index(name)])] = np.nan
    assert not np.isfinite(batched(task, ONCE, 3, flat)(jobs_of(task, weights, versions=1))).all(axis=1).any()


def test_a_kernel_that_is_wrong_is_noticed_before_a_run(monkeypatch):
    right = words.WholeTrips.into

    def wrong(self, updates, rows, *trips):
        done = right(self, updates, rows, *trips)
        updates[rows] *= 1.1
        return done

    task = task_of()
    assert why_not(task, ONCE, 3, initial_weights(task, 3)[0]) is None
    monkeypatch.setattr(words.WholeTrips, "into", wrong)
    assert "other updates" in str(why_not(task, ONCE, 3, initial_weights(task, 3)[0]))


@pytest.mark.usefixtures("only_whole")
@pytest.mark.parametrize("features", [6, 7, 100])
def test_with_products_of_bfloat16_trips_are_near(features):
    expected, found = both_ways(task_of(features=features), precision="bfloat16", trips=12)
    off = norms(found - expected) / norms(expected)
    assert off.max() < 0.05
    assert off.min() > 1e-4, "nothing was rounded"
