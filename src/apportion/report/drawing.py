"""How numbers and names become Plotly's: rounded, thinned to what a screen shows, never read as tags."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator

from apportion.report.page import plain

COLOURS = 12
"""Series colours of the page's palette, `$series-1` to `$series-12`."""
POINTS = 400
"""Points of a line; more cannot be told apart on a screen."""
_DASHES = ("solid", "dash", "dot", "dashdot")


def distinct(names: Sequence[Any] | pd.Index) -> list[str]:
    """Names for Plotly; where two look the same once cut, their places tell them apart."""
    short = [plain(name) for name in names]
    return [
        name if short.count(name) == 1 else f"{name} ({place + 1})"
        for place, name in enumerate(short)
    ]


def dash(place: int) -> str:
    return _DASHES[place % len(_DASHES)]


def thin(frame: Any, most: int) -> pd.DataFrame:
    """Evenly spaced rows, the first and the last among them."""
    if len(frame) <= most:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, most).round().astype(int))]


def numbers(series: Any) -> list[float | int | None]:
    """Five significant digits, and null where there is no number: JSON knows neither NaN nor inf."""
    return [
        None
        if not np.isfinite(value)
        else int(value)
        if value == int(value)
        else float(f"{value:.5g}")
        for value in np.asarray(series, float)
    ]


def times(index: pd.Index) -> list[Any]:
    if pd.api.types.is_numeric_dtype(index):
        return numbers(index)
    return [str(value)[:10] for value in index]


def time_axis(index: pd.Index) -> Mapping[str, Any]:
    if pd.api.types.is_numeric_dtype(index):
        return {"title": {"text": "period"}}
    return {"type": "date"}


def log_ticks(values: Any) -> Mapping[str, Any]:
    """Round numbers to mark on a logarithmic axis, however short or long its range is."""
    positive = np.asarray(values, float)
    positive = positive[np.isfinite(positive) & (positive > 0)]
    if positive.size == 0:
        return {}
    low, high = positive.min(), positive.max()
    if high / low < 8:
        ticks = np.asarray(MaxNLocator(6).tick_values(low, high))
    else:
        powers = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
        digits = [1, 2, 5] if high / low < 1000 else [1]
        ticks = (powers[:, None] * np.array(digits)).ravel()
    ticks = ticks[ticks > 0]
    return {"tickvals": ticks.tolist(), "ticktext": [f"{tick:.4g}" for tick in ticks]}
