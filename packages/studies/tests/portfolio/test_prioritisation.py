"""Priorities if few tasks are informative, and if tasks conflict."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from apportion.certify.statistics import mean_over
from apportion_studies.portfolio import prioritisation
from apportion_studies.portfolio.prioritisation import _RULES, _UNIFORM
from learning import optimised

UNCORRECTED = _RULES[2]


@pytest.mark.slow
@optimised()
def test_without_correction_prioritisation_pays_where_few_tasks_are_informative(compute):
    """With 2 of 32 tasks informative, the others quiet and beta 0, it gains 8 points or more."""
    plan, rules = prioritisation.prioritisation(scale="paper"), (_UNIFORM.name, UNCORRECTED.name)
    cells = [cell for cell in plan.cells if cell["figure"] == "prioritisation" and cell["seed"] < 4]
    cells = [cell for cell in cells if cell["case"].startswith("2 of") and cell["rule"] in rules]
    rows = pd.concat(compute(plan, cells).values())
    figure = prioritisation._conclude_prioritisation(rows)
    assert prioritisation._over_uniform(figure.table).gap.mean() >= 8.0
    assert [verdict.holds for verdict in figure.verdicts] == [True]
    assert len(figure.plot().axes) == 1


def test_gaps_are_paired_by_case_and_seed():
    rows = [
        (c, r, s, s + (r != "uniform") * 0.5)
        for c in "ab"
        for r in ("x", "uniform")
        for s in range(3)
    ]
    table = pd.DataFrame(rows, columns=["case", "rule", "seed", "growth"])
    np.testing.assert_allclose(prioritisation._over_uniform(table).gap, 0.5)
    assert mean_over(prioritisation._over_uniform(table).gap.to_numpy()).low == 0.5


def camps_of(most, others):
    """Make rows with this growth in each camp for all rules; uniform drawing has .5 and .1."""
    rng = np.random.default_rng(0)
    rows = [
        (rule.name, camp, seed, (usual if rule == _UNIFORM else own) + 0.01 * rng.normal())
        for rule, (camp, own, usual), seed in product(
            _RULES, (("most", most, 0.5), ("others", others, 0.1)), range(8)
        )
    ]
    return pd.DataFrame(rows, columns=["rule", "camp", "seed", "growth"])


@pytest.mark.parametrize(
    ("most", "others", "outcome"),
    [(0.3, 0.3, "holds"), (0.9, 0.0, "does-not-hold"), (0.05, 0.9, "does-not-hold")],
)
def test_a_rule_is_judged_by_the_camp_that_it_serves_worse(most, others, outcome):
    figure = prioritisation._conclude_conflict(
        camps_of(most, others).sample(frac=1, random_state=1)
    )
    served = [v for v in figure.verdicts if "fares worse" in v.claim]
    assert len(served) == len(_RULES) - 1
    assert {v.outcome for v in served} == {outcome}
    assert served[0].estimate == pytest.approx(min(most, others) - 0.1, abs=0.02)
    assert len(figure.plot().axes) == 3
