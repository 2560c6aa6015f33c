"""The generalisation gap and the spread over seeds: training of the cells, and reading of rows."""

from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion.problem import Observation
from apportion_studies.portfolio import mechanisms
from apportion_studies.portfolio.mechanisms import _METHODS, Plain


@pytest.fixture(scope="module")
def plan(prices, tiny, sized):
    size = mechanisms._Size(tiny, 2, 3, (2002,), held_out=4, plain=4, mark=4, validated=2)
    return sized(mechanisms, size, prices=prices)


def rows_of(program, plan, compute):
    found = compute(plan, [cell for cell in plan.cells if cell.program == program])
    return pd.concat(found.values(), ignore_index=True)


@pytest.mark.slow
def test_a_plain_network_is_tested_before_and_in_its_year(plan, compute):
    plain = rows_of("generalisation-plain", plan, compute)
    assert set(plain.figure) == {"generalisation"}
    # Tested after 4, 8 and 12 updates.
    assert plain.groupby(["tested", "step"]).size().tolist() == [2 * 2] * 3 * 3
    assert np.isfinite(plain.gain).all()


def test_the_second_figure_validates_on_the_instruments_that_it_tests(plan):
    cells = [cell for cell in plan.cells if cell.program == "stability"]
    before = [cell for cell in cells if cell["validation"]]
    assert {(cell["year"], cell["experiment"], cell["seed"]) for cell in before} == {
        (2001, 0, 0), (2001, 0, 1)
    }  # fmt: skip
    assert {(cell["year"], cell["experiment"]) for cell in cells if cell not in before} == {
        (2002, 0)
    }


def test_methods_begin_alike_and_differ_by_what_they_learn_from(plan, monkeypatch):
    """STL learns from the first of MTL's four tasks, with the same first parameters and draws."""
    given = []

    def take_down(problem, tasks, policies, learner, *, key, **_):
        given.append((tasks.members, policies, key))
        raise KeyboardInterrupt

    monkeypatch.setattr(mechanisms, "train", take_down)
    for method in ("stl", "mtl"):
        cells = [cell for cell in plan.cells if cell.program == f"generalisation-{method}"]
        with pytest.raises(KeyboardInterrupt):
            list(plan.compute(cells, lambda what, fraction: None))
    (single, *begun), (several, *alike) = given
    assert several.shape == (4, 4, 3)
    np.testing.assert_array_equal(single, several[:, :1])
    assert bool(eqx.tree_equal(begun, alike))


def test_a_plain_network_starts_equal_and_depends_on_the_order():
    key = jax.random.key(0)
    policy = Plain(4, 2, 5, key=key)
    history = jax.random.normal(key, (4, 6, 2))
    held, mask, order = jnp.full(4, 0.25), jnp.ones(4, bool), jnp.array([1, 0, 3, 2])
    shares = policy(Observation(history, held), mask)
    np.testing.assert_allclose(shares, 0.25, atol=0.02)
    np.testing.assert_allclose(shares.sum(), 1, atol=1e-6)
    moved = policy(Observation(history[order], held), mask)
    assert np.abs(moved - shares[order]).max() > 1e-5


def gains_of(better):
    """Make rows of ten experiments, five years and one before, with each method's gain in the year.

    The gain in sample is 10. After 100 updates, all gains are half of those after 200.
    """
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        [
            {"method": m, "experiment": e, "year": y, "validation": y == 2014, "step": step}
            | {"tested": tested, "gain": step / 200 * gain + rng.normal()}
            for m, e, y, step in product(_METHODS, range(10), range(2014, 2020), (100, 200))
            for tested, gain in (("own", 20 + better[m]), ("first", better[m]), ("in-sample", 10))
        ]
    )


def test_a_gap_is_what_is_lost_after_the_days_learned_from():
    figure = mechanisms._conclude_generalisation(gains_of({"stl": 0, "mtl": 8, "plain": 0}))
    outcomes = [verdict.outcome for verdict in figure.verdicts]
    assert outcomes == ["holds", "holds", "not-established", "not-established"] * 2
    # Three methods in two protocols.
    assert len(figure.table) == 2 * 3 * 10 * 5
    assert len(figure.plot().axes) == 4
    lost = figure.verdicts[0]
    assert lost.estimate == pytest.approx(8, abs=0.6)
    assert lost.levels["STL"] - lost.levels["MTL"] == pytest.approx(lost.estimate)
    assert lost.n == 5


def test_a_method_that_was_best_early_in_the_year_before_is_stopped_there():
    rows = gains_of({"stl": 0, "mtl": 8, "plain": 0})
    early = (rows.method == "stl") & (rows.tested == "own") & (rows.step == 100)
    rows.loc[early & (rows.year < 2017), "gain"] += 50
    read = mechanisms._stopped_together(rows)
    steps = read[read.method == "stl"].groupby("year").step.unique()
    assert {year: list(step) for year, step in steps.items()} == {
        2015: [100], 2016: [100], 2017: [100], 2018: [200], 2019: [200]
    }  # fmt: skip
    assert set(read[read.method != "stl"].step) == {200}


def test_one_number_of_updates_is_chosen_for_all_experiments():
    rows = gains_of({"stl": 0, "mtl": 0, "plain": 0})
    early = (rows.tested == "own") & (rows.step == 100)
    # 150 in one experiment outweigh the 10 that each of the ten loses.
    rows.loc[early & (rows.experiment == 3), "gain"] += 150
    read = mechanisms._stopped_together(rows)
    assert set(read.step) == {100}
    assert len(read) == 3 * 10 * 5 * 3
    assert set(read.experiment) == set(range(10))


def spread_over_seeds(spread):
    """Make rows of two methods, ten seeds and seven years; years differ far more than seeds."""
    rng = np.random.default_rng(1)
    return pd.DataFrame(
        [
            {"method": m, "seed": s, "year": y - before, "experiment": y, "validation": before}
            | {"step": 100, "tested": t, "gain": 50 * (y - 2015) + width * rng.normal()}
            for (m, width), s, y, before, t in product(
                (("mtl", 1.0), ("pmtl", spread)), range(10), range(2013, 2020), (True, False),
                ("own", "held-out"),
            )
        ]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spread", "outcome"), [(0.2, "holds"), (1.0, "not-established"), (5.0, "does-not-hold")]
)
def test_the_spread_over_seeds_is_compared_year_by_year(spread, outcome):
    figure = mechanisms._conclude_stability(spread_over_seeds(spread))
    assert {verdict.outcome for verdict in figure.verdicts} == {outcome}
    first = figure.verdicts[0]
    assert first.estimate == pytest.approx(spread, rel=0.5)
    assert first.levels["P-MTL"] / first.levels["MTL"] == pytest.approx(first.estimate)
    assert {verdict.n for verdict in figure.verdicts} == {7}


def test_one_seed_that_runs_away_does_not_decide_the_spread():
    rows = spread_over_seeds(1.0)
    away = (rows.method == "pmtl") & (rows.seed == 0) & (rows.year == 2014) & ~rows.validation
    usual, moved = (
        mechanisms._conclude_stability(one).verdicts[0].estimate
        for one in (rows, rows.assign(gain=rows.gain + 1000 * away))
    )
    assert moved == pytest.approx(usual, rel=0.2)
