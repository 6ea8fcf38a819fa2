"""Differential privacy: the vectors, sensitivities by brute force, clip, ledger, what a plan refuses, the audit."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbuff.cli import main
from fedbuff.compiled.norm import norm
from fedbuff.core.aggregate import Aggregation
from fedbuff.core.optimizers import sgd
from fedbuff.core.staleness import constant, cutoff, hinge, polynomial
from fedbuff.privacy import accounting, audit, prefix, sensitivity
from fedbuff.privacy.clip import clip_factor
from fedbuff.privacy.constants import BLT
from fedbuff.privacy.ledger import Ledger
from fedbuff.privacy.plan import MECHANISMS, Plan, plan
from fedbuff.sim.sums import weighted_sum

VECTORS = json.loads(Path(__file__).with_name("dp_vectors.json").read_text())
EXACT, RDP, PLD = 1e-6, 1e-6, 1e-3  # tolerances, as the vectors state them
KEY = bytes(range(32))


def made(mechanism="tree", **changes):
    fixed = {"clip": 1.0, "buffer_size": 10, "horizon": 100, "delta": 1e-7, "max_participations": 1}
    if not {"epsilon", "noise_multiplier"} & set(changes):
        changes["noise_multiplier"] = 2.0
    return plan(mechanism, **{**fixed, **changes})


def ids(case):
    return "-".join(str(value) for value in case.values() if isinstance(value, int | str | float))[:40]


# ── every number of the vectors ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("case", VECTORS["dpftrl_single_epoch_targets"], ids=ids)
def test_noise_of_a_tree_for_an_epsilon(case):
    steps, delta = case["steps"], case["delta"]
    exact = made("tree", horizon=steps, delta=delta, epsilon=case["epsilon"])
    assert sensitivity.levels(steps) == case["levels"]
    assert exact.noise_multiplier == pytest.approx(case["sigma_node_exact"], rel=EXACT)
    effective = exact.noise_multiplier / exact.sensitivity()
    assert effective == pytest.approx(case["sigma_effective"], rel=EXACT)
    assert 1 / effective == pytest.approx(case["mu_gdp"], rel=EXACT)
    assert 1 / (2 * effective**2) == pytest.approx(case["rho_zcdp"], rel=EXACT)
    assert exact.epsilon() == pytest.approx(case["check_eps_mpmath"], rel=EXACT)
    assert exact.epsilon(accountant="pld") == pytest.approx(case["check_eps_pld"], rel=PLD)
    for name in ("check_eps_rdp_at_exact_sigma", "check_eps_google_research_rdp"):
        assert exact.epsilon(accountant="rdp") == pytest.approx(case[name], rel=RDP)
    by_rdp = made("tree-honaker", horizon=steps, delta=delta, epsilon=case["epsilon"], accountant="rdp")
    assert by_rdp.noise_multiplier == pytest.approx(case["sigma_node_rdp"], rel=2e-6)


@pytest.mark.parametrize("case", VECTORS["dpftrl_single_epoch_small"], ids=ids)
def test_epsilon_of_a_tree(case):
    p = made("tree", horizon=case["steps"], delta=case["delta"], noise_multiplier=case["sigma"])
    assert sensitivity.levels(case["steps"]) == case["levels"]
    assert p.epsilon() == pytest.approx(case["eps_exact"], rel=EXACT)
    assert p.epsilon(accountant="rdp") == pytest.approx(case["eps_rdp"], rel=RDP)
    assert (p.sensitivity() / p.noise_multiplier) ** 2 / 2 == pytest.approx(case["rho_zcdp"], rel=EXACT)


@pytest.mark.parametrize("case", VECTORS["dpsgd_poisson_targets"], ids=ids)
def test_noise_of_sampled_cohorts_for_an_epsilon(case):
    rate, steps, delta, epsilon = case["q"], case["steps"], case["delta"], case["epsilon"]
    found = accounting.sampled_epsilon(case["sigma_pld"], rate, steps, delta)
    assert found == pytest.approx(epsilon, rel=PLD)
    by_rdp = accounting.sampled_epsilon(case["sigma_pld"], rate, steps, delta, "rdp")
    assert by_rdp == pytest.approx(case["check_eps_rdp_at_sigma_pld"], rel=RDP)
    assert accounting.sampled_noise(epsilon, rate, steps, delta, "rdp") == pytest.approx(case["sigma_rdp"], rel=5e-6)
    if "check_eps_prv_accountant_lo_est_hi" in case:  # another library's lower and upper bound
        low, _, high = case["check_eps_prv_accountant_lo_est_hi"]
        assert low <= found <= high


@pytest.mark.parametrize("case", VECTORS["dpsgd_poisson_small"], ids=ids)
def test_epsilon_of_sampled_cohorts(case):
    p = made(
        "gaussian",
        horizon=case["steps"],
        delta=case["delta"],
        noise_multiplier=case["sigma"],
        sampling_rate=case["q"],
        max_participations=None,
    )
    assert p.accountant == "pld"
    assert p.epsilon() == pytest.approx(case["eps_pld"], rel=PLD)
    assert p.epsilon(accountant="rdp") == pytest.approx(case["eps_rdp"], rel=RDP)


def test_calibrated_noise_of_sampled_cohorts_gives_that_epsilon():
    p = made("gaussian", horizon=50, delta=1e-5, epsilon=1.5, sampling_rate=0.05, max_participations=None)
    assert p.epsilon() == pytest.approx(1.5, rel=PLD) and p.epsilon() <= 1.5 + 1e-5
    assert p.epsilon() < p.epsilon(accountant="rdp")


@pytest.mark.parametrize("case", VECTORS["tree_multi_participation_sens2"], ids=ids)
def test_sensitivity_of_several_participations(case):
    k, b = case["max_participations"], case["min_sep"]
    assert b == case["tfp_min_separation"] + 1
    assert sensitivity.of_tree(case["steps"], k, b) == case["sens2_bruteforce"] == case["sens2_tfp"]
    assert sensitivity.tree_bound(case["steps"], k, b) >= case["sens2_tfp"]
    leaves = case["worst_leaves"]
    assert len(leaves) <= k and all(j - i >= b for i, j in itertools.pairwise(leaves))
    assert (tree_nodes(case["steps"])[:, leaves].sum(axis=1) ** 2).sum() == case["sens2_bruteforce"]


@pytest.mark.parametrize("case", VECTORS["tree_two_participations_closed_form"], ids=ids)
def test_sensitivity_of_two_participations(case):
    assert sensitivity.of_tree(case["steps"], 2, case["min_sep"]) == case["sens2_tfp"]
    assert sensitivity.tree_bound(case["steps"], 2, case["min_sep"]) == case["closed_form"]


@pytest.mark.parametrize("case", VECTORS["getsum_noise_variance_unit_sigma"], ids=ids)
def test_variance_of_prefix_sums(case):
    t = case["t"]
    assert prefix.of_tree(t)[-1] == case["var_vanilla"]
    assert prefix.of_tree(t, honaker=True)[-1] == pytest.approx(case["var_honaker_online"], rel=1e-12)


@pytest.mark.parametrize("case", VECTORS["restarts"], ids=ids)
def test_epsilon_of_restarts(case):
    trees, steps = len(case["steps_list"]), case["steps_list"][0]
    fixed = {"horizon": trees * steps, "restart_every": steps, "noise_multiplier": case["sigma"], "delta": case["delta"]}
    once = made("tree", **fixed)
    assert once.sensitivity() ** 2 == pytest.approx(case["sens2_user_once_in_total"])
    assert once.epsilon() == pytest.approx(case["eps_exact_user_once_in_total"], rel=EXACT)
    assert once.epsilon(accountant="rdp") == pytest.approx(case["eps_rdp_dp_accounting_single_epoch_event"], rel=RDP)
    limits = {"max_participations": trees, "min_separation": steps}
    each = made("tree", **fixed, **limits)
    assert each.sensitivity() ** 2 == pytest.approx(case["sens2_user_once_per_tree"])
    assert each.epsilon() == pytest.approx(case["eps_exact_user_once_per_tree"], rel=EXACT)
    completed = made("tree-honaker", **fixed, **limits, completion=True)
    assert completed.sensitivity() ** 2 == pytest.approx(case["sens2_once_per_tree_with_tree_completion"])
    assert completed.epsilon() == pytest.approx(case["eps_exact_with_completion"], rel=EXACT)


COMPARISON = VECTORS["mechanism_comparison_unit_sigma_eff"]


@pytest.mark.parametrize("steps", [660, 66_012])
def test_prefix_noise_of_mechanisms_at_the_same_epsilon(steps):
    """Largest and mean variance times the squared sensitivity; what Toeplitz matrices can do at best is (1 − x)^−½."""
    case, blt = COMPARISON["cases"][str(steps)], COMPARISON["blt" if steps == 66_012 else "blt_660"]
    assert sensitivity.levels(steps) == case["levels"]
    for honaker, name in ((False, "tree_vanilla"), (True, "tree_honaker")):
        loss = case["levels"] * prefix.of_tree(steps, honaker)
        assert loss.max() == pytest.approx(case[f"{name}_max"]) and loss.mean() == pytest.approx(case[f"{name}_mean"])
    assert prefix.of_gaussian(steps).max() == case["dpsgd_like_indep_max"]
    best = np.cumprod([1.0] + [(2 * i - 1) / (2 * i) for i in range(1, steps)])
    square = (best**2).sum()
    assert square == pytest.approx(case["opt_toeplitz_sens2"])
    assert square * square == pytest.approx(case["opt_toeplitz_max_loss"])
    assert square * np.cumsum(best**2).mean() == pytest.approx(case["opt_toeplitz_mean_loss"])

    assert BLT[steps] == (tuple(blt["buf_decay"]), tuple(blt["output_scale"]))
    assert sensitivity.of_blt(steps, steps) == pytest.approx(blt["sens2"], rel=1e-9)
    loss = sensitivity.of_blt(steps, steps) * prefix.of_blt(*BLT[steps], steps)
    assert loss.max() == pytest.approx(blt["max_loss"], rel=1e-6) and loss.mean() == pytest.approx(blt["mean_loss"], rel=1e-6)


@pytest.mark.parametrize("steps", sorted(n for n in BLT if n <= 2**17))
def test_every_blt_is_nearly_the_best_toeplitz_matrix(steps):
    """Within 4 % for the shortest, of two buffers, and 1 % from 256 steps on."""
    best = np.cumprod([1.0] + [(2 * i - 1) / (2 * i) for i in range(1, steps)])
    loss = sensitivity.of_blt(steps, steps) * prefix.of_blt(*BLT[steps], steps).max()
    assert 1.0 <= loss / (best**2).sum() ** 2 < (1.015 if steps >= 256 else 1.04)


def test_exact_epsilon_is_the_closed_form_in_fifty_digits():
    import mpmath

    with mpmath.workdps(50):
        for sigma in (0.3, 0.9, 2.5, 8.0):
            e, s = mpmath.mpf(accounting.epsilon(sigma, 1e-7)), mpmath.mpf(sigma)
            delta = mpmath.ncdf(1 / (2 * s) - e * s) - mpmath.exp(e) * mpmath.ncdf(-1 / (2 * s) - e * s)
            assert float(delta) == pytest.approx(1e-7, rel=1e-6)


def test_levels_grow_at_powers_of_two():
    assert [sensitivity.levels(t) for t in (1, 2, 3, 4, 7, 8, 65_535, 65_536, 66_012)] == [1, 2, 2, 3, 3, 4, 16, 17, 17]


# ── sensitivity by brute force ───────────────────────────────────────────────────────────────────────────────────────


def tree_nodes(leaves):
    """Rows are completed nodes over the first leaves, columns are leaves."""
    spans = [(i << h, (i + 1) << h) for h in range(leaves.bit_length()) for i in range(leaves >> h)]
    return np.array([[float(a <= leaf < b) for leaf in range(leaves)] for a, b in spans])


def toeplitz(horizon, steps):
    c = sensitivity.coefficients(*sensitivity.constants(horizon), steps)
    return np.array([[c[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])


def brute_force(gram, k, b):
    """The largest Σ_ij over all ways to take part at most k times, b apart, whose number is a few 100,000 at most."""
    steps, best = len(gram), 0.0
    for times in range(1, k + 1):
        spare = steps - (times - 1) * (b - 1)
        if spare < times:
            break
        chosen = np.array(list(itertools.combinations(range(spare), times))) + (b - 1) * np.arange(times)
        sums = sum(gram[chosen[:, i], chosen[:, j]] for i in range(times) for j in range(times))
        best = max(best, float(np.max(sums)))
    return best


@pytest.mark.parametrize("mechanism", ["tree", "tree-honaker", "blt", "gaussian"])
def test_sensitivity_by_brute_force(mechanism):
    """All steps up to 128 for one participation, several for two, and some for three to five."""
    many = [(t, 1, 1) for t in range(1, 129)]
    many += [(t, 2, b) for t in (2, 5, 16, 31, 64, 77, 100, 127, 128) for b in (1, 2, 7, 16, 31, 32) if b < t]
    many += [(t, 3, b) for t in (7, 20, 33, 64) for b in (1, 3, 8)] + [(128, 3, 20), (100, 3, 32)]
    many += [(16, 4, 2), (24, 4, 5), (33, 4, 7), (64, 4, 16), (20, 5, 3), (30, 5, 6), (128, 5, 27)]
    for steps, k, b in many:
        strategy = {"blt": lambda t: toeplitz(128, t), "gaussian": np.eye}.get(mechanism, tree_nodes)(steps)
        p = made(mechanism, horizon=128, max_participations=k, min_separation=b)
        expected = brute_force(strategy.T @ strategy, k, b)
        assert p.sensitivity(steps) ** 2 == pytest.approx(expected, rel=1e-12), (steps, k, b)


def test_beyond_the_exact_cases_there_is_a_bound():
    """At least the exact value, at most k² times the levels, and not far off: it is what is used for long separations."""
    for steps, k, b in [(128, 2, 33), (128, 2, 60), (128, 3, 40), (100, 3, 33), (77, 2, 50)]:
        gram = tree_nodes(steps).T @ tree_nodes(steps)
        exact, used = brute_force(gram, k, b), sensitivity.of_tree(steps, k, b)
        assert exact <= used <= min(1.3 * exact, k * k * sensitivity.levels(steps))


@settings(max_examples=60)
@given(steps=st.integers(1, 3000), k=st.integers(1, 8), b=st.integers(1, 32))
def test_the_bound_is_never_below_the_exact_value(steps, k, b):
    possible = min(k, -(-steps // b))
    assert sensitivity.of_tree(steps, k, b) <= sensitivity.tree_bound(steps, possible, b)


def test_sensitivity_of_restarts_by_brute_force():
    """Three trees of five leaves, the first two completed or not: nodes of all trees, leaves in a row."""
    for k, b, completion in itertools.product((1, 2, 3), (1, 3, 5, 6), (False, True)):
        p = made("tree-honaker", horizon=15, restart_every=5, completion=completion, max_participations=k, min_separation=b)
        trees = [tree_nodes(8)[:, :5] if completion and i < 2 else tree_nodes(5) for i in range(3)]
        blocks = np.zeros((sum(map(len, trees)), 15))
        row = 0
        for i, tree in enumerate(trees):
            blocks[row : row + len(tree), 5 * i : 5 * i + 5] = tree
            row += len(tree)
        exact, used = brute_force(blocks.T @ blocks, k, b), round(p.sensitivity() ** 2, 9)
        assert exact <= used <= 1.5 * exact
        if k == 1 or b in (1, 5):
            assert used == exact or completion


@settings(max_examples=60)
@given(steps=st.integers(1, 300), k=st.integers(1, 300), b=st.integers(1, 20))
def test_how_far_blt_moves_is_the_same_by_running_sums(steps, k, b):
    c, times = sensitivity.coefficients(*BLT[512], steps), sensitivity._times(steps, k, b)
    np.testing.assert_allclose(sensitivity._moved_often(c, times, b), sensitivity._moved(c, times, b), rtol=1e-12)


def test_many_participations_take_no_time():
    assert sensitivity.of_restarts([[0.0, 1.0, 4.0]] * 300, 5000) == 1200.0
    assert sensitivity.of_blt(max(BLT), max(BLT), max(BLT)) > 0


def test_an_epsilon_that_promises_nothing_is_one_line():
    assert accounting.effective_noise(1e12, 1e-5) < 1e-3
    with pytest.raises(ValueError, match=r"epsilon=1e\+300: too large"):
        accounting.effective_noise(1e300, 1e-5)


def test_blt_constants_whose_worst_case_is_not_known_are_refused(monkeypatch):
    monkeypatch.setitem(BLT, 64, ((0.9, 0.5), (1.5, 0.1)))  # c_1 > c_0
    with pytest.raises(ValueError, match="do not fall"):
        sensitivity.of_blt(64, 64)


def test_a_horizon_between_two_grid_points_has_its_own_sensitivity():
    assert sensitivity.constants(700) == BLT[1024]
    p = made("blt", horizon=700)
    c = sensitivity.coefficients(*BLT[1024], 700)
    assert p.sensitivity() ** 2 == pytest.approx((c**2).sum())
    with pytest.raises(ValueError, match="restart_every"):
        made("blt", horizon=2**30)


# ── epsilon, spent step by step ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_epsilon_grows_from_nothing_to_what_was_planned(mechanism):
    p = made(mechanism, epsilon=6.0, max_participations=3, min_separation=20)
    spent = [p.epsilon(steps) for steps in range(0, 101, 4)]
    assert spent[0] == 0.0 and spent == sorted(spent)
    assert spent[-1] == p.epsilon() == pytest.approx(6.0, rel=1e-6)
    with pytest.raises(ValueError, match="horizon is 100"):
        p.epsilon(101)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_summary_says_what_was_promised_and_what_not(mechanism):
    said = json.loads(json.dumps(made(mechanism, epsilon=6.0).describe(steps=10, seeded=True)))
    assert said["epsilon"] <= said["epsilon_at_horizon"] == pytest.approx(6.0) and said["epsilon_rdp"] > 6.0
    assert "zero" in said["adjacency"] and "seed" in said["noise"] and "public" in said["limits"]
    assert {"mechanism", "noise_multiplier", "clip", "buffer_size", "horizon", "delta", "max_participations"} <= set(said)
    assert "AES" in made(mechanism).describe(seeded=False)["noise"]


def test_at_the_same_epsilon_blt_has_less_noise_in_prefix_sums_than_trees():
    worst = {}
    for mechanism in ("tree", "tree-honaker", "blt"):
        p = made(mechanism, horizon=1000, epsilon=6.0)
        stream = p.stream(2000, 1, seeded=True)
        sums = np.cumsum([stream.increment(step) for step in range(1000)], axis=0)
        worst[mechanism] = sums.std(axis=1).max()
    assert 2 * worst["blt"] < worst["tree-honaker"] < 0.85 * worst["tree"]


# ── clip ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=300)
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(1, 400),
    spread=st.floats(0, 12),
    length=st.floats(1e-3, 1e6),
    clip=st.floats(1e-4, 1e4),
    weight=st.just(0.0) | st.floats(1e-6, 1),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_no_clipped_update_is_longer_than_clip_also_in_float32(seed, size, spread, length, clip, weight, dtype):
    """Multiplied and rounded as the buffer does it, and measured in exact arithmetic."""
    rng = np.random.default_rng(seed)
    update = rng.standard_normal(size) * np.exp(spread * rng.standard_normal(size))
    update = (update * (length / np.linalg.norm(update))).astype(dtype)
    p = made(clip=clip)
    for factor, limit in ((p.factor(update), clip), (p.factor(update, weight), clip * weight)):
        sent = np.multiply(update, factor)
        assert sent.dtype == dtype
        exact = math.fsum(float(x) ** 2 for x in sent)
        assert exact <= clip**2
        assert exact <= limit**2 * (1 + 1e-6)
    if norm(update) < clip * (1 - 1e-6):
        assert p.factor(update) == 1.0
    else:
        assert norm(update) * p.factor(update) > clip * (1 - 1e-6)


@pytest.mark.parametrize(
    ("dtype", "clips", "largest", "size"),
    [(np.float32, (1e-4, 1e-3, 1e-2, 1e4), 3.4e38, 100_000), (np.float64, (1e-16, 1e-15, 1e-14, 1e4), 1.7e305, 100_000)],
)
def test_a_huge_update_is_not_longer_than_clip_either(dtype, clips, largest, size):
    """Its factor would be subnormal, of a few bits only, and be rounded up to twice its value: it counts as zero."""
    factors = []
    for clip, share in itertools.product(clips, np.geomspace(0.01, 1.0, 12)):
        update = np.full(size, largest * share, dtype)
        factors.append(made(clip=clip).factor(update))
        assert factors[-1] == 0.0 or factors[-1] >= np.finfo(dtype).smallest_normal
        aggregation, summed = Aggregation(np.zeros(size, dtype), sgd(1.0)), np.empty(size, dtype)
        assert aggregation.add(update, factors[-1]) is None
        assert norm(aggregation.step(0)) <= clip
        if weighted_sum(update[None], [0], [factors[-1]], summed) is not None:  # None: there is no compiler
            assert norm(summed) <= clip
    assert 0.0 in factors and max(factors) > 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_is_rejected(bad, dtype):
    update = np.zeros(7, dtype)
    update[3] = bad
    assert not math.isfinite(norm(update)) and made().factor(update) is None


def test_norms_that_over_or_underflow_are_found_all_the_same():
    assert norm(np.array([3e200, 4e200])) == pytest.approx(5e200)
    assert norm(np.array([3e-200, 4e-200])) == pytest.approx(5e-200)
    assert norm(np.array([3e38, 3e38], np.float32)) == pytest.approx(3e38 * math.sqrt(2), rel=1e-6)
    assert norm(np.zeros(3)) == 0.0 and clip_factor(0.0, 1.0) == 1.0
    assert 1e200 * made(clip=1.0).factor(np.array([1e200])) == pytest.approx(1.0, rel=1e-6)


def test_the_clip_is_over_the_whole_update():
    update = np.array([3.0, 4.0, 0.0, 12.0])
    assert np.linalg.norm(update * made(clip=1.0).factor(update)) == pytest.approx(1.0, rel=1e-6)


def test_the_weight_comes_after_the_clip():
    """A stale update counts for less, also one that is too long: clipped first, it would have been as long as a fresh one."""
    p, update = made(clip=1.0), np.array([30.0, 40.0])
    assert np.linalg.norm(update * p.factor(update, 0.5)) == pytest.approx(0.5, rel=1e-6)
    assert p.factor(update, 0.5) == 0.5 * p.factor(update)
    for weight in (1.0 + 1e-9, 2.0, -0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            p.factor(update, weight)


def test_a_buffer_is_divided_by_k_and_not_by_the_weights():
    """Four updates of weight 1, ½, ½, ½ move the weights by a quarter of their sum, and so does the noise."""
    p = made("gaussian", buffer_size=4, clip=1.0)
    for noise in (None, np.array([6.0, -2.0])):
        aggregation, update = Aggregation(np.zeros(2), sgd(1.0)), np.array([0.6, 0.0])
        for weight in (1.0, 0.5, 0.5, 0.5):
            assert aggregation.add(update, p.factor(update, weight)) is None
        added = np.zeros(2) if noise is None else noise
        np.testing.assert_allclose(aggregation.step(0, noise=noise), -(np.array([1.5, 0.0]) + added) / 4)


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=150)
@given(
    k=st.one_of(st.none(), st.integers(1, 4)),
    b=st.integers(1, 6),
    tries=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60),
)
def test_the_ledger_keeps_to_both_limits(k, b, tries):
    """Against a list of all steps of each client; `free` says the same for all."""
    ledger, kept, step = Ledger(4, k, b), {client: [] for client in range(4)}, 0
    for client, later in tries:
        step += later
        may = {c: (k is None or len(taken) < k) and all(step - s >= b for s in taken) for c, taken in kept.items()}
        assert ledger.free(step).tolist() == [may[c] for c in range(4)] == [ledger.allowed(c, step) for c in range(4)]
        refused = ledger.admit(client, step)
        assert (refused is None) == may[client]
        if refused is None:
            kept[client].append(step)
        else:
            assert f"client {client}" in refused
        copy = Ledger(4, k, b)
        arrays, facts = ledger.state()
        copy.restore(arrays, json.loads(json.dumps(facts)))
        assert copy.free(step + 1).tolist() == ledger.free(step + 1).tolist()
        assert all(copy.times(c) == len(kept[c]) for c in range(4))


def test_a_client_is_never_twice_in_a_buffer():
    for p in (made(max_participations=5), made("gaussian", sampling_rate=0.1, max_participations=None)):
        ledger = p.ledger(clients=3)
        assert ledger.admit(1, 7) is None
        assert "step 7" in ledger.admit(1, 7)
        assert ledger.times(1) == 1 and ledger.admit(2, 7) is None and ledger.admit(1, 8) is None


def test_separation_is_the_difference_of_steps():
    """|i − j| ≥ b: with b = 1, in the next step again; TensorFlow Privacy calls that 0."""
    ledger = Ledger(1, None, 3)
    assert [ledger.admit(0, step) is None for step in (4, 5, 6, 7)] == [True, False, False, True]
    assert not ledger.allowed(0, 2)  # nor in a step before


def test_ten_million_clients_fit():
    ledger = Ledger(10_000_000, 2, 5)
    assert ledger.admit(9_999_999, 3) is None and not ledger.allowed(9_999_999, 5)
    arrays, _ = ledger.state()
    assert sum(array.nbytes for array in arrays.values()) < 100
    assert sum(a.nbytes for a in vars(ledger).values() if isinstance(a, np.ndarray)) == 80_000_000


def test_a_resumed_run_cannot_have_other_limits():
    with pytest.raises(ValueError, match="began with max_participations=2"):
        Ledger(5, 3, 1).restore(*Ledger(5, 2, 1).state())
    with pytest.raises(ValueError, match="clients 0 to 4"):
        Ledger(5, 3, 1).admit(5, 0)


# ── what a plan refuses ──────────────────────────────────────────────────────────────────────────────────────────────

SAFE = {"weigh": polynomial(0.5), "weight_by": "uniform", "mixing": False, "buffer_size": 10}


@pytest.mark.parametrize("weigh", [polynomial(0.5), polynomial(0.0), constant(), constant(0.3), hinge(), cutoff(3)])
def test_a_safe_server_is_accepted(weigh):
    made().check(**{**SAFE, "weigh": weigh}, horizon=100, max_staleness=50)


@pytest.mark.parametrize(
    ("unsafe", "says"),
    [
        ({"weigh": constant(1.5)}, r"weigh\(0\) = 1.5: a weight above 1"),
        ({"weigh": lambda tau: 1.0 if tau < 700 else 1.01}, r"weigh\(700\)"),
        ({"weigh": lambda tau: -0.5}, r"weigh\(0\)"),
        ({"weigh": lambda tau: math.nan}, r"weigh\(0\)"),
        ({"weight_by": "examples"}, "depend on the others' data"),
        ({"mixing": True}, "no clip bounds"),
        ({"buffer_size": 11}, "constant K=10"),
        ({"horizon": 101}, "horizon is 100"),
        ({"poisson": True}, "set sampling_rate"),
    ],
)
def test_an_unsafe_server_is_refused_with_the_assumption_that_fails(unsafe, says):
    with pytest.raises(ValueError, match=says):
        made().check(**{**SAFE, **unsafe})


def test_amplification_needs_poisson_sampled_cohorts():
    p = made("gaussian", sampling_rate=0.01, max_participations=None)
    p.check(**SAFE, poisson=True)
    with pytest.raises(ValueError, match="amplification needs Poisson-sampled cohorts"):
        p.check(**SAFE)


@pytest.mark.parametrize(
    ("unsafe", "says"),
    [
        ({"max_participations": None}, "max_participations: missing"),
        ({"sampling_rate": 0.1}, "proven for independent noise"),
        ({"mechanism": "gaussian", "sampling_rate": 0.1, "accountant": "exact"}, "no formula"),
        ({"mechanism": "gaussian", "restart_every": 10}, "nothing to restart"),
        ({"mechanism": "blt", "restart_every": 10, "completion": True}, "with a tree"),
        ({"completion": True}, "set restart_every"),
        ({"epsilon": 3.0}, "expected one of them"),
        ({"noise_multiplier": None}, "expected one of them"),
    ],
)
def test_a_plan_that_proves_nothing_is_refused(unsafe, says):
    fixed = {"mechanism": "tree", "noise_multiplier": 2.0, "max_participations": 1}
    with pytest.raises(ValueError, match=says):
        plan(clip=1.0, buffer_size=10, horizon=100, delta=1e-7, **{**fixed, **unsafe})


BAD = st.one_of(st.integers(-3, 0), st.floats(-5, 0), st.sampled_from([math.nan, math.inf, "one", True, [1]]))


@given(name=st.sampled_from(["clip", "buffer_size", "horizon", "delta", "noise_multiplier", "min_separation"]), value=BAD)
def test_bad_values_are_refused_by_name(name, value):
    fixed = {"clip": 1.0, "noise_multiplier": 1.0, "buffer_size": 1, "horizon": 8, "delta": 1e-7, "max_participations": 1}
    with pytest.raises(ValueError, match=f"^{name}=") as e:
        Plan("tree", **{**fixed, name: value})
    assert "\n" not in str(e.value)


# ── the audit ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("epsilon", [2.0, 12.0])
def test_an_audit_of_the_real_path_never_exceeds_the_claim(mechanism, epsilon):
    for seed in range(3):
        found = audit.audit(made(mechanism, horizon=15, epsilon=epsilon, clip=0.3), seed, seeded=True, canaries=400, seed=seed)
        assert not found["exceeds_claim"], found
        if epsilon == 12.0:
            assert found["epsilon_lower_bound_gdp"] > 4.0  # and it does see something


def test_an_audit_with_secure_noise_and_several_participations():
    p = made("tree", horizon=31, epsilon=12.0, max_participations=3, min_separation=10)
    found = audit.audit(p, KEY, canaries=400)
    assert found["claimed_epsilon"] == pytest.approx(12.0) and 3.0 < found["epsilon_lower_bound_gdp"] < 12.0


def test_an_audit_sees_the_gross_mistakes(monkeypatch):
    """Noise divided by K twice, √levels forgotten, no clip: each made on the real path, each above the claim."""
    right, step = made("tree", horizon=63, epsilon=6.0), Aggregation.step
    found = lambda p: audit.audit(p, 5, seeded=True, canaries=400)  # noqa: E731
    assert not found(right)["exceeds_claim"]
    with monkeypatch.context() as patch:  # K = 10
        patch.setattr(Aggregation, "step", lambda self, staleness, noise: step(self, staleness, noise / 10))
        assert found(right)["exceeds_claim"]
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "epsilon", lambda self: accounting.epsilon(right.noise_multiplier / right.sensitivity(), 1e-7))
        assert found(replace(right, noise_multiplier=right.noise_multiplier / right.sensitivity()))["exceeds_claim"]
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "factor", lambda self, update, weight=1.0: weight)
        assert found(right)["exceeds_claim"]


def test_estimators_stay_below_a_known_gaussian_mechanism():
    """Scores of N(0, 1) against N(μ, 1), many times: above the true epsilon at most as often as the confidence allows."""
    rng = np.random.default_rng(0)
    above = {"gdp": 0, "fdp": 0}
    for _ in range(20):
        mu = 1.0
        true = accounting.epsilon(1 / mu, 1e-5)
        inside, outside = rng.normal(mu, 1, 250), rng.normal(0, 1, 250)
        above["gdp"] += audit.gdp_epsilon(inside, outside, 1e-5) > true
        above["fdp"] += audit.fdp_epsilon(inside, outside, 1e-5) > true
    assert max(above.values()) <= 2
    assert audit.gdp_epsilon(np.zeros(50), np.ones(50), 1e-5) == 0.0  # an attack that is always wrong refutes nothing


def test_an_audit_of_sampled_cohorts_is_refused():
    with pytest.raises(ValueError, match="sampling_rate"):
        audit.audit(made("gaussian", sampling_rate=0.1, max_participations=None), KEY)


# ── the command line ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def privacy(capsys):
    """`fedbuff privacy …` in this process: what it printed."""

    def run(*arguments, code=0):
        assert main(["privacy", *map(str, arguments)]) == code
        return capsys.readouterr()

    return run


def test_the_issues_own_commands(fedbuff):
    noise = ["privacy", "noise", "--mechanism", "tree", "--steps", 66012, "--epsilon", 6, "--delta", "1e-7", "--json"]
    said = json.loads(fedbuff(*noise).stdout)
    assert said["noise_multiplier"] == pytest.approx(3.7240440012901517, rel=EXACT) and said["levels"] == 17
    epsilon = [
        "privacy",
        "epsilon",
        "--mechanism",
        "tree",
        "--steps",
        1024,
        "--noise-multiplier",
        2,
        "--delta",
        "1e-7",
        "--json",
    ]
    said = json.loads(fedbuff(*epsilon).stdout)
    assert said["epsilon"] == pytest.approx(accounting.epsilon(2 / math.sqrt(11), 1e-7))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_noise_and_epsilon_are_each_others_inverse(privacy, mechanism):
    common = ["--mechanism", mechanism, "--steps", 500, "--delta", "1e-6", "--max-participations", 3, "--min-separation", 40]
    found = json.loads(privacy("noise", *common, "--epsilon", 4, "--json").out)
    back = privacy("epsilon", *common, "--noise-multiplier", found["noise_multiplier"], "--accountant", "rdp", "--json")
    assert json.loads(back.out)["epsilon"] == pytest.approx(found["epsilon_rdp"])
    assert found["epsilon"] == pytest.approx(4.0) and found["sensitivity"] > 1 and found["prefix_noise_max"] > 0


def test_restarts_on_the_command_line(privacy):
    tree = ["--mechanism", "tree", "--steps", 300, "--delta", "1e-7", "--noise-multiplier", 5, "--restart-every", 100]
    said = privacy("epsilon", *tree, "--completion", "--max-participations", 3, "--min-separation", 100, "--json").out
    assert json.loads(said)["epsilon"] == pytest.approx(5.104819389311117, rel=EXACT)


def test_commands_in_words(privacy):
    sampled = ["--mechanism", "gaussian", "--sampling-rate", 0.01, "--steps", 100, "--noise-multiplier", 1, "--delta", "1e-5"]
    said = privacy("epsilon", *sampled).out
    assert "epsilon      0.718" in said and "probability 0.01" in said
    said = privacy("noise", "--mechanism", "tree", "--steps", 100, "--epsilon", 6, "--delta", "1e-7").out
    assert "7 levels" in said and "takes part at most once" in said
    said = privacy("audit", "--steps", 15, "--epsilon", 6, "--delta", "1e-6", "--canaries", 200).out
    assert said.startswith("blt, 15 server steps") and "not refuted, which is no proof" in said


def test_an_audit_with_a_seed_repeats(privacy):
    again = ["audit", "--mechanism", "tree", "--steps", 7, "--noise-multiplier", 2, "--delta", "1e-6", "--canaries", 100]
    one, other = (privacy(*again, "--seed", 3, "--json").out for _ in range(2))
    assert one == other and json.loads(one)["claimed_epsilon"] > 0


SAMPLED = ["--mechanism", "gaussian", "--steps", "9", "--delta", "1e-6", "--sampling-rate", "0.1"]
TREE = ["--mechanism", "tree", "--delta", "1e-6"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["epsilon", "--steps", "0", "--noise-multiplier", "1", "--delta", "1e-6"], "--steps 0"),
        (["epsilon", "--steps", "9", "--noise-multiplier", "-1", "--delta", "1e-6"], "noise_multiplier=-1.0"),
        (["epsilon", "--steps", "9", "--noise-multiplier", "1e-300", "--delta", "1e-6"], "noise_multiplier=1e-300"),
        (["epsilon", "--steps", "9", "--noise-multiplier", "1e300", "--delta", "1e-6"], "noise_multiplier=1e+300"),
        (["epsilon", *SAMPLED, "--noise-multiplier", "1e-300"], "noise_multiplier=1e-300"),
        (["epsilon", *SAMPLED, "--noise-multiplier", "1e300"], "noise_multiplier=1e+300"),
        (["epsilon", *TREE, "--steps", "3000000000", "--noise-multiplier", "1"], "--steps 3000000000"),
        (["noise", *TREE, "--steps", "3000000000", "--epsilon", "1"], "--steps 3000000000"),
        (["epsilon", *SAMPLED, "--noise-multiplier", "1", "--steps", str(10**14)], f"--steps {10**14}: expected at most"),
        (["noise", "--steps", "9", "--epsilon", "0", "--delta", "1e-6"], "epsilon=0"),
        (["noise", "--steps", "9", "--epsilon", "1", "--delta", "2"], "delta=2"),
        (["noise", "--steps", "9", "--epsilon", "1", "--delta", "1e-6", "--sampling-rate", "0.5"], "independent noise"),
        (["epsilon", *SAMPLED, "--noise-multiplier", "1", "--max-participations", "1"], "max_participations=1"),
        (["epsilon", *SAMPLED, "--noise-multiplier", "1", "--min-separation", "5"], "min_separation=5"),
        (["noise", *SAMPLED, "--epsilon", "1", "--max-participations", "1"], "max_participations=1"),
        (["noise", *SAMPLED, "--epsilon", "1", "--min-separation", "5"], "min_separation=5"),
        (["audit", "--steps", "9", "--delta", "1e-6"], "epsilon, noise_multiplier"),
        (["audit", "--steps", "9000", "--epsilon", "1", "--delta", "1e-6"], "at most 2000 steps"),
        (["audit", "--steps", "9", "--epsilon", "1", "--delta", "1e-6", "--confidence", "1"], "--confidence"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(privacy, arguments, says):
    done = privacy(*arguments, code=2)
    assert says in done.err and done.err.count("\n") == 1 and not done.out


# ── calibration far out ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(1.0, 1e-3, 1), (0.1, 1e-3, 10), (400.0, 0.5, 100)])
def test_noise_of_sampled_cohorts_is_found_wherever_it_is(epsilon, rate, steps):
    noise = accounting.sampled_noise(epsilon, rate, steps, 1e-5)
    spent = accounting.sampled_epsilon(noise, rate, steps, 1e-5)
    assert spent <= epsilon * (1 + 1e-6)
    assert spent == pytest.approx(epsilon, rel=1e-3) or noise == pytest.approx(0.05)


def test_what_an_accountant_does_not_resolve_is_said():
    with pytest.raises(ValueError, match=r"epsilon=0\.01.*'rdp' does not resolve"):
        accounting.effective_noise(0.01, 1e-12, "rdp")
    assert accounting.effective_noise(0.01, 1e-12) > 100


def test_hardly_any_noise_is_accounted_for_without_a_grid():
    """PLD would take gigabytes: without sampling the formula says the same, with it an upper bound will do."""
    assert accounting.epsilon(0.01, 1e-5, "pld") == accounting.epsilon(0.01, 1e-5)
    assert accounting.effective_noise(100, 1e-3, "pld") == accounting.effective_noise(100, 1e-3)
    bound = accounting.sampled_epsilon(0.06, 0.5, 10_000, 1e-5)
    assert 200 < bound <= accounting.epsilon(0.06 / 100, 1e-5)


@pytest.mark.parametrize("sampled", [{"max_participations": 1}, {"sampling_rate": 0.1}])
@pytest.mark.parametrize("least", [True, False])
def test_all_the_noise_that_a_plan_takes_is_accounted_for(sampled, least):
    fixed = {"clip": 1.0, "buffer_size": 1, "horizon": 9, "delta": 1e-5}
    p = plan("gaussian", **fixed, **sampled, noise_multiplier=1e-100 if least else 1e100)
    for spent in (p.epsilon(), p.epsilon(accountant="rdp")):
        assert 1e190 < spent < math.inf if least else 0.0 <= spent < 0.01
    with pytest.raises(ValueError, match=r"^noise_multiplier="):
        replace(p, noise_multiplier=1e-101 if least else 1e101)


def test_accounting_says_nothing_on_stderr(capfd):
    accounting.sampled_noise(0.01, 0.5, 100, 1e-5, "rdp")
    assert capfd.readouterr() == ("", "")


def test_nobody_takes_part_more_often_than_there_is_room_for():
    once = plan(
        "blt", clip=1.0, buffer_size=1, horizon=13, delta=1e-5, noise_multiplier=1.0, max_participations=1, restart_every=5
    )
    thrice = replace(once, max_participations=3, min_separation=40)
    assert thrice.sensitivity() == once.sensitivity()


@pytest.mark.parametrize("limit", [{"max_participations": 2}, {"min_separation": 9}])
def test_a_limit_beside_a_sampling_rate_is_refused(limit):
    """Cohorts are drawn from those who are free: whoever is, is drawn more often than at the rate accounted for."""
    fixed = {"clip": 1.0, "buffer_size": 4, "horizon": 5, "delta": 1e-5, "noise_multiplier": 1.0}
    plan("gaussian", **fixed, sampling_rate=0.1, min_separation=1)
    with pytest.raises(ValueError, match=f"^{next(iter(limit))}=.*drawn more often"):
        plan("gaussian", **fixed, sampling_rate=0.1, **limit)
    plan("gaussian", **fixed, **{"max_participations": 2, **limit})  # without amplification there is nothing to lose


@pytest.mark.parametrize(("rate", "steps", "delta"), [(1e-8, 10, 1e-6), (1e-4, 5, 1e-3)])
def test_who_is_hardly_ever_drawn_needs_no_noise(rate, steps, delta):
    """δ covers it that a client is in any cohort at all, and no accountant has to be asked."""
    assert accounting.sampled_epsilon(0.05, rate, steps, delta) == 0.0
    assert accounting.sampled_noise(0.5, rate, steps, delta) == pytest.approx(0.05)
    assert accounting.sampled_epsilon(0.05, 1.1 * delta / steps, steps, delta) > 0
