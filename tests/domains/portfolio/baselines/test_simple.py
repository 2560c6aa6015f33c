"""Every baseline: causal, feasible, blind to the entities' order; the simple ones by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from apportion.domains.portfolio import baselines
from apportion.domains.portfolio.baselines import BASELINES, WITHOUT_HISTORY

CONTRACT = {
    "equal-crp", "buy-and-hold", "best-crp", "universal", "exponentiated-gradient", "ons", "pamr",
    "cwmr", "olmar", "rmr", "anticor", "momentum", "inverse-volatility", "volatility-tilt",
}  # fmt: skip
# Short windows, so that 60 rows see every branch.
SHORT = {
    "anticor": lambda y: baselines.anticor(y, 7),
    "momentum": lambda y: baselines.momentum(y, 20, 3),
    "inverse-volatility": lambda y: baselines.inverse_volatility(y, 9),
    "volatility-tilt": lambda y: baselines.volatility_tilt(y, 9),
}
RUN = {name: jax.jit(SHORT.get(name, function)) for name, function in BASELINES.items()}
seeds = st.integers(0, 10_000)
every_baseline = pytest.mark.parametrize("name", sorted(BASELINES))


def draw(seed, rows=60, entities=5, spread=0.03):
    rng = np.random.default_rng(seed)
    return np.exp(spread * rng.standard_normal((rows, entities)))


def run(name, relatives):
    """In double precision, so that a difference is a difference of the algorithm."""
    with jax.enable_x64(True):
        return np.asarray(RUN[name](jnp.asarray(relatives)))


def test_the_registry_holds_the_names_of_the_contract():
    assert set(BASELINES) == CONTRACT


@every_baseline
def test_every_row_is_on_the_simplex_and_knows_what_was_before_it_alone(name):
    relatives = draw(0)
    for seed in range(3):
        allocations = run(name, draw(seed))
        assert allocations.shape == (60, 5)
        assert (allocations > -1e-6).all()
        np.testing.assert_allclose(allocations.sum(1), 1, atol=1e-6)
    np.testing.assert_allclose(run(name, np.ones((60, 5))), 0.2, atol=1e-7)
    if name != "best-crp":  # chosen in hindsight
        np.testing.assert_allclose(run(name, relatives)[0], 0.2, atol=1e-12)
    if name != "equal-crp":
        changed = relatives.copy()
        changed[30:35] = draw(1)[30:35]
        assert np.abs(run(name, relatives)[35:] - run(name, changed)[35:]).max() > 1e-6


@every_baseline
def test_single_precision_stays_on_the_simplex_through_a_long_volatile_market(name):
    relatives = jnp.asarray(draw(5, rows=400, entities=12), jnp.float32)
    allocations = np.asarray(jax.jit(BASELINES[name])(relatives))
    assert allocations.dtype == np.float32
    assert np.isfinite(allocations).all()
    assert (allocations > -1e-6).all()
    np.testing.assert_allclose(allocations.sum(1), 1, atol=1e-6)


@pytest.mark.parametrize("name", sorted(CONTRACT - {"best-crp"}))
@settings(max_examples=5)
@given(seed=seeds, row=st.integers(1, 59))
def test_later_rows_change_nothing_earlier(name, seed, row):
    relatives = draw(seed)
    changed = relatives.copy()
    changed[row:] = draw(seed + 1)[row:]
    np.testing.assert_array_equal(run(name, relatives)[: row + 1], run(name, changed)[: row + 1])


@every_baseline
@settings(max_examples=5)
@given(seed=seeds)
def test_permuting_entities_permutes_the_allocations(name, seed):
    relatives = draw(seed)
    order = np.random.default_rng(seed).permutation(5)
    there, back = run(name, relatives[:, order]), run(name, relatives)[:, order]
    np.testing.assert_allclose(there, back, atol=1e-8)


def test_buy_and_hold_earns_the_mean_of_the_instruments():
    relatives = draw(1)
    wealth = (run("buy-and-hold", relatives) * relatives).sum(1).prod()
    assert wealth == pytest.approx(relatives.prod(0).mean(), rel=1e-12)
    assert {"buy-and-hold", "best-crp"} == WITHOUT_HISTORY


@given(seed=seeds)
def test_best_crp_is_the_best_of_all_constant_shares(seed):
    relatives = draw(seed) * np.linspace(0.99, 1.01, 5)
    best = run("best-crp", relatives)
    assert np.ptp(best, axis=0).max() == 0

    def loss(b):
        return -np.log(relatives @ b).sum()

    reference = minimize(
        loss,
        np.full(5, 0.2),
        jac=lambda b: -(relatives / (relatives @ b)[:, None]).sum(0),
        bounds=[(0, 1)] * 5,
        constraints={"type": "eq", "fun": lambda b: b.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert loss(best[0]) <= reference.fun + 1e-9


def test_momentum_holds_the_half_that_grew_most_in_its_window():
    relatives = draw(2)
    row, window, skip = 40, 20, 3
    growth = np.log(relatives[row - window : row - skip]).sum(0)
    winners = growth >= np.median(growth)
    np.testing.assert_allclose(run("momentum", relatives)[row], winners / winners.sum())


def test_shares_follow_or_oppose_trailing_volatility():
    relatives = draw(4)
    deviation = np.log(relatives[31:40]).std(0, ddof=1) + 1e-6
    tilt, inverse = run("volatility-tilt", relatives)[40], run("inverse-volatility", relatives)[40]
    np.testing.assert_allclose(tilt, deviation / deviation.sum(), rtol=1e-9)
    np.testing.assert_allclose(inverse, 1 / deviation / (1 / deviation).sum(), rtol=1e-9)
    early = np.log(relatives[:4]).std(0, ddof=1) + 1e-6
    np.testing.assert_allclose(run("volatility-tilt", relatives)[4], early / early.sum(), rtol=1e-9)


def test_baselines_run_under_vmap():
    both = np.stack([draw(0), draw(1)])
    for name in ("olmar", "ons"):
        with jax.enable_x64(True):
            together = np.asarray(jax.vmap(RUN[name])(jnp.asarray(both)))
        np.testing.assert_allclose(together[1], run(name, both[1]), atol=1e-9)
