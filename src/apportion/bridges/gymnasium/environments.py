"""Any problem and its tasks as a `gymnasium.Env`, and many episodes at once as a `VectorEnv`.

Gymnasium has no space for the simplex, so an action is a score for each entity in [-1, 1], and the
environment apportions: five times the scores through softmax and the period's bounds (`Head`).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.domains.domain import Domain, domain_names, find_domain
from apportion.errors import InputError
from apportion.problem import Problem, State, Step, check_problem
from apportion.simplex import Allocation, Head
from apportion.tasks import Task, draw_tasks

_LARGEST_FLOAT = float(np.finfo(np.float32).max)
_SCORE_SCALE = 5.0
"""Factor on scores: an entity can get e^10 times as much as another."""
_Shown = dict[str, Array]
"""An observation, by the names of its space."""


class _Episode(eqx.Module):
    """An episode: its task, its state, the key of its next steps."""

    task: Int[Array, "*stack"]
    state: State
    key: PRNGKeyArray
    ended: Bool[Array, "*stack"]


class _Interface(eqx.Module):
    """The spaces of a problem's tasks, and reset and step as Gymnasium defines them."""

    problem: Problem
    tasks: Task

    @classmethod
    def of(cls, problem: Problem, tasks: Task) -> "_Interface":
        """Check the problem and its tasks."""
        if tasks.members.ndim == 1:
            tasks = Task(tasks.members[None], tasks.mask[None])
        check_problem(problem, tasks)
        return cls(problem, tasks)

    def spaces(self) -> tuple[spaces.Dict, spaces.Box]:
        """Of observations and of actions."""
        m = self.tasks.width
        shown = jax.eval_shape(lambda: self.begin(jax.random.key(0))[1])
        share = spaces.Box(0.0, 1.0, (m,), np.float32)
        seen = {
            "history": spaces.Box(
                -_LARGEST_FLOAT, _LARGEST_FLOAT, shown["history"].shape, np.float32
            ),
            "held": share,
            "limits": share,
            "mask": spaces.MultiBinary(m),
        }
        return spaces.Dict(seen), spaces.Box(-1.0, 1.0, (m,), np.float32)

    def begin(self, key: PRNGKeyArray) -> tuple[_Episode, _Shown]:
        """A first state of a task that is drawn."""
        task_key, reset_key, key = jax.random.split(key, 3)
        task = jax.random.randint(task_key, (), 0, len(self.tasks))
        state = self.problem.reset(self.tasks[task], key=reset_key)
        episode = _Episode(task, state, key, jnp.array(False))
        return episode, self._show(episode)

    def step(
        self, episode: _Episode, action: Allocation
    ) -> tuple[_Episode, _Shown, Step, Allocation]:
        """The episode after an action's allocation, what is seen then, and that allocation."""
        task = self.tasks[episode.task]
        seen = self.problem.observe(task, episode.state)
        scores = _SCORE_SCALE * jnp.clip(action, -1.0, 1.0)
        shares = Head()(scores, seen.scored(task.mask), seen.bounds)
        key, step_key = jax.random.split(episode.key)
        step = self.problem.step(task, episode.state, shares, key=step_key)
        episode = _Episode(episode.task, step.state, key, step.terminated | step.truncated)
        return episode, self._show(episode), step, shares

    def _show(self, episode: _Episode) -> _Shown:
        """Everything that a `Policy` observes."""
        task = self.tasks[episode.task]
        seen = self.problem.observe(task, episode.state)
        limits = 1.0 if seen.limits is None else jnp.clip(seen.limits, 0.0, 1.0)
        shown = {
            "history": seen.history.reshape(-1),
            "held": jnp.clip(seen.held, 0.0, 1.0),
            "limits": jnp.where(task.mask, limits, 0.0),
        }
        shown = {name: values.astype(jnp.float32) for name, values in shown.items()}
        return shown | {"mask": task.mask.astype(jnp.int8)}


def _hand_out(
    episode: _Episode, shown: _Shown
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """An observation, or a stack of them, and its info, as NumPy's."""
    observation = {name: np.asarray(values) for name, values in shown.items()}
    info = {"mask": observation["mask"].astype(bool), "task": np.asarray(episode.task)}
    return observation, info


def _key_from(random: np.random.Generator) -> PRNGKeyArray:
    """The key of one more episode."""
    return jax.random.key(int(random.integers(2**31)))


_begin, _step = eqx.filter_jit(_Interface.begin), eqx.filter_jit(_Interface.step)
_begin_all = eqx.filter_jit(eqx.filter_vmap(_Interface.begin, in_axes=(None, 0)))


@eqx.filter_jit
def _step_all(interface: _Interface, episodes: _Episode, actions: Float[Array, "batch entities"]):
    def one(episode, action):
        following, shown, step, shares = interface.step(episode, action)
        fresh = interface.begin(jax.random.fold_in(episode.key, 0))
        ended = episode.ended
        episode, shown = jax.tree.map(
            lambda new, old: jnp.where(ended, new, old), fresh, (following, shown)
        )
        ends = step.terminated & ~ended, step.truncated & ~ended
        kept = jnp.where(ended, 0.0, step.reward), *ends, jnp.where(ended, 0.0, shares)
        return episode, shown, kept

    return jax.vmap(one)(episodes, actions)


def _check_action(action: np.ndarray, space: spaces.Space) -> Array:
    """An action's scores, checked; Gymnasium does not check them."""
    scores = np.asarray(action, np.float32)
    if scores.shape != space.shape or not np.isfinite(scores).all():
        raise InputError(
            f"action: {np.count_nonzero(~np.isfinite(scores))} values that are not finite in shape "
            f"{scores.shape}; give a score from -1 to 1 for each entity, shape {space.shape}"
        )
    return jnp.asarray(scores)


class ProblemEnv(gymnasium.Env):
    """A problem's task, or several of one width, as an environment.

    An observation is a dictionary: `history`, what each entity shows, (entities, window, channels) in one
    row, which is all that some libraries take; `held`, the share it holds; `limits`, the most it can take
    now (1 where nothing limits it); `mask`, which entities are real. An action is a score for each entity,
    from -1 to 1; shares are the softmax of five times the scores, within the period's bounds. `info` has
    `mask`, `task` and, after a step, the `allocation`.

    Parameters
    ----------
    problem, tasks
        What to step. Of several tasks one is drawn at every reset; give one alone, `tasks[t]`, to stay
        with it.

    Examples
    --------
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
        self.interface = _Interface.of(problem, tasks)
        self.observation_space, self.action_space = self.interface.spaces()
        self._episode: _Episode | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin an episode; the same seed begins the same sequence of episodes."""
        super().reset(seed=seed)
        self._episode, shown = _begin(self.interface, _key_from(self.np_random))
        observation, info = _hand_out(self._episode, shown)
        return observation, info | {"task": int(info["task"])}

    def step(
        self, action: np.ndarray
    ) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        """Apportion by an action's scores."""
        if self._episode is None:
            raise InputError("step before reset: call reset first")
        scores = _check_action(action, self.action_space)
        self._episode, shown, step, shares = _step(self.interface, self._episode, scores)
        observation, info = _hand_out(self._episode, shown)
        info |= {"task": int(info["task"]), "allocation": np.asarray(shares)}
        ends = bool(step.terminated), bool(step.truncated)
        return observation, float(step.reward), *ends, info


class ProblemVectorEnv(VectorEnv):
    """Several episodes in one compiled step; observations and actions as in `ProblemEnv`.

    An episode that has ended restarts at the next step, whatever the action, as in Gymnasium's own
    vector environments (`AutoresetMode.NEXT_STEP`).

    Parameters
    ----------
    num_envs
        Episodes side by side, each with its own task where there are several.
    problem, tasks
        As for `ProblemEnv`.

    Examples
    --------
    >>> from apportion.domains.budget.problem import Budget
    >>> envs = ProblemVectorEnv(8, Budget.simulate(universe=20, periods=30), draw_tasks(20, 3, 4))
    >>> observation, info = envs.reset(seed=0)
    >>> envs.step(np.zeros((8, 3), np.float32))[1].shape
    (8,)
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs: int, problem: Problem, tasks: Task):
        if num_envs < 1:
            raise InputError(f"num_envs is {num_envs}; at least one is needed")
        self.num_envs = num_envs
        self.interface = _Interface.of(problem, tasks)
        self.single_observation_space, self.single_action_space = self.interface.spaces()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._episodes: _Episode | None = None
        self._random: list[np.random.Generator] | None = None

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin all episodes; environment i with the seed s + i, or with the i-th of a list of seeds."""
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None or self._random is None:
            given = [None] * self.num_envs if seeds is None else list(seeds)
            self._random = [seeding.np_random(one)[0] for one in given]
        keys = jnp.stack([_key_from(random) for random in self._random])
        episodes, shown = _begin_all(self.interface, keys)
        self._episodes = episodes
        return _hand_out(episodes, shown)

    def step(
        self, actions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One period of every episode."""
        if self._episodes is None:
            raise InputError("step before reset: call reset first")
        scores = _check_action(actions, self.action_space)
        episodes, shown, kept = _step_all(self.interface, self._episodes, scores)
        self._episodes = episodes
        observation, info = _hand_out(episodes, shown)
        reward, terminated, truncated, shares = map(np.asarray, kept)
        info |= {"allocation": shares}
        return observation, reward.astype(np.float64), terminated, truncated, info


@cache
def _problem_of(domain: str) -> Problem:
    problem = find_domain(domain).problem()
    assert problem is not None, f"{domain} was registered without a problem"
    return problem


def _make(
    domain: str,
    *,
    num_envs: int | None = None,
    entities: int = 5,
    tasks: int = 64,
    seed: int = 0,
) -> ProblemEnv | ProblemVectorEnv:
    """An environment over random subsets of entities; a vector environment if `num_envs` is given."""
    problem = _problem_of(domain)
    subsets = draw_tasks(problem.universe, entities, tasks, seed=seed)
    if num_envs is None:
        return ProblemEnv(problem, subsets)
    return ProblemVectorEnv(num_envs, problem, subsets)


def register_domains() -> None:
    """Register the domains that have a problem of embedded data for `gymnasium.make` and `make_vec`."""
    for name in domain_names():
        known = f"apportion/{name.capitalize()}-v0" in gymnasium.registry
        if not known and type(find_domain(name)).problem is not Domain.problem:
            gymnasium.register(
                f"apportion/{name.capitalize()}-v0",
                entry_point=f"{__name__}:_make",
                vector_entry_point=f"{__name__}:_make",
                kwargs={"domain": name},
            )
