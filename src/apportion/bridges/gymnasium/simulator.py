"""A `gymnasium.Env` as a problem, stepped on the host.

The state of an episode is its seed, the allocations so far and the last observation, so `step` is a pure
function (see `episodes.py`), and memory, checkpoints and counterfactual scorers work as with any other
problem. A simulator has no gradient; train with PPO.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.bridges.gymnasium.episodes import Arrays, Episodes, Shape
from apportion.errors import InputError, check_counts, first_line
from apportion.problem import Observation, Problem, Step
from apportion.simplex import Allocation, equal_shares
from apportion.tasks import Task

_PROBED_PERIODS = 20
"""Periods of the trial episode in `from_gymnasium`."""
_MakeEnv = Callable[[list[int]], gymnasium.Env]
"""Function from entities, as indices into the universe, to an environment."""


def _pack(task: Task, seed: Array, n: Array, ended: Array, last: Array) -> Int[Array, " packed"]:
    # Passing an array to the host takes about 0.1 ms regardless of its size, so pass one.
    numbers = jnp.stack([x.astype(jnp.int32) for x in (seed, n, ended, last)])
    return jnp.concatenate([task.members, task.mask.astype(jnp.int32), numbers])


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _call_host(
    method: Callable[..., Arrays], shapes: tuple[jax.ShapeDtypeStruct, ...], *args: Array
):
    return jax.pure_callback(method, shapes, *args, vmap_method="broadcast_all")


@_call_host.defjvp
def _refuse_gradient(method: Any, shapes: Any, primals: Any, tangents: Any):
    raise InputError("an environment of Gymnasium has no gradient; train with PPO")


class _SimulatedState(eqx.Module):
    """Seed and allocations that lead to a state, and its observation."""

    seed: Int[Array, "*stack"]
    n: Int[Array, "*stack"]
    past: Float[Array, "*stack horizon entities"]
    held: Float[Array, "*stack entities"]
    history: Float[Array, "*stack entities window channels"]
    limits: Float[Array, "*stack entities"]
    ended: Bool[Array, "*stack"]


class Simulated(Problem):
    """Problem whose tasks are Gymnasium environments; use `from_gymnasium` to build it.

    Compared with the same problem in JAX, training with PPO takes several times as long and simulation
    about a hundred times. A scorer that needs the reward of equal shares replays the episode in every
    period.

    Parameters
    ----------
    episodes : Episodes
        Pool of live environments.
    shape : Shape
        Window and channels of an entity's observation, and whether the environments have limits.
    universe : int
        Number of entities.
    horizon : int
        Largest number of periods of an episode.
    """

    episodes: Episodes = eqx.field(static=True)
    shape: Shape = eqx.field(static=True)
    universe: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)

    def reset(self, task: Task, *, key: PRNGKeyArray) -> _SimulatedState:
        seed = jax.random.randint(key, (), 0, 2**31 - 1, jnp.int32)
        start, no = jnp.zeros((), jnp.int32), jnp.array(False)
        packed = _pack(task, seed, start, no, no)
        history, limits = _call_host(self.episodes.reset, self._shapes(task)[:2], packed)
        past = jnp.zeros((self.horizon, task.width), jnp.float32)
        held = equal_shares(task.mask, jnp.float32)
        return _SimulatedState(seed, start, past, held, history, limits, no)

    def observe(self, task: Task, state: _SimulatedState) -> Observation:
        return Observation(state.history, state.held, state.limits if self.shape.limited else None)

    def step(
        self, task: Task, state: _SimulatedState, allocation: Allocation, *, key: PRNGKeyArray
    ) -> Step:
        shares, last = allocation.astype(jnp.float32), state.n + 1 >= self.horizon
        packed = _pack(task, state.seed, state.n, state.ended, last)
        past_and_next = jnp.concatenate([state.past, shares[None]])
        history, limits, reward, terminated, truncated = _call_host(
            self.episodes.step, self._shapes(task), packed, past_and_next
        )
        truncated = (truncated | last | state.ended) & ~terminated
        following = _SimulatedState(
            state.seed,
            state.n + 1,
            state.past.at[state.n].set(shares, mode="drop"),
            shares,
            jnp.where(state.ended, state.history, history),
            jnp.where(state.ended, state.limits, limits),
            state.ended | terminated | truncated,
        )
        return Step(following, reward, terminated, truncated)

    def close(self) -> None:
        """Close all environments; later calls make new ones."""
        self.episodes.close()

    def _shapes(self, task: Task) -> tuple[jax.ShapeDtypeStruct, ...]:
        shape, m = jax.ShapeDtypeStruct, task.width
        shares, flag = shape((m,), jnp.float32), shape((), jnp.bool_)
        history = shape((m, self.shape.window, self.shape.channels), jnp.float32)
        return history, shares, shape((), jnp.float32), flag, flag


def from_gymnasium(
    make_env: _MakeEnv,
    *,
    universe: int,
    horizon: int,
    task_size: int | None = None,
) -> Simulated:
    """Convert a Gymnasium simulator to a problem for training with PPO.

    `make_env(entities)` returns a `gymnasium.Env` over m entities:

    - `step` takes their shares, m numbers >= 0 with sum 1, or less if limits leave a remainder;
    - `action_space`, if the environment has one, is `Box(0, 1, (m,))`;
    - an observation is an array of shape (m,), (m, channels) or (m, window, channels), or a dictionary
      with this array as `history` and optionally `limits`, the largest next share of each entity;
    - an episode depends only on the seed given to `reset` and the shares given to `step`.

    Environments run in this process. A slow environment, or one that calls JAX, can step its parts in
    other processes with `gymnasium.vector`.

    Parameters
    ----------
    make_env : callable
        Returns an environment for a list of entities, given as indices below `universe`.
    universe : int
        Number of entities.
    horizon : int
        Largest number of periods of an episode.
    task_size : int, optional
        Entities per environment, if all environments have the same size. The trial episode has this many
        entities, by default three.

    Returns
    -------
    Simulated
        The problem.

    Raises
    ------
    InputError
        If the environment does not have this form, or is not reproducible.

    Examples
    --------
    >>> class Coins(gymnasium.Env):
    ...     def __init__(self, entities):
    ...         self.worth = np.array(entities, float)
    ...     def reset(self, *, seed=None, options=None):
    ...         return self.worth, {}
    ...     def step(self, shares):
    ...         return self.worth, float(shares @ self.worth), False, False, {}
    >>> from_gymnasium(Coins, universe=9, horizon=4).shape
    Shape(window=1, channels=1, limited=False)
    """
    size = min(universe, 3) if task_size is None else task_size
    check_counts(horizon=horizon)
    check_counts(most=universe, task_size=size)
    entities = list(range(size))
    try:
        env = make_env(entities)
    except Exception as error:
        raise InputError(
            f"make_env({entities}) failed ({type(error).__name__}: {first_line(error)}); it must make an "
            "environment over any entities; if all environments have one size, give task_size"
        ) from error
    if not isinstance(env, gymnasium.Env):
        raise InputError(f"make_env returned {type(env).__name__}; return a gymnasium.Env")
    space: Any = getattr(env, "action_space", None)
    box = isinstance(space, gymnasium.spaces.Box) and space.shape == (size,)
    unit = box and (space.low == 0).all() and np.isin(space.high, (1, np.inf)).all()
    if space is not None and not (unit and np.issubdtype(space.dtype, np.floating)):
        raise InputError(
            f"action_space is {space}, but `step` receives the shares of {size} entities, numbers from 0 "
            f"to 1 with sum 1 or less; set action_space = Box(0, 1, ({size},)) or remove it; if all "
            "environments have one size, give task_size"
        )
    shape = _try_out(env, size, min(horizon, _PROBED_PERIODS))
    episodes = Episodes(make_env, shape)
    return Simulated(episodes=episodes, shape=shape, universe=universe, horizon=horizon)


def _try_out(env: gymnasium.Env, m: int, periods: int) -> Shape:
    """Run one episode of random shares twice; return the shape of an observation."""

    def walk() -> Iterator[dict[str, np.ndarray]]:
        rng = np.random.default_rng(0)
        seen = _read(env.reset(seed=0)[0], 0.0, m)
        yield seen
        for _ in range(periods):
            limits = seen.get("limits", np.ones(m))
            shares = np.minimum(rng.dirichlet(np.ones(m)), limits).astype(np.float32)
            stepped = env.step(shares)
            if len(stepped) != 5:
                raise InputError(
                    f"{type(env.unwrapped).__name__}.step returned {len(stepped)} values; return 5, "
                    "(observation, reward, terminated, truncated, info)"
                )
            observation, reward, terminated, truncated, _ = stepped
            seen = _read(observation, float(reward), m)
            yield seen
            if terminated or truncated:
                break

    first = list(walk())
    for n, (one, other) in enumerate(zip(first, walk(), strict=False)):
        for name in one:
            if not np.array_equal(one[name], other[name]):
                raise InputError(
                    f"{type(env.unwrapped).__name__}: the same seed and shares gave another {name} in "
                    f"period {n}; draw random numbers only from self.np_random, and call "
                    "super().reset(seed=seed)"
                )
    env.close()
    window, channels = first[0]["history"].shape[1:]
    return Shape(window, channels, "limits" in first[0])


def _read(observation: Any, reward: float, m: int) -> dict[str, np.ndarray]:
    """Check an observation of m entities and a reward; return them as arrays by name."""
    parts = observation if isinstance(observation, dict) else {"history": observation}
    history = np.asarray(parts.get("history", ()), np.float32)
    limits = np.asarray(parts.get("limits", np.ones(m)), np.float32)
    shaped = 1 <= history.ndim <= 3 and history.shape[0] == m and limits.shape == (m,)
    finite = np.isfinite(history).all() and np.isfinite(reward)
    if not (shaped and finite and ((limits >= 0) & (limits <= 1)).all()):
        raise InputError(
            f"for {m} entities the environment returns {sorted(parts)}, history of shape {history.shape}, "
            f"limits {limits.tolist()} and reward {reward}; return finite numbers of shape ({m},), "
            f"({m}, channels) or ({m}, window, channels), or a dictionary with this as `history` and "
            f"optionally `limits`: {m} shares from 0 to 1"
        )
    shape = (m, *(1,) * (3 - max(history.ndim, 2)), *(history.shape[1:] or (1,)))
    seen = {"history": history.reshape(shape), "reward": np.asarray(reward)}
    return seen | ({"limits": limits} if "limits" in parts else {})
