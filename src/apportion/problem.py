"""Interface of an allocation problem: the family of MDPs M_t, one for each task t.

A problem is three pure functions of a task and a state: `reset` samples x_1, `observe` returns the
observation x_{i,n} of every entity, and `step` maps the allocation a_n to the reward R_t(x_n, a_n) and
x_{n+1}. Memory stores states, so they should be compact (indices and allocations).
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from apportion.errors import InputError, first_line
from apportion.simplex import TOLERANCE, Bounds, equal_within, on_simplex, present
from apportion.tasks import Task
from apportion.trees import take

State = PyTree[Array]


class Observation(eqx.Module):
    """What a policy observes of a task in one period.

    Parameters
    ----------
    history : array of shape (entities, window, channels)
        Recent history of each entity.
    held : array of shape (entities,)
        Share that each entity holds.
    limits : array of shape (entities,), optional
        Largest share that each entity can take in this period; 0 means that it is absent.
    floors : array of shape (entities,), optional
        Smallest share that each entity gets in this period.

    Examples
    --------
    >>> limits = jnp.array([1.0, 0.0])
    >>> observation = Observation(jnp.zeros((2, 5, 1)), jnp.full(2, 0.5), limits)
    >>> observation.present(jnp.array([True, True])).tolist()
    [True, False]
    """

    history: Float[Array, "*batch entities window channels"]
    held: Float[Array, "*batch entities"]
    limits: Float[Array, "*batch entities"] | None = None
    floors: Float[Array, "*batch entities"] | None = None

    @property
    def bounds(self) -> Bounds | None:
        """Bounds of the next allocation, or None without limits and floors."""
        unbounded = self.limits is None and self.floors is None
        return None if unbounded else Bounds(self.limits, self.floors)

    def present(self, mask: Bool[Array, " entities"]) -> Bool[Array, " entities"]:
        """Return the entities that are no padding and have a positive limit."""
        return present(mask, self.bounds)

    def scored(self, mask: Bool[Array, " entities"]) -> Bool[Array, " entities"]:
        """Return the entities that a policy scores: those present, or all if none is, to avoid NaN."""
        here = self.present(mask)
        return mask if self.limits is None else jnp.where(here.any(), here, mask)


class Step(eqx.Module):
    """Result of `Problem.step`.

    Parameters
    ----------
    state : PyTree of arrays
        The next state.
    reward : array
        Reward of the period.
    terminated : array of bool
        Whether the task has ended; the next state has no value.
    truncated : array of bool
        Whether the episode stops here although the task goes on; the next state still has a value.

    Examples
    --------
    >>> step = Step(jnp.array(1), jnp.array(0.5), jnp.array(False), jnp.array(True))
    >>> bool(step.terminated | step.truncated)
    True
    """

    state: State
    reward: Float[Array, "*batch"]
    terminated: Bool[Array, "*batch"]
    truncated: Bool[Array, "*batch"]


class Problem(eqx.Module):
    """Abstract base class of problems: allocation tasks over subsets of one universe of entities.

    Subclasses define `universe` (M, the number of entities), `horizon` (the maximum number of periods in
    an episode) and the three methods. All methods must be traceable by JAX; `Direct` and `DirectEpisodes`
    also differentiate `step`.

    Examples
    --------
    >>> class FixedReturns(Problem):
    ...     returns: Float[Array, " universe"]
    ...     universe: int = 3
    ...     horizon: int = 10
    ...     def reset(self, task, *, key):
    ...         return jnp.zeros((), jnp.int32)
    ...     def observe(self, task, state):
    ...         return Observation(self.returns[task.members][:, None, None], jnp.zeros(task.width))
    ...     def step(self, task, state, allocation, *, key):
    ...         reward = allocation @ self.returns[task.members]
    ...         return Step(state + 1, reward, jnp.array(False), state + 1 >= self.horizon)
    >>> check_problem(FixedReturns(jnp.array([0.1, 0.2, 0.3])), Task.of([[0, 1], [1, 2]]))
    """

    universe: eqx.AbstractVar[int]
    horizon: eqx.AbstractVar[int]

    @abstractmethod
    def reset(self, task: Task, *, key: PRNGKeyArray) -> State:
        """Sample the first state of an episode.

        Parameters
        ----------
        task : Task
            The task.
        key : PRNGKey
            Random key.

        Returns
        -------
        PyTree of arrays
            The state.
        """

    @abstractmethod
    def observe(self, task: Task, state: State) -> Observation:
        """Return what the policy observes of each entity, in the order of the task.

        Parameters
        ----------
        task : Task
            The task.
        state : PyTree of arrays
            The current state.

        Returns
        -------
        Observation
            History, held shares and bounds.
        """

    @abstractmethod
    def step(
        self, task: Task, state: State, allocation: Float[Array, " entities"], *, key: PRNGKeyArray
    ) -> Step:
        """Apply an allocation for one period.

        Parameters
        ----------
        task : Task
            The task.
        state : PyTree of arrays
            The current state.
        allocation : array of shape (entities,)
            Share of each entity.
        key : PRNGKey
            Random key.

        Returns
        -------
        Step
            Next state, reward, and whether the episode ends.
        """


def as_key(key: PRNGKeyArray | int) -> PRNGKeyArray:
    """Return a random key; an integer is used as its seed.

    >>> bool(as_key(3) == jax.random.key(3))
    True
    """
    return jax.random.key(key) if isinstance(key, int) else key


Choice = Callable[[Observation, Bool[Array, " entities"]], Float[Array, " entities"]]
"""Function of an observation and a mask that returns an allocation, such as a policy."""


def equal_allocation(problem: Problem, task: Task, state: State) -> Float[Array, " entities"]:
    """Return equal shares within the bounds of a state."""
    return equal_within(task.mask, problem.observe(task, state).bounds)


class Trajectory(eqx.Module):
    """State, allocation and reward of each period of an episode, or of a stack of episodes.

    `alive` is False in the periods after the end of an episode.
    """

    states: State | None
    allocations: Float[Array, "*batch time entities"]
    rewards: Float[Array, "*batch time"]
    alive: Bool[Array, "*batch time"]
    limits: Float[Array, "*batch time entities"] | None = eqx.field(repr=False)
    mask: Bool[Array, "*batch entities"]

    @property
    def mean_reward(self) -> Float[Array, "*batch"]:
        """Mean reward per period until the end of the episode."""
        return self.rewards.sum(-1) / jnp.maximum(self.alive.sum(-1), 1)


def rollout(problem: Problem, choose: Choice, task: Task, *, key: PRNGKeyArray) -> Trajectory:
    """Run one episode of a task with `choose`, in one scan over time."""
    reset_key, walk_key = jax.random.split(key)
    first = problem.reset(task, key=reset_key)

    def period(carry, key):
        state, alive = carry
        observation = problem.observe(task, state)
        allocation = choose(observation, task.mask)
        step = _require_step(problem, problem.step(task, state, allocation, key=key))
        reward = jnp.where(alive, step.reward, 0.0)
        going = alive & ~(step.terminated | step.truncated)
        return (step.state, going), (state, allocation, reward, alive, observation.limits)

    keys = jax.random.split(walk_key, problem.horizon)
    _, lived = jax.lax.scan(period, (first, jnp.array(True)), keys)
    return Trajectory(*lived, mask=task.mask)


def evaluate(
    problem: Problem, choose: Choice, tasks: Task, *, key: PRNGKeyArray | int, episodes: int = 1
) -> Trajectory:
    """Run a policy on every task and return its allocations and rewards.

    The same key gives every policy the same episodes, so that comparisons are paired.

    Parameters
    ----------
    problem : Problem
        The problem.
    choose : callable
        A policy, or any function of (observation, mask) that returns an allocation.
    tasks : Task
        The tasks to evaluate on.
    key : PRNGKey or int
        Random key, or a seed.
    episodes : int
        Episodes per task.

    Returns
    -------
    Trajectory
        Allocations, rewards and `mean_reward`, with leading axes (tasks, episodes). States and limits
        are omitted, because they can be large.

    Raises
    ------
    InputError
        If the tasks are not a stack of subsets of the universe, or if shares are negative, not finite,
        above their limits, or do not sum to the available total.

    Examples
    --------
    >>> from apportion import EqualShares, draw_tasks
    >>> from apportion.domains.probes import ShownBest
    >>> evaluate(ShownBest(), EqualShares(), draw_tasks(12, 4, 3), key=0).mean_reward.tolist()
    [[0.25], [0.25], [0.25]]
    """
    _check_tasks(problem, tasks)
    paths, unfit, bounds = _evaluate(problem, choose, tasks, as_key(key), episodes)
    # Inside a caller's jit there are no concrete values to check.
    for where in () if isinstance(unfit, Tracer) else np.argwhere(np.asarray(unfit) >= 0)[:1]:
        place = tuple(where.tolist())
        source = getattr(choose, "__name__", type(choose).__name__)
        shares = paths.allocations[place][unfit[place]]
        check_allocation(shares, paths.mask[place], source, take(bounds, place))
    return paths


@eqx.filter_jit
def _evaluate(
    problem: Problem, choose: Choice, tasks: Task, key: PRNGKeyArray, episodes: int
) -> tuple[Trajectory, Int[Array, "tasks episodes"], Bounds]:
    """Return trajectories, the first period of each with invalid shares (or -1), and its bounds."""
    keys = jax.random.split(key, (len(tasks), episodes))

    def one(task, key):
        path = rollout(problem, choose, task, key=key)
        bounds = Bounds(path.limits)
        bad = ~_fits(path.allocations, task.mask, bounds, TOLERANCE)[1] & path.alive
        first = jnp.argmax(bad)
        path = replace(path, states=None, limits=None)
        return path, jnp.where(bad.any(), first, -1), take(bounds, first)

    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(tasks, keys)


def check_problem(problem: Problem, tasks: Task) -> None:
    """Check that a problem implements its interface, by one period of the first and the last task.

    Parameters
    ----------
    problem : Problem
        The problem.
    tasks : Task
        A stack of tasks of its universe.

    Raises
    ------
    InputError
        If shapes, types or values are wrong, or a method cannot be compiled. The message names the
        method, what it returned and what it must return.

    Examples
    --------
    >>> from apportion import draw_tasks
    >>> from apportion.domains.probes import ShownBest
    >>> check_problem(ShownBest(), draw_tasks(12, 4, 3))
    """
    name = type(problem).__name__
    horizon = problem.horizon
    if not isinstance(horizon, int) or horizon < 1:
        raise InputError(f"{name}.horizon is {horizon!r}; it must be an integer >= 1")
    _check_tasks(problem, tasks)
    for task in (tasks[0], tasks[len(tasks) - 1]):
        _check_period(problem, task, name)


def _check_tasks(problem: Problem, tasks: Task) -> None:
    """Raise unless the tasks are a stack of subsets of the problem's universe."""
    if not isinstance(tasks, Task):
        raise InputError(f"tasks: expected a Task but got a {type(tasks).__name__}; use Task.of")
    if tasks.members.ndim != 2:
        raise InputError(
            f"tasks: members have shape {tasks.members.shape}; pass a stack, (tasks, entities), such as "
            "tasks[:1] for a single task"
        )
    # Compiled code would replace an index beyond the universe by the last one.
    highest = -1 if isinstance(tasks.members, Tracer) else int(np.max(np.asarray(tasks.members)))
    if highest >= problem.universe:
        raise InputError(
            f"tasks: entity {highest} is outside {type(problem).__name__}'s universe of "
            f"{problem.universe} entities"
        )


def _check_period(problem: Problem, task: Task, name: str) -> None:
    m, failures, key = task.width, {}, jax.random.key(0)
    state = _compiled(failures, problem.reset, task, key=key)
    _check_finite(state, f"{name}.reset", "state", task)
    observation = _compiled(failures, problem.observe, task, state)
    if not isinstance(observation, Observation):
        raise InputError(
            f"{name}.observe returned {type(observation).__name__}; return an Observation"
        )
    history, held = jnp.asarray(observation.history), jnp.asarray(observation.held)
    if history.ndim != 3 or history.shape[0] != m:
        raise InputError(
            f"{name}.observe: history has shape {history.shape}; it must be "
            f"(entities, window, channels) with {m} entities"
        )
    if held.shape != (m,):
        raise InputError(f"{name}.observe: held has shape {held.shape}; it must be ({m},)")
    _check_finite(observation, f"{name}.observe", "observation", task)
    _check_bounds(observation, name, m)
    shares = _equal_within(task.mask, observation.bounds)
    step = _compiled(failures, problem.step, task, state, shares, key=key)
    _require_step(problem, step)
    for field in ("reward", "terminated", "truncated"):
        shape = jnp.shape(getattr(step, field))
        if shape != ():
            raise InputError(
                f"{name}.step: {field} has shape {shape}; it must be a scalar, shape ()"
            )
    for field in ("terminated", "truncated"):
        if jnp.asarray(getattr(step, field)).dtype != bool:
            raise InputError(f"{name}.step: {field} is not a boolean")
    _check_finite(step.reward, f"{name}.step", "reward", task)
    before, after = (jax.tree.map(_signature, s) for s in (state, step.state))
    if jax.tree.structure(before) != jax.tree.structure(after) or before != after:
        raise InputError(
            f"{name}.step: the next state is {after}, but {name}.reset returned {before}; "
            "both must have the same structure, shapes and types"
        )
    for method, error in failures.items():
        _refuse_uncompiled(f"{name}.{method}", error)


def _require_step(problem: Problem, step: Any) -> Step:
    """Return the result of `Problem.step`; raise if it is of another type."""
    if not isinstance(step, Step):
        returned = type(step).__name__
        raise InputError(f"{type(problem).__name__}.step returned {returned}; return a Step")
    return step


_equal_within = eqx.filter_jit(equal_within)


def _compiled(
    failures: dict[str, Exception], method: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Call a method under jit, which starts faster than one operation at a time.

    If it cannot be compiled, call it without jit and record the error, so that invalid values are reported
    first. Arguments are converted to arrays, because training traces every leaf of a state.
    """
    try:
        return eqx.filter_jit(method)(*jax.tree.map(jnp.asarray, arguments), **named)
    except Exception as error:
        failures[method.__name__] = error
        return method(*arguments, **named)


def _refuse_uncompiled(method: str, error: Exception) -> None:
    """Raise for a method that cannot be compiled, since training compiles every method."""
    if not isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        raise error
    raise InputError(
        f"{method} cannot be compiled ({first_line(error)}); write it in jax.numpy without `if` on its "
        "arrays, or wrap a Python simulator with apportion.bridges.gymnasium.from_gymnasium"
    ) from error


def _check_bounds(observation: Observation, name: str, m: int) -> None:
    for field in ("limits", "floors"):
        value = getattr(observation, field)
        if value is None:
            continue
        if jnp.shape(value) != (m,):
            raise InputError(
                f"{name}.observe: {field} has shape {jnp.shape(value)}; it must be ({m},)"
            )
        if (np.asarray(value) < 0).any():
            raise InputError(f"{name}.observe: {field} has a negative value; it must be >= 0")


def _signature(leaf: Any) -> str:
    leaf = jnp.asarray(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}"


def _check_finite(tree: PyTree, method: str, what: str, task: Task) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = np.asarray(leaf)
        if np.issubdtype(leaf.dtype, np.floating) and not np.isfinite(leaf).all():
            where = jax.tree_util.keystr(path).lstrip(".") or "value"
            first = tuple(np.argwhere(~np.isfinite(leaf))[0].tolist())
            entities = task.entities
            raise InputError(
                f"{method}: {what} {where} is {leaf[first]} at index {first} "
                f"for the task of entities {entities}; it must be finite"
            )


@eqx.filter_jit
def _fits(
    shares: Float[Array, "*time entities"],
    mask: Bool[Array, " entities"],
    bounds: Bounds,
    tolerance: float,
) -> tuple[Float[Array, "*time"], Bool[Array, "*time"]]:
    """Return the available total, and whether allocations are valid within their limits."""
    most = jnp.ones_like(shares) if bounds.limits is None else jnp.minimum(bounds.limits, 1.0)
    limits = jnp.where(mask, most, 0.0)
    available = jnp.minimum(limits.sum(-1), 1.0)
    below = (shares <= limits + tolerance).all(-1)
    return available, below & on_simplex(shares, mask, total=available, tolerance=tolerance)


def check_allocation(
    allocation: Float[Array, " entities"],
    mask: Bool[Array, " entities"],
    source: str,
    bounds: Bounds | None = None,
) -> None:
    """Raise if an allocation is not on the simplex over the task's entities, or exceeds a limit."""
    shares, real = np.asarray(allocation), np.asarray(mask)
    if shares.shape != real.shape:
        raise InputError(f"{source}: allocation has shape {shares.shape}; it must be {real.shape}")
    if not np.isfinite(shares).all():
        raise InputError(f"{source}: allocation {shares.tolist()} has values that are not finite")
    bounds = Bounds() if bounds is None else bounds
    if bounds.limits is not None:
        over = shares - np.asarray(bounds.limits)
        if (over > 1e-5).any():
            first = int(np.argmax(over))
            raise InputError(
                f"{source}: entity {first} gets {shares[first]:.6g}, above its limit of "
                f"{float(bounds.limits[first]):.6g}; compute shares with a Head or `within`"
            )
    available, fits = (x.item() for x in _fits(jnp.asarray(allocation), mask, bounds, 1e-5))
    if not fits or (shares[~real] != 0).any():
        raise InputError(
            f"{source}: allocation {np.round(shares, 6).tolist()} is not on the simplex "
            f"(sum {shares.sum():.6g}, smallest {shares.min():.6g}); shares must be >= 0, sum to "
            f"{available:g} and be 0 where the mask is False"
        )
