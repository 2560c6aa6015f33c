"""The committed verdicts follow from the committed numbers, by the statistics of today."""

import json
from pathlib import Path

import pandas as pd
import pytest

from apportion.studies.portfolio import fig3, fig4, fig5, prioritisation, recipe
from apportion.studies.theory import approximation, bound, corollary1, corollary2, crossover, fig1

RESULTS = Path(__file__).parents[2] / "docs" / "results"

FROM_ROWS = {
    "approximation": approximation,
    "corollary1": corollary1,
    "corollary2": corollary2,
    "crossover": crossover,
    "fig1": fig1,
}


def table_of(name):
    """The numbers, with lazy rebalancing called as it is today."""
    return pd.read_csv(RESULTS / name / "table.csv").replace({"lazy-equal-crp": "lazy-crp"})


def concluded(name):
    if name in FROM_ROWS:
        return FROM_ROWS[name].conclude(pd.read_parquet(RESULTS / name / "rows.parquet"), {})
    table = table_of(name)
    if name == "fig5":
        return fig5.conclude(table.drop(columns="drawn"), {})
    if name == "bound":
        return bound.conclude(table.assign(cell=""), {"seed": 0, "families": 500})
    studies = {"fig3": fig3, "fig4": fig4, "prioritisation": prioritisation}
    return studies.get(name, recipe).conclude(table, {})


@pytest.mark.parametrize(
    "name",
    [*FROM_ROWS, "fig3", "fig4", "fig5", "bound", "prioritisation", "recipe", "recipe-sp500"],
)
def test_the_committed_verdicts_follow_from_the_committed_numbers(name):
    committed = json.loads((RESULTS / name / "verdict.json").read_text())
    for before, now in zip(committed, concluded(name).verdicts, strict=True):
        assert now.estimate == pytest.approx(before["estimate"], abs=1e-6)
        assert list(now.interval) == pytest.approx(before["interval"], abs=1e-6)
        assert (now.outcome, now.adjusted, now.n) == (
            before["outcome"],
            before["adjusted"],
            before["n"],
        )
