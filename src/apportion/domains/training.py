"""From a problem and settings to trained policies: the members of an ensemble in one `vmap`."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from apportion.algorithm import RunState
from apportion.composition import Ensemble
from apportion.domains.settings import TrainingSettings
from apportion.learners.learner import Learner
from apportion.memory import Replay
from apportion.policy import Policy
from apportion.problem import Problem
from apportion.tasks import Task
from apportion.training import Chunks, Resume, TrainingResult, train
from apportion.trees import take


def train_members(
    problem: Problem,
    tasks: Task,
    network: Callable[[PRNGKeyArray], Policy],
    learner: Learner,
    settings: TrainingSettings,
    *,
    replay: Replay,
    chunks: Chunks | None = None,
    state: RunState | Resume | None = None,
) -> TrainingResult:
    """Train `settings.members` policies of one kind; `network` makes an untrained one from a key."""
    # The first member's keys are the seed's, whatever the number of members.
    first = jax.random.key(settings.seed)
    others = [jax.random.fold_in(first, member) for member in range(1, settings.members)]
    keys = jax.vmap(jax.random.split)(jnp.stack([first, *others]))
    return train(
        problem,
        settings.trained_tasks(tasks),
        eqx.filter_vmap(network)(keys[:, 0]),
        learner,
        steps=settings.steps,
        priority=settings.priority(),
        scorer=settings.scorer_function(),
        replay=replay,
        chunks=chunks,
        resume_from=state,
        key=keys[:, 1],
    )


def averaged(members: Policy, count: int) -> Policy:
    """Stacked policies as one: a single one as it is, several averaged."""
    return take(members, 0) if count == 1 else Ensemble(members)
