"""What a user's environment shows, and whether it keeps to what is asked of it, before any work."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np

from apportion.errors import InputError

_PERIODS = 20


@dataclass(frozen=True)
class Found:
    """The shape of what is shown of an entity, whether there are limits, and the horizon."""

    shape: dict[str, Any]
    horizon: int


def probe(
    make_env: Callable[[list[int]], gymnasium.Env], universe: int, horizon: int | None
) -> Found:
    """Walk the same episode twice and look at everything.

    Raises
    ------
    InputError
        Names what does not fit, and how it should be.
    """
    entities = list(range(min(universe, 3)))
    env = make_env(entities)
    if not isinstance(env, gymnasium.Env):
        raise InputError(f"make_env returned {type(env).__name__}; return a gymnasium.Env")
    longest = env.spec.max_episode_steps if env.spec is not None else None
    horizon = longest if horizon is None else horizon
    if horizon is None or horizon < 1:
        raise InputError(
            f"from_gymnasium: horizon is {horizon}; give the periods of the longest episode, >= 1"
        )
    first, again = (_walk(env, len(entities), min(horizon, _PERIODS)) for _ in range(2))
    for n, (one, other) in enumerate(zip(first, again, strict=False)):
        for name in one:
            if not np.array_equal(one[name], other[name]):
                raise InputError(
                    f"{_name(env)}: the same seed and shares gave another {name} in period {n}; draw "
                    "random numbers from self.np_random alone, and call super().reset(seed=seed)"
                )
    env.close()
    shape = first[0]["history"].shape[1:]
    return Found({"history": shape, "limits": "limits" in first[0]}, horizon)


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
