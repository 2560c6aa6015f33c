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

Judge = Callable[[Logits, Int[Array, " batch"], Bool[Array, " batch"]], Array]
"""From a model's logits, the labels, and which of the images are no padding, to how it does."""


def chance(logits: Logits, labels: Int[Array, " batch"], real: Bool[Array, " batch"]) -> Array:
    """The chance of the right class of each image."""
    own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.exp(own - jax.nn.logsumexp(logits, axis=-1))


def right(logits: Logits, labels: Int[Array, " batch"], real: Bool[Array, " batch"]) -> Array:
    """How many images of each class are told right."""
    classes = jax.nn.one_hot(labels, CLASSES) * real[:, None]
    return (logits.argmax(-1) == labels).astype(jnp.float32) @ classes


def by_block(
    model: ClientModel,
    models: Float[Array, "entities parameters"],
    images: Float[Array, "samples side side"],
    labels: Int[Array, " samples"],
    chosen: Int[Array, " chosen"],
    block: int,
    judge: Judge,
) -> Float[Array, "blocks entities _"]:
    """What `judge` says of each model and block of the chosen images."""
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
