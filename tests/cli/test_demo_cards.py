"""The demo's cards on other domains say what their studies say."""

import json
from pathlib import Path

import pytest

from apportion.cli.demo import _other_domains, _study_card

RESULTS = Path(__file__).parents[2] / "docs" / "results"
VERDICT = {"claim": "a beats b", "holds": True, "estimate": 0.02, "interval": [0.01, 0.03], "n": 12}


@pytest.mark.parametrize("outcome", ["holds", "not-established"])
def test_a_verdict_that_its_interval_decided_is_the_cards(outcome):
    card = _study_card("fig6", "Federation: a beats b", "seeds", VERDICT | {"outcome": outcome})
    assert card["outcome"] == outcome
    assert card["note"] == "from the study fig6 at full size; 12 seeds"


def test_the_cards_are_those_of_the_committed_results():
    cards = {card["label"].partition(":")[0]: card for card in _other_domains()}
    assert set(cards) == {"Market", "Federation"}
    for name, study in (("Market", "recipe"), ("Federation", "fig6")):
        verdicts = json.loads((RESULTS / study / "verdict.json").read_text())
        claim = cards[name]["label"].partition(": ")[2]
        (verdict,) = (verdict for verdict in verdicts if verdict["claim"] == claim)
        assert cards[name]["outcome"] == verdict["outcome"]
        assert cards[name]["value"] == f"{verdict['estimate']:+.3g}"
