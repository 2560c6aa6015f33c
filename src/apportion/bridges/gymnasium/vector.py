"""Many episodes of a problem at once as a `gymnasium.vector.VectorEnv`: one compiled step for all.

An environment that has ended begins anew at its next step, whatever that step's action, as
Gymnasium's own vector environments do (`AutoresetMode.NEXT_STEP`).
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from jaxtyping import Array, Float, Key

from apportion.bridges.gymnasium.environment import Interface, Place, Shown, key_from
from apportion.errors import InputError
from apportion.problem import Problem
from apportion.simplex import Head
from apportion.tasks import Task


@eqx.filter_jit
def _begin(interface: Interface, keys: Key[Array, " batch"], chosen: int) -> tuple[Place, Shown]:
    return jax.vmap(lambda key: interface.begin(key, jnp.array(chosen)))(keys)


@eqx.filter_jit
def _step(interface: Interface, places: Place, actions: Float[Array, "batch entities"]):
    def one(place, action):
        following, shown, step, shares = interface.step(place, action)
        fresh = interface.begin(jax.random.fold_in(place.key, 0), jnp.array(-1))
        ended = place.ended
        place, shown = jax.tree.map(
            lambda new, old: jnp.where(ended, new, old), fresh, (following, shown)
        )
        ends = step.terminated & ~ended, step.truncated & ~ended
        kept = jnp.where(ended, 0.0, step.reward), *ends, jnp.where(ended, 0.0, shares)
        return place, shown, kept

    return jax.vmap(one)(places, actions)


class ProblemVectorEnv(VectorEnv):
    """So many episodes side by side; `ProblemEnv` says what is observed and what an action is.

    Parameters
    ----------
    num_envs
        Episodes side by side, each with its own task where there are several.
    problem, tasks, head, reach, flat
        As for `ProblemEnv`.

    Examples
    --------
    >>> from apportion.domains.budget.problem import Budget
    >>> from apportion.tasks import draw_tasks
    >>> envs = ProblemVectorEnv(8, Budget.simulate(universe=20, periods=30), draw_tasks(20, 3, 4))
    >>> observation, info = envs.reset(seed=0)
    >>> envs.step(np.zeros((8, 3), np.float32))[1].shape
    (8,)
    """

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int,
        problem: Problem,
        tasks: Task,
        *,
        head: Head | None = None,
        reach: float = 5.0,
        flat: bool = True,
    ):
        if num_envs < 1:
            raise InputError(f"num_envs is {num_envs}; at least one is needed")
        self.num_envs = num_envs
        self.interface = Interface.of(problem, tasks, head, reach, flat)
        self.single_observation_space, self.single_action_space = self.interface.spaces()
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._places: Place | None = None
        self._random: list[np.random.Generator] | None = None

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Begin anew; environment i with the seed s + i, or with seeds of their own."""
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed
        if seeds is not None or self._random is None:
            given = [None] * self.num_envs if seeds is None else list(seeds)
            self._random = [seeding.np_random(one)[0] for one in given]
        keys = jnp.stack([key_from(random) for random in self._random])
        places, shown = _begin(self.interface, keys, self.interface.chosen(options))
        self._places, observation = places, self.interface.as_numpy(shown)
        return observation, self._info(places, observation)

    def step(
        self, actions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One period of every episode."""
        if self._places is None:
            raise InputError("step before reset: call reset first")
        scores = jnp.asarray(actions, jnp.float32)
        places, shown, kept = _step(self.interface, self._places, scores)
        self._places, observation = places, self.interface.as_numpy(shown)
        reward, terminated, truncated, shares = map(np.asarray, kept)
        info = self._info(places, observation) | {"allocation": shares}
        return observation, reward.astype(np.float64), terminated, truncated, info

    def _info(self, places: Place, observation: dict[str, np.ndarray]) -> dict[str, Any]:
        return {"mask": observation["mask"].astype(bool), "task": np.asarray(places.task)}
