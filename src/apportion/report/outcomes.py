"""Pictures of what a policy does and earns: allocations, value against baselines, drawdown.

Each is a `Plot` from a plain data frame, said in words as well; the words' numbers are of all rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from apportion.report.drawing import (
    COLOURS,
    POINTS,
    dash,
    distinct,
    numbers,
    thin,
    time_axis,
    times,
)
from apportion.report.page import Plot

_DRAWN = 4
_FIRST = ("policy",)
"""Who is drawn boldly."""
_EQUAL = "equal-crp"
_WELL_KNOWN = ("p-mtl", "mtl", "stl", "lazy-crp", _EQUAL)
_NAMED = 8
"""Strategies that a sentence names, where none is known."""


def allocations(shares: pd.DataFrame) -> Plot:
    """Each entity's share less an equal one, in percentage points: those furthest from it.

    A row for each period, a column for each entity; whoever has no share at all in a period is absent
    from it, and equal shares are among the others.
    """
    there = shares > 0
    away = 100 * shares.sub(1 / there.sum(axis=1), axis=0).where(there)
    far = away.abs().mean().fillna(0.0).sort_values(ascending=False).index
    shown: Any = away[far[:COLOURS]]
    furthest = away.abs().max(axis=1)
    cut = f" The {COLOURS} furthest from it can be drawn." if len(far) > COLOURS else ""
    words = (
        f"{shares.shape[1]} entities over {len(shares)} periods. On average {far[0]} holds "
        f"{shares[far[0]].mean():.1%}, {away[far[0]].mean():+.2f} points from an equal share; the share "
        f"furthest from it lies {furthest.mean():.2f} points away on average, {furthest.max():.2f} at "
        f"most.{cut}"
    )
    title = "Shares over time, as they differ from equal ones"
    axis = {"title": "share less an equal one (percentage points)", "kind": "number"}
    return _lines(title, words, shown, axis, first=far[:1], drawn=far[:_DRAWN])


def values(wealth: pd.DataFrame, *, trained: str | None = None) -> Plot:
    """Wealth of each strategy on a logarithmic axis.

    Days up to `trained` are shaded: the policy was trained on them.
    """
    words = "At the end: " + _named(wealth.iloc[-1], "{:.3f}", best="highest")
    axis = {"title": "value (multiples of what was invested, log scale)", "kind": "log"}
    return _lines("Value of 1 invested", words, wealth, axis, trained=trained)


def ahead_of_equal(wealth: pd.DataFrame, *, trained: str | None = None) -> Plot:
    """Wealth of each strategy over that of equal shares restored daily, which is in the table."""
    ahead = (wealth.div(wealth[_EQUAL], axis=0) - 1).drop(columns=_EQUAL)
    words = "At the end: " + _named(ahead.iloc[-1], "{:+.1%}", best="highest")
    axis = {"title": "value over that of Equal CRP (%)", "kind": "percent"}
    return _lines("Ahead of Equal CRP", words, ahead, axis, trained=trained)


def accuracies(tested: pd.DataFrame) -> Plot:
    """Accuracy of the aggregate model, a row for each round, a column for each way to aggregate."""
    last = tested.iloc[-1].sort_values(ascending=False)
    words = "In the last round: " + ", ".join(f"{name} {x:.1%}" for name, x in last.items()) + "."
    axis = {"title": "test accuracy (% of images)", "kind": "percent"}
    first, drawn = ("policy", "learned"), list(tested.columns[:_DRAWN])
    rounds = tested.rename_axis(str(tested.index.name or "round"))
    return _lines("Test accuracy by round", words, rounds, axis, first=first, drawn=drawn)


def drawdowns(wealth: pd.DataFrame, *, trained: str | None = None) -> Plot:
    """How far each strategy lies below its own highest value so far, which starts at 1."""
    below = wealth / wealth.cummax().clip(lower=1.0) - 1
    words = "Deepest: " + _named(below.min(), "{:.1%}", best="deepest")
    axis = {"title": "below the highest value so far (%)", "kind": "percent"}
    return _lines("Drawdown", words, below, axis, trained=trained)


def _named(row: pd.Series, form: str, *, best: str) -> str:
    """The values of those that are drawn, and the extreme one of all."""
    known = [name for name in (*_FIRST, *_WELL_KNOWN) if name in row.index]
    rest = [name for name in row.index if name not in known]
    named = ", ".join(f"{name} {form.format(row[name])}" for name in known or rest[:_NAMED])
    far = row.idxmin() if best == "deepest" else row.idxmax()
    return f"{named}; {best} of all {len(row)}: {far}, {form.format(row[far])}."


def _lines(
    title: str,
    words: str,
    frame: pd.DataFrame,
    axis: dict[str, str],
    *,
    first: Sequence[str] | pd.Index = _FIRST,
    drawn: Sequence[str] | pd.Index = _WELL_KNOWN,
    trained: str | None = None,
) -> Plot:
    """A line for each column; of many only those in `first` and `drawn`, any other by a click."""
    shown = thin(frame, POINTS)
    bold = [column for column in shown.columns if column in set(first)]
    known = [column for column in shown.columns if column in set(drawn) and column not in bold]
    order = bold + known + [c for c in shown.columns if c not in {*bold, *known}]
    crowded = len(order) > _DRAWN + 1
    data = [
        {
            "type": "line",
            "y": numbers(np.asarray(shown[column], float)),
            "name": name,
            "color": place % COLOURS + 1,
            "width": 2.8 if column in bold else 1.5,
            "dash": "solid" if column in bold else dash(place - len(bold) + 1),
            "hidden": crowded and column not in {*bold, *known},
        }
        for place, (column, name) in enumerate(zip(order, distinct(order), strict=True))
    ]
    layout = {"x": times(shown.index), "xaxis": time_axis(frame.index), "yaxis": axis}
    return Plot(title, words, data, layout | {"trained": trained}, wide=True)
