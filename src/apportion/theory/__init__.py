"""The theory as a calculator: finite MDPs, concentrability, task distance, the bound, whether to pool."""

from apportion.theory.bound import Bound, error_bound
from apportion.theory.concentrability import (
    Concentrability,
    concentrability,
    contraction,
    stationary_constant,
)
from apportion.theory.distance import (
    Distance,
    EmpiricalDistance,
    bellman_difference,
    distance_by_enumeration,
    distance_upper_bound,
    empirical_distance,
    task_distance,
)
from apportion.theory.estimation import (
    LearningConstants,
    LearningError,
    learning_error,
    samples_needed,
)
from apportion.theory.mdp import MDP, every_policy, norm, random_family
from apportion.theory.pooling import Pooling, TaskAnswer, should_pool
from apportion.theory.samples import Counts, Transitions, draw_counts, draw_transitions
from apportion.theory.theorem import TaskCount, Terms, TransferConstants, corollary_2

__all__ = [
    "MDP",
    "Bound",
    "Concentrability",
    "Counts",
    "Distance",
    "EmpiricalDistance",
    "LearningConstants",
    "LearningError",
    "Pooling",
    "TaskAnswer",
    "TaskCount",
    "Terms",
    "TransferConstants",
    "Transitions",
    "bellman_difference",
    "concentrability",
    "contraction",
    "corollary_2",
    "distance_by_enumeration",
    "distance_upper_bound",
    "draw_counts",
    "draw_transitions",
    "empirical_distance",
    "error_bound",
    "every_policy",
    "learning_error",
    "norm",
    "random_family",
    "samples_needed",
    "should_pool",
    "stationary_constant",
    "task_distance",
]
