"""Parts of a demonstration that domains share: three methods at equal budgets, and levels with intervals.

A repetition has tasks, held-out tasks and first parameters of its own. In each, multi-task and prioritised
learning train one policy over all tasks, and single-task learning trains one policy for each of some tasks.
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
from apportion.trees import Tree, grouped, repeat, stack, take

UPDATES = 200
"""Updates of every policy, whatever the method: fixed on training rewards of the budget domain."""
SINGLE_TASKS = 4
"""Tasks in a repetition that single-task learning trains a policy for."""
SINGLE, MULTI, PRIORITISED = "single-task", "multi-task", "prioritised"


def budgets_note(repetitions: int) -> str:
    """Return the sentences on budgets that every demonstration with training shows."""
    return (
        f"Each policy gets {UPDATES} updates, whatever the method. In each of {repetitions} repetitions "
        "multi-task and prioritised learning train one policy on all tasks; single-task learning trains "
        f"{SINGLE_TASKS} policies, each on one task, and its level is their mean. The shares shown are "
        "those of a multi-task policy."
    )


def draw_repetitions(
    universes: Sequence[np.ndarray],
    *,
    held_out: int,
    task_size: int,
    tasks: int,
    tested: int,
    seed: int,
) -> tuple[Task, Task]:
    """Draw training tasks and tasks of held-out entities for each repetition.

    Parameters
    ----------
    universes : sequence of array
        The entities of each repetition.
    held_out : int
        Entities of each that are not trained on.
    task_size : int
        Entities per task.
    tasks, tested : int
        Number of training tasks, and of tasks of held-out entities.

    Returns
    -------
    tuple of Task
        Stacks of shape (repetitions, tasks, entities).
    """
    own, unseen = [], []
    for number, entities in enumerate(universes):
        first, second = split_entities(len(entities), held_out, seed=seed + number)
        own.append(draw_tasks(entities[first], task_size, tasks, seed=seed + number))
        unseen.append(draw_tasks(entities[second], task_size, tested, seed=seed + number))
    return stack(own), stack(unseen)


def train_methods(
    problem: Problem,
    tasks: Task,
    network: Callable[[PRNGKeyArray], Policy],
    learner: Learner,
    settings: TrainingSettings,
    *,
    replay: Replay,
    progress: Progress,
) -> dict[str, Policy]:
    """Train policies by each method; the runs of all repetitions are one `vmap`.

    Parameters
    ----------
    tasks : Task
        Training tasks of shape (repetitions, tasks, entities).
    network : callable
        Makes an untrained policy from a key.
    settings : TrainingSettings
        Priority, scorer and seed.
    progress : Progress
        Gets the done part of the work as `stage`.

    Returns
    -------
    dict of Policy
        By method, policies stacked as (repetitions, policies of the repetition).
    """
    repetitions, alone = len(tasks), tasks.first(SINGLE_TASKS).flat[:, None]
    uniform, prioritised = (replace(settings, method=name).priority() for name in ("mtl", "pmtl"))
    keys = jax.random.split(jax.random.key(settings.seed), repetitions + len(alone))
    keys = jax.vmap(jax.random.split)(keys)
    own, others = keys[:repetitions], keys[repetitions:]
    # Multi-task and prioritised learning start from the same parameters.
    several = (_join(tasks, tasks), repeat(stack([uniform, prioritised]), repetitions))
    single = (alone, stack([uniform] * len(alone)))
    batches = [(*several, _join(own, own)), (*single, others)]
    if not learner.periods:
        # A learner without memory takes copies of a task for that task: one program for all runs.
        copies = jax.tree.map(lambda leaf: jnp.repeat(leaf, tasks.count, 1), alone)
        batches = [_join(batches[0], (copies, *batches[1][1:]))]
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
    trained = _join(*policies)
    return {
        SINGLE: grouped(take(trained, slice(2 * repetitions, None)), SINGLE_TASKS),
        MULTI: grouped(take(trained, slice(repetitions)), 1),
        PRIORITISED: grouped(take(trained, slice(repetitions, 2 * repetitions)), 1),
    }


def unstack(policies: Policy) -> list[Policy]:
    """Return the policies of a method one by one, those of the first repetition first."""
    shape = jax.tree.leaves(eqx.filter(policies, eqx.is_array))[0].shape[:2]
    return [take(policies, place) for place in np.ndindex(*shape)]


def _join(*stacks: Tree) -> Tree:
    """Stacks one after the other, as one stack."""
    return jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves) if eqx.is_array(leaves[0]) else leaves[0], *stacks
    )


def evaluate_methods(
    problem: Problem, policies: Mapping[str, Policy], tasks: Task, rule: str, *, seed: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Evaluate each method, and equal shares under the name `rule`, on held-out tasks.

    Parameters
    ----------
    policies : mapping of Policy
        By method, as `train_methods` returns them.
    tasks : Task
        Held-out tasks of shape (repetitions, tasks, entities).

    Returns
    -------
    dict of array
        By method, the mean reward over a repetition's policies and tasks, (repetitions, time).
    array
        Shares of the first repetition's multi-task policy on its first task, (time, entities).
    """
    # All policies of a repetition side by side: one program for all methods.
    together = jax.tree.map(
        lambda *leaves: jnp.concatenate(leaves, 1) if eqx.is_array(leaves[0]) else leaves[0],
        *(policies[name] for name in (MULTI, PRIORITISED, SINGLE)),
    )
    count, key = 2 + SINGLE_TASKS, jax.random.key(seed)
    rewards, shares = map(np.asarray, _evaluate_all(problem, together, count, tasks, key))
    equal, _ = map(np.asarray, _evaluate_all(problem, EqualShares(), 1, tasks, key))
    by_method = {
        SINGLE: rewards[:, 2:].mean(1),
        MULTI: rewards[:, 0],
        PRIORITISED: rewards[:, 1],
        rule: equal[:, 0],
    }
    return by_method, shares[0, 0]


@eqx.filter_jit
def _evaluate_all(
    problem: Problem, policies: Policy, count: int, tasks: Task, key: PRNGKeyArray
) -> tuple[jax.Array, jax.Array]:
    """Mean rewards and the first task's shares, (repetitions, policies, time, ...)."""

    def one(policy: Policy, tasks: Task) -> tuple[jax.Array, jax.Array]:
        path = evaluate(problem, policy, tasks, key=key)
        return path.rewards.mean((0, 1)), path.allocations[0, 0]

    by_policy = eqx.filter_vmap(one, in_axes=(eqx.if_array(0), None), axis_size=count)
    return eqx.filter_vmap(by_policy)(policies, tasks)


def levels_of(tables: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """Return the mean of each method's table of units with its 95 % interval.

    Parameters
    ----------
    tables : mapping of array
        By method, a level for each repetition (rows) and block of time (columns).
    """
    rows = []
    for name, table in tables.items():
        found = over_rows_and_columns(np.atleast_2d(table))
        rows.append((name, found.value, found.low, found.high, found.n))
    return pd.DataFrame(rows, columns=["method", "level", "low", "high", "n"])
