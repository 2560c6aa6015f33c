"""Double precision where it is needed, without changing it for the rest of the program, and a maximum
whose gradient no rounding spoils.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile and run in float64, give back NumPy arrays; the caller's precision stays as it was.

    >>> import jax.numpy as jnp
    >>> in_float64(lambda x: x / 3)(1.0).dtype, jnp.ones(1).dtype
    (dtype('float64'), dtype('float32'))
    """
    compiled = eqx.filter_jit(function)

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, compiled(*args, **options))

    return call


@jax.custom_jvp
def largest(values: Float[Array, "*rows entities"]) -> Float[Array, "*rows"]:
    """The maximum over the last axis; of equal ones the first has the gradient.

    >>> jax.grad(lambda x: largest(x))(jnp.array([1.0, 3.0, 3.0])).tolist()
    [0.0, 1.0, 0.0]
    """
    return values.max(-1)


@largest.defjvp
def _largest_moves(primals, tangents):
    # By place: JAX's own rule asks who equals the maximum, and where the compiler computes the values
    # twice they may differ in the last bit, so that nobody does, and the gradient is 0 / 0.
    (values,), (moved,) = primals, tangents
    place = jnp.argmax(values, -1)[..., None]
    return largest(values), jnp.take_along_axis(moved, place, -1)[..., 0]
