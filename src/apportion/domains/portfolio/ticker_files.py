"""Small CSV files with a row for each ticker, such as commissions, lots and groups. Starts no JAX."""

import math
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from apportion.errors import InputError, reading


def read_ticker_file(path: Path, give: str) -> pd.DataFrame:
    """The file's cells as text, under column names in small letters; `give` says what is wanted."""
    if not path.exists():
        raise InputError(f"{path}: no such file; give {give}")
    with reading(path, "save it as a plain CSV"):
        # Names are text, as in the prices: 000001 and NA too.
        table = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
    return table.rename(columns=lambda name: str(name).strip().lower())


def number_in(cell: Any) -> float:
    """The number that a cell holds, or NaN."""
    try:
        return float(cell)
    except (ValueError, TypeError, OverflowError):  # a whole number of JSON may be too long
        return math.nan


def require_rows(
    known: Container[str], tickers: Sequence[str], source: Path | str, what: str
) -> None:
    """Refuse a file that says nothing of a ticker of the prices."""
    unknown = [ticker for ticker in tickers if ticker not in known]
    if unknown:
        raise InputError(
            f"{source}: {len(unknown)} of {len(tickers)} tickers have no {what}, first {unknown[0]}; "
            "give a file with a row for each ticker of the prices, or one number"
        )
