"""How numbers and names become a plot's: rounded, thinned to what a screen shows, told apart."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

COLOURS = 12
"""Series colours of the page's palette, 1 to 12."""
POINTS = 300
"""Points of a line; more cannot be told apart on a screen."""
_DASHES = ("solid", "dash", "dot", "dashdot")
_LONGEST_NAME = 48


def short(text: object) -> str:
    """A name in one line, cut where it is too long for a legend.

    >>> short("a  name" + "x" * 60)[:8], len(short("x" * 60))
    ('a namexx', 48)
    """
    words = " ".join(str(text).split())
    return words if len(words) <= _LONGEST_NAME else words[: _LONGEST_NAME - 1] + "…"


def distinct(names: Sequence[Any] | pd.Index) -> list[str]:
    """Names for a legend; where two look the same once cut, their places tell them apart."""
    cut = [short(name) for name in names]
    return [
        name if cut.count(name) == 1 else f"{name} ({place + 1})" for place, name in enumerate(cut)
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
    """Numbers as they are, days as days, and times of a day with their minutes."""
    if pd.api.types.is_numeric_dtype(index):
        return numbers(index)
    if all(len(str(value)) <= 10 for value in index):
        return [str(value) for value in index]
    # What the clock on the wall says, wherever it hangs.
    return [f"{str(value)[:16].replace(' ', 'T')}Z" for value in index]


def time_axis(index: pd.Index) -> Mapping[str, Any]:
    if pd.api.types.is_numeric_dtype(index):
        return {"title": f"{index.name or 'period'} (count)", "kind": "number"}
    days = all(len(str(value)) <= 10 for value in index)
    return {"title": "date" if days else "time of day (hours and minutes)", "kind": "date"}
