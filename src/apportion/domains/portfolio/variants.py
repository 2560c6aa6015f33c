"""Variants of one trained ensemble that need no training of their own: every k and eta.

Trust k and speed eta come after the network, so one pass of features serves all of them.
"""

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from apportion.composition import Ensemble, PartialTrading, ShrunkToEqual
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.walk import growth_and_sharpe, walk_policy
from apportion.policy import Policy
from apportion.tasks import Tasks

TRUSTS = (0.0, 0.25, 0.5, 1.0)
SPEEDS = (0.05, 0.1, 0.3, 1.0)
"""The k and eta that are looked at."""


@eqx.filter_jit
def score_variants(
    members: Policy,
    market: Market,
    starts: Int[Array, " cells"],
    days: Int[Array, " cells"],
    tasks: Tasks,
    trusts: Float[Array, " variants"],
    speeds: Float[Array, " variants"],
) -> tuple[Float[Array, "cells variants tasks"], Float[Array, "cells variants tasks"]]:
    """Net log growth a year and Sharpe ratio of each cell's ensemble, for each (k, eta).

    Features are computed once for all variants: k and eta come after them.
    """
    arrays, rest = eqx.partition(members, eqx.is_array)

    def one(cell):
        arrays, start, days, tasks = cell
        here = eqx.tree_at(lambda m: m.first, market, start)
        team = Ensemble(eqx.combine(arrays, rest))

        def variant(task, k, eta):
            return walk_policy(PartialTrading(ShrunkToEqual(team, k), eta), here, task).log_return

        across = jax.vmap(jax.vmap(variant, in_axes=(None, 0, 0)), in_axes=(0, None, None))
        log = across(tasks, trusts, speeds).swapaxes(0, 1)
        return growth_and_sharpe(log, days)

    return jax.lax.map(one, (arrays, starts, days, tasks), batch_size=16)
