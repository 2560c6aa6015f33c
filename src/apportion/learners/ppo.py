"""Proximal policy optimisation on the simplex, for problems whose reward has no gradient.

Each update rolls the policy out K times on the sampled task. These paired rollouts share the first state
and the dynamics and differ only in the noise on the logits. The value V of a period is the mean return of
all rollouts from that period, so no value network is trained; the pairing removes the variance of the
task from the advantages. Probability ratios are those of the noisy logits before the softmax, so they are
exact. The loss is weighted by the task's w_t.
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
    """The trained noise and the optimiser's state."""

    explore: GaussianLogits
    optimiser: PyTree[Array]


class PPO(Learner):
    """Proximal policy optimisation with Gaussian noise on the logits; it needs no gradient of the reward.

    The standard deviation of the noise is trained. Float parameters may be arrays with a leading axis,
    which gives each run its own value.

    Parameters
    ----------
    rollouts : int
        K, the number of paired episodes of the sampled task per update, at least 2.
    learning_rate : float or array
        Step size of Adam.
    gamma : float or array
        Discount factor.
    clip : float or array
        Clipping range of the probability ratio.
    gradient_clip : float or array
        Largest gradient norm, before the importance weight.
    noise_std : float or array
        Initial standard deviation of the noise.
    epochs : int
        Passes over the periods of an update.
    minibatches : int
        Minibatches per pass; a remainder that does not divide is omitted from the pass.

    Examples
    --------
    >>> PPO(rollouts=4, epochs=2).minibatches
    4
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
        # The paired baseline needs at least two rollouts.
        check_counts(2, rollouts=self.rollouts)
        check_counts(epochs=self.epochs, minibatches=self.minibatches)

    def start(self, policy: Policy) -> _PPOState:
        if not isinstance(policy, LogitPolicy):
            raise InputError(
                f"PPO needs a policy with logits, but got {type(policy).__name__}; use a LogitPolicy"
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
        """Run all minibatches; return trained leaves, optimiser state, losses and gradient norms."""
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
            # Clip before w_t; otherwise the clip cancels the weight of tasks with large gradients.
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


# A shared object, so that learners with equal settings compile once.
_ADAM = optax.scale_by_adam()


def _clipped_gain(ratio: Scalar, advantage: Scalar, clip: Scalar) -> Scalar:
    """Return PPO's clipped surrogate objective.

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
    """Run episodes of a task that differ only in the noise on the logits."""
    reset_key, dynamics_key, noise_key = jax.random.split(key, 3)
    first = problem.reset(task, key=reset_key)
    dynamics = jax.random.split(dynamics_key, problem.horizon)

    def period(carry, keys):
        state, alive = carry
        observation = problem.observe(task, state)
        # Entities with a limit of 0 get no noise and do not enter the density.
        here, bounds = observation.present(task.mask), observation.bounds
        logits = policy.observed_logits(observation, task.mask)
        action = explore.sample(logits, here, key=keys[0])
        log_prob = explore.log_prob(logits, here, action)
        shares, equal = policy.head(action, here, bounds), equal_within(task.mask, bounds)
        step = problem.step(task, state, shares, key=keys[1])
        # XLA removes this if no scorer reads it.
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
    """Return V at every period and after the last (time + 1 values): the mean return of live rollouts.

    The value after a truncation is set to 0; all rollouts share it, so that it cancels.
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
    """Divide advantages by their root mean square at each period, so that all periods count equally."""
    spread = jnp.sqrt(_mean_over(advantages**2, alive, axis=0))
    return advantages / (spread + 1e-8)[None, :]


def _advantages_over(
    values: Float[Array, "rollouts after"], seen: _Experience, gamma: Scalar
) -> Float[Array, "rollouts time"]:
    """Return each action's return minus V; V continues a truncated episode, 0 a terminated one."""

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
    """Standardise the included values to zero mean and unit variance."""
    centred = values - _mean_over(values, included)
    deviation = jnp.sqrt(_mean_over(centred**2, included))
    return jnp.where(included, centred / (deviation + 1e-8), 0.0)


def _mean_over(values: Array, included: Array, axis: int | None = None) -> Array:
    """Return the mean of the included values, or 0 if there are none."""
    kept = jnp.where(included, values, 0.0).sum(axis)
    return kept / jnp.maximum(included.sum(axis), 1)
