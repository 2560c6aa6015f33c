"""Live environments on the host, each known by what led to it: its entities, seed and allocations.

A step is thereby a pure function of these three, whatever environments keep inside. One that stands
where a step begins takes it; where none does, one is reset with the seed and led there again. So a
step can be asked for twice, out of order, under `vmap`, or by a run that was resumed elsewhere.

Run as a program, this file serves another process; it needs neither apportion nor JAX.
"""

import signal
import sys
import traceback
from collections import OrderedDict
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

Entities = tuple[int, ...]
Arrays = tuple[np.ndarray, ...]
_KEPT = 512
"""Environments kept at work, and as many at rest: others are led through their episode again."""


class Shape(NamedTuple):
    """What an environment shows of an entity, and whether it shows limits."""

    window: int
    channels: int
    limited: bool


class Episodes:
    """Environments at work and at rest, and the batches asked of them."""

    def __init__(self, make_env: Any, shape: Shape):
        self.make_env, self.shape = make_env, Shape(*shape)
        self.live: OrderedDict[tuple[Entities, int, bytes], Any] = OrderedDict()
        self.idle: list[tuple[Entities, Any]] = []
        self.replayed = 0

    def begin(self, members: np.ndarray, mask: np.ndarray, seeds: np.ndarray) -> Arrays:
        """First observations, (batch, ...) each."""
        answers = self._blank(mask)
        for row, seed in enumerate(seeds.tolist()):
            entities = tuple(members[row][mask[row]].tolist())
            env = self._fresh(entities)
            observation, _ = env.reset(seed=seed)
            self._write(answers, row, mask[row], observation)
            self._rest(entities, env)
        return answers[:2]

    def step(
        self,
        members: np.ndarray,
        mask: np.ndarray,
        seeds: np.ndarray,
        periods: np.ndarray,
        past: np.ndarray,
        shares: np.ndarray,
        ended: np.ndarray,
        last: np.ndarray,
    ) -> Arrays:
        """Observations, rewards, and whether episodes terminated or were truncated."""
        answers = self._blank(mask)
        rewards, terminated, truncated = answers[2:]
        for row, seed in enumerate(seeds.tolist()):
            if ended[row]:
                continue
            real = mask[row]
            entities = tuple(members[row][real].tolist())
            before = np.ascontiguousarray(past[row, : periods[row]][:, real], np.float32)
            share = np.ascontiguousarray(shares[row][real], np.float32)
            env = self._arrive(entities, seed, before)
            observation, rewards[row], terminated[row], truncated[row], _ = env.step(share)
            self._write(answers, row, real, observation)
            if terminated[row] or truncated[row] or last[row]:
                self._rest(entities, env)
            else:
                self.live[entities, seed, before.tobytes() + share.tobytes()] = env
            if len(self.live) > _KEPT:
                (entities, *_), oldest = self.live.popitem(last=False)
                self._rest(entities, oldest)
        return answers

    def close(self) -> None:
        """End all environments; later ones are made anew."""
        for env in (*self.live.values(), *(env for _, env in self.idle)):
            env.close()
        self.live.clear()
        self.idle.clear()

    def _arrive(self, entities: Entities, seed: int, past: np.ndarray) -> Any:
        env = self.live.pop((entities, seed, past.tobytes()), None)
        if env is None:
            env = self._fresh(entities)
            env.reset(seed=seed)
            for share in past:
                env.step(share)
            self.replayed += len(past)
        return env

    def _fresh(self, entities: Entities) -> Any:
        for place, (known, env) in enumerate(self.idle):
            if known == entities:
                del self.idle[place]
                return env
        return self.make_env(list(entities))

    def _rest(self, entities: Entities, env: Any) -> None:
        self.idle.append((entities, env))
        if len(self.idle) > _KEPT:
            self.idle.pop(0)[1].close()

    def _blank(self, mask: np.ndarray) -> Arrays:
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


def serve(connection: Connection) -> None:
    """Answer requests until the other side is gone."""
    import cloudpickle

    # Whoever stops a run speaks to the process that trains; this one ends with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = connection.recv()
    episodes = Episodes(*cloudpickle.loads(connection.recv_bytes()))
    while True:
        try:
            method, arrays = connection.recv()
        except EOFError:
            return
        try:
            connection.send((None, getattr(episodes, method)(*arrays)))
        except Exception:
            connection.send((traceback.format_exc(), None))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
