"""The rules a portfolio keeps to: weights, cash, turnover and rebalancing days.

Nothing here starts JAX: rules are refused before any work. `constrained` has the policy that keeps
to them, and the market holds between rebalancing days.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from apportion.domains.settings import check_choices
from apportion.errors import InputError

CASH = "cash"
"""What cash is called among the instruments, where there is any."""
Rebalance = Literal["daily", "weekly", "monthly"]


@dataclass(frozen=True)
class Rules:
    """What every allocation of a strategy keeps to, and when it trades.

    Examples
    --------
    >>> Rules(max_weight=0.2, rebalance="monthly").describe()
    'at most 20% each, rebalanced monthly'
    """

    max_weight: float = 1.0
    min_weight: float = 0.0
    max_turnover: float = 2.0
    rebalance: Rebalance = "daily"
    cash: bool = False
    """Cash may be held: its price stands still, it is free of commission and of every other rule."""

    def __post_init__(self):
        check_choices(self)
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

    @property
    def bind_shares(self) -> bool:
        """Some allocations are ruled out: there is more than the days to keep to."""
        return (self.max_weight, self.min_weight, self.max_turnover) != (1, 0, 2)

    def check_weights(self, m: int, whose: str) -> None:
        """Refuse weights that `m` instruments cannot meet; cash takes what no instrument can."""
        low, high = self.min_weight, self.max_weight
        if not self.cash and m * high < 1 - 1e-9:
            raise InputError(
                f"max_weight {high:g}: {whose} can then hold only {m * high:.4g} of the wealth; choose "
                f"at least {1 / m:.4g}, or more instruments"
            )
        if m * low > 1 + 1e-9:
            raise InputError(
                f"min_weight {low:g}: {whose} would need {m * low:.4g} of the wealth; choose at most "
                f"{1 / m:.4g}, or fewer instruments"
            )

    def check(self, tickers: Sequence[str]) -> None:
        """Refuse rules that these instruments together cannot meet."""
        if self.cash and CASH in tickers:
            raise InputError(
                f'ticker "{CASH}" is among the prices, and the policy holds cash of its own; rename '
                "or drop it"
            )
        self.check_weights(len(tickers), f"{len(tickers)} instruments")

    def describe(self) -> str:
        """The rules in a line."""
        parts: list[str] = []
        if self.max_weight < 1:
            parts.append(f"at most {100 * self.max_weight:g}% each")
        if self.min_weight > 0:
            parts.append(f"at least {100 * self.min_weight:g}% each")
        if self.max_turnover < 2:
            parts.append(f"at most {self.max_turnover:g} traded at a time")
        if self.cash:
            parts.append("cash where it likes")
        if self.rebalance != "daily":
            parts.append(f"rebalanced {self.rebalance}")
        return ", ".join(parts)


def rebalancing_days(dates: np.ndarray, rebalance: Rebalance) -> np.ndarray:
    """Whether each day is the first trading day of its week or month: the days before it tell.

    >>> days = np.array(["2024-01-05", "2024-01-08", "2024-01-09"], "datetime64[D]")
    >>> rebalancing_days(days, "weekly").tolist()
    [True, True, False]
    """
    if rebalance == "daily":
        return np.ones(len(dates), bool)
    span = weeks_of(dates) if rebalance == "weekly" else dates.astype("datetime64[M]")
    return np.append(True, span[1:] != span[:-1])[: len(dates)]


def weeks_of(dates: np.ndarray) -> np.ndarray:
    """The number of each day's week; weeks begin on Mondays."""
    # Day 0 of the calendar, 1 January 1970, was a Thursday.
    return (dates.astype("datetime64[D]").astype(int) + 3) // 7
