import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from apportion.errors import InputError
from apportion.simplex import Dirichlet, GaussianScores, Head, LogisticNormal


@st.composite
def scored(draw, sizes=(1, 2, 7, 64)):
    # Few sizes, so that little is compiled; many values.
    m = draw(st.sampled_from(sizes))
    seed = draw(st.integers(0, 2**31))
    rng = np.random.default_rng(seed)
    scores = rng.normal(0, draw(st.sampled_from([0.1, 1.0, 30.0])), m)
    mask = rng.random(m) < draw(st.sampled_from([0.3, 1.0]))
    mask[rng.integers(m)] = True
    return jnp.asarray(scores, jnp.float32), jnp.asarray(mask)


@eqx.filter_jit
def apply(head, scores, mask):
    return head(scores, mask)


@given(scored(), st.sampled_from([(0.0, 0.25), (0.01, 0.5), (0.2, 1.0), (0.0, 1.0)]), st.booleans())
@settings(max_examples=60)
def test_shares_are_feasible_whatever_the_scores(scored, bounds, cash):
    scores, mask = scored
    floor, cap = bounds
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


@given(scored((1, 5, 12)))
def test_bounded_shares_are_those_of_the_water_level_found_by_bisection(scored):
    scores, mask = scored
    real = np.asarray(mask)
    m = int(real.sum())
    floor, cap = 0.4 / m, min(1.0, 1.5 / m)
    shares = np.asarray(apply(Head(floor, cap), scores, mask))
    s = np.where(real, np.asarray(scores, np.float64), -np.inf)
    p = np.where(real, np.exp(np.maximum(s, s.max() - 30) - s.max()), 0)
    p = p / p.sum()

    def excess(log_tau):
        return np.where(real, np.clip(np.exp(log_tau) * p, floor, cap), 0).sum() - 1

    if m == 1:
        expected = real.astype(float)
    else:
        tau = np.exp(optimize.brentq(excess, -5, 60, xtol=1e-13))
        expected = np.where(real, np.clip(tau * p, floor, cap), 0)
    assert shares == pytest.approx(expected, abs=2e-6)


def test_the_bounded_head_is_differentiable():
    def share(scores):
        return Head(0.05, 0.4)(scores, jnp.ones(4, bool))[1]

    scores = jnp.array([2.0, 0.1, 0.0, -3.0])
    gradient = jax.grad(share)(scores)
    steps = 1e-2 * np.eye(4, dtype="f4")
    numeric = [(share(scores + step) - share(scores - step)) / 2e-2 for step in steps]
    assert np.asarray(gradient) == pytest.approx(np.asarray(numeric), abs=2e-3)
    assert float(jnp.abs(gradient).max()) > 0.01


def test_impossible_bounds_are_refused():
    with pytest.raises(InputError, match="floor"):
        Head(floor=0.5, cap=0.4)


@eqx.filter_jit
def act(explore, scores, mask, key):
    action = explore.sample(scores, mask, key=key)
    return action, explore.share(action, mask)


@eqx.filter_jit
def log_prob(explore, scores, mask, action):
    return explore.log_prob(scores, mask, action)


EXPLORATIONS = [GaussianScores(0.7), LogisticNormal(0.7), Dirichlet(2.0)]


@pytest.mark.parametrize("explore", EXPLORATIONS, ids=lambda e: type(e).__name__)
@given(scored=scored((1, 6)), seed=st.integers(0, 1000))
def test_explored_allocations_are_feasible_and_padding_changes_no_density(explore, scored, seed):
    scores, mask = scored
    scores = scores / jnp.maximum(jnp.abs(scores).max(), 1.0)
    action, shares = act(explore, scores, mask, jax.random.key(seed))
    shares = np.asarray(shares, np.float64)
    assert shares.sum() == pytest.approx(1, abs=1e-5)
    assert (shares >= 0).all()
    assert (shares[~np.asarray(mask)] == 0).all()
    density = log_prob(explore, scores, mask, action)
    wider = (jnp.append(x, extra) for x, extra in ((scores, 3.0), (mask, False), (action, 5.0)))
    assert float(log_prob(explore, *wider)) == pytest.approx(float(density), rel=1e-5, abs=1e-5)


def test_gaussian_log_probabilities_are_scipys():
    scores, action = jnp.array([0.3, -1.0, 0.5]), jnp.array([0.0, -0.2, 0.1])
    mask = jnp.ones(3, bool)
    explore = GaussianScores(0.7)
    law = stats.norm(np.asarray(scores), 0.7)
    assert float(explore.log_prob(scores, mask, action)) == pytest.approx(
        law.logpdf(np.asarray(action)).sum(), rel=1e-5
    )
    assert float(explore.entropy(scores, mask)) == pytest.approx(law.entropy().sum(), rel=1e-5)


def test_dirichlet_log_probabilities_are_scipys():
    scores, mask = jnp.array([0.3, -1.0, 0.5, 9.0]), jnp.array([True, True, True, False])
    explore = Dirichlet(2.0)
    alpha = 2.0 * 3 * np.asarray(jax.nn.softmax(scores[:3]), np.float64)
    law = stats.dirichlet(alpha)
    shares = np.array([0.2, 0.5, 0.3])
    action = jnp.append(jnp.log(jnp.asarray(shares, jnp.float32)), 0.0)
    assert float(explore.log_prob(scores, mask, action)) == pytest.approx(
        law.logpdf(shares), rel=1e-4
    )
    assert float(explore.entropy(scores, mask)) == pytest.approx(law.entropy(), rel=1e-4)


def test_logistic_normal_density_integrates_to_one():
    explore, scores, mask = LogisticNormal(0.8), jnp.array([0.4, -0.3]), jnp.ones(2, bool)

    def density(a):
        action = jnp.log(jnp.asarray([a, 1 - a], jnp.float32))
        return float(jnp.exp(explore.log_prob(scores, mask, action)))

    mass, _ = integrate.quad(density, 0, 1, limit=200)
    assert mass == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("m", [2, 3, 8])
def test_logistic_normal_entropy_is_the_mean_of_minus_log_density(m):
    explore = LogisticNormal(0.8)
    scores, mask = jnp.linspace(-1.0, 1.5, m), jnp.ones(m, bool)

    def surprise(key):
        return -explore.log_prob(scores, mask, explore.sample(scores, mask, key=key))

    drawn = np.asarray(jax.vmap(surprise)(jax.random.split(jax.random.key(0), 100_000)))
    error = drawn.std() / np.sqrt(len(drawn))
    assert float(explore.entropy(scores, mask)) == pytest.approx(drawn.mean(), abs=4.5 * error)


def test_dirichlet_samples_have_the_policys_shares_as_mean():
    explore, scores, mask = Dirichlet(5.0), jnp.array([1.0, 0.0, -1.0]), jnp.ones(3, bool)
    keys = jax.random.split(jax.random.key(0), 20_000)
    shares = jax.vmap(lambda k: explore.share(explore.sample(scores, mask, key=k), mask))(keys)
    assert np.asarray(shares.mean(0)) == pytest.approx(np.asarray(jax.nn.softmax(scores)), abs=5e-3)
