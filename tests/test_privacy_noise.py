"""Noise streams: the right covariance, whatever the optimizer; the same bytes after a kill; nothing drawn twice."""

import itertools
import json
import math
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbuff.compiled.normals import normals, slow_normals
from fedbuff.compiled.toeplitz import filtered, slow_filtered
from fedbuff.core.aggregate import Aggregation
from fedbuff.core.optimizers import adam, delay_adaptive, momentum, sgd
from fedbuff.core.staleness import polynomial
from fedbuff.privacy import noise, sensitivity
from fedbuff.privacy.plan import MECHANISMS, Plan

KEY = bytes(range(32))
DRAWS = 100_000
T = 16


def planned(mechanism, horizon=T, **changes):
    fixed = {"clip": 0.5, "noise_multiplier": 3.0, "buffer_size": 4, "delta": 1e-7, "max_participations": 1}
    return Plan(**{"mechanism": mechanism, "horizon": horizon, **fixed, **changes})


# ── what the covariance should be, made without the streams ──────────────────────────────────────────────────────────


def nodes(leaves):
    """Every completed node over so many leaves, as (first leaf, one after the last)."""
    spans = [(i << h, (i + 1) << h) for h in range(leaves.bit_length()) for i in range(leaves >> h)]
    return {span: n for n, span in enumerate(spans)}


def incidence(leaves):
    """Rows are completed nodes, columns are leaves."""
    return np.array([[float(first <= leaf < last) for leaf in range(leaves)] for first, last in nodes(leaves)])


def in_binary(t):
    """The nodes that make up the first t leaves: one for each one of t in binary."""
    first, spans = 0, []
    for h in reversed(range(t.bit_length())):
        if t >> h & 1:
            spans.append((first, first + (1 << h)))
            first += 1 << h
    return spans


def tree_prefix_noise(steps):
    """What each node adds to the noise of each prefix sum: GetSum of the paper."""
    number, out = nodes(steps), np.zeros((steps, len(nodes(steps))))
    for t in range(1, steps + 1):
        out[t - 1, [number[span] for span in in_binary(t)]] = 1.0
    return out


def honaker_prefix_noise(steps):
    """The same nodes, each estimated by least squares from all the nodes below it: the best that is unbiased."""
    number, out = nodes(steps), np.zeros((steps, len(nodes(steps))))
    for t in range(1, steps + 1):
        for first, last in in_binary(t):
            below = [n for (a, b), n in number.items() if first <= a and b <= last]
            observed = incidence(steps)[below, first:last]
            out[t - 1, below] = np.ones(last - first) @ np.linalg.pinv(observed)
    return out


def strategy(mechanism, steps, horizon=None):
    """C, from the definition: the increments' noise is C⁻¹ z. Honaker's is not of that form, and has no square C."""
    if mechanism == "gaussian":
        return np.eye(steps)
    if mechanism == "tree":  # the node that enters the prefix sum at t covers its last lowbit(t) leaves
        return np.array([[float(t - (t & -t) <= leaf < t) for leaf in range(steps)] for t in range(1, steps + 1)])
    decay, weight = sensitivity.constants(horizon or steps)
    c = [1.0] + [sum(w * d**i for d, w in zip(decay, weight, strict=True)) for i in range(steps - 1)]
    return np.array([[c[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])


def increments_covariance(mechanism, steps):
    if mechanism == "tree-honaker":
        prefix = honaker_prefix_noise(steps)
        rows = np.diff(prefix, axis=0, prepend=0.0)
        return rows @ rows.T
    inverse = np.linalg.inv(strategy(mechanism, steps))
    return inverse @ inverse.T


def assert_covariance(samples, expected):
    """Of rows of many draws, each entry within six of its standard deviations."""
    draws = samples.shape[1]
    found = samples @ samples.T / draws
    deviation = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / draws)
    worst = np.max(np.abs(found - expected) / deviation)
    assert worst < 6.0, f"{worst:.1f} standard deviations off"


class Recording:
    """An optimizer that notes the mean updates that reach it."""

    def __init__(self, optimizer):
        self.optimizer, self.updates = optimizer, []

    def init(self, weights):
        return self.optimizer.init(weights)

    def step(self, weights, update, state, staleness):
        self.updates.append(update)
        return self.optimizer.step(weights, update, state, staleness)


def released(plan, optimizer, dimension, seeded=False):
    """The weights after each server step of updates that are all zero, on the real path."""
    stream = plan.stream(dimension, 1 if seeded else KEY, seeded)
    aggregation = Aggregation(np.zeros(dimension), optimizer)
    weights, zeros = [], np.zeros(dimension)
    for step in range(plan.horizon):
        for tau in range(plan.buffer_size):
            aggregation.add(zeros, plan.factor(zeros, polynomial(0.5)(tau)))
        weights.append(aggregation.step(3, noise=stream.increment(step)))
    return np.array(weights)


OPTIMIZERS = {
    "sgd": sgd(0.7),
    "momentum": momentum(0.7, 0.9),
    "adam": adam(0.01),
    "amsgrad": adam(0.01, amsgrad=True),
    "delay_adaptive": delay_adaptive(sgd(0.7), threshold=1),
}


# ── covariance ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seeded", [False, True])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_increments_have_the_covariance_of_the_strategy(mechanism, seeded):
    plan = planned(mechanism)
    stream = plan.stream(DRAWS, 7 if seeded else KEY, seeded)
    samples = np.array([stream.increment(step) for step in range(T)]) / (plan.noise_multiplier * plan.clip)
    assert_covariance(samples, increments_covariance(mechanism, T))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_every_optimizer_is_given_that_noise_divided_by_k_once(mechanism, optimizer):
    plan, recording = planned(mechanism, horizon=8), Recording(OPTIMIZERS[optimizer])
    released(plan, recording, DRAWS)
    unit = plan.noise_multiplier * plan.clip / plan.buffer_size
    assert_covariance(np.array(recording.updates) / unit, increments_covariance(mechanism, 8))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_weights_have_the_noise_of_prefix_sums_and_with_momentum_of_their_sums(mechanism):
    plan, unit = planned(mechanism), 0.7 * 3.0 * 0.5 / 4
    sums = np.tril(np.ones((T, T)))
    beta_sums = sums @ np.array([[0.9 ** (i - j) if i >= j else 0.0 for j in range(T)] for i in range(T)])
    for optimizer, response in ((sgd(0.7), sums), (momentum(0.7, 0.9), beta_sums)):
        expected = response @ increments_covariance(mechanism, T) @ response.T
        assert_covariance(released(plan, optimizer, DRAWS) / unit, expected)


def test_momentum_on_increments_is_dp_ftrlm():
    """Of Kairouz et al., v ← β v + (S_t + n_t), θ = θ_0 − η v / K, with n_t summed up from the tree's nodes themselves."""
    plan, d, eta, beta = planned("tree", horizon=100), 5, 0.3, 0.9
    rng = np.random.default_rng(0)
    updates = rng.normal(0, 0.1, (100, d))
    draw, scale = noise.secure(KEY, d), plan.noise_multiplier * plan.clip
    stream, aggregation = plan.stream(d, KEY), Aggregation(np.zeros(d), momentum(eta, beta))
    v, total = np.zeros(d), np.zeros(d)
    for step in range(100):
        for update in (updates[step], *[np.zeros(d)] * 3):
            aggregation.add(update, 1.0)
        weights = aggregation.step(0, noise=stream.increment(step))
        total += updates[step]
        spans = [((b - a).bit_length() - 1, a // (b - a)) for a, b in in_binary(step + 1)]
        v = beta * v + total + scale * sum(draw(0, level, index) for level, index in spans)
        np.testing.assert_allclose(weights, -eta * v / 4, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("completion", [False, True])
@pytest.mark.parametrize("mechanism", ["tree", "tree-honaker", "blt"])
def test_after_a_restart_the_noise_is_independent_and_what_was_released_stays_in(mechanism, completion):
    """Three trees of 6: the increments of each have the covariance of a tree, and none across, but for completion."""
    if completion and mechanism == "blt":
        return
    plan = planned(mechanism, horizon=18, restart_every=6, completion=completion)
    stream = plan.stream(DRAWS, KEY)
    samples = np.array([stream.increment(step) for step in range(18)]) / (plan.noise_multiplier * plan.clip)
    one = increments_covariance(mechanism, 6) if mechanism != "blt" else blt_covariance(6, horizon=6)
    for first in (0, 6, 12):
        block = samples[first : first + 6].copy()
        if completion and first:
            block, expected = block[1:], one[1:, 1:]  # the first one also completes the tree before
        else:
            expected = one
        assert_covariance(block, expected)
    if completion:  # after the completion the prefix sum has one node's noise for each tree, less with averages
        prefix = samples.cumsum(axis=0)
        root = prefix[6] - samples_of_first_leaf(plan, 1)
        assert np.var(root) == pytest.approx(1.0 if mechanism == "tree" else honaker_completed_variance(), rel=0.03)
    else:
        whole = np.kron(np.eye(3), one)
        assert_covariance(samples, whole)


def blt_covariance(steps, horizon):
    inverse = np.linalg.inv(strategy("blt", steps, horizon))
    return inverse @ inverse.T


def samples_of_first_leaf(plan, tree):
    return noise.secure(KEY, DRAWS)(tree, 0, 0)


def honaker_completed_variance():
    """Six leaves filled up to eight with two that are known to be zero: least squares for the sum, on what is then known."""
    observed = incidence(8)[:, :6]
    known = [n for n, row in enumerate(observed) if row.any()]
    return float(np.ones(6) @ np.linalg.inv(observed[known].T @ observed[known]) @ np.ones(6))


# ── the same noise again, and never another ──────────────────────────────────────────────────────────────────────────


@settings(max_examples=40, deadline=None)
@given(
    mechanism=st.sampled_from(MECHANISMS),
    stop=st.integers(0, 39),
    restart=st.sampled_from([None, 7, 16]),
    completion=st.booleans(),
    seeded=st.booleans(),
)
def test_a_stream_goes_on_bit_for_bit_after_state_and_restore(mechanism, stop, restart, completion, seeded):
    restart = None if mechanism == "gaussian" else restart
    completion = completion and restart is not None and mechanism.startswith("tree")
    plan = planned(mechanism, horizon=40, restart_every=restart, completion=completion)
    key = 3 if seeded else KEY
    whole, first, second = (plan.stream(9, key, seeded) for _ in range(3))
    expected = [whole.increment(step) for step in range(40)]
    for step in range(stop):
        first.increment(step)
    arrays, facts = first.state()
    kept = {name: array.copy() for name, array in arrays.items()}
    first.increment(stop)  # the killed run may have drawn the next one: it is not part of the state
    second.restore(kept, json.loads(json.dumps(facts)))
    for step in range(stop, 40):
        assert second.increment(step).tobytes() == expected[step].tobytes()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_step_asked_for_twice_is_the_same_or_refused(mechanism):
    stream = planned(mechanism).stream(50, KEY)
    drawn = [stream.increment(step) for step in range(T)]
    for step in (T - 1, 3, 0):
        try:
            again = stream.increment(step)
        except ValueError as e:
            assert "was released before" in str(e)
        else:
            assert again.tobytes() == drawn[step].tobytes()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_steps_may_be_skipped(mechanism):
    """A stream without its state finds the noise of a later step by itself."""
    one, other = (planned(mechanism).stream(50, KEY) for _ in range(2))
    expected = [one.increment(step) for step in range(T)]
    assert other.increment(11).tobytes() == expected[11].tobytes()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_another_key_cannot_go_on(mechanism):
    plan = planned(mechanism)
    stream = plan.stream(5, KEY)
    stream.increment(0)
    with pytest.raises(ValueError, match="began with another one"):
        plan.stream(5, bytes(32)).restore(*stream.state())


@pytest.mark.parametrize("changed", [{"noise_multiplier": 2.0}, {"clip": 0.4}, {"buffer_size": 5}, {"mechanism": "gaussian"}])
def test_a_resumed_run_cannot_have_another_plan(changed):
    stream = planned("tree").stream(5, KEY)
    with pytest.raises(ValueError, match=f"{next(iter(changed))}=.* began with"):
        replace(stream.plan, **changed).stream(5, KEY).restore(*stream.state())


def test_a_resumed_run_cannot_have_other_blt_constants():
    stream = planned("blt", horizon=64).stream(5, KEY)
    with pytest.raises(ValueError, match="other constants"):
        planned("blt", horizon=65).stream(5, KEY).restore(*stream.state())


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_no_noise_beyond_the_horizon(mechanism):
    stream = planned(mechanism).stream(5, KEY)
    with pytest.raises(ValueError, match="horizon is 16 server steps"):
        stream.increment(T)
    with pytest.raises(ValueError, match="counted from 0"):
        planned(mechanism).stream(5, KEY).increment(-1)


@pytest.mark.parametrize("mechanism", ["tree", "tree-honaker", "blt"])
def test_a_run_that_became_longer_keeps_what_it_released(mechanism):
    short = planned(mechanism, horizon=12)
    long = replace(short, horizon=30, restart_every=12, completion=mechanism.startswith("tree"))
    first, second = short.stream(9, KEY), long.stream(9, KEY)
    for step in range(12):
        assert first.increment(step).tobytes() == second.increment(step).tobytes()
    third = long.stream(9, KEY)
    third.restore(*first.state())
    for step in range(12, 30):
        assert third.increment(step).tobytes() == second.increment(step).tobytes()


@pytest.mark.parametrize("mechanism", ["tree", "tree-honaker", "blt"])
def test_a_run_cannot_restart_before_what_it_released(mechanism):
    """Of 12 steps in one tree, 12 trees of one step would claim less than what was released."""
    plan = planned(mechanism, horizon=20)
    stream = plan.stream(5, KEY)
    for step in range(12):
        stream.increment(step)
    arrays, facts = stream.state()
    facts = json.loads(json.dumps(facts))
    for every in (1, 5, 11):
        with pytest.raises(
            ValueError, match=rf"^restart_every={every}: .*None, and it released 12 steps; expected None, or 12"
        ):
            replace(plan, horizon=40, restart_every=every).stream(5, KEY).restore(arrays, facts)
    for every in (None, 12, 20):
        longer = replace(plan, horizon=40, restart_every=every).stream(5, KEY)
        longer.restore(arrays, facts)
        again = longer.state()
        assert again[1]["released"] == 12
        longer.plan.stream(5, KEY).restore(*again)
        if every is not None:  # then it stays so
            for other in (None, every + 1):
                with pytest.raises(ValueError, match=f"^restart_every={other}: .*began with restart_every={every}"):
                    replace(longer.plan, restart_every=other).stream(5, KEY).restore(*again)


CHILD = """
import json, os, signal, sys
import numpy as np
from fedbuff.privacy.plan import Plan
from pathlib import Path

mechanism, folder, kill_at = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
plan = Plan(mechanism, clip=0.5, noise_multiplier=3.0, buffer_size=4, horizon=20, delta=1e-7, max_participations=1)
stream, step, log = plan.stream(7, bytes(range(32))), 0, folder / "released"
if (folder / "facts.json").exists():
    facts = json.loads((folder / "facts.json").read_text())
    with np.load(folder / "arrays.npz") as arrays:
        stream.restore(dict(arrays), facts["stream"])
    step = facts["next"]
while step < 20:
    arrays, facts = stream.state()
    np.savez(folder / "arrays.npz", **arrays)
    (folder / "facts.json").write_text(json.dumps({"stream": facts, "next": step}))
    increment = stream.increment(step)      # the sum is ready, and noisy
    (folder / f"ready-{step}").open("ab").write(increment.tobytes())
    if step == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    log.open("ab").write(increment.tobytes())  # the step is released
    step += 1
"""


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_killed_between_sum_ready_and_released_it_releases_the_same(mechanism, tmp_path):
    """Two processes: the first is killed −9 with the noisy sum of step 13 ready, the second goes on from the checkpoint."""
    killed = subprocess.run([sys.executable, "-c", CHILD, mechanism, tmp_path, "13"], check=False)
    assert killed.returncode == -signal.SIGKILL
    subprocess.run([sys.executable, "-c", CHILD, mechanism, tmp_path, "-1"], check=True)
    ready = (tmp_path / "ready-13").read_bytes()
    assert ready[: 7 * 8] == ready[7 * 8 :]  # twice drawn, twice the same
    stream = planned(mechanism, horizon=20).stream(7, KEY)
    assert (tmp_path / "released").read_bytes() == b"".join(stream.increment(step).tobytes() for step in range(20))


# ── where noise comes from ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("draw", [noise.secure(KEY, 1000), noise.seeded(5, 1000)], ids=["secure", "seeded"])
def test_every_address_has_its_own_noise(draw):
    addresses = list(itertools.product(range(3), range(4), range(6)))
    drawn = np.array([draw(*address) for address in addresses])
    correlation = np.corrcoef(drawn) - np.eye(len(addresses))
    assert np.abs(correlation).max() < 6 / math.sqrt(1000)
    assert len(np.unique(drawn)) == drawn.size
    assert draw(1, 2, 3).tobytes() == drawn[addresses.index((1, 2, 3))].tobytes()


def test_secure_noise_is_aes_in_counter_mode():
    """The uniform bits are the keystream of AES-256-CTR from the address on, 2^40 blocks apart."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    start = (2 << 96 | 3 << 88 | 5 << 40).to_bytes(16, "big")
    stream = Cipher(algorithms.AES256(KEY), modes.CTR(start)).encryptor().update(bytes(8 * 10))
    expected = slow_normals(np.frombuffer(stream, np.uint64))
    assert noise.secure(KEY, 10)(2, 3, 5).tobytes() == expected.tobytes()
    assert noise.secure(KEY, 9)(2, 3, 5).tobytes() == expected[:9].tobytes()


def test_a_key_of_another_run_gives_other_noise():
    one, other = noise.secure(KEY, 20_000)(0, 0, 0), noise.secure(bytes(32), 20_000)(0, 0, 0)
    assert abs(np.corrcoef(one, other)[0, 1]) < 6 / math.sqrt(20_000)
    assert noise.fingerprint(KEY) != noise.fingerprint(bytes(32))


@pytest.mark.parametrize("key", [b"short", bytes(31), "a" * 32, 5])
def test_a_bad_key_is_refused_and_not_shown(key):
    with pytest.raises(ValueError, match="32 random bytes") as e:
        noise.secure(key, 3)
    assert "short" not in str(e.value) and "aaa" not in str(e.value)
    with pytest.raises(ValueError, match="seed"):
        noise.seeded(-1, 3)


def test_normal_numbers_are_normal():
    """By Kolmogorov and Smirnov on a million, and in the far tail."""
    from scipy.stats import kstest, norm

    drawn = noise.secure(KEY, 1_000_000)(0, 0, 0)
    assert kstest(drawn, "norm").pvalue > 1e-4
    for z in (3.0, 4.0):
        expected = 1e6 * 2 * norm.sf(z)
        assert abs((np.abs(drawn) > z).sum() - expected) < 6 * math.sqrt(expected)


def test_normal_numbers_are_box_and_mullers_and_the_twin_has_the_same_bits():
    bits = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    bits[:6] = bits[10_000:10_006] = [0, 2**64 - 1, 2**63, 2**62, 2**61, 2**12]  # the ends and the quarters
    u, v = ((2.0 * (bits >> np.uint64(12)) + 1) * 2.0**-53).reshape(2, -1)
    expected = np.sqrt(-2 * np.log(u)) * np.array([np.cos(2 * np.pi * v), np.sin(2 * np.pi * v)])
    np.testing.assert_allclose(slow_normals(bits), expected.ravel(), rtol=0, atol=1e-14)
    found = np.empty(len(bits))
    normals(bits, found)
    assert found.tobytes() == slow_normals(bits).tobytes()


@pytest.mark.parametrize("n", [1, 511, 8192, 20_001])
def test_a_blt_is_filtered_by_the_twin_with_the_same_bits(n):
    rng = np.random.default_rng(n)
    weight, decay, scale = rng.uniform(0, 0.5, 4).tolist(), rng.uniform(0.5, 1, 4).tolist(), 0.3
    start, fast, slow = rng.standard_normal((4, n)), [], []
    for way, out in ((filtered, fast), (slow_filtered, slow)):
        buffers, draws = [row.copy() for row in start], np.random.default_rng(0)
        out += [way(draws.standard_normal(n), buffers, weight, decay, scale).tobytes() for _ in range(3)]
        out += [buffer.tobytes() for buffer in buffers]
    assert fast == slow
    z = np.random.default_rng(0).standard_normal(n)
    np.testing.assert_allclose(np.frombuffer(fast[0]), scale * (z - np.array(weight) @ start), rtol=1e-12, atol=1e-12)
