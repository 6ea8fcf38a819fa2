"""What a model, a loss or its data may hide from the trial of batched training: found by fuzzing, each once silently wrong."""

import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.module import register_module_forward_hook

import fedbuff as fb
from fedbuff.learn.batched import batched
from fedbuff.learn.local import Job, initial_weights, one_at_a_time
from fedbuff.learn.training import Training
from fedbuff.learn.trial import way_to_train, why_not
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
    train, _ = way_to_train(task, SGD, 0, flat)
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


@pytest.mark.skipif(platform.system() != "Linux" or platform.libc_ver()[0] != "glibc", reason="glibc on Linux")
def test_what_the_trial_takes_is_given_back_before_workers_are_forked():
    """In a process of its own, that trains: it keeps what is freed, and used to keep 27 times a model's weights."""
    code = """
import re
from pathlib import Path
from torch import nn
from fedbuff.learn.client import LocalSGD
from fedbuff.learn.local import initial_weights
from fedbuff.learn.training import Training
from fedbuff.learn.work import settle, trainer
from test_batched import clients_of, task_of
def resident():
    return 1024 * int(re.search("VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
settle()
layers = lambda: nn.Sequential(nn.Linear(256, 1000), nn.ReLU(), nn.Linear(1000, 2000), nn.ReLU(), nn.Linear(2000, 3))
task = task_of(layers, clients_of((256,)))
flat, weights = initial_weights(task, 0)
before = resident()
kept = trainer(task, LocalSGD(lr=0.1), 0, Training(), flat)
assert kept.note is None
print((resident() - before) / weights.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd="tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 8


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
    from fedbuff.learn import trial as module

    asked, agree = [], module._agree
    monkeypatch.setattr(module, "_agree", lambda *a: asked.append(1) or (len(asked) > 1 and agree(*a)))
    task = task_of(lambda: nn.Linear(4, 3), clients_of((4,)), nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0])))
    assert why_not(task, SGD, 3, initial_weights(task, 3)[0]) is None
    assert len(asked) == 3


# ── found by a tester once kernels' arrays lay in blocks, and clients' rows were joined before they were a tensor ─────────────


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.MaxPool2d(2))
        self.end = nn.Linear(4096, 3)

    def forward(self, x):
        x = self.first(x)
        x += 1
        return self.end(x.flatten(1))


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8192, 3)),
        AddsInPlace,
    ],
    ids=["relu", "added"],
)
def test_what_a_large_convolution_says_may_be_changed_in_place(model):
    """A few rows, as in the trial, are less than a block of memory; those of the run are more."""
    task = task_of(model, clients_of((3, 32, 32), sizes=[20] * 12))
    expected, found = both_ways(task, SGD, trips=12, versions=2)
    assert np.allclose(found, expected, rtol=1e-3, atol=1e-4)


class ScalesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(4, 3)

    def forward(self, x):
        return self.end(x.sub_(0.5).mul_(2))


def losses(task, **how) -> list[float]:
    server = fb.Server(start=fb.refill(12), buffer_size=4)
    run = fb.simulate(server, task, client=SGD, until=fb.trips(40), evaluate_every=10, workers=1, say=lambda _: None, **how)
    return [m["loss"] for m in run.metrics]


@pytest.mark.parametrize("batched", [True, False])
def test_a_model_that_changes_its_input_does_not_change_the_data(batched):
    clients = clients_of((4,), sizes=[9] * 24)
    tensors = [(torch.tensor(x), torch.tensor(y)) for x, y in clients]
    how = {"training": Training(batched=batched)}
    assert losses(task_of(ScalesItsInput, tensors), **how) == losses(task_of(ScalesItsInput, clients), **how)
    assert all(np.array_equal(x.numpy(), old) for (x, _), (old, _) in zip(tensors, clients, strict=True))


def test_tensors_that_want_a_gradient_are_data_too(tmp_path):
    clients = clients_of((4,), sizes=[9] * 24)
    wanting = [(torch.tensor(x, requires_grad=True), y) for x, y in clients]
    assert losses(task_of(lambda: nn.Linear(4, 3), wanting), out=tmp_path / "run") == losses(
        task_of(lambda: nn.Linear(4, 3), clients)
    )


class BytesOrFloats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(12, 3)

    def forward(self, x):
        return self.end(x if x.is_floating_point() else x / 255)


def test_clients_with_examples_of_another_type_are_not_joined_to_them():
    rng = np.random.default_rng(0)
    some = [(rng.integers(0, 256, (20, 12)).astype(np.uint8), rng.integers(0, 3, 20)) for _ in range(12)]
    others = [(rng.random((5, 12), np.float32), rng.integers(0, 3, 5)) for _ in range(12)]
    expected, found = both_ways(task_of(BytesOrFloats, some + others), SGD, trips=24, versions=3)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_integers_of_every_kind_are_indices():
    """Of unsigned and signed ones numpy makes floats."""
    rng = np.random.default_rng(0)
    kinds = [np.int64, np.uint64, np.int32, np.uint8]
    clients = [
        (rng.integers(0, 20, (9, 5)).astype(kinds[i % 4]), rng.integers(0, 3, 9).astype(kinds[i // 4 % 4])) for i in range(16)
    ]
    task = task_of(lambda: nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(30, 3)), clients)
    expected, found = both_ways(task, SGD, trips=24, versions=3)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6)


class SeldomNoisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(4, 3)

    def forward(self, x):
        noise = 0.1 * torch.randn_like(x) if self.training and torch.rand(()) < 0.001 else 0.0
        return self.end(x + noise)


def test_who_draws_random_numbers_is_noticed_even_if_nothing_comes_of_it():
    assert refused(SeldomNoisy) == "the model draws random numbers itself"


class MixesWhenEvaluated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(4, 3)

    def forward(self, x):
        return self.end(x if self.training else x - x.mean(0))


def test_rows_that_are_mixed_in_evaluation_only_are_evaluated_as_the_model_says():
    clients = clients_of((4,), sizes=[9] * 24)
    held_out = clients_of((4,), sizes=[600], seed=5)[0]
    task = fb.Task(MixesWhenEvaluated, F.cross_entropy, clients, held_out)
    assert losses(task) == pytest.approx(losses(task, training=Training(batched=False)), rel=1e-5)


def test_a_buffer_that_is_made_when_the_model_is_first_applied_is_taken_over():
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.end = nn.Linear(4, 3)

        def forward(self, x):
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.rand(4))
            return self.end(x * self.mask)

    task = task_of(Lazy, clients_of((4,), sizes=[9] * 24))
    one, other = (initial_weights(task, 0)[0] for _ in range(2))
    one.module(torch.ones(1, 4))
    other.hold(one.constants())
    assert torch.equal(one.module(torch.ones(1, 4)), other.module(torch.ones(1, 4)))
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # is the caller's own affair
        runs.append(losses(task))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_run_trains_whatever_its_caller_is_at(mode):
    task = task_of(lambda: nn.Linear(4, 3), clients_of((4,), sizes=[9] * 24))
    with mode():
        within = losses(task)
    assert within == losses(task)


def test_bfloat16_may_be_in_the_data_and_in_buffers_but_not_in_the_weights(tmp_path):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.end = nn.Linear(4, 3)
            self.register_buffer("scale", torch.ones(4, dtype=torch.bfloat16))

        def forward(self, x):
            return self.end(x * self.scale)

    clients = [(torch.tensor(x).bfloat16(), y) for x, y in clients_of((4,), sizes=[9] * 24)]
    assert np.isfinite(losses(task_of(Scaled, clients), out=tmp_path / "run")).all()
    with pytest.raises(ValueError, match="the model's weights are bfloat16"):
        losses(task_of(lambda: Scaled().bfloat16(), clients))


class Packed(nn.Module):
    """A recurrent layer over a packed sequence, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.end = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [6] * len(x), batch_first=True)
        return self.end(self.layer(packed)[1][0])


@pytest.mark.parametrize("together", [True, False])
def test_a_packed_sequence_is_trained_in_the_loop(together, capsys):
    task, server = task_of(Packed, clients_of((6, 4))), fb.Server(start=fb.refill(2), buffer_size=1)
    run = fb.simulate(server, task, client=SGD, until=fb.trips(6), training=fb.Training(batched=together), workers=1)
    assert run.summary["trips"] == 6
    assert ("one at a time" in capsys.readouterr().err) == together


class Careful(nn.Module):
    """One that changes what it does with all rows where one of them is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x if torch.isfinite(x).all() else 0.5 * x)


def with_a_bad_client():
    clients = clients_of((4,))
    clients[1][0][0, 0] = np.nan
    return clients


def test_a_client_whose_inputs_are_not_finite_is_no_reason_for_the_loop():
    task = task_of(lambda: nn.Linear(4, 3), with_a_bad_client())
    assert why_not(task, SGD, 3, initial_weights(task, 3)[0]) is None
    slow, fast = both_ways(task)
    sound = np.isfinite(slow).all(axis=1)
    assert 0 < sound.sum() < len(sound)
    assert np.isfinite(fast).all(axis=1).tolist() == sound.tolist()
    assert fast[sound] == pytest.approx(slow[sound], abs=1e-6)


def test_unless_it_changes_the_updates_of_others():
    assert "not finite changes the updates of those it is trained together with" in refused(Careful, with_a_bad_client())


@pytest.mark.parametrize(
    "loss", [lambda out, y: F.cross_entropy(out, y), lambda out, y: nn.NLLLoss()(out.log_softmax(1), y)], ids=["own", "nll"]
)
def test_labels_that_a_loss_of_ones_own_leaves_out_of_its_mean(loss):
    """The trial looks at 64 of 200 clients, and not at the one that has such labels."""
    clients = clients_of((4,)) * 40
    clients[2] = clients[2][0], clients[2][1].copy()
    clients[2][1][: len(clients[2][1]) // 2] = -100
    assert clients[2][1].min() < 0
    task = task_of(lambda: nn.Linear(4, 3), clients, loss)
    flat, weights = initial_weights(task, 0)
    train, why = way_to_train(task, SGD, 0, flat)
    assert why is None
    jobs = [Job(0, 0, weights), Job(1, 2, weights)]
    found = train(jobs).copy()
    flat.load(weights)
    assert found == pytest.approx(one_at_a_time(task, SGD, 0, flat)(jobs), rel=1e-4, abs=1e-6)


class Drawing(nn.Module):
    """Noise that torch's generator knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x + 0.1 * torch.tensor(np.random.normal(size=x.shape), dtype=x.dtype))


class Counting(nn.Module):
    """Each time it is asked it says something else."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times = nn.Linear(4, 3), 0

    def forward(self, x):
        self.times += 1
        return self.layer(x) * (1 + 0.01 * self.times)


@pytest.mark.parametrize("model", [Drawing, Counting])
def test_a_model_that_is_not_the_same_twice_is_said_to_be_so(model):
    assert "no two runs will be the same" in refused(model)


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_an_update_is_the_same_wherever_it_is_written(kernels, monkeypatch):
    """What torch's products round to depends on where their result lies, and a run that goes on has other rows for updates."""
    monkeypatch.setenv("FEDBUFF_KERNELS", kernels)

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 19), nn.Tanh(), nn.Linear(19, 3)).double()  # of an odd number of weights

    task = task_of(model, clients_of((8,), sizes=[13, 20, 27, 31] * 10))
    flat, weights = initial_weights(task, 0)
    rows, together = np.zeros((81, len(weights))), batched(task, SGD, 0, flat)
    for first in (0, 41):
        together.into(rows, range(first, first + 40), [Job(i, i, weights) for i in range(40)])
    assert np.array_equal(rows[:40], rows[41:])


class Normed(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.end = nn.Conv2d(3, 16, 3), nn.GroupNorm(16, 16, affine=trained), nn.Linear(16 * 64, 3)

    def forward(self, x):
        return self.end(torch.tanh(self.norm(self.conv(x))).flatten(1))


@pytest.mark.parametrize("trained", [True, False])
def test_a_norm_of_images_with_little_contrast_is_as_exact_as_the_loop(trained):
    clients = [(40 + x, y) for x, y in clients_of((3, 10, 10), sizes=[4] * 6)]
    expected, found = both_ways(task_of(lambda: Normed(trained), clients))
    exact, _ = both_ways(task_of(lambda: Normed(trained).double(), [(x.astype(np.float64), y) for x, y in clients]))
    errors = [np.linalg.norm(updates - exact) for updates in (found, expected)]
    assert errors[0] < 3 * errors[1]


class Squeezed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.end = nn.Linear(4, 1)

    def forward(self, x):
        return self.end(x).squeeze()


@pytest.mark.filterwarnings("ignore:Using a target size")  # of torch's, in the loop
@pytest.mark.parametrize("loss", [F.mse_loss, nn.MSELoss(), lambda o, y: (o - y).pow(2).mean()], ids=["known", "module", "own"])
def test_a_single_row_may_be_squeezed_to_a_number(loss):
    clients = [(x, y.astype(np.float32)) for x, y in clients_of((4,), sizes=[1, 5, 9, 3, 1, 2])]
    task = task_of(Squeezed, clients, loss)
    sgd = fb.LocalSGD(lr=0.05, epochs=2, batch_size=4)
    assert why_not(task, sgd, 3, initial_weights(task, 3)[0]) is None
    assert_equal(task, sgd)


def test_bfloat16_of_a_convolution_whose_input_is_shorter_than_its_stride():
    """Torch's own gradient of its weights reads what the memory held before."""

    def model() -> nn.Module:
        first, second = (nn.Conv1d(32, 32, 3, stride=2, padding=1) for _ in range(2))
        return nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(32, 3))

    task = task_of(model, clients_of((32, 2), sizes=[3, 5, 2, 4, 6, 1] * 4))
    flat, weights = initial_weights(task, 0)
    jobs = [Job(i, i, weights) for i in range(24)]
    exact = batched(task, SGD, 0, flat)(jobs)
    low = batched(task, SGD, 0, flat, precision="bfloat16")
    for _ in range(20):
        for size in np.random.default_rng(0).integers(16, 20_000, 30):
            torch.full((int(size),), torch.nan)
        assert np.linalg.norm(low(jobs) - exact) < 0.02 * np.linalg.norm(exact)


class PassesOver(nn.Module):
    """A model that has nothing to say of rows of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.end = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        seen = x.abs().sum(1) > 0
        h = x.new_zeros(len(x), 8)
        h[seen] = torch.tanh(self.first(x[seen]))
        return self.end(h)


def test_what_fails_in_the_middle_of_a_run_is_trained_one_at_a_time(capfd):
    clients = clients_of((4,), sizes=[5] * 200)
    clients[150][0][2] = 0  # no client of the trial
    runs = []
    for way in (True, False):
        server = fb.Server(start=fb.refill(20), buffer_size=5)
        task = fb.Task(model=PassesOver, loss=F.cross_entropy, clients=clients, evaluate=clients[0])
        runs.append(
            fb.simulate(server, task, client=SGD, until=fb.trips(1000), workers=1, training=Training(batched=way)).weights
        )
    for name, weights in runs[0].items():
        assert weights == pytest.approx(runs[1][name], rel=1e-3, abs=1e-5)
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "some trips are trained one at a time, which is slower: together it failed with ValueError" in said[0]


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.end = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        self.lstm.flatten_parameters()
        return self.end(self.lstm(x)[0][:, -1])


def test_a_model_may_flatten_the_parameters_of_its_lstm():
    task = task_of(Flattened, clients_of((5, 4)))
    assert why_not(task, SGD, 3, initial_weights(task, 3)[0]) is None
    assert_equal(task)


class Marked(nn.Module):
    """A word that sets the state that a recurrent layer starts from; it stands in a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.last = nn.Embedding(20, 5), nn.GRU(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        start = torch.zeros(1, len(x), 4)
        start[:, x[:, 0] == 19] = 1.0
        return self.last(self.layer(self.words(x), start)[0][:, -1])


def test_a_row_like_no_other_is_evaluated_by_the_model_itself():
    clients = clients_of((6,), words=19)
    x, y = clients_of((6,), words=19, sizes=[40])[0]
    x[30, 0] = 19
    task = fb.Task(model=Marked, loss=F.cross_entropy, clients=clients, evaluate=(x, y))
    server, until = fb.Server(start=fb.refill(4), buffer_size=2), fb.trips(20)
    batches, loop = (
        fb.simulate(server, task, client=SGD, until=until, training=Training(batched=together)) for together in (True, False)
    )
    assert [m["loss"] for m in batches.metrics] == pytest.approx([m["loss"] for m in loop.metrics], rel=1e-5)
