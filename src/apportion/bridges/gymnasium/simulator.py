"""A simulator of yours, an environment of Gymnasium, as a problem: stepped on the host.

The state of an episode is its seed, the allocations so far and the last observation, so `step` is as
pure as any problem's (see `episodes.py`): memory, checkpoints and what equal shares would have
earned need no more. Nothing can be differentiated through it: train with PPO.
"""

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from typing import Any

import cloudpickle
import equinox as eqx
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.bridges.gymnasium import episodes
from apportion.bridges.gymnasium.episodes import Arrays, Episodes, Shape
from apportion.errors import InputError, first_line
from apportion.problem import Observation, Problem, Step
from apportion.simplex import Allocation, equal_shares
from apportion.tasks import Task

_PROBED = 20
"""Periods in which an environment is looked at before any work."""
MakeEnv = Callable[[list[int]], gymnasium.Env]
"""From entities, as indices into the universe, to an environment over these."""


class Host:
    """Where environments live: here, or in processes of their own, started at the first question.

    A batch is cut into as many pieces as there are processes.
    """

    def __init__(self, make_env: MakeEnv, shape: Shape, workers: int):
        # Of plain values, so that a process need not import this package for them.
        self._setup, self._workers = (make_env, tuple(shape)), workers
        self._processes: list[tuple[Any, Any]] = []
        self._lock = threading.Lock()
        self.episodes = Episodes(make_env, shape)

    def begin(self, whole: Array) -> Arrays:
        """First observations of a batch of any leading axes."""
        members, mask, seeds, *_ = _unpack(np.asarray(whole))
        return self._ask("begin", whole.shape[:-1], (members, mask, seeds))

    def step(self, whole: Array, shares: Array) -> Arrays:
        """The next ones, with rewards and ends."""
        members, mask, seeds, periods, ended, last = _unpack(np.asarray(whole))
        parts = np.asarray(shares).reshape((len(members), *shares.shape[-2:]))
        asked = (members, mask, seeds, periods, parts[:, :-1], parts[:, -1], ended, last)
        return self._ask("step", whole.shape[:-1], asked)

    def close(self) -> None:
        """End the environments; processes of theirs leave when their connection is closed."""
        self.episodes.close()
        for _, connection in self._processes:
            connection.close()
        for process, _ in self._processes:
            process.wait(timeout=10)
        self._processes = []

    def _ask(self, method: str, stack: tuple[int, ...], flat: Arrays) -> Arrays:
        # A compiled program may ask for two things at the same time.
        with self._lock:
            if self._workers == 0:
                answers = getattr(self.episodes, method)(*flat)
            else:
                self._processes = self._processes or [self._start() for _ in range(self._workers)]
                # The same place of a batch goes to the same process, where its environment is.
                pieces = zip(*(np.array_split(array, self._workers) for array in flat), strict=True)
                for (_, connection), piece in zip(self._processes, pieces, strict=True):
                    connection.send((method, piece))
                parts = zip(*(_receive(there) for _, there in self._processes), strict=True)
                answers = map(np.concatenate, parts)
        return tuple(answer.reshape((*stack, *answer.shape[1:])) for answer in answers)

    def _start(self) -> tuple[Any, Any]:
        if os.name == "nt":
            raise InputError("workers: several processes need Linux or macOS; use workers=0")
        here, there = Pipe()
        command = [sys.executable, "-P", episodes.__file__, str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=[there.fileno()])
        there.close()
        here.send(sys.path)
        here.send_bytes(cloudpickle.dumps(self._setup))
        return process, here


def _receive(connection: Any) -> Arrays:
    try:
        failure, answer = connection.recv()
    except EOFError:
        raise InputError(
            "a process of the environments has ended, killed or crashed; train again, with fewer "
            "workers where memory is short"
        ) from None
    if failure is not None:
        raise InputError(f"the environment failed in a process of its own:\n{failure}")
    return answer


def _pack(task: Task, seed: Array, n: Array, ended: Array, last: Array) -> Int[Array, " packed"]:
    # Each array handed to the host costs a tenth of a millisecond, whatever its size.
    numbers = jnp.stack([x.astype(jnp.int32) for x in (seed, n, ended, last)])
    return jnp.concatenate([task.members, task.mask.astype(jnp.int32), numbers])


def _unpack(whole: np.ndarray) -> Arrays:
    width = (whole.shape[-1] - 4) // 2
    rows = whole.reshape(-1, whole.shape[-1])
    seed, n, ended, last = rows[:, 2 * width :].T
    mask = rows[:, width : 2 * width].astype(bool)
    return rows[:, :width], mask, seed, n, ended.astype(bool), last.astype(bool)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _ask(method: Callable[..., Arrays], shapes: tuple[jax.ShapeDtypeStruct, ...], *args: Array):
    return jax.pure_callback(method, shapes, *args, vmap_method="broadcast_all")


@_ask.defjvp
def _no_gradient(method: Any, shapes: Any, primals: Any, tangents: Any):
    raise InputError("an environment of Gymnasium has no gradient; train with PPO")


class SimulatedState(eqx.Module):
    """All that leads to a place of an episode, and what is seen there."""

    seed: Int[Array, "*stack"]
    n: Int[Array, "*stack"]
    past: Float[Array, "*stack horizon entities"]
    held: Float[Array, "*stack entities"]
    history: Float[Array, "*stack entities window channels"]
    limits: Float[Array, "*stack entities"]
    ended: Bool[Array, "*stack"]


class Simulated(Problem):
    """Environments of Gymnasium as a family of tasks; `from_gymnasium` makes one.

    Training with PPO takes several times as long as on the same problem in JAX, simulating about a
    hundred times; a scorer that asks what equal shares would have earned costs as many steps again
    as an episode has had in every period.
    """

    host: Host = eqx.field(static=True)
    shape: Shape = eqx.field(static=True)
    universe: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)

    def reset(self, task: Task, *, key: PRNGKeyArray) -> SimulatedState:
        seed = jax.random.randint(key, (), 0, 2**31 - 1, jnp.int32)
        start, no = jnp.zeros((), jnp.int32), jnp.array(False)
        whole = _pack(task, seed, start, no, no)
        history, limits = _ask(self.host.begin, self._shapes(task)[:2], whole)
        past = jnp.zeros((self.horizon, task.width), jnp.float32)
        held = equal_shares(task.mask, jnp.float32)
        return SimulatedState(seed, start, past, held, history, limits, no)

    def observe(self, task: Task, state: SimulatedState) -> Observation:
        return Observation(state.history, state.held, state.limits if self.shape.limited else None)

    def step(
        self, task: Task, state: SimulatedState, allocation: Allocation, *, key: PRNGKeyArray
    ) -> Step:
        shares, last = allocation.astype(jnp.float32), state.n + 1 >= self.horizon
        whole = _pack(task, state.seed, state.n, state.ended, last)
        past_and_next = jnp.concatenate([state.past, shares[None]])
        history, limits, reward, terminated, truncated = _ask(
            self.host.step, self._shapes(task), whole, past_and_next
        )
        truncated = (truncated | last | state.ended) & ~terminated
        following = SimulatedState(
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
        """End the environments, and their processes, if any."""
        self.host.close()

    def _shapes(self, task: Task) -> tuple[jax.ShapeDtypeStruct, ...]:
        shape, m = jax.ShapeDtypeStruct, task.width
        shares, flag = shape((m,), jnp.float32), shape((), jnp.bool_)
        history = shape((m, self.shape.window, self.shape.channels), jnp.float32)
        return history, shares, shape((), jnp.float32), flag, flag


def from_gymnasium(
    make_env: MakeEnv,
    *,
    universe: int,
    horizon: int | None = None,
    task_size: int | None = None,
    workers: int = 0,
) -> Simulated:
    """A simulator of yours as a problem that `train` takes, with PPO, under any selection of tasks.

    `make_env(entities)` returns a `gymnasium.Env` over these entities, m of them. Its `step` is given
    their shares: m numbers >= 0 whose sum is 1, or less where limits leave a remainder; an
    `action_space`, where it has one, says so: `Box(0, 1, (m,))`. It shows an
    array of (m,), (m, channels) or (m, window, channels), or a dictionary with that as `history` and, if
    there are any, `limits`: the most each can take next, as a share. What happens in it may depend on
    nothing but the seed given to `reset` and the shares given to `step`.

    Parameters
    ----------
    make_env, universe
        Makes an environment over some entities, given as indices below `universe`.
    horizon
        Longest episode, in periods; by default the environment's own `max_episode_steps`.
    task_size
        Entities of an environment, where all are of one size; it is tried with so many, else with three.
    workers
        Processes that step environments at the same time; 0 steps them in this one. An environment that
        itself uses JAX needs at least one.

    Raises
    ------
    InputError
        The environment does not fit, or the same seed and shares do not give the same episode.

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
    if universe < 1 or workers < 0:
        raise InputError(f"universe {universe}, workers {workers}: they must be >= 1 and >= 0")
    size = min(universe, 3) if task_size is None else task_size
    if not 1 <= size <= universe:
        raise InputError(f"task_size is {size}; it must be between 1 and the universe's {universe}")
    shape, horizon = _probe(make_env, size, horizon)
    host = Host(make_env, shape, workers)
    return Simulated(host=host, shape=shape, universe=universe, horizon=horizon)


def _probe(make_env: MakeEnv, size: int, horizon: int | None) -> tuple[Shape, int]:
    """Walk the same episode twice: what an entity shows, the horizon, or what does not fit."""
    entities = list(range(size))
    try:
        env = make_env(entities)
    except Exception as error:
        raise InputError(
            f"make_env({entities}) failed ({type(error).__name__}: {first_line(error)}); it must make an "
            "environment over any entities, or where all are of one size, give task_size"
        ) from error
    if not isinstance(env, gymnasium.Env):
        raise InputError(f"make_env returned {type(env).__name__}; return a gymnasium.Env")
    _check_actions(env, size)
    longest = env.spec.max_episode_steps if env.spec is not None else None
    horizon = longest if horizon is None else horizon
    if horizon is None or horizon < 1:
        raise InputError(
            f"from_gymnasium: horizon is {horizon}; give the periods of the longest episode, >= 1"
        )
    first, again = (_walk(env, len(entities), min(horizon, _PROBED)) for _ in range(2))
    for n, (one, other) in enumerate(zip(first, again, strict=False)):
        for name in one:
            if not np.array_equal(one[name], other[name]):
                raise InputError(
                    f"{_name(env)}: the same seed and shares gave another {name} in period {n}; draw "
                    "random numbers from self.np_random alone, and call super().reset(seed=seed)"
                )
    env.close()
    window, channels = first[0]["history"].shape[1:]
    return Shape(window, channels, "limits" in first[0]), horizon


def _check_actions(env: gymnasium.Env, m: int) -> None:
    """Refuse an environment whose actions, by its own word, are no shares of m entities."""
    space = getattr(env, "action_space", None)
    if space is None:
        return
    meant = f"give it action_space = Box(0, 1, ({m},)) for {m} entities, or none at all"
    if not isinstance(space, gymnasium.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise InputError(
            f"{_name(env)}: its action_space is {space}, but `step` is given shares, numbers from 0 to 1; "
            f"turn shares into such actions in `step`, and {meant}"
        )
    if space.shape != (m,):
        raise InputError(
            f"{_name(env)}: its action_space has shape {space.shape}, but `step` is given a share for each "
            f"entity; {meant}; where all environments are of one size, give task_size"
        )
    if (space.low != 0).any() or ((space.high != 1) & ~np.isinf(space.high)).any():
        raise InputError(
            f"{_name(env)}: its action_space goes from {space.low.min():g} to {space.high.max():g}, but "
            "`step` is given shares, numbers from 0 to 1 whose sum is 1 or less; scale them to your budget "
            f"in `step`, show what an entity can take at most as `limits`, and {meant}"
        )


def _walk(env: gymnasium.Env, m: int, periods: int) -> list[dict[str, np.ndarray]]:
    """What an episode of random shares shows."""
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=0)
    seen = [_read(env, observation, m)]
    for _ in range(periods):
        limits = seen[-1].get("limits", np.ones(m))
        shares = np.minimum(rng.dirichlet(np.ones(m)), limits).astype(np.float32)
        observation, reward, terminated, truncated, _ = env.step(shares)
        earned = np.asarray(reward, float)
        if earned.shape != () or not np.isfinite(earned):
            raise InputError(f"{_name(env)}: step gave the reward {reward}; it must be one number")
        seen.append(_read(env, observation, m) | {"reward": earned})
        if terminated or truncated:
            break
    return seen


def _read(env: gymnasium.Env, observation: Any, m: int) -> dict[str, np.ndarray]:
    parts = observation if isinstance(observation, dict) else {"history": observation}
    if "history" not in parts:
        raise InputError(
            f"{_name(env)}: the observation has {sorted(parts)} but no history; show an array, or a "
            "dictionary with `history` and, if there are any, `limits`"
        )
    unused = sorted(map(str, parts.keys() - {"history", "limits"}))
    if unused:
        warnings.warn(
            f"{_name(env)}: of the observation {', '.join(unused)} is not used; a policy sees `history` "
            "and `limits` alone, so make what it needs channels of `history`",
            stacklevel=4,
        )
    history = np.asarray(parts["history"], np.float32)
    if not 1 <= history.ndim <= 3 or history.shape[0] != m:
        raise InputError(
            f"{_name(env)}: for {m} entities the observation has shape {history.shape}; it must be "
            f"({m},), ({m}, channels) or ({m}, window, channels)"
        )
    if not np.isfinite(history).all():
        raise InputError(f"{_name(env)}: the observation has values that are not finite")
    shape = (m, *(1,) * (3 - max(history.ndim, 2)), *(history.shape[1:] or (1,)))
    seen = {"history": history.reshape(shape)}
    if "limits" in parts:
        limits = np.asarray(parts["limits"], np.float32)
        if limits.shape != (m,) or not ((limits >= 0) & (limits <= 1)).all():
            raise InputError(
                f"{_name(env)}: limits are {limits.tolist()}; give {m} shares from 0 to 1"
            )
        seen["limits"] = limits
    return seen


def _name(env: gymnasium.Env) -> str:
    return type(env.unwrapped).__name__
