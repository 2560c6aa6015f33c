"""From settings to a federation, its tasks and trained policies: many runs as one compiled program.

`train_policies` is the paper's learning on its own split: runs differ in seed and method, single-task
learning is a run whose tasks are all the same one, uniform multi-task learning is alpha = 0.
`train_mixture` makes one policy for federations of every kind.
"""

from collections.abc import Sequence
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from apportion.domains.federated.digits import Digits, embedded_digits, load_mnist
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.mixtures import client_model, training_world
from apportion.domains.federated.partitions import Partition, paper_split, skewed_tasks
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.states import client_state
from apportion.domains.federated.through_rounds import ThroughRounds, shortfall
from apportion.domains.settings import Method
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Recurrent
from apportion.tasks import Task
from apportion.training import Chunks, OnChunk, Resume, TrainingResult, train, train_runs
from apportion.trees import stack


def read_digits(settings: FederatedSettings) -> Digits:
    """The digits that the settings name, at their full size."""
    return embedded_digits() if settings.mnist is None else load_mnist(settings.mnist)


def build(
    settings: FederatedSettings, digits: Digits, partition: Partition | None = None
) -> tuple[Federation, Partition]:
    """The federation of these settings out of full-size digits, with the partition behind it."""
    digits = digits.pooled(settings.pooling)
    side = digits.images.shape[1]
    model = client_model(settings, side)
    if partition is None:
        partition = paper_split(digits, settings.clients, settings.samples, seed=settings.seed)
    federation = Federation(
        digits,
        partition,
        model,
        rounds=settings.rounds,
        epochs=settings.epochs,
        batch=settings.batch,
        learning_rate=settings.client_rate,
        evaluation=settings.evaluation,
        test=settings.test,
        sets=settings.sets,
        window=settings.window,
        state=client_state(settings.state),
        precision=settings.precision,
        block=settings.block,
        seed=settings.seed,
    )
    return federation, partition


def sample_tasks(settings: FederatedSettings, partition: Partition, seed: int) -> tuple[Task]:
    """Training and unseen tasks of one seed."""
    return skewed_tasks(
        partition,
        settings.tasks,
        settings.unseen,
        sizes=settings.task_sizes,
        seen=settings.seen,
        seed=2 * seed,
    )


def train_policies(
    settings: FederatedSettings,
    federation: Federation,
    tasks: Sequence[Task],
    methods: Sequence[Method],
    seeds: Sequence[int],
    *,
    on_chunk: OnChunk | None = None,
) -> TrainingResult:
    """One run for each (tasks, method, seed) triple, all in one `vmap`.

    Single-task learning is a run whose tasks are all the same one, so that methods share a program.
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
    # A rest would be another program, and compiling costs as much as many updates.
    length = max(n for n in range(1, settings.chunk + 1) if settings.steps % n == 0)
    return train_runs(
        federation,
        stack(own),
        policies,
        PPO(settings.rollouts, settings.learning_rate, gamma=settings.gamma),
        steps=settings.steps,
        selection=stack([replace(settings, method=method).selection() for method in methods]),
        scorer=settings.scorer_function(),
        replay=Replay(act_periods=0),
        chunks=Chunks(length, on_chunk=on_chunk),
        keys=run_keys,
    )


def train_mixture(
    settings: FederatedSettings,
    digits: Digits,
    *,
    chunks: Chunks | None = None,
    state: Resume | None = None,
) -> AggregationPolicy:
    """One policy for federations of every kind asked for, by direct gradient through the aggregation."""
    federation, dealt = training_world(settings, digits)
    policy_key, run_key = jax.random.split(jax.random.key(settings.seed))
    tasks = settings.trained_tasks(dealt.tasks)
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
        selection=settings.selection(),
        scorer=shortfall,
        replay=Replay(act_periods=0),
        chunks=chunks,
        state=state,
        key=run_key,
    )
    assert isinstance(result.policy, AggregationPolicy)
    return result.policy


def evaluation_keys(seeds: Sequence[int], tasks: int) -> Key[Array, "runs tasks"]:
    """Keys of the episodes that methods are compared on: the same first models and
    batches for every method of a seed.
    """
    return stack([jax.random.split(jax.random.key(1000 + seed), tasks) for seed in seeds])
