"""Direct policy gradient: theta <- theta + eta grad [ 1/B sum_n w_t R_t(x_n, pi_theta(x_n)) ].

The gradient is that of the reward itself, so the problem's `step` must be differentiable. `Direct`
computes all B periods of a batch in parallel; its gradient includes the effect of an allocation on its own
reward and on the next one (`lookback`). `DirectEpisodes` differentiates through whole episodes.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from apportion.errors import check_counts
from apportion.learners.learner import Learner, Update, as_leaf, as_rate
from apportion.memory import Batch
from apportion.policy import Policy
from apportion.problem import Problem, State, equal_allocation, rollout
from apportion.scorers import Evidence
from apportion.tasks import Task

# A shared object, so that learners with equal settings compile once.
_ADAM = optax.scale_by_adam()


class BatchRollout(eqx.Module):
    """States, allocations and rewards of a policy on a batch."""

    new_states: State
    allocations: Float[Array, "batch entities"]
    rewards: Float[Array, " batch"]
    valid: Bool[Array, " batch"]


Objective = Callable[[Problem, Task, Policy, Batch, PRNGKeyArray], BatchRollout]


def lookback(
    problem: Problem, task: Task, policy: Policy, batch: Batch, key: PRNGKeyArray
) -> BatchRollout:
    """Roll a policy out over a batch in parallel, as EIIE does.

    The policy observes the stored states. Each reward is taken in the state that the policy's previous
    allocation leads to; only the first period of a batch and those after a gap use the stored state.
    """
    keys = jax.random.split(key, batch.rows.shape[0])

    def act(state):
        return policy(problem.observe(task, state), task.mask)

    def step(state, allocation, key):
        return problem.step(task, state, allocation, key=key)

    allocations = jax.vmap(act)(batch.states)
    following = jax.vmap(step)(batch.states, allocations, keys).state

    def arrive(remembered, after):
        linked = batch.linked.reshape((-1,) + (1,) * (remembered.ndim - 1))
        return jnp.where(linked, jnp.roll(after, 1, axis=0), remembered)

    new_states = jax.tree.map(arrive, batch.states, following)
    rewards = jax.vmap(step)(new_states, allocations, keys).reward
    return BatchRollout(new_states, allocations, rewards, batch.valid)


class Direct(Learner):
    """Direct policy gradient on batches from memory.

    Parameters
    ----------
    periods : int
        B, the number of periods in a batch.
    learning_rate : float or array
        Step size; an array with a leading axis gives each run its own.
    objective : callable
        Function that rolls a policy out over a batch; by default `lookback`.
    transform : optax.GradientTransformation
        Transformation of the gradient before the learning rate; by default Adam.

    Examples
    --------
    >>> Direct(16, 1e-2).periods
    16
    """

    periods: int = eqx.field(static=True)
    learning_rate: Float[Array, "*runs"] = eqx.field(converter=as_rate, default=1e-3)
    objective: Objective = eqx.field(static=True, default=lookback, kw_only=True)
    transform: optax.GradientTransformation = eqx.field(static=True, default=_ADAM, kw_only=True)

    def __check_init__(self):
        check_counts(periods=self.periods)

    def start(self, policy: Policy) -> PyTree[Array]:
        return self.transform.init(eqx.filter(policy, eqx.is_inexact_array))

    def update(
        self,
        problem: Problem,
        task: Task,
        batch: Batch | None,
        policy: Policy,
        state: PyTree[Array],
        weight: Float[Array, ""],
        *,
        key: PRNGKeyArray,
    ) -> Update:
        assert batch is not None, "a learner with periods > 0 always gets a batch"

        def roll_out(policy):
            return self.objective(problem, task, policy, batch, key)

        return _improve(self, problem, task, roll_out, policy, state, weight, key)


class DirectEpisodes(Learner):
    """Direct policy gradient through whole new episodes of the sampled task; it uses no memory.

    Use it if allocations affect rewards many periods later, such as the energy that is still missing when
    a car leaves.

    Parameters
    ----------
    episodes : int
        K, the number of episodes per update, which run in parallel.
    learning_rate : float or array
        Step size; an array with a leading axis gives each run its own.
    gradient_clip : float or array
        Largest gradient norm, before the importance weight.
    transform : optax.GradientTransformation
        Transformation of the clipped gradient before the learning rate; by default Adam.

    Examples
    --------
    >>> DirectEpisodes(4).periods  # it reads no batch
    0
    """

    episodes: int = eqx.field(static=True)
    learning_rate: Float[Array, "*runs"] = eqx.field(converter=as_rate, default=3e-3)
    gradient_clip: Float[Array, "*runs"] = eqx.field(converter=as_leaf, default=1.0, kw_only=True)
    transform: optax.GradientTransformation = eqx.field(static=True, default=_ADAM, kw_only=True)
    periods: int = eqx.field(static=True, default=0, init=False)

    def __check_init__(self):
        check_counts(episodes=self.episodes)

    def start(self, policy: Policy) -> PyTree[Array]:
        return self.transform.init(eqx.filter(policy, eqx.is_inexact_array))

    def update(
        self,
        problem: Problem,
        task: Task,
        batch: Batch | None,
        policy: Policy,
        state: PyTree[Array],
        weight: Float[Array, ""],
        *,
        key: PRNGKeyArray,
    ) -> Update:
        def roll_out(policy):
            keys = jax.random.split(key, self.episodes)
            paths = jax.vmap(lambda key: rollout(problem, policy, task, key=key))(keys)
            lived = (paths.states, paths.allocations, paths.rewards, paths.alive)
            return BatchRollout(
                *jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), lived)
            )

        return _improve(
            self, problem, task, roll_out, policy, state, weight, key, clip=self.gradient_clip
        )


def _improve(
    learner: Direct | DirectEpisodes,
    problem: Problem,
    task: Task,
    roll_out: Callable[[Policy], BatchRollout],
    policy: Policy,
    state: PyTree[Array],
    weight: Float[Array, ""],
    key: PRNGKeyArray,
    *,
    clip: Array | None = None,
) -> Update:
    """Take one gradient step on the mean reward of a rollout and collect the scorers' evidence."""

    @eqx.filter_value_and_grad(has_aux=True)
    def loss(policy):
        rollout = roll_out(policy)
        lived = jnp.where(rollout.valid, rollout.rewards, 0.0)
        return -lived.sum() / jnp.maximum(rollout.valid.sum(), 1), rollout

    def equal(state, key):
        shares = equal_allocation(problem, task, state)
        return shares, problem.step(task, state, shares, key=key).reward

    (value, rollout), gradient = loss(policy)
    norm = optax.tree.norm(gradient)
    # Rewards of equal shares in the same states; XLA removes them if no scorer reads them.
    keys = jax.random.split(key, rollout.rewards.shape[0])
    shares, rewards = jax.vmap(equal)(rollout.new_states, keys)
    evidence = Evidence(
        rollout.allocations, shares, rollout.rewards, rewards, rollout.valid, task.mask,
        weight * value, norm,
    )  # fmt: skip
    # Clip before w_t; otherwise the clip cancels the weight of tasks with large gradients.
    factor = weight if clip is None else weight * jnp.minimum(1.0, clip / (norm + 1e-12))
    scaled = jax.tree.map(lambda g: factor * g, gradient)
    trainable = eqx.filter(policy, eqx.is_inexact_array)
    direction, state = learner.transform.update(scaled, state, trainable)
    step = jax.tree.map(lambda d: -learner.learning_rate * d, direction)
    # The new states replace the batch's states in memory, as in EIIE.
    return Update(eqx.apply_updates(policy, step), state, evidence, rollout.new_states)
