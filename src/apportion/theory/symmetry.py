"""When the best policy is equivariant: entities with a kernel each, a joint reward, one resource.

The paper: "if the transition kernels can be factored into independent and identical transition kernels
across entities, then the optimal policy is indeed permutation invariant". Here such problems are small
enough to be solved exactly: m entities of k states each, one of a few ways to share the resource out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np
from jaxtyping import Float, Int

from apportion.errors import InputError
from apportion.theory.mdp import MDP, Policy

Rewards = Callable[[tuple[int, ...], tuple[float, ...]], float]
"""What the entities' states and shares earn together."""


@dataclass(frozen=True)
class EntityMDP:
    """A joint MDP with the states and allocations its numbers stand for."""

    mdp: MDP
    states: tuple[tuple[int, ...], ...]
    allocations: tuple[tuple[float, ...], ...]

    def moved(self, order: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Where each state and each allocation goes when entity i takes the place of order[i]."""

        def places(what: tuple[tuple[float, ...], ...]) -> np.ndarray:
            return np.array([what.index(tuple(one[i] for i in order)) for one in what])

        return places(self.states), places(self.allocations)

    def asymmetry(self) -> float:
        """The largest |Q*(sigma x, sigma a) - Q*(x, a)|; at 0 the best choices move with the entities."""
        values = self.mdp.backup(self.mdp.optimal()[1])
        gaps = []
        for order in permutations(range(len(self.states[0]))):
            states, allocations = self.moved(order)
            gaps.append(np.abs(values[np.ix_(states, allocations)] - values).max())
        return float(max(gaps))

    def equivariant_policies(self) -> Int[np.ndarray, "policies states"]:
        """Every deterministic policy with pi(sigma x) = sigma pi(x); there may be none."""
        moves = [self.moved(order) for order in permutations(range(len(self.states[0])))]
        first, choices = [], []
        for state in range(len(self.states)):
            if state == min(states[state] for states, _ in moves):
                first.append(state)
                # An order that leaves the state as it is must leave the choice as it is.
                fixing = [shares for states, shares in moves if states[state] == state]
                shares = range(len(self.allocations))
                choices.append([a for a in shares if all(move[a] == a for move in fixing)])
        found = []
        for chosen in product(*choices):
            policy = np.zeros(len(self.states), int)
            for state, choice in zip(first, chosen, strict=True):
                for states, shares in moves:
                    policy[states[state]] = shares[choice]
            found.append(policy)
        return np.array(found).reshape(-1, len(self.states))

    def lost_by_equivariance(self) -> float:
        """The most, over states, that the best deterministic equivariant policy falls short of V*."""
        policies: Policy = self.equivariant_policies()
        if not len(policies):
            return float("inf")
        return float((self.mdp.optimal()[1] - self.mdp.value(policies)).max(-1).min())


def entity_mdp(
    kernels: Float[np.ndarray, "entities states shares states"],
    allocations: list[tuple[float, ...]],
    reward: Rewards,
    gamma: float,
) -> EntityMDP:
    """The joint MDP of entities that move independently, each by its own state and share.

    Parameters
    ----------
    kernels
        P_i(y | x, s) of entity i, with s the number of its share among all shares that occur.
    allocations
        The ways to share the resource out.
    reward
        What states and shares earn.

    Examples
    --------
    >>> kernels = np.full((2, 2, 2, 2), 0.5)
    >>> def sales(states, shares):
    ...     return sum(x * a for x, a in zip(states, shares))
    >>> entity_mdp(kernels, [(1.0, 0.0), (0.0, 1.0)], sales, 0.5).asymmetry()
    0.0
    """
    levels = sorted({share for allocation in allocations for share in allocation})
    if kernels.shape[2] != len(levels):
        raise InputError(
            f"kernels: {kernels.shape[2]} shares, but the allocations hold {len(levels)}: {levels}"
        )
    count, local = kernels.shape[0], kernels.shape[1]
    states = tuple(product(range(local), repeat=count))
    joint = np.ones((len(states), len(allocations), len(states)))
    earned = np.zeros((len(states), len(allocations)))
    for (x, state), (a, allocation) in product(enumerate(states), enumerate(allocations)):
        following = np.ones(1)
        for i in range(count):
            following = np.outer(
                following, kernels[i, state[i], levels.index(allocation[i])]
            ).ravel()
        joint[x, a] = following
        earned[x, a] = reward(state, allocation)
    return EntityMDP(MDP(joint, earned, gamma), states, tuple(allocations))
