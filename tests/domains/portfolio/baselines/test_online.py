"""Algorithms that follow winners or losers against plain NumPy versions written from their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm

from apportion.domains.portfolio.baselines.online import (
    exponentiated_gradient,
    minimise_on_simplex,
    ons,
    simplex_lattice,
    universal,
)
from apportion.domains.portfolio.baselines.reversion import (
    anticor,
    cwmr,
    median,
    olmar,
    pamr,
    project,
    rmr,
)


def draw(seed, rows=60, entities=5):
    return np.exp(0.03 * np.random.default_rng(seed).standard_normal((rows, entities)))


def double(function, relatives, *arguments):
    with jax.enable_x64(True):
        return np.asarray(jax.jit(lambda y: function(y, *arguments))(jnp.asarray(relatives)))


def test_exponentiated_gradient_equals_its_definition():
    relatives = draw(0)
    shares, expected = np.full(5, 0.2), []
    for y in relatives:
        expected.append(shares)
        shares = shares * np.exp(0.3 * y / (shares @ y))
        shares = shares / shares.sum()
    np.testing.assert_allclose(double(exponentiated_gradient, relatives, 0.3), expected, rtol=1e-12)


def test_the_online_newton_step_equals_its_definition():
    relatives = draw(1)
    a, b, shares = np.eye(5), np.zeros(5), np.full(5, 0.2)
    found = double(ons, relatives, 0.5, 0.8)
    for y, row in zip(relatives, found, strict=True):
        np.testing.assert_allclose(row, shares, atol=1e-6)
        gradient = y / (row @ y)
        a, b = a + np.outer(gradient, gradient), b + (1 + 1 / 0.8) * gradient
        centre = 0.5 * np.linalg.solve(a, b)
        shares = minimize(
            lambda x, a=a, centre=centre: (x - centre) @ a @ (x - centre),
            np.full(5, 0.2),
            jac=lambda x, a=a, centre=centre: 2 * a @ (x - centre),
            bounds=[(0, 1)] * 5,
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 500},
        ).x


def test_the_universal_portfolio_is_the_wealth_weighted_mean_of_its_points():
    relatives = draw(2)
    points = np.random.default_rng(0).dirichlet(np.ones(5), 50)
    wealth, expected = np.ones(50), []
    for y in relatives:
        expected.append(wealth @ points / wealth.sum())
        wealth = wealth * (points @ y)
    found = double(lambda y: universal(y, jnp.asarray(points)), relatives)
    np.testing.assert_allclose(found[1:], expected[1:], rtol=1e-12)


def test_two_assets_come_close_to_the_integral_over_all_shares():
    relatives = draw(3, rows=40, entities=2) ** 4

    def wealth(b):
        return np.prod(relatives @ np.array([b, 1 - b]))

    total, first = quad(wealth, 0, 1)[0], quad(lambda b: b * wealth(b), 0, 1)[0]
    after = np.vstack([relatives, np.ones(2)])
    assert double(universal, after)[-1, 0] == pytest.approx(first / total, abs=1e-6)


@pytest.mark.parametrize("entities", [2, 5, 12, 36])
def test_the_lattice_has_the_uniform_distributions_mean_and_covariance(entities):
    points = simplex_lattice(entities)
    uniform = (np.eye(entities) - 1 / entities) / (entities * (entities + 1))
    assert (points > 0).all()
    np.testing.assert_allclose(points.sum(1), 1)
    np.testing.assert_allclose(points.mean(0), 1 / entities)
    np.testing.assert_allclose(np.cov(points.T, bias=True), uniform, atol=1e-12)


@given(seed=st.integers(0, 10_000), entities=st.sampled_from([2, 6]))
def test_the_interior_point_meets_the_optimality_conditions(seed, entities):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((entities, entities))
    matrix, centre = root @ root.T + 0.1 * np.eye(entities), rng.standard_normal(entities)
    with jax.enable_x64(True):
        x = np.asarray(_nearest(jnp.asarray(matrix), jnp.asarray(centre)))
    gradient = matrix @ (x - centre)
    price = gradient @ x
    assert (x >= 0).all()
    assert x.sum() == pytest.approx(1, abs=1e-12)
    assert (gradient >= price - 1e-8).all()


@jax.jit
def _nearest(matrix, centre):
    start = jnp.full(centre.shape[0], 1 / centre.shape[0])
    return minimise_on_simplex(lambda x: (matrix @ (x - centre), matrix), start)


def nearest(values):
    """Projection on the simplex by bisection on the level that is taken off."""
    low, high = values.min() - 1, values.max()
    for _ in range(200):
        level = (low + high) / 2
        low, high = (level, high) if np.maximum(values - level, 0).sum() > 1 else (low, level)
    return np.maximum(values - high, 0)


def passive_aggressive(relatives, predict, target):
    """b + lambda (x - mean x), lambda the least that earns `target` on the predicted relatives x."""
    shares, rows = np.full(relatives.shape[1], 1 / relatives.shape[1]), []
    for n in range(len(relatives)):
        rows.append(shares)
        x = predict(relatives[: n + 1])
        off = x - x.mean()
        shares = nearest(shares + max(0.0, target - shares @ x) / (off @ off) * off)
    return np.array(rows)


def test_pamr_equals_its_definition():
    relatives = draw(0)
    expected = passive_aggressive(relatives, lambda seen: -seen[-1], -0.9)
    np.testing.assert_allclose(double(pamr, relatives, 0.9), expected, atol=1e-9)


def test_olmar_equals_its_definition():
    relatives = draw(1)

    def predict(seen):
        prices = np.cumprod(np.vstack([np.ones(5), seen]), axis=0)
        return seen[-1] if len(seen) < 5 else prices[-4:].mean(0) / prices[-1]

    expected = passive_aggressive(relatives, predict, 1.05)
    np.testing.assert_allclose(double(olmar, relatives, 1.05, 4), expected, atol=1e-8)


def test_rmr_equals_its_definition():
    relatives = draw(2, rows=25)

    def predict(seen):
        prices = np.cumprod(np.vstack([np.ones(5), seen]), axis=0)
        if len(seen) < 5:
            return seen[-1]
        distance = lambda p: np.linalg.norm(prices[-4:] - p, axis=1).sum()  # noqa: E731
        found = minimize(distance, prices[-4:].mean(0), method="BFGS", options={"gtol": 1e-10})
        return found.x / prices[-1]

    expected = passive_aggressive(relatives, predict, 1.02)
    np.testing.assert_allclose(double(rmr, relatives, 1.02, 4, 1e-12), expected, atol=1e-4)


@given(seed=st.integers(0, 10_000))
def test_nothing_near_the_median_is_nearer_to_all_points(seed):
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((5, 3))
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(median)(jnp.asarray(points), 1e-12))

    def distance(p):
        return np.linalg.norm(points - p, axis=1).sum()

    assert all(
        distance(found) <= distance(found + 1e-3 * rng.standard_normal(3)) for _ in range(50)
    )


def test_the_median_of_a_majority_is_where_the_majority_stands():
    points = jnp.array([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [4.0, 0.0], [0.0, 3.0]])
    np.testing.assert_allclose(median(points), [1.0, 1.0], atol=1e-5)
    np.testing.assert_allclose(median(jnp.ones((5, 2))), [1.0, 1.0])


def test_cwmr_equals_its_definition():
    relatives, m = draw(3), 5
    phi, epsilon = norm.ppf(0.9), -0.02
    mu, sigma, ones = np.full(m, 0.2), np.eye(m) / m**2, np.ones(m)
    found = double(cwmr, relatives, epsilon, 0.9)
    for y, row in zip(relatives, found, strict=True):
        np.testing.assert_allclose(row, mu, atol=1e-7)
        earned, variance = mu @ y, y @ sigma @ y
        centre = (ones @ sigma @ y) / (ones @ sigma @ ones)
        inner = (variance - centre * (y @ sigma @ ones)) / earned**2 + variance * phi**2 / 2
        gap = epsilon - np.log(earned)
        quadratic = [
            inner**2 - variance**2 * phi**4 / 4,
            2 * gap * inner,
            gap**2 - variance * phi**2,
        ]
        step = max(0.0, *np.roots(quadratic).real)
        root = (-step * phi * variance + np.sqrt((step * phi * variance) ** 2 + 4 * variance)) / 2
        mu = nearest(mu - step * sigma @ (y - centre) / earned)
        sigma = np.linalg.inv(np.linalg.inv(sigma) + step * phi / root * np.diag(y**2))
        sigma = sigma / np.trace(sigma) / m**2


def test_anticor_equals_its_definition():
    relatives, w, m = draw(4), 6, 5
    logs, shares, rows = np.log(relatives), np.full(m, 0.2), []
    for n in range(len(relatives)):
        rows.append(shares)
        held = shares * relatives[n] / (shares @ relatives[n])
        shares = held.copy()
        if n + 1 < 2 * w:
            continue
        earlier, later = logs[n + 1 - 2 * w : n + 1 - w], logs[n + 1 - w : n + 1]
        grown = later.mean(0)
        cor = [[np.corrcoef(earlier[:, i], later[:, j])[0, 1] for j in range(m)] for i in range(m)]
        for i in range(m):
            claims = np.zeros(m)
            for j in range(m):
                if grown[i] >= grown[j] and cor[i][j] > 0:
                    claims[j] = cor[i][j] + max(0, -cor[i][i]) + max(0, -cor[j][j])
            if claims.sum() > 0:
                shares += held[i] * claims / claims.sum()
                shares[i] -= held[i]
    np.testing.assert_allclose(double(anticor, relatives, w), rows, atol=1e-12)


@given(values=st.lists(st.floats(-50, 50, width=32), min_size=6, max_size=6))
def test_projection_is_the_nearest_point_of_the_simplex(values):
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(project)(jnp.asarray(values, jnp.float64)))
    np.testing.assert_allclose(found, nearest(np.array(values)), atol=1e-9)


def test_an_olmar_that_asks_for_little_does_not_move():
    relatives = draw(5)
    np.testing.assert_allclose(double(olmar, relatives, 0.5), 0.2, atol=1e-12)
    assert double(olmar, relatives, 10.0)[20:].max() == pytest.approx(1.0)
