"""The worth of orderings and subsets."""

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion.theory import corollary_2
from apportion_studies.theory import corollary2

_ENTITIES = corollary2._ENTITIES["paper"]


def concluded(rows):
    [figure] = corollary2._conclude(rows, {})
    return figure


def made_up(worth_of_all, ordering=1.0, runs=4):
    """Make rows in which regret is 1 over the number of independent tasks or of real examples."""
    rows = []
    for m in _ENTITIES:
        drawn = corollary2._OVERLAPPING[-1]
        number = worth_of_all(m)
        known = [("independent", n, 1 / n) for n in corollary2._INDEPENDENT]
        known += [("overlapping", 16, 1 / 8)]
        known += [("overlapping", drawn, 1 / number + (1 - 1 / number) / drawn)]
        known += [("tied", 20, 1 / (20 * m * ordering))]
        known += [("real", n, 1 / n) for n in corollary2._sizes_of(m)]
        for run in range(runs):
            # Each run has a factor that is the same for all its arms.
            rows += [(m, arm, n, run, (1 + 0.01 * run) * regret) for arm, n, regret in known]
    return pd.DataFrame(rows, columns=["entities", "arm", "number", "run", "regret"])


def test_effective_numbers_are_read_off_the_independent_tasks():
    rows = made_up(lambda m: 12.0)
    for m in _ENTITIES:
        assert np.exp(corollary2._of_all(rows, m).value) == pytest.approx(12, rel=1e-6)
        assert np.exp(corollary2._worth(rows, m).value) == pytest.approx(m, rel=1e-6)
    figure = concluded(rows)
    counted = figure.table[figure.table.arm == "all subsets"].number
    assert counted.tolist() == [float(corollary_2(4 * m, m).tasks) for m in _ENTITIES]
    assert len(figure.plot().axes) == 2
    # The same gain at every m is not exponential in m.
    exponential, least, most, orderings = figure.verdicts
    assert exponential.outcome == "does-not-hold"
    assert exponential.estimate == pytest.approx(0, abs=1e-9)
    assert least.outcome == most.outcome == orderings.outcome == "holds"


def test_gains_that_are_too_small_too_large_or_exponential_are_seen():
    few = made_up(lambda m: 2.0, ordering=1 / 2)
    assert concluded(few).verdicts[1].outcome == "does-not-hold"
    many = made_up(lambda m: 40.0)
    assert concluded(many).verdicts[2].outcome == "does-not-hold"
    growing = made_up(lambda m: {4: 2.0, 10: 8.0, 20: 20.0, 40: 50.0}[m])
    assert concluded(growing).verdicts[0].estimate > 0.05


def test_overlapping_tasks_share_their_entities_luck_and_weights():
    record = corollary2._draw_record(8, jax.random.key(0))
    tasks = jnp.array([[0, 1, 2], [2, 1, 5]])
    examples = corollary2._examples_of(record, tasks)
    first, second = examples[:50], examples[50:]
    np.testing.assert_array_equal(first.states[:, 2], second.states[:, 0])
    np.testing.assert_allclose(examples.allocations.sum(-1), 1, rtol=1e-5)
    # Two entities in both tasks hold shares in the same proportion in each.
    np.testing.assert_allclose(
        first.allocations[:, 1] / first.allocations[:, 2],
        second.allocations[:, 1] / second.allocations[:, 0],
        rtol=1e-4,
    )
