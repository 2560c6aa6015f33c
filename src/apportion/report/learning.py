"""Pictures of training: learning curves, which tasks were drawn, and whether scores tell why.

Each is a `Plot` from a plain data frame, said in words as well; the words' numbers are of all rows.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from apportion.errors import InputError
from apportion.report.drawing import COLOURS, dash, distinct, numbers, short, thin
from apportion.report.page import Plot, number

_DOTS, _POINTS, _PERIODS, _TASKS = 1500, 50, 40, 60
"""The most dots, points of a curve, periods of drawing and tasks that are shown."""
_AXES = {
    "reward": "reward of a period (the problem's own unit)",
    "deviation": "largest deviation (share, 0 to 1)",
    "score": "score (no unit)",
    "loss": "loss (the reward's unit)",
}
_STEPS = {"title": "step (count)", "kind": "number"}


def learning_curve(metrics: pd.DataFrame, column: str, title: str) -> Plot:
    """One metric over training: the median over runs with the band of the middle half.

    `metrics` has a row for each recorded step, with `step`, the metric's `column`, and perhaps `method`
    and `run`; rows between the points of a curve are averaged.
    """
    _need(metrics, ["step", column], "metrics")
    data: list[dict[str, Any]] = []
    words = []
    methods = metrics["method"].unique() if "method" in metrics else [None]
    for place, method in enumerate(methods):
        rows: Any = metrics if method is None else metrics[metrics["method"] == method]
        middle, low, high = _band(rows, column)
        series = {
            "type": "line",
            "x": numbers(middle.index),
            "y": numbers(middle),
            "name": "" if method is None else short(method),
            "color": place % COLOURS + 1,
            "width": 2.2,
            "dash": dash(place),
        }
        if not np.allclose(low, high, equal_nan=True):
            series |= {"low": numbers(low), "high": numbers(high)}
        data.append(series)
        whose = f"{method}: " if method is not None else ""
        words.append(f"{whose}from {number(middle.iloc[0])} to {number(middle.iloc[-1])}")
    layout = {
        "xaxis": _STEPS,
        "yaxis": {"title": _AXES.get(column, f"{column} (its own unit)"), "kind": "number"},
    }
    return Plot(title, f"{title}, {'; '.join(words)}.", data, layout)


def draw_frequencies(metrics: pd.DataFrame, *, tasks: int | None = None) -> pd.DataFrame:
    """How often each task was drawn, period after period: a row for each period, a column a task."""
    _need(metrics, ["step", "task"], "metrics")
    drawn = metrics["task"].to_numpy()
    highest = int(drawn.max()) + 1
    tasks = highest if tasks is None else max(tasks, highest)
    steps = metrics["step"].to_numpy()
    edges = np.linspace(steps.min(), steps.max() + 1, min(_PERIODS, len(np.unique(steps))) + 1)
    when = np.clip(np.searchsorted(edges, steps, side="right") - 1, 0, len(edges) - 2)
    counts = np.zeros((len(edges) - 1, tasks))
    np.add.at(counts, (when, drawn), 1)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    return pd.DataFrame(shares, index=pd.Index(edges[1:] - 1, name="step"), columns=range(tasks))


def task_probabilities(probabilities: pd.DataFrame, title: str) -> Plot:
    """Heat map: a column for each row of the frame (its index is the step), a line for each task;
    uniform drawing is the neutral colour.

    Of more than 60 tasks the ones drawn most often at the end are shown.
    """
    last = probabilities.iloc[-1]
    shown = last.sort_values(ascending=False).index[:_TASKS]
    frame = thin(probabilities[[c for c in probabilities.columns if c in set(shown)]], 80)
    uniform = 1 / probabilities.shape[1]
    cut = f" The {len(shown)} likeliest tasks are shown." if len(shown) < len(last) else ""
    words = (
        f"{probabilities.shape[1]} tasks; uniform drawing is {uniform:.2%} each. At the end the "
        f"likeliest, {last.idxmax()}, has {last.max():.2%} and the least likely {last.min():.2%}. Green "
        "is above uniform, orange below."
    )
    data = [
        {
            "type": "heat",
            "x": numbers(frame.index),
            "names": distinct(frame.columns),
            "z": [numbers(frame[column].fillna(0.0)) for column in frame.columns],
            "middle": uniform,
        }
    ]
    layout = {"xaxis": _STEPS, "yaxis": {"title": "task (name)", "kind": "category"}}
    return Plot(title, words + cut, data, layout, wide=True)


def score_against_gradient(metrics: pd.DataFrame) -> Plot:
    """The paper's Figure 2 (right): does a task's score tell how much there is to learn from it?

    The rank correlation is given plainly and given training time, since both grow as training goes.
    """
    _need(metrics, ["step", "score", "gradient_norm"], "metrics")
    rows: Any = metrics[["step", "score", "gradient_norm"]].dropna()
    plainly, given_time = rank_correlations(rows["score"], rows["gradient_norm"], rows["step"])
    shown = rows.iloc[:: max(-(-len(rows) // _DOTS), 1)]
    data = [
        {
            "type": "dots",
            "x": numbers(shown["score"]),
            "y": numbers(shown["gradient_norm"].where(shown["gradient_norm"] > 0)),
            "tone": numbers(shown["step"]),
        }
    ]
    layout = {
        "xaxis": {"title": "score of the drawn task (no unit)", "kind": "number"},
        "yaxis": {"title": "gradient norm (no unit, log scale)", "kind": "log"},
    }
    words = (
        f"Rank correlation over {len(rows)} steps: {plainly:.2f}; {given_time:.2f} given the time "
        "in training. A dot is a step, from orange early to green late."
    )
    return Plot("Score against gradient norm", words, data, layout, wide=True)


def rank_correlations(first: pd.Series, second: pd.Series, step: pd.Series) -> tuple[float, float]:
    """Spearman's correlation of two series, and the same with the step's ranks taken out of both."""
    # What never changes is correlated with nothing.
    table = pd.DataFrame({"a": first, "b": second, "t": step}).corr("spearman").fillna(0.0)
    ab, at, bt = (float(table.loc[x, y]) for x, y in ("ab", "at", "bt"))
    rest = np.sqrt((1 - at**2) * (1 - bt**2))
    partial = (ab - at * bt) / rest if rest > 1e-12 else 0.0
    return round(ab, 4) + 0.0, round(float(partial), 4) + 0.0


def _band(rows: Any, column: str) -> tuple[Any, Any, Any]:
    """Median and quartiles over runs of the binned curve; over the bin's rows where there is one run."""
    steps = rows["step"]
    width = max((steps.max() - steps.min() + 1) / _POINTS, 1)
    bins = ((steps - steps.min()) // width).astype(int)
    when = rows.groupby(bins)["step"].max()
    if "run" in rows and rows["run"].nunique() > 1:
        by_run = rows.groupby([bins, rows["run"]])[column].mean()
        quantiles = by_run.groupby(level=0).quantile([0.25, 0.5, 0.75]).unstack()
    else:
        quantiles = rows.groupby(bins)[column].quantile([0.25, 0.5, 0.75]).unstack()
    quantiles.index = pd.Index(when)
    return quantiles[0.5], quantiles[0.25], quantiles[0.75]


def _need(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    missing = [column for column in columns if column not in frame]
    if missing:
        raise InputError(f"{what}: no column {missing[0]!r}; it has {', '.join(map(str, frame))}")
    if frame.empty:
        raise InputError(f"{what}: no rows; record at least one step before a report is written")
