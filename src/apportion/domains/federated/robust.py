"""Defences against byzantine clients: median, trimmed mean, Krum, and mixing with near neighbours.

Coordinate-wise median and trimmed mean are Yin et al.'s (2018), Krum is Blanchard et al.'s (2017),
nearest-neighbour mixing Allouah et al.'s (2023).
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from apportion.domains.federated.aggregators import Memoryless, Received, Shares
from apportion.domains.federated.federation import Model, Models


class TrimmedMean(Memoryless):
    """Coordinate by coordinate, the mean without the `fraction` smallest and largest values."""

    fraction: float = eqx.field(static=True, default=0.2)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        m = received.mask.sum()
        cut = jnp.minimum((self.fraction * m).astype(jnp.int32), (m - 1) // 2)
        return _by_rank(received, cut, m - cut)


class Median(Memoryless):
    """Coordinate by coordinate, the median."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        m = received.mask.sum()
        return _by_rank(received, (m - 1) // 2, m // 2 + 1)


def _by_rank(received: Received, first: Array, end: Array) -> tuple[Model, Shares]:
    """Mean of the values ranked first..end in each coordinate; the share of a client is how much
    of the model is made of its values.
    """
    values = jnp.where(received.mask[:, None], received.models, jnp.inf)
    ranks = jnp.argsort(jnp.argsort(values, axis=0), axis=0)
    kept = (ranks >= first) & (ranks < end)
    model = jnp.where(kept, received.models, 0.0).sum(0) / (end - first)
    return model, kept.mean(1) / (end - first)


class Krum(Memoryless):
    """The one model nearest to its m - f - 2 nearest neighbours, f being the byzantine clients to
    withstand.
    """

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
    """Each model replaced by the mean of the m - f nearest to it, itself included, then the trimmed mean
    without the f smallest and largest values; f is the part `byzantine` of the clients.
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
