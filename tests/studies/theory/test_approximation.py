"""Both theorems with few features."""

import numpy as np
import pandas as pd
import pytest

from apportion.studies.theory import approximation
from apportion.studies.theory.families import never_broken


def test_the_features_are_orthonormal_under_the_uniform_distribution():
    features = approximation.cosines(6)
    np.testing.assert_allclose(features.T @ features / 6, np.eye(6), atol=1e-12)


@pytest.mark.parametrize("sampling", approximation.SAMPLINGS)
def test_few_features_err_more_and_break_no_bound(sampling):
    few, all_of_them = (approximation.measure(sampling, d, 0.4, runs=4, seed=5) for d in (2, 6))
    assert (few.e > 2 * all_of_them.e).all()
    for found in (few, all_of_them):
        assert (found.theorem_1_prime <= 1).all()
        assert (found.theorem_1 <= found.theorem_1_prime).all()


def test_a_family_that_breaks_a_bound_with_any_sample_is_counted_once():
    rows = pd.DataFrame({"spread": 0.1, "run": [0, 0, 1, 1], "share": [0.5, 1.2, 1.1, 0.9]})
    broken = never_broken(rows, "share", "claim", True)
    assert (broken.outcome, broken.estimate, broken.n) == ("does-not-hold", 1.0, 2)
    whole = never_broken(rows.assign(share=0.9), "share", "claim", True)
    assert (whole.outcome, whole.exact) == ("holds", True)
