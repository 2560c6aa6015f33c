"""Double precision where it is needed, without changing it for the rest of the program."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import equinox as eqx
import jax
import numpy as np


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
