"""What the command line can train, each as one frozen dataclass; nothing here starts JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from apportion.errors import InputError
from apportion.problems.portfolio.settings import PortfolioSettings

Method = Literal["pmtl", "mtl", "stl"]


@dataclass(frozen=True)
class BudgetSettings:
    """Share an advertising budget over campaigns: a simulated market, ready in a minute.

    Examples
    --------
    >>> BudgetSettings(method="mtl").tasks
    30
    """

    method: Method = "pmtl"
    """pmtl prioritises tasks, mtl draws them uniformly, stl learns from the first task alone."""
    universe: int = 60
    """Campaigns in the market."""
    held_out: int = 20
    """Campaigns never trained on, drawn by the seed."""
    periods: int = 80
    """Periods on record."""
    noise: float = 0.6
    """Standard deviation of the noise in the measured log efficiency."""
    tasks: int = 30
    """Number of tasks T."""
    task_size: int = 8
    """Campaigns in a task, m."""
    steps: int = 2000
    """Updates of the policy."""
    batch: int = 32
    """Consecutive periods in a batch, B."""
    hidden: int = 16
    """Units of the recurrent network."""
    learning_rate: float = 3e-3
    """Step size of Adam."""
    alpha: float = 0.5
    """Degree of prioritisation (pmtl)."""
    beta: float = 1.0
    """Correction of the sampling bias (pmtl)."""
    smoothing: float = 0.2
    """Weight of a task's old score when it is scored anew."""
    scorer: str = "max-deviation"
    """What a task is scored by: one of apportion.scorers.SCORERS."""
    chunk: int = 100
    """Steps between two looks at the run: progress, saving, stopping."""
    seed: int = 0
    """Decides market, tasks, held-out campaigns, first parameters and batches."""

    def __post_init__(self):
        for name in ("tasks", "task_size", "steps", "batch", "hidden", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.task_size > min(self.universe - self.held_out, self.held_out or self.universe):
            raise InputError(
                f"task_size {self.task_size}: {self.universe} campaigns with {self.held_out} held "
                "out are too few for it; choose smaller tasks or a larger universe"
            )
        if self.noise < 0 or self.learning_rate <= 0:
            raise InputError("noise must be >= 0 and learning_rate > 0")


@dataclass(frozen=True)
class PortfolioJob(PortfolioSettings):
    """Share wealth out among instruments, from a file of daily prices.

    k, eta and the number of updates (steps at most) are chosen on the last years before `until`.

    Examples
    --------
    >>> PortfolioJob(until="2019-01-01").prices is None
    True
    """

    steps: int = 4000
    """Updates, at most (see validation): of the policy, or of each task (see protocol)."""
    prices: Path | None = None
    """CSV or Parquet file of daily prices; none takes the 20 embedded stocks."""
    until: str | None = None
    """Train on days before this one only; what comes after is backtested."""
    validation: int = 3
    """Years at the end of the training period on which k, eta and the number of updates are chosen by
    the Sharpe ratio, with policies trained before each; 0 takes k, eta and steps as given."""
    validation_members: int = 1
    """Policies trained for each of those years; as many as `members` is surest, and takes longest."""
    validation_instruments: int = 0
    """Instruments kept from the training of these policies, for the choice to be judged on."""
    chunk: int = 100
    """Steps between two looks at the run: progress, saving, stopping."""

    def __post_init__(self):
        super().__post_init__()
        for name, least in (
            ("validation", 0),
            ("validation_instruments", 0),
            ("validation_members", 1),
        ):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")


@dataclass(frozen=True)
class DemoSettings:
    """The main job in small, on the 20 embedded stocks: train, backtest, say what held."""

    experiments: int = 5
    """Independent draws of held-out stocks and tasks."""
    steps: int = 2500
    """Updates of every policy, whatever its method."""
    tasks: int = 20
    """Tasks T of a multi-task policy."""
    seed: int = 0
    """Decides everything random."""

    def __post_init__(self):
        for name in ("experiments", "steps", "tasks"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
