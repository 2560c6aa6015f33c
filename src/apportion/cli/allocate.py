"""`apportion allocate`: what a trained policy would share out now."""

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
    jumps_allowed,
    own_data,
    refuse_options,
)
from apportion.errors import InputError

_Now = Annotated[Path | None, Parameter(metavar="FILE", group="Charging")]


def allocate(
    folder: Folder,
    /,
    *,
    prices: Prices = None,
    holdings: File = None,
    allow_jumps: AllowJumps = False,
    now: _Now = None,
    json: Json = False,
) -> Any:
    """Compute the next period's allocation of a trained policy.

    Example: `apportion allocate runs/first --prices prices.csv --holdings today.csv --json`

    Example: `apportion allocate runs/garage --now now.json`

    Parameters
    ----------
    folder
        Folder of a finished portfolio or charging run.
    holdings
        Today's shares: a CSV with columns ticker and share, or a JSON object; by default equal.
    now
        What the garage's controller sees: a JSON object with time, capacity_kw and stations.
    """
    run = finished_run(folder, "portfolio", "charging", "demo")
    if run.job == "charging":
        refuse_options(
            folder, "charging", prices=prices, holdings=holdings, allow_jumps=allow_jumps
        )
        return _charging(run, now, json)
    refuse_options(folder, "portfolio", now=now)
    from apportion.domains.portfolio.jumps import read_prices

    # Read before JAX is started, so that a slip is told at once.
    table = read_prices(
        own_data(run, "prices", prices), allow_jumps=jumps_allowed(run, prices, allow_jumps)
    )
    return _portfolio(run, table, holdings, json)


def _charging(run: Any, now: Path | None, json: bool) -> Any:
    if now is None:
        raise InputError(
            f"{run.folder}: a charging run; give what the controller sees now with --now FILE.json"
        )
    from apportion.domains.charging.controller import Controller, check_now, read_now
    from apportion.runs.policy_file import load_about

    seen = read_now(now)
    # Before the controller, which compiles when it is made.
    check_now(seen)
    result = Controller(run.policy, load_about(run.folder)).allocate(seen)
    if json:
        return result
    width = max(map(len, result["allocation_kw"]))
    lines = [f"  {name:{width}}  {kw:7.3f} kW" for name, kw in result["allocation_kw"].items()]
    return "\n".join([*lines, f"  {'unused':{width}}  {result['unused_kw']:7.3f} kW"])


def _portfolio(run: Any, prices: Any, holdings: Path | None, json: bool) -> Any:
    import numpy as np

    from apportion.domains.portfolio.holdings import read_holdings
    from apportion.domains.portfolio.job import accepted_data
    from apportion.domains.portfolio.rules import CASH, Rules
    from apportion.domains.portfolio.training import next_allocation
    from apportion.runs.policy_file import load_about

    about = load_about(run.folder)
    table = accepted_data(prices, about)
    rules = Rules.from_dict(about.get("rules"))
    names = (CASH, *table.tickers) if rules.cash else table.tickers
    held = None if holdings is None else read_holdings(holdings, names)
    wanted = next_allocation(run.policy, table, window=about["window"], held=held, rules=rules)
    shares = np.asarray(wanted, float)
    shares = (shares / shares.sum()).tolist()
    allocation = dict(zip(names, shares, strict=True))
    if json:
        return {"date": str(table.dates[-1]), "allocation": allocation}
    width = max(map(len, allocation))
    ordered = sorted(allocation.items(), key=lambda pair: -pair[1])
    lines = [f"  {name:{width}}  {share:8.3%}" for name, share in ordered]
    return "\n".join([f"allocation for the period after {table.dates[-1]}", *lines])
