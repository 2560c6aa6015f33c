from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from apportion.errors import InputError
from apportion.kernels.gpu import read_before_write
from apportion.priority import _LEAST_SCORE, Priority
from learning import optimised

FIRST = jax.device_put(np.int32(0))


def numpy_priority(scores, alpha, beta):
    """Probabilities and weights straight from the formulas, in float64."""
    powers = scores**alpha
    p = powers / powers.sum()
    w = (len(scores) * p) ** -beta
    return p, w / w.max()


def set_score(priority, state, task, value):
    """One update of one task."""
    drawn = priority.look(state, jnp.asarray(task, jnp.int32), FIRST)
    return priority.update(state, drawn, jnp.asarray(value))


@jax.jit
def replay(priority, state, tasks, values):
    def one(state, update):
        task, value = update
        # As the algorithm reads it: left alone, the compiler copies a million scores at every update.
        drawn = read_before_write(lambda task: priority.look(state, task, FIRST), task)
        return priority.update(state, drawn, value), None

    return jax.lax.scan(one, state, (tasks, values))[0]


# With the state as an argument: a million scores inside a program take ten seconds to lower.
@jax.jit
def draws(priority, state, keys):
    return jax.vmap(lambda key: priority.draw(state, FIRST, key=key).task)(keys)


@jax.jit
def looks(priority, state, tasks):
    return jax.vmap(lambda task: priority.look(state, task, FIRST))(tasks)


@partial(jax.jit, static_argnames="total")
def drawn_after(priority, total, task, value, key):
    """The task that is drawn after one update of one task."""
    state = set_score(priority, priority.start(total), task, value)
    return priority.draw(state, FIRST, key=key).task


def after_updates(priority, total, values, seed):
    """The state after 10,000 updates, and whose they were."""
    tasks = np.random.default_rng(seed).integers(0, total, 10_000)
    given = jnp.asarray(tasks, jnp.int32), jnp.asarray(values, jnp.float32)
    return replay(priority, priority.start(total), *given), tasks


# One level of blocks, and three.
TOTALS = pytest.mark.parametrize("total", [10, 1_000_000])


@TOTALS
def test_after_ten_thousand_updates_probabilities_and_weights_are_exact(total):
    rng = np.random.default_rng(total)
    priority = Priority(alpha=0.7, beta=0.6, smoothing=0.2)
    values = rng.lognormal(-2, 2, 10_000)
    state, tasks = after_updates(priority, total, values, seed=total)
    scores = np.ones(total)
    for t, value in zip(tasks, values.astype(np.float32), strict=True):
        scores[t] = 0.2 * scores[t] + 0.8 * max(value, _LEAST_SCORE)
    p, w = numpy_priority(scores, 0.7, 0.6)
    np.testing.assert_allclose(np.asarray(priority.probabilities(state)), p, rtol=1e-5)
    some = np.concatenate([tasks[:200], rng.integers(0, total, 200), [scores.argmin()]])
    drawn = looks(priority, state, jnp.asarray(some, jnp.int32))
    np.testing.assert_allclose(np.asarray(drawn.weight), w[some], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(drawn.probability), p[some], rtol=1e-5)
    assert float(drawn.weight.max()) == 1


@TOTALS
@optimised()
def test_draws_follow_the_probabilities(total):
    priority = Priority(alpha=1.0)
    values = np.random.default_rng(1).lognormal(0, 1, 10_000)
    state, _ = after_updates(priority, total, values, seed=1)
    drawn = np.asarray(draws(priority, state, jax.random.split(jax.random.key(0), 100_000)))
    assert drawn.min() >= 0
    assert drawn.max() < total
    # Groups that each expect hundreds of draws; the last digits group leaves of different blocks.
    groups = np.arange(total) % min(total, 200)
    expected = np.bincount(groups, np.asarray(priority.probabilities(state), np.float64))
    observed = np.bincount(groups[drawn], minlength=len(expected))
    assert stats.chisquare(observed, 100_000 * expected / expected.sum()).pvalue > 1e-3


@given(st.sampled_from([1, 128, 300]), st.integers(0, 10**6))
def test_a_task_with_all_the_mass_is_always_found(total, seed):
    rng = np.random.default_rng(seed)
    leader = int(rng.integers(total))
    priority = Priority(alpha=1.0, smoothing=0.0, initial=1e-6)
    assert int(drawn_after(priority, total, leader, 1e6, jax.random.key(seed))) == leader


def test_alpha_zero_is_uniform_with_weights_of_one_and_no_score_falls_to_zero():
    priority = Priority(alpha=0.0)
    state, tasks = after_updates(priority, 10, np.full(10_000, 50.0), seed=2)
    assert np.asarray(priority.probabilities(state)) == pytest.approx(np.full(10, 0.1))
    assert (looks(priority, state, jnp.asarray(tasks[:401], jnp.int32)).weight == 1).all()
    state, _ = after_updates(Priority(smoothing=0.0), 10, np.zeros(10_000), seed=2)
    assert np.asarray(state.scores) == pytest.approx(np.full(10, _LEAST_SCORE))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"alpha": -0.1}, "alpha is -0.1"),
        ({"smoothing": 1.0}, "smoothing is 1.0"),
        ({"initial": 0.0}, "initial score is 0.0"),
    ],
)
def test_bad_settings_get_one_sentence(settings, words):
    with pytest.raises(InputError, match=words):
        Priority(**settings)


def test_beta_may_be_a_schedule():
    priority = Priority(alpha=1.0, beta=optax.linear_schedule(0.0, 1.0, 100), smoothing=0.0)

    @jax.jit
    def weights(steps):
        state = set_score(priority, priority.start(2), 0, 4.0)
        return jax.vmap(lambda step: priority.look(state, FIRST, step).weight)(steps)

    assert np.asarray(weights(jnp.array([0, 50, 100]))) == pytest.approx([1.0, 0.5, 0.25])
