"""The committed verdicts follow from the committed numbers, by the statistics of today."""

import json
from pathlib import Path

import pandas as pd
import pytest

from apportion.studies.charging import findings as charging
from apportion.studies.federated import federations, fig6
from apportion.studies.portfolio import (
    acting,
    conflict,
    fig2,
    fig3,
    fig4,
    fig5,
    prioritisation,
    recipe,
)
from apportion.studies.theory import (
    approximation,
    bound,
    corollary1,
    corollary2,
    crossover,
    equivariance,
    fig1,
    should_pool,
)

RESULTS = Path(__file__).parents[2] / "docs" / "results"


STUDIES = {
    "acting": acting,
    "conflict": conflict,
    "equivariance": equivariance,
    "approximation": approximation,
    "corollary1": corollary1,
    "corollary2": corollary2,
    "fig1": fig1,
    "fig2": fig2,
    "fig3": fig3,
    "fig4": fig4,
    "fig5": fig5,
    "fig6": fig6,
    "bound": bound,
    "charging": charging,
    "crossover": crossover,
    "federations": federations,
    "prioritisation": prioritisation,
    "recipe": recipe,
    "recipe-sp500": recipe,
    "should-pool": should_pool,
}


def concluded(name):
    settings = json.loads((RESULTS / name / "study.json").read_text())["settings"]
    rows = pd.read_parquet(RESULTS / name / "rows.parquet")
    return STUDIES[name].conclude(rows, settings)


@pytest.mark.parametrize("name", STUDIES)
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
