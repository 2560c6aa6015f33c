"""From an allocation to orders: what to buy and sell, what that costs, and what is left.

Costs are those of a backtest (see `costs`): a purchase takes 1/(1 - p) of what is bought, a sale brings in
1 - s of what is sold, and the exact factor mu makes what comes in pay for what goes out. Money adds up:
value before = value after + cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from apportion.domains.portfolio.backtest import account
from apportion.domains.portfolio.commissions import Commissions, rates_of
from apportion.domains.portfolio.holdings import Holdings
from apportion.domains.portfolio.lots import Sides, whole_lots
from apportion.domains.portfolio.rules import CASH

_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Orders:
    """Orders that lead from what is held to an allocation, made by `plan_orders`.

    Cash stands in front of every array of values. Of shares, values are shares of the whole and there
    are no units.
    """

    tickers: tuple[str, ...]
    prices: np.ndarray
    """Of each ticker; NaN where it has none."""
    holdings: Holdings
    target: np.ndarray
    """The shares that are wanted, cash in front."""
    before: np.ndarray
    """What each is worth now, cash in front."""
    trades: np.ndarray
    """What is bought (> 0) and sold (< 0) of each ticker, in money."""
    costs: np.ndarray
    """What each trade costs."""
    after: np.ndarray
    """What each is worth when all is traded, cash in front."""
    date: str = ""
    """The day of the prices."""
    assumed: Mapping[str, str] | None = None
    """What the orders rest on, in words."""

    @property
    def cost(self) -> float:
        """What all trades cost together."""
        return float(self.costs.sum())

    @cached_property
    def units(self) -> np.ndarray:
        """What is bought and sold, in units; NaN where there is no price."""
        return self.trades / self.prices

    def to_frame(self) -> pd.DataFrame:
        """A row for each ticker and one for cash, which is the last; `quantity` is what is held after."""
        value, end = self.before.sum(), self.after.sum()
        table = pd.DataFrame({"ticker": self.tickers, "price": self.prices})
        if self.holdings.counted:
            units = np.where(self.trades == 0, 0.0, self.units)
            table["held"], table["units"] = self.holdings.amounts, units
            table["quantity"] = np.maximum(self.holdings.amounts + units, 0.0)
        table["trade"], table["cost"] = self.trades, self.costs
        table["weight"], table["target"] = self.before[1:] / value, self.target[1:]
        table["after"] = self.after[1:] / end
        money = {"ticker": CASH, "weight": self.before[0] / value, "target": self.target[0]}
        money |= {
            "after": self.after[0] / end,
            "trade": self.after[0] - self.before[0],
            "cost": 0.0,
        }
        if self.holdings.counted:
            money |= {"price": 1.0, "held": self.before[0], "quantity": self.after[0]}
            money |= {"units": self.after[0] - self.before[0]}
        return pd.concat([table, pd.DataFrame([money])], ignore_index=True)

    def to_json(self) -> dict[str, Any]:
        """What `apportion allocate --holdings --json` adds to the allocation."""
        table = self.to_frame()
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        return {
            "orders": rows[:-1],
            "cash": {"before": float(self.before[0]), "after": float(self.after[0])},
            "value": {
                "before": float(self.before.sum()),
                "after": float(self.after.sum()),
                "cost": self.cost,
            },
            "assumed": dict(self.assumed or {}),
        }

    def summary(self) -> str:
        """The orders as a table, the largest first, and the account of the money."""
        counted, form = self.holdings.counted, "{:,.2f}" if self.holdings.counted else "{:.4%}"
        table = self.to_frame()
        largest = np.argsort(-np.abs(self.trades), kind="stable")
        width = max(map(len, table["ticker"]))
        heads = ["now", "target", "after", *(["units"] if counted else []), "trade", "cost"]
        lines = [f"orders for the period after {self.date}" if self.date else "orders"]
        lines.append(f"  {'':{width}}" + "".join(f"{head:>14}" for head in heads))
        for row in table.iloc[[*largest, len(table) - 1]].to_dict("records"):
            cells = [f"{row[name]:.3%}" for name in ("weight", "target", "after")]
            if counted:
                cells.append("" if row["ticker"] == CASH else f"{row['units']:+,.6g}")
            cells += [form.format(row["trade"]), form.format(row["cost"])]
            lines.append(f"  {row['ticker']:{width}}" + "".join(f"{cell:>14}" for cell in cells))
        value, end = self.before.sum(), self.after.sum()
        lines.append(
            f"value {form.format(value)} = {form.format(end)} afterwards + {form.format(self.cost)} of "
            f"costs ({self.cost / value:.4%}); {form.format(self.after[0])} of cash is left"
        )
        return "\n".join(
            [*lines, *(f"{name}: {text}" for name, text in (self.assumed or {}).items())]
        )


def plan_orders(
    tickers: tuple[str, ...],
    prices: np.ndarray,
    holdings: Holdings,
    target: np.ndarray,
    cost: Commissions,
    *,
    lots: np.ndarray | None = None,
    hold: bool = False,
    date: str = "",
    assumed: Mapping[str, str] | None = None,
) -> Orders:
    """The orders that lead to `target`, its shares in the order of the tickers with cash in front.

    Parameters
    ----------
    cost
        Commissions: one fraction, or each ticker's two.
    lots
        Units of a lot of each ticker, where trades are in whole lots; then no more is spent than there
        is, and what is over stays cash.
    hold
        Nothing is traded.

    Examples
    --------
    >>> held = Holdings(np.array([10.0, 0.0]), 0.0, counted=True)
    >>> orders = plan_orders(("A", "B"), np.array([10.0, 5.0]), held, np.array([0, 0.5, 0.5]), 0.01)
    >>> orders.units.round(3).tolist(), round(orders.cost, 3)
    ([-5.05, 9.9], 1.005)
    """
    before = holdings.values(prices)
    value, target = before.sum(), np.asarray(target, float) / np.sum(target)
    rates = np.broadcast_to(np.asarray(rates_of(cost, tickers)), (len(tickers), 2))
    buy, sell = rates.T
    both = np.pad(rates, ((1, 0), (0, 0)))
    # The backtest's own account of one period in which no price moves.
    _, (factor,), _ = account(target[None], np.ones((1, len(target))), both, before / value)
    ideal = factor * value * target
    trades = np.zeros(len(tickers)) if hold else ideal[1:] - before[1:]
    if lots is not None and not hold:
        each = lots * np.where(np.isnan(prices), 1.0, prices)
        sides = Sides(each / (1 - buy), each * (1 - sell))
        money = before[0] - ideal[0]
        trades = each * whole_lots(trades / each, holdings.amounts / lots, money, sides)
    costs = np.where(trades > 0, buy / (1 - buy) * trades, -sell * trades)
    left = before[0] - trades.sum() - costs.sum()
    exact = not hold and abs(left - ideal[0]) <= _ROUNDING * value
    cash = ideal[0] if exact else max(left, 0.0)
    after = np.append(cash, np.maximum(before[1:] + trades, 0.0))
    return Orders(tickers, prices, holdings, target, before, trades, costs, after, date, assumed)
