"""Least-squares policy iteration (LSPI) on finite MDPs.

Three forms: pathwise LSTD of V with a greedy step in the model, as in Theorem 1; the same from counts of
transitions; and LSTD of Q with ridge from counts. All are batched over independent runs and compute in
float64 without changing the caller's JAX settings.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.theory.mdp import MDP, Policy


def in_float64(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jit a function to run in float64 and return NumPy arrays, without changing the JAX settings.

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


def pathwise_lstd(
    features: Float[Array, "time dimension"], rewards: Float[Array, " time"], gamma: float
) -> Float[Array, " dimension"]:
    """Compute LSTD on one path: pinv(Phi' (Phi - gamma Phi+)) Phi' r.

    Phi+ is Phi shifted by one with a zero last row, which makes the empirical operator a contraction.
    """
    following = jnp.concatenate([features[1:], jnp.zeros_like(features[:1])])
    return jnp.linalg.pinv(features.T @ (features - gamma * following)) @ (features.T @ rewards)


class PathResult(eqx.Module):
    """Result of LSPI on V: policies pi_0 .. pi_K, and the clipped values of the first K."""

    policies: Int[np.ndarray, "*runs iterations_and_one states"]
    values: Float[np.ndarray, "*runs iterations states"]


@in_float64
def lspi_paths(
    kernel: Float[np.ndarray, "runs states actions states"],
    reward: Float[np.ndarray, "runs states actions"],
    features: Float[np.ndarray, "states dimension"],
    gamma: float,
    *,
    length: int,
    iterations: int,
    key: PRNGKeyArray,
) -> PathResult:
    """Run LSPI as in Theorem 1, on a stack of MDPs.

    pi_k is greedy in the MDP with respect to the clipped value of pi_{k-1} (initially 0). Its value is the
    LSTD estimate on a new stationary path of `length` samples of M^{pi_k}, clipped to +-V_max.
    """
    # Sample all random numbers here; a generator under vmap takes much longer to compile.
    draws = jax.random.uniform(key, (kernel.shape[0], iterations, length))
    phi = jnp.asarray(features)

    def one(kernel, reward, draws):
        v_max = jnp.abs(reward).max() / (1 - gamma)

        def greedy(value):
            return jnp.argmax(reward + gamma * kernel @ value, -1)

        def iterate(value, draws):
            policy = greedy(value)
            chain = jnp.take_along_axis(kernel, policy[:, None, None], 1)[:, 0]
            path = _stationary_path(chain, draws)
            gained = jnp.take_along_axis(reward, policy[:, None], 1)[:, 0][path]
            value = jnp.clip(phi @ pathwise_lstd(phi[path], gained, gamma), -v_max, v_max)
            return value, (policy, value)

        last, (policies, values) = jax.lax.scan(iterate, jnp.zeros(reward.shape[0]), draws)
        return jnp.concatenate([policies, greedy(last)[None]]), values

    # `in_float64` converts these to NumPy arrays.
    found: Any = jax.vmap(one)(kernel, reward, draws)
    return PathResult(*found)


def _stationary_path(chain, draws):
    states = chain.shape[0]
    rho = jnp.linalg.solve((jnp.eye(states) - chain + 1).T, jnp.ones(states))
    # The next state of every state for each draw, so that the scan is one look-up per step. The last
    # cumulative sum can round below 1; omitting it keeps the state in range.
    leads = (draws[:, None, None] > jnp.cumsum(chain, -1)[:, :-1]).sum(-1)
    first = (draws[0] > jnp.cumsum(rho)[:-1]).sum()

    def step(state, lead):
        return lead[state], state

    # The draw of the first state is not used for a transition.
    return jax.lax.scan(step, first, jnp.roll(leads, -1, 0))[1]


class FiniteResult(eqx.Module):
    """Result of LSPI on Q."""

    action_values: Float[np.ndarray, "*runs states actions"]
    policy: Int[np.ndarray, "*runs states"]


def lspi_finite(
    visits: Float[np.ndarray, "*runs states actions"],
    moves: Float[np.ndarray, "*runs states actions states"],
    rewards: Float[np.ndarray, "*runs states actions"],
    features: Float[np.ndarray, "states actions dimension"],
    gamma: float,
    *,
    iterations: int = 20,
    ridge: float = 1e-6,
) -> FiniteResult:
    """Run LSTD-Q policy iteration from counts of visits and transitions and from summed rewards.

    On a finite MDP these are sufficient statistics for any features. The statistics of pooled tasks are
    sums over the tasks.

    Parameters
    ----------
    ridge
        Added to the diagonal of the LSTD-Q matrix, which is normalised by the number of samples.

    Examples
    --------
    >>> visits, rewards = np.ones((1, 2)), np.array([[0.0, 1.0]])
    >>> result = lspi_finite(visits, visits[..., None], rewards, np.eye(2)[None], 0.5, ridge=1e-9)
    >>> result.policy.tolist(), result.action_values.round(3).tolist()
    ([1], [[1.0, 2.0]])
    """
    lead = visits.shape[:-2]
    states, actions, dimension = features.shape
    parameters = _finite(
        visits.reshape(-1, states, actions),
        moves.reshape(-1, states * actions, states),
        rewards.reshape(-1, states, actions),
        features,
        gamma,
        ridge,
        iterations,
    ).reshape(*lead, dimension)
    action_values = np.einsum("xad,...d->...xa", features, parameters)
    return FiniteResult(action_values, action_values.argmax(-1))


@in_float64
def _finite(visits, moves, rewards, features, gamma, ridge, iterations: int):
    flat = jnp.asarray(features).reshape(-1, features.shape[-1])

    def one(visits, moves, rewards):
        total = visits.sum()
        left = flat.T * (visits.ravel() / total)
        gram = left @ flat + ridge * jnp.eye(flat.shape[1])
        onward = flat.T @ (moves / total)
        target = flat.T @ (rewards.ravel() / total)

        def greedy(theta):
            return jnp.argmax(features @ theta, -1)

        def iterate(carry):
            theta, policy, _, iteration = carry
            followed = jnp.take_along_axis(features, policy[:, None, None], 1)[:, 0]
            theta = jnp.linalg.solve(gram - gamma * onward @ followed, target)
            following = greedy(theta)
            return theta, following, (following != policy).any(), iteration + 1

        # If the policy does not change, later iterations do not change it either.
        start = jnp.zeros(flat.shape[1])
        carry = (start, greedy(start), jnp.array(True), 0)
        return jax.lax.while_loop(lambda c: c[2] & (c[3] < iterations), iterate, carry)[0]

    features = jnp.asarray(features)
    return jax.vmap(one)(visits, moves, rewards)


@dataclass(frozen=True)
class Moves:
    """Counts of transitions between states, and summed rewards by state, for one policy per family."""

    counts: Float[np.ndarray, "runs states states"]
    rewards: Float[np.ndarray, "runs states"]


Sampling = Callable[[MDP, Policy, int, np.random.Generator], Moves]
"""Function that samples N moves per task of families (runs, tasks) under one policy per family."""


def lspi_from_moves(
    family: MDP,
    features: Float[np.ndarray, "states dimension"],
    sampling: Sampling,
    *,
    samples: int,
    iterations: int,
    rng: np.random.Generator,
) -> PathResult:
    """Run LSPI on the average MDP of each family: greedy step in the model, LSTD of V on sampled moves.

    Theorem 1 samples one path of the average MDP, with the task sampled at every step (`one_path`). The
    alternatives are `independent_draws` of states, `separate_paths` of the tasks, and the noise-free
    `limit`. LSTD needs only the counts of transitions and the summed rewards by state.

    >>> from apportion.theory.mdp import random_family
    >>> family = random_family(states=3, actions=2, tasks=4, spread=0.0, gamma=0.5, runs=2)
    >>> rng = np.random.default_rng(0)
    >>> found = lspi_from_moves(family, np.eye(3), limit, samples=9, iterations=30, rng=rng)
    >>> bool((found.policies[:, -1] == family.average().optimal()[0]).all())
    True
    """
    average = family.average()
    most = average.value_bound[:, None]
    value = np.zeros((len(family), family.states))
    policies, values = [average.greedy(value)], []
    for _ in range(iterations):
        moves = sampling(family, policies[-1], samples, rng)
        system = moves.counts.sum(-1)[..., None] * np.eye(family.states)
        matrix = features.T @ (system - family.gamma * moves.counts) @ features
        theta = np.linalg.pinv(matrix) @ (moves.rewards @ features)[..., None]
        value = np.clip((features @ theta)[..., 0], -most, most)
        values.append(value)
        policies.append(average.greedy(value))
    return PathResult(np.stack(policies, 1), np.stack(values, 1))


def one_path(family: MDP, policy: Policy, samples: int, rng: np.random.Generator) -> Moves:
    """Sample one path of the average MDP with the samples of all tasks, as in Theorem 1."""
    average = family.average()
    chain, reward = average.under(policy)
    counts = _walk(chain, average.stationary(policy), samples * family.kernel.shape[1], rng)
    return Moves(counts, counts.sum(-1) * reward)


def separate_paths(family: MDP, policy: Policy, samples: int, rng: np.random.Generator) -> Moves:
    """Sample one path of each task and pool them, as for tasks with separate records."""
    chain, reward = family.under(policy[:, None])
    counts = _walk(chain, family.stationary(policy[:, None]), samples, rng)
    return Moves(counts.sum(1), (counts.sum(-1) * reward).sum(1))


def independent_draws(family: MDP, policy: Policy, samples: int, rng: np.random.Generator) -> Moves:
    """Sample states uniformly, and one move of the average MDP from each."""
    average, states = family.average(), family.states
    chain, reward = average.under(policy)
    total = samples * family.kernel.shape[1]
    visits = rng.multinomial(total, np.full(states, 1 / states), len(family))
    counts = rng.multinomial(visits, chain / chain.sum(-1, keepdims=True)).astype(float)
    return Moves(counts, visits * reward)


def limit(family: MDP, policy: Policy, samples: int, rng: np.random.Generator) -> Moves:
    """Return the limit of `one_path`: stationary probabilities instead of counts."""
    average = family.average()
    chain, reward = average.under(policy)
    share = average.stationary(policy)
    return Moves(share[..., None] * chain, share * reward)


def _walk(
    chain: Float[np.ndarray, "*batch states states"],
    start: Float[np.ndarray, "*batch states"],
    length: int,
    rng: np.random.Generator,
) -> Float[np.ndarray, "*batch states states"]:
    """Count the moves along one path of each chain."""
    states = chain.shape[-1]
    # The last cumulative sum can round below 1; omitting it keeps the state in range.
    ahead = chain.cumsum(-1).reshape(-1, states, states)[..., :-1]
    first = start.cumsum(-1).reshape(-1, states)[:, :-1]
    each = np.arange(len(ahead))
    state = (rng.uniform(size=(len(ahead), 1)) > first).sum(-1)
    draws = rng.uniform(size=(length, len(ahead), 1))
    counts = np.zeros((len(ahead), states, states))
    for draw in draws:
        following = (draw > ahead[each, state]).sum(-1)
        counts[each, state, following] += 1
        state = following
    return counts.reshape(chain.shape)
