"""Aggregators that learn from the server's samples in every round, without any policy.

`ShareGradient` descends the server's loss in the shares, `ServerClient` lets the server train as one
more client, `FineTuned` trains FedAvg's aggregate on the server's samples.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from apportion.domains.federated.aggregators import Memoryless, Received, Shares
from apportion.domains.federated.clients import Owned
from apportion.domains.federated.federation import Model, average
from apportion.domains.federated.policy import Decision
from apportion.simplex import Mask, masked_softmax


class ShareGradient(Memoryless):
    """Shares by gradient on the server's loss, from FedAvg's and pulled back to them, with momentum.

    Parameters
    ----------
    steps, step_size
        Steps of gradient descent on the log shares, in units of the gradient's own norm.
    pull
        Weight of the divergence from FedAvg's shares beside the loss.
    momentum
        How much of its last move the server repeats.
    """

    steps: int = eqx.field(static=True, default=20)
    step_size: float = eqx.field(static=True, default=0.5)
    pull: float = eqx.field(static=True, default=0.05)
    momentum: float = eqx.field(static=True, default=0.5)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        federation, samples = received.federation, received.samples
        assert federation is not None
        assert samples is not None
        plain = received.by_samples
        real = samples.shown | samples.kept

        def loss(shares: Shares) -> Float[Array, ""]:
            chances = federation.chances(average(shares, received.models)[None], samples.places)[0]
            return -(jnp.log(chances + 1e-6) * real).sum() / jnp.maximum(real.sum(), 1)

        shares = descend_shares(
            loss, plain, received.mask, steps=self.steps, step_size=self.step_size, pull=self.pull
        )
        decision = Decision(shares, jnp.ones(()), jnp.asarray(self.momentum))
        return decision.model(received.models, received.start, received.move), shares


def descend_shares(
    loss: Callable[[Shares], Float[Array, ""]],
    plain: Shares,
    mask: Mask,
    *,
    steps: int,
    step_size: float,
    pull: float,
) -> Shares:
    """Shares after gradient descent on a loss of theirs, from FedAvg's `plain` ones and pulled to them.

    A step has the length `step_size` in the log shares, whatever the loss's unit is.
    """
    log_plain = jnp.where(mask, jnp.log(jnp.maximum(plain, 1e-12)), 0.0)

    def pulled(change: Shares) -> Float[Array, ""]:
        shares = masked_softmax(log_plain + change, mask)
        apart = (shares * (jnp.log(jnp.maximum(shares, 1e-12)) - log_plain)).sum()
        return loss(shares) + pull * apart

    def descend(change, _):
        slope = jax.grad(pulled)(change)
        return change - step_size * slope / (jnp.linalg.norm(slope) + 1e-6), None

    change, _ = jax.lax.scan(descend, jnp.zeros(len(plain)), None, steps)
    return masked_softmax(log_plain + change, mask)


class ServerClient(Memoryless):
    """The server trains on its own samples as the clients do, and is averaged with them by samples."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        plain = received.by_samples
        own, count = _trained(received, received.start)
        total = jnp.where(received.mask, received.counts, 0).sum()
        part = count / (count + total)
        return (1 - part) * average(plain, received.models) + part * own, plain


class FineTuned(Memoryless):
    """FedAvg's aggregate, trained on the server's samples."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        plain = received.by_samples
        return _trained(received, average(plain, received.models))[0], plain


def _trained(received: Received, model: Model) -> tuple[Model, Float[Array, ""]]:
    """A model after a client's epochs on the server's samples, and how many those are."""
    federation, samples, key = received.federation, received.samples, received.key
    assert federation is not None
    assert samples is not None
    assert key is not None
    real = samples.shown | samples.kept
    # The real ones first, as clients have theirs.
    places = samples.places[jnp.argsort(~real)]
    count = real.sum()
    owned = Owned(federation.images, places, federation.labels[places], count)
    return federation.descend(model, owned, key=key), count.astype(jnp.float32)
