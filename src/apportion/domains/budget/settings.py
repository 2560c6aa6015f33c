"""The settings of the advertising market, as one frozen dataclass; nothing here starts JAX."""

from dataclasses import dataclass

from apportion.domains.settings import ProblemSettings
from apportion.errors import InputError, check_positive


@dataclass(frozen=True)
class BudgetSettings(ProblemSettings):
    """Share an advertising budget over campaigns: a simulated market, ready in a minute.

    Examples
    --------
    >>> BudgetSettings(method="mtl").tasks
    30
    """

    steps: int = 2000
    """Updates of the policy."""
    universe: int = 60
    """Campaigns in the market."""
    held_out: int = 20
    """Campaigns never trained on, drawn by the seed."""
    periods: int = 80
    """Periods on record."""
    noise: float = 0.6
    """Standard deviation of the noise in the measured log efficiency."""
    task_size: int = 8
    """Campaigns in a task, m."""
    batch: int = 32
    """Consecutive periods in a batch, B."""

    def __post_init__(self):
        super().__post_init__()
        if self.task_size > min(self.universe - self.held_out, self.held_out or self.universe):
            raise InputError(
                f"task_size {self.task_size}: {self.universe} campaigns with {self.held_out} held "
                "out are too few for it; choose smaller tasks or a larger universe"
            )
        self.check_at_least(0, "noise")
        check_positive(learning_rate=self.learning_rate)
