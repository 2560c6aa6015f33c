"""Task distance: eps >= ||D_t^pi V^pi||_mu for every policy, with D_t^pi V = T_t^pi V - T^pi V.

Exactly by enumerating the A^S policies where they are few, as a rigorous upper bound otherwise, and
from samples where tasks are not finite.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from apportion.errors import InputError
from apportion.statistics import interval
from apportion.theory.concentrability import Distribution, check_distribution, contraction
from apportion.theory.mdp import MDP, Policy, Value, every_policy, norm

ENUMERABLE = 20_000
"""Policies up to this many are enumerated."""
_AT_ONCE = 200_000
"""Policies of all tasks together that are looked at in one piece."""


def bellman_difference(task: MDP, mdp: MDP, policy: Policy) -> Value:
    """d_t^pi = D_t^pi V^pi, with V^pi the policy's value in `mdp`."""
    value = mdp.value(policy)
    return task.operator(policy, value) - value


def distance_by_enumeration(task: MDP, mdp: MDP, mu: Distribution) -> Float[np.ndarray, "*batch"]:
    """Eps exactly: the largest ||d_t^pi||_mu over all deterministic policies.

    >>> one = MDP(np.ones((1, 1, 1)), np.zeros((1, 1)), 0.5)
    >>> other = MDP(np.ones((1, 1, 1)), np.ones((1, 1)), 0.5)
    >>> float(distance_by_enumeration(other, one, np.ones(1)))
    1.0
    """
    policies = every_policy(mdp.states, mdp.actions)
    lead = np.broadcast_shapes(task.reward.shape[:-2], mdp.reward.shape[:-2])
    policies = policies.reshape(len(policies), *(1,) * len(lead), mdp.states)
    # All policies of many families at once would fill the memory.
    pieces = np.array_split(policies, -(-len(policies) * math.prod(lead) // _AT_ONCE))
    largest = [norm(bellman_difference(task, mdp, piece), mu).max(0) for piece in pieces]
    return np.asarray(np.max(largest, 0))


def distance_upper_bound(task: MDP, mdp: MDP, mu: Distribution) -> float:
    """Eps from above, at a cost linear in the states and actions.

    In each state, the worst action of the smaller of two bounds on |dR + gamma dP V|: V anywhere in
    [V_lo, V_hi], or |dR| + gamma/2 ||dP||_1 span(V) with span(V) <= span(R) / (1 - gamma tau).
    """
    gamma = mdp.gamma
    gap_reward = task.reward - mdp.reward
    gap_kernel = task.kernel - mdp.kernel
    low = MDP(mdp.kernel, -mdp.reward, gamma).optimal()[1] * -1
    high = mdp.optimal()[1]
    rise, fall = np.maximum(gap_kernel, 0), np.minimum(gap_kernel, 0)
    most = gap_reward + gamma * (rise @ high + fall @ low)
    least = gap_reward + gamma * (rise @ low + fall @ high)
    interval = np.maximum(np.abs(most), np.abs(least))
    span = np.ptp(mdp.reward) / (1 - gamma * contraction(mdp.kernel))
    by_span = np.abs(gap_reward) + gamma / 2 * np.abs(gap_kernel).sum(-1) * span
    return float(norm(np.minimum(interval, by_span).max(-1), mu))


@dataclass(frozen=True)
class Distance:
    """A task's eps, and whether it is exact or an upper bound."""

    value: float
    exact: bool


def task_distance(task: MDP, mdp: MDP, mu: Distribution) -> Distance:
    """Eps of one task from the MDP trained on: exact where A^S <= 20,000, else from above."""
    check_distribution(mu, "mu", mdp.states)
    if task.reward.shape != mdp.reward.shape or task.gamma != mdp.gamma:
        raise InputError(
            f"task distance: {task.reward.shape} states and actions at gamma {task.gamma} against "
            f"{mdp.reward.shape} at gamma {mdp.gamma}; both MDPs must share all three"
        )
    if mdp.actions**mdp.states <= ENUMERABLE:
        return Distance(float(distance_by_enumeration(task, mdp, mu)), True)
    return Distance(distance_upper_bound(task, mdp, mu), False)


@dataclass(frozen=True)
class EmpiricalDistance:
    """What samples say about ||d_t||_mu where states are not finite, task by task.

    The Bellman difference of task t at a sample is (r + gamma V') - V, less its mean over the tasks.
    By Jensen its mean is at most ||d_t||_mu, and its root mean square, which adds the sampling noise,
    is at least that.
    """

    lower: Float[np.ndarray, " tasks"]
    upper: Float[np.ndarray, " tasks"]
    interval: Float[np.ndarray, "tasks 2"]
    """95 % bootstrap interval of the lower bound, over blocks of consecutive periods."""

    def summary(self) -> str:
        """One line a task."""
        rows = zip(self.lower, self.interval, self.upper, strict=True)
        return "\n".join(
            f"task {t}: distance between {low:.4g} [{ends[0]:.4g}, {ends[1]:.4g}] and {high:.4g}"
            for t, (low, ends, high) in enumerate(rows)
        )


def empirical_distance(
    rewards: Float[np.ndarray, "tasks time"],
    values: Float[np.ndarray, "tasks time"],
    next_values: Float[np.ndarray, "tasks time"],
    *,
    gamma: float,
    block: int = 1,
    resamples: int = 1000,
    seed: int = 0,
) -> EmpiricalDistance:
    """Task distance from samples: how the Bellman residual of one value function differs by task.

    Parameters
    ----------
    rewards, values, next_values
        R_t(x_n, a_n), V(x_n) and V(x_{n+1}) along each task's path, for one learned V.
    block
        Periods that are resampled together, for paths whose residuals are correlated.

    Examples
    --------
    >>> rewards = np.array([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    >>> empirical_distance(rewards, 0 * rewards, 0 * rewards, gamma=0.9).lower.tolist()
    [0.5, 0.5]
    """
    tasks, time = rewards.shape
    if not 0 < gamma < 1:
        raise InputError(f"gamma: {gamma} is outside (0, 1); choose a discount inside it")
    if tasks < 2 or not 1 <= block <= time:
        raise InputError(
            f"task distance: {tasks} tasks of {time} periods in blocks of {block}; at least two tasks "
            "and one block are needed"
        )
    residual = rewards + gamma * next_values - values
    if not np.isfinite(residual).all():
        raise InputError("task distance: rewards and values must be finite")
    difference = residual - residual.mean()
    blocks = difference[:, : time // block * block].reshape(tasks, -1, block).mean(-1)
    picks = np.random.default_rng(seed).integers(0, blocks.shape[1], (resamples, blocks.shape[1]))
    again = np.abs(blocks[:, picks].mean(-1))
    return EmpiricalDistance(
        np.abs(difference.mean(1)),
        np.sqrt((difference**2).mean(1)),
        np.array([interval(row) for row in again]),
    )
