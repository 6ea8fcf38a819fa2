"""Epsilon from noise and noise from epsilon, with Google's dp-accounting.

A tree or a matrix is one Gaussian mechanism of standard deviation noise_multiplier / sensitivity, whatever the number of
steps, so `exact` is the analytic formula of Balle and Wang (2018). `pld` (privacy loss distributions) is for Poisson-sampled
cohorts, and as exact as its grid; `rdp` (Rényi) is an upper bound, some 5 % higher, and shown beside as a cross-check.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

Accountant = Literal["exact", "pld", "rdp"]
_LARGE = 50.0  # epsilon: beyond it PLD takes many seconds for what the formula says as well
_HUGE = 200.0  # beyond it PLD's grid takes gigabytes, and an upper bound will do
_LEAST = 0.05  # noise that is looked for


def epsilon(effective: float, delta: float, accountant: Accountant = "exact") -> float:
    """Of one Gaussian mechanism with standard deviation `effective` for a sensitivity of 1."""
    da = _library()
    with np.errstate(divide="ignore"):  # on its way to an epsilon of thousands
        exact = float(da.get_epsilon_gaussian(effective, delta))
    if accountant == "exact" or (accountant == "pld" and exact > _LARGE):  # the same quantity
        return exact
    return _epsilon(da.GaussianDpEvent(effective), delta, accountant, da.NeighboringRelation.REPLACE_SPECIAL)


def effective_noise(epsilon: float, delta: float, accountant: Accountant = "exact") -> float:
    """What `epsilon` is the inverse of."""
    da = _library()
    exact = _sigma(epsilon, delta)
    if accountant == "exact" or (accountant == "pld" and epsilon > _LARGE):
        return exact
    relation = da.NeighboringRelation.REPLACE_SPECIAL
    return _calibrate(da.GaussianDpEvent, epsilon, delta, accountant, relation, 0.9 * exact, 2 * exact)


def _sigma(epsilon: float, delta: float) -> float:
    """The noise of one Gaussian mechanism."""
    with np.errstate(all="ignore"):  # on its way to hardly any
        try:
            return float(_library().get_sigma_gaussian(epsilon, delta))
        except ValueError as e:
            raise ValueError(f"epsilon={epsilon:g}: too large to be computed with ({e}); it promises nothing") from e


@functools.cache  # seconds with `pld`
def sampled_epsilon(noise_multiplier: float, rate: float, steps: int, delta: float, accountant: Accountant = "pld") -> float:
    """Of `steps` steps with independent noise, each on a cohort in which every client is with probability `rate`."""
    if accountant == "pld" and _never_drawn(rate, steps) >= 1 - delta:
        return 0.0
    da = _library()
    event = da.SelfComposedDpEvent(da.PoissonSampledDpEvent(rate, da.GaussianDpEvent(noise_multiplier)), steps)
    relation = da.NeighboringRelation.ADD_OR_REMOVE_ONE
    rdp, everybody = _epsilon(event, delta, "rdp", relation), noise_multiplier / math.sqrt(steps)
    if accountant == "rdp":  # with hardly any noise it knows no order; as if everybody were in every cohort
        return rdp if math.isfinite(rdp) else epsilon(everybody, delta, "rdp")
    most = min(epsilon(everybody, delta), rdp)
    return most if accountant == "pld" and most > _HUGE else _epsilon(event, delta, accountant, relation)


@functools.cache
def sampled_noise(epsilon: float, rate: float, steps: int, delta: float, accountant: Accountant = "pld") -> float:
    """What `sampled_epsilon` is the inverse of. `pld` takes up to a minute."""
    if accountant == "pld" and _never_drawn(rate, steps) >= 1 - delta:
        return _LEAST
    da = _library()

    def event(noise_multiplier: float) -> Any:
        return da.SelfComposedDpEvent(da.PoissonSampledDpEvent(rate, da.GaussianDpEvent(noise_multiplier)), steps)

    relation = da.NeighboringRelation.ADD_OR_REMOVE_ONE
    # without sampling it needs √steps times the noise of one step
    most = _sigma(epsilon, delta) * math.sqrt(steps) * 1.3
    try:
        bound = _calibrate(event, epsilon, delta, "rdp", relation, _LEAST, max(most, 0.2))
    except ValueError:
        if accountant == "rdp":
            raise
        bound = most
    if accountant == "rdp" or (accountant == "pld" and epsilon > _HUGE):
        return bound
    return _calibrate(event, epsilon, delta, accountant, relation, 0.6 * bound, bound)


def _never_drawn(rate: float, steps: int) -> float:
    """How likely a client is in no cohort at all: whatever happens to those who are, if that is rare enough, is within δ."""
    return math.exp(steps * math.log1p(-rate)) if rate < 1 else 0.0


def _epsilon(event: Any, delta: float, accountant: Accountant, relation: Any) -> float:
    with _quietly():
        return float(_accountant(accountant, relation).compose(event).get_epsilon(delta))


def _calibrate(
    event: Any, epsilon: float, delta: float, accountant: Accountant, relation: Any, low: float, high: float
) -> float:
    """The least noise whose epsilon is `epsilon`, likely between `low` and `high`, and never less than `_LEAST`."""
    da = _library()

    def make() -> Any:
        return _accountant(accountant, relation)

    def spent(noise: float) -> float:
        return _epsilon(event(noise), delta, accountant, relation)

    for _ in range(40):
        try:
            with _quietly():
                bracket = da.ExplicitBracketInterval(low, high)
                found = float(da.calibrate_dp_mechanism(make, event, epsilon, delta, bracket_interval=bracket, tol=1e-6))
        except RecursionError:  # it looks for what is not there: see below
            break
        except ValueError:  # the two do not bracket a solution
            if spent(low) <= epsilon:
                if low <= _LEAST:
                    return low
                low, high = max(low / 2, _LEAST), low
            elif spent(high) > epsilon:
                low, high = high, 2 * high
            else:
                raise
        else:
            if accountant == "rdp" and spent(found) < 0.9 * epsilon:  # it leaps to 0 where it knows nothing finer
                break
            return found
    raise ValueError(f"epsilon={epsilon:g}, delta={delta:g}: the accountant {accountant!r} does not resolve so little")


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """With hardly any noise, a Rényi divergence overflows or a series does not converge: that order is not the best one."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _accountant(accountant: Accountant, relation: Any) -> Any:
    da = _library()
    if accountant == "pld":
        return da.pld.PLDAccountant(relation)
    if accountant == "rdp":
        return da.rdp.RdpAccountant(neighboring_relation=relation)
    raise ValueError("accountant='exact': there is no formula for sampled cohorts; use 'pld' or 'rdp'")


def _library() -> Any:
    try:
        import dp_accounting
        from dp_accounting import pld, rdp  # noqa: F401
    except ImportError as e:
        raise ValueError("accounting needs the package dp-accounting: pip install 'fedbuff[privacy]'") from e
    return dp_accounting
