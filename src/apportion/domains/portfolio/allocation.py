"""Next allocation of a trained policy, and the trades from today's holdings to it.

Holdings are a CSV file of ticker and share, or of ticker and quantity with a row for cash. A ticker that
is not in the file is not held. Trades, in shares or money, do not include commissions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.domains.portfolio.market import Costs, Holding, Market
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.settings import CASH, check_cost
from apportion.domains.tables import as_day, load_table, require_finite
from apportion.errors import InputError, check_counts
from apportion.policy import Policy
from apportion.simplex import Allocation, Head
from apportion.tasks import Task

_LARGEST_QUANTITY = 1e15
"""Largest quantity in a file; double precision cannot represent cents of larger amounts."""
_FORM = "write a CSV with columns ticker and share, or ticker and quantity with a row for cash"


@dataclass(frozen=True)
class TrainedPolicy:
    """A policy and its training configuration."""

    policy: Policy
    window: int
    channels: int
    """Number of price series per instrument."""
    cost: float
    last: str
    """Last training day."""
    head: Head
    """Floor, cap and cash of the allocations."""

    @classmethod
    def of(cls, policy: Policy, about: Mapping[str, Any]) -> "TrainedPolicy":
        """Build from the metadata saved with the policy; raise InputError if it is invalid."""
        if about.get("job") != "portfolio":
            raise InputError(
                f"the policy was trained for {about.get('job', 'something else')!r}, not for prices; "
                "give the folder of a portfolio run"
            )
        try:
            window, channels, cost = about["window"], about["channels"], float(about["cost"])
            check_counts(window=window)
            check_cost(cost)
            rules = about.get("rules", {})
            cash, period = rules.get("cash", False), rules.get("rebalance", "daily")
            if channels not in (1, 3) or not isinstance(cash, bool) or period != "daily":
                raise ValueError(f"channels {channels!r}, rules {rules!r}")
            low, high = float(rules.get("min_weight", 0)), float(rules.get("max_weight", 1))
            head = Head(low, high, cash)
            return cls(policy, window, channels, cost, str(as_day(str(about["last"]))), head)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise InputError(
                f"the metadata saved with the policy is invalid ({error}); train it again"
            ) from None

    def series(self, prices: Prices) -> Prices:
        """Return the prices with only the series that the policy observes."""
        if prices.channels < self.channels:
            raise InputError(
                "the policy reads close, high and low, but the prices have closes only; "
                "give a long file with columns high and low"
            )
        return replace(prices, high=None, low=None) if self.channels == 1 else prices

    def shares(self, prices: Prices, held: np.ndarray | None = None) -> dict[str, float]:
        """Return the shares by name for the period after the last day; cash, if any, is first."""
        wanted = next_allocation(self.policy, prices, window=self.window, held=held, head=self.head)
        shares = wanted.astype(float)
        names = (CASH, *prices.tickers) if self.head.cash else prices.tickers
        return dict(zip(names, (shares / shares.sum()).tolist(), strict=True))


def next_allocation(
    policy: Policy,
    prices: Prices,
    *,
    window: int,
    held: np.ndarray | None = None,
    head: Head | None = None,
) -> np.ndarray:
    """Return the allocation for the period after the last row.

    Parameters
    ----------
    policy : Policy
        The trained policy.
    prices : Prices
        Instruments to allocate to.
    window : int
        Days of history that the policy observes.
    held : array, optional
        Today's drifted shares, with cash first if the policy can hold it; equal shares by default.
    head : Head, optional
        Floor, cap and cash that the policy was trained with.

    Raises
    ------
    InputError
        If the prices have fewer days than the window, or a share is not finite.
    """
    if len(prices.dates) < window:
        raise InputError(
            f"prices: {len(prices.dates)} days, but the policy observes {window}; give more days"
        )
    head = Head() if head is None else head
    seen = prices.with_tomorrow(window)
    costs = Costs(cash=head.cash)
    market = Market.of(seen, start=seen.dates[-1], window=window, costs=costs, head=head)
    task = market.everything()
    shares = market.equal(task) if held is None else jnp.asarray(held, jnp.float32)
    wanted = _decide(policy, market, task, shares)
    return require_finite(wanted, "the policy's allocation")


@eqx.filter_jit
def _decide(policy: Policy, market: Market, task: Task, shares: Allocation) -> Allocation:
    now = Holding(jnp.zeros((), jnp.int32), shares)
    return market.tradable(task, now.n, policy(market.observe(task, now), task.mask))


def read_holdings(
    path: Path, tickers: Sequence[str], *, cash: bool = False
) -> tuple[np.ndarray, bool]:
    """Read today's holdings in the order of `tickers`.

    Parameters
    ----------
    path : Path
        CSV or Parquet file.
    tickers : sequence of str
        Names of the instruments.
    cash : bool
        Whether the policy can hold cash.

    Returns
    -------
    amounts, counted
        Amounts of cash and of each ticker; `counted` is True for money and units, False for shares.

    Raises
    ------
    InputError
        If the file is not a table of holdings or contains unknown tickers.
    """
    table = load_table(path, "holdings")
    table = table.rename(columns=lambda name: str(name).strip().lower())
    columns = list(table.columns)
    kinds = [kind for kind in ("share", "quantity") if kind in columns]
    if len(kinds) != 1 or columns.count("ticker") != 1 or columns.count(kinds[0]) != 1:
        raise InputError(f"{path}: not a table of holdings; {_FORM}")
    (kind,) = kinds
    counted = kind == "quantity"
    if counted and CASH in tickers:
        raise InputError(f'{path}: "{CASH}" is among the prices; rename the ticker, or give shares')
    who: Any = table["ticker"].astype(str).str.strip()
    amounts: Any = pd.to_numeric(table[kind], errors="coerce")
    known = {*tickers, CASH} if counted or cash else {*tickers}
    for wrong, why in (
        (~who.isin(known), "is not among the prices"),
        (who.duplicated(), "occurs twice"),
        (~amounts.between(0, _LARGEST_QUANTITY), f"has no {kind} from 0 to {_LARGEST_QUANTITY:g}"),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InputError(
                f"{path}: {who.iloc[row]!r} in row {row + 1} {why}; correct or remove it"
            )
    found = dict(zip(who, amounts.tolist(), strict=True))
    if counted and cash and CASH not in found:
        raise InputError(
            f'{path}: has no row "{CASH}", but the policy can hold cash; add it, with 0 if there is none'
        )
    total = math.fsum(found.values())
    if total == 0 or (not counted and abs(total - 1) > 1e-3):
        raise InputError(
            f"{path}: the {kind} column sums to {total:.6g}; shares must sum to 1, and quantities "
            f"must not all be 0"
        )
    scale = 1.0 if counted else total
    return np.array([found.get(name, 0.0) / scale for name in (CASH, *tickers)]), counted


@dataclass(frozen=True, eq=False)
class NextAllocation:
    """Shares for the period after the last day of the prices, and trades if holdings are given."""

    date: str
    shares: Mapping[str, float]
    trades: pd.DataFrame | None = None
    """One row per ticker with columns `share`, `held`, `trade` and, for quantities, `money`; > 0 buys."""

    def to_json(self) -> dict[str, Any]:
        """Return the content of `apportion allocate --json`."""
        answer: dict[str, Any] = {"date": self.date, "allocation": dict(self.shares)}
        if self.trades is not None:
            answer["trades"] = self.trades.to_dict("records")
        return answer

    def to_frame(self) -> pd.DataFrame:
        """Return one row per ticker."""
        if self.trades is not None:
            return self.trades
        return pd.DataFrame({"ticker": list(self.shares), "share": list(self.shares.values())})

    def summary(self) -> str:
        """Return the table as text, sorted by the size of trades or shares."""
        table = self.to_frame()
        by = "share" if self.trades is None else "trade"
        table = table.sort_values(by, key=lambda column: -column.abs(), kind="stable")
        shares = [name for name in table if name not in ("ticker", "money")]
        forms = dict.fromkeys(shares, "{:.3%}".format) | {"money": "{:,.2f}".format}
        text = table.to_string(index=False, formatters=forms)
        return f"allocation for the period after {self.date}\n{text}"


def allocate_next(
    trained: TrainedPolicy, prices: Prices, path: Path | None = None
) -> NextAllocation:
    """Return the shares of the next period and, given a file of holdings, the trades to reach them."""
    prices, cash = trained.series(prices), trained.head.cash
    date = str(prices.dates[-1])
    if path is None:
        return NextAllocation(date, trained.shares(prices))
    amounts, counted = read_holdings(path, prices.tickers, cash=cash)
    values = amounts
    if counted:
        close = np.append(1.0, prices.close[-1])
        missing = np.flatnonzero((amounts > 0) & np.isnan(close))
        if len(missing):
            raise InputError(
                f"{path}: {prices.tickers[missing[0] - 1]} is held but has no price on {date}; leave it "
                "out, or give prices up to a day on which it has one"
            )
        values = amounts * np.nan_to_num(close)
    invested = values if cash else values[1:]
    # If only cash is held and the policy cannot hold it, the allocation starts from equal shares.
    held = invested / invested.sum() if invested.sum() > 0 else None
    shares = trained.shares(prices, held)
    names = (*prices.tickers, CASH) if cash or values[0] > 0 else prices.tickers
    table = pd.DataFrame({"ticker": names, "share": [shares.get(name, 0.0) for name in names]})
    table["held"] = np.roll(values, -1)[: len(names)] / values.sum()
    table["trade"] = table["share"] - table["held"]
    if counted:
        table["money"] = table["trade"] * values.sum()
    return NextAllocation(date, shares, table)
