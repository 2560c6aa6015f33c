"""Plots of studies: panels in a row, and estimates with their intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apportion.certify.statistics import Estimate


def panels(
    width: float,
    height: float,
    count: int = 2,
    *,
    frame: bool = False,
    grid: bool = True,
    **options: Any,
) -> tuple[Figure, Any]:
    """Create a figure with panels in a row, with full frames or with a faint grid."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, **options)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(frame)
        if grid and not frame:
            axis.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def ends_of(estimates: Sequence[Estimate]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values, lower and upper ends."""
    value, low, high = (
        np.array([getattr(estimate, end) for estimate in estimates])
        for end in ("value", "low", "high")
    )
    return value, low, high


def band(axis: Axes, x: Any, estimates: Sequence[Estimate], colour: str, label: str) -> None:
    """Plot a line of values with a band of their intervals."""
    value, low, high = ends_of(estimates)
    axis.plot(x, value, "o-", color=colour, label=label, markersize=4)
    axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def forest(shown: Mapping[str, Mapping[str, Estimate]], label: str, width: float = 4.0) -> Figure:
    """Draw one panel per title, with a row for each name of the first: estimate and interval, if any."""
    names = list(next(iter(shown.values())))
    size = (width * len(shown) + 2, 1.6 + 0.3 * len(names))
    figure, axes = panels(*size, len(shown), sharey=True)
    for axis, (title, estimates) in zip(axes, shown.items(), strict=True):
        for place, one in ((names.index(name), one) for name, one in estimates.items()):
            axis.plot([one.low, one.high], [place, place], color="C0")
            axis.plot(one.value, place, "o", color="C0")
        axis.axvline(0, color="k", linewidth=0.8)
        axis.locator_params(axis="x", nbins=4)
        axis.set_title(title, fontsize=10)
    figure.supxlabel(label)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    return figure
