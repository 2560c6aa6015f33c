"""How models do on images: the chance they give to the right class, and what they get right by class.

Block after block of images, so that memory is bounded however many models there are.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from apportion.domains.federated.clients import unravelled
from apportion.domains.federated.digits import CLASSES
from apportion.domains.federated.model import ClientModel, Logits

Models = Float[Array, "entities parameters"]
Images = Float[Array, "samples side side"]
Judge = Callable[[Logits, Int[Array, " batch"], Bool[Array, " batch"]], Array]


def chances(
    model: ClientModel,
    models: Models,
    images: Images,
    labels: Int[Array, " samples"],
    chosen: Int[Array, " chosen"],
    block: int,
) -> Float[Array, "entities chosen"]:
    """The chance that each model gives to the right class of each of the chosen images."""

    def chance(logits, labels, _):
        own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        return jnp.exp(own - jax.nn.logsumexp(logits, axis=-1))

    found = _by_block(model, models, images, labels, chosen, block, chance)
    return jnp.moveaxis(found, 0, 1).reshape(len(models), -1)[:, : len(chosen)]


def correct(
    model: ClientModel,
    models: Models,
    images: Images,
    labels: Int[Array, " samples"],
    chosen: Int[Array, " chosen"],
    block: int,
) -> Float[Array, "entities classes"]:
    """The part of the chosen images that is of a class and that each model gets right."""

    def right(logits, labels, real):
        classes = jax.nn.one_hot(labels, CLASSES) * real[:, None]
        return (logits.argmax(-1) == labels).astype(jnp.float32) @ classes

    found = _by_block(model, models, images, labels, chosen, block, right)
    return found.sum(0) / chosen.shape[0]


def _by_block(
    model: ClientModel,
    models: Models,
    images: Images,
    labels: Int[Array, " samples"],
    chosen: Int[Array, " chosen"],
    block: int,
    judge: Judge,
) -> Float[Array, "blocks entities _"]:
    """`judge(logits, labels, real)` of each model and block; padding of the last block is not real."""
    size = chosen.shape[0]
    blocks = -(-size // min(block, size))
    length = -(-size // blocks)
    padded = jnp.pad(chosen, (0, blocks * length - size)).reshape(blocks, length)
    real = (jnp.arange(blocks * length) < size).reshape(blocks, length)

    def judge_block(block):
        places, real = block

        def of_model(flat):
            logits = model.logits(unravelled(model, flat), images[places])
            return judge(logits, labels[places], real)

        return jax.vmap(of_model)(models)

    return jax.lax.map(judge_block, (padded, real))
