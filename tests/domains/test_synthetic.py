"""The synthetic problem: its reward, its closed-form optimum, its augmentation, its LSPI."""

from itertools import permutations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.domains.synthetic import (
    Examples,
    draw_examples,
    entropic_allocation,
    lspi_simplex,
    permute_examples,
    reward,
    separate_basis,
    simplex_features,
    simplex_greedy,
    spaced_betas,
    tied_basis,
)
from apportion.errors import InputError
from apportion.theory.lspi import in_float64


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_closed_form_allocation_equals_bisection(scale):
    rng = np.random.default_rng(0)
    scores = scale * rng.normal(size=(3000, 10))
    temperatures = np.maximum(rng.normal(size=(3000, 10)), 0.02)
    low = (scores - temperatures).max(-1, keepdims=True)
    high = low + temperatures.max() * np.log(10) + 1
    for _ in range(100):
        middle = (low + high) / 2
        above = np.exp((scores - middle) / temperatures - 1).sum(-1, keepdims=True) > 1
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    expected = np.exp((scores - middle) / temperatures - 1)
    with jax.enable_x64(True):
        found = jax.jit(jax.vmap(entropic_allocation))(
            jnp.asarray(scores), jnp.asarray(temperatures)
        )
    assert np.abs(np.asarray(found) - expected).max() < 1e-8


BETAS = jnp.asarray(spaced_betas(10, 0.8), jnp.float32)


@pytest.fixture(scope="module")
def drawn():
    return eqx.filter_jit(draw_examples)((4000,), BETAS, key=jax.random.key(0))


def test_examples_have_the_rewards_of_the_problem_up_to_their_noise(drawn):
    shocks = drawn.rewards - reward(drawn.states, drawn.allocations, BETAS)
    assert abs(float(shocks.std()) - 0.02) < 0.001
    np.testing.assert_allclose(drawn.allocations.sum(-1), 1, atol=1e-5)
    # Dirichlet(1) on 10 entities: mean .1, variance .9 / 110.
    assert abs(float(drawn.allocations.var()) - 0.09 / 11) < 5e-4
    assert abs(float(drawn.states.mean()) - 0.5) < 0.01


def test_augmentation_keeps_the_real_examples_and_permutes_copies_of_them(drawn):
    equal = jnp.full(10, 0.5)
    states, shares, following = (
        each[:16].reshape(2, 8, 10) for each in (drawn.states, drawn.allocations, drawn.next_states)
    )
    real = Examples(states, shares, reward(states, shares, equal), following)
    more = eqx.filter_jit(permute_examples)(real, 100, key=jax.random.key(2))
    assert more.states.shape == (2, 100, 10)
    assert (more.states[:, :8] == real.states).all()
    # With equal betas a permuted example keeps its reward, if x and a moved together.
    np.testing.assert_allclose(
        reward(more.states, more.allocations, equal), more.rewards, atol=1e-5
    )
    np.testing.assert_allclose(
        np.sort(more.states[0, 50]),
        np.sort(real.states[0])[(real.rewards[0] == more.rewards[0, 50]).argmax()],
    )


def test_a_range_of_betas_that_reaches_zero_is_refused():
    with pytest.raises(InputError, match="every beta must stay above 0"):
        spaced_betas(10, 1.0)


def orbit(real):
    """All orderings of the entities of every example."""
    orders = np.array(list(permutations(range(real.states.shape[1]))))
    return Examples(
        np.concatenate([real.states[:, order] for order in orders]),
        np.concatenate([real.allocations[:, order] for order in orders]),
        np.tile(real.rewards, len(orders)),
        np.concatenate([real.next_states[:, order] for order in orders]),
    )


learn = in_float64(lambda real, basis: lspi_simplex(real, jnp.asarray(basis), 0.5))


def test_the_tied_model_is_the_average_over_all_orderings():
    real = in_float64(draw_examples)((20,), spaced_betas(5, 0.6), key=jax.random.key(1))
    tied = learn(real, tied_basis(5))
    averaged = learn(orbit(real), separate_basis(5))
    assert np.abs(tied - averaged).max() < 1e-8


def test_the_greedy_allocation_has_the_largest_q_on_the_simplex():
    rng = np.random.default_rng(0)
    theta = np.concatenate([rng.normal(size=4), rng.uniform(0.1, 1, 4), rng.normal(size=5)])
    x = rng.uniform(size=4)

    @in_float64
    def values(theta, x, others):
        best = simplex_features(x, simplex_greedy(theta, x)) @ theta
        return best, simplex_features(jnp.broadcast_to(x, others.shape), others) @ theta

    best, others = values(theta, x, rng.dirichlet(np.ones(4), 3000))
    assert others.max() <= best + 1e-12
