"""The paper's synthetic problem: R(x, a) = sum_i x_i a_i - beta_i a_i log a_i, with x_i ~ U[0, 1].

The betas are evenly spaced around 1/2 over a range eps, a proxy for the distance between the orderings
of the entities. The optimal allocation has a closed form up to one multiplier, and so does the greedy
step of `lspi_simplex`, the LSPI of Figure 1.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from apportion.errors import InputError
from apportion.simplex import Allocation, Logits

_NEWTON_STEPS = 14
_MINIMUM_TEMPERATURE = 0.02


def entropic_allocation(scores: Logits, temperatures: Float[Array, " entities"]) -> Allocation:
    """Maximise sum_i s_i a_i - v_i a_i log a_i over allocations: a softmax with a temperature per entity.

    a_i = exp((s_i - lam) / v_i - 1), with the multiplier lam from Newton's method on log sum_i a_i = 0,
    started at max(s - v). At the start the sum is at least 1. log sum is convex and decreasing in lam, so
    the iterates increase to the root, never exceed it, and cannot overflow.

    Examples
    --------
    >>> entropic_allocation(jnp.zeros(4), jnp.ones(4)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    def newton(lam, _):
        shares = jnp.exp((scores - lam) / temperatures - 1)
        total = shares.sum()
        return lam + jnp.log(total) * total / (shares / temperatures).sum(), None

    start = jnp.max(scores - temperatures)
    lam, _ = jax.lax.scan(newton, start, length=_NEWTON_STEPS)
    return jax.nn.softmax((scores - lam) / temperatures - 1)


def spaced_betas(entities: int, spread: float) -> Float[np.ndarray, " entities"]:
    """Return betas evenly spaced on [.5 - eps/2, .5 + eps/2].

    >>> spaced_betas(3, 0.8).round(2).tolist()
    [0.1, 0.5, 0.9]
    """
    if not 0 <= spread < 1:
        raise InputError(f"spread: {spread} is outside [0, 1); every beta must stay above 0")
    return np.linspace(0.5 - spread / 2, 0.5 + spread / 2, entities)


def reward(
    x: Float[Array, "*batch entities"],
    allocation: Float[Array, "*batch entities"],
    betas: Float[Array, " entities"],
) -> Float[Array, "*batch"]:
    """Compute R(x, a) without noise."""
    return (x * allocation + betas * jax.scipy.special.entr(allocation)).sum(-1)


class Examples(eqx.Module):
    """Samples (x, a, r, x') of one or several runs."""

    states: Float[Array, "*runs batch entities"]
    allocations: Float[Array, "*runs batch entities"]
    rewards: Float[Array, "*runs batch"]
    next_states: Float[Array, "*runs batch entities"]

    def __getitem__(self, index) -> "Examples":
        return jax.tree.map(lambda leaf: leaf[index], self)


def draw_examples(
    shape: tuple[int, ...],
    betas: Float[Array, " entities"],
    *,
    noise: float = 0.02,
    key: PRNGKeyArray,
) -> Examples:
    """Sample x, x' ~ U[0,1]^m, a ~ Dirichlet(1) and r = R(x, a) + noise.

    x, a and x' depend on the key but not on `betas`. `shape` is (examples,) or (runs, examples).
    """
    m = betas.shape[0]
    # One call for all random numbers: generators dominate the compile time.
    draws = jax.random.uniform(
        key, (*shape, 3 * m + 1), betas.dtype, minval=jnp.finfo(betas.dtype).tiny
    )
    states, next_states, shares, last = jnp.split(draws, [m, 2 * m, 3 * m], -1)
    shares = -jnp.log(shares)
    allocations = shares / shares.sum(-1, keepdims=True)
    shocks = noise * jax.scipy.special.ndtri(last[..., 0])
    return Examples(states, allocations, reward(states, allocations, betas) + shocks, next_states)


def permute_examples(real: Examples, count: int, *, key: PRNGKeyArray) -> Examples:
    """Augment to `count` examples: the real ones, then random ones with permuted entities.

    The same permutation applies to x, a and x'; the reward is copied with its noise.
    """
    *runs, kept, m = real.states.shape
    draws = jax.random.uniform(key, (*runs, count - kept, m + 1), real.states.dtype)
    picks = (draws[..., -1] * kept).astype(int)
    orders = jnp.argsort(draws[..., :m], -1)

    def move(values):
        chosen = jnp.take_along_axis(values, picks[..., None], -2)
        return jnp.concatenate([values, jnp.take_along_axis(chosen, orders, -1)], -2)

    rewards = jnp.take_along_axis(real.rewards, picks, -1)
    return Examples(
        move(real.states),
        move(real.allocations),
        jnp.concatenate([real.rewards, rewards], -1),
        move(real.next_states),
    )


def simplex_features(
    states: Float[Array, "*batch entities"], allocations: Float[Array, "*batch entities"]
) -> Float[Array, "*batch dimension"]:
    """Compute 3m + 1 features: x_i a_i, -a_i log a_i and a_i - 1/m for each entity i, and a bias."""
    m = states.shape[-1]
    bias = jnp.ones((*states.shape[:-1], 1), states.dtype)
    entropy = jax.scipy.special.entr(allocations)
    return jnp.concatenate([states * allocations, entropy, allocations - 1 / m, bias], -1)


def separate_basis(entities: int) -> Float[np.ndarray, "features dimension"]:
    """Return the basis in which every entity has its own parameters."""
    return np.eye(3 * entities + 1)


def tied_basis(entities: int) -> Float[np.ndarray, "features dimension"]:
    """Return the basis of the equivariant model: shared parameters of x a and -a log a, and a bias."""
    basis = np.zeros((3 * entities + 1, 3))
    basis[:entities, 0] = basis[entities : 2 * entities, 1] = basis[-1, 2] = 1
    return basis


def simplex_greedy(
    parameters: Float[Array, " features"], state: Float[Array, " entities"]
) -> Allocation:
    """Maximise Q over allocations: scores th1_i x_i + th3_i, temperatures max(th2_i, .02)."""
    m = state.shape[0]
    weight, temperature, offset = jnp.split(parameters[:-1], [m, 2 * m])
    return entropic_allocation(
        weight * state + offset, jnp.maximum(temperature, _MINIMUM_TEMPERATURE)
    )


def lspi_simplex(
    examples: Examples,
    basis: Float[Array, "features dimension"],
    gamma: float,
    *,
    iterations: int = 5,
    ridge: float = 1e-4,
) -> Float[Array, " features"]:
    """Run LSTD-Q policy iteration over allocations from theta = 0, for one run; traceable.

    The ridge penalises every parameter except the bias, relative to the LSTD-Q matrix normalised by the
    number of examples. A tied parameter is penalised once for each entity that shares it.
    """
    taken = simplex_features(examples.states, examples.allocations) @ basis
    count = taken.shape[0]
    penalty = ridge * basis[:-1].T @ basis[:-1]
    gram = taken.T @ taken / count + penalty
    target = taken.T @ examples.rewards / count

    def iterate(theta, _):
        allocations = jax.vmap(simplex_greedy, in_axes=(None, 0))(theta, examples.next_states)
        following = simplex_features(examples.next_states, allocations) @ basis
        return basis @ jnp.linalg.solve(gram - gamma * taken.T @ following / count, target), None

    start = jnp.zeros(basis.shape[0], taken.dtype)
    return jax.lax.scan(iterate, start, length=iterations)[0]
