"""Training many trips at once gives what training them one at a time does."""

import inspect
import pydoc
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

import fedbuff as fb
from fedbuff.learn import work
from fedbuff.learn.batched import Together, batched, norms, try_bfloat16
from fedbuff.learn.evaluate import evaluate_rows, plain
from fedbuff.learn.kernels import library
from fedbuff.learn.local import Job, initial_weights, one_at_a_time
from fedbuff.learn.training import Training
from fedbuff.learn.trial import way_to_train, why_not
from fedbuff.learn.twins import twin_of

SIZES = (5, 1, 8, 3, 2, 11)  # ragged, with a client of one example
SGD = fb.LocalSGD(lr=0.2, batch_size=4)

torch.set_num_threads(1)


def clients_of(shape: Sequence[int], classes: int = 3, words: int = 0, sizes: Sequence[int] = SIZES, labels=(), seed: int = 0):
    """Clients with random inputs of a shape (integers below `words` if given) and random labels."""
    rng = np.random.default_rng(seed)
    draw = (lambda n: rng.integers(0, words, (n, *shape))) if words else (lambda n: rng.normal(size=(n, *shape)))
    return [(draw(n) if words else draw(n).astype(np.float32), rng.integers(0, classes, (n, *labels))) for n in sizes]


def task_of(model, clients, loss=F.cross_entropy) -> fb.Task:
    return fb.Task(model=model, loss=loss, clients=clients, evaluate=clients[0], accuracy=None)


def both_ways(task: fb.Task, sgd: fb.LocalSGD = SGD, trips: int = 9, versions: int = 2, seed: int = 3):
    """Updates of a chunk by the loop and by the batch; trips of the versions take turns."""
    flat, weights = initial_weights(task, seed)
    rng = np.random.default_rng(seed)
    starts = [weights + v * rng.normal(0, 0.03, len(weights)).astype(weights.dtype) for v in range(versions)]
    jobs = [Job(7 * t, t % len(task.clients), starts[t % versions]) for t in range(trips)]
    return one_at_a_time(task, sgd, seed, flat)(jobs), batched(task, sgd, seed, flat)(jobs)


def assert_equal(task: fb.Task, sgd: fb.LocalSGD = SGD, **how) -> None:
    expected, found = both_ways(task, sgd, **how)
    assert norms(expected).min() > 1e-4
    assert norms(found - expected) == pytest.approx(0, abs=1e-5 * norms(expected).max())
    flat, _ = initial_weights(task, 3)
    assert why_not(task, sgd, 3, flat) is None


class Recurrent(nn.Module):
    """A recurrent layer between a frozen or trained embedding and a linear layer."""

    def __init__(self, kind=nn.LSTM, frozen=False, **how) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 5, padding_idx=0).requires_grad_(not frozen)
        self.over_time = kind(5, 4, **how)
        self.end = nn.Linear(4 * (2 if how.get("bidirectional") else 1), 3)
        self.first = how.get("batch_first", False)

    def forward(self, x):
        out, last = self.over_time(self.words(x) if self.first else self.words(x).transpose(0, 1))
        last = last[0] if isinstance(last, tuple) else last
        return self.end(out[:, -1] if self.first else out[-1]) + last[-1][:, :3]


class FromState(nn.Module):
    """A recurrent layer that is told what to start from, as in many a tutorial."""

    def __init__(self, kind=nn.LSTM, start=0.0) -> None:
        super().__init__()
        self.words, self.over_time, self.end = nn.Embedding(20, 5), kind(5, 4, 2, batch_first=True), nn.Linear(4, 3)
        self.kind, self.start = kind, start

    def forward(self, x):
        h = torch.full((2, len(x), 4), self.start)
        out, _ = self.over_time(self.words(x), (h, h) if self.kind is nn.LSTM else h)
        return self.end(out[:, -1])


class Free(nn.Module):
    """A forward that does what it likes: a residual, a reused layer, reshapes and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(2, 2)
        self.norm, self.end = nn.LayerNorm([3, 2]), nn.Linear(6, 3, bias=False)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen += 1
        x = x + torch.tanh(self.a(x))
        x = x * self.a(x).sigmoid() * self.seen
        pairs = self.b(x.reshape(-1, 2)).view(-1, 3, 2)
        return self.end(F.gelu(self.norm(pairs)).flatten(1))


class SharedNorm(nn.Module):
    """As in FLSim's network: the same normalisation after every convolution."""

    def __init__(self, groups=4, inplace=False, pool=True, width=8, affine=True) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(2 if i == 0 else width, width, 3, 1, 2) for i in range(3)])
        parts = [nn.GroupNorm(groups, width, affine=affine), nn.ReLU(inplace=inplace), *([nn.MaxPool2d(2, 2)] if pool else [])]
        self.norm, self.drop, self.end = nn.Sequential(*parts), nn.Dropout(0.2), nn.Linear(width, 3)

    def forward(self, x):
        for conv in self.convs:
            x = self.norm(conv(x))
        return self.end(self.drop(x.mean((2, 3))))


class Viewed(nn.Module):
    """Code that only contiguous images do for, and dropout right after convolutions and recurrent layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(2, 8, 3, padding=1), nn.Dropout(0.3)
        self.again, self.end = nn.Conv2d(8, 8, 3), nn.Linear(8 * 16, 3)

    def forward(self, x):
        x = self.again(self.drop(self.conv(x)) + 1)
        return self.end(x.view(len(x), -1))


class PooledAndViewed(nn.Module):
    """The usual network for small images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.end = nn.Conv2d(2, 8, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), nn.Linear(72, 3)

    def forward(self, x):
        return self.end(self.pool(F.relu(self.conv(x))).view(-1, 72))


class Residual(nn.Module):
    """The output of a convolution goes two ways, so its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU())
        self.end = nn.Linear(8, 3)

    def forward(self, x):
        x = self.conv(x)
        return self.end((self.norm(x) + x * 0.5).amax((2, 3)))


class Unused(nn.Module):
    """A layer that has weights and is never asked."""

    def __init__(self) -> None:
        super().__init__()
        self.idle, self.end = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.end(x)


class DropSequence(nn.Module):
    """Dropout of a whole sequence, which torch draws in the order of memory: time first."""

    def __init__(self, kind=nn.LSTM) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(20, 5), nn.Dropout(0.4)
        self.one, self.two, self.end = kind(5, 4, batch_first=True), kind(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        h = self.drop(self.one(self.drop(self.words(x)))[0])
        return self.end(self.two(h)[0].mean(1))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    return model


def one_relu() -> nn.Module:
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(4, 9), act, nn.Linear(9, 3), act)


def one_layer_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(4, 3))


def half_frozen_norm(frozen: str) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 3))
    getattr(model[1], frozen).requires_grad_(False)
    return model


class DropView(nn.Module):
    """Dropout of a view of what a convolution gave: its numbers lie in memory as torch's do, or masks would differ."""

    def __init__(self, view) -> None:
        super().__init__()
        self.conv, self.drop, self.end, self.view = nn.Conv2d(2, 8, 3), nn.Dropout(0.4), nn.LazyLinear(3), view

    def forward(self, x):
        return self.end(self.drop(self.view(torch.tanh(self.conv(x)))).flatten(1))


def drop_view(view):
    def made() -> nn.Module:
        whole = DropView(view)
        whole(torch.zeros(1, 2, 6, 6))
        return whole

    return made


def conv(*arguments, size=6, kind=nn.Conv2d, **how):
    """A convolution and what follows it, for inputs of `size`."""

    def model() -> nn.Module:
        layer = kind(*arguments, **how)
        return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))

    def made() -> nn.Module:
        whole = model()
        whole(torch.zeros(1, arguments[0], *(size,) * (1 if kind is nn.Conv1d else 2)))
        return whole

    return made


IMAGES, WORDS = clients_of((2, 6, 6)), clients_of((7,), words=20)
MODELS = {
    "linear": (lambda: nn.Linear(4, 3), clients_of((4,))),
    "mlp with dropout": (lambda: fb.models.mlp((5, 6), dropout=0.3)(4, 3), clients_of((4,))),
    "mlp": (lambda: fb.models.mlp((5, 17))(4, 3), clients_of((4,))),
    "flattened, no bias": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 9, bias=False), nn.ReLU(), nn.Linear(9, 3)),
        clients_of((3, 4)),
    ),
    "residual": (Residual, IMAGES),
    "unused": (Unused, clients_of((4,))),
    "linear over time": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Flatten(), nn.Linear(15, 3)), clients_of((3, 4))),
    "conv": (conv(2, 4, 3), IMAGES),
    "conv stride": (conv(2, 4, 3, stride=2, padding=1), IMAGES),
    "conv dilated groups": (conv(2, 4, (3, 2), dilation=2, groups=2, bias=False), IMAGES),
    "conv same": (conv(2, 4, 3, padding="same"), IMAGES),
    "conv 3x3 padding 2": (conv(2, 5, 3, padding=2), IMAGES),
    "conv1d": (conv(2, 3, 2, kind=nn.Conv1d), clients_of((2, 6))),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(72, 3)), IMAGES),
    "norms without weights": (
        lambda: nn.Sequential(nn.GroupNorm(2, 2, affine=False), nn.Flatten(), nn.LayerNorm(72, bias=False), nn.Linear(72, 3)),
        IMAGES,
    ),
    "conv 16 channels": (conv(2, 16, 3, padding=1), IMAGES),
    "conv 24 channels": (lambda: nn.Sequential(conv(2, 8, 3)(), nn.Linear(3, 3)), IMAGES),
    "conv 40 channels": (conv(2, 40, (2, 3), stride=(1, 2), padding=(1, 0), dilation=(2, 1)), IMAGES),
    "two convs": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(576, 3)
        ),
        IMAGES,
    ),
    "viewed": (Viewed, IMAGES),
    "pooled and viewed": (PooledAndViewed, IMAGES),
    "dropout of a sequence": (DropSequence, WORDS),
    "dropout of a sequence, gru": (lambda: DropSequence(nn.GRU), WORDS),
    "shared norm": (SharedNorm, IMAGES),
    "shared norm, four channels": (lambda: SharedNorm(width=4), IMAGES),
    "shared norm, no weights": (lambda: SharedNorm(affine=False), IMAGES),
    "shared norm, other groups": (lambda: SharedNorm(2, inplace=True), IMAGES),
    "shared norm, no pool": (lambda: SharedNorm(4, pool=False), IMAGES),
    "max pool": (lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)), IMAGES),
    "lstm": (lambda: Recurrent(batch_first=True), WORDS),
    "lstm of two layers": (lambda: Recurrent(num_layers=2, dropout=0.3, batch_first=True, frozen=True), WORDS),
    "lstm both directions": (lambda: Recurrent(num_layers=2, dropout=0.2, bidirectional=True), WORDS),
    "lstm without bias": (lambda: Recurrent(bias=False, batch_first=True, bidirectional=True), WORDS),
    "gru": (lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True), WORDS),
    "rnn": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), WORDS),
    "lstm from zeros": (FromState, WORDS),
    "gru from zeros": (lambda: FromState(nn.GRU), WORDS),
    "free": (Free, clients_of((6,))),
    "tied": (tied, clients_of((4,))),
    "partly frozen": (partly_frozen, clients_of((4,))),
    "one relu in two places": (one_relu, clients_of((4,))),
    "one layer in two places": (one_layer_twice, clients_of((4,))),
    "norm of a frozen weight": (lambda: half_frozen_norm("weight"), IMAGES),
    "norm of a frozen bias": (lambda: half_frozen_norm("bias"), IMAGES),
    "dropout of flat images": (drop_view(lambda x: x.flatten(2)), IMAGES),
    "dropout of channels last": (drop_view(lambda x: x.permute(0, 2, 3, 1)), IMAGES),
    "dropout of a part": (drop_view(lambda x: x[:, :, 0]), IMAGES),
}


@pytest.fixture(params=["kernels", "torch"])
def path(request, monkeypatch) -> str:
    """Every way through the code: with the kernels, and without a compiler."""
    if request.param == "torch":
        for module in ("kernels", "twins.dropout"):
            monkeypatch.setattr(f"fedbuff.learn.{module}.library", lambda: None)
    elif library() is None:
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize("name", MODELS)
def test_layers(name, path):
    model, clients = MODELS[name]
    assert_equal(task_of(model, clients))


@pytest.mark.parametrize("name", ["linear", "mlp", "mlp with dropout", "shared norm", "lstm of two layers", "free"])
@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 1},
        {"steps": 7},
        {"epochs": 3, "weight_decay": 0.1},
        {"epochs": 2, "proximal": 0.5},
        {"epochs": 2, "momentum": 0.9},
        {"epochs": 2, "lr_norm": True},
        {"steps": 1, "weight_decay": 0.1, "momentum": 0.5, "lr_norm": True},
        {"momentum": 0.5, "weight_decay": 0.01, "proximal": 0.1, "lr_norm": True, "epochs": 2, "batch_size": 3},
    ],
    ids=str,
)
def test_options_of_local_sgd(name, changes, path):
    model, clients = MODELS[name]
    assert_equal(task_of(model, clients), replace(SGD, lr=0.05, **changes))


@settings(max_examples=30)
@given(
    st.sampled_from(["linear", "mlp with dropout", "conv 3x3 padding 2", "lstm"]),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 20),
    st.integers(1, 5),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_any_sizes(name, sizes, trips, versions, batch_size, steps):
    model, clients = MODELS[name]
    x = clients[0][0]
    words = 20 if x.dtype == np.int64 else 0
    task = task_of(model, clients_of(x.shape[1:], words=words, sizes=sizes, seed=len(sizes)))
    sgd = fb.LocalSGD(lr=0.05, batch_size=batch_size, steps=steps)
    expected, found = both_ways(task, sgd, trips=trips, versions=min(versions, trips))
    assert found == pytest.approx(expected, abs=1e-5 * max(1.0, norms(expected).max()))


def squared(out, y):
    return ((out[:, 0] - y) ** 2).mean()


@pytest.mark.parametrize(
    ("loss", "outputs", "labels"),
    [
        (lambda out, y: F.cross_entropy(out, y), 3, ()),
        (nn.CrossEntropyLoss(), 3, ()),
        (nn.CrossEntropyLoss(label_smoothing=0.1), 3, ()),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2])), 3, ()),
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]), label_smoothing=0.1, ignore_index=7), 3, ()),
        (lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.clamp(max=1).float()), 1, ()),
        (squared, 1, ()),
    ],
    ids=["lambda", "plain module", "smooth", "weighted", "weighted and smooth", "binary", "squares"],
)
def test_losses(loss, outputs, labels):
    assert_equal(task_of(lambda: nn.Linear(4, outputs), clients_of((4,), labels=labels), loss))


def test_a_known_loss_of_float_labels():
    clients = [(x, x[:, :2] * 2) for x, _ in clients_of((4,))]
    assert_equal(task_of(lambda: nn.Linear(4, 2), clients, F.mse_loss))


def test_a_label_for_every_time_step_and_labels_that_do_not_count():
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.end = nn.Linear(4, 3)

        def forward(self, x):
            return self.end(x).transpose(1, 2)

    clients = clients_of((5, 4), labels=(5,))
    assert_equal(task_of(Tagger, clients))
    assert_equal(task_of(Tagger, clients, nn.CrossEntropyLoss(ignore_index=0)))
    for _, y in clients:
        y[:, 3:] = np.where(np.arange(len(y))[:, None] % 2, -100, y[:, 3:])
    assert_equal(task_of(Tagger, clients))
    assert_equal(task_of(Tagger, clients, nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2]))))


def test_labels_that_are_no_class(path):
    """-100 does not count, as in torch; others are torch's error."""
    clients = clients_of((4,))
    clients[2][1][3:] = -100
    assert_equal(task_of(lambda: nn.Linear(4, 3), clients))
    clients[2][1][0] = 7
    task = task_of(lambda: nn.Linear(4, 3), clients)
    flat, weights = initial_weights(task, 0)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        batched(task, SGD, 0, flat)([Job(0, 2, weights)])


def test_a_client_without_examples_is_named(path):
    class Lazy(list):
        """Not checked when the task is made."""

    clients = Lazy(clients_of((4,)))
    task = task_of(lambda: nn.Linear(4, 3), clients)
    flat, weights = initial_weights(task, 0)
    clients[1] = clients[1][0][:0], clients[1][1][:0]
    with pytest.raises(ValueError, match="client 1 has no examples"):
        batched(task, SGD, 0, flat)([Job(0, 1, weights)])


def test_clients_made_when_asked_for(path, small_task):
    for task in (small_task, fb.tasks.synthetic(clients=9, features=5, classes=3, max_examples=12)):
        assert_equal(task, replace(SGD, epochs=2))


def test_layers_keep_their_own_weights():
    """The copy of the model is taken apart while it is rebuilt, and Python gives freed addresses away again."""
    task = task_of(lambda: nn.Sequential(*(nn.Linear(k, k + 1) for k in range(4, 24)), nn.Linear(24, 3)), clients_of((4,)))
    flat, _ = initial_weights(task, 0)
    for _ in range(30):
        twin, _ = twin_of(flat, torch.device("cpu"))
        assert [part.slots["weight"].shape[0] for part in twin] == [*range(5, 25), 3]


def test_double_precision():
    clients = [(x.astype(np.float64), y) for x, y in IMAGES]
    expected, found = both_ways(task_of(lambda: SharedNorm().double(), clients), replace(SGD, epochs=2))
    assert found.dtype == np.float64
    assert found == pytest.approx(expected, abs=1e-12)


def test_updates_are_written_where_the_caller_wants_them():
    task = task_of(*MODELS["free"])
    flat, weights = initial_weights(task, 0)
    jobs = [Job(t, t % 6, weights) for t in range(8)]
    for train in (one_at_a_time(task, SGD, 0, flat), batched(task, SGD, 0, flat)):
        room = np.full((9, len(weights)), np.nan, np.float32)
        assert train(jobs, room[:8]) is not None
        assert np.array_equal(room[:8], train(jobs))
        assert np.isnan(room[8]).all()


@pytest.mark.parametrize("name", ["linear", "mlp with dropout", "shared norm", "lstm of two layers"])
def test_a_chunk_is_the_same_bit_for_bit_whatever_came_before(name):
    task = task_of(*MODELS[name])
    flat, weights = initial_weights(task, 0)
    jobs = [Job(t, t % 6, weights) for t in range(8)]
    train = batched(task, SGD, 0, flat)
    state = torch.get_rng_state()
    first = train(jobs).copy()
    train([Job(99, 3, weights + 1)])
    assert np.array_equal(train(jobs), first)
    assert np.array_equal(batched(task, SGD, 0, flat)(jobs), first)
    assert torch.equal(state, torch.get_rng_state())


def test_nothing_to_train_is_no_error():
    task = task_of(*MODELS["linear"])
    flat, weights = initial_weights(task, 0)
    assert batched(task, SGD, 0, flat)([]).shape == (0, len(weights))


def test_read_only_weights_do():
    task = task_of(*MODELS["linear"])
    flat, weights = initial_weights(task, 0)
    weights.flags.writeable = False
    assert np.isfinite(batched(task, SGD, 0, flat)([Job(0, 0, weights)])).all()


def test_what_is_not_finite_stays_so():
    """A client that diverges must be seen to, and must not touch its neighbours."""
    for name in ("linear", "shared norm", "lstm"):
        model, clients = MODELS[name]
        task = task_of(model, clients)
        flat, weights = initial_weights(task, 0)
        bad = weights.copy()
        bad[-1] = np.nan
        found = batched(task, SGD, 0, flat)([Job(0, 0, weights), Job(1, 1, bad), Job(2, 2, weights)])
        assert np.isfinite(found).all(1).tolist() == [True, False, True]


# ── what can't be batched ────────────────────────────────────────────────────────────────────────────────────────────


class OwnLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.end = nn.Linear(4, 3)

    def forward(self, x):
        return self.end(x * self.scale)


class FunctionalDropout(nn.Linear):
    pass


def functional_dropout() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.end = nn.Linear(4, 3)

        def forward(self, x):
            return self.end(F.dropout(x, 0.5))

    return Net()


def mixing_rows() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.end = nn.Linear(4, 3)

        def forward(self, x):
            return self.end(x - x.mean(0))

    return Net()


def weight_used_elsewhere() -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.end = nn.Linear(4, 3)

        def forward(self, x):
            return F.linear(x, self.end.weight)

    return Net()


@pytest.mark.parametrize(
    ("model", "loss", "reason"),
    [
        (OwnLayer, F.cross_entropy, "OwnLayer holds parameters of its own and is not one of Linear, Conv1d"),
        (lambda: FunctionalDropout(4, 3), F.cross_entropy, "FunctionalDropout holds parameters"),
        (lambda: nn.Sequential(nn.AlphaDropout(0.1), nn.Linear(4, 3)), F.cross_entropy, "0: AlphaDropout draws its own"),
        (functional_dropout, F.cross_entropy, "^the model draws random numbers itself"),
        (mixing_rows, F.cross_entropy, "other updates.*mixes rows"),
        (weight_used_elsewhere, F.cross_entropy, "failed with AttributeError"),
        (lambda: nn.Linear(4, 3), lambda out, y: F.cross_entropy(out, y, reduction="sum"), "not the mean over its rows"),
        (lambda: nn.Linear(4, 3), lambda out, y: F.cross_entropy(out, y) * float(out.sum() > 0), "failed with"),
    ],
)
def test_what_can_not_be_batched_is_trained_by_the_loop_and_says_why(model, loss, reason):
    task = task_of(model, clients_of((4,)), loss)
    flat, weights = initial_weights(task, 0)
    train, why = way_to_train(task, SGD, 0, flat)
    assert why is not None
    assert re.search(reason, why), why
    jobs = [Job(0, 0, weights), Job(1, 2, weights)]
    assert np.array_equal(train(jobs), one_at_a_time(task, SGD, 0, flat)(jobs))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_that_starts_from_anything_but_zeros_is_trained_by_the_loop(kind):
    task = task_of(lambda: FromState(kind, 0.1), WORDS)
    assert "saw a starting state that is not zero" in str(why_not(task, SGD, 0, initial_weights(task, 0)[0]))


RNG = np.random.default_rng(5)
ODD_LATER = [(RNG.normal(size=(n, 4)).astype(np.float32), np.full(n, i % 3)) for i, n in enumerate([6, 7] * 16)]
ODD_LATER += [(RNG.normal(size=(n, 4)).astype(np.float32), RNG.integers(0, 3, n)) for n in (5, 8, 30, 11)]


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 5.0, 0.2])),
        lambda out, y: F.cross_entropy(out, y, ignore_index=2),
        lambda out, y: F.cross_entropy(out, y, reduction="none").median(),
    ],
)
def test_a_loss_is_tried_on_rows_of_many_clients(loss):
    """Most of them have one class only, for which a weighted mean is a mean."""
    task = task_of(lambda: nn.Linear(4, 3), ODD_LATER, loss)
    assert "not the mean over its rows" in str(why_not(task, SGD, 0, initial_weights(task, 0)[0]))


class Deep(nn.Module):
    """A perceptron that diverges in a step or two if its inputs are large."""

    def __init__(self, change=lambda x: x) -> None:
        super().__init__()
        hidden = [part for _ in range(2) for part in (nn.Linear(32, 32), nn.ReLU())]
        self.layers, self.change = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), *hidden, nn.Linear(32, 3)), change

    def forward(self, x):
        return self.layers(self.change(x))


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e4])
def test_a_trial_that_diverges_proves_nothing(scale):
    clients = [(scale * x, y) for x, y in clients_of((4,))]
    careful = replace(SGD, lr=1e-8)

    def reason(change) -> str | None:
        task = task_of(lambda: Deep(change), clients, lambda out, y: F.mse_loss(out, scale * F.one_hot(y, 3).float()))
        return why_not(task, careful, 0, initial_weights(task, 0)[0])

    assert "other updates" in str(reason(lambda x: x - x.mean(0)))
    assert reason(lambda x: F.dropout(x, 0.3)) == "the model draws random numbers itself"
    assert reason(lambda x: x) is None


def test_kernels_that_are_wrong_are_noticed_though_double_precision_does_without_them(monkeypatch):
    task = task_of(lambda: nn.Linear(4, 3), clients_of((4,)))
    right = Together.together

    def wrong(self, trips, update, places):
        right(self, trips, update, places)
        if update.dtype == torch.float32:
            update *= 1.1

    monkeypatch.setattr("fedbuff.learn.batched.small", lambda *_: None)
    monkeypatch.setattr(Together, "together", wrong)
    assert "other updates" in str(why_not(task, SGD, 0, initial_weights(task, 0)[0]))


def test_hooks_and_odd_layers_are_refused():
    for layer, reason in (
        (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), "reflect"),
        (nn.Conv2d(2, 3, 2, padding="same"), "even kernel"),
        (nn.LSTM(3, 4, proj_size=2), "proj_size"),
        (nn.Embedding(3, 4, max_norm=1.0), "max_norm"),
    ):
        task = task_of(lambda layer=layer: layer, clients_of((4,)))
        flat, _ = initial_weights(task, 0)
        assert reason in str(why_not(task, SGD, 0, flat))
    hooked = nn.Linear(4, 3)
    hooked.register_forward_hook(lambda *_: None)
    flat, _ = initial_weights(task_of(lambda: hooked, clients_of((4,))), 0)
    assert "hooks" in str(why_not(task_of(lambda: hooked, clients_of((4,))), SGD, 0, flat))
    with pytest.raises(ValueError, match="can't be trained in batches of trips: Linear has hooks"):
        batched(task_of(lambda: hooked, clients_of((4,))), SGD, 0, flat)


def test_the_norms_of_updates():
    assert norms(np.array([[3, 4], [0, 0]], np.float32)).tolist() == [5, 0]


@pytest.mark.parametrize("name", ["shared norm", "lstm of two layers", "gru", "mlp with dropout"])
def test_bfloat16_is_near(name):
    task = task_of(*MODELS[name])
    flat, weights = initial_weights(task, 0)
    jobs = [Job(t, t % 6, weights) for t in range(6)]
    expected = one_at_a_time(task, SGD, 0, flat)(jobs)
    found = batched(task, SGD, 0, flat, precision="bfloat16")(jobs)
    assert found.dtype == np.float32
    assert 1e-5 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.1


PRODUCTS = {  # what computes them, of whose arguments the last one is `low`
    "two convs": ("convolution.convolve", "convolution.convolution_weights", "linear.outer_products", "linear.low_linear"),
    "lstm of two layers": ("recurrent.lstm", "recurrent.lstm_back", "recurrent.lstm_weights", "linear.low_linear"),
    "gru": ("linear.low_linear", "linear.outer_products"),
}


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_product_of_a_run_in_bfloat16_is_of_bfloat16(monkeypatch, name, precision):
    low, calls = precision == "bfloat16", []

    def watched(place, function):
        def call(*args, **kwargs):
            told = inspect.signature(function).bind(*args, **kwargs).arguments
            calls.append((place, told.get("low", place == "linear.low_linear")))
            return function(*args, **kwargs)

        return call

    for place in PRODUCTS[name]:
        path = f"fedbuff.learn.twins.{place}"
        monkeypatch.setattr(path, watched(place, pydoc.locate(path)))
    task = task_of(*MODELS[name])
    flat, weights = initial_weights(task, 0)
    train = batched(task, SGD, 0, flat, precision=precision)
    calls.clear()
    train([Job(0, 0, weights)])
    assert {told for _, told in calls} == {low}
    assert {place for place, _ in calls} == set(PRODUCTS[name]) - (set() if low else {"linear.low_linear"})


def test_a_run_in_bfloat16_is_evaluated_in_float32():
    task = task_of(*MODELS["two convs"])
    ready = work.trainer(task, SGD, 3, Training(precision="bfloat16"))
    assert ready.outputs.__name__ == "together", "not through the twins"
    weights, (x, _) = ready.flat.weights(), task.splits["test"]
    found, expected = (outputs(weights, torch.as_tensor(x)) for outputs in (ready.outputs, plain(ready.flat)))
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_a_perceptron_that_is_trained_whole_is_float32_whoever_else_is_there():
    clients = clients_of((6,))
    x, y = clients[5]
    strange = [*clients[:5], (x, np.full_like(y, -100))]  # not for the kernel, which then takes none of them
    model = lambda: nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))  # noqa: E731
    for some in (clients, strange):
        task = task_of(model, some)
        flat, weights = initial_weights(task, 0)
        jobs = [Job(t, t, weights) for t in range(6)]
        expected = one_at_a_time(task, SGD, 0, flat)(jobs)
        found = batched(task, SGD, 0, flat, precision="bfloat16")(jobs)
        assert np.abs(found[:5] - expected[:5]).max() < 1e-6


class FarOut(nn.Module):
    """Numbers of which all but the last digits are alike: bfloat16 has only the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x) - self.first(torch.full_like(x, 3000.0))))


def test_a_model_for_which_bfloat16_is_too_coarse_is_refused():
    clients = [(x + 3000, y) for x, y in clients_of((20,))]
    task = task_of(FarOut, clients)
    assert work.trainer(task, SGD, 3, Training()).note is None
    with pytest.raises(ValueError, match=r"precision: in bfloat16 an update .* use float32"):
        work.trainer(task, SGD, 3, Training(precision="bfloat16"))


@pytest.mark.parametrize("lr", [0.01, 0.03, 0.1, 0.3, 1.0, 30.0])
def test_whether_bfloat16_is_refused_does_not_depend_on_the_rate(lr):
    """Far from the start nobody's second step is like another's, in any precision."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))

    pixels = [(np.random.default_rng(n).integers(0, 256, (8, 20)).astype(np.float32), np.arange(8) % 3) for n in range(12)]
    work.trainer(task_of(network, pixels), fb.LocalSGD(lr=lr, batch_size=4), 3, Training(precision="bfloat16"))
    clients = [(x + 3000, y) for x, y in clients_of((20,))]
    with pytest.raises(ValueError, match="use float32"):
        work.trainer(task_of(FarOut, clients), fb.LocalSGD(lr=lr, batch_size=4), 3, Training(precision="bfloat16"))


def test_precisions_that_do_not_work_are_refused(monkeypatch):
    task = task_of(*MODELS["linear"])
    flat, _ = initial_weights(task, 0)
    with pytest.raises(ValueError, match="expected float32 or bfloat16, not 'float16'"):
        batched(task, SGD, 0, flat, precision="float16")
    task = task_of(*MODELS["two convs"])
    flat, _ = initial_weights(task, 0)
    monkeypatch.setattr("fedbuff.learn.batched._TRIAL", "import os; os.kill(os.getpid(), 4)")
    try_bfloat16.cache_clear()
    with pytest.raises(ValueError, match="killed by signal 4; use float32"):
        batched(task, SGD, 0, flat, precision="bfloat16")
    try_bfloat16.cache_clear()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_evaluation_through_twins_is_the_models_own(name):
    """Above all without dropout."""
    model, clients = MODELS[name]
    held_out = tuple(np.concatenate([part] * 15) for part in clients[5])  # more rows than are looked at together
    task = fb.Task(model=model, loss=F.cross_entropy, clients=clients, evaluate=held_out, accuracy=None)
    ready = work.trainer(task, SGD, 3, Training())
    assert not isinstance(ready.trips, Together) or ready.outputs.__name__ == "together"
    weights = ready.flat.weights() * np.float32(1.1)
    loss, counted, _, rows = evaluate_rows(task, ready.flat, weights, "test", 0, plain(ready.flat))
    assert ready.evaluate(weights, "test", 0) == (pytest.approx(loss, rel=1e-4), counted, 0, rows)


class OtherwiseInEvaluation(nn.Module):
    """In evaluation it looks at the whole batch, which its twin, seeing some rows at a time, can't."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 8, 3)

    def forward(self, x):
        y = self.layer(x).flatten(1)[:, :3]
        return y if self.training else y.reshape(-1, 3)[: len(x)] + self.layer(x.sum(0, keepdim=True).repeat(3, 1, 1, 1)).sum()


def test_a_model_that_takes_another_way_in_evaluation_is_evaluated_itself():
    task = task_of(OtherwiseInEvaluation, clients_of((1, 5, 5)))
    ready = work.trainer(task, SGD, 3, Training())
    assert isinstance(ready.trips, Together)
    assert ready.outputs.__name__ == "outputs"
    weights = ready.flat.weights()
    assert ready.evaluate(weights, "test", 0) == evaluate_rows(task, ready.flat, weights, "test", 0, plain(ready.flat))
