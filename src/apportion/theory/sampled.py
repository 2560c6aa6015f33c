"""LSPI in V-form from moves counted on the average MDP's policies, however the moves were sampled.

Theorem 1 samples one path of the average MDP, the task drawn anew at every step. Beside it: independent
draws of a state, one path of each task by itself, and the limit without any noise. Many families at
once; LSTD needs of a sample only how often x led to y, and the rewards gathered in x.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from apportion.theory.lspi import PathResult
from apportion.theory.mdp import MDP, Policy


@dataclass(frozen=True)
class Moves:
    """How often each state led to each, and the rewards gathered in it, for one policy of each family."""

    counts: Float[np.ndarray, "runs states states"]
    rewards: Float[np.ndarray, "runs states"]


Sampling = Callable[[MDP, Policy, int, np.random.Generator], Moves]
"""Moves of families (runs, tasks) under a policy each, N samples a task."""


def lspi_from_moves(
    family: MDP,
    features: Float[np.ndarray, "states dimension"],
    sampling: Sampling,
    *,
    samples: int,
    iterations: int,
    rng: np.random.Generator,
) -> PathResult:
    """Learn on the average MDP of each family: greedy step in the model, LSTD of V on sampled moves.

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
    """One path of the average MDP, as long as all tasks' samples together: Theorem 1's."""
    average = family.average()
    chain, reward = average.under(policy)
    counts = _walk(chain, average.stationary(policy), samples * family.kernel.shape[1], rng)
    return Moves(counts, counts.sum(-1) * reward)


def separate_paths(family: MDP, policy: Policy, samples: int, rng: np.random.Generator) -> Moves:
    """A path of each task by itself, pooled: what is at hand where every task has its own record."""
    chain, reward = family.under(policy[:, None])
    counts = _walk(chain, family.stationary(policy[:, None]), samples, rng)
    return Moves(counts.sum(1), (counts.sum(-1) * reward).sum(1))


def independent_draws(family: MDP, policy: Policy, samples: int, rng: np.random.Generator) -> Moves:
    """States drawn uniformly, each with one move of the average MDP."""
    average, states = family.average(), family.states
    chain, reward = average.under(policy)
    total = samples * family.kernel.shape[1]
    visits = rng.multinomial(total, np.full(states, 1 / states), len(family))
    counts = rng.multinomial(visits, chain / chain.sum(-1, keepdims=True)).astype(float)
    return Moves(counts, visits * reward)


def limit(family: MDP, policy: Policy, samples: int, rng: np.random.Generator) -> Moves:
    """What the one path converges to: stationary shares in place of counts."""
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
    """Moves counted along one path of each chain."""
    states = chain.shape[-1]
    # The last cumulative sum may round below 1, and is left out so that the state stays in range.
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
