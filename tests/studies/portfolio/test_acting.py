"""Acting in the loop: what each cell is given, and how its rows are read."""

from dataclasses import replace
from itertools import product

import numpy as np
import pandas as pd
import pytest

from apportion.studies.portfolio import acting
from apportion.studies.portfolio.prioritisation import SETTINGS


def test_a_cell_differs_from_another_by_what_is_acted_alone(monkeypatch):
    seen: list = []

    def take_down(market, tasks, settings, **others):
        seen.append((market, tasks, settings, others))
        raise KeyboardInterrupt

    monkeypatch.setattr(acting, "train_in", take_down)
    plan = acting.sized_plan(replace(SETTINGS, method="mtl", steps=4), seeds=2)
    for acted in acting.ACTED:
        cells = [cell for cell in plan.cells if cell["acted"] == acted]
        assert len({cell.program for cell in cells}) == 1
        with pytest.raises(KeyboardInterrupt):
            list(plan.compute(cells, lambda what, fraction: None))
    assert [settings.act_periods for _, _, settings, _ in seen] == list(acting.ACTED)
    for market, tasks, settings, _ in seen[1:]:
        np.testing.assert_array_equal(market.prices, seen[0][0].prices)
        np.testing.assert_array_equal(tasks.members, seen[0][1].members)
        assert settings.steps == 4
        assert settings.prioritisation == 0


def made_up(gain):
    """Ten markets that differ much; acting eight periods adds `gain` in each, with little noise."""
    rng = np.random.default_rng(0)
    level = rng.normal(size=10)
    rows = [
        (acted, cost, seed, level[seed] + gain * (acted == 8) + 1e-4 * rng.normal())
        for acted, cost, seed in product(acting.ACTED, acting.COSTS, range(10))
    ]
    return pd.DataFrame(rows, columns=["acted", "cost", "seed", "growth"])


@pytest.mark.parametrize(
    ("gain", "adds", "little"), [(0.1, "holds", "does-not-hold"), (-0.1, "does-not-hold", "holds")]
)
def test_markets_are_paired_and_what_acting_adds_is_said(gain, adds, little):
    study = acting.conclude(made_up(gain).sample(frac=1, random_state=1), {})
    eight = [v for v in study.verdicts if v.claim.startswith("acting 8")]
    assert [v.outcome for v in eight] == [adds, little] * 2
    assert eight[0].estimate == pytest.approx(gain, abs=1e-3)
    assert eight[0].n == 10
    one = [v for v in study.verdicts if v.claim.startswith("acting 1") and "adds" in v.claim]
    assert {v.outcome for v in one} == {"not-established"}
    assert len(study.plot().axes) == 2
