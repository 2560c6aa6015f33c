"""What held and what did not: the demo's paired comparisons as claims, sentences and cards."""

from typing import Any

import numpy as np

from apportion.domains.portfolio.record import LAZY
from apportion.statistics import over_rows_and_columns
from apportion.studies.study import Verdict, adjusted_for_all, after_all

Gains = dict[tuple[str, str], np.ndarray]
"""(method, own or held-out) to log growth a year over Equal CRP in points, experiments by years."""

_PLACES = {"own": "its own stocks", "held-out": "stocks never trained on"}
_CLAIMS = (
    ("mtl", "stl", "learning from many tasks (MTL) beats learning from one (STL)"),
    ("mtl", None, "MTL beats Equal CRP after costs"),
    ("pmtl", "mtl", "drawing tasks by priority (P-MTL) beats drawing them evenly (MTL)"),
    ("careful", None, "P-MTL halved towards equal shares and traded slowly beats Equal CRP"),
    ("careful", LAZY, "it also beats lazy rebalancing, which learns nothing"),
)
_PLAIN = (
    "Points are log growth a year, net of 25 bp, on days after training; intervals are over "
    "experiments and years. The 20 stocks are survivors, and this is one small run: it shows the "
    "machinery, and it is no forecast."
)


def claims_of(gains: Gains) -> list[dict[str, Any]]:
    """Each claim on later years, for stocks trained on and for stocks never seen."""
    verdicts = []
    for first, second, words in _CLAIMS:
        for place, where in _PLACES.items():
            gap = gains[first, place] - (0.0 if second is None else gains[second, place])
            claim = f"{words}, on {where}"
            verdicts.append(Verdict.of(claim, over_rows_and_columns(gap), paper=False))
    kept = ("claim", "outcome", "adjusted", "holds", "estimate", "interval", "n")
    return [
        {name: verdict.to_dict()[name] for name in kept} | {"interval": list(verdict.interval)}
        for verdict in adjusted_for_all(verdicts)
    ]


def sentences(claims: list[dict[str, Any]]) -> str:
    """The claims for reading: those that held, then those that did not."""
    held = [_sentence(claim) for claim in claims if claim["holds"]]
    failed = [_sentence(claim) for claim in claims if not claim["holds"]]
    lines = ["What held:", *(held or ["  nothing"]), "What did not, or cannot be told from chance:"]
    return "\n".join([*lines, *(failed or ["  nothing"]), "", _PLAIN])


def _sentence(claim: dict[str, Any]) -> str:
    low, high = claim["interval"]
    return f"  {claim['claim']}: {claim['estimate']:+.2f} points [{low:+.2f}, {high:+.2f}]{_left(claim)}"


def _left(claim: dict[str, Any]) -> str:
    return after_all(claim["outcome"], claim["adjusted"]).replace("-", " ")


def headline_of(claims: list[dict[str, Any]]) -> dict[str, Any]:
    """The first lines of the report."""
    cards = [
        {
            "label": claim["claim"],
            "value": f"{claim['estimate']:+.2f} points",
            "interval": "[{:+.2f}, {:+.2f}]".format(*claim["interval"]),
            "note": f"over experiments and years, of the fewer {claim['n']}{_left(claim)}",
            "outcome": claim["outcome"],
        }
        for claim in claims
    ]
    return {
        "title": "Demo: 20 stocks, learned on some, tested on others and later",
        "cards": cards,
        "words": [_PLAIN],
    }
