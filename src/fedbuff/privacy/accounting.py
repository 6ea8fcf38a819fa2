"""Epsilon from noise and noise from epsilon, with Google's dp-accounting.

A tree or a matrix is one Gaussian mechanism of standard deviation noise_multiplier / sensitivity, whatever the number of
steps, so `exact` is the analytic formula of Balle and Wang (2018). `pld` (privacy loss distributions) is for Poisson-sampled
cohorts, and as exact as its grid; `rdp` (Rényi) is an upper bound, some 5 % higher, and shown beside as a cross-check.
"""

import functools
import math
from typing import Any, Literal

import numpy as np

Accountant = Literal["exact", "pld", "rdp"]
_HARDLY_ANY = 0.05  # noise: then epsilon is in the hundreds, and an upper bound will do


def epsilon(effective: float, delta: float, accountant: Accountant = "exact") -> float:
    """Of one Gaussian mechanism with standard deviation `effective` for a sensitivity of 1."""
    da = _library()
    if accountant == "exact":
        with np.errstate(divide="ignore"):  # on its way to an epsilon of thousands
            return float(da.get_epsilon_gaussian(effective, delta))
    return _epsilon(da.GaussianDpEvent(effective), delta, accountant, da.NeighboringRelation.REPLACE_SPECIAL)


def effective_noise(epsilon: float, delta: float, accountant: Accountant = "exact") -> float:
    """What `epsilon` is the inverse of."""
    da = _library()
    exact = float(da.get_sigma_gaussian(epsilon, delta))
    if accountant == "exact":
        return exact
    relation = da.NeighboringRelation.REPLACE_SPECIAL
    return _calibrate(da.GaussianDpEvent, epsilon, delta, accountant, relation, 0.9 * exact, 2 * exact)


@functools.cache  # seconds with `pld`
def sampled_epsilon(noise_multiplier: float, rate: float, steps: int, delta: float, accountant: Accountant = "pld") -> float:
    """Of `steps` steps with independent noise, each on a cohort in which every client is with probability `rate`."""
    if noise_multiplier < _HARDLY_ANY:  # PLD's grid would not fit into memory; as if everybody were in every cohort
        return epsilon(noise_multiplier / math.sqrt(steps), delta, "exact" if accountant == "pld" else accountant)
    da = _library()
    event = da.SelfComposedDpEvent(da.PoissonSampledDpEvent(rate, da.GaussianDpEvent(noise_multiplier)), steps)
    return _epsilon(event, delta, accountant, da.NeighboringRelation.ADD_OR_REMOVE_ONE)


@functools.cache
def sampled_noise(epsilon: float, rate: float, steps: int, delta: float, accountant: Accountant = "pld") -> float:
    """What `sampled_epsilon` is the inverse of. `pld` takes up to a minute."""
    da = _library()

    def event(noise_multiplier: float) -> Any:
        return da.SelfComposedDpEvent(da.PoissonSampledDpEvent(rate, da.GaussianDpEvent(noise_multiplier)), steps)

    relation = da.NeighboringRelation.ADD_OR_REMOVE_ONE
    # without sampling it needs √steps times the noise of one step
    most = float(da.get_sigma_gaussian(epsilon, delta)) * math.sqrt(steps) * 1.3
    bound = _calibrate(event, epsilon, delta, "rdp", relation, 0.05, max(most, 0.2))
    return bound if accountant == "rdp" else _calibrate(event, epsilon, delta, accountant, relation, 0.6 * bound, bound)


def _epsilon(event: Any, delta: float, accountant: Accountant, relation: Any) -> float:
    with np.errstate(all="ignore"):  # with hardly any noise, a Rényi divergence overflows: that order is not the best one
        return float(_accountant(accountant, relation).compose(event).get_epsilon(delta))


def _calibrate(
    event: Any, epsilon: float, delta: float, accountant: Accountant, relation: Any, low: float, high: float
) -> float:
    da = _library()
    bracket = da.ExplicitBracketInterval(low, high)
    make = lambda: _accountant(accountant, relation)  # noqa: E731
    return float(da.calibrate_dp_mechanism(make, event, epsilon, delta, bracket_interval=bracket, tol=1e-6))


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
