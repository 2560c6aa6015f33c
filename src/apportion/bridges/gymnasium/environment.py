"""Any problem and its tasks as a `gymnasium.Env`.

Gymnasium has no space for the simplex, so an action is a score for each entity in [-1, 1], and the
environment apportions: `reach` times the scores through softmax and the period's bounds (`Head`).
"""

from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.errors import InputError
from apportion.problem import Problem, State, Step, check_problem
from apportion.simplex import Allocation, Head
from apportion.tasks import Task

_LARGEST = float(np.finfo(np.float32).max)
_SEEDS = 2**31


class Place(eqx.Module):
    """Where an episode stands: its task, its state, the key of what is still to come."""

    task: Int[Array, "*stack"]
    state: State
    key: PRNGKeyArray
    ended: Bool[Array, "*stack"]


class Shown(eqx.Module):
    """What is handed out at a place."""

    history: Float[Array, "*stack entities window channels"]
    held: Float[Array, "*stack entities"]
    limits: Float[Array, "*stack entities"]
    mask: Bool[Array, "*stack entities"]


class Interface(eqx.Module):
    """The spaces of a problem's tasks and the two functions that Gymnasium asks for, compiled."""

    problem: Problem
    tasks: Task
    head: Head
    reach: float = eqx.field(static=True)
    flat: bool = eqx.field(static=True)

    @classmethod
    def of(
        cls, problem: Problem, tasks: Task, head: Head | None, reach: float, flat: bool
    ) -> "Interface":
        """Check everything once."""
        if isinstance(tasks, Task):
            tasks = Task(tasks.members[None], tasks.mask[None])
        if not 0 < reach <= 30:
            raise InputError(f"reach is {reach}; it must be above 0 and at most 30")
        check_problem(problem, tasks)
        return cls(problem, tasks, Head() if head is None else head, float(reach), flat)

    def spaces(self) -> tuple[spaces.Dict, spaces.Box]:
        """Of observations and of actions."""
        m = self.tasks.width
        shown = jax.eval_shape(lambda: self.begin(jax.random.key(0), jnp.array(-1))[1])
        shape = (shown.history.size,) if self.flat else shown.history.shape
        share = spaces.Box(0.0, 1.0, (m,), np.float32)
        seen = {
            "history": spaces.Box(-_LARGEST, _LARGEST, shape, np.float32),
            "held": share,
            "limits": share,
            "mask": spaces.MultiBinary(m),
        }
        return spaces.Dict(seen), spaces.Box(-1.0, 1.0, (m,), np.float32)

    def begin(self, key: PRNGKeyArray, chosen: Int[Array, ""]) -> tuple[Place, Shown]:
        """A first state of the chosen task, or of one drawn where `chosen` is negative."""
        task_key, reset_key, key = jax.random.split(key, 3)
        drawn = jax.random.randint(task_key, (), 0, len(self.tasks))
        task = jnp.where(chosen < 0, drawn, chosen).astype(jnp.int32)
        state = self.problem.reset(self.tasks[task], key=reset_key)
        place = Place(task, state, key, jnp.array(False))
        return place, self.show(place)

    def step(self, place: Place, action: Allocation) -> tuple[Place, Shown, Step, Allocation]:
        """The place after an action's allocation, what is seen there, and that allocation."""
        task = self.tasks[place.task]
        seen = self.problem.observe(task, place.state)
        scores = self.reach * jnp.clip(action, -1.0, 1.0)
        shares = self.head(scores, seen.scored(task.mask), seen.bounds)
        key, step_key = jax.random.split(place.key)
        step = self.problem.step(task, place.state, shares, key=step_key)
        place = Place(place.task, step.state, key, step.terminated | step.truncated)
        return place, self.show(place), step, shares

    def show(self, place: Place) -> Shown:
        """Everything that a policy of ours would see."""
        task = self.tasks[place.task]
        seen = self.problem.observe(task, place.state)
        limits = 1.0 if seen.limits is None else jnp.clip(seen.limits, 0.0, 1.0)
        limits = jnp.where(task.mask, limits, 0.0)
        return Shown(seen.history, jnp.clip(seen.held, 0.0, 1.0), limits, task.mask)

    def as_numpy(self, shown: Shown) -> dict[str, np.ndarray]:
        """An observation, or a stack of them, as its space has it."""
        history = np.asarray(shown.history, np.float32)
        if self.flat:
            history = history.reshape(*history.shape[:-3], -1)
        return {
            "history": history,
            "held": np.asarray(shown.held, np.float32),
            "limits": np.asarray(shown.limits, np.float32),
            "mask": np.asarray(shown.mask, np.int8),
        }

    def chosen(self, options: dict[str, Any] | None) -> int:
        """The task that `reset`'s options name, or -1."""
        task = (options or {}).get("task", -1)
        if not -1 <= task < len(self.tasks):
            raise InputError(f"task {task}: there are {len(self.tasks)}, counted from 0")
        return int(task)


def key_from(random: np.random.Generator) -> PRNGKeyArray:
    """The key of one more episode."""
    return jax.random.key(int(random.integers(_SEEDS)))


_begin, _step = eqx.filter_jit(Interface.begin), eqx.filter_jit(Interface.step)


class ProblemEnv(gymnasium.Env):
    """A problem's task, or several of one width, as an environment.

    An observation is a dictionary: `history`, what each entity shows; `held`, the share it holds;
    `limits`, the most it can take now (1 where nothing limits it); `mask`, which entities are real. An
    action is a score for each entity, from -1 to 1; shares are the softmax of `reach` times the scores,
    within the period's bounds. `info` has `mask`, `task` and, after a step, the `allocation`.

    Parameters
    ----------
    problem, tasks
        What to step. Of several tasks one is drawn at every reset, or `options={"task": t}` names it.
    head
        From scores to shares; softmax by default.
    reach
        How far apart scores can lie: at 5 an entity can get e^10 times as much as another.
    flat
        Whether `history` is one row, which is all that some libraries take, or
        (entities, window, channels).

    Examples
    --------
    >>> from apportion.domains.budget.problem import Budget
    >>> from apportion.tasks import draw_tasks
    >>> env = ProblemEnv(Budget.simulate(universe=20, periods=30), draw_tasks(20, 3, 4))
    >>> observation, info = env.reset(seed=0)
    >>> observation["history"].shape, observation["limits"].tolist()
    ((48,), [1.0, 1.0, 1.0])
    >>> _, reward, terminated, truncated, info = env.step(np.zeros(3, np.float32))
    >>> [round(float(share), 4) for share in info["allocation"]]
    [0.3333, 0.3333, 0.3333]
    """

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        problem: Problem,
        tasks: Task,
        *,
        head: Head | None = None,
        reach: float = 5.0,
        flat: bool = True,
    ):
        self.interface = Interface.of(problem, tasks, head, reach, flat)
        self.observation_space, self.action_space = self.interface.spaces()
        self._place: Place | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin an episode; the same seed begins the same sequence of episodes."""
        super().reset(seed=seed)
        chosen = jnp.array(self.interface.chosen(options))
        self._place, shown = _begin(self.interface, key_from(self.np_random), chosen)
        observation = self.interface.as_numpy(shown)
        return observation, self._info(self._place, observation)

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Apportion by an action's scores."""
        if self._place is None:
            raise InputError("step before reset: call reset first")
        scores = jnp.asarray(action, jnp.float32)
        self._place, shown, step, shares = _step(self.interface, self._place, scores)
        observation = self.interface.as_numpy(shown)
        info = self._info(self._place, observation) | {"allocation": np.asarray(shares)}
        ends = bool(step.terminated), bool(step.truncated)
        return observation, float(step.reward), *ends, info

    def _info(self, place: Place, observation: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"mask": observation["mask"].astype(bool), "task": int(place.task)}
