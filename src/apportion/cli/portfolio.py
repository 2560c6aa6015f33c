"""`apportion backtest` and `apportion allocate`: a trained portfolio policy at work on prices."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from apportion.cli.parsing import parse
from apportion.errors import InputError

_Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
_Day = Annotated[str | None, tyro.conf.arg(metavar="DAY")]


@dataclass(frozen=True)
class Backtest:
    """What a trained policy would have earned, net of costs and gross, with every baseline.

    Wealth is 1 at the close before --start; the first period ends on the first trading day on or
    after it. Earlier rows of the file serve as history.

    Example: apportion backtest runs/first --prices prices.csv --start 2019-01-01 --json
    """

    folder: _Folder
    """Folder of a portfolio run."""
    prices: _File = None
    """CSV or Parquet file of daily prices; none takes the 20 embedded stocks."""
    start: _Day = None
    """First day, such as 2019-01-01; by default the day after the last one trained on."""
    end: _Day = None
    """Last day; by default the last in the file."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class Allocate:
    """The next period's allocation: what a trained policy gives to each instrument.

    Example: apportion allocate runs/first --prices prices.csv --holdings today.csv --json
    """

    folder: _Folder
    """Folder of a portfolio run."""
    prices: _File = None
    """CSV or Parquet file of daily prices; none takes the 20 embedded stocks."""
    holdings: _File = None
    """Today's shares: a CSV with columns ticker and share, or a JSON object; default equal."""
    json: bool = False
    """Print one JSON object."""


def backtest(arguments: Sequence[str]) -> Any:
    """Run `apportion backtest`."""
    given = parse(Backtest, arguments, "backtest")
    run = _portfolio_run(given.folder)

    from apportion.domains.portfolio.job import judge, read_prices
    from apportion.runs.policy_file import load_about

    policy, about = run.policy, load_about(given.folder)
    prices = read_prices(given.prices)
    result = judge(policy, about, prices, start=given.start, end=given.end)
    return result.to_json() if given.json else result.summary()


def allocate(arguments: Sequence[str]) -> Any:
    """Run `apportion allocate`."""
    given = parse(Allocate, arguments, "allocate")
    run = _portfolio_run(given.folder)

    import numpy as np

    from apportion.domains.portfolio.job import fitting, read_prices
    from apportion.domains.portfolio.training import next_allocation
    from apportion.runs.policy_file import load_about

    policy, about = run.policy, load_about(given.folder)
    prices = fitting(read_prices(given.prices), about)
    held = None if given.holdings is None else read_holdings(given.holdings, prices.tickers)
    shares = np.asarray(next_allocation(policy, prices, window=about["window"], held=held), float)
    shares = (shares / shares.sum()).tolist()
    allocation = dict(zip(prices.tickers, shares, strict=True))
    if given.json:
        return {"date": str(prices.dates[-1]), "allocation": allocation}
    width = max(map(len, allocation))
    lines = [f"allocation for the period after {prices.dates[-1]}"]
    ordered = sorted(allocation.items(), key=lambda pair: -pair[1])
    return "\n".join([*lines, *(f"  {name:{width}}  {share:8.3%}" for name, share in ordered)])


def _portfolio_run(folder: Path) -> Any:
    """A finished portfolio run, refused before anything slow is started if it is not one."""
    from apportion.runs.folder import load_run

    run = load_run(folder)
    if run.job not in ("portfolio", "demo"):
        raise InputError(f"{folder}: a run of {run.job!r}; give the folder of a portfolio run")
    if not run.finished:
        raise InputError(f"{folder}: is not finished; continue it with `apportion resume {folder}`")
    return run


def read_holdings(path: Path, tickers: Sequence[str]) -> Any:
    """Today's shares in the order of `tickers`; one that the file leaves out holds nothing."""
    import json

    import numpy as np
    import pandas as pd

    try:
        if path.suffix.lower() == ".json":
            given = json.loads(path.read_text())
            content = given.get("allocation", given)
            names, values = list(content), list(content.values())
        else:
            table = pd.read_csv(path)
            names, values = [str(t).strip() for t in table["ticker"]], list(table["share"])
        shares = np.array([float(value) for value in values])
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; give a CSV or JSON file of shares") from None
    except (KeyError, ValueError, TypeError, AttributeError):
        raise InputError(
            f"{path}: not a table of shares; write a CSV with columns ticker and share, or a JSON "
            "object of ticker to share"
        ) from None
    unknown = [name for name in names if name not in set(tickers)]
    if unknown or len(set(names)) < len(names):
        what = f"{unknown[0]} is not among the prices" if unknown else "a ticker occurs twice"
        raise InputError(f"{path}: {what}; name each ticker of the price file at most once")
    if not np.isfinite(shares).all() or (shares < 0).any() or abs(shares.sum() - 1) > 1e-3:
        raise InputError(
            f"{path}: the shares sum to {shares.sum():.6g} and the least is "
            f"{shares.min(initial=0):.6g}; shares must be >= 0 and sum to 1"
        )
    places = {ticker: place for place, ticker in enumerate(tickers)}
    held = np.zeros(len(tickers))
    held[[places[name] for name in names]] = shares / shares.sum()
    return held
