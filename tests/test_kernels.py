"""Each kernel gives what torch gives, and they are compiled, cached and done without as promised."""

import ctypes
import multiprocessing
import platform
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from fedbuff import compiled
from fedbuff.compiled import built
from fedbuff.learn import kernels
from fedbuff.learn.kernels import Norm, Shape, channels_last

COMPILED = kernels.library()
needs_compiler = pytest.mark.skipif(COMPILED is None, reason="no C++ compiler")
RANGES = [(0, 2), (2, 3), (3, 7)]
PLACES, OTHERS = [4, 0, 3], [1, 2]  # which of five rows are whose

torch.set_num_threads(1)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-6) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1))


# ── convolution ──────────────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def convolutions(draw, stride=st.integers(1, 3)):
    """Sizes, stride, padding and dilation of a convolution that fits its input, and a seed."""
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = tuple(draw(st.integers(0, d * (k - 1))) for k, d in zip(kernel, dilation, strict=True))
    smallest = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    size = tuple(draw(st.integers(s, s + 9)) for s in smallest)
    channels = draw(st.sampled_from([1, 3, 7, 8, 14])), draw(st.sampled_from([8, 16, 24, 32]))
    return size, kernel, (draw(stride), draw(stride)), padding, dilation, channels, draw(st.integers(0, 99))


def rounded(low: bool, *values: torch.Tensor) -> list[torch.Tensor]:
    """What products see of these numbers."""
    return [value.bfloat16().float() if low else value for value in values]


def made(convolution, low=False):
    (h, w), kernel, stride, padding, dilation, (c, oc), seed = convolution
    torch.manual_seed(seed)
    x, weights, bias = torch.randn(7, c, h, w), torch.randn(3, oc, c, *kernel), torch.randn(3, oc)
    a, b = rounded(low, x, weights)
    outputs = [F.conv2d(a[i:j], b[g], bias[g], stride, padding, dilation) for g, (i, j) in enumerate(RANGES)]
    expected = torch.cat(outputs)
    shape = Shape(h, w, c, *expected.shape[2:], oc, *kernel, *stride, *padding, *dilation)
    how = list(stride), list(padding), list(dilation), False, [0, 0], 1
    return x, weights, bias, expected, shape, how


@needs_compiler
@settings(max_examples=40)
@given(convolutions(), st.booleans())
def test_convolution_with_weights_of_each_group(convolution, low):
    x, weights, bias, expected, shape, _ = made(convolution, low)
    assert close(kernels.convolve(COMPILED, channels_last(x), weights, bias, RANGES, shape, low=low), expected, 5e-6)


@needs_compiler
@settings(max_examples=40)
@given(convolutions(), st.booleans())
def test_gradients_of_weights_of_each_client(convolution, low):
    x, weights, _, output, shape, how = made(convolution)
    dy = torch.randn_like(output)
    found = torch.randn(5, weights[0].numel() + 5)  # some rows of a wider matrix, as among the updates of all trips
    before = found.clone()
    into = found[:, 2:-3].view(-1, *weights.shape[1:])
    a, b = rounded(low, dy, x)
    expected = torch.stack(
        [
            torch.ops.aten.convolution_backward(a[i:j], b[i:j], weights[0], None, *how, [False, True, False])[1]
            for i, j in RANGES
        ]
    )
    for beta, times in ((0, 1), (1, 2)):
        where = kernels.Into(into, kernels.numbers(PLACES), beta)
        kernels.convolution_weights(COMPILED, channels_last(x), channels_last(dy), where, RANGES, shape, low)
        assert close(into[PLACES], times * expected, 5e-6)
    assert torch.equal(found[OTHERS], before[OTHERS])
    assert torch.equal(found[:, :2], before[:, :2])
    assert torch.equal(found[:, -3:], before[:, -3:])


@needs_compiler
@settings(max_examples=40)
@given(convolutions(stride=st.just(1)), st.booleans())
def test_gradient_of_the_input_is_a_convolution_turned_round(convolution, low):
    _, weights, _, output, s, how = made(convolution)
    weights = torch.randn(3, s.oc, 8, s.kh, s.kw)  # as many input channels as outputs of the turned one: a multiple of 8
    x, dy = torch.randn(7, 8, s.h, s.w), torch.randn_like(output)
    a, b = rounded(low, dy, weights)
    expected = torch.cat(
        [
            torch.ops.aten.convolution_backward(a[i:j], x[i:j], b[g], None, *how, [True, False, False])[0]
            for g, (i, j) in enumerate(RANGES)
        ]
    )
    padding = s.dh * (s.kh - 1) - s.ph, s.dw * (s.kw - 1) - s.pw
    turned = Shape(s.oh, s.ow, s.oc, s.h, s.w, 8, s.kh, s.kw, 1, 1, *padding, s.dh, s.dw)
    found = kernels.convolve(COMPILED, channels_last(dy), weights, None, RANGES, turned, flipped=True, low=low)
    assert close(found, expected, 5e-6)


# ── norm, ReLU, pool ─────────────────────────────────────────────────────────────────────────────────────────────────


def by_torch(x, gamma, beta, groups, eps, pool):
    parts = []
    for g, (i, j) in enumerate(RANGES):
        y = F.relu(F.group_norm(x[i:j], groups, None if gamma is None else gamma[g], None if beta is None else beta[g], eps))
        parts.append(F.max_pool2d(y, 2) if pool == 2 else y)
    return torch.cat(parts)


@needs_compiler
@settings(max_examples=40)
@given(
    st.integers(2, 9), st.integers(2, 9), st.sampled_from([(8, 8), (8, 1), (16, 4), (24, 3)]), st.booleans(),
    st.sampled_from([1, 2]), st.integers(0, 99),
)  # fmt: skip
def test_norm_relu_and_pool(h, w, channels, affine, pool, seed):
    c, groups = channels
    torch.manual_seed(seed)
    x = (torch.randn(7, c, h, w) * 3 + 2).requires_grad_()
    gamma, beta = (torch.randn(3, c, requires_grad=True) for _ in range(2)) if affine else (None, None)
    norm = Norm(h, w, c, groups, 1e-5)
    expected = by_torch(x, gamma, beta, groups, 1e-5, pool)
    dy = torch.randn_like(expected)
    expected.backward(dy)
    with torch.no_grad():
        image = channels_last(x.detach())
        y, *saved = kernels.norm_pool(COMPILED, image, gamma, beta, RANGES, norm, pool)
        dx, dgamma, dbeta, dsum = kernels.norm_pool_back(
            COMPILED, image, channels_last(dy), tuple(saved), gamma, RANGES, norm, pool
        )
        assert close(y, expected, 5e-6)
        assert close(dx, x.grad, 2e-5)
        assert close(dsum, dx.sum((2, 3)), 2e-5)
        if affine:
            assert close(torch.stack([dgamma[i:j].sum(0) for i, j in RANGES]), gamma.grad, 2e-5)
            assert close(torch.stack([dbeta[i:j].sum(0) for i, j in RANGES]), beta.grad, 2e-5)


@needs_compiler
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_comes_through_the_pool(odd):
    x = torch.randn(7, 8, 4, 4)
    x[3, 2, 1, 1] = odd
    y, *_ = kernels.norm_pool(COMPILED, channels_last(x), None, None, RANGES, Norm(4, 4, 8, 8, 1e-5), 2)
    bad = ~torch.isfinite(by_torch(x, None, None, 8, 1e-5, 2))
    assert bad[3, 2].all()
    assert torch.equal(~torch.isfinite(y), bad)


# ── products, sums, masks ────────────────────────────────────────────────────────────────────────────────────────────


@needs_compiler
@settings(max_examples=40)
@given(st.integers(1, 20), st.one_of(st.integers(1, 40), st.just(100)), st.sampled_from([0, 1]), st.booleans())
def test_outer_products_and_sums_of_clients(k, columns, beta, low):
    torch.manual_seed(k)
    a, b = torch.randn(7, k), torch.randn(7, columns)
    room, sums = torch.randn(5, k * columns + 4), torch.randn(5, columns + 2)
    into, to = room[:, 1:-3].view(-1, k, columns), sums[:, 1:-1]
    p, q = rounded(low and columns >= 8, a, b)  # few columns are not worth it
    expected = torch.stack([p[i:j].t() @ q[i:j] for i, j in RANGES]) + beta * into[PLACES]
    expected_sums = torch.stack([b[i:j].sum(0) for i, j in RANGES]) + beta * to[PLACES]
    others = lambda: [room[:, 0], room[:, -3:], room[OTHERS], sums[:, 0], sums[:, -1], sums[OTHERS]]  # noqa: E731
    before = [part.clone() for part in others()]
    places = kernels.numbers(PLACES)
    kernels.outer_products(COMPILED, a, b, kernels.Into(into, places, beta), RANGES, low)
    kernels.client_sums(COMPILED, b, kernels.Into(to, places, beta), RANGES)
    assert close(into[PLACES], expected)
    assert close(to[PLACES], expected_sums)
    assert all(torch.equal(e, f) for e, f in zip(before, others(), strict=True))


@needs_compiler
@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
def test_masks_are_those_of_torch(keep):
    """Across refills of the generator, in turn for each client, and with time first."""
    seeds, ranges = [5, (1 << 62) + 3, 77], [(0, 2), (2, 3), (3, 6)]
    generators = [torch.Generator().manual_seed(s) for s in seeds]
    twisters = kernels.Twisters(COMPILED, seeds)
    for time_first in (False, True, False):
        like = torch.empty(6, 9, 11)
        whose = [2, 0, 1]
        found = twisters.draw(like, keep, whose, ranges, time_first)
        for (i, j), client in zip(ranges, whose, strict=True):
            shape = (9, j - i, 11) if time_first else (j - i, 9, 11)
            expected = torch.empty(shape).bernoulli_(keep, generator=generators[client]) / keep
            assert close(found[i:j], expected.transpose(0, 1) if time_first else expected, 1e-7)


# ── LSTM ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@needs_compiler
@settings(max_examples=20)
@given(st.integers(1, 15).map(lambda n: 2 * n), st.integers(1, 6), *4 * [st.booleans()])
def test_lstm(hidden, time, backwards, time_first, bias, low):
    """Against torch's own in double precision, whose float32 is less accurate than ours."""
    rough = 2e3 if low else 1  # times less exact: gradients are rounded to bfloat16 on their way back

    def seen(values):
        return values + (values.bfloat16().double() - values).detach() if low else values

    torch.manual_seed(hidden)
    x, w_in = torch.randn(7, time, 5), torch.randn(3, 4 * hidden, 5)
    w, b = torch.randn(3, 4 * hidden, hidden), torch.randn(3, 4 * hidden)
    h, gates, c, tanh_c = kernels.lstm(COMPILED, x, w_in, w, b if bias else None, RANGES, backwards, time_first, low)
    dh, dc = torch.randn(7, time, hidden), torch.randn(7, hidden)
    kernels.lstm_back(COMPILED, gates, w, c, tanh_c, dh, dc.clone(), RANGES, backwards, low)  # now gates are gradients
    of_input, of_state = torch.randn(5, 4 * hidden, 5), torch.randn(5, 4 * hidden, hidden)
    for into, saw, before, beta in ((of_input, x, False, 0), (of_state, h, True, 0), (of_state, h, True, 1)):
        where = kernels.Into(into, kernels.numbers(PLACES), beta)
        kernels.lstm_weights(COMPILED, gates, saw, where, RANGES, backwards, before, low)
    for g, (i, j) in enumerate(RANGES):
        wg_in, wg = w_in[g].double().requires_grad_(), w[g].double().requires_grad_()
        z = seen(x[i:j].double()) @ seen(wg_in).t()
        z.retain_grad()
        state, cell, outputs = torch.zeros(j - i, hidden).double(), torch.zeros(j - i, hidden).double(), {}
        for t in reversed(range(time)) if backwards else range(time):
            part = z[:, t] + seen(state) @ seen(wg).t() + (b[g].double() if bias else 0)
            a, f, u, o = part.chunk(4, 1)
            cell = f.sigmoid() * cell + a.sigmoid() * u.tanh()
            state = o.sigmoid() * cell.tanh()
            outputs[t] = state
        out = torch.stack([outputs[t] for t in range(time)], 1)
        torch.autograd.backward([out, cell], [dh[i:j].double(), dc[i:j].double()])
        assert close(h[i:j], out.detach().float(), 2e-6 * rough)
        assert close(gates[i:j], z.grad.float(), 1e-5 * rough)
        assert close(of_input[PLACES[g]], wg_in.grad.float(), 1e-5 * rough)
        assert close(of_state[PLACES[g]], 2 * wg.grad.float(), 1e-5 * rough)  # written once, added once


@needs_compiler
@pytest.mark.parametrize("features", [1, 8, 31, 32, 33, 100])
def test_an_lstm_of_one_step_sees_its_inputs_as_bfloat16(features):
    torch.manual_seed(features)
    x, w = torch.randn(7, 1, features), torch.randn(1, 4 * 6, features)
    _, gates, c, _ = kernels.lstm(COMPILED, x, w, torch.zeros(1, 4 * 6, 6), None, [(0, 7)], False, False, low=True)
    a, b = rounded(True, x[:, 0], w[0])
    i, _f, u, o = (a.double() @ b.double().t()).chunk(4, 1)
    assert close(c[:, 0], (i.sigmoid() * u.tanh()).float())
    assert close(gates[:, 0, 3 * 6 :], o.sigmoid().float())


@needs_compiler
@settings(max_examples=30)
@given(st.integers(1, 15).map(lambda n: 2 * n), st.integers(1, 5), st.integers(8, 40), st.booleans())
def test_gradients_of_an_lstms_weights_are_of_bfloat16(hidden, time, features, backwards):
    torch.manual_seed(hidden)
    dgates, x, into = torch.randn(7, time, 4 * hidden), torch.randn(7, time, features), torch.zeros(3, 4 * hidden, features)
    where = kernels.Into(into, kernels.numbers([0, 1, 2]), 0)
    kernels.lstm_weights(COMPILED, dgates, x, where, RANGES, backwards, before=False, low=True)
    a, b = rounded(True, dgates, x)
    for g, (i, j) in enumerate(RANGES):
        assert close(into[g], torch.einsum("rtg,rtf->gf", a[i:j], b[i:j]), 5e-6)


@needs_compiler
@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 70), st.booleans(), st.booleans(), st.booleans())
def test_linear_layers_of_bfloat16(inputs, outputs, transposed, bias, shared):
    torch.manual_seed(inputs)
    x, b = torch.randn(7, inputs), torch.randn(3, outputs) if bias else None
    w = torch.randn(3, inputs, outputs).transpose(1, 2) if transposed else torch.randn(3, outputs, inputs)
    if shared:
        w = w[:1].expand(3, -1, -1)
    found = kernels.low_linear(COMPILED, x, w, b, RANGES)
    p, q = rounded(True, x, w)
    for g, (i, j) in enumerate(RANGES):
        assert close(found[i:j], p[i:j] @ q[g].t() + (0 if b is None else b[g]), 5e-6)


@needs_compiler
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3.4e38])
def test_what_is_not_finite_stays_so_in_bfloat16(value):
    """The largest float32 is nearer to infinity than to any bfloat16."""
    a, b, into = torch.ones(3, 33), torch.ones(3, 33), torch.zeros(1, 33, 33)
    a[1, 32] = a[2, 4] = value
    kernels.outer_products(COMPILED, a, b, kernels.Into(into, kernels.numbers([0]), 0), [(0, 3)], low=True)
    wrong = ~torch.isfinite(into[0]).all(1)
    assert wrong.nonzero()[:, 0].tolist() == [4, 32]


@needs_compiler
def test_halves_between_two_bfloat16_go_to_the_even_one():
    odd, even = 1 + 2**-7, 1.0  # neighbours
    a = torch.tensor([even + 2**-8, odd + 2**-8, even + 2**-8 + 2**-20, -even - 2**-8] * 10)[None]
    into = torch.zeros(1, 40, 40)
    kernels.outer_products(COMPILED, a, torch.ones(1, 40), kernels.Into(into, kernels.numbers([0]), 0), [(0, 1)], low=True)
    assert into[0, :, 0].tolist() == [even, odd + 2**-7, odd, -even] * 10 == rounded(True, a)[0][0].tolist()


@needs_compiler
def test_exponentials_at_the_edges():
    """Gates far out, infinite, or no number at all."""
    values = torch.tensor([-200.0, -90, -87.4, -1e-7, 0, 1e-7, 0.6, 0.65, 40, 88.8, 200, torch.inf, -torch.inf, torch.nan])
    hidden = len(values)
    x, w = torch.zeros(1, 1, 1), torch.zeros(1, 4 * hidden, hidden)
    _, gates, *_ = kernels.lstm(COMPILED, x, w[:, :, :1].contiguous(), w, values.repeat(4)[None], [(0, 1)], False, False)
    for q, exact in enumerate((torch.sigmoid, torch.sigmoid, torch.tanh, torch.sigmoid)):
        found, expected = gates[0, 0, q * hidden : (q + 1) * hidden], exact(values.double()).float()
        assert torch.allclose(found, expected, rtol=3e-7, atol=1e-37, equal_nan=True), (exact, found, expected)


# ── compiling ────────────────────────────────────────────────────────────────────────────────────────────────────────


def fake_compiler(folder: Path, says: str = "1.0", fails: bool = False) -> Path:
    """A compiler that notes when it is called and writes what it was given."""
    path = folder / "c++"
    body = "echo broken >&2; exit 1" if fails else 'for last; do :; done; echo called >> "$0.log"; echo library > "$last"'
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo {says}; exit; fi\n{body}\n')
    path.chmod(0o755)
    return path


def test_compiled_once_for_a_source_a_compiler_and_a_processor(tmp_path, monkeypatch, capsys):
    compiler = fake_compiler(tmp_path)
    first = built(kernels.SOURCE, kernels.FLAGS, [str(compiler)], tmp_path / "cache")
    assert "compiling kernels for" in capsys.readouterr().err
    assert built(kernels.SOURCE, kernels.FLAGS, [str(compiler)], tmp_path / "cache") == first
    assert capsys.readouterr().err == ""
    fake_compiler(tmp_path, says="2.0")
    assert built(kernels.SOURCE, kernels.FLAGS, [str(compiler)], tmp_path / "cache") != first
    monkeypatch.setattr(compiled, "processor_flags", lambda: "another")
    assert len({built(kernels.SOURCE, kernels.FLAGS, [str(compiler)], tmp_path / "cache"), first}) == 2
    assert (tmp_path / "c++.log").read_text().split() == ["called"] * 3
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".so", ".sha256"}  # nothing half done is left


@pytest.mark.parametrize("damage", [b"", b"libra", b"library?"])
def test_a_damaged_library_is_compiled_anew(damage, tmp_path):
    compiler = fake_compiler(tmp_path)
    path = built(kernels.SOURCE, kernels.FLAGS, [str(compiler)], tmp_path / "cache")
    path.write_bytes(damage)
    assert built(kernels.SOURCE, kernels.FLAGS, [str(compiler)], tmp_path / "cache") == path
    assert path.read_text() == "library\n"


def test_the_compiler_may_come_with_arguments(tmp_path, monkeypatch):
    compiler = fake_compiler(tmp_path)
    monkeypatch.setenv("CXX", f"{compiler} -O1")
    assert compiled.find_compiler() == [str(compiler), "-O1"]


def test_a_folder_is_compiled_anew_when_one_of_its_files_changes(tmp_path):
    compiler, source = fake_compiler(tmp_path), tmp_path / "source"
    source.mkdir()
    (source / "a.cpp").write_text('#include "b.h"')
    (source / "b.h").write_text("int b = 1;")
    first = built(source, (), [str(compiler)], tmp_path / "cache")
    assert built(source, (), [str(compiler)], tmp_path / "cache") == first
    (source / "b.h").write_text("int b = 2;")
    assert built(source, (), [str(compiler)], tmp_path / "cache") != first


def test_processes_may_race(tmp_path):
    compiler = fake_compiler(tmp_path)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.starmap(built, [(kernels.SOURCE, kernels.FLAGS, [str(compiler)], tmp_path / "cache")] * 4)
    assert len(set(paths)) == 1
    assert paths[0].read_text() == "library\n"


@pytest.fixture
def anew():
    kernels.library.cache_clear()
    yield
    kernels.library.cache_clear()


def test_no_compiler_or_a_broken_one_is_said_once(tmp_path, monkeypatch, capsys, anew):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert kernels.library() is None
    assert kernels.library() is None
    assert capsys.readouterr().err.count("found no C++ compiler") == 1
    kernels.library.cache_clear()
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, fails=True)))
    monkeypatch.setenv("FEDBUFF_CACHE", str(tmp_path / "cache"))
    assert kernels.library() is None
    assert "could not compile kernels, training goes through torch: broken" in capsys.readouterr().err


def test_kernels_can_be_switched_off(monkeypatch, anew):
    monkeypatch.setenv("FEDBUFF_KERNELS", "off")
    assert kernels.library() is None


def test_the_cache_is_where_it_belongs(monkeypatch):
    monkeypatch.delenv("FEDBUFF_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert compiled.cache_folder() == Path("/there/fedbuff")
    monkeypatch.setenv("FEDBUFF_CACHE", "/here")
    assert compiled.cache_folder() == Path("/here")


@needs_compiler
def test_vectors_of_eight_and_of_sixteen_give_the_same_bits():
    if platform.machine() != "x86_64":
        pytest.skip("only x86 has both")
    narrow = compiled.load(kernels.SOURCE, (*kernels.FLAGS, "-mno-avx512f"), kernels._FUNCTIONS, "")
    torch.manual_seed(0)
    for outputs, inputs, size, k, stride, padding, dilation in [
        (32, 3, 32, 3, 1, 2, 1), (24, 5, 9, 3, 2, 1, 1), (8, 32, 7, 3, 1, 1, 2), (40, 16, 8, 5, 1, 2, 1),
        (48, 1, 6, 1, 1, 0, 1),
    ]:  # fmt: skip
        out = (size + 2 * padding - dilation * (k - 1) - 1) // stride + 1
        shape = Shape(size, size, inputs, out, out, outputs, k, k, stride, stride, padding, padding, dilation, dilation)
        x, w, b = torch.randn(7, inputs, size, size), torch.randn(2, outputs, inputs, k, k), torch.randn(2, outputs)
        x = kernels.channels_last(x)
        y, other = (kernels.convolve(lib, x, w, b, [(0, 3), (3, 7)], shape) for lib in (COMPILED, narrow))
        assert torch.equal(y, other)
        gradients = torch.empty(2, 3, outputs, inputs, k, k)
        for lib, rows in zip((COMPILED, narrow), gradients, strict=True):
            into = kernels.Into(rows, kernels.numbers([2, 0, 1]), 0)
            kernels.convolution_weights(lib, x, y, into, [(0, 1), (1, 5), (5, 7)], shape)
        assert torch.equal(*gradients)
    for hidden, features in [(100, 50), (10, 7), (36, 100)]:
        w = [torch.randn(2, 4 * hidden, n) / 10 for n in (features, hidden)]
        x, b, groups = torch.randn(9, 5, features), torch.randn(2, 4 * hidden), [(0, 4), (4, 9)]
        found, other = (kernels.lstm(lib, x, *w, b, groups, False, False) for lib in (COMPILED, narrow))
        assert all(map(torch.equal, found, other))
        dh, gradients = torch.randn(9, 5, hidden), torch.zeros(2, 2, 4 * hidden, hidden)
        for lib, (h, gates, c, tanh_c), rows in zip((COMPILED, narrow), (found, other), gradients, strict=True):
            kernels.lstm_back(lib, gates, w[1], c, tanh_c, dh, torch.zeros(9, hidden), groups, False)
            kernels.lstm_weights(lib, gates, h, kernels.Into(rows, kernels.numbers([1, 0]), 0), groups, False, True)
        assert torch.equal(found[1], other[1])
        assert torch.equal(*gradients)
    for k, columns in [(13, 9), (40, 100), (70, 103), (7, 5), (33, 16), (8, 8)]:
        a, b, products = torch.randn(30, k), torch.randn(30, columns), torch.zeros(2, 2, k, columns)
        for lib, rows in zip((COMPILED, narrow), products, strict=True):
            kernels.outer_products(lib, a, b, kernels.Into(rows, kernels.numbers([1, 0]), 1), [(0, 11), (11, 30)])
        assert torch.equal(*products)
        for lib, rows in zip((COMPILED, narrow), products, strict=True):  # without instructions for it, bfloat16 takes longer
            kernels.outer_products(lib, a, b, kernels.Into(rows, kernels.numbers([1, 0]), 0), [(0, 11), (11, 30)], low=True)
        assert close(*products)


def test_other_tensors_are_not_for_the_kernels():
    assert kernels.usable(torch.zeros(1, dtype=torch.float64)) is None
    assert (kernels.usable(torch.zeros(1)) is None) == (COMPILED is None)


def test_tuning_the_allocator_does_no_harm():
    kernels.tune_allocator()
    assert float(torch.ones(1 << 20).sum()) == 1 << 20
    assert ctypes.sizeof(Shape) == 14 * 8
    assert np.isfinite(Norm(1, 1, 8, 8, 1e-5).eps)
