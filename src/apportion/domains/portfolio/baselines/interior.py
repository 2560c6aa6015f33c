"""Minimise a smooth convex function over the simplex {x >= 0, sum x = 1}, to the last digits.

A primal-dual interior-point method: Newton steps on the optimality conditions
g(x) + nu - z = 0, x z = mu, with mu driven to 0. Best CRP and the online Newton step need it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Shares = Float[Array, " entities"]
Derivatives = Callable[[Shares], tuple[Shares, Float[Array, "entities entities"]]]

# Each Newton step aims at a tenth of the gap and stops short of the boundary by one part in a hundred.
_SHRINK, _BACK_OFF, _MOST_STEPS = 0.1, 0.99, 60


def minimise_on_simplex(derivatives: Derivatives, start: Shares) -> Shares:
    """The minimiser of the function whose gradient and Hessian `derivatives` gives.

    Parameters
    ----------
    derivatives
        Gradient and Hessian at x; scaled so that the Hessian's entries are of order one.
    start
        A point inside the simplex.

    Examples
    --------
    >>> far = jnp.array([2.0, 0.0, 0.0])
    >>> nearest = minimise_on_simplex(lambda x: (x - far, jnp.eye(3)), jnp.full(3, 1 / 3))
    >>> [round(float(share), 4) for share in nearest]
    [1.0, 0.0, 0.0]
    """
    tolerance = 1e-19 if start.dtype == jnp.float64 else 1e-8
    gradient, _ = derivatives(start)
    spread = gradient.max() - gradient.min()
    level = jnp.maximum(spread, 1e-3) - gradient.min()

    def unfinished(carry) -> Bool[Array, ""]:
        x, _, z, steps, sound = carry
        return sound & (steps < _MOST_STEPS) & ((x * z).mean() > tolerance)

    def newton(carry):
        x, nu, z, steps, _ = carry
        gradient, hessian = derivatives(x)
        target = _SHRINK * (x * z).mean()
        factor = jax.scipy.linalg.cho_factor(hessian + jnp.diag(z / x))
        off = gradient + nu - target / x
        both = jax.scipy.linalg.cho_solve(factor, jnp.stack([-off, jnp.ones_like(x)], -1))
        dnu = (both[:, 0].sum() + x.sum() - 1) / both[:, 1].sum()
        dx = both[:, 0] - dnu * both[:, 1]
        dz = target / x - z - z / x * dx
        room = jnp.minimum(_room(x, dx), _room(z, dz))
        length = jnp.minimum(1.0, _BACK_OFF * room)
        new = (x + length * dx, nu + length * dnu, z + length * dz)
        sound = jnp.isfinite(jnp.concatenate([new[0], new[2]])).all()
        kept = [
            jnp.where(sound, after, before) for after, before in zip(new, carry[:3], strict=True)
        ]
        return (*kept, steps + 1, sound)

    first = (start, level, gradient + level, jnp.asarray(0), jnp.asarray(True))
    x = jax.lax.while_loop(unfinished, newton, first)[0]
    return x / x.sum()


def _room(value: Shares, change: Shares) -> Float[Array, ""]:
    """How far `change` can be followed before a value reaches 0."""
    return jnp.min(jnp.where(change < 0, -value / jnp.where(change < 0, change, -1.0), jnp.inf))
