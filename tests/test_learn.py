"""Local training, tasks and partitions."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

import fedbuff as fb
from fedbuff.learn.evaluate import evaluate, right
from fedbuff.learn.first_look import first_look
from fedbuff.learn.flat import Flat
from fedbuff.learn.local import Job, initial_weights, one_at_a_time
from fedbuff.learn.shuffle import batches
from fedbuff.learn.task import most_likely

SGD = fb.LocalSGD(lr=0.3, batch_size=4)


def task_of(clients, model=lambda: torch.nn.Linear(3, 2), **how) -> fb.Task:
    rng = np.random.default_rng(0)
    held_out = (rng.normal(size=(9, 3)), rng.integers(0, 2, 9))
    return fb.Task(model=model, loss=torch.nn.functional.cross_entropy, clients=clients, evaluate=held_out, **how)


def some_examples(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)).astype(np.float32), rng.integers(0, 2, n)


def by_torch(task: fb.Task, sgd: fb.LocalSGD, job: Job, seed: int) -> np.ndarray:
    """The same trip with torch.optim.SGD on an ordinary module: the oracle."""
    torch.manual_seed(0)
    model = task.model()
    torch.nn.utils.vector_to_parameters(torch.tensor(job.weights), model.parameters())
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    x, y = (torch.as_tensor(a) for a in task.clients[job.client])
    for batch in batches(seed, job.client, job.trip, len(y), sgd):
        optimizer.zero_grad()
        drift = sum(((p - p0) ** 2).sum() for p, p0 in zip(model.parameters(), start, strict=True))
        (task.loss(model(x[batch]), y[batch]) + sgd.proximal / 2 * drift).backward()
        for group in optimizer.param_groups:
            group["lr"] = sgd.lr * len(batch) / sgd.batch_size if sgd.lr_norm else sgd.lr
        optimizer.step()
    return job.weights - torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"epochs": 3},
        {"steps": 1},
        {"steps": 7},
        {"momentum": 0.9, "epochs": 2},
        {"weight_decay": 0.1, "epochs": 2},
        {"proximal": 0.5, "epochs": 2},
        {"lr_norm": True, "epochs": 2},
        {"momentum": 0.5, "weight_decay": 0.01, "proximal": 0.1, "lr_norm": True, "epochs": 2, "batch_size": 3},
    ],
)
def test_a_trip_is_what_torch_optim_sgd_would_do(changes):
    task, sgd = task_of([some_examples(10), some_examples(1, seed=1)]), replace(SGD, **changes)
    flat, weights = initial_weights(task, seed=5)
    jobs = [Job(trip=3, client=0, weights=weights), Job(trip=4, client=1, weights=weights + 0.1)]
    for job, update in zip(jobs, one_at_a_time(task, sgd, 5, flat)(jobs), strict=True):
        assert update == pytest.approx(by_torch(task, sgd, job, 5), abs=1e-6)
        assert np.abs(update).max() > 1e-4


def test_lr_norm_scales_a_short_batch_by_its_share():
    """One batch of n = 2 of B = 8 examples moves a quarter as far."""
    task = task_of([some_examples(2)])
    flat, weights = initial_weights(task, 0)
    job = Job(0, 0, weights)
    (plain,) = one_at_a_time(task, fb.LocalSGD(lr=0.4, batch_size=8), 0, flat)([job])
    (normed,) = one_at_a_time(task, fb.LocalSGD(lr=0.4, batch_size=8, lr_norm=True), 0, flat)([job])
    assert normed == pytest.approx(plain / 4, abs=1e-7)


def test_a_trip_depends_on_seed_client_and_trip_only(small_task):
    """Dropout and shuffling included, whatever was trained before, and without touching torch's own generator."""
    flat, weights = initial_weights(small_task, 0)
    train = one_at_a_time(small_task, fb.LocalSGD(lr=0.1, batch_size=2, epochs=2), 0, flat)
    jobs = [Job(trip, client, weights) for trip, client in ((0, 3), (1, 3), (2, 8))]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    together = train(jobs)
    assert torch.equal(before, torch.get_rng_state())
    backwards = [train([job])[0] for job in reversed(jobs)][::-1]
    assert all(np.array_equal(a, b) for a, b in zip(together, backwards, strict=True))
    assert not np.array_equal(together[0], together[1])
    other_seed = one_at_a_time(small_task, fb.LocalSGD(lr=0.1, batch_size=2, epochs=2), 1, flat)(jobs[:1])
    assert not np.array_equal(together[0], other_seed[0])


def test_dropout_is_on_in_training_and_off_in_evaluation():
    model = lambda: torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(3, 2))  # noqa: E731
    task = task_of([some_examples(8)], model=model)
    flat, weights = initial_weights(task, 0)
    assert evaluate(task, flat, weights) == evaluate(task, flat, weights)
    train = one_at_a_time(task, fb.LocalSGD(lr=0.1), 0, flat)
    a, b = train([Job(0, 0, weights), Job(1, 0, weights)])
    assert not np.allclose(a, b)


@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 3), st.one_of(st.none(), st.integers(1, 20)))
def test_an_epoch_sees_every_example_once(n: int, batch_size: int, epochs: int, steps: int | None):
    sgd = fb.LocalSGD(lr=0.1, batch_size=batch_size, epochs=epochs, steps=steps)
    seen = [batch.tolist() for batch in batches(0, 1, 2, n, sgd)]
    per_epoch = -(-n // batch_size)
    assert len(seen) == (epochs * per_epoch if steps is None else steps)
    for first in range(0, len(seen) - per_epoch + 1, per_epoch):
        assert sorted(i for batch in seen[first : first + per_epoch] for i in batch) == list(range(n))


def test_frozen_parameters_stay_out_of_the_vector():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    flat = Flat(model)
    assert len(flat.weights()) == 4 + 8 + 2
    assert list(flat.named(flat.weights())) == ["0.weight", "0.bias", "1.weight", "1.bias"]


class Counting(torch.nn.Linear):
    """A layer that remembers how often it was used, in a buffer, and lets it matter."""

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        return super().forward(x) * self.seen


def test_buffers_start_every_trip_as_they_were():
    """Otherwise a trip would depend on those before it, and on whether the run was resumed."""
    task = task_of([some_examples(10)], model=Counting)
    flat, weights = initial_weights(task, 0)
    train = one_at_a_time(task, SGD, 0, flat)
    assert np.array_equal(train([Job(0, 0, weights)])[0], train([Job(0, 0, weights)])[0])


def test_named_weights_load_back_into_the_model(small_task):
    flat, weights = initial_weights(small_task, 0)
    model = small_task.model()
    model.load_state_dict({name: torch.tensor(w) for name, w in flat.named(weights).items()})
    assert np.array_equal(Flat(model).weights(), weights)


def test_batch_norm_is_refused_by_name():
    with pytest.raises(ValueError, match=r"1: BatchNorm1d keeps running statistics.*GroupNorm"):
        Flat(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))


@pytest.mark.parametrize(
    ("loss", "last"),
    [
        (torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 20.0])), 3000),
        (torch.nn.CrossEntropyLoss(ignore_index=1), 3000),
        (torch.nn.CrossEntropyLoss(), 2100),
        (torch.nn.CrossEntropyLoss(), 2048),
        (F.cross_entropy, 2100),
        (lambda output, label: F.cross_entropy(output, label), 2048),
        (lambda output, label: F.cross_entropy(output, label.where(label >= 0, -1), ignore_index=-1), 2100),
    ],
    ids=["weighed", "another left out", "in the second block", "a block without any", "function", "own", "own, another"],
)
def test_labels_that_are_weighed_or_left_out_count_so_in_an_evaluation_of_several_blocks(loss, last):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(3000, 3)).astype(np.float32), np.sort(rng.integers(0, 2, 3000))
    y[last:] = -100
    task = replace(task_of([some_examples(5)]), loss=loss, evaluate=(x, y))
    flat, weights = initial_weights(task, 0)
    flat.load(weights)
    output, label = flat.module(torch.tensor(x)).detach(), torch.tensor(y)
    left_out = getattr(loss, "ignore_index", -100)
    counts = label != left_out
    expected = {
        "loss": float(loss(output, label)),
        "accuracy": float((output.argmax(1) == label)[counts].double().mean()),
    }
    assert evaluate(task, flat, weights)["test"] == pytest.approx(expected, rel=1e-5)


def test_whole_numbers_that_are_no_classes_all_count():
    x, y = np.ones((3000, 3), np.float32), np.arange(3000) - 2500
    loss = lambda output, label: F.mse_loss(output[:, 0], label.float())  # noqa: E731
    task = fb.Task(model=lambda: torch.nn.Linear(3, 1), loss=loss, clients=[(x, y)], evaluate=(x, y), accuracy=None)
    flat, weights = initial_weights(task, 0)
    flat.load(weights)
    expected = float(loss(flat.module(torch.tensor(x)).detach(), torch.tensor(y)))
    assert evaluate(task, flat, weights)["test"]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda output, label: F.cross_entropy(output, (label + 1) // 2),
        lambda output, label: F.cosine_embedding_loss(output, output + 1, label),
        lambda output, label: torch.maximum(0.9 * (label - output[:, 0]), 0.1 * (output[:, 0] - label)).mean(),
        lambda output, label: F.cross_entropy(output, label.clamp(min=0), torch.tensor([1.0, 20.0])),
    ],
    ids=["labels of −1 and 1", "cosine", "quantile", "weighed"],
)
@pytest.mark.parametrize("rows", [2000, 2048, 5000])
def test_the_loss_of_ones_own_is_that_of_the_whole_set_whatever_its_labels_are(loss, rows):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 3)).astype(np.float32), np.sort(rng.choice([-1, 1], rows))
    task = replace(task_of([some_examples(5)]), loss=loss, evaluate=(x, y), accuracy=None)
    flat, weights = initial_weights(task, 0)
    flat.load(weights)
    expected = float(loss(flat.module(torch.tensor(x)).detach(), torch.tensor(y)))
    assert evaluate(task, flat, weights)["test"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_sum_is_that_of_the_whole_set():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5000, 3)).astype(np.float32), rng.integers(0, 2, 5000)
    task = replace(task_of([some_examples(5)]), loss=torch.nn.CrossEntropyLoss(reduction="sum"), evaluate=(x, y))
    flat, weights = initial_weights(task, 0)
    flat.load(weights)
    expected = float(task.loss(flat.module(torch.tensor(x)).detach(), torch.tensor(y)))
    assert evaluate(task, flat, weights)["test"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_what_can_not_be_put_together_is_looked_at_piece_by_piece():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x):
            y = self.layer(x)
            return y, y.mean(), None, y.T  # a number, nothing, and rows that do not come first

    loss = lambda output, label: F.cross_entropy(output[0], (label + 1) // 2)  # noqa: E731
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4500, 3)).astype(np.float32), rng.choice([-1, 1], 4500)
    task = fb.Task(model=Odd, loss=loss, clients=[(x[:9], y[:9])], evaluate=(x, y), accuracy=None)
    flat, weights = initial_weights(task, 0)
    flat.load(weights)
    with torch.no_grad():
        expected = float(loss(flat.module(torch.tensor(x)), torch.tensor(y)))
    assert evaluate(task, flat, weights)["test"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_several_outputs_are_put_together_as_they_are():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 2)

        def forward(self, x):
            y = self.layer(x)
            return {"scores": y, "more": (y[:, 0], [x.sum(1)])}

    def loss(output, label):
        scores, (first, (total,)) = output["scores"], output["more"]
        return F.cross_entropy(scores, label) + (first * total).sum() / 7

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4500, 3)).astype(np.float32), rng.choice([-100, 0, 1], 4500)
    task = fb.Task(model=Two, loss=loss, clients=[(x[:9], y[:9])], evaluate=(x, y), accuracy=None)
    flat, weights = initial_weights(task, 0)
    flat.load(weights)
    with torch.no_grad():
        expected = float(loss(flat.module(torch.tensor(x)), torch.tensor(y)))
    assert evaluate(task, flat, weights)["test"]["loss"] == pytest.approx(expected, rel=1e-4)


def test_of_a_rows_labels_only_those_that_count_are_right_or_wrong():
    found, counts = torch.tensor([[1, 0], [1, 0], [1, 1]]).bool(), torch.tensor([[1, 0], [0, 0], [1, 1]]).bool()
    assert right(found, 3, counts).tolist() == [1.0, 1.0]
    assert right(found, 3).tolist() == [0.5, 0.5, 1.0]


def test_evaluation_is_loss_and_accuracy_over_all_examples():
    task = task_of([some_examples(2)])
    flat, weights = initial_weights(task, 0)
    x, y = task.evaluate
    output = flat.module(torch.tensor(x, dtype=torch.float32)).detach()
    expected = {
        "loss": float(torch.nn.functional.cross_entropy(output, torch.tensor(y))),
        "accuracy": float((output.argmax(1).numpy() == y).mean()),
    }
    assert evaluate(task, flat, weights)["test"] == pytest.approx(expected)


def test_a_binary_task_with_one_output_is_judged_by_its_sign():
    task = fb.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda out, y: torch.nn.functional.binary_cross_entropy_with_logits(out[:, 0], y.float()),
        clients=[(np.ones((1, 1)), np.ones(1, int))],
        evaluate={"validation": (np.array([[-1.0], [1.0], [2.0]]), np.array([0, 1, 0]))},
    )
    flat, _ = initial_weights(task, 0)
    assert evaluate(task, flat, np.array([1.0, 0.0], np.float32))["validation"]["accuracy"] == pytest.approx(2 / 3)


def test_a_regression_gets_no_invented_accuracy():
    x = np.ones((4, 3))
    task = fb.Task(
        model=lambda: torch.nn.Linear(3, 1),
        loss=torch.nn.functional.mse_loss,
        clients=[(x, x[:, :1] * 7)],
        evaluate=(x, x[:, :1] * 7),
    )
    with pytest.raises(ValueError, match="accuracy=None"):
        fb.simulate(fb.Server(start=fb.refill(1), buffer_size=1), task, client=fb.LocalSGD(lr=0.1), until=fb.trips(2))


def test_a_task_without_accuracy_has_only_a_loss():
    task = fb.Task(
        model=lambda: torch.nn.Linear(3, 1),
        loss=lambda out, y: ((out[:, 0] - y) ** 2).mean(),
        clients=[(np.ones((4, 3)), np.zeros(4))],
        evaluate=(np.ones((4, 3)), np.zeros(4)),
        accuracy=None,
    )
    run = fb.simulate(fb.Server(start=fb.refill(1), buffer_size=1), task, client=fb.LocalSGD(lr=0.1), until=fb.trips(20))
    assert "accuracy" not in run.metrics[-1]
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]
    with pytest.raises(ValueError, match="no accuracy"):
        fb.simulate(fb.Server(start=fb.refill(1), buffer_size=1), task, client=fb.LocalSGD(lr=0.1), until=fb.accuracy(0.5))


@pytest.mark.parametrize("clients", [[], [(np.ones((2, 3)), np.ones(1))], [(np.ones((0, 3)), np.ones(0))]])
def test_unusable_clients_are_refused(clients):
    with pytest.raises(ValueError, match="clients"):
        task_of(clients)


# ── partitions ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(
    st.sampled_from([fb.iid(), fb.dirichlet(0.1), fb.dirichlet(100.0), fb.shards(2)]), st.integers(1, 25), st.integers(0, 999)
)
def test_a_partition_gives_every_example_to_one_client(split, clients: int, seed: int):
    labels = np.random.default_rng(seed).integers(0, 5, 113)
    parts = split(labels, clients, np.random.default_rng(seed))
    assert len(parts) == clients
    assert sorted(np.concatenate(parts).tolist()) == list(range(113))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= (2 if isinstance(split, fb.shards) else 1)


def test_small_alpha_means_few_classes_per_client():
    labels = np.repeat(np.arange(10), 500)

    def classes(split):
        return np.mean([len(np.unique(labels[part])) for part in split(labels, 100, np.random.default_rng(0))])

    assert (
        classes(fb.dirichlet(0.1)) < 4 < classes(fb.dirichlet(1.0)) < classes(fb.dirichlet(100.0)) == pytest.approx(10, abs=0.5)
    )
    assert classes(fb.shards(2)) <= 4


def test_more_clients_than_examples_are_refused():
    with pytest.raises(ValueError, match="3 examples are too few for 4 clients"):
        fb.iid()(np.zeros(3), 4, np.random.default_rng(0))


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_digits_are_split_the_same_way_every_time():
    a, b = fb.tasks.digits(clients=50), fb.tasks.digits(clients=50)
    assert len(a.clients) == 50
    assert sum(a.examples(c) for c in range(50)) + len(a.splits["test"][1]) == 1797
    assert all(np.array_equal(x, z) for (x, _), (z, _) in zip(a.clients, b.clients, strict=True))


def test_a_million_synthetic_clients_are_made_when_asked_for():
    task = fb.tasks.synthetic(clients=1_000_000)
    (x, y), again = task.clients[999_999], task.clients[999_999]
    assert len(y) == task.examples(999_999)
    assert np.array_equal(x, again[0])
    assert not np.array_equal(task.clients[5][0][:1], x[:1])
    assert len(task.splits["test"][1]) == 200 * 50
    with pytest.raises(IndexError):
        task.clients[1_000_000]


def test_alpha_and_beta_control_how_much_synthetic_clients_differ():
    def spread(alpha, beta):
        clients = fb.tasks.synthetic(alpha, beta, clients=200).clients
        return np.std([clients.draw(c, 50, "train")[0].mean() for c in range(200)])

    assert spread(1.0, 0.0) < spread(1.0, 4.0) / 3


def write_leaf(folder: Path, users: dict) -> None:
    folder.mkdir(parents=True)
    data = {"users": list(users), "num_samples": [len(u["y"]) for u in users.values()], "user_data": users}
    (folder / "all_data.json").write_text(json.dumps(data))


def test_a_leaf_folder_is_a_task(tmp_path: Path):
    users = {"ann": {"x": [[0, 1], [1, 0]], "y": [0, 2]}, "bob": {"x": [[1, 1]], "y": [1]}}
    write_leaf(tmp_path / "train", users)
    write_leaf(tmp_path / "test", {"ann": {"x": [[0, 1]], "y": [0]}})
    task = fb.tasks.leaf(str(tmp_path))
    assert [task.examples(c) for c in range(2)] == [2, 1]
    assert task.model()[1].weight.shape == (3, 2)
    run = fb.simulate(fb.Server(start=fb.refill(1), buffer_size=1), task, client=fb.LocalSGD(lr=0.1), until=fb.trips(4))
    assert run.summary["trips"] == 4


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not readable as JSON"),
        ("{}", "not a LEAF file"),
        ('{"users": ["a"], "user_data": {"a": {"x": [[1], [1, 2]], "y": [1, 2]}}}', "same shape"),
    ],
)
def test_a_broken_leaf_file_is_named(tmp_path: Path, content: str, complaint: str):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "broken.json").write_text(content)
    with pytest.raises(ValueError, match=rf"broken\.json: .*{complaint}"):
        fb.tasks.leaf(str(tmp_path))


def test_a_missing_leaf_folder_says_what_was_found(tmp_path: Path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "readme.txt").touch()
    with pytest.raises(ValueError, match=r"found readme\.txt"):
        fb.tasks.leaf(str(tmp_path))


def test_examples_are_grouped_by_a_natural_key():
    x, y = np.arange(4.0), np.arange(4)
    clients = fb.split_examples(x, y, fb.by_key(["a", "b", "a", "c"]))
    assert [labels.tolist() for _, labels in clients] == [[0, 2], [1], [3]]


# ── a first look ─────────────────────────────────────────────────────────────────────────────────────────────────────


X, Y = np.zeros((10, 8), np.float32), np.arange(10) % 3


def fitting(**changes: object) -> fb.Task:
    """Eight numbers in, three classes out."""
    parts = {"model": lambda: torch.nn.Linear(8, 3), "loss": F.cross_entropy, "clients": [(X, Y)] * 5, "evaluate": (X, Y)}
    return fb.Task(**{**parts, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"clients": [(X, Y[:, None])]}, r"clients\[0\]: .* inputs float32\[10, 8\] and labels int64\[10, 1\]: "),
        ({"clients": [(X, Y / 2)]}, r"clients\[0\]: .*labels float64\[10\]: "),
        ({"clients": [(X, Y.astype(str))]}, r"clients\[0\]: .*labels <U"),
        ({"clients": [(X[:, :7], Y)]}, r"clients\[0\]: .*float32\[10, 7\].*cannot be multiplied"),
        ({"clients": [(X.astype(np.uint8), Y)]}, r"clients\[0\]: .*uint8\[10, 8\].*dtype"),
        ({"clients": [(X, Y), (X, Y + 1)]}, r"clients\[1\]: label 3; the model has outputs for 0 to 2"),
        ({"clients": [(X, Y), (X, Y - 1)]}, r"clients\[1\]: label -1; the model has outputs for 0 to 2"),
        ({"evaluate": {"seen": (X, Y), "new": (X, Y + 5)}}, "evaluate, new: "),
        ({"evaluate": (X[:, :7], Y)}, "evaluate, test: "),
        ({"model": torch.nn.Linear(8, 3)}, "model: give the function that makes it"),
        ({"loss": lambda output, label: F.cross_entropy(output, label, reduction="none")}, r"loss: .*shape \(2,\)"),
        ({"loss": lambda output, label: 1.0}, "loss: expected the mean .* got float"),
    ],
)
def test_a_task_that_does_not_fit_together_is_said_before_a_folder_is_made(changes, complaint, tmp_path):
    server, client = fb.presets.fedbuff(fb.LocalSGD(lr=0.1), concurrency=2, buffer_size=2)
    with pytest.raises(ValueError, match=complaint) as refused:
        fb.simulate(server, fitting(**changes), client=client, until=fb.trips(10), workers=1, out=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_first_look_leaves_no_trace():
    """Labels to be ignored are fine; dropout draws nothing, and what a model remembers is not touched."""
    task = fitting(model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Dropout(0.5)), evaluate=(X, Y * 0 - 100))
    flat, weights = initial_weights(task, 0)
    before = torch.get_rng_state()
    first_look(task, flat)
    assert torch.equal(torch.get_rng_state(), before)
    assert flat.module.training
    assert np.array_equal(flat.weights(), weights)


@pytest.mark.parametrize(
    ("part", "complaint"), [({"loss": torch.nn.CrossEntropyLoss}, "is a class"), ({"evaluate": None}, "evaluate: ")]
)
def test_parts_of_the_wrong_kind_are_refused(part, complaint):
    with pytest.raises(ValueError, match=complaint):
        fitting(**part)


def test_a_device_that_is_not_there_is_one_line(tmp_path):
    server, client = fb.presets.fedbuff(fb.LocalSGD(lr=0.1), concurrency=2, buffer_size=2)
    training = fb.Training(device="cuda:99")
    with pytest.raises(ValueError, match=r"training\.device='cuda:99': torch can't compute there"):
        fb.simulate(server, fitting(), client=client, until=fb.trips(10), training=training, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ── accuracy ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("output", "label", "expected"),
    [
        ((7, 4), (7,), (7,)),
        ((7, 4), (7, 1), (7,)),
        ((7, 5, 4), (7, 5), (7, 5)),  # a label for every word
        ((7, 4, 5), (7, 5), (7, 5)),  # with classes where cross entropy has them
        ((7, 1), (7,), (7,)),
    ],
)
def test_what_is_right_has_the_shape_of_the_labels(output, label, expected):
    found = most_likely(torch.randn(output), torch.zeros(label, dtype=torch.int64))
    assert found.shape == expected
    assert 0 <= float(right(found, 7).sum()) <= 7


@pytest.mark.parametrize(("output", "label"), [((5, 5), (5, 5)), ((5, 2), (5, 2)), ((5, 3), (5, 4))])
def test_labels_that_no_largest_output_can_be_compared_with_are_refused(output, label):
    with pytest.raises(ValueError, match="can't be compared; give the Task accuracy=None"):
        most_likely(torch.randn(output), torch.zeros(label))


def test_an_accuracy_is_looked_at_before_a_run_begins(tmp_path):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(6, 2)).astype(np.float32)) for _ in range(9)]
    how = {"model": lambda: torch.nn.Linear(4, 2), "loss": torch.nn.functional.mse_loss, "clients": clients}
    server = fb.Server(start=fb.refill(3), buffer_size=2)
    for accuracy in ({}, {"accuracy": lambda output, label: torch.tensor(0.5)}, {"accuracy": lambda output, label: 1.0}):
        task = fb.Task(**how, evaluate=clients[0], **accuracy)
        with pytest.raises(ValueError, match="evaluate, test: accuracy can't be applied"):
            fb.simulate(server, task, client=fb.LocalSGD(lr=0.1), until=fb.trips(4), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_may_have_several_outputs_if_loss_and_accuracy_know_them():
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 3), torch.nn.Linear(4, 1)

        def forward(self, x):
            return self.a(x), self.b(x)

    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((5, 4), np.float32), rng.integers(0, 3, 5)) for _ in range(6)]
    task = fb.Task(
        model=Two,
        loss=lambda o, y: torch.nn.functional.cross_entropy(o[0], y) + o[1].pow(2).mean(),
        clients=clients,
        evaluate=clients[0],
        accuracy=lambda o, y: o[0].argmax(1) == y,
    )
    server = fb.Server(start=fb.refill(3), buffer_size=2)
    run = fb.simulate(server, task, client=fb.LocalSGD(lr=0.1), until=fb.trips(10), workers=1)
    assert 0 <= run.metrics[-1]["accuracy"] <= 1


def test_a_single_row_that_was_reversed_is_a_row():
    x, y = np.ones((1, 4), np.float32)[::-1], np.zeros(1, np.int64)[::-1]
    task = fb.Task(model=lambda: torch.nn.Linear(4, 3), loss=F.cross_entropy, clients=[(x, y)] * 4, evaluate=(x, y))
    server = fb.Server(start=fb.refill(2), buffer_size=2)
    run = fb.simulate(server, task, client=fb.LocalSGD(lr=0.1), until=fb.trips(4), workers=1)
    assert run.summary["server_steps"] == 2
