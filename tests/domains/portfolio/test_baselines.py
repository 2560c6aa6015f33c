"""Every baseline: causal, feasible, blind to the entities' order, and what its definition says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.portfolio import baselines
from apportion.domains.portfolio.baselines import BASELINES

# Short windows, so that 60 rows see every branch.
SHORT = {
    "momentum": jax.jit(lambda y: baselines.momentum(y, 20, 3)),
    "volatility-tilt": jax.jit(lambda y: baselines.volatility_tilt(y, 9)),
}
every_baseline = pytest.mark.parametrize("name", sorted(BASELINES))


def draw(seed, rows=60, entities=5):
    return np.exp(0.03 * np.random.default_rng(seed).standard_normal((rows, entities)))


def run(function, relatives, *settings):
    """In double precision, so that a difference is a difference of the algorithm."""
    with jax.enable_x64(True):
        return np.asarray(function(jnp.asarray(relatives), *settings))


@every_baseline
def test_every_row_is_on_the_simplex_and_knows_what_was_before_it_alone(name):
    relatives, function = draw(0), SHORT.get(name, BASELINES[name])
    found = run(function, relatives)
    assert found.shape == (60, 5)
    assert (found > -1e-6).all()
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(run(function, np.ones((60, 5))), 0.2, atol=1e-7)
    order = [3, 0, 4, 1, 2]
    np.testing.assert_allclose(run(function, relatives[:, order]), found[:, order], atol=1e-8)
    changed = relatives.copy()
    changed[30:35] = draw(1)[30:35]
    moved = np.abs(found - run(function, changed)).max(1)
    assert moved[35:].max() > 1e-6
    if name != "best-crp":  # chosen in hindsight
        np.testing.assert_allclose(found[0], 0.2, atol=1e-12)
        assert moved[:31].max() == 0


@every_baseline
def test_single_precision_stays_on_the_simplex_through_a_long_volatile_market(name):
    relatives = jnp.asarray(draw(5, rows=400, entities=12), jnp.float32)
    allocations = np.asarray(BASELINES[name](relatives))
    assert allocations.dtype == np.float32
    assert np.isfinite(allocations).all()
    assert (allocations > -1e-6).all()
    np.testing.assert_allclose(allocations.sum(1), 1, atol=1e-6)


def test_best_crp_is_the_best_of_all_constant_shares():
    """Its gradient is 1 for what is held, and nothing's is more: the condition of Kuhn and Tucker."""
    for seed in range(20):
        relatives = draw(seed) * np.linspace(0.99, 1.01, 5)
        found = run(BASELINES["best-crp"], relatives)
        assert np.ptp(found, axis=0).max() == 0
        slopes = (relatives / (relatives @ found[0])[:, None]).mean(0)
        assert slopes.max() <= 1 + 1e-8
        np.testing.assert_allclose(slopes[found[0] > 1e-6], 1, atol=1e-8)


def test_exponentiated_gradient_equals_its_definition():
    relatives = draw(0)
    shares, expected = np.full(5, 0.2), []
    for y in relatives:
        expected.append(shares)
        shares = shares * np.exp(0.3 * y / (shares @ y))
        shares = shares / shares.sum()
    found = run(jax.jit(baselines.exponentiated_gradient), relatives, 0.3)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def nearest(values):
    """Projection on the simplex by bisection on the level that is taken off."""
    low, high = values.min() - 1, values.max()
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(values - level, 0).sum() > 1 else (low, level)
    return np.maximum(values - high, 0)


@pytest.mark.parametrize("epsilon", [0.5, 1.05, 10.0])
def test_olmar_equals_its_definition(epsilon):
    """b + lambda (x - mean x), lambda the least that earns epsilon on the predicted relatives x."""
    relatives = draw(1)
    shares, expected = np.full(5, 0.2), []
    for n in range(len(relatives)):
        expected.append(shares)
        seen = relatives[: n + 1]
        prices = np.cumprod(np.vstack([np.ones(5), seen]), axis=0)
        x = seen[-1] if n < 5 else prices[-5:].mean(0) / prices[-1]
        off = x - x.mean()
        shares = nearest(shares + max(0.0, epsilon - shares @ x) / (off @ off) * off)
    np.testing.assert_allclose(run(BASELINES["olmar"], relatives, epsilon), expected, atol=1e-8)


def test_shares_follow_trailing_growth_or_volatility():
    relatives = draw(4)
    growth = np.log(relatives[40 - 20 : 40 - 3]).sum(0)
    winners = growth >= np.median(growth)
    found = run(SHORT["momentum"], relatives)[40]
    np.testing.assert_allclose(found, winners / winners.sum())
    tilt = run(SHORT["volatility-tilt"], relatives)
    for row in (4, 40):
        seen = relatives[max(row - 9, 0) : row]
        deviation = np.log(seen).std(0, ddof=1) + 1e-6
        np.testing.assert_allclose(tilt[row], deviation / deviation.sum(), rtol=1e-9)
