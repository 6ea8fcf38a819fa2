"""A buffer's sum in one pass is the sum of one update after another, bit for bit."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbuff.compiled.norm import norm, slow_squares, squares
from fedbuff.core.aggregate import Aggregation
from fedbuff.core.optimizers import sgd
from fedbuff.sim.sums import weighted_sum


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3000), st.integers(1, 12), st.sampled_from([np.float32, np.float64]))
def test_bit_for_bit_what_the_server_adds_up(seed, columns, count, dtype):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((20, columns + 3)).astype(dtype)[:, :columns]  # rows with a gap between them
    rows, weights = rng.permutation(20)[:count].tolist(), rng.random(count).tolist()
    one_by_one, at_once = (Aggregation(np.zeros(columns, dtype), sgd(1.0)) for _ in range(2))
    for row, weight in zip(rows, weights, strict=True):
        one_by_one.add(matrix[row], weight)
    assert weighted_sum(matrix, rows, weights, at_once.room()) is True
    at_once.add_sum(count)
    assert np.array_equal(one_by_one.step(0), at_once.step(0))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("column", [0, 500, 1023, 1024, 1499])
def test_what_is_not_finite_is_seen(bad, column):
    matrix = np.ones((3, 1500), np.float32)
    matrix[:2, column] = bad
    assert weighted_sum(matrix, [0, 1, 2], [1.0, 1.0, 1.0], np.empty(1500, np.float32)) is False
    matrix[:2, column] = 1.0
    assert weighted_sum(matrix, [0, 1, 2], [1.0, 1.0, 1.0], np.empty(1500, np.float32)) is True


def test_other_types_are_left_to_numpy():
    assert weighted_sum(np.ones((2, 3), np.float16), [0], [1.0], np.empty(3, np.float16)) is None


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 40_000), st.sampled_from([np.float32, np.float64]))
def test_norms_are_the_same_compiled_and_not(seed, length, dtype):
    x = np.random.default_rng(seed).standard_normal(length).astype(dtype)
    assert squares(x) == slow_squares(x) == pytest.approx(math.fsum(float(v) ** 2 for v in x), rel=1e-12)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_the_norm_of_what_is_not_finite_is_not_finite(bad):
    assert not math.isfinite(norm(np.array([1.0, bad, 2.0], np.float32)))


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_norms_neither_over_nor_underflow(scale):
    assert norm(np.array([3.0, 4.0]) * scale) == pytest.approx(5.0 * scale)
    assert norm(np.zeros(5, np.float32)) == norm(np.zeros(0, np.float32)) == 0.0
