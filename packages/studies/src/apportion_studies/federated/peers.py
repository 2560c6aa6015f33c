"""Peers of the learned aggregation that the library does not provide.

Defences against byzantine clients (Krum, Blanchard et al. 2017; nearest-neighbour mixing, Allouah et al.
2023), server optimisers (FedAdam and FedYogi, Reddi et al. 2021), and methods that learn from the server's
samples in every round without a policy.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from apportion.domains.federated.aggregators import (
    Aggregator,
    Memoryless,
    Received,
    Shares,
    TrimmedMean,
    descend_shares,
)
from apportion.domains.federated.clients import Owned
from apportion.domains.federated.federation import Model, Models
from apportion.domains.federated.policy import Decision
from apportion.domains.federated.states import average


class Krum(Memoryless):
    """The model nearest to its m - f - 2 nearest neighbours; f is the number of `byzantine` clients."""

    byzantine: int = eqx.field(static=True, default=2)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        mask, models = received.mask, received.models
        m = mask.sum()
        distances = _distances(models)
        apart = mask[None, :] & ~jnp.eye(len(mask), dtype=bool)
        ordered = jnp.sort(jnp.where(apart, distances, jnp.inf), axis=-1)
        near = jnp.arange(len(mask))[None, :] < jnp.maximum(m - self.byzantine - 2, 1)
        score = jnp.where(mask, jnp.where(near, ordered, 0.0).sum(-1), jnp.inf)
        chosen = jnp.argmin(score)
        return models[chosen], jax.nn.one_hot(chosen, len(mask))


class NearestMixing(Memoryless):
    """Replace each model by the mean of its m - f nearest, itself included, then take the trimmed mean.

    f is the fraction `byzantine` of the clients; the trimmed mean leaves out f values at either end.
    """

    byzantine: float = eqx.field(static=True, default=0.3)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        mask = received.mask
        m = mask.sum()
        distances = jnp.where(mask[None, :], _distances(received.models), jnp.inf)
        ranks = jnp.argsort(jnp.argsort(distances, axis=-1), axis=-1)
        kept = jnp.maximum(m - jnp.floor(self.byzantine * m + 1e-6).astype(jnp.int32), 1)
        near = (ranks < kept) & mask[None, :]
        mixing = near / near.sum(-1, keepdims=True)
        mixed = jnp.matmul(mixing, received.models, precision="highest")
        model, shares = TrimmedMean(self.byzantine)(
            eqx.tree_at(lambda r: r.models, received, mixed)
        )
        return model, shares @ mixing


def _distances(models: Models) -> Float[Array, "entities entities"]:
    squares = (models**2).sum(-1)
    products = jnp.matmul(models, models.T, precision="highest")
    return squares[:, None] + squares[None, :] - 2 * products


_FIRST_DECAY, _SECOND_DECAY, _FLOOR = 0.9, 0.99, 1e-3


class Adaptive(Aggregator):
    """FedAdam or FedYogi, with Flower's default step size and constants."""

    step_size: float = eqx.field(static=True, default=0.1)
    yogi: bool = eqx.field(static=True, default=False)

    def begin(self, model: Model) -> PyTree[Array]:
        return jnp.zeros_like(model), jnp.zeros_like(model), jnp.zeros((), jnp.int32)

    def step(
        self, received: Received, memory: PyTree[Array]
    ) -> tuple[Model, Shares, PyTree[Array]]:
        first, second, n = memory
        shares = received.by_samples
        update = average(shares, received.models) - received.start
        first = _FIRST_DECAY * first + (1 - _FIRST_DECAY) * update
        square = update**2
        if self.yogi:
            second = second - (1 - _SECOND_DECAY) * square * jnp.sign(second - square)
        else:
            second = _SECOND_DECAY * second + (1 - _SECOND_DECAY) * square
        n = n + 1
        # Flower corrects the bias in the step size, and counts one round too many.
        bias = jnp.sqrt(1 - _SECOND_DECAY ** (n + 1)) / (1 - _FIRST_DECAY ** (n + 1))
        rate = self.step_size * (1.0 if self.yogi else bias)
        model = received.start + rate * first / (jnp.sqrt(second) + _FLOOR)
        return model, shares, (first, second, n)


class GradientShares(Memoryless):
    """Shares by gradient descent on the server's loss, regularised towards FedAvg's, with momentum."""

    momentum: float = eqx.field(static=True, default=0.5)
    """Server momentum."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        federation, samples = received.federation, received.samples
        real = samples.shown | samples.kept

        def loss(shares: Shares) -> Float[Array, ""]:
            chances = federation.chances(average(shares, received.models)[None], samples.places)[0]
            return -(jnp.log(chances + 1e-6) * real).sum() / jnp.maximum(real.sum(), 1)

        shares = descend_shares(loss, received.by_samples, received.mask)
        decision = Decision(shares, jnp.ones(()), jnp.asarray(self.momentum))
        return received.next_model(decision), shares


class ServerClient(Memoryless):
    """The server trains on its own samples as one more client of FedAvg."""

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
    """Train a model on the server's samples; return it and the number of samples."""
    federation, samples, key = received.federation, received.samples, received.key
    real = samples.shown | samples.kept
    # Real samples first, as in `Owned`.
    places = samples.places[jnp.argsort(~real)]
    count = real.sum()
    owned = Owned(federation.images, places, federation.labels[places], count)
    return federation.descend(model, owned, key=key), count.astype(jnp.float32)
