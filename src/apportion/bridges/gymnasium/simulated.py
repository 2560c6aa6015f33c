"""A simulator of yours, an environment of Gymnasium, as a problem: stepped on the host.

The state of an episode is its seed, the allocations so far and the last observation, so `step` is as
pure as any problem's (see `episodes.py`): memory, checkpoints and what equal shares would have
earned need no more. Nothing can be differentiated through it: train with PPO.
"""

import os
import subprocess
import sys
import threading
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
from apportion.bridges.gymnasium.episodes import Arrays, Episodes
from apportion.bridges.gymnasium.probe import probe
from apportion.errors import InputError
from apportion.problem import Observation, Problem, Step
from apportion.simplex import Allocation, equal_shares
from apportion.tasks import Task

MakeEnv = Callable[[list[int]], gymnasium.Env]
"""From entities, as indices into the universe, to an environment over these."""


class Processes:
    """Several processes with environments of their own; a batch is cut into as many pieces."""

    def __init__(self, count: int, setup: tuple[MakeEnv, int, dict[str, Any]]):
        if os.name == "nt":
            raise InputError("workers: several processes need Linux or macOS; use workers=0")
        self._connections, self._processes = [], []
        for _ in range(count):
            here, there = Pipe()
            command = [sys.executable, "-P", episodes.__file__, str(there.fileno())]
            self._processes.append(subprocess.Popen(command, pass_fds=[there.fileno()]))
            there.close()
            here.send(sys.path)
            here.send_bytes(cloudpickle.dumps(setup))
            self._connections.append(here)

    def ask(self, method: str, arrays: Arrays) -> Arrays:
        """The answer of all, in the order asked."""
        # The same place of a batch goes to the same process, where its environment is.
        pieces = zip(
            *(np.array_split(array, len(self._connections)) for array in arrays), strict=True
        )
        asked = list(zip(self._connections, pieces, strict=True))
        for connection, piece in asked:
            connection.send((method, piece))
        answers = [self._receive(connection) for connection, _ in asked]
        return tuple(np.concatenate(parts) for parts in zip(*answers, strict=True))

    def _receive(self, connection: Any) -> Arrays:
        try:
            failure, answer = connection.recv()
        except EOFError:
            raise InputError(
                "a process of the environments has ended, killed or crashed; train again, with "
                "fewer workers or a smaller `keep` where memory is short"
            ) from None
        if failure is not None:
            raise InputError(f"the environment failed in a process of its own:\n{failure}")
        return answer

    def close(self) -> None:
        """End the processes: each leaves when its connection is closed."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.wait(timeout=10)


class Host:
    """Where environments live: here, or in processes started at the first call."""

    def __init__(self, make_env: MakeEnv, keep: int, shape: dict[str, Any], workers: int):
        self._setup, self._workers = (make_env, keep, shape), workers
        self._processes: Processes | None = None
        self._lock = threading.Lock()
        self.episodes = Episodes(*self._setup)

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

    def _ask(self, method: str, stack: tuple[int, ...], flat: Arrays) -> Arrays:
        # A compiled program may ask for two things at the same time.
        with self._lock:
            answers = self._answer(method, flat)
        return tuple(answer.reshape((*stack, *answer.shape[1:])) for answer in answers)

    def _answer(self, method: str, arrays: Arrays) -> Arrays:
        if self._workers == 0:
            return getattr(self.episodes, method)(*arrays)
        if self._processes is None:
            self._processes = Processes(self._workers, self._setup)
        return self._processes.ask(method, arrays)

    def close(self) -> None:
        """End the processes, if any; they start again when needed."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None


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
    as an episode has had in every period. Without memory (`Replay(act_periods=0)`) nothing of an
    episode is kept between updates.
    """

    host: Host = eqx.field(static=True)
    window: int = eqx.field(static=True)
    channels: int = eqx.field(static=True)
    limited: bool = eqx.field(static=True)
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
        return Observation(state.history, state.held, state.limits if self.limited else None)

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
        """End the processes, if any."""
        self.host.close()

    def _shapes(self, task: Task) -> tuple[jax.ShapeDtypeStruct, ...]:
        shape, m = jax.ShapeDtypeStruct, task.width
        shares, flag = shape((m,), jnp.float32), shape((), jnp.bool_)
        history = shape((m, self.window, self.channels), jnp.float32)
        return history, shares, shape((), jnp.float32), flag, flag


def from_gymnasium(
    make_env: MakeEnv,
    *,
    universe: int,
    horizon: int | None = None,
    workers: int = 0,
    keep: int = 512,
) -> Simulated:
    """A simulator of yours as a problem that `train` takes, with PPO, under any selection of tasks.

    `make_env(entities)` returns a `gymnasium.Env` over these entities, m of them. Its `step` is given
    their shares: m numbers >= 0 whose sum is 1, or less where limits leave a remainder. It shows an
    array of (m,), (m, channels) or (m, window, channels), or a dictionary with that as `history` and, if
    there are any, `limits`: the most each can take next, as a share. What happens in it may depend on
    nothing but the seed given to `reset` and the shares given to `step`.

    Parameters
    ----------
    make_env, universe
        Makes an environment over some entities, given as indices below `universe`.
    horizon
        Longest episode, in periods; by default the environment's own `max_episode_steps`.
    workers
        Processes that step environments at the same time; 0 steps them in this one. An environment that
        itself uses JAX needs at least one.
    keep
        Environments kept alive in a process, at least as many as there are episodes side by side:
        others have to be led through their episode again at every step.

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
    >>> from_gymnasium(Coins, universe=9, horizon=4).channels
    1
    """
    if universe < 1 or workers < 0 or keep < 1:
        raise InputError(
            f"universe {universe}, workers {workers}, keep {keep}: they must be >= 1, 0 and 1"
        )
    found = probe(make_env, universe, horizon)
    window, channels = found.shape["history"]
    return Simulated(
        universe=universe,
        horizon=found.horizon,
        host=Host(make_env, keep, found.shape, workers),
        window=window,
        channels=channels,
        limited=found.shape["limits"],
    )
