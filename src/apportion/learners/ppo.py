"""Proximal policy optimisation on the simplex, for problems whose reward has no gradient.

Each update rolls the policy out K times on the drawn task with the same first state and the same
dynamics, the noise on the logits alone differing. An action's advantage is how much better than the
paired rollouts it did: V is their mean return from the same period on, nothing to learn, and without it
the luck of the task drowns that of the action. `terminated` and `truncated` are kept apart. Ratios are
those of the noisy logits before the softmax, so log-probabilities are exact; the loss is weighted by
the task's w_t.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from apportion.errors import InputError, check_counts
from apportion.learners.learner import Learner, Update, as_leaf, as_rate
from apportion.memory import Batch
from apportion.policy import GaussianLogits, LogitPolicy, Policy
from apportion.problem import Observation, Problem
from apportion.scorers import Evidence
from apportion.simplex import Mask, Scalar, equal_within
from apportion.tasks import Task


class _Experience(eqx.Module):
    """Paired rollouts of one task."""

    observations: Observation
    actions: Float[Array, "rollouts time entities"]
    log_probs: Float[Array, "rollouts time"]
    allocations: Float[Array, "rollouts time entities"]
    equal: Float[Array, "rollouts time entities"]
    rewards: Float[Array, "rollouts time"]
    equal_rewards: Float[Array, "rollouts time"]
    terminated: Bool[Array, "rollouts time"]
    truncated: Bool[Array, "rollouts time"]
    alive: Bool[Array, "rollouts time"]


class _PPOState(eqx.Module):
    """What is trained beside the policy, and the optimiser's memory of all of it."""

    explore: GaussianLogits
    optimiser: PyTree[Array]


class PPO(Learner):
    """PPO with Gaussian noise on the logits, of one learned standard deviation.

    Parameters
    ----------
    rollouts
        K, paired episodes of the drawn task in an update.
    learning_rate, gamma, clip, gradient_clip, noise_std
        Adam's step, the discount, the ratio's clip, the largest gradient norm and the first standard
        deviation of the noise; all leaves, so that runs can differ in them.
    epochs, minibatches
        Passes over an update's periods, and pieces of a pass (what does not divide is left out of
        that pass).
    """

    rollouts: int = eqx.field(static=True, default=8)
    learning_rate: Float[Array, "*runs"] = eqx.field(converter=as_rate, default=1e-2)
    gamma: Float[Array, "*runs"] = eqx.field(converter=as_leaf, default=0.9, kw_only=True)
    clip: Float[Array, "*runs"] = eqx.field(converter=as_leaf, default=0.2, kw_only=True)
    gradient_clip: Float[Array, "*runs"] = eqx.field(converter=as_leaf, default=0.5, kw_only=True)
    noise_std: Float[Array, "*runs"] = eqx.field(converter=as_leaf, default=0.5, kw_only=True)
    epochs: int = eqx.field(static=True, default=8, kw_only=True)
    minibatches: int = eqx.field(static=True, default=4, kw_only=True)
    periods: int = eqx.field(static=True, default=0, init=False)

    def __check_init__(self):
        # A paired baseline needs at least two rollouts.
        check_counts(2, rollouts=self.rollouts)
        check_counts(epochs=self.epochs, minibatches=self.minibatches)

    def start(self, policy: Policy) -> _PPOState:
        if not isinstance(policy, LogitPolicy):
            raise InputError(
                f"PPO explores on logits, and {type(policy).__name__} has none; use a LogitPolicy"
            )
        explore = GaussianLogits(self.noise_std)
        trained: PyTree[Array] = (eqx.filter(policy, eqx.is_inexact_array), explore)
        return _PPOState(explore, _ADAM.init(trained))

    def update(
        self,
        problem: Problem,
        task: Task,
        batch: Batch | None,
        policy: Policy,
        state: _PPOState,
        weight: Scalar,
        *,
        key: PRNGKeyArray,
    ) -> Update:
        assert isinstance(policy, LogitPolicy)
        walk_key, order_key = jax.random.split(key)
        seen = roll_out(problem, task, policy, state.explore, self.rollouts, key=walk_key)
        values = _paired_values(seen, self.gamma)
        advantages = _advantages_over(values, seen, self.gamma)
        advantages = _standard(_scaled_by_period(advantages, seen.alive), seen.alive)

        length = advantages.size
        flat, advantages = jax.tree.map(
            lambda leaf: leaf.reshape(length, *leaf.shape[2:]), (seen, advantages)
        )
        samples = (flat.observations, flat.actions, flat.log_probs, advantages, flat.alive)
        orders = jax.vmap(lambda key: jax.random.permutation(key, length))(
            jax.random.split(order_key, self.epochs)
        )
        size = max(length // self.minibatches, 1)
        pieces = length // size
        places = orders[:, : pieces * size].reshape(self.epochs * pieces, size)
        trained, optimiser, losses, norms = self._improve(
            policy, state, samples, places, task.mask, weight
        )
        evidence = Evidence(
            flat.allocations,
            flat.equal,
            flat.rewards,
            flat.equal_rewards,
            flat.alive,
            task.mask,
            weight * losses.mean(),
            norms.mean(),
        )
        policy = eqx.combine(trained[0], eqx.filter(policy, eqx.is_inexact_array, inverse=True))
        return Update(policy, _PPOState(trained[1], optimiser), evidence)

    def _improve(
        self,
        policy: LogitPolicy,
        state: _PPOState,
        samples: PyTree[Array],
        places: Int[Array, "pieces size"],
        mask: Mask,
        weight: Scalar,
    ) -> tuple[PyTree[Array], PyTree[Array], Float[Array, " pieces"], Float[Array, " pieces"]]:
        """What is trained and the optimiser after every minibatch, with the losses and gradient norms."""
        parameters, fixed = eqx.partition(policy, eqx.is_inexact_array)

        @eqx.filter_value_and_grad
        def loss(trained, batch):
            policy = eqx.combine(trained[0], fixed)

            def period(observation, action, log_prob, advantage):
                logits, here = policy.observed_logits(observation, mask), observation.present(mask)
                ratio = jnp.exp(trained[1].log_prob(logits, here, action) - log_prob)
                return -_clipped_gain(ratio, advantage, self.clip)

            return _mean_over(jax.vmap(period)(*batch[:-1]), batch[-1])

        def minibatch(carry, places):
            trained, optimiser = carry
            value, gradient = loss(trained, jax.tree.map(lambda leaf: leaf[places], samples))
            norm = optax.tree.norm(gradient)
            # The clip comes before w_t, or it would undo the weight of every steep task.
            factor = weight * jnp.minimum(1.0, self.gradient_clip / (norm + 1e-12))
            gradient = jax.tree.map(lambda g: factor * g, gradient)
            direction, optimiser = _ADAM.update(gradient, optimiser, trained)
            step = jax.tree.map(lambda d: -self.learning_rate * d, direction)
            return (eqx.apply_updates(trained, step), optimiser), (value, norm)

        first = (parameters, state.explore)
        (trained, optimiser), (losses, norms) = jax.lax.scan(
            minibatch, (first, state.optimiser), places
        )
        return trained, optimiser, losses, norms


# One object for all learners, so that equal settings compile once.
_ADAM = optax.scale_by_adam()


def _clipped_gain(ratio: Scalar, advantage: Scalar, clip: Scalar) -> Scalar:
    """What a new probability gains, up to the clip; what it loses counts in full.

    >>> float(_clipped_gain(jnp.float32(2.0), jnp.float32(1.0), jnp.float32(0.5)))
    1.5
    """
    held = jnp.clip(ratio, 1 - clip, 1 + clip)
    return jnp.minimum(ratio * advantage, held * advantage)


def roll_out(
    problem: Problem,
    task: Task,
    policy: LogitPolicy,
    explore: GaussianLogits,
    rollouts: int,
    *,
    key: PRNGKeyArray,
) -> _Experience:
    """Whole episodes of a task that differ in nothing but the noise on the logits."""
    reset_key, dynamics_key, noise_key = jax.random.split(key, 3)
    first = problem.reset(task, key=reset_key)
    dynamics = jax.random.split(dynamics_key, problem.horizon)

    def period(carry, keys):
        state, alive = carry
        observation = problem.observe(task, state)
        # Who can take nothing gets no noise and has no part in the density.
        here, bounds = observation.present(task.mask), observation.bounds
        logits = policy.observed_logits(observation, task.mask)
        action = explore.sample(logits, here, key=keys[0])
        log_prob = explore.log_prob(logits, here, action)
        shares, equal = policy.head(action, here, bounds), equal_within(task.mask, bounds)
        step = problem.step(task, state, shares, key=keys[1])
        # Compiled away where no scorer reads it.
        equal_reward = problem.step(task, state, equal, key=keys[1]).reward
        row = (
            action,
            log_prob,
            shares,
            equal,
            step.reward,
            equal_reward,
            step.terminated,
            step.truncated,
            alive,
        )
        return (step.state, alive & ~(step.terminated | step.truncated)), (observation, row)

    def episode(key):
        noise = jax.random.split(key, problem.horizon)
        return jax.lax.scan(period, (first, jnp.array(True)), (noise, dynamics))[1]

    observations, row = jax.vmap(episode)(jax.random.split(noise_key, rollouts))
    return _Experience(observations, *row)


def _paired_values(seen: _Experience, gamma: Scalar) -> Float[Array, "rollouts after"]:
    """V at every period and after the last, time + 1 of them: the mean return of the rollouts alive.

    It knows no value of what lies behind a truncation, which all rollouts share and which therefore
    cancels.
    """

    def back(later, period):
        reward, ended = period
        here = reward + gamma * jnp.where(ended, 0.0, later)
        return here, here

    ended = seen.terminated | seen.truncated | ~seen.alive
    rewards = jnp.where(seen.alive, seen.rewards, 0.0)
    _, returns = jax.lax.scan(
        back, jnp.zeros_like(rewards[:, 0]), (rewards.T, ended.T), reverse=True
    )
    mean = _mean_over(returns.T, seen.alive, axis=0)
    return jnp.broadcast_to(jnp.append(mean, 0.0), (rewards.shape[0], mean.shape[0] + 1))


def _scaled_by_period(
    advantages: Float[Array, "rollouts time"], alive: Bool[Array, "rollouts time"]
) -> Float[Array, "rollouts time"]:
    """Advantages over their spread at each period, so that late periods, where accuracies or wealth
    hardly differ, teach as much as early ones.
    """
    spread = jnp.sqrt(_mean_over(advantages**2, alive, axis=0))
    return advantages / (spread + 1e-8)[None, :]


def _advantages_over(
    values: Float[Array, "rollouts after"], seen: _Experience, gamma: Scalar
) -> Float[Array, "rollouts time"]:
    """What each action's return was above V; a truncated episode is worth what V says of the state it
    was cut at, a terminated one 0.
    """

    def back(later, period):
        reward, value, following, terminated, ended = period
        surprise = reward + gamma * jnp.where(terminated, 0.0, following) - value
        here = surprise + gamma * jnp.where(ended, 0.0, later)
        return here, here

    ended = seen.terminated | seen.truncated
    columns = (seen.rewards, values[:, :-1], values[:, 1:], seen.terminated, ended)
    _, advantages = jax.lax.scan(
        back,
        jnp.zeros_like(values[:, 0]),
        jax.tree.map(lambda column: column.T, columns),
        reverse=True,
    )
    return jnp.where(seen.alive, advantages.T, 0.0)


def _standard(values: Array, included: Array) -> Array:
    """Zero mean and unit deviation over the included places."""
    centred = values - _mean_over(values, included)
    deviation = jnp.sqrt(_mean_over(centred**2, included))
    return jnp.where(included, centred / (deviation + 1e-8), 0.0)


def _mean_over(values: Array, included: Array, axis: int | None = None) -> Array:
    """Mean over the included places; 0 where there are none."""
    kept = jnp.where(included, values, 0.0).sum(axis)
    return kept / jnp.maximum(included.sum(axis), 1)
