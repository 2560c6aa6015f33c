"""Plots of a run: read its tables, reduce them to the resolution of a screen, and build Plotly figures.

A plot is plain Plotly JSON, built from a data frame. Numbers in its description refer to all rows. Domains
build their plots with `lines`.
"""

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.errors import reading
from apportion.report.page import Plot, number
from apportion.runs.files import read_bytes, read_json
from apportion.runs.folder import Run

COLOURS = (
    *("#0f766e", "#d97706", "#3b5bdb", "#b3452c", "#7c4dbd", "#4d7c0f"),
    *("#be3a78", "#0e7490", "#8a6d1d", "#57606a", "#2f9e44", "#9c36b5"),
)
"""Colours of series, in order; plots with more series repeat them."""
_GREEN, _ORANGE, _NEUTRAL = COLOURS[0], COLOURS[1], "#f4f3ee"
_BAND, _SHADE = "rgba(15,118,110,0.18)", "rgba(87,96,106,0.12)"
_DASHES = ("solid", "dash", "dot", "dashdot")
_MAX_LEGEND_NAME, _MAX_TASK_NAME = 48, 20
_MAX_CURVE_POINTS, _MAX_LINE_POINTS, _MAX_HEAT_COLUMNS, _MAX_TASKS = 50, 300, 80, 60
_AXES = {
    "reward": "reward per period (unit of the problem)",
    "deviation": "largest deviation (share, 0 to 1)",
    "score": "score (no unit)",
    "loss": "loss (unit of the reward)",
}
_KINDS = {
    "number": {"type": "linear", "separatethousands": True},
    "percent": {"type": "linear", "tickformat": ".3~%", "hoverformat": ".2%"},
    "log": {"type": "log"},
    "date": {"type": "date"},
    "category": {"type": "category"},
}
_DRAWN_LINES = 4
_WELL_KNOWN = ("p-mtl", "mtl", "stl", "lazy-crp", "equal-crp")


def read_table(folder: Path, name: str, *, indexed: bool = False) -> pd.DataFrame | None:
    """Read a table of a run or a study, `indexed` by its first column; None if there is none."""
    path = folder / f"{name}.csv"
    if (folder / f"{name}.parquet").is_dir():
        frame = Run(folder).table(name)
    elif path.exists():
        with reading(path, "restore it from a copy"):
            frame = pd.read_csv(io.BytesIO(read_bytes(path)))
    else:
        return None
    return frame.set_index(frame.columns[0]) if indexed else frame


def read_if_there(path: Path) -> Any:
    """Read a JSON file, or return an empty mapping if there is none."""
    return read_json(path) if path.exists() else {}


def _labels(names: Sequence[Any] | pd.Index, length: int = _MAX_LEGEND_NAME) -> list[str]:
    """Return names on one line each, truncated and escaped for Plotly.

    >>> _labels(["a  name", "<b>"])
    ['a name', '&lt;b&gt;']
    """
    words = (" ".join(str(name).split()) for name in names)
    cut = (name if len(name) <= length else f"{name[: length - 1]}…" for name in words)
    return [escape(name, quote=False) for name in cut]


def _thin(frame: Any, count: int) -> pd.DataFrame:
    """Return evenly spaced rows, including the first and the last."""
    if len(frame) <= count:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, count).round().astype(int))]


def _numbers(series: Any) -> list[float | None]:
    """Round to seven significant digits, with None for values that are not finite."""
    values = np.asarray(series, float)
    return [float(f"{value:.7g}") if np.isfinite(value) else None for value in values]


def _times(index: pd.Index) -> list[Any]:
    """Return the index as numbers, dates, or local times to the minute."""
    if pd.api.types.is_numeric_dtype(index):
        return _numbers(index)
    return [str(value)[:16] for value in index]


def _layout(index: pd.Index, title: str, kind: str) -> dict[str, Any]:
    """Return the axes; `title` is that of the vertical axis and is shown above the plot."""
    numeric = pd.api.types.is_numeric_dtype(index)
    dates = all(len(str(value)) <= 10 for value in index)
    below = "date" if dates else "time of day (hours and minutes)"
    if numeric:
        below = f"{index.name or 'period'} (count)"
    return {
        "title": {"text": escape(title, quote=False)},
        "xaxis": {
            "title": {"text": escape(below, quote=False)},
            **_KINDS["number" if numeric else "date"],
        },
        "yaxis": {"hoverformat": ",.4~r", **_KINDS[kind]},
    }


def learning_curve(metrics: pd.DataFrame, column: str, title: str) -> Plot:
    """Plot one metric over training: the median over runs, with a band of the middle half.

    Parameters
    ----------
    metrics : DataFrame
        One row per recorded step, with the columns `step`, `column` and, for several runs, `run`. Rows
        between two points of the curve are averaged; for a single run they give the band.
    column : str
        The metric.
    title : str
        Heading of the plot.
    """
    steps = metrics["step"]
    width = max((steps.max() - steps.min() + 1) / _MAX_CURVE_POINTS, 1)
    bins = ((steps - steps.min()) // width).astype(int)
    rows: Any = metrics.groupby(bins)
    values = rows[column]
    if "run" in metrics and metrics["run"].nunique() > 1:
        by_run: Any = metrics.groupby([bins, metrics["run"]])[column].mean()
        values = by_run.groupby(level=0)
    quantiles = values.quantile([0.25, 0.5, 0.75]).unstack()
    quantiles.index = pd.Index(rows["step"].max(), name="step")
    low, middle, high = (quantiles[part] for part in (0.25, 0.5, 0.75))
    line = _line(_numbers(middle.index), middle, "", color=_GREEN, width=2.2)
    data = [line]
    if not np.allclose(low, high, equal_nan=True):
        known = np.isfinite(low) & np.isfinite(high)
        below, above = low[known], high[known][::-1]
        band = _line(_numbers([*below.index, *above.index]), [*below, *above], "", width=0)
        data = [band | {"fill": "toself", "fillcolor": _BAND, "hoverinfo": "skip"}, line]
    layout = _layout(quantiles.index, _AXES.get(column, f"{column} (own unit)"), "number")
    words = f"{title}, from {number(middle.iloc[0])} to {number(middle.iloc[-1])}."
    return Plot(title, words, data, layout | {"showlegend": False})


def task_probabilities(probabilities: pd.DataFrame, title: str) -> Plot:
    """Plot the probability of each task as a heat map; the uniform probability has a neutral colour.

    Parameters
    ----------
    probabilities : DataFrame
        One row per step, which is the index, and one column per task. If there are more than 60 tasks,
        those with the largest probabilities at the end are shown.
    title : str
        Heading of the plot.
    """
    last = probabilities.iloc[-1]
    shown = last.sort_values(ascending=False).index[:_MAX_TASKS]
    kept = probabilities[[c for c in probabilities.columns if c in set(shown)]]
    frame = _thin(kept, _MAX_HEAT_COLUMNS)
    uniform = 1 / probabilities.shape[1]
    cut = f" The {len(shown)} most probable tasks are shown." if len(shown) < len(last) else ""
    words = (
        f"{probabilities.shape[1]} tasks; uniform sampling is {uniform:.2%} each. At the end the most "
        f"probable task, {last.idxmax()}, has {last.max():.2%} and the least probable {last.min():.2%}. "
        "Green is above uniform, orange below."
    )
    heat = {
        "type": "heatmap",
        "x": _numbers(frame.index),
        "y": _labels(frame.columns, _MAX_TASK_NAME),
        "z": [_numbers(frame[column].fillna(0.0)) for column in frame.columns],
        "zmid": uniform,
        "colorscale": [[0, _ORANGE], [0.5, _NEUTRAL], [1, _GREEN]],
        "showscale": False,
        "hovertemplate": "step %{x}<br>%{y}<br>%{z:.2%}<extra></extra>",
    }
    layout = _layout(frame.index.rename("step"), "task (name)", "category")
    return Plot(title, words + cut, [heat], layout | {"hovermode": "closest"}, wide=True)


def allocations(shares: pd.DataFrame) -> Plot:
    """Plot each entity's share minus an equal share, in percentage points, for the largest deviations.

    Parameters
    ----------
    shares : DataFrame
        One row per period and one column per entity. An entity with share 0 is absent in that period and
        does not count for the equal share.
    """
    present = shares > 0
    away = 100 * shares.sub(1 / present.sum(axis=1), axis=0).where(present)
    far = away.abs().mean().fillna(0.0).sort_values(ascending=False).index
    shown: Any = away[far[: len(COLOURS)]]
    furthest = away.abs().max(axis=1)
    cut = f" The {len(COLOURS)} largest are available." if len(far) > len(COLOURS) else ""
    words = (
        f"{shares.shape[1]} entities over {len(shares)} periods. On average {far[0]} holds "
        f"{shares[far[0]].mean():.1%}, {away[far[0]].mean():+.2f} points from an equal share. The largest "
        f"deviation is {furthest.mean():.2f} points on average and {furthest.max():.2f} points at most."
        f"{cut}"
    )
    title = "Deviation from equal shares over time"
    axis = {"title": "share minus an equal share (percentage points)", "kind": "number"}
    return lines(title, words, shown, axis, first=far[:1], drawn=far[:_DRAWN_LINES])


def lines(
    title: str,
    words: str,
    frame: pd.DataFrame,
    axis: dict[str, str],
    *,
    first: Sequence[str] | pd.Index = ("policy",),
    drawn: Sequence[str] | pd.Index = _WELL_KNOWN,
    trained: str | None = None,
) -> Plot:
    """Plot one line per column over the index of a data frame.

    Parameters
    ----------
    title, words : str
        Heading and alternative text.
    frame : DataFrame
        The index is the date or the period.
    axis : dict
        `title` of the vertical axis with its unit, and `kind`: number, percent or log.
    first : sequence of str
        Columns that are drawn first and in bold.
    drawn : sequence of str
        Columns that are drawn even if there are many; a click in the legend draws the others.
    trained : str, optional
        Last day of training; days up to it are shaded.
    """
    shown = _thin(frame, _MAX_LINE_POINTS)
    bold = [column for column in shown.columns if column in set(first)]
    known = [column for column in shown.columns if column in set(drawn) and column not in bold]
    order = bold + known + [c for c in shown.columns if c not in {*bold, *known}]
    crowded = len(order) > _DRAWN_LINES + 1
    x = _times(shown.index)
    data = []
    for place, (column, name) in enumerate(zip(order, _labels(order), strict=True)):
        dash = "solid" if column in bold else _DASHES[(place - len(bold) + 1) % len(_DASHES)]
        width = 2.8 if column in bold else 1.5
        colour = COLOURS[place % len(COLOURS)]
        line = _line(x, shown[column], name, color=colour, width=width, dash=dash)
        waits = crowded and column not in {*bold, *known}
        data.append(line | {"visible": "legendonly" if waits else True})
    layout = _layout(frame.index, **axis)
    if trained:
        end = min(max(trained, x[0]), x[-1])
        shade = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": x[0], "x1": end}
        look = {"fillcolor": _SHADE, "line": {"width": 0}, "layer": "below"}
        layout["shapes"] = [shade | look]
    return Plot(title, words, data, layout, wide=True)


def _line(x: list[Any], y: Any, name: str, **look: Any) -> dict[str, Any]:
    """Return a Plotly trace; `look` is its `line`, such as colour and width."""
    trace = {"type": "scatter", "mode": "lines", "name": name}
    return trace | {"x": x, "y": _numbers(y), "line": look}
