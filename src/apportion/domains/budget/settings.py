"""Settings of the advertising market. Importing this module does not import JAX."""

from dataclasses import dataclass

from apportion.domains.settings import ProblemSettings
from apportion.errors import InputError


@dataclass(frozen=True)
class BudgetSettings(ProblemSettings):
    """Divide an advertising budget among campaigns of a simulated market.

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
    """Campaigns held out from training, selected by the seed."""
    periods: int = 80
    """Periods in the record."""
    noise: float = 0.6
    """Standard deviation of the noise in the measured log efficiency."""
    task_size: int = 8
    """Campaigns per task, m."""
    batch: int = 32
    """Consecutive periods per batch, B."""

    def __post_init__(self):
        super().__post_init__()
        if self.task_size > min(self.universe - self.held_out, self.held_out or self.universe):
            raise InputError(
                f"task_size {self.task_size}: {self.universe} campaigns with {self.held_out} held out "
                "are not enough; choose smaller tasks or a larger universe"
            )
        self.check_at_least(0, "noise")
