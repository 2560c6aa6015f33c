"""Everything that decides a portfolio run, as one frozen dataclass that is also its command line.

The defaults are the practical policy: an ensemble that is shrunk to equal shares, trades part of
the way, and was penalised for straying from them. `PortfolioSettings.paper()` is the paper's. The
command line chooses k, eta and the updates anew on validation years.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from apportion.domains.settings import TrainingSettings
from apportion.errors import InputError

if TYPE_CHECKING:
    from apportion.priority import Priority

Protocol = Literal["per-policy", "per-task"]
Rebalance = Literal["daily", "weekly", "monthly"]


@dataclass(frozen=True)
class PortfolioSettings(TrainingSettings):
    """Settings of a portfolio run.

    Examples
    --------
    >>> PortfolioSettings.paper().updates
    18000
    >>> PortfolioSettings.paper(method="mtl", protocol="per-task", steps=300, tasks=5).updates
    1500
    """

    task_size: int = 10
    """Instruments in a task, m."""
    steps: int = 6000
    """Updates: of the policy, or of each task (see protocol)."""
    protocol: Protocol = "per-policy"
    """What `steps` counts: per-policy gives every method as many updates of its policy; per-task is
    the paper's, where a multi-task policy gets `steps` updates for each of its tasks."""
    members: int = 4
    """Policies trained from different seeds, whose allocations are averaged."""
    k: float = 0.5
    """Trust in the learned policy: the target is (1 - k)/m + k times its allocation."""
    eta: float = 0.1
    """Fraction of the way from what is held to the target that is traded each day."""
    tracking: float = 15.0
    """Penalty in the reward on the squared daily difference of log growth from equal shares."""
    window: int = 31
    """Days of history a decision sees, H."""
    batch: int = 109
    """Consecutive days in a batch, B."""
    hidden: int = 25
    """Units of the recurrent network."""
    learning_rate: float = 2.8e-4
    """Step size of Adam."""
    cost: float | Path = 0.0025
    """Commission c, a fraction of the value traded: one number, or a CSV file with columns ticker and
    cost, or ticker, buy and sell."""
    cash: bool = False
    """Let the policy hold cash, which pays no commission and no interest."""
    recency: float = 5e-5
    """How strongly batches favour recent days."""
    act_periods: int = 0
    """Days acted in the drawn task after each update, n_e; the batch's own write-back keeps memory
    fresh without it."""
    held_out: int = 0
    """Instruments never trained on, drawn by the seed."""
    max_weight: float = 1.0
    """The most wealth in one instrument, as a share."""
    min_weight: float = 0.0
    """The least wealth in each instrument, as a share."""
    group: Path | None = None
    """CSV file with columns ticker, group and limit: the most wealth in each group together, as a
    share; a ticker that it leaves out is in no group."""
    max_turnover: float = 2.0
    """The most that is traded at a time, bought and sold added up; 2 exchanges everything."""
    rebalance: Rebalance = "daily"
    """When the policy trades: daily, or on the first trading day of each week or month; it holds on
    all other days."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "task_size", "window", "batch", "hidden")
        self._check_weights()
        for name in ("k", "eta"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be between 0 and 1")
        if not isinstance(self.cost, Path) and not 0 <= self.cost < 0.5:
            raise InputError(
                f"cost is {self.cost}; it must be a fraction of at least 0 and below 0.5, or a file"
            )
        if self.tracking < 0 or self.learning_rate <= 0:
            raise InputError("tracking must be >= 0 and learning_rate > 0")

    def _check_weights(self) -> None:
        low, high, m = self.min_weight, self.max_weight, self.task_size
        if not 0 <= low < high <= 1:
            raise InputError(
                f"min_weight {low:g} and max_weight {high:g}: they must satisfy "
                "0 <= min_weight < max_weight <= 1"
            )
        if not self.cash and m * high < 1 - 1e-9:
            raise InputError(
                f"max_weight {high:g}: the {m} instruments of a task can then hold only "
                f"{m * high:.4g} of the wealth; choose at least {1 / m:.4g}, or a larger task_size"
            )
        if m * low > 1 + 1e-9:
            raise InputError(
                f"min_weight {low:g}: the {m} instruments of a task would need {m * low:.4g} of the "
                f"wealth; choose at most {1 / m:.4g}, or a smaller task_size"
            )
        if not 0 < self.max_turnover <= 2:
            raise InputError(
                f"max_turnover is {self.max_turnover:g}; it must be above 0 and at most 2, which "
                "exchanges everything"
            )

    @classmethod
    def paper(cls, **changes) -> "PortfolioSettings":
        """The paper's policy: one seed, the allocation as it is, no penalty, 18,000 updates."""
        plain = {"steps": 18_000, "members": 1, "k": 1.0, "eta": 1.0, "tracking": 0.0}
        return cls(**(plain | changes))

    @property
    def updates(self) -> int:
        """Gradient steps of one policy."""
        per_task = self.protocol == "per-task" and self.method != "stl"
        return self.steps * (self.tasks if per_task else 1)

    def selection(self, first_score: float | None = None) -> "Priority":
        """Scores begin at the largest deviation from equal shares there is."""
        return super().selection(1 - 1 / self.task_size if first_score is None else first_score)


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
    allow_jumps: bool = False
    """Take prices that move by more than half in a day, or just as a usual split moves them."""
    until: str | None = None
    """Train on days before this one only; what comes after is backtested."""
    validation: int = 3
    """Years at the end of the training period on which k, eta and the number of updates are chosen by
    the Sharpe ratio, with policies trained before each; 0 takes k, eta and steps as given."""
    validation_members: int = 1
    """Policies trained for each of those years; as many as `members` is surest, and takes longest."""
    validation_instruments: int = 0
    """Instruments kept from the training of these policies, for the choice to be tested on."""
    chunk: int = 100
    """Steps between two looks at the run: progress, saving, stopping."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(0, "validation", "validation_instruments")
        self.check_at_least(1, "validation_members", "chunk")
