"""Direct gradient through the aggregation: theta <- theta - grad sum_n L(v_{n+1}), round by round.

The loss of the aggregate is differentiated by the policy's shares, step and momentum. Between rounds
the gradient stops: carrying it through the clients' own training costs twice the time and was not
better. The reward is minus the loss, beside FedAvg's on the very same models.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Key, PRNGKeyArray, PyTree

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
from apportion.trees import take

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


Weigh = Callable[[Float[Array, " tasks"]], Float[Array, " tasks"]]
"""The weights of an update's tasks by what the policy gains over FedAvg in each; their mean is 1."""


class ThroughRounds(Learner):
    """Direct gradient for an `AggregationPolicy` in a `Federation`.

    Parameters
    ----------
    rollouts
        Episodes of a task in an update; they differ in first model, batches and server's samples.
    learning_rate
        Adam's step, which falls along a cosine to nothing in the last update.
    updates
        How many there will be.
    others, together
        With `together` above 1 an update is the mean over so many tasks: the one drawn, and some of the
        others, each as likely as another.
    weigh
        How the tasks of an update weigh; alike unless given.
    logarithm
        Whether the loss counts by its logarithm: by itself it is large in early rounds, and teaches
        less of late ones.
    """

    learning_rate: Float[Array, "*runs"]
    others: Task | None
    rollouts: int = eqx.field(static=True)
    updates: int = eqx.field(static=True)
    together: int = eqx.field(static=True)
    weigh: Weigh = eqx.field(static=True)
    logarithm: bool = eqx.field(static=True)
    periods: int = eqx.field(static=True)

    def __init__(
        self,
        rollouts: int = 2,
        learning_rate: float | Array = 1e-2,
        *,
        updates: int,
        others: Task | None = None,
        together: int = 1,
        weigh: Weigh = jnp.ones_like,
        logarithm: bool = False,
    ):
        if min(rollouts, updates, together) < 1:
            raise InputError(
                "ThroughRounds: rollouts, updates and together are counts and must be >= 1"
            )
        if together > 1 and (others is None or together > len(others)):
            raise InputError(
                f"ThroughRounds: {together} tasks together need as many others to choose from"
            )
        self.rollouts, self.updates, self.periods = rollouts, updates, 0
        self.others, self.together, self.weigh = others, together, weigh
        self.logarithm = logarithm
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

        @eqx.filter_value_and_grad(has_aux=True)
        def loss(policy, task, key):
            keys = jax.random.split(key, self.rollouts)
            walked = jax.vmap(lambda key: walk(problem, policy, task, key=key))(keys)
            losses = jnp.log(walked.losses) if self.logarithm else walked.losses
            return losses.mean(), walked

        tasks, keys = self._together(task, key)
        (values, every), slopes = jax.vmap(lambda t, k: loss(policy, t, k))(tasks, keys)
        norms = jax.vmap(optax.tree.norm)(slopes)
        gains = (jnp.log(every.plain) - jnp.log(every.losses)).mean((1, 2))
        weights = self.weigh(gains).at[0].mul(weight)
        # One task's gradient must not undo what the others taught.
        factors = weights / jnp.maximum(norms, 1.0) / self.together
        gradient = jax.tree.map(lambda s: jnp.tensordot(factors, s, 1), slopes)
        trainable = eqx.filter(policy, eqx.is_inexact_array)
        direction, optimiser = _ADAM.update(gradient, state.optimiser, trainable)
        rate = self.learning_rate * 0.5 * (1 + jnp.cos(jnp.pi * state.count / self.updates))
        step = jax.tree.map(lambda d: -rate * d, direction)
        walked = take(every, 0)
        length = walked.losses.size
        evidence = Evidence(
            allocations=walked.shares.reshape(length, -1),
            equal=jnp.tile(equal_shares(task.mask), (length, 1)),
            rewards=-walked.losses.reshape(length),
            equal_rewards=-walked.plain.reshape(length),
            valid=jnp.ones(length, bool),
            mask=task.mask,
            loss=weight * values[0],
            gradient_norm=norms[0],
        )
        following = LearnerState(optimiser, state.count + 1)
        return Update(eqx.apply_updates(policy, step), following, evidence)

    def _together(self, task: Task, key: PRNGKeyArray) -> tuple[Task, Key[Array, " tasks"]]:
        """The tasks of an update, the drawn one first, with a key each."""
        alone = jax.tree.map(lambda leaf: leaf[None], task)
        if self.together == 1 or self.others is None:
            return alone, key[None]
        pick_key, walk_key = jax.random.split(jax.random.fold_in(key, 1))
        some = jax.random.permutation(pick_key, len(self.others))[: self.together - 1]
        tasks = jax.tree.map(lambda a, b: jnp.concatenate([a, b[some]]), alone, self.others)
        more = jax.random.split(walk_key, self.together - 1)
        return tasks, jnp.concatenate([key[None], more])


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
