"""Winners' algorithms against plain NumPy versions written from their papers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.optimize import minimize

from apportion.domains.portfolio.baselines.online import (
    exponentiated_gradient,
    minimise_on_simplex,
    ons,
    simplex_lattice,
    universal,
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
    found = double(ons, relatives, 0.5, 0.8, 0.1)
    for y, row in zip(relatives, found, strict=True):
        np.testing.assert_allclose(row, shares, atol=1e-6)
        gradient = y / (row @ y)
        a, b = a + np.outer(gradient, gradient), b + (1 + 1 / 0.8) * gradient
        centre = 0.5 * np.linalg.solve(a, b)
        projected = minimize(
            lambda x, a=a, centre=centre: (x - centre) @ a @ (x - centre),
            np.full(5, 0.2),
            jac=lambda x, a=a, centre=centre: 2 * a @ (x - centre),
            bounds=[(0, 1)] * 5,
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1},
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 500},
        ).x
        shares = 0.9 * projected + 0.1 / 5


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
