"""Direct policy gradient: theta <- theta + eta grad [ 1/B sum_n w_t R_t(x_n, pi_theta(x_n)) ].

The reward is differentiated itself, so the problem's `step` must be differentiable. Two ways to
carry the gradient through time: `lookback` handles all B periods in parallel and sees an
allocation's effect on its own reward and the next one's; `unroll` walks the batch and sees every
effect inside it, one period after the other.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from apportion.errors import InputError
from apportion.learners.learner import Learner, Update
from apportion.memory import Batch
from apportion.policy import Policy
from apportion.problem import Problem, State
from apportion.scorers import Evidence
from apportion.simplex import equal_shares
from apportion.tasks import Task


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


def unroll(
    problem: Problem, task: Task, policy: Policy, batch: Batch, key: PRNGKeyArray
) -> BatchRollout:
    """Walk from the batch's first state and differentiate the whole walk."""

    def period(carry, key):
        state, alive = carry
        allocation = policy(problem.observe(task, state), task.mask)
        step = problem.step(task, state, allocation, key=key)
        going = alive & ~(step.terminated | step.truncated)
        return (step.state, going), (state, allocation, step.reward, alive)

    first = jax.tree.map(lambda leaf: leaf[0], batch.states)
    keys = jax.random.split(key, batch.rows.shape[0])
    _, (new_states, allocations, rewards, alive) = jax.lax.scan(
        period, (first, jnp.array(True)), keys
    )
    return BatchRollout(new_states, allocations, rewards, alive)


class Direct(Learner):
    """Direct policy gradient with any Optax transformation.

    Parameters
    ----------
    periods
        B, the length of a batch.
    learning_rate
        Step size; a leaf, so that runs can differ in it.
    objective
        `lookback` or `unroll`.
    transform
        Optax transformation of the gradient, before the learning rate.
    refresh
        Whether a batch's own states replace those it was drawn from (the write-back of EIIE).

    Examples
    --------
    >>> Direct(32, 1e-3).periods
    32
    """

    learning_rate: Float[Array, "*runs"]
    periods: int = eqx.field(static=True)
    objective: Objective = eqx.field(static=True)
    transform: optax.GradientTransformation = eqx.field(static=True)
    refresh: bool = eqx.field(static=True)

    def __init__(
        self,
        periods: int,
        learning_rate: float | Array = 1e-3,
        *,
        objective: Objective = lookback,
        transform: optax.GradientTransformation | None = None,
        refresh: bool = True,
    ):
        if periods < 1:
            raise InputError(f"Direct: periods is {periods}; a batch needs at least 1 period")
        self.learning_rate = jnp.asarray(learning_rate, float)
        self.periods = periods
        self.objective = objective
        self.transform = _ADAM if transform is None else transform
        self.refresh = refresh

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

        @eqx.filter_value_and_grad(has_aux=True)
        def loss(policy):
            rollout = self.objective(problem, task, policy, batch, key)
            valid = rollout.valid
            mean = jnp.where(valid, rollout.rewards, 0.0).sum() / jnp.maximum(valid.sum(), 1)
            return -mean, rollout

        (value, rollout), gradient = loss(policy)
        weighted = jax.tree.map(lambda g: weight * g, gradient)
        trainable = eqx.filter(policy, eqx.is_inexact_array)
        direction, state = self.transform.update(weighted, state, trainable)
        step = jax.tree.map(lambda d: -self.learning_rate * d, direction)
        evidence = Evidence(
            rollout.allocations,
            rollout.rewards,
            _equal_rewards(problem, task, rollout.new_states, key),
            rollout.valid,
            task.mask,
            weight * value,
            optax.tree.norm(gradient),
        )
        refreshed = rollout.new_states if self.refresh else None
        return Update(eqx.apply_updates(policy, step), state, evidence, refreshed)


# One object for all learners that ask for no other, so that equal settings compile once.
_ADAM = optax.scale_by_adam()


def _equal_rewards(
    problem: Problem, task: Task, states: State, key: PRNGKeyArray
) -> Float[Array, " batch"]:
    """What equal shares would have earned where the policy arrived; compiled away when unread."""

    def reward(state, key):
        return problem.step(task, state, equal_shares(task.mask), key=key).reward

    length = jax.tree.leaves(states)[0].shape[0]
    return jax.vmap(reward)(states, jax.random.split(key, length))
