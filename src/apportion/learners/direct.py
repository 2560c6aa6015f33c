"""Direct policy gradient: theta <- theta + eta grad [ 1/B sum_n w_t R_t(x_n, pi_theta(x_n)) ].

The reward is differentiated itself, so the problem's `step` must be differentiable. Two ways to
carry the gradient through time: `Direct` handles all B periods of a batch in parallel and sees an
allocation's effect on its own reward and the next one's (`lookback`); `DirectEpisodes` walks whole
episodes of its own and sees every effect inside them, one period after the other.
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

# One object for all learners that ask for no other, so that equal settings compile once.
_ADAM = optax.scale_by_adam()


class BatchRollout(eqx.Module):
    """A policy rolled out over a batch: the states it reaches, what it does, what it earns."""

    new_states: State
    allocations: Float[Array, "batch entities"]
    rewards: Float[Array, " batch"]
    valid: Bool[Array, " batch"]


Objective = Callable[[Problem, Task, Policy, Batch, PRNGKeyArray], BatchRollout]


def lookback(
    problem: Problem, task: Task, policy: Policy, batch: Batch, key: PRNGKeyArray
) -> BatchRollout:
    """All periods at once: observe the remembered states, act, and take each reward in the state that
    the policy's own previous allocation leads to (as EIIE does); only a batch's first period and
    those after a gap start from memory itself.
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
    """Direct policy gradient with any Optax transformation.

    Parameters
    ----------
    periods
        B, the length of a batch.
    learning_rate
        Step size; a leaf, so that runs can differ in it.
    objective
        How a policy is rolled out over a batch; a problem may have a way of its own.
    transform
        Optax transformation of the gradient, before the learning rate.
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
        assert batch is not None, "a learner with periods > 0 is always handed a batch"

        def roll_out(policy):
            return self.objective(problem, task, policy, batch, key)

        return _improve(self, problem, task, roll_out, policy, state, weight, key)


class DirectEpisodes(Learner):
    """Direct policy gradient through whole episodes of the drawn task, new ones at every update.

    For problems whose allocations matter many periods later, such as energy that is still missing
    when a car leaves. Memory has no part in it.

    Parameters
    ----------
    episodes
        K, the episodes of an update; all are walked at once.
    learning_rate, gradient_clip
        Step size and the largest gradient norm; leaves, so that runs can differ in them.
    transform
        Optax transformation of the clipped gradient, before the learning rate.
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
    """The policy one step up the mean reward of its rollout, and what scorers read of that."""

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
    # Compiled away where no scorer reads it: what equal shares earn where the policy arrived.
    keys = jax.random.split(key, rollout.rewards.shape[0])
    shares, rewards = jax.vmap(equal)(rollout.new_states, keys)
    evidence = Evidence(
        rollout.allocations, shares, rollout.rewards, rewards, rollout.valid, task.mask,
        weight * value, norm,
    )  # fmt: skip
    # The clip comes before w_t, or it would undo the weight of every steep task.
    factor = weight if clip is None else weight * jnp.minimum(1.0, clip / (norm + 1e-12))
    scaled = jax.tree.map(lambda g: factor * g, gradient)
    trainable = eqx.filter(policy, eqx.is_inexact_array)
    direction, state = learner.transform.update(scaled, state, trainable)
    step = jax.tree.map(lambda d: -learner.learning_rate * d, direction)
    # A batch's own states replace those it was drawn from: the write-back of EIIE.
    return Update(eqx.apply_updates(policy, step), state, evidence, rollout.new_states)
