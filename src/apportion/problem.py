"""The interface of an allocation problem: the family of MDPs M_t, one for each task t.

A problem is three pure functions of a task and a state: `reset` draws x_1, `observe` shows every
entity its own x_{i,n}, `step` takes the allocation a_n to the reward R_t(x_n, a_n) and x_{n+1}.
States should be compact (indices and allocations): they are what a task's memory keeps.
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
    """What each entity shows a policy: a window of its own channels, the share it holds, and, where
    the problem has them, what bounds its next share (see `Bounds`).
    """

    history: Float[Array, "*batch entities window channels"]
    held: Float[Array, "*batch entities"]
    limits: Float[Array, "*batch entities"] | None = None
    """The most each entity can take now, as a share; 0 is absent."""
    floors: Float[Array, "*batch entities"] | None = None
    """The least each entity gets now."""

    @property
    def bounds(self) -> Bounds | None:
        """What the next allocation keeps to, if anything."""
        unbounded = self.limits is None and self.floors is None
        return None if unbounded else Bounds(self.limits, self.floors)

    def present(self, mask: Bool[Array, " entities"]) -> Bool[Array, " entities"]:
        """The real entities that can take anything now."""
        return present(mask, self.bounds)

    def scored(self, mask: Bool[Array, " entities"]) -> Bool[Array, " entities"]:
        """The entities a policy reads: those present, or all if none is, so that the result is finite."""
        here = self.present(mask)
        return mask if self.limits is None else jnp.where(here.any(), here, mask)


class Step(eqx.Module):
    """What follows an allocation. `terminated`: the task has ended by its own rules, nothing comes
    after; `truncated`: the episode was cut here, and the state still has a value.
    """

    state: State
    reward: Float[Array, "*batch"]
    terminated: Bool[Array, "*batch"]
    truncated: Bool[Array, "*batch"]


class Problem(eqx.Module):
    """A family of allocation tasks over one universe of entities.

    Subclasses define `universe` (M), `horizon` (the most periods an episode lasts) and the three
    methods. Everything must be traceable by JAX; direct policy gradient also differentiates `step`.
    """

    universe: eqx.AbstractVar[int]
    horizon: eqx.AbstractVar[int]

    @abstractmethod
    def reset(self, task: Task, *, key: PRNGKeyArray) -> State:
        """The first state of an episode of `task`."""

    @abstractmethod
    def observe(self, task: Task, state: State) -> Observation:
        """What the policy sees of each entity, entity by entity in the task's order."""

    @abstractmethod
    def step(
        self, task: Task, state: State, allocation: Float[Array, " entities"], *, key: PRNGKeyArray
    ) -> Step:
        """Apportion one period's resource, collect the reward, move on."""


def as_key(key: PRNGKeyArray | int) -> PRNGKeyArray:
    """A random key; a whole number is taken for its seed.

    >>> bool(as_key(3) == jax.random.key(3))
    True
    """
    return jax.random.key(key) if isinstance(key, int) else key


Choice = Callable[[Observation, Bool[Array, " entities"]], Float[Array, " entities"]]
"""Anything that turns an observation and a mask into an allocation; every policy is one."""


def equal_allocation(problem: Problem, task: Task, state: State) -> Float[Array, " entities"]:
    """Equal shares within what the state allows; where nothing bounds them, the state is not read."""
    return equal_within(task.mask, problem.observe(task, state).bounds)


class Trajectory(eqx.Module):
    """One episode, or a stack of them: period n's state, allocation, reward, and whether it was lived."""

    states: State | None
    allocations: Float[Array, "*batch time entities"]
    rewards: Float[Array, "*batch time"]
    alive: Bool[Array, "*batch time"]
    limits: Float[Array, "*batch time entities"] | None = eqx.field(repr=False)
    mask: Bool[Array, "*batch entities"]

    @property
    def mean_reward(self) -> Float[Array, "*batch"]:
        """Mean reward over the periods before the episode's end."""
        return self.rewards.sum(-1) / jnp.maximum(self.alive.sum(-1), 1)


def rollout(problem: Problem, choose: Choice, task: Task, *, key: PRNGKeyArray) -> Trajectory:
    """Follow `choose` on one task from its first state, in one scan over time."""
    reset_key, walk_key = jax.random.split(key)
    first = problem.reset(task, key=reset_key)

    def period(carry, key):
        state, alive = carry
        observation = problem.observe(task, state)
        allocation = choose(observation, task.mask)
        step = problem.step(task, state, allocation, key=key)
        reward = jnp.where(alive, step.reward, 0.0)
        going = alive & ~(step.terminated | step.truncated)
        return (step.state, going), (state, allocation, reward, alive, observation.limits)

    keys = jax.random.split(walk_key, problem.horizon)
    _, lived = jax.lax.scan(period, (first, jnp.array(True)), keys)
    return Trajectory(*lived, mask=task.mask)


def evaluate(
    problem: Problem, choose: Choice, tasks: Task, *, key: PRNGKeyArray | int, episodes: int = 1
) -> Trajectory:
    """Roll `choose` out on every task, `episodes` times each: arrays (tasks, episodes, time, ...).

    The same key gives every policy the same episodes, so that comparisons are paired. States and limits,
    which may be large, are left out.

    Raises
    ------
    InputError
        `choose` gives shares that are negative, not finite, above limits or of another sum.
    """
    paths, unfit, bounds = _evaluate(problem, choose, tasks, as_key(key), episodes)
    # A caller that compiles evaluations sees no numbers yet, and checks nothing.
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
    """Paths, each one's first period with shares that do not fit, or -1, and the bounds of that period."""
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
    """Walk one period of the first and the last task, and say what breaks the interface, if anything.

    Raises
    ------
    InputError
        Names the method, what it returned and what it should return.
    """
    name = type(problem).__name__
    horizon = problem.horizon
    if not isinstance(horizon, int) or horizon < 1:
        raise InputError(
            f"{name}.horizon is {horizon!r}; it must be a whole number of periods >= 1"
        )
    if tasks.members.ndim != 2:
        raise InputError(
            f"tasks: members have shape {tasks.members.shape}; give a stack, (tasks, entities), such as "
            "tasks[:1] for the first task alone"
        )
    highest = int(np.max(np.asarray(tasks.members)))
    if highest >= problem.universe:
        raise InputError(
            f"tasks: entity {highest} is outside {name}'s universe of {problem.universe} entities"
        )
    for task in (tasks[0], tasks[len(tasks) - 1]):
        _check_period(problem, task, name)


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
    if not isinstance(step, Step):
        raise InputError(f"{name}.step returned {type(step).__name__}; return a Step")
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
            f"{name}.step: the next state is {after}, but {name}.reset gave {before}; "
            "both must have the same structure, shapes and types"
        )
    for method, error in failures.items():
        _refuse_uncompiled(f"{name}.{method}", error)


_equal_within = eqx.filter_jit(equal_within)


def _compiled(
    failures: dict[str, Exception], method: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """What a method returns, from one program: operation by operation takes much longer to start.

    A method that cannot be compiled is called as it is and its error kept: what is wrong with its values
    is said first. In training all that a state holds is traced, so it is here, plain numbers too.
    """
    try:
        return eqx.filter_jit(method)(*jax.tree.map(jnp.asarray, arguments), **named)
    except Exception as error:
        failures[method.__name__] = error
        return method(*arguments, **named)


def _refuse_uncompiled(method: str, error: Exception) -> None:
    """Refuse what works on numbers only: training compiles every method, and NumPy cannot be."""
    if not isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
        raise error
    raise InputError(
        f"{method} cannot be compiled ({first_line(error)}); write it in jax.numpy without `if` on its "
        "arrays, or wrap a simulator in plain Python with apportion.bridges.gymnasium.from_gymnasium"
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
                f"{method}: {what} {where} is {leaf[first]} at place {first} "
                f"for the task of entities {entities}; it must be finite"
            )


@eqx.filter_jit
def _fits(
    shares: Float[Array, "*time entities"],
    mask: Bool[Array, " entities"],
    bounds: Bounds,
    tolerance: float,
) -> tuple[Float[Array, "*time"], Bool[Array, "*time"]]:
    """What can be shared out, and whether allocations do so within their limits."""
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
    """Refuse an allocation that is not on the simplex over the task's real entities, or breaks bounds."""
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
                f"{float(bounds.limits[first]):.6g}; apportion through a Head, or `within`"
            )
    available, fits = (x.item() for x in _fits(jnp.asarray(allocation), mask, bounds, 1e-5))
    if not fits or (shares[~real] != 0).any():
        raise InputError(
            f"{source}: allocation {np.round(shares, 6).tolist()} is off the simplex "
            f"(sum {shares.sum():.6g}, smallest {shares.min():.6g}); shares must be >= 0, sum to "
            f"{available:g} and be 0 where the mask is False"
        )
