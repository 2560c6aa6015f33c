"""Pictures of what a policy does and earns: allocations, value against baselines, drawdown.

Each is a `Plot` from a plain data frame, said in words as well; the words' numbers are of all rows.
"""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from apportion.report.drawing import (
    COLOURS,
    POINTS,
    dash,
    distinct,
    log_ticks,
    numbers,
    thin,
    time_axis,
    times,
)
from apportion.report.page import Plot, plain

_DRAWN = 8
_EQUAL = "equal-crp"
_LEARNED = ("p-mtl", "mtl", "stl", "lazy-crp")
_WELL_KNOWN = (*_LEARNED, _EQUAL, "buy-and-hold")


def allocations(
    shares: pd.DataFrame, *, title: str = "Allocations over time", most: int = COLOURS
) -> Plot:
    """Stacked area: a row for each period, a column for each entity; the small ones are summed."""
    order = shares.mean().sort_values(ascending=False).index
    kept = shares[order]
    if len(order) > most:
        kept = shares[order[: most - 1]].copy()
        kept[f"{len(order) - most + 1} others"] = shares[order[most - 1 :]].sum(axis=1)
    shown = thin(kept, POINTS)
    when, names = times(shown.index), distinct(shown.columns)
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "shares",
            "x": when,
            "y": numbers(shown[column]),
            "name": name,
            "line": {"width": 0.5, "color": f"$series-{place % COLOURS + 1}"},
            "hovertemplate": "%{y:.1%}",
        }
        for place, (column, name) in enumerate(zip(shown.columns, names, strict=True))
    ]
    layout = {
        "xaxis": time_axis(shown.index),
        "yaxis": {"tickformat": ".0%", "range": [0, 1], "title": {"text": "share"}},
        "hovermode": "x unified",
    }
    deviation = (shares - 1 / shares.shape[1]).abs().max(axis=1)
    words = (
        f"{shares.shape[1]} entities over {len(shares)} periods. On average {order[0]} holds "
        f"{shares[order[0]].mean():.1%} and {order[-1]} {shares[order[-1]].mean():.1%}; the share "
        f"furthest from equal lies {deviation.mean():.1%} from it on average, {deviation.max():.1%} "
        "at most."
    )
    return Plot(title, words, data, layout, wide=True)


def values(
    wealth: pd.DataFrame, *, title: str = "Value of 1 invested", first: Sequence[str] = ("policy",)
) -> Plot:
    """Wealth of each strategy on a logarithmic axis; those named in `first` are drawn boldly."""
    last = wealth.iloc[-1].sort_values(ascending=False)
    words = "At the end: " + ", ".join(f"{name} {value:.3f}" for name, value in last.items()) + "."
    layout = {
        "xaxis": time_axis(wealth.index),
        "yaxis": {"type": "log", "title": {"text": "value, log scale"}, **log_ticks(wealth)},
        "hovermode": "x unified",
    }
    return Plot(title, words, _lines(wealth, first, "%{y:.3f}"), layout, wide=True)


def ahead_of_equal(
    wealth: pd.DataFrame,
    *,
    title: str = "Ahead of Equal CRP",
    first: Sequence[str] = ("policy",),
) -> Plot:
    """Wealth of each strategy over that of equal shares restored daily, which is in the table."""
    ahead = (wealth.div(wealth[_EQUAL], axis=0) - 1).drop(columns=_EQUAL)
    last = ahead.iloc[-1].sort_values(ascending=False)
    words = "At the end: " + ", ".join(f"{name} {value:+.1%}" for name, value in last.items()) + "."
    layout = {
        "xaxis": time_axis(wealth.index),
        "yaxis": {"tickformat": "+.1%", "title": {"text": "value against Equal CRP"}},
        "hovermode": "x unified",
    }
    return Plot(title, words, _lines(ahead, first, "%{y:+.2%}", drawn=_LEARNED), layout, wide=True)


def accuracies(tested: pd.DataFrame, *, title: str = "Test accuracy by round") -> Plot:
    """Accuracy of the aggregate model, a row for each round, a column for each way to aggregate."""
    last = tested.iloc[-1].sort_values(ascending=False)
    words = "In the last round: " + ", ".join(f"{name} {x:.1%}" for name, x in last.items()) + "."
    layout = {
        "xaxis": {"title": {"text": plain(tested.index.name or "round")}},
        "yaxis": {"tickformat": ".0%", "title": {"text": "test accuracy"}},
        "hovermode": "x unified",
    }
    return Plot(title, words, _lines(tested, ("policy", "learned"), "%{y:.1%}"), layout, wide=True)


def drawdowns(
    wealth: pd.DataFrame, *, title: str = "Drawdown", first: Sequence[str] = ("policy",)
) -> Plot:
    """How far each strategy lies below its own highest value so far, which starts at 1."""
    peaks = wealth.cummax().clip(lower=1.0)
    below = wealth / peaks - 1
    worst = below.min().sort_values()
    words = "Deepest: " + ", ".join(f"{name} {value:.1%}" for name, value in worst.items()) + "."
    layout = {
        "xaxis": time_axis(wealth.index),
        "yaxis": {"tickformat": ".0%", "title": {"text": "below the peak"}},
        "hovermode": "x unified",
    }
    return Plot(title, words, _lines(below, first, "%{y:.1%}"), layout, wide=True)


def _lines(
    frame: pd.DataFrame, first: Sequence[str], hover: str, *, drawn: Sequence[str] = _WELL_KNOWN
) -> list[dict[str, Any]]:
    shown = thin(frame, POINTS)
    bold = [column for column in shown.columns if column in set(first)]
    known = [column for column in shown.columns if column in drawn and column not in bold]
    order = bold + known + [c for c in shown.columns if c not in {*bold, *known}]
    # Of many strategies the well-known ones are drawn; a click in the legend draws any other.
    crowded = len(order) > _DRAWN
    when = times(shown.index)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": when,
            "y": numbers(shown[column]),
            "name": name,
            "line": {
                "color": f"$series-{place % COLOURS + 1}",
                "width": 2.8 if column in bold else 1.5,
                "dash": "solid" if column in bold else dash(place - len(bold) + 1),
            },
            "hovertemplate": hover,
            "visible": "legendonly" if crowded and column not in {*bold, *known} else True,
        }
        for place, (column, name) in enumerate(zip(order, distinct(order), strict=True))
    ]
