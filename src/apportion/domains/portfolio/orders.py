"""The next allocation and its orders: what is held, what to buy and sell, what that costs, what is left.

Holdings are shares, or quantities and cash. A CSV's columns decide which it is: ticker and share, or ticker
and quantity with a row for cash. A ticker that the file leaves out holds nothing.

Costs are those of a backtest (see `market`): a purchase takes 1/(1 - c) of what is bought, a sale brings in
1 - c of what is sold, and the exact factor mu makes what comes in pay for what goes out. Money adds up:
value before = value after + cost. Reading holdings starts no JAX.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.rules import CASH, rebalancing_days
from apportion.errors import InputError, reading

if TYPE_CHECKING:
    from apportion.domains.portfolio.backtest import TrainedPolicy

_FORM = "write a CSV with columns ticker and share, or ticker and quantity with a row for cash"
_ROUNDING = 1e-9


@dataclass(frozen=True, eq=False)
class Holdings:
    """What is held: units of each ticker and money, or shares of the whole."""

    amounts: np.ndarray
    """Units or shares, in the order of the tickers."""
    cash: float
    """Money, or its share."""
    counted: bool
    """Units and money, and not shares."""

    def values(self, prices: np.ndarray) -> np.ndarray:
        """What each ticker is worth, cash in front; shares are worth themselves."""
        worth = self.amounts
        if self.counted:
            # One that is not held need not have a price.
            worth = np.where(self.amounts > 0, self.amounts * np.nan_to_num(prices), 0.0)
        return np.append(self.cash, worth)


def read_holdings(path: Path, tickers: Sequence[str], *, cash: bool = False) -> Holdings:
    """Today's holdings in the order of `tickers`; `cash` says that the policy may hold some.

    Raises
    ------
    InputError
        One sentence on what is wrong with the file.
    """
    if not path.exists():
        raise InputError(f"{path}: no such file; give a CSV file of what is held")
    with reading(path, _FORM):
        # Names are text, as in the prices: 000001 and NA too.
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    table = table.rename(columns=lambda name: str(name).strip().lower())
    if {"share", "quantity"} <= set(table.columns):
        raise InputError(f"{path}: gives both shares and quantities; give one of them")
    kind = "quantity" if "quantity" in table.columns else "share"
    counted = kind == "quantity"
    if list(table.columns).count("ticker") != 1 or list(table.columns).count(kind) != 1:
        raise InputError(f"{path}: not a table of holdings; {_FORM}")
    if counted and CASH in tickers:
        raise InputError(f'{path}: "{CASH}" is among the prices, and quantities need it for money')
    known = {*tickers, CASH} if counted or cash else set(tickers)
    found: dict[str, float] = {}
    for name, text in zip(table["ticker"].str.strip(), table[kind].str.strip(), strict=True):
        if name not in known:
            raise InputError(
                f"{path}: {name} is not among the prices; name each ticker of the price file at "
                "most once"
            )
        if name in found:
            raise InputError(f"{path}: {name} occurs twice; name each ticker at most once")
        try:
            found[name] = float(text)
        except ValueError:
            found[name] = math.nan
        if not 0 <= found[name] < math.inf:
            raise InputError(
                f'{path}: the {kind} of {name} is "{text[:40]}"; write a number of at least 0'
            )
    if counted and cash and CASH not in found:
        raise InputError(
            f"{path}: says nothing of {CASH}, which the policy may hold; give it too, 0 where there "
            "is none"
        )
    if counted and not any(found.values()):
        raise InputError(f"{path}: holds nothing; give quantities, or the {CASH} to begin with")
    if not counted:
        total = math.fsum(found.values())
        if abs(total - 1) > 1e-3:
            raise InputError(
                f"{path}: the shares sum to {total:.6g}; they must sum to 1, or be given as quantities"
            )
        found = {name: share / total for name, share in found.items()}
    amounts = np.array([found.get(ticker, 0.0) for ticker in tickers])
    return Holdings(amounts, found.get(CASH, 0.0), counted)


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

    @property
    def cost(self) -> float:
        """What all trades cost together."""
        return float(self.costs.sum())

    @property
    def units(self) -> np.ndarray:
        """What is bought and sold, in units; NaN where there is no price."""
        return self.trades / self.prices

    def to_frame(self) -> pd.DataFrame:
        """A row for each ticker and one for cash, which is the last; `quantity` is what is held after."""
        before, after, target = (np.roll(v, -1) for v in (self.before, self.after, self.target))
        counted, trades = self.holdings.counted, np.append(self.trades, after[-1] - before[-1])
        table: dict[str, Any] = {
            "ticker": [*self.tickers, CASH],
            "price": np.append(self.prices, 1.0 if counted else np.nan),
        }
        if counted:
            held = np.append(self.holdings.amounts, before[-1])
            units = np.where(trades == 0, 0.0, np.append(self.units, trades[-1]))
            table |= {"held": held, "units": units, "quantity": np.maximum(held + units, 0.0)}
        table |= {
            "trade": trades,
            "cost": np.append(self.costs, 0.0),
            "weight": before / before.sum(),
        }
        return pd.DataFrame(table | {"target": target, "after": after / after.sum()})

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
        }

    def summary(self, title: str = "orders") -> str:
        """The orders as a table, the largest first, and the account of the money."""
        counted, form = self.holdings.counted, "{:,.2f}" if self.holdings.counted else "{:.4%}"
        table = self.to_frame()
        largest = np.argsort(-np.abs(self.trades), kind="stable")
        width = max(map(len, table["ticker"]))
        heads = ["now", "target", "after", *(["units"] if counted else []), "trade", "cost"]
        lines = [title, f"  {'':{width}}" + "".join(f"{head:>14}" for head in heads)]
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
        return "\n".join(lines)


def plan_orders(
    tickers: tuple[str, ...],
    prices: np.ndarray,
    holdings: Holdings,
    target: np.ndarray,
    cost: float,
    *,
    lot: float | None = None,
    hold: bool = False,
) -> Orders:
    """The orders that lead to `target`, its shares in the order of the tickers with cash in front.

    Parameters
    ----------
    cost
        The commission on what is bought and sold.
    lot
        Units of a lot, where trades are in whole lots; then no more is spent than there is, and what is
        over stays cash.
    hold
        Nothing is traded.

    Examples
    --------
    >>> held = Holdings(np.array([10.0, 0.0]), 0.0, counted=True)
    >>> orders = plan_orders(("A", "B"), np.array([10.0, 5.0]), held, np.array([0, 0.5, 0.5]), 0.01)
    >>> orders.units.round(3).tolist(), round(orders.cost, 3)
    ([-5.05, 9.9], 1.005)
    """
    from apportion.domains.portfolio.backtest import account

    before = holdings.values(prices)
    value, target = before.sum(), np.asarray(target, float) / np.sum(target)
    # The backtest's own account of one period in which no price moves.
    still = np.ones((1, len(target)))
    _, (factor,), _ = account(target[None], still, cost, before / value, cash=True)
    ideal = factor * value * target
    trades = np.zeros(len(tickers)) if hold else ideal[1:] - before[1:]
    if lot is not None and not hold:
        each = lot * np.where(np.isnan(prices), 1.0, prices)
        money = before[0] - ideal[0]
        sides = each / (1 - cost), each * (1 - cost)
        trades = each * whole_lots(trades / each, holdings.amounts / lot, money, *sides)
    costs = np.where(trades > 0, cost / (1 - cost) * trades, -cost * trades)
    left = before[0] - trades.sum() - costs.sum()
    exact = not hold and abs(left - ideal[0]) <= _ROUNDING * value
    cash = ideal[0] if exact else max(left, 0.0)
    after = np.append(cash, np.maximum(before[1:] + trades, 0.0))
    return Orders(tickers, prices, holdings, target, before, trades, costs, after)


def whole_lots(
    wanted: np.ndarray, held: np.ndarray, money: float, bought: np.ndarray, sold: np.ndarray
) -> np.ndarray:
    """Whole lots to buy (> 0) and to sell (< 0), near the `wanted` ones, for at most `money`.

    A lot takes what `bought` says and brings in what `sold` says. Every trade is rounded down, so that
    money is left; it goes to the largest remainders first, as far as it lasts. Nothing is sold that is
    not held: of less than a lot nothing can be.

    Examples
    --------
    >>> each = np.array([10.0, 10.0])
    >>> whole_lots(np.array([1.6, 1.4]), np.zeros(2), 30.0, each, each).tolist()
    [2, 1]
    """

    def spent(lots: np.ndarray) -> float:
        return float(np.where(lots > 0, lots * bought, lots * sold).sum())

    lots = np.maximum(np.floor(wanted + _ROUNDING), -np.floor(held + _ROUNDING))
    if spent(lots) > money:
        # Sales fell short of what was wanted: all purchases are cut in one proportion.
        wished = spent(np.maximum(lots, 0.0))
        part = max(money - spent(np.minimum(lots, 0.0)), 0.0) / wished
        lots = np.where(lots > 0, np.floor(part * lots), lots)
    left, remainders = money - spent(lots), wanted - lots
    for i in np.argsort(-remainders, kind="stable"):
        price = bought[i] if lots[i] >= 0 else sold[i]
        if remainders[i] > _ROUNDING and price <= left:
            lots[i] += 1
            left -= price
    return lots.astype(np.int64)


@dataclass(frozen=True, eq=False)
class NextAllocation:
    """The shares of the period after the last day of the prices, and orders where holdings were given."""

    date: str
    shares: Mapping[str, float]
    orders: Orders | None = None
    assumed: Mapping[str, str] = field(default_factory=dict)
    """What the orders rest on, in words."""

    def to_json(self) -> dict[str, Any]:
        """The contract of `apportion allocate --json`."""
        told = {"date": self.date, "allocation": dict(self.shares)}
        if self.orders is None:
            return told
        return {**told, **self.orders.to_json(), "assumed": dict(self.assumed)}

    def to_frame(self) -> pd.DataFrame:
        """The orders, or else a row for each share."""
        if self.orders is not None:
            return self.orders.to_frame()
        return pd.DataFrame({"ticker": list(self.shares), "share": list(self.shares.values())})

    def summary(self) -> str:
        """The orders, or else the shares, the largest first."""
        if self.orders is not None:
            orders = self.orders.summary(f"orders for the period after {self.date}")
            return "\n".join([orders, *(f"{name}: {text}" for name, text in self.assumed.items())])
        width = max(map(len, self.shares))
        ordered = sorted(self.shares.items(), key=lambda pair: -pair[1])
        lines = [f"  {name:{width}}  {share:8.3%}" for name, share in ordered]
        return "\n".join([f"allocation for the period after {self.date}", *lines])


def allocate_next(
    trained: "TrainedPolicy", prices: Prices, path: Path | None = None, lot: float | None = None
) -> NextAllocation:
    """The next period's shares, and the orders that lead to them from the holdings of a file."""
    prices, rules, cost = trained.series(prices), trained.rules, trained.cost
    date = str(prices.dates[-1])
    if path is None:
        return NextAllocation(date, next_shares(trained, prices))
    holdings = read_holdings(path, prices.tickers, cash=rules.cash)
    if lot is not None and not holdings.counted:
        raise InputError(f"{path}: shares are not traded in lots; give quantities")
    missing = np.flatnonzero((holdings.amounts > 0) & np.isnan(prices.close[-1]))
    if holdings.counted and len(missing):
        raise InputError(
            f"{path}: {prices.tickers[missing[0]]} is held and has no price on {date}; "
            "leave it out, or give prices up to a day on which it has one"
        )
    values = holdings.values(prices.close[-1])
    values = values if rules.cash else values[1:]
    # Where there is nothing but money a portfolio is set up.
    held = values / values.sum() if values.sum() > 0 else None
    shares = next_shares(trained, prices, held)
    # Of what is no longer listed nothing can be held on, whatever the day.
    listed = np.isfinite(prices.close[-1][holdings.amounts > 0]).all()
    today = rebalancing_days(prices.dates, rules.rebalance)[-1]
    hold = bool(listed) and held is not None and not today
    assumed = {
        "prices": f"the closes of {date}",
        "costs": f"{cost:.2%} of the money that is traded, as in the run's backtest",
        "lot": "fractions of a unit" if lot is None else f"whole lots of {lot:g}",
    }
    if not rules.cash and holdings.cash > 0 and not hold:
        assumed["cash"] = "the policy holds none, so all of it is invested as far as lots allow"
    if held is None:
        assumed["start"] = "nothing but cash is held: a portfolio is set up from equal shares"
    if hold:
        assumed["day"] = f"{date} is no day to rebalance ({rules.rebalance}): nothing is traded"
    orders = plan_orders(
        prices.tickers,
        prices.close[-1],
        holdings,
        np.array([0.0] * (not rules.cash) + list(shares.values())),
        cost,
        lot=lot,
        hold=hold,
    )
    return NextAllocation(date, shares, orders, assumed)


def next_shares(
    trained: "TrainedPolicy", prices: Prices, held: np.ndarray | None = None
) -> dict[str, float]:
    """The shares after the last day of the prices by name, cash first where the policy may hold some."""
    from apportion.domains.portfolio.training import next_allocation

    wanted = next_allocation(
        trained.policy, prices, window=trained.window, held=held, rules=trained.rules
    )
    shares = np.asarray(wanted, float)
    names = (CASH, *prices.tickers) if trained.rules.cash else prices.tickers
    return dict(zip(names, (shares / shares.sum()).tolist(), strict=True))
