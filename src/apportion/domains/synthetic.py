"""The paper's synthetic problem: R(x, a) = sum_i x_i a_i - beta_i a_i log a_i, with x_i ~ U[0, 1].

The betas are evenly spaced around 1/2 over a range eps, the stand-in for the distance between the
orderings of the entities. The best allocation is in closed form up to one multiplier, and so is the
greedy step of `lspi_simplex`, the LSPI of Figure 1.
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
    """The allocation that maximises sum_i s_i a_i - v_i a_i log a_i: a softmax with a v for each entity.

    a_i = exp((s_i - lam) / v_i - 1), with the multiplier lam by Newton's method on log sum_i a_i = 0
    from max(s - v). There the sum is at least 1, and log sum is convex and decreasing in lam, so the
    steps climb to the root without ever passing it, and nothing overflows.

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
    """beta_i evenly spaced on [.5 - eps/2, .5 + eps/2].

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
    """R(x, a), without noise."""
    return (x * allocation + betas * jax.scipy.special.entr(allocation)).sum(-1)


class Examples(eqx.Module):
    """Draws (x, a, r, x') of the state-action space, for one run or many."""

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
    """x, x' ~ U[0,1]^m, a ~ Dirichlet(1), r = R(x, a) + noise; the same key draws the same x, a, x'.

    `shape` is the number of examples, or of runs and examples.
    """
    m = betas.shape[0]
    # One draw for all: generators are by far the slowest part of this to compile.
    draws = jax.random.uniform(
        key, (*shape, 3 * m + 1), betas.dtype, minval=jnp.finfo(betas.dtype).tiny
    )
    states, next_states, shares, last = jnp.split(draws, [m, 2 * m, 3 * m], -1)
    shares = -jnp.log(shares)
    allocations = shares / shares.sum(-1, keepdims=True)
    shocks = noise * jax.scipy.special.ndtri(last[..., 0])
    return Examples(states, allocations, reward(states, allocations, betas) + shocks, next_states)


def permute_examples(real: Examples, count: int, *, key: PRNGKeyArray) -> Examples:
    """Augment to `count`: the real examples, then random picks of them with the entities permuted.

    One permutation moves x, a and x' together; the reward is copied with its noise.
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
    """{x_i a_i}, {-a_i log a_i}, {a_i - 1/m} for each entity i, and a bias: 3m + 1 features."""
    m = states.shape[-1]
    bias = jnp.ones((*states.shape[:-1], 1), states.dtype)
    entropy = jax.scipy.special.entr(allocations)
    return jnp.concatenate([states * allocations, entropy, allocations - 1 / m, bias], -1)


def separate_basis(entities: int) -> Float[np.ndarray, "features dimension"]:
    """Every entity has parameters of its own."""
    return np.eye(3 * entities + 1)


def tied_basis(entities: int) -> Float[np.ndarray, "features dimension"]:
    """All entities share their parameters: the equivariant model, {x a}, {-a log a} and the bias."""
    basis = np.zeros((3 * entities + 1, 3))
    basis[:entities, 0] = basis[entities : 2 * entities, 1] = basis[-1, 2] = 1
    return basis


def simplex_greedy(
    parameters: Float[Array, " features"], state: Float[Array, " entities"]
) -> Allocation:
    """The allocation that maximises Q: scores th1_i x_i + th3_i, temperatures th2_i kept above .02."""
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
    """LSTD-Q policy iteration over allocations, from theta = 0; traceable, one run.

    The ridge weighs every feature's parameter but the bias, on the LSTD-Q matrix normalised by the
    number of examples; tied parameters are weighed once for each entity that shares them.
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
