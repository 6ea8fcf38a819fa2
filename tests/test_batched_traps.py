"""What a model, a loss or its data may hide from the trial of batched training: found by fuzzing, each once silently wrong."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.module import register_module_forward_hook

import fedbuff as fb
from fedbuff.learn.batched import batched, trainer, why_not
from fedbuff.learn.local import Job, initial_weights
from fedbuff.learn.training import Training
from test_batched import assert_equal, both_ways, clients_of, task_of

SGD = fb.LocalSGD(lr=0.1, batch_size=32)


def refused(model, clients=None, loss=F.cross_entropy, sgd=SGD) -> str:
    """Why trips of this model are trained one at a time."""
    task = task_of(model, clients or clients_of((4,)), loss)
    reason = why_not(task, sgd, 3, initial_weights(task, 3)[0])
    assert reason is not None
    return reason


class NormOfFeatures(nn.Module):
    """A linear layer over the last dimension of images, before a norm over their channels."""

    def __init__(self, channels: int, width: int, affine: bool = True) -> None:
        super().__init__()
        self.end = nn.Linear(channels * 2 * width, 3)
        self.first = nn.Sequential(nn.Linear(width, width), nn.GroupNorm(2, channels, affine=affine), nn.ReLU())

    def forward(self, x):
        return self.end(self.first(x).flatten(1))


@pytest.mark.parametrize(("channels", "width"), [(8, 8), (16, 4), (8, 12)])
def test_a_bias_before_a_norm_of_other_dimensions(channels, width):
    assert_equal(task_of(lambda: NormOfFeatures(channels, width), clients_of((channels, 2, width))))


def test_nothing_is_written_beyond_a_row():
    task = task_of(lambda: NormOfFeatures(16, 4, affine=False), clients_of((16, 2, 4)))
    flat, weights = initial_weights(task, 0)
    room = np.zeros((4, len(weights)), np.float32)
    batched(task, SGD, 0, flat)([Job(i, i, weights) for i in range(3)], room[:3])
    assert not room[3].any()


def zero() -> nn.Module:
    model = nn.Linear(4, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: F.cross_entropy(o, y) + 0.5 * o.mean(0).pow(2).sum(),
        lambda o, y: F.cross_entropy(o, y).sqrt(),
        lambda o, y: F.cross_entropy(o, y) + o.var(0, correction=0).sum(),
    ],
    ids=["balance", "root", "variance"],
)
def test_a_loss_of_the_whole_batch_is_noticed_where_all_rows_look_alike_at_first(loss):
    sgd = fb.LocalSGD(lr=0.5, steps=1, batch_size=32)
    assert "not the mean over its rows" in refused(zero, clients_of((4,), sizes=[20] * 30), loss, sgd)


class OverRows(nn.Module):
    """So many weights that the trial does with few trips, and statistics over rows."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.end = nn.Embedding(words, 32), nn.Linear(32, 3)
        self.norm = nn.BatchNorm1d(32, affine=False, track_running_stats=False)

    def forward(self, x):
        return self.end(self.norm(self.words(x).mean(1)))


def test_a_large_model_that_mixes_rows_is_noticed():
    words = 70_000
    sizes = (3, 4, 2, 4, 3, 2, 3)
    assert "mixes rows" in refused(lambda: OverRows(words), clients_of((5,), words=words, sizes=sizes))


def with_hook_on_parameters():
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    model[2].bias.register_hook(lambda g: g.clamp(-0.5, 0.5))
    return model


def with_hook_after_accumulation():
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    return model


def with_hook_on_dropout():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3))
    model[1].register_forward_hook(lambda m, i, o: o.clamp(-4, 4))
    return model


def with_hook_on_relu():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[1].register_forward_pre_hook(lambda m, i: None)
    return model


def with_forward_of_its_own():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    model[1].forward = lambda x: x.clamp(0, 6)
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (with_hook_on_parameters, "2: Linear has parameters with hooks"),
        (with_hook_after_accumulation, "0: Linear has parameters with hooks"),
        (with_hook_on_dropout, "1: Dropout has hooks"),
        (with_hook_on_relu, "1: ReLU has hooks"),
        (with_forward_of_its_own, "1: ReLU has a forward that was put into this one module"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_what_was_put_on_a_layer_is_not_lost(model, reason):
    assert refused(model).startswith(reason)


def test_hooks_for_all_modules_are_noticed():
    hook = register_module_forward_hook(lambda m, i, o: None)
    try:
        assert "hooks for all modules" in refused(lambda: nn.Linear(4, 3))
    finally:
        hook.remove()


class Regularised(nn.Module):
    """So little of a penalty that its absence would be within the trial's tolerance."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * (1 - 1e-6 * sum(p.pow(2).sum() for p in self.parameters()))


class LooksAtItself(nn.Module):
    """Where its parameters are, and how wide its layers, a model may ask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.end = nn.Embedding(20, 6), nn.Linear(6, 3)

    def forward(self, x):
        assert next(self.parameters()).device == x.device
        assert dict(self.named_parameters())["end.weight"].shape == (self.end.out_features, self.end.in_features)
        return self.end(self.words(x).mean(1)) / self.words.embedding_dim


def test_a_model_that_computes_with_its_own_parameters_is_noticed():
    assert "gave other updates" in refused(Regularised)


def test_a_model_may_look_at_its_own_layers():
    assert_equal(task_of(LooksAtItself, clients_of((5,), words=20)))


class Replaces(nn.Module):
    """A running mean in a buffer that is replaced, not changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.end(x - self.mean)


def test_a_buffer_that_is_replaced_does_not_live_on_in_other_trips():
    task = task_of(Replaces, clients_of((4,)))
    flat, weights = initial_weights(task, 0)
    train, _ = trainer(task, SGD, 0, flat)
    jobs = [Job(i, i, weights) for i in range(4)]
    first = train(jobs).copy()
    assert np.array_equal(train(jobs), first)
    assert np.array_equal(flat.constants()["mean"], np.zeros(4))


def run(task, **how):
    server = fb.Server(start=fb.refill(concurrency=10), buffer_size=5)
    return fb.simulate(server, task, client=SGD, until=fb.trips(400), workers=1, **how)


def test_a_model_that_is_given_and_not_made_stays_as_it_is():
    net, clients = nn.Linear(4, 3), clients_of((4,), sizes=[5] * 40)
    before = net.weight.detach().clone()
    first, again = (run(task_of(lambda: net, clients)) for _ in range(2))
    assert torch.equal(net.weight, before) and net.weight.grad is None
    assert np.array_equal(first.weights["weight"], again.weights["weight"])
    assert not np.array_equal(first.weights["weight"], before.numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_torch_s_default_dtype_is_not_the_kernels_business(dtype):
    """In a process of its own: it used to write beyond its memory."""
    code = f"""
import torch
from torch import nn
from test_batched import assert_equal, clients_of, task_of
torch.set_default_dtype(torch.{dtype})
def conv():
    layers = nn.Conv2d(8, 16, 3), nn.GroupNorm(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(256, 3)
    return nn.Sequential(*layers).float()
assert_equal(task_of(conv, clients_of((8, 6, 6))))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd="tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("between", [nn.Dropout(0.1), nn.Tanh()], ids=["dropout", "tanh"])
def test_what_a_linear_layer_says_may_be_changed_in_place(between):
    assert_equal(
        task_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), between, nn.Linear(8, 3)), clients_of((4,)))
    )


def test_labels_that_only_torch_knows_in_the_middle_of_a_run():
    clients = clients_of((4,), sizes=[3] * 200)
    clients[1][1][0] = -100
    task = task_of(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)), clients)
    found, expected = (run(task, training=Training(batched=batched)).weights for batched in (True, False))
    assert all(np.allclose(found[name], expected[name], rtol=1e-4, atol=1e-5) for name in expected)


class OverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.end = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.end(torch.tanh(self.a(x)).mean(1))


def test_clients_with_inputs_of_other_lengths_are_trained_too():
    clients = clients_of((5, 4), sizes=[3] * 8)
    for odd in (1, 4, 5):
        clients[odd] = clients_of((9, 4), sizes=[3], seed=odd)[0]
    expected, found = both_ways(task_of(OverTime, clients), SGD, trips=16, versions=3)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_frozen_weights_may_lie_in_any_order():
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(2, 8, 3)
            self.first.weight = nn.Parameter(self.first.weight.detach().contiguous(memory_format=torch.channels_last), False)
            self.end = nn.Linear(128, 3)

        def forward(self, x):
            return self.end(torch.tanh(self.first(x)).flatten(1))

    assert_equal(task_of(Turned, clients_of((2, 6, 6))))


def test_class_weights_survive_a_second_look_in_double_precision(monkeypatch):
    """As after a number that was the larger of two by a hair."""
    from fedbuff.learn import batched as module

    asked, agree = [], module._agree
    monkeypatch.setattr(module, "_agree", lambda *a: asked.append(1) or (len(asked) > 1 and agree(*a)))
    task = task_of(lambda: nn.Linear(4, 3), clients_of((4,)), nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0])))
    assert why_not(task, SGD, 3, initial_weights(task, 3)[0]) is None
    assert len(asked) == 3
