"""`apportion allocate`: what a trained policy would share out now, and the orders that lead there."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from apportion.cli.options import (
    AllowJumps,
    File,
    Folder,
    Json,
    Prices,
    finished_run,
    read_own_prices,
    refuse_options,
)
from apportion.errors import InputError

_ChargingFile = Annotated[Path | None, Parameter(metavar="FILE", group="Charging")]


@dataclass(frozen=True)
class MarketOptions:
    """What the allocation of a portfolio run may be told."""

    prices: Prices = None
    holdings: File = None
    """What is held today: a CSV of ticker and quantity with a row for cash, or of ticker and share; or
    JSON. By default equal shares. With it come the orders, what they cost and what is left."""
    lot: Annotated[float | Path | None, Parameter(metavar="NUMBER|FILE")] = None
    """Trade in whole lots of so many units, or a CSV of ticker and lot; fractions by default."""
    out: Annotated[Path | None, Parameter(metavar="FILE.csv|FILE.json")] = None
    """Write the orders to this file, too."""
    allow_jumps: AllowJumps = False


def allocate(
    folder: Folder,
    /,
    *,
    now: _ChargingFile = None,
    earlier: _ChargingFile = None,
    json: Json = False,
    market: Annotated[MarketOptions, Parameter(name="*", group="Portfolio")] = MarketOptions(),  # noqa: B008
) -> Any:
    """Compute the next period's allocation of a trained policy, and the orders that lead to it.

    Example: `apportion allocate runs/first --prices prices.csv --json`

    Example: `apportion allocate runs/first --holdings today.csv --lot 1 --out orders.csv`

    Example: `apportion allocate runs/garage --now now.json`

    Parameters
    ----------
    folder
        Folder of a finished portfolio or charging run.
    now
        What the garage's controller sees: a JSON object with time, capacity_kw and stations.
    earlier
        Sessions of the garage's earlier days, CSV or Parquet: drivers who come again state the like.
    """
    run = finished_run(folder, "portfolio", "charging", "demo")
    if run.job == "charging":
        refuse_options(folder, "charging", **asdict(market))
        return _charging(run, now, earlier, json)
    refuse_options(folder, "portfolio", now=now, earlier=earlier)
    _check_orders(market)
    # Read before JAX is started, so that a slip is told at once.
    return _portfolio(run, read_own_prices(run, market.prices, market.allow_jumps), market, json)


def _check_orders(given: MarketOptions) -> None:
    """Refuse what makes no orders, or a place that cannot be written to, before any work."""
    for name, value in (("--lot", given.lot), ("--out", given.out)):
        if value is not None and given.holdings is None:
            raise InputError(f"{name} is for orders, which need what is held; give --holdings FILE")
    if given.out is None:
        return
    from apportion.runs.files import require_place

    if given.out.suffix.lower() not in (".csv", ".json"):
        raise InputError(f"{given.out}: write orders to a .csv or a .json file")
    read = (given.prices, given.holdings, given.lot)
    if given.out.resolve() in {path.resolve() for path in read if isinstance(path, Path)}:
        raise InputError(f"{given.out}: is read as well; choose another file for the orders")
    require_place(given.out)


def _charging(run: Any, now: Path | None, earlier: Path | None, json: bool) -> Any:
    if now is None:
        raise InputError(
            f"{run.folder}: a charging run; give what the controller sees now with --now FILE.json"
        )
    from apportion.domains.charging.controller import Controller, check_now, read_now
    from apportion.domains.charging.sessions import read_sessions
    from apportion.runs.policy_file import load_about

    seen = read_now(now)
    # Before the controller, which compiles when it is made.
    check_now(seen)
    past = None if earlier is None else read_sessions(earlier)
    result = Controller(run.policy, load_about(run.folder), earlier=past).allocate(seen)
    if json:
        return result
    width = max(map(len, result["allocation_kw"]))
    lines = [f"  {name:{width}}  {kw:7.3f} kW" for name, kw in result["allocation_kw"].items()]
    return "\n".join([*lines, f"  {'unused':{width}}  {result['unused_kw']:7.3f} kW"])


def _portfolio(run: Any, prices: Any, given: MarketOptions, json: bool) -> Any:
    import numpy as np

    from apportion.domains.portfolio.backtest import with_trained_series
    from apportion.domains.portfolio.rules import CASH, Rules
    from apportion.domains.portfolio.training import next_allocation
    from apportion.runs.policy_file import load_about

    about = load_about(run.folder)
    table = with_trained_series(prices, about)
    rules = Rules.from_dict(about.get("rules"))
    holdings = None if given.holdings is None else _read_holdings(given, table, rules)
    held = None if holdings is None else _held(holdings, table, rules)
    wanted = next_allocation(run.policy, table, window=about["window"], held=held, rules=rules)
    shares = np.asarray(wanted, float)
    shares = shares / shares.sum()
    names = (CASH, *table.tickers) if rules.cash else table.tickers
    result: dict[str, Any] = {"date": str(table.dates[-1])}
    result["allocation"] = dict(zip(names, shares.tolist(), strict=True))
    if holdings is None:
        return result if json else _summary(result)
    orders = _orders(given, table, rules, holdings, held is None, shares, about["cost"])
    result |= orders.to_json()
    if given.out is not None:
        _write(given.out, orders, result)
    if json:
        return result
    return orders.summary() + ("" if given.out is None else f"\nwrote {given.out}")


def _summary(result: dict[str, Any]) -> str:
    allocation = result["allocation"]
    width = max(map(len, allocation))
    ordered = sorted(allocation.items(), key=lambda pair: -pair[1])
    lines = [f"  {name:{width}}  {share:8.3%}" for name, share in ordered]
    return "\n".join([f"allocation for the period after {result['date']}", *lines])


def _read_holdings(given: MarketOptions, table: Any, rules: Any) -> Any:
    from apportion.domains.portfolio.orders import read_holdings, require_prices

    assert given.holdings is not None, "the caller has seen the file's name"
    holdings = read_holdings(given.holdings, table.tickers, cash=rules.cash)
    if given.lot is not None and not holdings.counted:
        raise InputError(f"{given.holdings}: shares are not traded in lots; give quantities")
    require_prices(holdings, table, given.holdings)
    return holdings


def _held(holdings: Any, table: Any, rules: Any) -> Any:
    """The shares that the policy sees; none where there is nothing but money to set up from."""
    values = holdings.values(table.close[-1])
    values = values if rules.cash else values[1:]
    return values / values.sum() if values.sum() > 0 else None


def _orders(
    given: MarketOptions,
    table: Any,
    rules: Any,
    holdings: Any,
    fresh: bool,
    shares: Any,
    cost: Any,
) -> Any:
    """The orders, and in words what they rest on."""
    import numpy as np

    from apportion.domains.portfolio.commissions import describe
    from apportion.domains.portfolio.orders import lots_of, plan_orders
    from apportion.domains.portfolio.rules import rebalancing_days

    date = str(table.dates[-1])
    lot = f"{given.lot:g}" if isinstance(given.lot, float) else given.lot
    # Of what is no longer listed nothing can be held on, whatever the day.
    listed = np.isfinite(table.close[-1][holdings.amounts > 0]).all()
    today = rebalancing_days(table.dates, rules.rebalance)[-1]
    hold = bool(listed) and not fresh and not today
    assumed = {
        "prices": f"the closes of {date}",
        "costs": f"{describe(cost)} of the money that is traded, as in the run's backtest",
        "lot": "fractions of a unit" if lot is None else f"whole lots of {lot}",
    }
    if not rules.cash and holdings.cash > 0 and not hold:
        assumed["cash"] = "the policy holds none, so all of it is invested as far as lots allow"
    if fresh:
        assumed["start"] = "nothing but cash is held: a portfolio is set up from equal shares"
    if hold:
        assumed["day"] = f"{date} is no day to rebalance ({rules.rebalance}): nothing is traded"
    return plan_orders(
        table.tickers,
        table.close[-1],
        holdings,
        shares if rules.cash else np.append(0.0, shares),
        cost,
        lots=None if given.lot is None else lots_of(given.lot, table.tickers),
        hold=hold,
        date=date,
        assumed=assumed,
    )


def _write(out: Path, orders: Any, result: dict[str, Any]) -> None:
    from apportion.runs.files import write_atomic, write_json

    if out.suffix.lower() == ".json":
        write_json(out, result)
    else:
        write_atomic(out, orders.to_frame().to_csv(index=False).encode())
