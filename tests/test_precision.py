"""Double precision inside, the caller's outside."""

import jax.numpy as jnp
import numpy as np

from apportion.precision import in_float64


def test_precision_is_double_inside_and_untouched_outside():
    before = jnp.ones(2).dtype
    assert in_float64(lambda x: x / 3)(np.ones(2)).dtype == np.float64
    assert jnp.ones(2).dtype == before == jnp.float32
