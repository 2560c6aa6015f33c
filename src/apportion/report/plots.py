"""Pictures of a run: its tables read, thinned to what a screen shows, drawn, and said in words.

Each picture is a `Plot` from a plain data frame; the words' numbers are of all rows. Domains draw theirs
with the same means: `lines`, `numbers`, `times`, `distinct`.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.errors import InputError, reading
from apportion.report.page import Plot, number
from apportion.runs.files import read_bytes, read_json, read_rows
from apportion.runs.folder import Run

COLOURS = 12
"""Series colours of the page's palette, 1 to 12."""
_DASHES = ("solid", "dash", "dot", "dashdot")
_LONGEST_NAME = 48
_POINTS, _TASKS = 50, 60
"""The most points of a curve, and tasks, that are shown."""
_AXES = {
    "reward": "reward of a period (the problem's own unit)",
    "deviation": "largest deviation (share, 0 to 1)",
    "score": "score (no unit)",
    "loss": "loss (the reward's unit)",
}
_STEPS = {"title": "step (count)", "kind": "number"}
_DRAWN = 4
_WELL_KNOWN = ("p-mtl", "mtl", "stl", "lazy-crp", "equal-crp")


def read_table(folder: Path, name: str, *, indexed: bool = False) -> pd.DataFrame | None:
    """A table of the folder, CSV or Parquet; `indexed` by its first column. None where there is none."""
    found = (path for s in (".parquet", ".csv") if (path := folder / (name + s)).exists())
    path = next(found, None)
    if path is None:
        return None
    if path.is_dir():
        frame = Run(folder).table(name)
    elif path.suffix == ".parquet":
        frame = read_rows(path, "put it back from a copy")
    else:
        with reading(path, "put it back from a copy"):
            frame = pd.read_csv(io.BytesIO(read_bytes(path)))
    if indexed and isinstance(frame.index, pd.RangeIndex):
        frame = frame.set_index(frame.columns[0])
    return frame


def read_if_there(path: Path) -> Any:
    """What a JSON file says; nothing, as an empty mapping, where there is none."""
    return read_json(path) if path.exists() else {}


def distinct(names: Sequence[Any] | pd.Index) -> list[str]:
    """Names for a legend, in one line each; where two look the same once cut, their places tell them apart.

    >>> distinct(["a  name", "x" * 60])[0]
    'a name'
    """
    words = (" ".join(str(name).split()) for name in names)
    cut = [
        each if len(each) <= _LONGEST_NAME else f"{each[: _LONGEST_NAME - 1]}…" for each in words
    ]
    return [
        name if cut.count(name) == 1 else f"{name} ({place + 1})" for place, name in enumerate(cut)
    ]


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


def learning_curve(metrics: pd.DataFrame, column: str, title: str) -> Plot:
    """One metric over training: the median over runs with the band of the middle half.

    `metrics` has a row for each recorded step, with `step`, the metric's `column`, and perhaps `run`; rows
    between the points of a curve are averaged, or are the band's themselves where there is one run.
    """
    for needed in ("step", column):
        if needed not in metrics:
            known = ", ".join(map(str, metrics))
            raise InputError(f"metrics: no column {needed!r}; it has {known}")
    steps = metrics["step"]
    width = max((steps.max() - steps.min() + 1) / _POINTS, 1)
    bins = ((steps - steps.min()) // width).astype(int)
    rows: Any = metrics.groupby(bins)
    values = rows[column]
    if "run" in metrics and metrics["run"].nunique() > 1:
        by_run: Any = metrics.groupby([bins, metrics["run"]])[column].mean()
        values = by_run.groupby(level=0)
    quantiles = values.quantile([0.25, 0.5, 0.75]).unstack()
    quantiles.index = pd.Index(rows["step"].max())
    low, middle, high = (quantiles[part] for part in (0.25, 0.5, 0.75))
    series = {
        "type": "line",
        "x": numbers(middle.index),
        "y": numbers(middle),
        "name": "",
        "color": 1,
        "width": 2.2,
        "dash": "solid",
    }
    if not np.allclose(low, high, equal_nan=True):
        series |= {"low": numbers(low), "high": numbers(high)}
    axis = {"title": _AXES.get(column, f"{column} (its own unit)"), "kind": "number"}
    words = f"{title}, from {number(middle.iloc[0])} to {number(middle.iloc[-1])}."
    return Plot(title, words, [series], {"xaxis": _STEPS, "yaxis": axis})


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
    return lines(title, words, shown, axis, first=far[:1], drawn=far[:_DRAWN])


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
    """A line for each column: those in `first` boldly, of many only they and those in `drawn` at first,
    any other by a click. Days up to `trained` are shaded.
    """
    # More points cannot be told apart on a screen.
    shown = thin(frame, 300)
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
            "dash": "solid" if column in bold else _DASHES[(place - len(bold) + 1) % len(_DASHES)],
            "hidden": crowded and column not in {*bold, *known},
        }
        for place, (column, name) in enumerate(zip(order, distinct(order), strict=True))
    ]
    layout = {"x": times(shown.index), "xaxis": time_axis(frame.index), "yaxis": axis}
    return Plot(title, words, data, layout | {"trained": trained}, wide=True)
