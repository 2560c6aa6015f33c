from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from apportion import memory as replay
from apportion.composition import LimitedTurnover
from apportion.domains.probes import ShownBest
from apportion.errors import InputError
from apportion.learners.direct import Direct, DirectEpisodes, lookback
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Recurrent
from apportion.priority import Priority
from apportion.tasks import draw_tasks
from learning import assert_mean_above, fractions_of_best, train_seeds
from probe_problems import HeldPays

KEY = jax.random.key(0)
TASKS = draw_tasks(12, 4, 1)


def batch_of(problem, length, warm_up):
    @eqx.filter_jit
    def drawn(problem):
        memory = replay.start(problem, TASKS, slots=1, length=warm_up, warm_up=warm_up, key=KEY)
        return replay.sample(memory, jnp.asarray(0), length, horizon=warm_up, recency=0.0, key=KEY)

    return drawn(problem)


def steep(policy):
    return eqx.tree_at(lambda p: p.score.of_features, policy, 50 * policy.score.of_features)


def gradient(objective, problem, policy, batch):
    @eqx.filter_jit
    @eqx.filter_grad
    def loss(policy):
        return objective(problem, TASKS[0], policy, batch, KEY).rewards.mean()

    return jax.flatten_util.ravel_pytree(eqx.filter(loss(policy), eqx.is_array))[0]


def unroll(problem, task, policy, batch, key):
    """The whole walk from the batch's first state."""
    state, rewards = jax.tree.map(lambda leaf: leaf[0], batch.states), []
    for _ in batch.rows:
        step = problem.step(task, state, policy(problem.observe(task, state), task.mask), key=key)
        state = step.state
        rewards.append(step.reward)
    return SimpleNamespace(rewards=jnp.stack(rewards))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Direct(8, -1.0), "learning_rate is -1.0; it must be a finite number above 0"),
        (lambda: Direct(8, jnp.array([0.1, np.nan])), "learning_rate is nan"),
        (lambda: PPO(4, 0.0), "learning_rate is 0.0"),
        (lambda: Direct(0), "periods is 0"),
        (lambda: DirectEpisodes(0), "episodes is 0"),
        (lambda: PPO(rollouts=1), "rollouts is 1; it must be a whole number from 2"),
    ],
)
def test_sizes_and_rates_that_cannot_be_are_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_looking_back_is_unrolling_where_effects_last_one_period():
    problem = HeldPays()
    policy, batch = steep(Recurrent(1, 6, key=KEY)), batch_of(problem, 4, 16)
    near = gradient(lookback, problem, policy, batch)
    full = gradient(unroll, problem, policy, batch)
    # The last parameter reads the held share, which memory and the walk know differently.
    assert np.asarray(near)[:-1] == pytest.approx(np.asarray(full)[:-1], abs=1e-5)
    assert float(jnp.abs(full[:-1]).max()) > 1e-3


def test_the_weight_scales_the_step_and_the_loss_but_not_the_gradient_norm_and_limits_stay():
    problem = HeldPays()
    inside, batch = steep(Recurrent(1, 6, key=KEY)), batch_of(problem, 4, 16)
    policy = LimitedTurnover(inside, 0.3)
    learner = Direct(4, 0.1, transform=optax.identity())

    @eqx.filter_jit
    def updated(weight):
        state = learner.start(policy)
        return learner.update(problem, TASKS[0], batch, policy, state, weight, key=KEY)

    def after(weight):
        update = updated(jnp.asarray(weight))
        assert float(update.policy.max_turnover) == float(policy.max_turnover)
        moved = update.policy.policy.score.of_features - inside.score.of_features
        return np.asarray(moved), float(update.evidence.loss), float(update.evidence.gradient_norm)

    whole, half = after(1.0), after(0.5)
    assert np.abs(whole[0]).max() > 1e-4
    assert half[0] == pytest.approx(0.5 * whole[0], abs=1e-6)
    assert half[1] == pytest.approx(0.5 * whole[1])
    assert half[2] == pytest.approx(whole[2])


@pytest.mark.slow
@pytest.mark.parametrize("problem", [HeldPays(), ShownBest()], ids=lambda p: type(p).__name__)
def test_whole_episodes_solve_the_probes(problem):
    tasks = draw_tasks(12, 4, 8)
    policies = train_seeds(
        problem, tasks, lambda key: Recurrent(1, 8, key=key), DirectEpisodes(8, 5e-2), steps=80,
        seeds=12, priority=Priority(alpha=0), replay=Replay(act_periods=0),
    )  # fmt: skip
    assert_mean_above(fractions_of_best(problem, policies, tasks).mean(1), 0.95)
