"""Theorems 1 and 1' and Corollary 2 as formulas, term by term.

||V_t* - V_t^{pi_K}||_sigma is at most
Theorem 1:  2/(1-g)^2 { sqrt(C'') e + g^{(K-1)/2} R_max + 3 eps sqrt(2 C'_t) }
Theorem 1': 2g/(1-g)^2 sqrt(C'') e + 2 R_max g^K/(1-g) + 2 eps sqrt(C'_t)/(1-g)
"""

from dataclasses import dataclass

import numpy as np

from apportion.errors import InputError
from apportion.tasks import count_tasks
from apportion.theory.estimation import LearningError, Number


@dataclass(frozen=True)
class Terms:
    """A bound's parts: they add up to `total`."""

    approximation: Number
    estimation: Number
    propagation: Number
    task_distance: Number

    @property
    def total(self) -> Number:
        """The bound."""
        return self.approximation + self.estimation + self.propagation + self.task_distance


def _carry(constant: Number, error: Number) -> Number:
    """Their product; infinite with the constant even at error 0, which mu then fails to witness."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(constant), np.inf, constant * np.asarray(error))[()]


@dataclass(frozen=True)
class TransferConstants:
    """What carries errors and distances to suboptimality: C'_t, C'', eps, R_max, gamma."""

    gamma: float
    reward_bound: Number
    first: Number
    """C'_t, with the kernel of the task."""
    second: Number
    """C'', with the kernel of the MDP trained on."""
    distance: Number
    """eps."""

    def theorem_1(self, error: LearningError, iterations: int) -> Terms:
        """The paper's bound, with the constants that make it true."""
        scale = 2 / (1 - self.gamma) ** 2
        return Terms(
            _carry(scale * np.sqrt(self.second), error.approximation),
            _carry(scale * np.sqrt(self.second), error.estimation),
            scale * self.gamma ** ((iterations - 1) / 2) * self.reward_bound,
            _carry(scale * 3 * np.sqrt(2 * self.first), self.distance),
        )

    def theorem_1_prime(self, error: LearningError, iterations: int) -> Terms:
        """The tighter bound."""
        g = self.gamma
        scale = 2 * g / (1 - g) ** 2
        return Terms(
            _carry(scale * np.sqrt(self.second), error.approximation),
            _carry(scale * np.sqrt(self.second), error.estimation),
            2 * self.reward_bound * g**iterations / (1 - g),
            _carry(2 * np.sqrt(self.first) / (1 - g), self.distance),
        )


@dataclass(frozen=True)
class TaskCount:
    """Corollary 2: how many tasks a universe holds, and the paper's lower bound on it."""

    tasks: int
    """C(M, m)."""
    at_least: float
    """(M/m)^m."""


def corollary_2(universe: int, size: int) -> TaskCount:
    """T = C(M, m) >= (M/m)^m; exponential in m while m is well below M, and it peaks at m = M/2.

    Overlapping subsets are dependent, so that the gain in samples is less than T suggests.

    >>> corollary_2(50, 10)
    TaskCount(tasks=10272278170, at_least=9765625.0)
    """
    if not 1 <= size <= universe:
        raise InputError(f"size: {size} does not fit a universe of {universe} entities")
    return TaskCount(count_tasks(universe, size), (universe / size) ** size)
