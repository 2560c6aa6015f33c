"""Pool of live environments, indexed by the entities, seed and allocations that led to their state.

A step is a pure function of these three. It reuses a live environment that is already at this state;
otherwise it resets an environment with the seed and replays the allocations. A step can therefore be
requested twice, out of order, under `vmap`, or after resuming a run in another process.
"""

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

Entities = tuple[int, ...]
Arrays = tuple[np.ndarray, ...]
_MAX_ENVIRONMENTS = 512
"""Largest number of environments kept inside an episode, and between episodes."""


class Shape(NamedTuple):
    """Shape of an entity's observation, and whether the environment has limits."""

    window: int
    channels: int
    limited: bool


class Episodes:
    """Environments inside and between episodes, with batched resets and steps."""

    def __init__(self, make_env: Any, shape: Shape):
        self.make_env, self.shape = make_env, shape
        self.live: OrderedDict[tuple[Entities, int, bytes], Any] = OrderedDict()
        self.idle: list[tuple[Entities, Any]] = []
        self.replayed = 0
        self._lock = threading.Lock()

    def reset(self, packed: np.ndarray) -> Arrays:
        """Return the first observations of a batch, packed as in `simulator._pack`."""
        members, mask, (seeds, *_) = _unpack(packed)
        answers = self._empty(mask)
        # A compiled program may call this method concurrently.
        with self._lock:
            for row, seed in enumerate(seeds.tolist()):
                entities = tuple(members[row][mask[row]].tolist())
                env = self._take(entities)
                self._write(answers, row, mask[row], env.reset(seed=seed)[0])
                self._put_back(entities, env)
        return _stacked(answers[:2], packed)

    def step(self, packed: np.ndarray, shares: np.ndarray) -> Arrays:
        """Return observations, rewards, and whether episodes terminated or were truncated.

        `shares` contains the previous allocations of the episode, padded to the horizon, and the next one.
        """
        members, mask, (seeds, periods, ended, last) = _unpack(packed)
        shares = np.asarray(shares, np.float32).reshape((len(members), *shares.shape[-2:]))
        answers = self._empty(mask)
        rewards, terminated, truncated = answers[2:]
        with self._lock:
            for row, seed in enumerate(seeds.tolist()):
                if ended[row]:
                    continue
                real = mask[row]
                entities = tuple(members[row][real].tolist())
                past = np.ascontiguousarray(shares[row, : periods[row]][:, real])
                share = np.ascontiguousarray(shares[row, -1][real])
                env = self._at(entities, seed, past)
                observation, rewards[row], terminated[row], truncated[row], _ = env.step(share)
                self._write(answers, row, real, observation)
                if terminated[row] or truncated[row] or last[row]:
                    self._put_back(entities, env)
                else:
                    self.live[entities, seed, past.tobytes() + share.tobytes()] = env
                if len(self.live) > _MAX_ENVIRONMENTS:
                    (entities, *_), oldest = self.live.popitem(last=False)
                    self._put_back(entities, oldest)
        return _stacked(answers, packed)

    def close(self) -> None:
        """Close all environments; later calls make new ones."""
        for env in (*self.live.values(), *(env for _, env in self.idle)):
            env.close()
        self.live.clear()
        self.idle.clear()

    def _at(self, entities: Entities, seed: int, past: np.ndarray) -> Any:
        """Return a live environment at this state, or replay the allocations in another one."""
        env = self.live.pop((entities, seed, past.tobytes()), None)
        if env is None:
            env = self._take(entities)
            env.reset(seed=seed)
            for share in past:
                env.step(share)
            self.replayed += len(past)
        return env

    def _take(self, entities: Entities) -> Any:
        for place, (known, env) in enumerate(self.idle):
            if known == entities:
                del self.idle[place]
                return env
        return self.make_env(list(entities))

    def _put_back(self, entities: Entities, env: Any) -> None:
        self.idle.append((entities, env))
        if len(self.idle) > _MAX_ENVIRONMENTS:
            self.idle.pop(0)[1].close()

    def _empty(self, mask: np.ndarray) -> Arrays:
        batch, width = mask.shape
        history = np.zeros((batch, width, *self.shape[:2]), np.float32)
        limits = np.zeros((batch, width), np.float32)
        ends = np.zeros(batch, bool), np.zeros(batch, bool)
        return history, limits, np.zeros(batch, np.float32), *ends

    def _write(self, answers: Arrays, row: int, real: np.ndarray, observation: Any) -> None:
        parts = observation if isinstance(observation, dict) else {"history": observation}
        shape = (int(real.sum()), *self.shape[:2])
        answers[0][row, real] = np.asarray(parts["history"], np.float32).reshape(shape)
        if self.shape.limited:
            answers[1][row, real] = parts["limits"]


def _unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return members, mask and the numbers (seed, period, ended, last) of each row of a batch."""
    rows = np.asarray(packed).reshape(-1, packed.shape[-1])
    width = (rows.shape[-1] - 4) // 2
    return rows[:, :width], rows[:, width : 2 * width].astype(bool), rows[:, 2 * width :].T


def _stacked(answers: Arrays, packed: np.ndarray) -> Arrays:
    return tuple(answer.reshape((*packed.shape[:-1], *answer.shape[1:])) for answer in answers)
