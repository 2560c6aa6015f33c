"""`train` runs Algorithm 1 on a problem, tasks, a policy and a learner.

It first checks its arguments, then runs the compiled loop in chunks. Evaluation, progress, checkpoints and
stopping happen at the end of each chunk.
"""

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Key, PRNGKeyArray, PyTree

from apportion.algorithm import Algorithm, Metrics, RunState, advance, begin, raise_fault
from apportion.certify.statistics import compare
from apportion.composition import EqualShares
from apportion.errors import InputError
from apportion.kernels.gpu import compiled_as_graph
from apportion.learners.learner import Learner
from apportion.memory import Replay
from apportion.policy import GaussianLogits, Policy
from apportion.priority import Priority
from apportion.problem import Problem, as_key, check_allocation, check_problem, evaluate
from apportion.runs.checkpoint import load_state
from apportion.scorers import Scorer, max_deviation
from apportion.tasks import Task
from apportion.trees import take

_log = logging.getLogger("apportion")


@dataclass(frozen=True)
class Chunk:
    """State of a run at the end of a chunk, as `on_chunk` receives it."""

    algorithm: Algorithm
    state: RunState
    step: int
    steps: int
    metrics: pd.DataFrame
    """Metrics of this chunk; their rewards are those of the tasks sampled in it."""
    measured: float | None = None
    """Mean reward per period on fixed tasks, by `evaluate`; None if nothing is measured."""

    @property
    def policy(self) -> Policy:
        """The current policy (stacked if there are several runs)."""
        return self.algorithm.policy(self.state)


@dataclass(frozen=True)
class TrainingResult:
    """Result of `train`.

    Parameters
    ----------
    policy : Policy
        The trained policy, stacked if there are several runs.
    metrics : DataFrame
        One row per recorded step (and run).
    state : RunState
        The final state; pass it to `train` as `resume_from` to continue.
    algorithm : Algorithm
        The resolved configuration.
    progress : DataFrame
        Mean reward per period of each measured task, as `evaluate` computes it: column `equal` for equal
        shares, then one column per measured step. Empty if nothing is measured.

    Examples
    --------
    >>> from apportion import Direct, Recurrent, draw_tasks
    >>> from apportion.domains.probes import ShownBest
    >>> key = jax.random.key(0)
    >>> result = train(
    ...     ShownBest(), draw_tasks(12, 4, 8), Recurrent(channels=1, hidden=8, key=key),
    ...     Direct(16, 1e-2), steps=200, key=key)
    >>> len(result.metrics), result.probabilities.shape
    (200, (8,))
    """

    policy: Policy
    metrics: pd.DataFrame
    state: RunState = field(repr=False)
    algorithm: Algorithm = field(repr=False)
    progress: pd.DataFrame = field(default_factory=pd.DataFrame)

    @property
    def probabilities(self) -> np.ndarray:
        """Sampling probability of each task (runs by tasks if there are several runs)."""
        return np.asarray(self.algorithm.probabilities(self.state))

    def summary(self) -> str:
        """Return rewards on fixed tasks during training, and metrics of its first and last tenth.

        Returns
        -------
        str
            Several lines of text.
        """
        tasks = self.algorithm.tasks.count
        steps = int(np.max(np.asarray(self.state.step)))
        lines = [f"{steps} steps over {tasks} tasks"]
        if len(self.metrics):
            lines[0] += f" ({self.metrics['task'].nunique()} drawn)"
        if len(self.progress):
            lines += self._measured()
        rows = max(len(self.metrics) // 10, 1)
        columns = ["deviation", "gradient_norm", "weight"]
        if len(self.metrics):
            first = self.metrics[columns].iloc[:rows].mean()
            last = self.metrics[columns].iloc[-rows:].mean()
            table = pd.DataFrame({"first tenth": first, "last tenth": last})
            lines.append(table.to_string(float_format=lambda x: f"{x: .4g}"))
        return "\n".join(lines)

    def _measured(self) -> list[str]:
        equal, *walked = self.progress.columns
        before, after = walked[0], walked[-1]
        means = self.progress.mean()
        # At most six steps, including the first and the last.
        shown = np.unique(np.linspace(0, len(walked) - 1, 6).round().astype(int))
        lines = [
            f"mean reward per period on {len(self.progress)} of the tasks, as `evaluate` measures it:",
            f"  equal shares {means[equal]: .4g}",
            *(f"  step {walked[k]:<8}{means[walked[k]]: .4g}" for k in shown),
        ]
        if len(self.progress) > 1 and after != before:
            gain = compare(*(self.progress[step].to_numpy() for step in (after, before)))
            lines.append(f"  gain         {gain}")
        return lines


OnChunk = Callable[[Chunk], bool | None]
"""Callback at the end of every chunk; it stops the run by returning True."""

Resume = Callable[[RunState], RunState]
"""Function that maps the initial state of a run to the state to continue from."""


@dataclass(frozen=True)
class Chunks:
    """Chunk length, metrics interval and callback.

    Parameters
    ----------
    length : int
        Steps per chunk, which runs as one compiled program.
    record_every : int
        Steps between two rows of the metrics; it must divide the steps of the run.
    on_chunk : callable, optional
        Called with a `Chunk` at the end of every chunk; the run stops if it returns True.

    Examples
    --------
    >>> Chunks(length=500).fitted(1200)
    400
    """

    length: int = 500
    record_every: int = 1
    on_chunk: OnChunk | None = None

    def fitted(self, steps: int) -> int:
        """Return the chunk length of a run; chunks of equal length compile once."""
        if steps < 1 or self.length < 1 or self.record_every < 1:
            raise InputError("steps, chunk length and record_every must be >= 1")
        if steps % self.record_every:
            raise InputError(f"record_every {self.record_every} must divide steps {steps}")
        even = -(-steps // -(-steps // self.length))
        return -(-even // self.record_every) * self.record_every


def train(
    problem: Problem,
    tasks: Task,
    policy: Policy,
    learner: Learner,
    *,
    steps: int = 1000,
    priority: Priority | None = None,
    scorer: Scorer = max_deviation,
    explore: GaussianLogits | None = None,
    replay: Replay | None = None,
    chunks: Chunks | None = None,
    measure: int = 16,
    resume_from: RunState | Path | str | Resume | None = None,
    problem_axes: PyTree = None,
    key: PRNGKeyArray | Key[Array, " runs"] | int,
) -> TrainingResult:
    r"""Train one policy over all tasks by Algorithm 1, or several independent policies at once.

    Stacked keys give several runs in one `vmap`: seeds, methods, or one single-task learner per task.

    Parameters
    ----------
    problem : Problem
        The problem to learn.
    tasks : Task
        The tasks to train on. For several runs, optionally stacked along a leading axis.
    policy : Policy
        The policy to train. For several runs, one per run, stacked along a leading axis
        (`eqx.filter_vmap` over keys).
    learner : Learner
        The update rule, such as `Direct` or `PPO`. Leaves with a leading axis differ by run.
    steps : int
        Steps of Algorithm 1, counted from the start of the run.
    priority : Priority, optional
        Task sampling; by default the paper's `Priority()`. `Priority(alpha=0)` is uniform multi-task
        learning. Leaves with a leading axis differ by run.
    scorer : callable
        Difficulty of a task, computed from its batch (`apportion.scorers`).
    explore : GaussianLogits, optional
        Noise on the actions after an update; by default none.
    replay : Replay, optional
        How each task's memory is filled and sampled.
    chunks : Chunks, optional
        Chunk length, metrics interval and callback.
    measure : int
        Evaluate the policy on the first `measure` tasks before training and at the end of every chunk,
        always on the same episodes. 0 evaluates nothing, and neither do several runs.
    resume_from : RunState, path or callable, optional
        State of the same run to continue from (`TrainingResult.state`), or a file that `save_state`
        wrote.
    problem_axes : PyTree, optional
        Leaves of the problem that differ by run, as `in_axes` of `eqx.filter_vmap`.
    key : PRNGKey or int
        Random key or seed; the same key gives a bitwise identical run. Stacked keys give one run each.

    Returns
    -------
    TrainingResult
        The trained policy, the metrics and the state to resume from.

    Raises
    ------
    InputError
        If an argument is invalid, if `resume_from` belongs to a different run, or if a loss, allocation
        or score becomes invalid during training.

    Notes
    -----
    The first compilation can take a minute; `logging.basicConfig(level="INFO")` shows it and each chunk,
    which the logger `apportion` reports.

    Priorities and scorer are the paper's by default. Memory is not: it starts with an episode of equal
    shares, batches start uniformly, the policy acts for half a batch after an update and continues in the
    next episode, without noise. `train(..., replay=Replay.paper(), explore=GaussianLogits(0.1))` runs it
    with the memory that the algorithm prints; n_e and the noise are our choice.

    Examples
    --------
    >>> from apportion import Direct, Recurrent, draw_tasks
    >>> from apportion.domains.probes import ShownBest
    >>> key = jax.random.key(0)
    >>> result = train(
    ...     ShownBest(), draw_tasks(12, 4, 8), Recurrent(channels=1, hidden=8, key=key),
    ...     Direct(16, 1e-2), steps=200, key=key)
    >>> print("\n".join(result.summary().splitlines()[:5]))  # doctest: +ELLIPSIS
    200 steps over 8 tasks (8 drawn)
    mean reward per period on 8 of the tasks, as `evaluate` measures it:
      equal shares  0.25
      step 0        0.25...
      step 200      0.98...
    """
    given = {Problem: problem, Task: tasks, Policy: policy, Learner: learner}
    for kind, part in given.items():
        if not isinstance(part, kind):
            ours, theirs = kind.__name__, type(part).__name__
            raise InputError(f"train expects a {ours} but got a {theirs}, {part!r:.40}")
    key = as_key(key)
    several = jax.random.key_data(key).ndim > 1
    if problem_axes is not None and not several:
        raise InputError("problem_axes needs several runs; pass stacked keys, one for each run")
    own_tasks = several and tasks.members.ndim > 2
    first_policy = _first_of(policy, len(key)) if several else policy
    first_problem = _first_problem(problem, problem_axes)
    first_tasks = tasks[0] if own_tasks else tasks
    _log.info("train: compiling, which can take a minute")
    check_problem(first_problem, first_tasks)
    _check_policy(first_problem, first_tasks, first_policy)
    algorithm = Algorithm.of(
        problem,
        tasks,
        first_policy,
        learner,
        horizon=first_problem.horizon,
        priority=priority,
        scorer=scorer,
        explore=explore,
        replay=replay,
    )
    if several:
        axes = _axes_of_runs(algorithm, problem_axes, 0 if own_tasks else None)

        def forward(algorithm, state, steps, record_every):
            return _advance_runs(algorithm, axes, state, steps, record_every)

        first = partial(_begin_runs, axes, algorithm, policy, key)
        return _run(algorithm, resume_from, first, forward, steps, chunks, key)

    def measured(policy: Policy | EqualShares) -> np.ndarray:
        # Step keys are folded with the step number; no run reaches this number.
        paths = evaluate(problem, policy, fixed, key=jax.random.fold_in(key, 2**32 - 2))
        return np.asarray(paths.mean_reward[:, 0])

    fixed = tasks[: min(measure, len(tasks))]
    first = partial(_begin, algorithm, policy, key)
    tried = measured if measure else None
    return _run(algorithm, resume_from, first, _advance, steps, chunks, key, tried)


def _first_of(policies: Policy, runs: int) -> Policy:
    """Return the policy of the first run."""
    leaves = jax.tree.leaves(eqx.filter(policies, eqx.is_array))
    if any(leaf.shape[:1] != (runs,) for leaf in leaves):
        raise InputError(
            f"policy: there are {runs} keys; pass one policy per key, stacked along a leading axis, "
            "such as eqx.filter_vmap(network)(keys)"
        )
    return take(policies, 0)


def _first_problem(problem: Problem, axes: PyTree) -> Problem:
    return jax.tree.map(
        lambda axis, sub: take(sub, 0) if axis == 0 else sub,
        axes,
        problem,
        is_leaf=lambda x: x is None,
    )


def _axes_of_runs(algorithm: Algorithm, problem_axes: PyTree, task_axis: int | None) -> PyTree:
    """Return the `in_axes` of `eqx.filter_vmap` for the leaves of an algorithm that differ by run."""

    def axis(leaf: Any) -> int | None:
        return 0 if eqx.is_array(leaf) and leaf.ndim > 0 else None

    by_leaf = (jax.tree.map(axis, part) for part in (algorithm.priority, algorithm.learner))
    return eqx.tree_at(
        lambda a: (a.problem, a.tasks, a.priority, a.learner),
        jax.tree.map(lambda _: None, algorithm),
        (problem_axes, task_axis, *by_leaf),
        is_leaf=lambda x: x is None,
    )


_begin = eqx.filter_jit(begin)
_advance = compiled_as_graph(advance)


@eqx.filter_jit
def _begin_runs(
    axes: PyTree, algorithm: Algorithm, policies: Policy, keys: Key[Array, " runs"]
) -> RunState:
    return eqx.filter_vmap(begin, in_axes=(axes, 0, 0))(algorithm, policies, keys)


@compiled_as_graph
def _advance_runs(
    algorithm: Algorithm, axes: PyTree, state: RunState, steps: int, record_every: int
) -> tuple[RunState, Metrics]:
    forward = eqx.filter_vmap(lambda a, s: advance(a, s, steps, record_every), in_axes=(axes, 0))
    return forward(algorithm, state)


_copy = eqx.filter_jit(partial(jax.tree.map, jnp.copy))


def _run(
    algorithm: Algorithm,
    resume_from: RunState | Path | str | Resume | None,
    begin: Callable[[], RunState],
    forward: Callable[..., tuple[RunState, Metrics]],
    steps: int,
    chunks: Chunks | None,
    key: Key[Array, "*runs"],
    measured: Callable[[Any], np.ndarray] | None = None,
) -> TrainingResult:
    """Run chunks of the compiled loop until `steps` and check for faults after each."""
    chunks = Chunks() if chunks is None else chunks
    length = chunks.fitted(steps)
    own = algorithm.fingerprints(key)

    def first() -> RunState:
        state = begin()
        found = jnp.broadcast_to(np.array([*own.values()], np.uint32), state.fingerprint.shape)
        return eqx.tree_at(lambda s: s.fingerprint, state, found)

    match resume_from:
        case None:
            given = first()
        case RunState():
            given = resume_from
        case str() | Path():
            given = load_state(resume_from, first())
        case _:
            given = resume_from(first())
    _check_state(given, eqx.filter_eval_shape(first), own)
    # Chunks donate their state to the next chunk, so the caller's state is copied first.
    state: RunState = _copy(given)
    frames, progress = [], {}
    done = int(np.max(np.asarray(state.step)))
    if done > steps:
        raise InputError(
            f"steps is {steps}, but resume_from is at step {done}; steps count from the start of the run"
        )
    if measured is not None:
        progress = {"equal": measured(EqualShares()), done: measured(algorithm.policy(state))}
    while done < steps:
        now = min(length, steps - done)
        state, metrics = forward(algorithm, state, now, chunks.record_every)
        raise_fault(algorithm, state)
        frames.append(_metrics_frame(metrics, done, chunks.record_every))
        if len(frames) == 1:
            _warn_if_flat(algorithm, frames[0])
        done += now
        _log.info("train: %d of %d steps", done, steps)
        if measured is not None:
            progress[done] = measured(algorithm.policy(state))
        mean = None if measured is None else float(progress[done].mean())
        here = Chunk(algorithm, state, done, steps, frames[-1], mean)
        if chunks.on_chunk is not None and chunks.on_chunk(here):
            break
    table = pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
    shown = pd.DataFrame(progress)
    return TrainingResult(algorithm.policy(state), table, state, algorithm, shown)


def _check_state(state: RunState, first: RunState, own: dict[str, int]) -> None:
    """Raise if a state belongs to a different run."""
    theirs = np.asarray(state.fingerprint).reshape(-1, len(own))[0]
    for part, found in zip(own, theirs, strict=True):
        if found != own[part]:
            raise InputError(
                f"resume_from: this state was saved with a different {part}; pass the same {part}, or "
                "omit resume_from to start over"
            )
    there, wanted = (jax.tree.map(lambda x: (x.shape, x.dtype), s) for s in (state, first))
    if jax.tree.structure(there) != jax.tree.structure(wanted) or there != wanted:
        raise InputError(
            "resume_from: the arrays of this state do not have the shapes of this run's; pass the same "
            "policy, replay and number of runs, or omit resume_from to start over"
        )


def _metrics_frame(metrics: Metrics, done: int, record_every: int) -> pd.DataFrame:
    """Return the metrics of a chunk as a table, with a column `run` if there are several runs."""
    columns = {name: np.asarray(getattr(metrics, name)) for name in Metrics.__dataclass_fields__}
    *runs, length = columns["loss"].shape
    step = done + record_every * np.arange(1, length + 1)
    whose = {"run": np.repeat(np.arange(runs[0]), length)} if runs else {}
    place = whose | {"step": np.tile(step, math.prod(runs))}
    return pd.DataFrame(place | {name: column.reshape(-1) for name, column in columns.items()})


def _warn_if_flat(algorithm: Algorithm, metrics: pd.DataFrame) -> None:
    """Warn if the gradient was zero in all recorded updates."""
    if (metrics["gradient_norm"] == 0).all():
        problem, learner = type(algorithm.problem).__name__, type(algorithm.learner).__name__
        warnings.warn(
            f"{learner}: the gradient was 0 in all of the first {len(metrics)} recorded updates, so the "
            f"policy does not learn; {problem}.step may round, count or compare allocations, which has "
            "zero gradient: use PPO, which only needs rewards, or make the step differentiable",
            stacklevel=4,
        )


def _check_policy(problem: Problem, tasks: Task, policy: Policy) -> None:
    """Check one allocation of the untrained policy before training."""
    task = tasks[0]
    # `check_problem` has compiled these programs.
    state = eqx.filter_jit(problem.reset)(task, key=jax.random.key(0))
    observation = eqx.filter_jit(problem.observe)(task, state)
    try:
        allocation = eqx.filter_jit(policy)(observation, task.mask)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{type(policy).__name__} cannot read {type(problem).__name__}'s observation, history "
            f"{observation.history.shape} (entities, window, channels): {error}"
        ) from error
    check_allocation(allocation, task.mask, type(policy).__name__, observation.bounds)
