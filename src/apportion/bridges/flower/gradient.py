"""Shares by gradient as a Flower strategy: no policy, but a loss that JAX can differentiate.

In every round the server descends its own loss L(sum_i a_i v_i) in the shares a, from FedAvg's and
pulled back to them, and repeats a part of its last move. With a few dozen samples it fits their noise;
there `LearnedAggregation` does better.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from jaxtyping import Array, Float

from apportion.bridges.flower.updates import (
    ClientMemory,
    ClientUpdate,
    moved,
    read_model,
    sample_counts,
    usable,
    write_model,
)
from apportion.domains.federated.aggregators import descend_shares
from apportion.errors import InputError

Loss = Callable[[dict[str, Array]], Float[Array, ""]]
_log = logging.getLogger("flwr")


class ShareGradient(FedAvg):
    """FedAvg with shares that descend the server's own loss, and with momentum.

    Parameters
    ----------
    loss
        The server's loss of a model, a dict of JAX arrays by name; JAX must be able to differentiate it.
    steps, step_size
        Steps of gradient descent on the log shares, and the length of each.
    pull
        Weight of the divergence from FedAvg's shares beside the loss.
    momentum
        How much of its last move the server repeats.
    largest
        An update whose norm is more than this many times the median one is left out.
    options
        As in Flower's `FedAvg`; `fraction_evaluate` is 0 unless it is given.

    Examples
    --------
    >>> ShareGradient(lambda model: (model["x"] ** 2).sum(), steps=5).steps
    5
    """

    def __init__(
        self,
        loss: Loss,
        *,
        steps: int = 20,
        step_size: float = 0.5,
        pull: float = 0.05,
        momentum: float = 0.5,
        largest: float = 10.0,
        **options: Any,
    ):
        options.setdefault("fraction_evaluate", 0.0)
        super().__init__(**options)
        if steps < 1 or not 0 <= momentum < 1 or not largest > 1:
            raise InputError(
                f"ShareGradient: steps {steps} must be at least 1, momentum {momentum} in [0, 1) and "
                f"largest {largest} over 1"
            )
        self.loss, self.steps, self.step_size, self.pull = loss, steps, step_size, pull
        self.momentum, self.largest = momentum, largest
        self._memory = ClientMemory(1)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As in FedAvg, remembering the model sent out."""
        if server_round == 1:
            self._memory = ClientMemory(1)
        self._memory.send(read_model(arrays))
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The replies' models to one; (None, None), which keeps the old one, if none is usable."""
        updates, refused, start = usable(replies, self._memory.start, (), self.largest)
        for node, why in refused.items():
            _log.warning("round %d: node %d is left out (%s)", server_round, node, why)
        if not updates or start is None:
            _log.error("round %d: no usable reply; the model stays", server_round)
            return None, None
        shares = self._shares(updates)
        models = [update.model for update in updates]
        made = moved(shares, models, start, self._memory.move, 1.0, self.momentum)
        contents = [update.content for update in updates]
        metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        metrics["largest-share"] = float(shares.max())
        return write_model(made), metrics

    def _shares(self, updates: list[ClientUpdate]) -> np.ndarray:
        counts = sample_counts(updates, self.weighted_by_key, self.largest)
        models = {
            name: jnp.stack([jnp.asarray(update.model[name]) for update in updates])
            for name in updates[0].model
        }
        plain = jnp.asarray(counts / counts.sum(), jnp.float32)
        options = {"steps": self.steps, "step_size": self.step_size, "pull": self.pull}
        shares = np.asarray(_descended(self.loss, models, plain, options), np.float64)
        if not np.isfinite(shares).all():
            _log.warning("the loss is not finite; FedAvg's shares in this round")
            shares = counts
        return shares / shares.sum()


@eqx.filter_jit
def _descended(
    loss: Loss, models: dict[str, Array], plain: Array, options: dict[str, Any]
) -> Array:
    def of_shares(shares):
        mean = {
            name: jnp.tensordot(shares, own.astype(jnp.float32), 1) for name, own in models.items()
        }
        return loss(mean)

    with jax.default_matmul_precision("highest"):
        return descend_shares(of_shares, plain, jnp.ones(len(plain), bool), **options)
