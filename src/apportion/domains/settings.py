"""Settings of Algorithm 1 that all domains share.

The settings of a domain extend `TrainingSettings`. The same dataclass is the argument in Python, the
options of the command line and the settings file. Importing this module does not import JAX.
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
"""Names of the methods in tables and figures."""

ScorerName = Literal[
    "max-deviation", "mean-deviation", "reward-variance", "gradient-norm", "realised-gain"
]


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of Algorithm 1.

    Examples
    --------
    >>> TrainingSettings(method="mtl").prioritisation
    0.0
    """

    method: Method = "pmtl"
    """pmtl prioritises tasks, mtl samples them uniformly, stl trains on the first task only."""
    tasks: int = 30
    """Number of tasks T."""
    steps: int = 1000
    """Updates of the policy."""
    alpha: float = 0.5
    """Degree of prioritisation (pmtl); 0 samples uniformly."""
    beta: float = 1.0
    """Exponent of the importance weights (pmtl); 1 corrects the sampling bias fully."""
    smoothing: float = 0.2
    """Weight of a task's previous score when its score is updated."""
    scorer: ScorerName = "max-deviation"
    """Score of a task."""
    members: int = 1
    """Policies trained from different seeds, whose allocations are averaged."""
    seed: int = 0
    """Seed of all random numbers."""

    def __post_init__(self):
        for name, hint in get_type_hints(type(self)).items():
            check_value(getattr(self, name), hint, name)
        check_seed(self.seed)
        self.check_at_least(1, "tasks", "steps", "members")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if self.method != "pmtl" and value != getattr(type(self), name):
                raise InputError(
                    f"{name} is {value}, but method {self.method} samples tasks uniformly and ignores it; "
                    "leave it out"
                )

    def check_at_least(self, minimum: int, *names: str) -> None:
        """Raise InputError if one of the settings is below a minimum."""
        for name in names:
            if getattr(self, name) < minimum:
                value = getattr(self, name)
                raise InputError(f"{name} is {value}; it must be at least {minimum}")

    @property
    def prioritisation(self) -> float:
        """The alpha that the method uses: 0 (uniform sampling) except for P-MTL."""
        return self.alpha if self.method == "pmtl" else 0.0

    def priority(self, first_score: float = 1.0) -> "Priority":
        """Return the task sampler; `first_score` is the initial score of every task."""
        from apportion.priority import Priority

        return Priority(self.prioritisation, self.beta, self.smoothing, first_score)

    def scorer_function(self) -> "Scorer":
        """Return the function that scores a task."""
        from apportion.scorers import SCORERS

        return SCORERS[self.scorer]

    def trained_tasks(self, tasks: "Task") -> "Task":
        """Return the tasks that the method trains on: all, or only the first."""
        return tasks[:1] if self.method == "stl" else tasks


def check_seed(seed: int) -> None:
    """Raise InputError unless the seed is an unsigned 32-bit integer, which every generator accepts."""
    if not 0 <= seed < 2**32:
        raise InputError(f"seed is {seed}; it must be a whole number from 0 to {2**32 - 1}")


@dataclass(frozen=True)
class ProblemSettings(TrainingSettings):
    """Settings of a domain that trains on random tasks of `Domain.problem`."""

    task_size: int = 4
    """Entities per task, m."""
    batch: int = 16
    """Consecutive periods per batch, B."""
    hidden: int = 16
    """Units of the recurrent network."""
    learning_rate: float = 3e-3
    """Step size of Adam."""
    chunk: int = 100
    """Updates between two saves."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "task_size", "batch", "hidden", "chunk")
        check_positive(learning_rate=self.learning_rate)


@dataclass(frozen=True)
class ProblemOptions:
    """Options of the test tasks."""

    seed: int = 1000
    """Seed of the tasks and their episodes."""
