"""The intervals printed with each study hold the truth as often as they say."""

import pandas as pd
import pytest

import programs

coverage = programs.benchmark("coverage")
LAYOUTS = coverage.layouts()
# Long records take long; the committed table has all of them.
QUICK = [layout for layout in LAYOUTS if not layout.study.startswith("backtest")]
QUICK += coverage.of_backtests()[::4]


@pytest.mark.parametrize("layout", QUICK, ids=lambda layout: f"{layout.study}, {layout.units}")
def test_an_interval_of_95_percent_covers_93_to_97(layout):
    # 4000 draws tell a coverage to 0.35 points (one standard error).
    assert 0.93 <= coverage.measure(layout, 4000, seed=1) <= 0.97


def test_the_committed_table_has_every_layout_and_is_within_the_tolerance():
    table = pd.read_csv(coverage.TABLE)
    named = list(zip(table.study, table.units, strict=True))
    assert named == [(layout.study, layout.units) for layout in LAYOUTS]
    assert table.coverage.between(0.93, 0.97).all()
