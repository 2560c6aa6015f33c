"""Training of aggregation policies: the paper's PPO, and direct gradient through the aggregation.

`train_paper_policies` runs the paper's PPO on the paper's split; runs differ in seed and method.
`train_mixture` trains one policy for many kinds of federations by `ThroughRounds`:
theta <- theta - grad sum_n L(v_{n+1}), the gradient of the aggregate's loss in the policy's shares,
step and momentum. The gradient stops between rounds: a gradient through the clients' training takes
twice the time and is no better. The reward is minus the loss; FedAvg's is for the same models.
"""

from collections.abc import Sequence
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Key, PRNGKeyArray, PyTree

from apportion.domains.federated.aggregators import gated_model, receive
from apportion.domains.federated.data import Digits
from apportion.domains.federated.federation import Federation, training_world
from apportion.domains.federated.policy import AggregationPolicy, Decision
from apportion.domains.federated.settings import GradientSettings, PPOSettings
from apportion.domains.settings import Method
from apportion.errors import InputError, check_counts
from apportion.learners.learner import Learner, Update, as_rate
from apportion.learners.ppo import PPO
from apportion.memory import Batch, Replay
from apportion.policy import Policy, Recurrent
from apportion.problem import Problem
from apportion.scorers import Evidence
from apportion.simplex import equal_shares
from apportion.tasks import Task
from apportion.training import Chunks, OnChunk, Resume, TrainingResult, train
from apportion.trees import stack, take

_ADAM = optax.scale_by_adam(b2=0.99)


class _Walked(eqx.Module):
    """Losses of the aggregate and of FedAvg's aggregate in an episode, and the shares."""

    losses: Float[Array, "*time"]
    plain: Float[Array, "*time"]
    shares: Float[Array, "*time entities"]


class ThroughRounds(Learner):
    """Direct gradient for an `AggregationPolicy` in a `Federation`.

    Parameters
    ----------
    rollouts : int
        Episodes of a task in an update; they differ in initial model, batches and server's samples.
    learning_rate : float
        Initial step size of Adam, with cosine decay to 0 in the last update.
    updates : int
        Total number of updates, for the decay.
    others, together : Task, int
        An update has `together` tasks: the sampled one, and others drawn uniformly from `others`.
    logarithm : bool
        Whether to minimise the log of the loss, because early rounds, in which the loss is large,
        would otherwise dominate.
    gated : bool
        Whether rounds continue from the model that passes the gate of `Learned`, as in deployment.
    server : AggregationPolicy, optional
        Policy that decides step and momentum, so that only shares are learned. The gradient covers
        one round, but step and momentum take effect in later rounds.
    """

    rollouts: int = eqx.field(static=True, default=2)
    learning_rate: Float[Array, "*runs"] = eqx.field(converter=as_rate, default=1e-2)
    updates: int = eqx.field(static=True, kw_only=True)
    others: Task = eqx.field(kw_only=True)
    together: int = eqx.field(static=True, default=1, kw_only=True)
    logarithm: bool = eqx.field(static=True, default=False, kw_only=True)
    gated: bool = eqx.field(static=True, default=False, kw_only=True)
    server: AggregationPolicy | None = eqx.field(default=None, kw_only=True)
    periods: int = eqx.field(static=True, default=0, init=False)

    def __check_init__(self):
        check_counts(rollouts=self.rollouts, updates=self.updates)
        check_counts(1, len(self.others), together=self.together)

    def start(self, policy: Policy) -> PyTree[Array]:
        if not isinstance(policy, AggregationPolicy):
            raise InputError(
                f"ThroughRounds trains an AggregationPolicy, not {type(policy).__name__}; PPO trains "
                "any other policy that scores"
            )
        return _ADAM.init(eqx.filter(policy, eqx.is_inexact_array))

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
        assert isinstance(problem, Federation)

        @eqx.filter_value_and_grad(has_aux=True)
        def loss(policy, task, key):
            keys = jax.random.split(key, self.rollouts)
            walked = jax.vmap(lambda key: self._walk(problem, policy, task, key=key))(keys)
            losses = jnp.log(walked.losses) if self.logarithm else walked.losses
            return losses.mean(), walked

        tasks, keys = self._together(task, key)
        (values, every), slopes = jax.vmap(lambda t, k: loss(policy, t, k))(tasks, keys)
        norms = jax.vmap(optax.tree.norm)(slopes)
        weights = jnp.ones(self.together).at[0].set(weight)
        # Clip each task's gradient so that no task dominates.
        factors = weights / jnp.maximum(norms, 1.0) / self.together
        gradient = jax.tree.map(lambda s: jnp.tensordot(factors, s, 1), slopes)
        trainable = eqx.filter(policy, eqx.is_inexact_array)
        direction, following = _ADAM.update(gradient, state, trainable)
        angle = jnp.pi * state.count.astype(jnp.float32) / self.updates
        rate = self.learning_rate * 0.5 * (1 + jnp.cos(angle))
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
        return Update(eqx.apply_updates(policy, step), following, evidence)

    def _together(self, task: Task, key: PRNGKeyArray) -> tuple[Task, Key[Array, " tasks"]]:
        """Return the tasks of an update, with the sampled one first, and a key for each."""
        alone = jax.tree.map(lambda leaf: leaf[None], task)
        if self.together == 1:
            return alone, key[None]
        pick_key, walk_key = jax.random.split(jax.random.fold_in(key, 1))
        some = jax.random.permutation(pick_key, len(self.others))[: self.together - 1]
        tasks = jax.tree.map(lambda a, b: jnp.concatenate([a, b[some]]), alone, self.others)
        more = jax.random.split(walk_key, self.together - 1)
        return tasks, jnp.concatenate([key[None], more])

    def _walk(
        self, federation: Federation, policy: AggregationPolicy, task: Task, *, key: PRNGKeyArray
    ) -> _Walked:
        """Run an episode whose losses are differentiable in the policy's parameters."""
        reset_key, walk_key = jax.random.split(key)

        def one_round(state, key):
            received = jax.lax.stop_gradient(receive(federation, task, state, key))
            decision = policy.decide(received.observation, received.trusted)
            if self.server is not None:
                fixed = self.server.decide(received.observation, received.trusted)
                decision = Decision(decision.shares, fixed.step, fixed.momentum)
            model, other = received.next_model(decision), received.next_model(received.fedavg)
            test = federation.test
            losses = federation.loss(model, test), federation.loss(other, test)
            stopped = gated_model(received, decision) if self.gated else (model, decision.shares)
            aggregate, shares = jax.lax.stop_gradient(stopped)
            step = federation.continue_from(task, state, aggregate, shares, key=key)
            return jax.lax.stop_gradient(step.state), _Walked(*losses, shares)

        first = federation.reset(task, key=reset_key)
        _, walked = jax.lax.scan(one_round, first, jax.random.split(walk_key, federation.horizon))
        return walked


def shortfall(evidence: Evidence) -> Float[Array, ""]:
    """Score a task by exp(-10 g) in [.05, 20], where g is the policy's gain over FedAvg in loss."""
    gain = evidence.mean(evidence.rewards - evidence.equal_rewards)
    return jnp.clip(jnp.exp(-10 * gain), 0.05, 20.0)


def train_paper_policies(
    settings: PPOSettings,
    federation: Federation,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    seeds: Sequence[int],
    *,
    axes: PyTree = None,
    on_chunk: OnChunk | None = None,
) -> TrainingResult:
    """Train one policy for each (tasks, method, seed) triple, all in one `vmap`.

    Single-task learning repeats its one task, so that all methods share a compiled program. `axes`
    marks the leaves of the federation that differ by run.
    """
    own = [
        t[np.zeros(len(t), int)] if method == "stl" else t
        for t, method in zip(tasks, methods, strict=True)
    ]
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))
    policy_keys, run_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    policies = eqx.filter_vmap(
        lambda key: Recurrent(federation.channels, settings.hidden, key=key)
    )(policy_keys)
    # Chunks have equal lengths, because a shorter last one would compile another program. They end after
    # a half and a quarter of the updates, where Figure 6 keeps the policies of its learning curve.
    length = settings.steps
    for _ in range(2):
        length = length // 2 if length % 2 == 0 else length
    return train(
        federation,
        stack(own),
        policies,
        PPO(settings.rollouts, settings.learning_rate, gamma=settings.gamma),
        steps=settings.steps,
        priority=stack([replace(settings, method=method).priority() for method in methods]),
        scorer=settings.scorer_function(),
        replay=Replay(act_periods=0),
        chunks=Chunks(length, on_chunk=on_chunk),
        problem_axes=axes,
        key=run_keys,
    )


def train_mixture(
    settings: GradientSettings,
    digits: Digits,
    *,
    chunks: Chunks | None = None,
    state: Resume | None = None,
) -> AggregationPolicy:
    """Train one policy for federations of several kinds by direct gradient through the aggregation."""
    federation, tasks = training_world(settings, digits)
    policy_key, run_key = jax.random.split(jax.random.key(settings.seed))
    tasks = settings.trained_tasks(tasks)
    result = train(
        federation,
        tasks,
        AggregationPolicy(
            federation.channels, settings.hidden, relative=settings.relative, key=policy_key
        ),
        ThroughRounds(
            settings.rollouts,
            settings.learning_rate,
            updates=settings.steps,
            others=tasks,
            together=min(settings.together, len(tasks)),
            logarithm=settings.logarithm,
        ),
        steps=settings.steps,
        priority=settings.priority(),
        scorer=shortfall,
        replay=Replay(act_periods=0),
        chunks=chunks,
        # Episodes are slow, and `prepare_mixture` tests the policy after training.
        measure=0,
        resume_from=state,
        key=run_key,
    )
    assert isinstance(result.policy, AggregationPolicy)
    return result.policy
