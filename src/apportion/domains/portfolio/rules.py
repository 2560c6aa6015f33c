"""The rules a portfolio keeps to: weights, groups, turnover and rebalancing days, read and checked.

Nothing here starts JAX: rules are refused before any work. `constrained` has the policy that keeps
to them, and the market holds between rebalancing days.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

from apportion.domains.portfolio.settings import PortfolioSettings, Rebalance, check_weights
from apportion.errors import InputError, reading

CASH = "cash"
"""What cash is called among the instruments, where there is any."""
_ROUNDING = 1e-9


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
    members: tuple[tuple[str, int], ...] = ()
    """Each ticker of a group with the group's number."""
    groups: tuple[tuple[str, float], ...] = ()
    """Name and limit of each group."""
    cash: bool = False
    """Cash may be held: its price stands still, it is free of commission and of every other rule."""

    @classmethod
    def of(cls, settings: PortfolioSettings) -> "Rules":
        """The rules of these settings, with the groups of their file."""
        members, groups = ((), ()) if settings.group is None else read_groups(settings.group)
        return cls(
            settings.max_weight,
            settings.min_weight,
            settings.max_turnover,
            settings.rebalance,
            members,
            groups,
            settings.cash,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | None) -> "Rules":
        """The rules that `to_dict` wrote; none where nothing was written."""
        values = dict(values or {})
        for name in ("members", "groups"):
            values[name] = tuple((str(key), value) for key, value in values.get(name, ()))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, to be kept with a policy."""
        return asdict(self)

    @property
    def none(self) -> bool:
        """Nothing is ruled out, and every day is traded."""
        return self == Rules()

    @property
    def bind_shares(self) -> bool:
        """Some allocations are ruled out: there is more than the days to keep to."""
        return (self.max_weight, self.min_weight, self.max_turnover) != (1, 0, 2) or bool(
            self.groups
        )

    @cached_property
    def limits(self) -> tuple[float, ...]:
        """The most each group may hold, by its number."""
        return tuple(limit for _, limit in self.groups)

    def numbers(self, tickers: Sequence[str]) -> np.ndarray | None:
        """Each ticker's group, -1 for none; None where the rules have no groups."""
        if not self.groups:
            return None
        known = dict(self.members)
        return np.array([known.get(ticker, -1) for ticker in tickers], np.int32)

    def check_ranges(self) -> None:
        """Refuse numbers outside what settings take."""
        shares = (self.min_weight, self.max_weight, *self.limits)
        if not all(0 <= share <= 1 for share in shares) or not 0 < self.max_turnover <= 2:
            raise InputError(f"{self} has a number outside its range")
        if self.rebalance not in get_args(Rebalance) or not isinstance(self.cash, bool):
            raise InputError(f"rebalance {self.rebalance!r} and cash {self.cash!r} are not known")

    def check(self, tickers: Sequence[str]) -> None:
        """Refuse rules that these instruments together cannot meet."""
        m = len(tickers)
        if self.cash and CASH in tickers:
            raise InputError(
                f'ticker "{CASH}" is among the prices, and the policy holds cash of its own; rename '
                "or drop it"
            )
        check_weights(self, m, f"{m} instruments", "a {} number of instruments")
        if not self.groups:
            return
        numbers = self.numbers(tickers)
        sizes = [int((numbers == number).sum()) for number in range(len(self.groups))]
        for (name, limit), size in zip(self.groups, sizes, strict=True):
            if size * self.min_weight > limit + _ROUNDING:
                raise InputError(
                    f"group {name}: its {size} instruments at min_weight {self.min_weight:g} take "
                    f"{size * self.min_weight:.4g}, above its limit of {limit:g}; raise the limit or "
                    "lower min_weight"
                )
        held = [
            min(limit, size * self.max_weight)
            for limit, size in zip(self.limits, sizes, strict=True)
        ]
        room = self.cash + sum(held) + (len(tickers) - sum(sizes)) * self.max_weight
        if room < 1 - _ROUNDING:
            raise InputError(
                f"the groups and the instruments in none can together hold only {room:.4g} of the "
                "wealth; raise a group's limit or max_weight, or give instruments in no group"
            )

    def check_tickers(self, tickers: Sequence[str], source: Path | str) -> None:
        """Refuse a group file that names what is not among the prices: a slip would limit nothing."""
        unknown = [ticker for ticker, _ in self.members if ticker not in set(tickers)]
        if unknown:
            raise InputError(
                f"{source}: ticker {unknown[0]} is not among the prices; correct its name or drop "
                "the row"
            )

    def describe(self) -> str:
        """The rules in a line."""
        parts: list[str] = []
        if self.max_weight < 1:
            parts.append(f"at most {100 * self.max_weight:g}% each")
        if self.min_weight > 0:
            parts.append(f"at least {100 * self.min_weight:g}% each")
        parts += [f"at most {100 * limit:g}% in {name}" for name, limit in self.groups]
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
    days = dates.astype("datetime64[D]")
    # Day 0 of the calendar, 1 January 1970, was a Thursday; weeks begin on Mondays.
    span = (days.astype(int) + 3) // 7 if rebalance == "weekly" else days.astype("datetime64[M]")
    return np.append(True, span[1:] != span[:-1])[: len(dates)]


def read_groups(path: Path) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, float], ...]]:
    """Members and limits of the groups in a CSV file with columns ticker, group and limit."""
    if not path.exists():
        raise InputError(f"{path}: no such file; give a CSV of ticker, group and limit")
    with reading(path, "save it as a plain CSV"):
        # Names are text, as in the prices: 000001 and NA too.
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
    table = table.rename(columns=lambda name: str(name).strip().lower())
    for column in ("ticker", "group", "limit"):
        if column not in table.columns:
            raise InputError(
                f'{path}: column "{column}" is missing; the columns are ticker, group and limit'
            )
        empty = np.flatnonzero(table[column].str.strip() == "")
        if len(empty):
            raise InputError(
                f'{path}: column "{column}" is empty at line {empty[0] + 2}; fill it in'
            )
    if not len(table):
        raise InputError(f"{path}: names no ticker; give a row of ticker, group and limit for each")
    tickers = [ticker.strip() for ticker in table["ticker"]]
    names = [name.strip() for name in table["group"]]
    limits: dict[str, float] = {}
    for row, (name, text) in enumerate(zip(names, table["limit"], strict=True)):
        limit = number_in(text)
        if not 0 <= limit <= 1:
            raise InputError(
                f'{path}: line {row + 2}: limit "{text}" is not a share; write a number from 0 to 1'
            )
        if limits.setdefault(name, limit) != limit:
            raise InputError(
                f"{path}: line {row + 2}: group {name} has the limit {limit:g} here and "
                f"{limits[name]:g} above; give each group one limit"
            )
    twice = next((t for t in tickers if tickers.count(t) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: ticker {twice} occurs twice; a ticker is in one group")
    number = {name: place for place, name in enumerate(limits)}
    members = tuple((ticker, number[name]) for ticker, name in zip(tickers, names, strict=True))
    return members, tuple(limits.items())


def number_in(cell: Any) -> float:
    """The number that a cell of a user's file holds, or NaN."""
    try:
        return float(cell)
    except (ValueError, TypeError, OverflowError):  # a whole number of JSON may be too long
        return math.nan
