"""What a federation's server remembers of its clients, by node id, and how that outlives the server.

The last H rounds of every client's state x_{i,n}, its previous share and when it was last seen; with
the model sent out and its last move, all that the next round needs.
"""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from apportion.bridges.flower.updates import Model
from apportion.errors import InputError
from apportion.problem import Observation
from apportion.runs.files import read_arrays, write_arrays
from apportion.simplex import Mask


class Memory:
    """Histories and previous shares of every client that ever replied."""

    def __init__(self, window: int):
        self.window = window
        self.rounds = 0
        self.start: Model | None = None
        self.move: Model | None = None
        self.histories: dict[int, np.ndarray] = {}
        self.shares: dict[int, float] = {}
        self.seen: dict[int, int] = {}
        """The round of each client's last reply, counted over all runs."""
        self.gains: list[float] = []
        """What the policy gained over FedAvg in each round; not a number where it was not tried."""

    def send(self, model: Model) -> None:
        """Take note of the model sent out, and of how it moved."""
        before, self.move = self.start, None
        if before is not None and {n: a.shape for n, a in before.items()} == {
            n: a.shape for n, a in model.items()
        }:
            floats = [name for name, array in model.items() if array.dtype.kind == "f"]
            self.move = {name: model[name] - before[name] for name in floats}
        self.start = model

    def absent(self, nodes: Sequence[int]) -> np.ndarray:
        """Rounds that have gone by without each client since it was last seen."""
        return np.array([self.rounds - self.seen.get(node, 0) for node in nodes], float)

    def observation(self, nodes: Sequence[int], shown: np.ndarray) -> tuple[Observation, Mask]:
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
            self.seen[node] = self.rounds + 1

    def end_round(self, gain: float = np.nan) -> None:
        """Count a round, and what the policy gained in it."""
        self.rounds += 1
        self.gains.append(gain)

    def _extended(self, node: int, shown: np.ndarray) -> np.ndarray:
        past = self.histories.get(node)
        past = np.zeros((self.window, len(shown)), np.float32) if past is None else past
        return np.concatenate([past[1:], shown[None, :]])

    def save(self, path: Path, made: Model) -> None:
        """Write everything, with the model just made, at one stroke; nothing is pickled."""
        arrays = {f"history/{node}": own for node, own in self.histories.items()}
        arrays |= {f"start/{name}": own for name, own in (self.start or {}).items()}
        arrays |= {f"made/{name}": own for name, own in made.items()}
        about = {
            "rounds": self.rounds,
            "names": list(made),
            "gains": [gain if np.isfinite(gain) else None for gain in self.gains],
            "clients": [[node, self.shares[node], self.seen[node]] for node in self.histories],
        }
        write_arrays(path, arrays, about)

    @classmethod
    def restored(cls, path: Path, window: int) -> "tuple[Memory, Model]":
        """The memory of a file, and the model that was made last."""
        arrays, about = read_arrays(path)
        memory = cls(window)
        try:
            memory.rounds = about["rounds"]
            memory.gains = [np.nan if gain is None else gain for gain in about.get("gains", [])]
            for node, share, seen in about["clients"]:
                memory.histories[node] = arrays[f"history/{node}"]
                memory.shares[node], memory.seen[node] = share, seen
            # The file sorts arrays; a model goes by their order.
            memory.start = {name: arrays[f"start/{name}"] for name in about["names"]}
            made = {name: arrays[f"made/{name}"] for name in about["names"]}
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{path}: is no memory of this strategy ({error}); name another file, or remove it"
            ) from error
        if any(own.shape[0] != window for own in memory.histories.values()):
            raise InputError(f"{path}: its clients' histories are of another length than {window}")
        return memory, made
