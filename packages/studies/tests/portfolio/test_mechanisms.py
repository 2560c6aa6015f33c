"""The generalisation gap and the spread over seeds: what cells are given, and how rows are read."""

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
    size = mechanisms._Size(tiny, 2, 3, (2001, 2002), held_out=4, plain=4)
    return sized(mechanisms, size, prices=prices)


def rows_of(program, plan, compute):
    found = compute(plan, [cell for cell in plan.cells if cell.program == program])
    return pd.concat(found.values(), ignore_index=True)


@pytest.mark.slow
def test_a_plain_network_is_tested_before_and_in_its_year(plan, compute):
    plain = rows_of("generalisation-plain", plan, compute)
    assert set(plain.figure) == {"generalisation"}
    assert len(plain) == 2 * 2
    assert np.isfinite(plain[["in_sample", "out_of_sample"]]).all(axis=None)


def test_methods_begin_alike_and_differ_by_what_they_learn_from(plan, monkeypatch):
    """Single-task learning from the first of the four tasks, with the same parameters and draws."""
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


def test_a_plain_network_starts_equal_and_knows_who_stands_where():
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
    """Ten experiments, five years: by what each method gains in the days learned from and after."""
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        [
            {"method": m, "experiment": e, "year": y}
            | {"in_sample": 10 + 0.1 * rng.normal(), "out_of_sample": better[m] + rng.normal()}
            for m, e, y in product(_METHODS, range(10), range(2015, 2020))
        ]
    )


def test_a_gap_is_what_is_lost_after_the_days_learned_from():
    figure = mechanisms._conclude_generalisation(gains_of({"stl": 0, "mtl": 8, "plain": 0}))
    outcomes = [verdict.outcome for verdict in figure.verdicts]
    assert outcomes == ["holds", "holds", "not-established", "not-established"]
    assert len(figure.table) == 3 * 10 * 5
    assert len(figure.plot().axes) == 2
    assert figure.verdicts[0].estimate == pytest.approx(8, abs=0.6)
    assert figure.verdicts[0].n == 5


@pytest.mark.parametrize(
    ("spread", "outcome"), [(0.3, "holds"), (1.0, "not-established"), (3.0, "does-not-hold")]
)
def test_the_spread_over_seeds_is_compared_year_by_year(spread, outcome):
    """Years differ by far more than seeds do, which is no spread over seeds."""
    rng = np.random.default_rng(1)
    rows = pd.DataFrame(
        [
            {"method": m, "seed": s, "year": y}
            | {
                name: 50 * (y - 2015) + width * rng.normal()
                for name in ("out_of_sample", "transfer")
            }
            for (m, width), s, y in product(
                (("mtl", 1.0), ("pmtl", spread)), range(10), range(2013, 2020)
            )
        ]
    )
    figure = mechanisms._conclude_stability(rows)
    assert {verdict.outcome for verdict in figure.verdicts} == {outcome}
    assert figure.verdicts[0].estimate == pytest.approx(spread**2, rel=0.5)
    assert {verdict.n for verdict in figure.verdicts} == {7}
    assert set(figure.table.seeds) == {10}
