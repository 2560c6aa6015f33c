"""Instruments that are listed late or delisted: no price before their first or after their last.

While an instrument is not there its price stands still and its limit is 0. It can be bought at its
first close and is sold at its last one: a delisting is known by then.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from apportion.errors import InputError


def outside(closes: np.ndarray) -> np.ndarray:
    """Days before the first and after the last price; the rest must be full."""
    priced = ~np.isnan(closes)
    started = np.maximum.accumulate(priced, axis=0)
    ended = ~np.maximum.accumulate(priced[::-1], axis=0)[::-1]
    return ~started | ended


def fill(values: np.ndarray) -> np.ndarray:
    """Prices that stand still where there are none, (time, universe) or with channels behind."""
    if not np.isnan(values).any():
        return values
    if values.ndim == 2:
        # A column without any price yet stands at 1.
        return pd.DataFrame(values).ffill().bfill().fillna(1.0).to_numpy()
    close = fill(values[..., 0])
    return np.where(np.isnan(values[..., :1]), close[..., None], values)


def tradable(close: np.ndarray) -> np.ndarray | None:
    """Whether an instrument can be held over the period that ends on each row; None where all can.

    One row more than the prices: of the period after the last row only its beginning is known.
    """
    priced = ~np.isnan(close)
    if priced.all():
        return None
    begins = np.concatenate([priced[:1], priced])
    ends = np.concatenate([priced, np.ones_like(priced[:1])])
    return begins & ends


def refuse_empty_days(
    close: np.ndarray, dates: np.ndarray, tickers: Sequence[str], least: int, path: Path
) -> None:
    """Refuse tickers without any price, and days on which too few have one."""
    priced = ~np.isnan(close)
    never = np.flatnonzero(~priced.any(0))
    if len(never):
        raise InputError(f'{path}: ticker "{tickers[never[0]]}" has no price at all; drop it')
    few = np.flatnonzero(priced.sum(1) < least)
    if len(few):
        raise InputError(
            f"{path}: {priced[few[0]].sum()} tickers have a price on {dates[few[0]]}; at least "
            f"{least} are needed on every day, so cut such days off or add tickers"
        )
