from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from apportion.errors import InputError
from apportion.policy import GaussianLogits, Pooled, Recurrent, assert_equivariant
from apportion.problem import Observation
from apportion.simplex import Head

WINDOW, CHANNELS = 6, 2


def awake(policy):
    """The same network with a head that is not near zero, so that shares differ."""
    sizes = policy.score.of_features.shape
    return eqx.tree_at(
        lambda p: (p.score.of_features, p.score.of_held),
        policy,
        (2 * jax.random.normal(jax.random.key(7), sizes), jnp.array(1.5)),
    )


@cache
def make(kind):
    return awake(kind(CHANNELS, key=jax.random.key(3)))


KINDS = [Recurrent, Pooled]


@cache
def jitted(kind):
    return eqx.filter_jit(make(kind))


def observe(m, seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    history, held = rng.normal(size=(m, WINDOW, CHANNELS)), rng.dirichlet(np.ones(m))
    return Observation(*(jax.device_put(array.astype(dtype)) for array in (history, held)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_untrained_policy_gives_nearly_equal_shares_in_the_precision_it_is_given(kind):
    policy = kind(CHANNELS, key=jax.random.key(0))
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, policy)
    shares = eqx.filter_jit(half)(observe(10, 1, jnp.bfloat16), jnp.ones(10, bool))
    assert shares.dtype == jnp.bfloat16
    assert float(jnp.abs(shares - 0.1).max()) < 0.02


def test_pooling_lets_entities_see_each_other_and_the_recurrent_policy_does_not():
    one, other = observe(4, 0), observe(4, 1)
    mixed = Observation(one.history.at[3].set(other.history[3]), one.held)
    mask = jnp.ones(4, bool)

    @eqx.filter_jit
    def ratio(policy, observation):
        features = policy.encode(observation.history, mask)
        scores = policy.logits(features, observation.held, mask)
        return scores[0] - scores[1]

    seeing, blind = (
        [float(ratio(make(kind), seen)) for seen in (one, mixed)] for kind in (Pooled, Recurrent)
    )
    assert seeing[0] != pytest.approx(seeing[1], abs=1e-4)
    assert blind[0] == pytest.approx(blind[1], abs=1e-6)


def test_the_recurrent_policy_is_the_formula_in_numpy():
    policy, observation = make(Recurrent), observe(5, 2)
    h = np.zeros((5, 25))
    r = policy.recurrence
    for n in range(WINDOW):
        x = np.asarray(observation.history)[:, n]
        h = np.tanh(
            x @ np.asarray(r.from_input) + h @ np.asarray(r.from_state) + np.asarray(r.bias)
        )
    scores = h @ np.asarray(policy.score.of_features) + 1.5 * np.asarray(observation.held)
    expected = np.exp(scores - scores.max())
    shares = eqx.filter_jit(policy)(observation, jnp.ones(5, bool))
    assert np.asarray(shares) == pytest.approx(expected / expected.sum(), abs=1e-5)


def test_assert_equivariant_passes_ours_and_catches_a_policy_that_plays_favourites():
    assert_equivariant(jitted(Pooled), window=WINDOW, channels=CHANNELS)

    @jax.jit
    def favourite(observation, mask):
        return Head()(observation.history[:, -1, 0] + jnp.arange(mask.shape[0]), mask)

    with pytest.raises(InputError, match="not permutation equivariant"):
        assert_equivariant(favourite, window=WINDOW, channels=CHANNELS)

    @jax.jit
    def careless(observation, mask):
        return jax.nn.softmax(observation.history[:, -1, 0])

    with pytest.raises(InputError, match="apply the mask"):
        assert_equivariant(careless, window=WINDOW, channels=CHANNELS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_empty_house_gets_nothing_and_teaches_nothing(kind):
    policy, seen = make(kind), observe(4, 1)
    empty = Observation(seen.history, seen.held, jnp.zeros(4))

    def given(policy):
        return policy(empty, jnp.ones(4, bool)).sum()

    total, gradient = eqx.filter_jit(eqx.filter_value_and_grad(given))(policy)
    assert float(total) == 0
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(gradient))


def test_the_gradient_through_pooling_is_that_of_double_precision():
    # A compiler that computes what is pooled twice, rounding differently, must not lose the largest.
    policy = Pooled(channels=2, hidden=4, key=jax.random.key(0))
    windows = jax.random.uniform(jax.random.key(1), (64, 3, 1, 2))
    mask, held = jnp.ones(3, bool), jnp.full(3, 1 / 3)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(policy, windows, held):
        def scores(window):
            return policy.logits(policy.encode(window, mask), held, mask)

        return jax.vmap(scores)(windows).sum()

    found = gradient(policy, windows, held)
    with jax.enable_x64(True):
        doubled = jax.tree.map(lambda x: x.astype(float), (policy, windows, held))
        expected = gradient(*doubled)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


EXPLORE = GaussianLogits(0.7)


@eqx.filter_jit
def explored(scores, mask, key):
    """An action, its shares, and its log-density."""
    action = EXPLORE.sample(scores, mask, key=key)
    return action, Head()(action, mask), EXPLORE.log_prob(scores, mask, action)


@given(m=st.sampled_from([1, 6]), seed=st.integers(0, 10**6))
def test_explored_allocations_are_feasible_and_their_density_is_scipys(m, seed):
    rng = np.random.default_rng(seed)
    scores, mask = rng.normal(size=m).astype(np.float32), rng.random(m) < 0.6
    mask[rng.integers(m)] = True
    action, shares, density = explored(
        jax.device_put(scores), jax.device_put(mask), jax.random.key(seed)
    )
    shares, law = np.asarray(shares, np.float64), stats.norm(scores, 0.7)
    assert shares.sum() == pytest.approx(1, abs=1e-5)
    assert (shares >= 0).all()
    assert (shares[~mask] == 0).all()
    # Who is masked has no part in the density.
    assert float(density) == pytest.approx(law.logpdf(action)[mask].sum(), rel=1e-4, abs=1e-4)
