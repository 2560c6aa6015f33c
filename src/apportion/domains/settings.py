"""What every domain's settings have in common: Algorithm 1's own, and how they become its parts.

A domain's settings extend `TrainingSettings` with fields of their own. Nothing here starts JAX: the
same dataclass is the Python argument, the command line and the settings file.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_type_hints

from apportion.errors import InputError, check_positive
from apportion.runs.settings import check_value

if TYPE_CHECKING:
    from apportion.priority import Priority
    from apportion.scorers import Scorer
    from apportion.tasks import Task

Method = Literal["pmtl", "mtl", "stl"]
METHOD_NAMES: dict[str, str] = {"pmtl": "P-MTL", "mtl": "MTL", "stl": "STL"}
"""The methods as tables and figures call them."""

ScorerName = Literal[
    "max-deviation", "mean-deviation", "reward-variance", "gradient-norm", "realised-gain"
]


@dataclass(frozen=True)
class TrainingSettings:
    """Algorithm 1's settings, which all domains share.

    Examples
    --------
    >>> TrainingSettings(method="mtl").prioritisation
    0.0
    """

    method: Method = "pmtl"
    """pmtl prioritises tasks, mtl draws them uniformly, stl learns from the first task alone."""
    tasks: int = 30
    """Number of tasks T."""
    steps: int = 1000
    """Updates of the policy."""
    alpha: float = 0.5
    """Degree of prioritisation (pmtl)."""
    beta: float = 1.0
    """Correction of the sampling bias (pmtl)."""
    smoothing: float = 0.2
    """Weight of a task's old score when it is scored anew."""
    scorer: ScorerName = "max-deviation"
    """What a task is scored by."""
    members: int = 1
    """Policies trained from different seeds, whose allocations are averaged."""
    seed: int = 0
    """Decides everything random."""

    def __post_init__(self):
        for name, hint in get_type_hints(type(self)).items():
            check_value(getattr(self, name), hint, name)
        check_seed(self.seed)
        self.check_at_least(1, "tasks", "steps", "members")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if self.method != "pmtl" and value != getattr(type(self), name):
                raise InputError(
                    f"{name} is {value}, which is ignored by method {self.method}, which draws tasks "
                    "evenly; leave it out"
                )

    def check_at_least(self, minimum: int, *names: str) -> None:
        """Refuse settings below a minimum."""
        for name in names:
            if getattr(self, name) < minimum:
                value = getattr(self, name)
                raise InputError(f"{name} is {value}; it must be at least {minimum}")

    @property
    def prioritisation(self) -> float:
        """The alpha that the method uses: 0, uniform, for all but P-MTL."""
        return self.alpha if self.method == "pmtl" else 0.0

    def priority(self, first_score: float = 1.0) -> "Priority":
        """How the next task is drawn; every task's score is `first_score` before its first batch."""
        from apportion.priority import Priority

        return Priority(self.prioritisation, self.beta, self.smoothing, first_score)

    def scorer_function(self) -> "Scorer":
        """What a task is scored by, as a function."""
        from apportion.scorers import SCORERS

        return SCORERS[self.scorer]

    def trained_tasks(self, tasks: "Task") -> "Task":
        """The tasks that the method learns from: all, or the first alone."""
        return tasks[:1] if self.method == "stl" else tasks


def check_seed(seed: int) -> None:
    """Refuse a seed that is no 32-bit number: every generator takes those, and no other."""
    if not 0 <= seed < 2**32:
        raise InputError(f"seed is {seed}; it must be a whole number from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class ProblemSettings(TrainingSettings):
    """Settings of a domain that is trained on random tasks of its problem, `Domain.problem`."""

    task_size: int = 4
    """Entities in a task, m."""
    batch: int = 16
    """Consecutive periods in a batch, B."""
    hidden: int = 16
    """Units of the recurrent network."""
    learning_rate: float = 3e-3
    """Step size of Adam."""
    chunk: int = 100
    """Steps between two saves."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "task_size", "batch", "hidden", "chunk")
        check_positive(learning_rate=self.learning_rate)


@dataclass(frozen=True)
class ProblemOptions:
    """Which tasks to test."""

    seed: int = 1000
    """Draws the tasks and their episodes."""
