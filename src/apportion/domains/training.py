"""Training of a policy or an ensemble on a problem; one `vmap` over the members."""

import hashlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray

from apportion.algorithm import RunState
from apportion.composition import Ensemble, EqualShares
from apportion.domains.settings import ProblemSettings, TrainingSettings
from apportion.domains.tables import TableResult
from apportion.learners.direct import Direct
from apportion.learners.learner import Learner
from apportion.memory import Replay
from apportion.policy import Policy, Recurrent
from apportion.problem import Problem, check_problem, evaluate
from apportion.runs.runner import JobResult, PreparedJob
from apportion.tasks import Task, count_tasks, draw_tasks
from apportion.training import Chunks, OnChunk, Resume, TrainingResult, train
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
    """Train `settings.members` policies; `network` returns an untrained policy for a key."""
    # The keys of the first member do not depend on the number of members.
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
    """Return the only policy of a stack, or the ensemble of several."""
    return take(members, 0) if count == 1 else Ensemble(members)


def prepare_problem(problem: Problem, settings: ProblemSettings) -> PreparedJob:
    """Return a job that trains a policy on random tasks and compares it with equal shares."""
    check_problem(problem, draw_random_tasks(np.arange(problem.universe), settings, settings.seed))
    content = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(problem))
    digest = hashlib.sha256(content).hexdigest()[:16]

    def train(on_chunk: OnChunk, resume: Resume) -> JobResult:
        policy = train_problem(problem, settings, on_chunk=on_chunk, resume=resume)
        found = compare_with_equal(problem, policy, settings, seed=settings.seed)
        return JobResult(
            policy, found.to_json(), found.summary(), {"problem": type(problem).__name__}
        )

    return PreparedJob({"source": type(problem).__name__, "fingerprint": digest}, train)


def train_problem(
    problem: Problem,
    settings: ProblemSettings,
    *,
    tasks: Task | None = None,
    on_chunk: OnChunk | None = None,
    resume: Resume | None = None,
) -> Policy:
    """Train a `Recurrent` policy with `Direct` on `tasks`, by default random tasks of the problem."""
    if tasks is None:
        tasks = draw_random_tasks(np.arange(problem.universe), settings, settings.seed)
    first = jax.eval_shape(lambda key: problem.reset(tasks[0], key=key), jax.random.key(0))
    channels = jax.eval_shape(lambda state: problem.observe(tasks[0], state), first).history.shape[
        -1
    ]
    trained = train_members(
        problem,
        tasks,
        lambda key: Recurrent(channels, settings.hidden, key=key),
        Direct(settings.batch, settings.learning_rate),
        settings,
        replay=Replay(warm_up=problem.horizon, act_periods=1),
        chunks=Chunks(settings.chunk, on_chunk=on_chunk),
        state=resume,
    )
    return averaged(trained.policy, settings.members)


def compare_with_equal(
    problem: Problem,
    policy: Policy,
    settings: ProblemSettings,
    *,
    seed: int,
    tasks: Task | None = None,
) -> TableResult:
    """Compare the mean reward per period with that of equal shares on `tasks`, by default random tasks."""
    if tasks is None:
        tasks = draw_random_tasks(np.arange(problem.universe), settings, seed)
    choices = {"policy": policy, "equal shares": EqualShares()}
    found = {
        name: np.asarray(evaluate(problem, choice, tasks, key=seed).mean_reward[:, 0])
        for name, choice in choices.items()
    }
    return TableResult(pd.DataFrame(found), "mean reward per period")


def draw_random_tasks(entities: np.ndarray, settings: ProblemSettings, seed: int) -> Task:
    """Sample `settings.tasks` tasks of the entities, or all tasks if there are fewer."""
    count = min(settings.tasks, count_tasks(len(entities), settings.task_size))
    return draw_tasks(entities, settings.task_size, count, seed=seed)
