"""Sections on the page of a portfolio run: choice of the variant, and value over time."""

from pathlib import Path
from typing import Any

import pandas as pd

from apportion.domains.portfolio.record import EQUAL, HINDSIGHT, LAZY, labelled
from apportion.report.page import Part, Section, Table
from apportion.report.plots import lines, read_table
from apportion.runs.files import read_json

_METRICS = {
    "wealth": "{:.2f}",
    "annual_return": "{:.1%}",
    "volatility": "{:.1%}",
    "sharpe": "{:.2f}",
    "max_drawdown": "{:.1%}",
    "turnover": "{:.4f}",
}
_CHOICE = (
    "Sharpe ratio minus that of daily Equal CRP, on years at the end of the training period, each with "
    "policies trained on the days before it; trust 0 is equal shares. A learned policy is selected only if "
    "it beats equal shares on average and in most years."
)


def portfolio_sections(folder: Path) -> list[Section]:
    """Return a section for each table in the run's folder."""
    sections: list[Section] = []
    choice = read_table(folder, "choice")
    if choice is not None:
        best_first = choice.sort_values("sharpe_gain", ascending=False)
        names = {"steps": "updates", "trade_fraction": "trade fraction", "sharpe_gain": "mean"}
        variants = Table(
            f"All {len(choice)} variants", best_first.rename(columns=names), folded=True
        )
        sections.append(Section("Choice", [variants], _CHOICE))
    wealth = read_table(folder, "values", indexed=True)
    if wealth is not None:
        path = folder / "results.json"
        results = read_json(path) if path.exists() else {}
        sections.append(_values(wealth, read_table(folder, "strategies"), results))
    return sections


def _values(
    wealth: pd.DataFrame, strategies: pd.DataFrame | None, results: dict[str, Any]
) -> Section:
    """Show wealth over the test days and the metrics of every strategy."""
    seen = results.get("in_sample_periods", 0)
    until = results.get("trained_until") if seen else None
    wealth = wealth.rename(columns=labelled)
    end = wealth.iloc[-1]
    known = [name for name in ("policy", LAZY, EQUAL) if name in end.index] or end.index[:8]
    named = ", ".join(f"{name} {end[name]:.3f}" for name in known)
    words = f"At the end: {named}; highest of all {len(end)}: {end.idxmax()}, {end.max():.3f}."
    axis = {"title": "value (multiples of the investment, log scale)", "kind": "log"}
    parts: list[Part] = [lines("Value of 1 invested", words, wealth, axis, trained=until)]
    if strategies is not None:
        strategies["strategy"] = strategies["strategy"].map(labelled)
        note = "In brackets: 95 % intervals by blocks of days."
        parts.append(Table("Strategies side by side", _side_by_side(strategies), note))
    lead = "Net of costs, from 1 at the close before the first day, on the same days for all."
    if set(map(labelled, HINDSIGHT)) & set(wealth.columns):
        lead += " Strategies marked (hindsight) are chosen with knowledge of the whole test period."
    if seen:
        lead += (
            f" In-sample: {seen} of {len(wealth)} periods, shaded, are days up to {until} that the "
            "policy was trained on; results on them do not predict later days."
        )
    return Section("Value against baselines", parts, lead)


def _side_by_side(strategies: pd.DataFrame) -> pd.DataFrame:
    """Format the main metrics of each strategy, as `x [low, high]` if there is an interval.

    Examples
    --------
    >>> frame = pd.DataFrame({"strategy": ["a"], "wealth": [1.5], "wealth_low": [1], "wealth_high": [2]})
    >>> _side_by_side(frame)["wealth"].tolist()
    ['1.50 [1.00, 2.00]']
    """
    shown: Any = strategies[["strategy"]].copy()
    for name, form in _METRICS.items():
        if name in strategies:
            text = strategies[name].map(form.format)
            if f"{name}_low" in strategies:
                low, high = (
                    strategies[f"{name}_{end}"].map(form.format) for end in ("low", "high")
                )
                text = text + " [" + low + ", " + high + "]"
            shown[name.replace("_", " ")] = text
    return shown
