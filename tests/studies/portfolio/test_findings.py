"""The demo's claims: each by its interval, and what is left of them when all ten are allowed for."""

import numpy as np
import pytest

from apportion.studies.portfolio.findings import claims_of, headline_of, sentences


def gains_of(ahead):
    """Five experiments and years; MTL is `ahead` of all else, with noise of 1."""
    rng = np.random.default_rng(0)
    names = ("stl", "mtl", "pmtl", "careful", "lazy-crp")
    return {
        (name, place): rng.normal(ahead * (name == "mtl"), 1.0, (5, 5))
        for name in names
        for place in ("own", "held-out")
    }


def test_a_clear_claim_holds_alone_and_among_ten():
    claims = claims_of(gains_of(5.0))
    assert len(claims) == 10
    assert claims[0]["outcome"] == claims[0]["adjusted"] == "holds"
    assert claims[0]["estimate"] == pytest.approx(5, abs=1)
    assert {claim["n"] for claim in claims} == {5}
    # P-MTL is as far behind, and that is said too.
    assert claims[4]["outcome"] == "does-not-hold"


def test_a_claim_that_only_holds_alone_is_marked_so():
    claims = claims_of(gains_of(0.75))
    weak = [c for c in claims if c["holds"] and c["adjusted"] == "not-established"]
    assert weak
    assert "not established after Holm's adjustment" in sentences(claims)
    notes = {card["label"]: card["note"] for card in headline_of(claims)["cards"]}
    assert "after Holm" in notes[weak[0]["claim"]]
