"""Settings of a portfolio run: one frozen dataclass that is also the command line.

The defaults are the practical policy: an ensemble, shrunk to equal shares, that trades part of the way and
is trained with a penalty on tracking error. `PortfolioSettings.paper()` is the paper's. `apportion train`
chooses trust, trade fraction and the number of updates on validation years. Importing this file starts no
JAX.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.domains.settings import TrainingSettings
from apportion.errors import InputError, check_positive

if TYPE_CHECKING:
    from apportion.priority import Priority
    from apportion.simplex import Head

CASH = "cash"
"""Name of cash among the tickers, if the policy can hold it."""


@dataclass(frozen=True)
class PortfolioSettings(TrainingSettings):
    """Settings of a portfolio run.

    Examples
    --------
    >>> PortfolioSettings.paper().steps
    18000
    """

    task_size: int = 10
    """Instruments in a task, m."""
    steps: int = 6000
    """Updates of each policy."""
    members: int = 4
    """Policies trained from different seeds, whose allocations are averaged."""
    trust: float = 0.5
    """Trust k in the learned policy: the target is (1 - k)/m + k times its allocation."""
    trade_fraction: float = 0.1
    """Fraction eta of the way from what is held to the target that is traded each day."""
    tracking_error_weight: float = 15.0
    """Penalty in the reward on the squared daily difference of log growth from equal shares."""
    window: int = 31
    """Days of history a decision sees, H."""
    batch: int = 109
    """Consecutive days in a batch, B."""
    hidden: int = 25
    """Units of the recurrent network."""
    learning_rate: float = 2.8e-4
    """Step size of Adam."""
    cost: float = 0.0025
    """Commission c, a fraction of the value traded."""
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
    max_turnover: float = 2.0
    """The most that is traded in a day, bought and sold added up; 2 exchanges everything."""

    def __post_init__(self):
        super().__post_init__()
        self.check_at_least(1, "window", "batch", "hidden")
        self.check_at_least(2, "task_size")
        self.check_at_least(0, "tracking_error_weight")
        check_positive(learning_rate=self.learning_rate)
        for name in ("trust", "trade_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be between 0 and 1")
        check_cost(self.cost)
        if not 0 <= self.min_weight < self.max_weight <= 1:
            raise InputError(
                f"min_weight {self.min_weight:g} and max_weight {self.max_weight:g}: they must satisfy "
                "0 <= min_weight < max_weight <= 1"
            )
        if not 0 < self.max_turnover <= 2:
            raise InputError(
                f"max_turnover is {self.max_turnover:g}; it must be above 0 and at most 2, which "
                "exchanges everything"
            )
        check_weights(self.min_weight, self.max_weight, self.task_size, cash=self.cash)

    def head(self) -> "Head":
        """Return the bounds on every allocation: floor, cap and cash."""
        from apportion.simplex import Head

        return Head(self.min_weight, self.max_weight, self.cash)

    @classmethod
    def paper(cls, **changes) -> "PortfolioSettings":
        """The paper's policy: one seed, the allocation as it is, no penalty, 18,000 updates."""
        plain: dict[str, Any] = {"steps": 18_000, "members": 1, "trust": 1.0, "trade_fraction": 1.0}
        plain["tracking_error_weight"] = 0.0
        return cls(**(plain | changes))

    def priority(self, first_score: float | None = None) -> "Priority":
        """Scores begin at the largest deviation from equal shares there is."""
        return super().priority(1 - 1 / self.task_size if first_score is None else first_score)


@dataclass(frozen=True)
class PortfolioJob(PortfolioSettings):
    """Share wealth out among instruments, from a file of daily prices.

    Trust, trade fraction and the number of updates (steps at most) are chosen on the last years before
    `until`.

    Examples
    --------
    >>> PortfolioJob(until="2019-01-01").prices is None
    True
    """

    steps: int = 4000
    """Updates of each policy, at most (see validation)."""
    prices: Path | None = None
    """CSV or Parquet file of daily prices; none takes the 20 embedded stocks."""
    allow_jumps: tuple[str, ...] | None = None
    """Take these moves of a day as they are, each TICKER:DAY; without any, every one. In question are falls
    by 30 % and rises by 65 % beyond the other instruments, and falls by 17 % on the usual volume."""
    until: str | None = None
    """Train on days before this one only; what comes after is backtested."""
    validation: int = 3
    """Years at the end of the training period on which trust, trade fraction and the number of updates are
    chosen by the Sharpe ratio, with a policy trained before each; 0 takes all three as given."""
    chunk: int = 100
    """Steps between two looks at the run: progress, saving, stopping."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "allow_jumps", all_or_named(self.allow_jumps))
        self.check_at_least(0, "validation")
        self.check_at_least(1, "chunk")


def all_or_named(jumps: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """What an option says of jumps: given without any it means all of them.

    >>> all_or_named(()), all_or_named(("EQIX:2010-10-06",)), all_or_named(None)
    (('all',), ('EQIX:2010-10-06',), None)
    """
    return ("all",) if jumps == () else jumps


def check_cost(cost: float) -> None:
    """Refuse a commission outside [0, 0.5)."""
    if not 0 <= cost < 0.5:
        raise InputError(f"cost is {cost}; it must be a fraction of at least 0 and below 0.5")


def check_weights(low: float, high: float, count: int, *, cash: bool) -> None:
    """Refuse weights that `count` instruments cannot meet together; cash takes what they cannot."""
    if not cash and count * high < 1 - 1e-9:
        raise InputError(
            f"max_weight {high:g}: {count} instruments can then hold only {count * high:.4g} of the "
            f"wealth; choose at least {1 / count:.4g}, or more instruments"
        )
    if count * low > 1 + 1e-9:
        raise InputError(
            f"min_weight {low:g}: {count} instruments would need {count * low:.4g} of the wealth; choose "
            f"at most {1 / count:.4g}, or fewer instruments"
        )
