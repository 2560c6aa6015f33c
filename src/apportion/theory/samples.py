"""Samples of finite tasks as counts: visits n(x, a), moves n(x, a, y) and summed rewards.

State-action pairs are drawn independently and uniformly, so that a pool of the tasks' samples is a
sample of the average MDP; a pool of per-task trajectories would not be.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from apportion.theory.mdp import MDP


@dataclass(frozen=True)
class Counts:
    """Everything least squares uses of a sample of a finite MDP."""

    visits: Float[np.ndarray, "*batch states actions"]
    moves: Float[np.ndarray, "*batch states actions states"]
    rewards: Float[np.ndarray, "*batch states actions"]

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.visits + other.visits, self.moves + other.moves, self.rewards + other.rewards
        )

    def pooled(self) -> "Counts":
        """The counts of all tasks (the last leading axis) together."""
        return Counts(self.visits.sum(-3), self.moves.sum(-4), self.rewards.sum(-3))


def draw_counts(mdp: MDP, samples: int, *, noise: float = 0.1, rng: np.random.Generator) -> Counts:
    """`samples` independent transitions of each MDP of a stack, already counted.

    >>> from apportion.theory.mdp import random_family
    >>> family = random_family(states=3, actions=2, tasks=4, spread=0.1, gamma=0.5)
    >>> draw_counts(family, 60, rng=np.random.default_rng(0)).visits.sum((1, 2)).tolist()
    [60.0, 60.0, 60.0, 60.0]
    """
    lead, pairs = mdp.reward.shape[:-2], mdp.states * mdp.actions
    visits = rng.multinomial(samples, np.full(pairs, 1 / pairs), lead).reshape(mdp.reward.shape)
    # Rows sum to 1 only up to rounding, which NumPy refuses beyond the last entry.
    kernel = mdp.kernel / mdp.kernel.sum(-1, keepdims=True)
    moves = rng.multinomial(visits, kernel)
    shocks = noise * np.sqrt(visits) * rng.standard_normal(visits.shape)
    return Counts(visits.astype(float), moves.astype(float), visits * mdp.reward + shocks)


@dataclass(frozen=True)
class Transitions:
    """Samples of several finite tasks, a row each."""

    task: Int[np.ndarray, " batch"]
    state: Int[np.ndarray, " batch"]
    action: Int[np.ndarray, " batch"]
    reward: Float[np.ndarray, " batch"]
    next_state: Int[np.ndarray, " batch"]


def draw_transitions(
    family: MDP, samples: int, *, noise: float = 0.1, seed: int = 0
) -> Transitions:
    """`samples` independent transitions of each task of a family, row by row."""
    rng = np.random.default_rng(seed)
    task = np.repeat(np.arange(len(family)), samples)
    state = rng.integers(0, family.states, task.size)
    action = rng.integers(0, family.actions, task.size)
    reached = family.kernel[task, state, action].cumsum(-1)
    following = (rng.uniform(size=(task.size, 1)) > reached[:, :-1]).sum(-1)
    reward = family.reward[task, state, action] + noise * rng.standard_normal(task.size)
    return Transitions(task, state, action, reward, following)
