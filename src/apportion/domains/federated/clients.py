"""A client's own training: epochs of SGD from the aggregate on the images it holds."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.domains.federated.model import ClientModel, Parameters


class Owned(eqx.Module):
    """The images of a client: their places among all, its labels of them, and how many are real."""

    images: Float[Array, "samples side side"]
    index: Int[Array, " owned"]
    labels: Int[Array, " owned"]
    count: Int[Array, ""]


def unravelled(model: ClientModel, flat: Float[Array, " parameters"]) -> Parameters:
    """Parameters by name from a vector."""
    shapes = jax.eval_shape(lambda: model.start(key=jax.random.key(0)))
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return ravel_pytree(blank)[1](flat)


def descend(
    model: ClientModel,
    start: Float[Array, " parameters"],
    owned: Owned,
    *,
    epochs: int,
    batch: int,
    learning_rate: Float[Array, ""],
    key: PRNGKeyArray,
) -> Float[Array, " parameters"]:
    """The parameters after `epochs` of SGD in a random order."""
    held = owned.index.shape[0]
    steps = -(-held // batch)

    def order(key):
        # Real images first; what lies beyond the client's own count weighs nothing.
        chance = jax.random.uniform(key, (held,))
        ranked = jnp.argsort(jnp.where(jnp.arange(held) < owned.count, chance, 2.0))
        return jnp.pad(ranked, (0, steps * batch - held))

    orders = jax.vmap(order)(jax.random.split(key, epochs))
    weights = (jnp.arange(steps * batch) < owned.count).astype(jnp.float32)
    batches = orders.reshape(epochs * steps, batch)
    weights = jnp.tile(weights.reshape(steps, batch), (epochs, 1))

    @jax.grad
    def slope(parameters, images, labels, weight):
        logits = model.logits(parameters, images)
        own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - own
        return (weight * loss).sum() / jnp.maximum(weight.sum(), 1.0)

    def one(parameters, batch):
        order, weight = batch
        images = owned.images[owned.index[order]]
        gradient = slope(parameters, images, owned.labels[order], weight)
        return jax.tree.map(lambda p, g: p - learning_rate * g, parameters, gradient), None

    trained, _ = jax.lax.scan(one, unravelled(model, start), (batches, weights))
    return ravel_pytree(trained)[0]
