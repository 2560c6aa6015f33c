"""Direct gradient through the aggregation: theta <- theta - grad sum_n L(v_{n+1}), round by round.

The loss of the aggregate is differentiated by the policy's shares, step and momentum. Between rounds
the gradient stops: carrying it through the clients' own training costs twice the time and was not
better. The reward is minus the loss, beside FedAvg's on the very same models.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from apportion.domains.federated.aggregators import receive
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import AggregationPolicy, fedavg
from apportion.errors import InputError
from apportion.learners.learner import Learner, Update
from apportion.memory import Batch
from apportion.policy import Policy
from apportion.problem import Problem
from apportion.scorers import Evidence
from apportion.simplex import equal_shares
from apportion.tasks import Task

_ADAM = optax.scale_by_adam(b2=0.99)


class LearnerState(eqx.Module):
    """The optimiser's state, and how many updates there were."""

    optimiser: PyTree[Array]
    count: Float[Array, ""]


class Walked(eqx.Module):
    """What an episode gave: losses of the aggregate and of FedAvg's, and the shares."""

    losses: Float[Array, "*batch time"]
    plain: Float[Array, "*batch time"]
    shares: Float[Array, "*batch time entities"]


class ThroughRounds(Learner):
    """Direct gradient for an `AggregationPolicy` in a `Federation`.

    Parameters
    ----------
    rollouts
        Episodes of the task in an update; they differ in first model, batches and server's samples.
    learning_rate
        Adam's step, which falls along a cosine to nothing in the last update.
    updates
        How many there will be.
    """

    learning_rate: Float[Array, "*runs"]
    rollouts: int = eqx.field(static=True)
    updates: int = eqx.field(static=True)
    periods: int = eqx.field(static=True)

    def __init__(self, rollouts: int = 2, learning_rate: float | Array = 1e-2, *, updates: int):
        if min(rollouts, updates) < 1:
            raise InputError("ThroughRounds: rollouts and updates are counts and must be >= 1")
        self.rollouts, self.updates, self.periods = rollouts, updates, 0
        self.learning_rate = jnp.asarray(learning_rate, float)

    def start(self, policy: Policy) -> LearnerState:
        if not isinstance(policy, AggregationPolicy):
            raise InputError(
                f"ThroughRounds trains an AggregationPolicy, not {type(policy).__name__}; PPO trains "
                "any other policy that scores"
            )
        return LearnerState(_ADAM.init(eqx.filter(policy, eqx.is_inexact_array)), jnp.zeros(()))

    def update(
        self,
        problem: Problem,
        task: Task,
        batch: Batch | None,
        policy: Policy,
        state: LearnerState,
        weight: Float[Array, ""],
        *,
        key: PRNGKeyArray,
    ) -> Update:
        assert isinstance(problem, Federation)
        keys = jax.random.split(key, self.rollouts)

        @eqx.filter_value_and_grad(has_aux=True)
        def loss(policy):
            walked = jax.vmap(lambda key: walk(problem, policy, task, key=key))(keys)
            return walked.losses.mean(), walked

        (value, walked), gradient = loss(policy)
        norm = optax.tree.norm(gradient)
        # One task's gradient must not undo what the others taught.
        factor = weight / jnp.maximum(norm, 1.0)
        gradient = jax.tree.map(lambda g: factor * g, gradient)
        trainable = eqx.filter(policy, eqx.is_inexact_array)
        direction, optimiser = _ADAM.update(gradient, state.optimiser, trainable)
        rate = self.learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * state.count / self.updates))
        step = jax.tree.map(lambda d: -rate * d, direction)
        length = walked.losses.size
        evidence = Evidence(
            allocations=walked.shares.reshape(length, -1),
            equal=jnp.tile(equal_shares(task.mask), (length, 1)),
            rewards=-walked.losses.reshape(length),
            equal_rewards=-walked.plain.reshape(length),
            valid=jnp.ones(length, bool),
            mask=task.mask,
            loss=weight * value,
            gradient_norm=norm,
        )
        following = LearnerState(optimiser, state.count + 1)
        return Update(eqx.apply_updates(policy, step), following, evidence)


def walk(
    federation: Federation, policy: AggregationPolicy, task: Task, *, key: PRNGKeyArray
) -> Walked:
    """An episode under the policy, whose losses can be differentiated by its parameters."""
    reset_key, walk_key = jax.random.split(key)

    def one_round(state, key):
        received = jax.lax.stop_gradient(receive(federation, task, state, key))
        decision = policy.decide(received.observation, received.mask)
        model = decision.model(received.models, received.start, received.move)
        plain = fedavg(received.counts.astype(jnp.float32), received.mask)
        other = plain.model(received.models, received.start, received.move)
        losses = federation.loss(model, federation.test), federation.loss(other, federation.test)
        stopped, shares = jax.lax.stop_gradient((model, decision.shares))
        step = federation.continue_from(task, state, stopped, shares, key=key)
        return jax.lax.stop_gradient(step.state), Walked(*losses, shares)

    first = federation.reset(task, key=reset_key)
    _, walked = jax.lax.scan(one_round, first, jax.random.split(walk_key, federation.horizon))
    return walked


def shortfall(evidence: Evidence) -> Float[Array, ""]:
    """How little the policy gains over FedAvg: exp(-10 x gain of the loss), between .05 and 20.

    Tasks that it does not gain in are drawn more often.
    """
    gain = evidence.mean(evidence.rewards - evidence.equal_rewards)
    return jnp.clip(jnp.exp(-10 * gain), 0.05, 20.0)
