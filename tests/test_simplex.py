import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from apportion.simplex import Bounds, Head, equal_within, within


@st.composite
def scored(draw):
    # Few sizes, so that little is compiled; many values.
    m = draw(st.sampled_from([1, 8]))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, draw(st.sampled_from([0.1, 1.0, 30.0])), m)
    mask = rng.random(m) < draw(st.sampled_from([0.3, 1.0]))
    mask[rng.integers(m)] = True
    return jnp.asarray(scores, jnp.float32), jnp.asarray(mask)


@eqx.filter_jit
def apply(head, scores, mask):
    return head(scores, mask)


@given(scored(), st.sampled_from([(0.0, 0.25, False), (0.2, 0.9, False), (0.01, 0.5, True)]))
@settings(max_examples=60)
def test_shares_are_feasible_whatever_the_scores(scored, bounds):
    scores, mask = scored
    floor, cap, cash = bounds
    if cash:
        mask = mask.at[0].set(True)
    shares = np.asarray(apply(Head(floor, cap, cash), scores, mask), np.float64)
    real = np.asarray(mask)
    assert shares.sum() == pytest.approx(1, abs=1e-6)
    assert (shares >= 0).all()
    assert (shares[~real] == 0).all()
    bounded = real.copy()
    if cash:
        bounded[0] = False
    if bounded.any():
        even = 1 / bounded.sum()
        assert (shares[bounded] >= min(floor, even) - 1e-6).all()
        most = cap if cash else max(cap, even)
        assert (shares[bounded] <= most + 1e-6).all()


@st.composite
def bounded(draw):
    """Scores, a mask and both bounds, among them absent entities and bounds too tight to meet."""
    m = draw(st.sampled_from([1, 8]))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([0.1, 0.4, 1.5]))
    limits = rng.random(m) * size * (rng.random(m) < 0.8)
    floors = rng.random(m) * draw(st.sampled_from([0.0, 0.1, 0.5]))
    mask = rng.random(m) < 0.8
    mask[rng.integers(m)] = True
    scores = rng.normal(0, draw(st.sampled_from([0.1, 2.0, 40.0])), m)
    bounds = Bounds(jnp.asarray(limits, jnp.float32), jnp.asarray(floors, jnp.float32))
    return jnp.asarray(scores, jnp.float32), jnp.asarray(mask), bounds


@eqx.filter_jit
def apportioned(scores, mask, bounds):
    return Head()(scores, mask, bounds)


@given(bounded())
@settings(max_examples=60)
def test_limits_and_the_mask_hold_and_all_that_can_be_taken_is_given(case):
    scores, mask, bounds = case
    limits = np.where(np.asarray(mask), np.asarray(bounds.limits, np.float64), 0)
    shares = np.asarray(apportioned(scores, mask, bounds), np.float64)
    assert (shares >= 0).all()
    assert (shares <= limits + 1e-6).all()
    assert shares.sum() == pytest.approx(min(1.0, np.minimum(limits, 1).sum()), abs=1e-6)


@given(bounded())
def test_floors_hold_wherever_they_fit(case):
    scores, mask, bounds = case
    m, real = len(scores), np.asarray(mask)
    floors = np.minimum(np.asarray(bounds.floors), 0.9 / m)
    roomy = Bounds(jnp.full(m, 0.95 / max(real.sum(), 1) + 0.1), jnp.asarray(floors, jnp.float32))
    shares = np.asarray(apportioned(scores, mask, roomy), np.float64)
    assert (shares[real] >= floors[real] - 1e-6).all()


@given(bounded(), st.floats(-40, 40), st.booleans())
def test_an_absent_entity_changes_nobodys_share(case, score, real):
    scores, mask, bounds = case
    more = Bounds(jnp.append(bounds.limits, 0.0), jnp.append(bounds.floors, 0.3))
    shares = apportioned(jnp.append(scores, np.float32(score)), jnp.append(mask, real), more)
    assert float(shares[-1]) == 0
    without = apportioned(scores, mask, bounds)
    assert np.asarray(shares[:-1]) == pytest.approx(np.asarray(without), abs=2e-6)


def test_within_limits_shares_are_those_of_the_nearest_allocation_in_relative_entropy():
    shares, limits = np.array([0.6, 0.25, 0.1, 0.05]), np.array([0.3, 0.3, 0.3, 0.3])
    result = optimize.minimize(
        lambda a: (a * np.log(a / shares)).sum(),
        np.full(4, 0.25),
        bounds=[(1e-9, high) for high in limits],
        constraints={"type": "eq", "fun": lambda a: a.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    given = jnp.asarray(shares, jnp.float32), jnp.ones(4, bool), Bounds(jnp.asarray(limits))
    found = eqx.filter_jit(within)(*given)
    assert result.success
    assert np.asarray(found) == pytest.approx(result.x, abs=1e-4)


@pytest.mark.parametrize("room", [0.2, 0.6])
def test_gradients_through_bounds_are_finite_differences(room):
    # Of the scores, then of the limits.
    point = jnp.array([0.4, 0.2, 0.3, 9.0, room, 0.5, 0.5, 0.0])
    gradient, numeric = (np.asarray(found) for found in slopes(point))
    moved = [0, 1, 2, 4, 5, 6]
    assert gradient[moved] == pytest.approx(numeric[moved], abs=3e-3)


@jax.jit
def slopes(point):
    """Of what is earned by the derivative, and by small steps to both sides."""

    def worth(point):
        bounds = Bounds(point[4:], jnp.array([0.0, 0.0, 0.05, 0.0]))
        return Head()(point[:4], jnp.ones(4, bool), bounds) @ jnp.array([1.0, 2.0, -1.0, 5.0])

    steps = 1e-2 * jnp.eye(8)
    numeric = jax.vmap(lambda step: (worth(point + step) - worth(point - step)) / 2e-2)(steps)
    return jax.grad(worth)(point), numeric


def test_cash_takes_what_no_other_can_and_equal_shares_rise_alike_until_full():
    bounds = Bounds(jnp.array([1.0, 0.1, 0.2]))
    shares = eqx.filter_jit(Head(cash=True))(jnp.zeros(3), jnp.ones(3, bool), bounds)
    assert np.asarray(shares) == pytest.approx(np.array([0.7, 0.1, 0.2]), abs=1e-6)
    # The limit of a period holds for the first entity, too: it may not be cash.
    bounds = Bounds(jnp.array([0.1, 1.0, 1.0]))
    shares = eqx.filter_jit(Head(cash=True))(jnp.zeros(3), jnp.ones(3, bool), bounds)
    assert np.asarray(shares) == pytest.approx(np.array([0.1, 0.45, 0.45]), abs=1e-6)
    shares = eqx.filter_jit(equal_within)(
        jnp.ones(4, bool), Bounds(jnp.array([0.1, 0.5, 0.5, 0.0]))
    )
    assert np.asarray(shares) == pytest.approx(np.array([0.1, 0.45, 0.45, 0.0]), abs=1e-6)


@pytest.mark.parametrize(
    ("shares", "limits", "expected"),
    [
        ([0.0, 1.0], [1.0, 1.0], [0.0, 1.0]),
        ([0.0, 1.0], [1.0, 0.7], [0.3, 0.7]),
        ([0.0, 0.0], [1.0, 1.0], [0.5, 0.5]),
        ([0.0, 0.0, 1.0], [0.2, 0.0, 0.5], [0.2, 0.0, 0.5]),
        ([1e-20, 1.0], [1.0, 1.0], [0.0, 1.0]),
    ],
)
def test_extreme_shares_are_apportioned_too(shares, limits, expected):
    found = eqx.filter_jit(within)(
        jnp.array(shares), jnp.ones(len(shares), bool), Bounds(jnp.array(limits))
    )
    assert np.asarray(found) == pytest.approx(np.array(expected), abs=1e-6)
