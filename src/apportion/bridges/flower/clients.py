"""What a federation's server knows of its clients: how their models do on its data, what they were.

`ServerData` scores a model by the part of the server's samples it gets right, class by class;
`Memory` keeps the last H rounds of every client's state x_{i,n} and its previous share by node id.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord
from jaxtyping import Array, Bool

from apportion.bridges.flower.updates import Model, cast_like, write_model
from apportion.errors import InputError
from apportion.problem import Observation

Predict = Callable[[ArrayRecord], Any]
_log = logging.getLogger("flwr")


class ServerData:
    """Samples of the server's own, known by what a model answers to them."""

    def __init__(self, predict: Predict, labels: Any):
        given = np.asarray(labels)
        if given.ndim != 1 or len(given) == 0 or given.dtype.kind not in "iu" or given.min() < 0:
            raise InputError(
                f"labels: {given.dtype} of shape {given.shape}; give the classes 0, 1, ... of the "
                "server's samples, at least one"
            )
        self.predict = predict
        self.labels = given.astype(np.int64)
        self.classes = int(self.labels.max()) + 1
        self.frequency = np.bincount(self.labels) / len(self.labels)

    def correct(self, model: Model) -> np.ndarray | None:
        """The part of the samples that is of a class and rightly answered; None without answers."""
        try:
            answers = np.asarray(self.predict(write_model(model)))
            answers = answers.argmax(-1) if answers.ndim == 2 else answers
            if answers.shape != self.labels.shape:
                raise ValueError(f"{answers.shape} answers to {self.labels.shape} samples")
        except Exception as error:  # the user's own function must not cost a round
            _log.warning("predict: %s: %s", type(error).__name__, error)
            return None
        right = self.labels[answers == self.labels]
        return np.bincount(right, minlength=self.classes) / len(self.labels)

    def accuracy(self, model: Model, like: Model) -> float:
        """Accuracy of a model once it has the types of another; -inf without answers."""
        right = self.correct(cast_like(model, like))
        return -np.inf if right is None else float(right.sum())


class Memory:
    """Histories and previous shares of every client that ever replied."""

    def __init__(self, window: int):
        self.window = window
        self.histories: dict[int, np.ndarray] = {}
        self.shares: dict[int, float] = {}

    def observation(
        self, nodes: Sequence[int], shown: np.ndarray
    ) -> tuple[Observation, Bool[Array, " entities"]]:
        """What the policy sees of these clients; a newcomer has no past and holds an equal share.

        It is padded to a power of two, so that clients who come and go compile nothing anew.
        """
        m = len(nodes)
        width = max(8, 1 << (m - 1).bit_length())
        mask = np.arange(width) < m
        history = np.zeros((width, self.window, shown.shape[1]), np.float32)
        held = np.zeros(width, np.float32)
        for i, node in enumerate(nodes):
            history[i] = self._extended(node, shown[i])
            held[i] = self.shares.get(node, 1 / m)
        held = held / held.sum() if held.sum() > 0 else mask / np.float32(m)
        observation = Observation(jnp.asarray(history), jnp.asarray(held, jnp.float32))
        return observation, jnp.asarray(mask)

    def keep(self, nodes: Sequence[int], shown: np.ndarray, shares: np.ndarray) -> None:
        """Remember what these clients showed in a round, and what they got."""
        for i, node in enumerate(nodes):
            self.histories[node] = self._extended(node, shown[i])
            self.shares[node] = float(shares[i])

    def _extended(self, node: int, shown: np.ndarray) -> np.ndarray:
        past = self.histories.get(node)
        past = np.zeros((self.window, len(shown)), np.float32) if past is None else past
        return np.concatenate([past[1:], shown[None, :]])
