"""Comparison of single-task, multi-task and prioritised learning for the demonstration of a problem.

Each repetition has its own tasks, held-out tasks and initial parameters. Multi-task and prioritised
learning train one policy on all tasks; single-task learning trains one policy for each of a few tasks.
Every policy gets the same number of updates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray

from apportion.certify.statistics import over_rows_and_columns
from apportion.composition import EqualShares
from apportion.domains.settings import TrainingSettings
from apportion.learners.learner import Learner
from apportion.memory import Replay
from apportion.policy import Policy
from apportion.problem import Problem, evaluate
from apportion.runs.progress import Progress
from apportion.tasks import Task, draw_tasks, split_entities
from apportion.training import Chunk, Chunks, train
from apportion.trees import Tree, repeat, stack

UPDATES = 200
"""Updates of each policy; chosen on training rewards of the budget domain."""
SINGLE_TASKS = 4
"""Tasks per repetition for which single-task learning trains a policy."""
SINGLE, MULTI, PRIORITISED = "single-task", "multi-task", "prioritised"


def budgets_note(repetitions: int) -> str:
    """Return the note on the number of updates that demonstrations with training show."""
    return (
        f"Each policy gets {UPDATES} updates with every method. In each of {repetitions} repetitions "
        "multi-task and prioritised learning train one policy on all tasks; single-task learning trains "
        f"{SINGLE_TASKS} policies, each on one task, and its level is their mean. The shares shown are "
        "those of a multi-task policy."
    )


def compare_methods(
    problem: Problem,
    later: Problem,
    universes: Sequence[np.ndarray],
    network: Callable[[PRNGKeyArray], Policy],
    learner: Learner,
    settings: TrainingSettings,
    *,
    task_size: int,
    held_out: int,
    tested: int,
    rule: str,
    replay: Replay,
    progress: Progress,
) -> tuple[dict[str, np.ndarray], np.ndarray, Task]:
    """Train with each method, and compare with equal shares on tasks of held-out entities.

    Parameters
    ----------
    problem, later : Problem
        Training problem and test problem.
    universes : sequence of array
        Entities of each repetition.
    network, learner, settings, replay, progress
        As in `train_methods`.
    task_size, held_out, tested : int
        Entities per task, held-out entities per universe, and test tasks among the held-out entities.
    rule : str
        Name of equal shares in the result.

    Returns
    -------
    dict of array
        Mean reward over test tasks for each method and the rule, (repetitions, time).
    array
        Shares of the first repetition's multi-task policy on its first held-out task, (time, entities).
    Task
        Test tasks of shape (repetitions, tasks, entities).
    """
    own, unseen = [], []
    for seed, entities in enumerate(universes, settings.seed):
        first, second = split_entities(len(entities), held_out, seed=seed)
        own.append(draw_tasks(entities[first], task_size, settings.tasks, seed=seed))
        unseen.append(draw_tasks(entities[second], task_size, tested, seed=seed))
    tasks = stack(unseen)
    policies = train_methods(
        problem, stack(own), network, learner, settings, replay=replay, progress=progress
    )
    progress.stage("testing", 0.9)
    key = jax.random.key(settings.seed)
    rewards, shares, equal = map(np.asarray, _evaluate_all(later, policies, tasks, key))
    return {**by_method(rewards), rule: equal}, shares[0, 0], tasks


def train_methods(
    problem: Problem,
    tasks: Task,
    network: Callable[[PRNGKeyArray], Policy],
    learner: Learner,
    settings: TrainingSettings,
    *,
    replay: Replay,
    progress: Progress,
) -> Policy:
    """Train policies with each method; one `vmap` over the runs of all repetitions.

    Parameters
    ----------
    tasks : Task
        Training tasks of shape (repetitions, tasks, entities).
    network : callable
        Returns an untrained policy for a key.
    settings : TrainingSettings
        Priority, scorer and seed.
    progress : Progress
        Receives the completed fraction through `stage`.

    Returns
    -------
    Policy
        Stack of shape (repetitions, policies): multi-task, prioritised, then single-task policies.
    """
    count, alone = len(tasks), tasks.first(SINGLE_TASKS).flat[:, None]
    uniform, prioritised = (replace(settings, method=name).priority() for name in ("mtl", "pmtl"))
    keys = jax.random.split(jax.random.key(settings.seed), count + len(alone))
    own, others = jnp.split(jax.vmap(jax.random.split)(keys), [count])
    # Multi-task and prioritised learning start from the same parameters.
    several = (_join(tasks, tasks), repeat(stack([uniform, prioritised]), count), _join(own, own))
    single = (alone, stack([uniform] * len(alone)), others)
    batches = [several, single]
    if not learner.periods:
        # Without memory, copies of a task are equivalent to one task; equal shapes need one compilation.
        copies = jax.tree.map(lambda leaf: jnp.repeat(leaf, tasks.count, 1), alone)
        batches = [_join(several, (copies, *single[1:]))]
    policies = []
    for number, (chosen, priorities, run_keys) in enumerate(batches):

        def report(chunk: Chunk, first: int = number) -> None:
            progress.stage("training", 0.9 * (first + chunk.step / chunk.steps) / len(batches))

        progress.stage("training", 0.9 * number / len(batches))
        policies.append(
            train(
                problem,
                chosen,
                eqx.filter_vmap(network)(run_keys[:, 0]),
                learner,
                steps=UPDATES,
                priority=priorities,
                scorer=settings.scorer_function(),
                replay=replay,
                chunks=Chunks(UPDATES // 5, on_chunk=report),
                key=run_keys[:, 1],
            ).policy
        )

    def by_repetition(leaf: jax.Array) -> jax.Array:
        groups = leaf[:count], leaf[count : 2 * count], leaf[2 * count :]
        return jnp.concatenate([each.reshape(count, -1, *leaf.shape[1:]) for each in groups], 1)

    return jax.tree.map(
        lambda leaf: by_repetition(leaf) if eqx.is_array(leaf) else leaf, _join(*policies)
    )


def by_method(levels: np.ndarray) -> dict[str, np.ndarray]:
    """Average the levels of stacked policies (see `train_methods`) within each method."""
    return {SINGLE: levels[:, 2:].mean(1), MULTI: levels[:, 0], PRIORITISED: levels[:, 1]}


def levels_of(tables: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Return the mean of each method's levels with its 95 % interval.

    Parameters
    ----------
    tables : mapping of array
        Levels of each method, by repetition (rows) and block of time (columns).
    """
    found = {name: over_rows_and_columns(np.atleast_2d(table)) for name, table in tables.items()}
    rows = [(name, each.value, each.low, each.high, each.n) for name, each in found.items()]
    return pd.DataFrame(rows, columns=["method", "level", "low", "high", "n"])


def _join(*stacks: Tree) -> Tree:
    """Concatenate stacks."""
    return jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves) if eqx.is_array(leaves[0]) else leaves[0], *stacks
    )


@eqx.filter_jit
def _evaluate_all(
    problem: Problem, policies: Policy, tasks: Task, key: PRNGKeyArray
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return mean rewards and first-task shares of each policy, and mean rewards of equal shares."""

    def one(policy: Policy, tasks: Task) -> tuple[jax.Array, jax.Array]:
        path = evaluate(problem, policy, tasks, key=key)
        return path.rewards.mean((0, 1)), path.allocations[0, 0]

    def repetition(policies: Policy, tasks: Task) -> tuple[jax.Array, jax.Array, jax.Array]:
        each = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None))(policies, tasks)
        return *each, one(EqualShares(), tasks)[0]

    return eqx.filter_vmap(repetition)(policies, tasks)
