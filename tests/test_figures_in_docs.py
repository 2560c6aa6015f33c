"""Every estimate with an interval in the README and on the page of the paper is one of a study's."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
NUMBER = r"[+−-]?\d*\.?\d+"
FOUND = re.compile(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]")
NAMED = re.compile(r"studies/([a-z0-9-]+)\.md|apportion study ([a-z0-9-]+)")


def rows_with_figures(page):
    """Each line with estimates, and the studies it names; `the same` is the line before's."""
    studies, rows = [], []
    for line in (ROOT / page).read_text().splitlines():
        named = [first or second for first, second in NAMED.findall(line)]
        studies = named or (studies if "| the same |" in line else [])
        if FOUND.search(line):
            rows.append((line, studies))
    return rows


def estimates(study):
    """Estimates with their intervals, in the units of the study, one a row."""
    verdicts = json.loads((RESULTS / study / "verdict.json").read_text())
    found = [(v["estimate"], *v["interval"]) for v in verdicts]
    for table in map(pd.read_csv, (RESULTS / study).glob("*.csv")):
        for columns in (["gain", "gain low", "gain high"], ["value", "low", "high"]):
            if set(columns) <= set(table):
                found += table[columns].to_numpy().tolist()
    return np.array(found)


def written(number):
    digits = len(number.partition(".")[2])
    return float(number.replace("−", "-")), 0.5 * 10**-digits + 1e-9


def is_among(triple, known):
    """Whether it is an estimate of the study, in its units or in hundredths, or the other way round."""
    values, rounding = zip(*map(written, triple), strict=True)
    turned = np.concatenate([known, -known[:, [0, 2, 1]]])
    both = np.concatenate([turned, 100 * turned])
    return bool((np.abs(both - values) <= rounding).all(1).any())


@pytest.mark.parametrize("page", ["README.md", "docs/paper.md"])
def test_every_estimate_is_one_of_the_study_it_names(page):
    rows = rows_with_figures(page)
    assert len(rows) >= 8
    for line, studies in rows:
        named = [study for study in studies if (RESULTS / study / "verdict.json").exists()]
        assert named, line
        known = np.concatenate([estimates(study) for study in named])
        for triple in FOUND.findall(line):
            assert is_among(triple, known), (triple, line)


def test_a_wrong_estimate_is_noticed():
    known = np.array([[0.0224, 0.0195, 0.0254], [1.2, -0.5, 3.0]])
    assert is_among(("+2.2", "2.0", "2.5"), known)
    assert is_among(("−1.2", "−3.0", "0.5"), known)
    assert not is_among(("+2.3", "2.0", "2.5"), known)
    assert not is_among(("+2.2", "2.0", "2.6"), known)


def test_the_certificate_on_the_page_of_the_command_line_is_the_one_that_was_computed():
    page = (ROOT / "docs" / "command-line.md").read_text()
    shown = json.loads(page.partition("`certify --json` gives\n\n```json\n")[2].partition("```")[0])
    found = json.loads((RESULTS / "certificates" / "certificate.json").read_text())
    assert shown.pop("plot") == "runs/garage/certificate.png"
    assert shown.keys() == found.keys()
    for name, value in {**found, **found["wealth"]}.items():
        written_there = {**shown, **shown["wealth"]}[name]
        if name != "wealth":
            # Numbers are shown to two digits or more.
            assert written_there == (
                pytest.approx(value, rel=0.03) if isinstance(value, float) else value
            )
