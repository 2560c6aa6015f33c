"""The market as a problem: its accounting, its windows, its costs, and that it never looks ahead."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from apportion.composition import EqualShares
from apportion.domains.portfolio import Costs, Market, SimulatedMarket
from apportion.errors import InputError
from apportion.problem import rollout
from apportion.tasks import draw_tasks

KEY = jax.random.key(0)
TRUTH = SimulatedMarket.draw(universe=6, days=60, seed=3)
TASKS = draw_tasks(6, 4, 5, seed=1)
step_of = eqx.filter_jit(Market.step)


def test_a_window_ends_at_the_close_before_its_period():
    market = Market.of(TRUTH.prices, window=8)
    task = TASKS[0]
    seen = np.asarray(market.windows(task, jnp.array(5)))
    members = np.asarray(task.members)
    values = TRUTH.prices.values()[5:13][:, members].swapaxes(0, 1)
    last = TRUTH.prices.close[12, members][:, None, None]
    np.testing.assert_allclose(seen, 10 * (values / last - 1), atol=2e-4)
    raw = replace(market, centre=0.0, scale=1.0).windows(task, jnp.array(5))
    np.testing.assert_allclose(raw, values / last, rtol=1e-5)
    y = np.asarray(market.relatives(task, jnp.array(5)))
    close = TRUTH.prices.close[:, members]
    np.testing.assert_allclose(y, close[13] / close[12], rtol=1e-5)


def test_a_step_rewards_log_growth_after_costs_and_drifts():
    market = Market.of(TRUTH.prices, window=8, costs=Costs(0.01))
    task = TASKS[0]
    state = market.reset(task, key=KEY)
    a = jnp.array([0.7, 0.1, 0.1, 0.1])
    step = step_of(market, task, state, a, key=KEY)
    y = np.asarray(market.relatives(task, state.n))
    growth = float((a * y).sum())
    left = 1 - 0.01 * (0.45 + 3 * 0.15)
    assert float(step.reward) == pytest.approx(np.log(left * growth), abs=1e-6)
    np.testing.assert_allclose(step.state.held, np.asarray(a) * y / growth, rtol=1e-5)
    assert int(step.state.n) == 1


def test_the_tracking_penalty_is_nothing_at_equal_shares_and_grows_with_distance():
    plain = Market.of(TRUTH.prices, window=8)
    strict = Market.of(TRUTH.prices, window=8, tracking=15.0)
    task, state = TASKS[0], plain.reset(TASKS[0], key=KEY)

    def gap(a):
        a = jnp.array(a)
        rewards = [step_of(m, task, state, a, key=KEY).reward for m in (plain, strict)]
        return float(rewards[0] - rewards[1])

    assert gap([0.25] * 4) == pytest.approx(0, abs=1e-9)
    y = np.asarray(plain.relatives(task, state.n))
    behind = np.log(y[0]) - np.log(y.mean())
    assert gap([1.0, 0, 0, 0]) == pytest.approx(15 * behind**2, rel=1e-3)


def test_cash_is_a_constant_price_that_pays_no_commission():
    market = Market.of(TRUTH.prices, window=8, costs=Costs(0.01, cash=True))
    tasks = TASKS.with_entity(market.universe - 1)
    assert market.universe == 7
    state = market.reset(tasks[0], key=KEY)
    cash = jnp.array([1.0, 0, 0, 0, 0])
    step = step_of(market, tasks[0], state, cash, key=KEY)
    assert float(step.reward) == pytest.approx(np.log(1 - 0.01 * 0.8), abs=1e-6)
    assert np.asarray(market.windows(tasks[0], state.n))[0] == pytest.approx(0)


def test_an_episode_may_be_shorter_than_the_horizon():
    market = Market.of(TRUTH.prices, window=8)
    short = eqx.tree_at(lambda m: m.length, market, jnp.array(3, jnp.int32))
    assert int(rollout(short, EqualShares(), TASKS[0], key=KEY).alive.sum()) == 3


def test_a_commission_that_nobody_takes_is_refused():
    for rate in (0.7, -0.1, np.nan):
        with pytest.raises(InputError, match=f"cost is {rate}"):
            Costs(rate)


SHARES = st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(lambda x: sum(x) > 0.1)
RATES = st.floats(0, 0.1)


@eqx.filter_jit
def factor(rate, w, a, exact, cash=False):
    return Costs(rate, exact=exact, cash=cash).cost_factor(w, a)


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
        mu = float(factor(jax.device_put(rate), jax.device_put(w), jax.device_put(a), True, cash))
    assert abs(residual(mu, w, a, rate, cash)) <= 1e-12
    assert 0 < mu <= 1 + 1e-12


@given(held=SHARES, wanted=SHARES, rate=st.floats(0, 0.01))
def test_the_approximation_errs_by_at_most_two_c_squared(held, wanted, rate):
    w, a = simplex(held), simplex(wanted)
    with jax.enable_x64(True):
        w, a, c = (jax.device_put(value) for value in (w, a, rate))
        rough, exact = (factor(c, w, a, exact) for exact in (False, True))
        gap = abs(float(rough - exact))
    assert gap <= 2 * rate**2 + 1e-15


@pytest.mark.parametrize("cash", [False, True])
def test_the_exact_factors_gradient_is_that_of_finite_differences(cash):
    w, a = simplex([0.3, 0.1, 0.4, 0.2]), simplex([0.1, 0.35, 0.15, 0.4])
    with jax.enable_x64(True):
        costs = Costs(0.02, exact=True, cash=cash)
        held = jnp.asarray(w)
        kept = jax.jit(lambda a: costs.cost_factor(held, a))
        check_grads(kept, (jnp.asarray(a),), 1, ["rev"], rtol=1e-6)
