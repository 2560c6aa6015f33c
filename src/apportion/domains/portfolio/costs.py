"""What a rebalance keeps: the factor by which trading from w_{n-1} to a_n shrinks wealth.

The approximation is 1 - c sum|w - a|. The exact factor mu (Jiang et al. 2017) solves
mu (1 - c a_0) = 1 - c w_0 - (2c - c^2) sum_{i>=1} (w_i - mu a_i)^+, where entity 0 is cash and pays
no commission; without cash both its shares are 0. The two differ by less than 2c^2.

Where rates differ by entity, p_i on what is bought and s_i on what is sold, mu solves
sum_i (1 - s_i) (w_i - mu a_i)^+ = sum_i (mu a_i - w_i)^+ / (1 - p_i), which is the same where all are c.
"""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from apportion.domains.portfolio.commissions import Commissions, rates_of
from apportion.errors import InputError
from apportion.simplex import Scalar

Shares = Float[Array, " entities"]

# Newton's method on a concave piecewise-linear equation ends after finitely many pieces; at real
# commissions the first guess already lies on the last piece or the one beside it.
_NEWTON_STEPS = 6


def _fractions(rate: float | np.ndarray | Array) -> Array:
    if not isinstance(rate, Tracer):
        known = np.asarray(rate)
        if not np.all((known >= 0) & (known < 0.5)):
            raise InputError(
                f"commission {rate}: it must be a fraction of at least 0 and below 0.5"
            )
    return jnp.asarray(rate, float)


class Costs(eqx.Module):
    """Proportional commission on everything bought and sold.

    Examples
    --------
    >>> both = Costs(0.0025), Costs(0.0025, exact=True)
    >>> held, wanted = jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0])
    >>> [round(float(costs.cost_factor(held, wanted)), 6) for costs in both]
    [0.995, 0.995006]
    """

    rate: Scalar | Float[Array, " entities"] | Float[Array, "entities 2"] = eqx.field(
        converter=_fractions, default=0.0025
    )
    """Commission c, a fraction of the value traded: one, one for each entity, or two for each, on what
    is bought and on what is sold."""
    exact: bool = eqx.field(static=True, default=False, kw_only=True)
    """Solve the fixed point instead of the first-order approximation."""
    cash: bool = eqx.field(static=True, default=False, kw_only=True)
    """The first entity of every task is cash, free of commission."""

    @classmethod
    def of(
        cls,
        commissions: Commissions,
        tickers: tuple[str, ...],
        *,
        exact: bool = False,
        cash: bool = False,
    ) -> "Costs":
        """The costs of a universe of these instruments, and of cash behind them where there is any."""
        rates = rates_of(commissions, tickers)
        if cash and np.ndim(rates):
            rates = np.pad(rates, ((0, 1), (0, 0)))
        return cls(rates, exact=exact, cash=cash)

    def among(self, members: Int[Array, " entities"]) -> "Costs":
        """The costs of these entities of the universe."""
        return self if self.rate.ndim == 0 else replace(self, rate=self.rate[members])

    def cost_factor(self, held: Shares, allocation: Shares) -> Scalar:
        """The fraction of wealth left after trading from `held` to `allocation`."""
        if self.rate.ndim:
            return self._by_entity(held, allocation)
        cash = 1 if self.cash else 0
        rate = self.rate.astype(held.dtype)
        first = 1 - rate * jnp.abs(held - allocation)[cash:].sum()
        if not self.exact:
            return first
        none = jnp.zeros_like(first)
        w0, a0 = (held[0], allocation[0]) if self.cash else (none, none)
        return _fixed_point(held[cash:], allocation[cash:], w0, a0, rate, first)

    def _by_entity(self, held: Shares, allocation: Shares) -> Scalar:
        rate = self.rate.astype(held.dtype)
        both = rate if rate.ndim == 2 else jnp.stack([rate, rate], -1)
        if self.cash:
            both = both.at[0].set(0.0)
        change = allocation - held
        paid = jnp.where(change > 0, both[:, 0], -both[:, 1]) * change
        first = 1 - paid.sum()
        return _by_entity_point(held, allocation, both, first) if self.exact else first


def _by_entity_point(
    held: Shares, allocation: Shares, rates: Float[Array, "entities 2"], guess: Scalar
) -> Scalar:
    """As `_fixed_point`, with a rate for each entity and side."""
    sold, bought = 1 - rates[:, 1], 1 / (1 - rates[:, 0])

    def newton(mu: Scalar) -> Scalar:
        mu = jax.lax.stop_gradient(mu)
        left = held - mu * allocation
        worth = jnp.where(left > 0, sold, bought)
        slope = jax.lax.stop_gradient(-(worth * allocation).sum())
        # Where nobody can be held there is nothing to solve.
        return mu - (worth * left).sum() / jnp.where(slope == 0, -1.0, slope)

    for _ in range(_NEWTON_STEPS):
        guess = newton(guess)
    return guess


def _fixed_point(
    held: Shares, allocation: Shares, held_cash: Scalar, cash: Scalar, c: Scalar, guess: Scalar
) -> Scalar:
    """The root of a concave, decreasing, piecewise-linear function of mu, by Newton's method.

    The last step alone carries the gradient: at the root it is the implicit function's.
    """
    both = 2 * c - c**2

    def newton(mu: Scalar) -> Scalar:
        mu = jax.lax.stop_gradient(mu)
        sold = jnp.maximum(held - mu * allocation, 0.0).sum()
        excess = 1 - c * held_cash - both * sold - mu * (1 - c * cash)
        selling = jnp.where(held > mu * allocation, allocation, 0.0).sum()
        slope = jax.lax.stop_gradient(both * selling - (1 - c * cash))
        return mu - excess / slope

    for _ in range(_NEWTON_STEPS):
        guess = newton(guess)
    return guess
