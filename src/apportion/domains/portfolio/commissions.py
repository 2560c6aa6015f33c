"""What trading costs: one rate for all, or a file of rates by instrument and side. Starts no JAX."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from apportion.domains.portfolio.ticker_files import number_in, read_ticker_file, require_rows
from apportion.errors import InputError

Commissions = float | Path | Mapping[str, Sequence[float]]
"""One rate, a file, or each ticker's two rates: on what is bought and on what is sold."""


def settled(commissions: Commissions) -> float | dict[str, list[float]]:
    """The rates themselves, as they are kept with a policy: a file is read."""
    if isinstance(commissions, Path):
        return read_commissions(commissions)
    if isinstance(commissions, Mapping):
        return {str(ticker): [float(rate) for rate in pair] for ticker, pair in commissions.items()}
    return float(commissions)


def rates_of(commissions: Commissions, tickers: Sequence[str]) -> float | np.ndarray:
    """The rates of these instruments: one, or (universe, 2) of what is bought and what is sold."""
    known = settled(commissions)
    if not isinstance(known, dict):
        return known
    source = commissions if isinstance(commissions, Path) else "the commissions"
    require_rows(known, tickers, source, "cost")
    return np.array([known[ticker] for ticker in tickers], float).reshape(-1, 2)


def describe(commissions: Commissions) -> str:
    """The rates in a few words.

    >>> describe(0.0025), describe({"A": [0.001, 0.002], "B": [0.0, 0.0]})
    ('0.25%', '0.00% to 0.20%')
    """
    known = settled(commissions)
    if not isinstance(known, dict):
        return f"{known:.2%}"
    rates = [rate for pair in known.values() for rate in pair]
    return f"{min(rates):.2%} to {max(rates):.2%}"


def read_commissions(path: Path) -> dict[str, list[float]]:
    """A CSV with columns ticker and cost, or ticker, buy and sell; fractions of the value traded."""
    table = read_ticker_file(path, "a number such as 0.0025, or a CSV of ticker and cost")
    columns = ["cost", "cost"] if "cost" in table.columns else ["buy", "sell"]
    for column in ("ticker", *columns):
        if column not in table.columns:
            raise InputError(
                f'{path}: column "{column}" is missing; the columns are ticker and cost, or ticker, '
                "buy and sell"
            )
    rates: dict[str, list[float]] = {}
    for row, values in enumerate(table.to_dict("records")):
        where, ticker = f"{path}: line {row + 2}", str(values["ticker"]).strip()
        if not ticker or ticker in rates:
            what = f"ticker {ticker} occurs twice" if ticker else "the ticker is empty"
            raise InputError(f"{where}: {what}; give each ticker one row")
        rates[ticker] = [_rate(str(values[column]), where) for column in columns]
    if not rates:
        raise InputError(f"{path}: names no ticker; give a row for each ticker of the prices")
    return rates


def _rate(text: str, where: str) -> float:
    rate = number_in(text)
    if not 0 <= rate < 0.5:
        raise InputError(
            f'{where}: "{text}" is no commission; write a fraction of at least 0 and below 0.5, such '
            "as 0.0025"
        )
    return rate
