"""Online portfolio selection that follows the winner: shares learn from the price relatives y_n.

Each function maps relatives (time, entities) to target allocations; row n has seen rows before n
only, and row 0 is equal shares. Universal portfolios, exponentiated gradient, online Newton step, whose
projection minimises a smooth convex function over the simplex to the last digits, as best CRP does.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

Relatives = Float[Array, "time entities"]
Allocations = Float[Array, "time entities"]
Shares = Float[Array, " entities"]
Derivatives = Callable[[Shares], tuple[Shares, Float[Array, "entities entities"]]]

# Each Newton step aims at a tenth of the gap and stops short of the boundary by one part in a hundred.
_SHRINK, _BACK_OFF, _MOST_STEPS = 0.1, 0.99, 60


def follow(
    update: Callable[[Shares, Any, Shares], tuple[Shares, Any]], memory: Any, relatives: Relatives
) -> Allocations:
    """Start from equal shares; after each period let `update(shares, memory, relatives)` choose
    the next shares. A row is written before its own relatives are read, so none can look ahead.
    """

    def period(carry, y):
        shares, memory = carry
        return update(shares, memory, y), shares

    m = relatives.shape[1]
    start = jnp.full(m, 1 / m, relatives.dtype)
    return jax.lax.scan(period, (start, memory), relatives)[1]


def exponentiated_gradient(relatives: Relatives, rate: float = 0.05) -> Allocations:
    """Multiplicative updates by the gradient of log wealth (Helmbold et al. 1998).

    Examples
    --------
    >>> bought = exponentiated_gradient(jnp.array([[2.0, 1.0], [1.0, 1.0]]))[1]
    >>> [round(float(share), 3) for share in bought]
    [0.508, 0.492]
    """

    def update(shares, memory, y):
        return jax.nn.softmax(jnp.log(shares) + rate * y / (shares @ y)), memory

    return follow(update, None, relatives)


def universal(
    relatives: Relatives, points: Float[Array, "points entities"] | None = None
) -> Allocations:
    """Cover's universal portfolio (1991): the wealth-weighted average of all constant shares.

    Parameters
    ----------
    relatives
        Price relatives, one row a period.
    points
        Constant allocations to average over; `simplex_lattice` by default, which treats all
        entities alike.

    Examples
    --------
    >>> bought = universal(jnp.array([[2.0, 1.0], [1.0, 1.0]]))[1]
    >>> [round(float(share), 3) for share in bought]
    [0.556, 0.444]
    """
    if points is None:
        points = jnp.asarray(simplex_lattice(relatives.shape[1]), relatives.dtype)

    def update(shares, log_wealth, y):
        log_wealth = log_wealth + jnp.log(points @ y)
        average = jax.nn.softmax(log_wealth) @ points
        return average / average.sum(), log_wealth

    return follow(update, jnp.zeros(points.shape[0], relatives.dtype), relatives)


def simplex_lattice(entities: int, most: int = 10_000) -> np.ndarray:
    """About `most` points spread over the simplex, the same for every order of the entities.

    Compositions n of k into m parts, n / k drawn in towards the centre by sqrt(k / (k + m)): the
    factor that gives the points the mean and the covariance of the uniform distribution exactly.

    >>> simplex_lattice(2, most=3).round(3).tolist()
    [[0.146, 0.854], [0.5, 0.5], [0.854, 0.146]]
    """
    parts = 1
    while math.comb(entities + parts, parts + 1) <= most:
        parts += 1
    # Stars and bars: a composition is where entities - 1 bars stand among parts stars.
    places = parts + entities - 1
    bars = np.array(list(itertools.combinations(range(places), entities - 1)), int)
    edges = np.pad(bars.reshape(-1, entities - 1), ((0, 0), (1, 1)), constant_values=(-1, places))
    counts = np.diff(edges, axis=1) - 1
    inwards = math.sqrt(parts / (parts + entities))
    return 1 / entities + inwards * (counts / parts - 1 / entities)


def ons(relatives: Relatives, delta: float = 0.125, beta: float = 1.0) -> Allocations:
    """Online Newton step (Agarwal et al. 2006).

    The next shares are delta A^-1 b projected on the simplex in the norm of A, where A gathers the
    gradients' outer products and b the gradients of log wealth. The paper's eta, which would blend in
    equal shares, is 0.

    Examples
    --------
    >>> bought = ons(jnp.array([[2.0, 1.0], [1.0, 1.0]]), delta=1.0)[1]
    >>> [round(float(share), 3) for share in bought]
    [0.773, 0.227]
    """
    m = relatives.shape[1]
    centre = jnp.full(m, 1 / m, relatives.dtype)

    def update(shares, memory, y):
        a, b = memory
        gradient = y / (shares @ y)
        a = a + jnp.outer(gradient, gradient)
        b = b + (1 + 1 / beta) * gradient
        # The projection minimises x'Ax / 2 - delta b'x: A need not be inverted.
        scale = m / jnp.trace(a)
        best = minimise_on_simplex(lambda x: (scale * (a @ x - delta * b), scale * a), centre)
        return best, (a, b)

    start = (jnp.eye(m, dtype=relatives.dtype), jnp.zeros(m, relatives.dtype))
    return follow(update, start, relatives)


def minimise_on_simplex(derivatives: Derivatives, start: Shares) -> Shares:
    """The minimiser over the simplex of the function whose gradient and Hessian `derivatives` gives.

    A primal-dual interior-point method: Newton steps on the optimality conditions
    g(x) + nu - z = 0, x z = mu, with mu driven to 0.

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

    def room(value: Shares, change: Shares) -> Float[Array, ""]:
        """How far `change` can be followed before a value reaches 0."""
        return jnp.min(jnp.where(change < 0, -value / jnp.where(change < 0, change, -1.0), jnp.inf))

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
        length = jnp.minimum(1.0, _BACK_OFF * jnp.minimum(room(x, dx), room(z, dz)))
        new = (x + length * dx, nu + length * dnu, z + length * dz)
        sound = jnp.isfinite(jnp.concatenate([new[0], new[2]])).all()
        kept = [
            jnp.where(sound, after, before) for after, before in zip(new, carry[:3], strict=True)
        ]
        return (*kept, steps + 1, sound)

    first = (start, level, gradient + level, jnp.asarray(0), jnp.asarray(True))
    x = jax.lax.while_loop(unfinished, newton, first)[0]
    return x / x.sum()
