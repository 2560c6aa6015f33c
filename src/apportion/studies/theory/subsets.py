"""The regret behind Corollary 2: tasks that overlap, tasks that do not, and orderings of examples."""

import jax
import jax.numpy as jnp
import numpy as np

from apportion.domains.synthetic import (
    Examples,
    draw_examples,
    entropic_allocation,
    lspi_simplex,
    reward,
    separate_basis,
    simplex_greedy,
    tied_basis,
)
from apportion.theory.lspi import in_float64

ENTITIES = (4, 10, 20, 40)
RATIO = 4
"""M / m."""
OVERLAPPING = (16, 256)
INDEPENDENT = (1, 4, 16, 64)
REAL, _PERIODS, _FRESH, _GAMMA, _BETA, _NOISE = 20, 50, 500, 0.5, 0.5, 0.02
# Figure 1's ridge is a bias that many tasks of 20 entities and more would soon be down to.
_RIDGE = 1e-7
_MULTIPLES = (0.5, 1, 2, 4)


def sizes_of(m: int) -> tuple[int, ...]:
    """Numbers of real examples to hold 20 tied ones against: around 20 m."""
    return tuple(int(REAL * m * multiple) for multiple in _MULTIPLES)


@in_float64
def subset_regrets(m: int, runs: int, key_data):
    """Regret of the tied model, runs by arms: overlapping tasks, then independent ones."""
    fresh, best = _fresh(m)
    basis = jnp.asarray(tied_basis(m))

    def one(key):
        keys = jax.random.split(key, 3)
        record, others = draw_record(RATIO * m, keys[0]), draw_record(INDEPENDENT[-1] * m, keys[2])
        order = jax.random.uniform(keys[1], (OVERLAPPING[-1], RATIO * m))
        drawn = jnp.argsort(order, -1)[:, :m]
        alone = jnp.arange(INDEPENDENT[-1] * m).reshape(-1, m)
        tasks = [(record, drawn[:number]) for number in OVERLAPPING]
        tasks += [(others, alone[:number]) for number in INDEPENDENT]
        learned = [lspi_simplex(examples_of(*pair), basis, _GAMMA, ridge=_RIDGE) for pair in tasks]
        return jnp.stack([_regret(theta, fresh, best) for theta in learned])

    return jax.lax.map(one, jax.random.split(jax.random.wrap_key_data(key_data), runs))


@in_float64
def ordering_regrets(m: int, runs: int, key_data):
    """Regret of the tied model on 20 real examples, then of separate parameters on more and more."""
    fresh, best = _fresh(m)
    betas, sizes = jnp.full(m, _BETA), sizes_of(m)

    def one(key):
        real = draw_examples((sizes[-1],), betas, noise=_NOISE, key=key)
        learned = [lspi_simplex(real[:REAL], jnp.asarray(tied_basis(m)), _GAMMA, ridge=_RIDGE)]
        separate = jnp.asarray(separate_basis(m))
        learned += [lspi_simplex(real[:number], separate, _GAMMA, ridge=_RIDGE) for number in sizes]
        return jnp.stack([_regret(theta, fresh, best) for theta in learned])

    return jax.lax.map(one, jax.random.split(jax.random.wrap_key_data(key_data), runs))


def _fresh(m: int):
    fresh = jnp.asarray(np.random.default_rng(0).uniform(size=(_FRESH, m)))
    betas = jnp.full(m, _BETA)
    return fresh, reward(fresh, jax.vmap(entropic_allocation, (0, None))(fresh, betas), betas)


def _regret(theta, fresh, best):
    chosen = jax.vmap(simplex_greedy, (None, 0))(theta, fresh)
    return (best - reward(fresh, chosen, jnp.full(fresh.shape[1], _BETA))).mean()


def draw_record(universe: int, key):
    """Each entity's state, next state, weight and luck in every period: all there is to know."""
    draws = jax.random.uniform(key, (4, _PERIODS, universe), minval=1e-12)
    return draws[0], draws[1], -jnp.log(draws[2]), _NOISE * jax.scipy.special.ndtri(draws[3])


def examples_of(record, tasks) -> Examples:
    """Every period of every task; entities bring their own weight and luck into each task they are in.

    Weights are exponential, so that the shares of any subset are uniform on the simplex, and a reward
    is noisy by its entities' luck.
    """
    x, following, weight, luck = (
        part[:, tasks].swapaxes(0, 1).reshape(-1, tasks.shape[1]) for part in record
    )
    shares = weight / weight.sum(-1, keepdims=True)
    gained = reward(x, shares, jnp.full(x.shape[1], _BETA)) + (shares * luck).sum(-1)
    return Examples(x, shares, gained, following)
