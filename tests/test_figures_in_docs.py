"""What the README and the pages of the paper say is what studies found, and what they name is there."""

import ast
import hashlib
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion.studies.registry import study_names

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
NUMBER = r"[+−-]?\d*\.?\d+"
FOUND = re.compile(rf"({NUMBER}) \[({NUMBER}), ({NUMBER})\]")
NAMED = re.compile(r"studies/([a-z0-9-]+)\.md|apportion study ([a-z0-9-]+)")


def rows_with_figures(page):
    """Each line with estimates, and the studies it names; `the same` is the line before's.

    Blocks of code and generated tables are left out.
    """
    studies, rows = [], []
    left_out = r"^```.*?^```$|^<!-- table: .*?^<!-- end -->$"
    text = re.sub(left_out, "", (ROOT / page).read_text(), flags=re.M | re.S)
    for line in text.splitlines():
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
        names = ("gain", "gain low", "gain high"), ("gain", "low", "high"), ("value", "low", "high")
        for columns in map(list, names):
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


LEVELS = re.compile(rf"\([^()]*? ({NUMBER}), [^()]*? ({NUMBER})\)")


def levels(study):
    """Levels of the arms that the claims of a study compare."""
    return [level for one in committed_verdicts([study]) for level in one["levels"].values()]


@pytest.mark.parametrize(("page", "least"), [("README.md", 2), ("docs/paper.md", 12)])
def test_levels_beside_a_difference_are_of_the_rows_and_differ_by_it(page, least):
    compared = [(line, *named) for line, named in rows_with_figures(page) if LEVELS.search(line)]
    assert len(compared) >= least
    for line, study in compared:
        pair = [written(number) for number in LEVELS.search(line).groups()]
        difference, _ = written(FOUND.search(line)[1])
        assert pair[0][0] - pair[1][0] == pytest.approx(difference, abs=0.15), line
        for level, rounding in pair:
            known = np.array(levels(study))
            found = np.abs(np.concatenate([known, 100 * known]) - level).min()
            assert found <= rounding, (level, line)


SIGNS = {"holds": "+", "not-established": "=", "does-not-hold": "−"}


def committed_verdicts(studies, results=RESULTS):
    files = [results / study / "verdict.json" for study in studies]
    return [one for file in files if file.exists() for one in json.loads(file.read_text())]


def marks(triple, studies):
    """Return the marks that claims with this estimate deserve: after Holm, † if seed 1 has another one."""
    again = committed_verdicts(studies, RESULTS / "seed-1")
    second = {v["claim"]: SIGNS[v["adjusted"] or v["outcome"]] for v in again}
    found = set()
    for v in committed_verdicts(studies):
        if is_among(triple, np.array([[v["estimate"], *v["interval"]]], float)):
            sign = SIGNS[v["adjusted"] or v["outcome"]]
            found.add(sign + "†" * (second.get(v["claim"], sign) != sign))
    return found


@pytest.mark.parametrize(("page", "least"), [("README.md", 8), ("docs/paper.md", 60)])
def test_the_marks_are_the_outcomes_of_the_verdicts_of_both_seeds(page, least):
    rows = [(line, studies) for line, studies in rows_with_figures(page) if line.startswith("| ")]
    assert len(rows) >= least
    for line, studies in rows:
        _, _, mark, result, *_ = (cell.strip() for cell in line.split("|"))
        [triple] = FOUND.findall(result)
        assert mark in marks(triple, studies), (line, marks(triple, studies))


def test_the_readme_is_short_and_has_eight_results():
    assert len(rows_with_figures("README.md")) == 8
    assert 500 <= len((ROOT / "README.md").read_text().split()) <= 700


def test_every_picture_belongs_to_committed_numbers():
    """A study's picture has the checksum of its run, whose rows give its table (`test_committed`)."""
    shown = {
        (page.parent / place).resolve().relative_to(ROOT)
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for place in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page.read_text())
    }
    pictures = {file.relative_to(ROOT) for file in (ROOT / "docs").rglob("*.png")}
    # Of the second seed the verdicts are shown.
    assert shown == {file for file in pictures if "seed-1" not in file.parts}
    others = {Path("docs/assets/overview.png"), Path("docs/assets/certificate.png")}
    for folder in {file.parent for file in shown - others}:
        for figure in json.loads((ROOT / folder / "study.json").read_text())["figures"]:
            for name in (figure["picture"], figure["table"]):
                digest = hashlib.sha256((ROOT / folder / name).read_bytes()).hexdigest()
                assert f"{digest}  {name}\n" in (ROOT / folder / "SHA256SUMS").read_text()


def test_the_picture_of_a_certificate_shows_the_numbers_beside_it():
    found = runpy.run_path(str(ROOT / "docs" / "certificate.py"))
    measured = pd.read_csv(found["FILE"].with_suffix(".csv"))
    pd.testing.assert_frame_equal(found["certificate"].to_frame(), measured, rtol=1e-4, atol=1e-5)
    shown = [line.get_ydata()[1:] for line in found["certificate"].plot().axes[0].lines[:2]]
    np.testing.assert_allclose(shown, measured[["better", "worse"]].T, rtol=1e-4)


def names_in(file):
    """Functions, classes and methods of a module, methods as CLASS.NAME."""
    kinds = ast.FunctionDef | ast.ClassDef
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, kinds):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{one.name}" for one in inner if isinstance(one, kinds)}
    return found


def test_sentence_by_sentence_no_row_is_empty_and_everything_named_is_there():
    lines = (ROOT / "docs" / "sentences.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if re.match(r"\| [0-7A]\.\d+ \|", line)]
    numbers = {part: [] for part in "01234567A"}
    known, files = study_names(), {}
    for row in rows:
        number, sentence, code, tests, verdict = row
        numbers[number[0]].append(int(number[2:]))
        assert min(map(len, (sentence, code, tests, verdict))) > 3, row
        for cell, folder, prefix in ((code, "src/apportion", ""), (tests, "tests", "test_")):
            named = re.findall(r"`([\w/]+\.py):([\w.]+)`", cell)
            assert named or cell.startswith("nothing to "), row
            for path, name in named:
                file = ROOT / path if path.startswith("packages/") else ROOT / folder / path
                files[file] = files.get(file) or names_in(file)
                assert name.startswith(prefix), (number, name)
                assert name in files[file], (number, path, name)
        # A study in backticks; a definition, or why it is not examined, in words.
        for study in re.findall(r"`([a-z0-9-]+)`", verdict):
            assert study in known, (number, study)
    for found in numbers.values():
        assert found == list(range(1, len(found) + 1))
    assert [len(found) for found in numbers.values()] == [4, 4, 3, 7, 23, 12, 38, 4, 30]


def test_the_certificate_on_the_page_of_the_command_line_is_the_one_that_was_computed():
    page = (ROOT / "docs" / "command-line.md").read_text()
    shown = json.loads(page.partition("`certify --json` gives\n\n```json\n")[2].partition("```")[0])
    found = json.loads((RESULTS / "certificates" / "certificate.json").read_text())
    assert shown.pop("plot") == "runs/garage/certificate.png"
    # What has no value there may be younger than the file.
    shown, found = ({n: v for n, v in one.items() if v is not None} for one in (shown, found))
    assert shown.keys() == found.keys()
    for name, value in {**found, **found["wealth"]}.items():
        written_there = {**shown, **shown["wealth"]}[name]
        if name != "wealth":
            # Numbers are shown to two digits or more.
            assert written_there == (
                pytest.approx(value, rel=0.03) if isinstance(value, float) else value
            )
