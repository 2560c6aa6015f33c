"""What a rebalance keeps, by the equation it must solve."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apportion.domains.portfolio.market import Costs
from apportion.errors import InputError

SHARES = st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(lambda x: sum(x) > 0.1)
RATES = st.floats(0, 0.1)


def simplex(values) -> np.ndarray:
    values = np.asarray(values, float)
    return values / values.sum()


def residual(mu, w, a, c, cash: bool):
    """How far mu is from solving Jiang et al.'s equation (their 14), in double precision."""
    w0, a0 = (w[0], a[0]) if cash else (0.0, 0.0)
    w, a = (w[1:], a[1:]) if cash else (w, a)
    sold = np.maximum(w - mu * a, 0).sum()
    return mu - (1 - c * w0 - (2 * c - c**2) * sold) / (1 - c * a0)


@pytest.mark.parametrize("cash", [False, True])
@given(held=SHARES, wanted=SHARES, rate=RATES)
def test_the_exact_factor_solves_its_equation_to_1e_12(cash, held, wanted, rate):
    w, a = simplex(held), simplex(wanted)
    with jax.enable_x64(True):
        mu = float(Costs(rate, exact=True, cash=cash).cost_factor(jnp.asarray(w), jnp.asarray(a)))
    assert abs(residual(mu, w, a, rate, cash)) <= 1e-12
    assert 0 < mu <= 1 + 1e-12


@given(held=SHARES, wanted=SHARES)
def test_money_is_conserved_by_the_exact_factor(held, wanted):
    """What is left after selling, buying and both commissions is the wealth it says."""
    w, a, c = simplex(held), simplex(wanted), 0.01
    with jax.enable_x64(True):
        mu = float(Costs(c, exact=True).cost_factor(jnp.asarray(w), jnp.asarray(a)))
    proceeds = (1 - c) * np.maximum(w - mu * a, 0).sum()
    bought = np.maximum(mu * a - w, 0).sum()
    np.testing.assert_allclose((1 - c) * proceeds, bought, atol=1e-12)


@given(held=SHARES, wanted=SHARES, rate=st.floats(0, 0.01))
def test_the_approximation_errs_by_at_most_two_c_squared(held, wanted, rate):
    w, a = simplex(held), simplex(wanted)
    with jax.enable_x64(True):
        w, a = jnp.asarray(w), jnp.asarray(a)
        rough, exact = (Costs(rate, exact=exact).cost_factor(w, a) for exact in (False, True))
        gap = abs(float(rough - exact))
    assert gap <= 2 * rate**2 + 1e-15


def test_nothing_traded_costs_nothing_and_no_commission_keeps_all():
    w, a = jnp.array([0.2, 0.3, 0.5]), jnp.array([0.6, 0.3, 0.1])
    for exact in (False, True):
        assert float(Costs(0.0025, exact=exact).cost_factor(w, w)) == pytest.approx(1, abs=1e-7)
        assert float(Costs(0.0, exact=exact).cost_factor(w, a)) == pytest.approx(1, abs=1e-7)


def test_moving_to_cash_pays_one_commission_only():
    cash, stock = jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])
    costs = Costs(0.01, exact=True, cash=True)
    assert float(costs.cost_factor(stock, cash)) == pytest.approx(0.99, abs=1e-6)
    assert float(costs.cost_factor(cash, stock)) == pytest.approx(0.99, abs=1e-6)
    assert float(Costs(0.01, exact=True).cost_factor(cash, stock)) == pytest.approx(
        0.99**2, abs=1e-6
    )


@pytest.mark.parametrize("cash", [False, True])
def test_the_exact_factors_gradient_is_that_of_finite_differences(cash):
    w, a = simplex([0.3, 0.1, 0.4, 0.2]), simplex([0.1, 0.35, 0.15, 0.4])
    with jax.enable_x64(True):
        costs = Costs(0.02, exact=True, cash=cash)
        gradient = jax.grad(lambda a: costs.cost_factor(jnp.asarray(w), a))(jnp.asarray(a))
        for i in range(4):
            step = np.eye(4)[i] * 1e-6
            up, down = (
                float(costs.cost_factor(jnp.asarray(w), jnp.asarray(a + s))) for s in (step, -step)
            )
            assert float(gradient[i]) == pytest.approx((up - down) / 2e-6, abs=1e-8)


def test_a_commission_outside_its_range_is_refused():
    with pytest.raises(InputError, match="commission 0.7"):
        Costs(0.7)
