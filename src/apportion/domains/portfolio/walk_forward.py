"""Years to walk forward over: each is tested with what was learned from the days before it alone.

Runs differ in how many periods of the same market their episodes have, and are one vmap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Int

from apportion.domains.portfolio.prices import Prices
from apportion.errors import InputError


@dataclass(frozen=True)
class Years:
    """Test years as rows of a table of prices."""

    years: tuple[int, ...]
    firsts: tuple[int, ...]
    days: tuple[int, ...]

    @classmethod
    def of(cls, prices: Prices, years: Sequence[int], *, before: int) -> "Years":
        """Refuses years that are not there or have fewer than `before` days of history."""
        firsts = [prices.row(f"{year}-01-01") for year in years]
        days = [
            prices.row(f"{year + 1}-01-01") - first
            for year, first in zip(years, firsts, strict=True)
        ]
        for year, first, length in zip(years, firsts, days, strict=True):
            if length < 2 or first < before:
                raise InputError(
                    f"walk-forward year {year}: {first} days before it and {length} in it; "
                    f"{before} before it are needed, so choose other years or give more prices"
                )
        return cls(tuple(years), tuple(firsts), tuple(days))

    def known(self, window: int) -> Int[Array, " years"]:
        """Periods before each year, the first window left out: those that may be learned from."""
        return jnp.asarray([first - window for first in self.firsts], jnp.int32)
