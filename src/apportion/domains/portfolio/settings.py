"""Settings of a portfolio run, in Python and on the command line.

The defaults are the practical policy: an ensemble, shrunk to equal shares, that trades part of the
way and is trained with a penalty on tracking error. `PortfolioSettings.paper()` returns the paper's
settings. `apportion train` selects trust, trade fraction and the number of updates on validation
years. Importing this module does not import JAX.
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
"""Ticker of cash."""


@dataclass(frozen=True)
class PortfolioSettings(TrainingSettings):
    """Settings of a portfolio run.

    Examples
    --------
    >>> PortfolioSettings.paper().steps
    18000
    """

    task_size: int = 10
    """Instruments per task, m."""
    steps: int = 6000
    """Updates of each policy."""
    members: int = 4
    """Policies trained from different seeds, whose allocations are averaged."""
    trust: float = 0.5
    """Trust k in the learned policy: the target is (1 - k)/m + k times its allocation."""
    trade_fraction: float = 0.1
    """Fraction eta of the way from the shares held to the target that is traded each day."""
    tracking_error_weight: float = 15.0
    """Weight of the penalty on the squared daily difference of log growth from equal shares."""
    window: int = 31
    """Days of history in an observation, H."""
    batch: int = 109
    """Consecutive days per batch, B."""
    hidden: int = 25
    """Units of the recurrent network."""
    learning_rate: float = 2.8e-4
    """Step size of Adam."""
    cost: float = 0.0025
    """Commission c, a fraction of the value traded."""
    cash: bool = False
    """Let the policy hold cash, which has no commission and no interest."""
    recency: float = 5e-5
    """Preference of batches for recent days; 0 gives all days the same probability."""
    act_periods: int = 0
    """Days on which the policy acts in the sampled task after each update, n_e; with 0, memory is
    refreshed only by the allocations of each batch."""
    held_out: int = 0
    """Instruments held out from training, selected by the seed."""
    max_weight: float = 1.0
    """Largest share of an instrument."""
    min_weight: float = 0.0
    """Smallest share of each instrument."""
    max_turnover: float = 2.0
    """Largest turnover of a day, purchases plus sales; 2 exchanges everything."""

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
        """Return the paper's settings: one policy, full trust and trading, no penalty, 18,000 updates."""
        plain: dict[str, Any] = {"steps": 18_000, "members": 1, "trust": 1.0, "trade_fraction": 1.0}
        plain["tracking_error_weight"] = 0.0
        return cls(**(plain | changes))

    def priority(self, first_score: float | None = None) -> "Priority":
        """Return the task sampler; initial scores are the largest possible deviation from equal shares."""
        return super().priority(1 - 1 / self.task_size if first_score is None else first_score)


@dataclass(frozen=True)
class PortfolioJob(PortfolioSettings):
    """Allocate wealth to instruments, from a file of daily prices.

    Trust, trade fraction and the number of updates (at most `steps`) are selected on the last years before
    `until`.

    Examples
    --------
    >>> PortfolioJob(until="2019-01-01").prices is None
    True
    """

    steps: int = 4000
    """Largest number of updates of each policy (see validation)."""
    prices: Path | None = None
    """CSV or Parquet file of daily prices; by default the 20 embedded stocks."""
    allow_jumps: tuple[str, ...] | None = None
    """Accept these large daily moves, each TICKER:DAY; without a value, accept all. Moves are large
    from -30 % and +65 % relative to the other instruments, or from -17 % on ordinary volume."""
    until: str | None = None
    """Train only on days before this one, and backtest on the later ones."""
    validation: int = 3
    """Last years of training, on which trust, trade fraction and the number of updates are selected
    by the Sharpe ratio, with policies trained before each year; 0 keeps the given values."""
    chunk: int = 100
    """Updates between two checkpoints, at which the run reports progress, is saved and can stop."""

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "allow_jumps", all_or_named(self.allow_jumps))
        self.check_at_least(0, "validation")
        self.check_at_least(1, "chunk")


def all_or_named(jumps: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Replace an option without values by `all`.

    >>> all_or_named(()), all_or_named(("EQIX:2010-10-06",)), all_or_named(None)
    (('all',), ('EQIX:2010-10-06',), None)
    """
    return ("all",) if jumps == () else jumps


def check_cost(cost: float) -> None:
    """Raise InputError for a commission outside [0, 0.5)."""
    if not 0 <= cost < 0.5:
        raise InputError(f"cost is {cost}; it must be a fraction of at least 0 and below 0.5")


def check_weights(low: float, high: float, count: int, *, cash: bool) -> None:
    """Raise InputError if `count` instruments cannot meet the bounds; cash takes any remainder."""
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
