import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from apportion.exploration import GaussianScores
from apportion.simplex import Bounds


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
def act(explore, scores, mask, key):
    action = explore.sample(scores, mask, key=key)
    return action, explore.share(action, mask)


@eqx.filter_jit
def log_prob(explore, scores, mask, action):
    return explore.log_prob(scores, mask, action)


@pytest.mark.parametrize("explore", [GaussianScores(0.7)], ids=lambda e: type(e).__name__)
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
    assert float(log_prob(explore, scores, mask, action)) == pytest.approx(
        law.logpdf(np.asarray(action)).sum(), rel=1e-5
    )


@pytest.mark.parametrize("explore", [GaussianScores(0.7)], ids=lambda e: type(e).__name__)
def test_explored_allocations_keep_to_the_limits_and_use_all_that_can_be_taken(explore):
    scores, mask = jnp.array([2.0, 0.0, -1.0, 0.5]), jnp.array([True, True, True, False])
    limits = jnp.array([0.1, 0.4, 0.3, 1.0])

    def explored(key):
        return explore.share(explore.sample(scores, mask, key=key), mask, Bounds(limits))

    shares = np.asarray(jax.jit(jax.vmap(explored))(jax.random.split(jax.random.key(0), 200)))
    assert (shares <= np.asarray(jnp.where(mask, limits, 0.0)) + 1e-6).all()
    assert shares.sum(-1) == pytest.approx(np.full(200, 0.8), abs=1e-6)
