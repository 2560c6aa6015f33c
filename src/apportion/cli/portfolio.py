"""`apportion backtest` and `apportion allocate`: a trained portfolio policy applied to prices."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from apportion.cli.options import File, Folder, Json, Prices
from apportion.errors import InputError

_Day = Annotated[str | None, Parameter(metavar="DAY")]


def backtest(
    folder: Folder,
    /,
    *,
    prices: Prices = None,
    start: _Day = None,
    end: _Day = None,
    json: Json = False,
) -> Any:
    """Backtest a trained policy on prices, net of costs and gross, with every baseline.

    Wealth is 1 at the close before --start; the first period ends on the first trading day on or
    after it. Earlier rows of the file serve as history.

    Example: `apportion backtest runs/first --prices prices.csv --start 2019-01-01 --json`

    Parameters
    ----------
    folder
        Folder of a portfolio run.
    start
        First day, such as 2019-01-01; by default the day after the last one trained on.
    end
        Last day; by default the last in the file.
    """
    run = _finished_portfolio_run(folder)

    from apportion.domains.portfolio.job import backtest_policy, read_prices
    from apportion.runs.policy_file import load_about

    result = backtest_policy(
        run.policy, load_about(folder), read_prices(prices), start=start, end=end
    )
    return result.to_json() if json else result.summary()


def allocate(
    folder: Folder, /, *, prices: Prices = None, holdings: File = None, json: Json = False
) -> Any:
    """Compute the next period's allocation of a trained policy.

    Example: `apportion allocate runs/first --prices prices.csv --holdings today.csv --json`

    Parameters
    ----------
    folder
        Folder of a portfolio run.
    holdings
        Today's shares: a CSV with columns ticker and share, or a JSON object; by default equal.
    """
    run = _finished_portfolio_run(folder)

    import numpy as np

    from apportion.domains.portfolio.holdings import read_holdings
    from apportion.domains.portfolio.job import accepted_data, read_prices
    from apportion.domains.portfolio.training import next_allocation
    from apportion.runs.policy_file import load_about

    policy, about = run.policy, load_about(folder)
    table = accepted_data(read_prices(prices), about)
    held = None if holdings is None else read_holdings(holdings, table.tickers)
    shares = np.asarray(next_allocation(policy, table, window=about["window"], held=held), float)
    shares = (shares / shares.sum()).tolist()
    allocation = dict(zip(table.tickers, shares, strict=True))
    if json:
        return {"date": str(table.dates[-1]), "allocation": allocation}
    width = max(map(len, allocation))
    ordered = sorted(allocation.items(), key=lambda pair: -pair[1])
    lines = [f"  {name:{width}}  {share:8.3%}" for name, share in ordered]
    return "\n".join([f"allocation for the period after {table.dates[-1]}", *lines])


def _finished_portfolio_run(folder: Path) -> Any:
    """A run that has a portfolio policy; any other is refused before anything slow is started."""
    from apportion.runs.folder import load_run

    run = load_run(folder)
    if run.job not in ("portfolio", "demo"):
        raise InputError(f"{folder}: a run of {run.job!r}; give the folder of a portfolio run")
    if not run.finished:
        raise InputError(f"{folder}: is not finished; continue it with `apportion resume {folder}`")
    return run
