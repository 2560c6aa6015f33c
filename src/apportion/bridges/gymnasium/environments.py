"""A problem and its tasks as a `gymnasium.Env`.

Gymnasium has no space for the simplex, so an action is a score in [-1, 1] for each entity. The shares are
the softmax of five times the scores, within the bounds of the period (`Head`).
"""

from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Int, PRNGKeyArray

from apportion.errors import InputError
from apportion.problem import Problem, State, Step, check_problem
from apportion.simplex import Allocation, Head
from apportion.tasks import Task

_SCORE_SCALE = 5.0
"""Factor on scores; the share of an entity can be e^10 times that of another."""


class _Episode(eqx.Module):
    """Task, state and random key of an episode."""

    task: Int[Array, ""]
    state: State
    key: PRNGKeyArray


@eqx.filter_jit
def _begin(problem: Problem, tasks: Task, key: PRNGKeyArray) -> tuple[_Episode, dict[str, Array]]:
    """Sample a task and reset it."""
    task_key, reset_key, key = jax.random.split(key, 3)
    place = jax.random.randint(task_key, (), 0, len(tasks))
    state = problem.reset(tasks[place], key=reset_key)
    return _Episode(place, state, key), _show(problem, tasks[place], state)


@eqx.filter_jit
def _step(
    problem: Problem, tasks: Task, episode: _Episode, action: Allocation
) -> tuple[_Episode, dict[str, Array], Step, Allocation]:
    """Apply an action; return the episode and observation after it, the step and the allocation."""
    task = tasks[episode.task]
    seen = problem.observe(task, episode.state)
    scores = _SCORE_SCALE * jnp.clip(action, -1.0, 1.0)
    shares = Head()(scores, seen.scored(task.mask), seen.bounds)
    key, step_key = jax.random.split(episode.key)
    step = problem.step(task, episode.state, shares, key=step_key)
    return _Episode(episode.task, step.state, key), _show(problem, task, step.state), step, shares


def _show(problem: Problem, task: Task, state: State) -> dict[str, Array]:
    """Return everything that a `Policy` observes."""
    seen = problem.observe(task, state)
    limits = 1.0 if seen.limits is None else jnp.clip(seen.limits, 0.0, 1.0)
    shown = {
        "history": seen.history.reshape(-1),
        "held": jnp.clip(seen.held, 0.0, 1.0),
        "limits": jnp.where(task.mask, limits, 0.0),
    }
    shown = {name: values.astype(jnp.float32) for name, values in shown.items()}
    return shown | {"mask": task.mask.astype(jnp.int8)}


class ProblemEnv(gymnasium.Env):
    """Gymnasium environment for one or more tasks of a problem.

    An action is a score from -1 to 1 for each entity. The shares are the softmax of five times the scores,
    within the bounds of the period. `info` contains `mask`, `task` and, after a step, `allocation`. An
    observation is a dictionary with these entries:

    - `history`: features of shape (entities, window, channels), flattened because some libraries support
      only flat arrays;
    - `held`: shares held by each entity;
    - `limits`: largest share that each entity can take in this period, 1 if it has no limit;
    - `mask`: 1 for each entity of the task, 0 for padding.

    Parameters
    ----------
    problem : Problem
        The problem to step.
    tasks : Task
        One task, or a stack of tasks of the same width. `reset` samples one task of a stack.

    Raises
    ------
    InputError
        If the problem and the tasks do not fit together.

    Examples
    --------
    >>> from apportion import draw_tasks
    >>> from apportion.domains.budget.problem import Budget
    >>> env = ProblemEnv(Budget.simulate(universe=20, periods=30), draw_tasks(20, 3, 4))
    >>> observation, info = env.reset(seed=0)
    >>> observation["history"].shape, observation["limits"].tolist()
    ((48,), [1.0, 1.0, 1.0])
    >>> _, reward, terminated, truncated, info = env.step(np.zeros(3, np.float32))
    >>> [round(float(share), 4) for share in info["allocation"]]
    [0.3333, 0.3333, 0.3333]
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, problem: Problem, tasks: Task):
        if tasks.members.ndim == 1:
            tasks = Task(tasks.members[None], tasks.mask[None])
        check_problem(problem, tasks)
        self._family = problem, tasks
        self._episode: _Episode | None = None
        _, shown = eqx.filter_eval_shape(_begin, problem, tasks, jax.random.key(0))
        share = spaces.Box(0.0, 1.0, (tasks.width,), np.float32)
        largest, shape = float(np.finfo(np.float32).max), shown["history"].shape
        self.observation_space = spaces.Dict({
            "history": spaces.Box(-largest, largest, shape, np.float32),
            "held": share,
            "limits": share,
            "mask": spaces.MultiBinary(tasks.width),
        })  # fmt: skip
        self.action_space = spaces.Box(-1.0, 1.0, (tasks.width,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Start an episode of a sampled task.

        Parameters
        ----------
        seed : int, optional
            Seed of the sequence of episodes. Without it, the sequence continues.
        options : dict, optional
            Not used.

        Returns
        -------
        observation, info : dict, dict
            As described for the class.
        """
        super().reset(seed=seed)
        key = jax.random.key(int(self.np_random.integers(2**31)))
        self._episode, shown = _begin(*self._family, key)
        return self._to_numpy(shown)

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Convert scores to an allocation and step the problem.

        Parameters
        ----------
        action : array of shape (entities,)
            Scores from -1 to 1.

        Returns
        -------
        observation, reward, terminated, truncated, info
            As in `gymnasium.Env.step`.

        Raises
        ------
        InputError
            If `reset` was not called, or the action has the wrong shape or is not finite.
        """
        if self._episode is None:
            raise InputError("step before reset: call reset first")
        scores = np.asarray(action, np.float32)
        if scores.shape != self.action_space.shape or not np.isfinite(scores).all():
            raise InputError(
                f"action: shape {scores.shape} with values {scores.min()} to {scores.max()}; give a score "
                f"from -1 to 1 for each entity, shape {self.action_space.shape}"
            )
        self._episode, shown, step, shares = _step(
            *self._family, self._episode, jnp.asarray(scores)
        )
        observation, info = self._to_numpy(shown)
        info["allocation"] = np.asarray(shares)
        ends = bool(step.terminated), bool(step.truncated)
        return observation, float(step.reward), *ends, info

    def _to_numpy(self, shown: dict[str, Array]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Convert an observation to NumPy, and return it with its info."""
        assert self._episode is not None
        observation = {name: np.asarray(values) for name, values in shown.items()}
        return observation, {"mask": observation["mask"] == 1, "task": int(self._episode.task)}
