"""The pictures of a report, from plain data frames: a `Plot` each, said in words as well.

Long records are thinned to what a screen can show; the numbers in the words are of all of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator
from scipy import stats

from apportion.errors import InputError
from apportion.report.page import Plot, number, plain

_POINTS = 400
_DOTS = 1500
_COLOURS = 12
_SOFT_COLOURS = 6
_DASHES = ("solid", "dash", "dot", "dashdot")


def learning_curve(
    metrics: pd.DataFrame, column: str, title: str, *, axis: str = "", every: int = 80
) -> Plot:
    """One metric over training: the median over runs with the band of the middle half.

    Parameters
    ----------
    metrics
        A row for each recorded step, with `step`, the metric, and perhaps `method` and `run`.
    column
        The metric.
    axis
        What its axis says; the column's name by default.
    every
        Points of a curve; rows in between are averaged.
    """
    _need(metrics, ["step", column], "metrics")
    data: list[dict[str, Any]] = []
    words = []
    methods = metrics["method"].unique() if "method" in metrics else [None]
    for place, method in enumerate(methods):
        rows: Any = metrics if method is None else metrics[metrics["method"] == method]
        middle, low, high = _band(rows, column, every)
        steps = _numbers(middle.index)
        name = plain(method) if method is not None else "median of runs" if "run" in rows else ""
        colour = place % _SOFT_COLOURS + 1
        if not np.allclose(low, high, equal_nan=True):
            data.append(
                {
                    "type": "scatter",
                    "x": steps + steps[::-1],
                    "y": _numbers(high) + _numbers(low)[::-1],
                    "fill": "toself",
                    "fillcolor": f"$series-{colour}-soft",
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                }
            )
        data.append(
            {
                "type": "scatter",
                "mode": "lines",
                "x": steps,
                "y": _numbers(middle),
                "name": name,
                "line": {"color": f"$series-{colour}", "width": 2.2, "dash": _dash(place)},
                "hovertemplate": "step %{x}: %{y:.4g}" + ("<extra></extra>" if not name else ""),
                "showlegend": method is not None,
            }
        )
        whose = f"{method}: " if method is not None else ""
        words.append(f"{whose}from {number(middle.iloc[0])} to {number(middle.iloc[-1])}")
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": plain(axis or column)}},
        "hovermode": "x unified" if len(methods) > 1 else "x",
    }
    return Plot(title, f"{title}, {'; '.join(words)}.", data, layout)


def draw_frequencies(
    metrics: pd.DataFrame, *, tasks: int | None = None, periods: int = 40
) -> pd.DataFrame:
    """How often each task was drawn, period after period: a row for each period, a column a task."""
    _need(metrics, ["step", "task"], "metrics")
    drawn = metrics["task"].to_numpy()
    highest = int(drawn.max()) + 1
    tasks = highest if tasks is None else max(tasks, highest)
    steps = metrics["step"].to_numpy()
    edges = np.linspace(steps.min(), steps.max() + 1, min(periods, len(np.unique(steps))) + 1)
    when = np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, len(edges) - 2)
    counts = np.zeros((len(edges) - 1, tasks))
    np.add.at(counts, (when, drawn), 1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return pd.DataFrame(shares, index=pd.Index(edges[1:] - 1, name="step"), columns=range(tasks))


def task_probabilities(
    probabilities: pd.DataFrame,
    *,
    title: str = "Probability of each task over training",
    most: int = 60,
) -> Plot:
    """Heat map: a column for each row of the frame (its index is the step), a line for each task.

    Of more than `most` tasks the ones drawn most often at the end are shown.
    """
    last = probabilities.iloc[-1]
    shown = last.sort_values(ascending=False).index[:most]
    frame = _thin(probabilities[[c for c in probabilities.columns if c in set(shown)]], 120)
    names = _distinct(frame.columns)
    uniform = 1 / probabilities.shape[1]
    cut = f" The {len(shown)} likeliest tasks are shown." if len(shown) < len(last) else ""
    words = (
        f"{probabilities.shape[1]} tasks; uniform drawing is {uniform:.2%} each. At the end the "
        f"likeliest, {last.idxmax()}, has {last.max():.2%} and the least likely {last.min():.2%}."
    )
    data = [
        {
            "type": "heatmap",
            "x": _numbers(frame.index),
            "y": names,
            "z": [_numbers(frame[column]) for column in frame.columns],
            "colorscale": [[0, "$heat-0"], [0.35, "$heat-1"], [0.7, "$heat-2"], [1, "$heat-3"]],
            "zmin": 0,
            "colorbar": {"thickness": 10, "tickformat": ".1%", "outlinewidth": 0},
            "hovertemplate": "step %{x:.0f}<br>%{y}<br>%{z:.2%}<extra></extra>",
        }
    ]
    layout = {
        "xaxis": {"title": {"text": "step"}, "showgrid": False},
        "yaxis": {"type": "category", "showgrid": False, "title": {"text": "task"}},
    }
    return Plot(title, words + cut, data, layout, wide=True)


def allocations(
    shares: pd.DataFrame, *, title: str = "Allocations over time", most: int = _COLOURS
) -> Plot:
    """Stacked area: a row for each period, a column for each entity; the small ones are summed."""
    order = shares.mean().sort_values(ascending=False).index
    kept = shares[order]
    if len(order) > most:
        kept = shares[order[: most - 1]].copy()
        kept[f"{len(order) - most + 1} others"] = shares[order[most - 1 :]].sum(axis=1)
    thin = _thin(kept, _POINTS)
    times, names = _times(thin.index), _distinct(thin.columns)
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "stackgroup": "shares",
            "x": times,
            "y": _numbers(thin[column]),
            "name": name,
            "line": {"width": 0.5, "color": f"$series-{place % _COLOURS + 1}"},
            "hovertemplate": "%{y:.1%}",
        }
        for place, (column, name) in enumerate(zip(thin.columns, names, strict=True))
    ]
    layout = {
        "xaxis": _time_axis(thin.index),
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
        "xaxis": _time_axis(wealth.index),
        "yaxis": {"type": "log", "title": {"text": "value, log scale"}, **_log_ticks(wealth)},
        "hovermode": "x unified",
    }
    return Plot(title, words, _lines(wealth, first, "%{y:.3f}"), layout, wide=True)


def drawdowns(
    wealth: pd.DataFrame, *, title: str = "Drawdown", first: Sequence[str] = ("policy",)
) -> Plot:
    """How far each strategy lies below its own highest value so far, which starts at 1."""
    peaks = wealth.cummax().clip(lower=1.0)
    below = wealth / peaks - 1
    worst = below.min().sort_values()
    words = "Deepest: " + ", ".join(f"{name} {value:.1%}" for name, value in worst.items()) + "."
    layout = {
        "xaxis": _time_axis(wealth.index),
        "yaxis": {"tickformat": ".0%", "title": {"text": "below the peak"}},
        "hovermode": "x unified",
    }
    return Plot(title, words, _lines(below, first, "%{y:.1%}"), layout, wide=True)


def score_against_gradient(
    metrics: pd.DataFrame, *, title: str = "Score against gradient norm"
) -> Plot:
    """The paper's Figure 2 (right): does a task's score tell how much there is to learn from it?

    The rank correlation is given plainly and given training time, since both grow as training goes.
    """
    _need(metrics, ["step", "score", "gradient_norm"], "metrics")
    rows: Any = metrics[["step", "score", "gradient_norm"]].dropna()
    plainly, given_time = rank_correlations(rows["score"], rows["gradient_norm"], rows["step"])
    shown = rows.iloc[:: max(-(-len(rows) // _DOTS), 1)]
    norms = rows["gradient_norm"]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "x": _numbers(shown["score"]),
            "y": _numbers(shown["gradient_norm"]),
            "customdata": _numbers(shown["step"]),
            "marker": {
                "size": 5,
                "opacity": 0.7,
                "color": _numbers(shown["step"]),
                "colorscale": [[0, "$series-2"], [1, "$series-1"]],
                "colorbar": {"thickness": 10, "outlinewidth": 0, "title": {"text": "step"}},
            },
            "hovertemplate": "step %{customdata}<br>score %{x:.3g}<br>gradient %{y:.3g}<extra></extra>",
        }
    ]
    layout = {
        "xaxis": {"title": {"text": "score of the drawn task"}},
        "yaxis": {"type": "log", "title": {"text": "gradient norm"}, **_log_ticks(norms)},
        "hovermode": "closest",
    }
    words = (
        f"Rank correlation over {len(rows)} steps: {plainly:.2f}; {given_time:.2f} given the time "
        "in training."
    )
    return Plot(title, words, data, layout, wide=True)


def rank_correlations(first: pd.Series, second: pd.Series, step: pd.Series) -> tuple[float, float]:
    """Spearman's correlation of two series, and the same with the step's ranks taken out of both."""
    a, b, time = (stats.rankdata(series) for series in (first, second, step))
    ab, at, bt = (_correlation(x, y) for x, y in ((a, b), (a, time), (b, time)))
    rest = np.sqrt((1 - at**2) * (1 - bt**2))
    partial = (ab - at * bt) / rest if rest > 1e-12 else 0.0
    return round(ab, 4) + 0.0, round(float(partial), 4) + 0.0


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _band(rows: Any, column: str, every: int) -> tuple[Any, Any, Any]:
    """Median and quartiles over runs of the binned curve; over the bin's rows where there is one run."""
    steps = rows["step"]
    width = max((steps.max() - steps.min() + 1) / every, 1)
    bins = ((steps - steps.min()) // width).astype(int)
    when = rows.groupby(bins)["step"].max()
    if "run" in rows and rows["run"].nunique() > 1:
        by_run = rows.groupby([bins, rows["run"]])[column].mean()
        quantiles = by_run.groupby(level=0).quantile([0.25, 0.5, 0.75]).unstack()
    else:
        quantiles = rows.groupby(bins)[column].quantile([0.25, 0.5, 0.75]).unstack()
    quantiles.index = pd.Index(when)
    return quantiles[0.5], quantiles[0.25], quantiles[0.75]


def _lines(frame: pd.DataFrame, first: Sequence[str], hover: str) -> list[dict[str, Any]]:
    thin = _thin(frame, _POINTS)
    bold = [column for column in thin.columns if column in set(first)]
    order = bold + [column for column in thin.columns if column not in set(first)]
    times = _times(thin.index)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": times,
            "y": _numbers(thin[column]),
            "name": name,
            "line": {
                "color": f"$series-{place % _COLOURS + 1}",
                "width": 2.8 if column in bold else 1.5,
                "dash": "solid" if column in bold else _dash(place - len(bold) + 1),
            },
            "hovertemplate": hover,
        }
        for place, (column, name) in enumerate(zip(order, _distinct(order), strict=True))
    ]


def _distinct(names: Sequence[Any] | pd.Index) -> list[str]:
    """Names for Plotly; where two look the same once cut, their places tell them apart."""
    short = [plain(name) for name in names]
    return [
        name if short.count(name) == 1 else f"{name} ({place + 1})"
        for place, name in enumerate(short)
    ]


def _dash(place: int) -> str:
    return _DASHES[place % len(_DASHES)]


def _thin(frame: Any, most: int) -> pd.DataFrame:
    """Evenly spaced rows, the first and the last among them."""
    if len(frame) <= most:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, most).round().astype(int))]


def _numbers(series: Any) -> list[float | int | None]:
    """Five significant digits, and null where there is no number: JSON knows neither NaN nor inf."""
    return [
        None
        if not np.isfinite(value)
        else int(value)
        if value == int(value)
        else float(f"{value:.5g}")
        for value in np.asarray(series, float)
    ]


def _times(index: pd.Index) -> list[Any]:
    if pd.api.types.is_numeric_dtype(index):
        return _numbers(index)
    return [str(value)[:10] for value in index]


def _time_axis(index: pd.Index) -> Mapping[str, Any]:
    if pd.api.types.is_numeric_dtype(index):
        return {"title": {"text": "period"}}
    return {"type": "date"}


def _log_ticks(numbers: Any) -> Mapping[str, Any]:
    """Round numbers to mark on a logarithmic axis, however short or long its range is."""
    positive = np.asarray(numbers, float)
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


def _need(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    missing = [column for column in columns if column not in frame]
    if missing:
        raise InputError(f"{what}: no column {missing[0]!r}; it has {', '.join(map(str, frame))}")
    if frame.empty:
        raise InputError(f"{what}: no rows; record at least one step before a report is written")
