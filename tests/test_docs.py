"""Every Python block of the documentation and the README runs, and what is generated on it is current."""

import ast
import json
import logging
import re
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion.studies.registry import study_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- file: .+? -->.*?<!-- end -->", re.DOTALL)
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
NOTEBOOKS = runpy.run_path(str(ROOT / "docs" / "notebooks.py"))


def blocks(page):
    """(line, code) of every Python block of the page; examples shown on it have tests of their own."""
    text = page.read_text(encoding="utf-8")
    text = GENERATED.sub(lambda shown: "\n" * shown[0].count("\n"), text)
    for found in BLOCK.finditer(text):
        yield text[: found.start(1)].count("\n") + 1, found[1]


def run(page):
    """All blocks in order, in one namespace; a failure's line number is the page's own."""
    namespace = {"__name__": "page"}
    for line, code in blocks(page):
        tree = ast.parse("\n" * (line - 1) + code, str(page))
        exec(compile(tree, str(page), "exec"), namespace)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name == "how-to.md" else [])
        for page in PAGES[1:]
        if any(blocks(page))
    ],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_code_blocks_of_the_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(page)


def test_the_code_in_the_readme_prints_the_numbers_below_it(capsys):
    run(PAGES[0])
    printed = capsys.readouterr().out.partition("measures it:\n")[2]
    shown = (
        PAGES[0].read_text().partition("mean rewards per period:\n\n```\n")[2].partition("```")[0]
    )
    numbers = [list(map(float, re.findall(r"[-+]?\d[\d.]*", text))) for text in (shown, printed)]
    assert len(numbers[0]) == 9
    assert numbers[1][:9] == pytest.approx(numbers[0], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_the_notebook_runs_and_its_committed_outputs_have_the_form_of_fresh_ones(path):
    notebook = json.loads(path.read_text("utf-8"))
    assert NOTEBOOKS["outline"](NOTEBOOKS["execute"](notebook)) == NOTEBOOKS["outline"](notebook)


def test_notebooks_are_committed_with_outputs_and_one_has_the_code_of_its_example():
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in TUTORIALS}
    assert [fault for one in found.values() for fault in NOTEBOOKS["faults"](one)] == []
    example = (ROOT / "examples" / "02_your_own_problem.py").read_text()
    cells = ["".join(cell["source"]) for cell in found["own-problem"]["cells"]]
    assert [cell in example for cell in cells if "class Cache" in cell] == [True]


def test_what_is_generated_is_current_and_no_page_waits_for_a_build():
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    stale = [
        page.name
        for page, text in tables["pages"]()
        if (page.read_text() if page.exists() else None) != text
    ]
    assert stale == []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        marks = re.findall(r"<!-- (.+?) -->", text)
        assert all(mark == "end" or mark.startswith(("table: ", "file: ")) for mark in marks), page
        assert "--8<--" not in text, page
        assert r"\(" not in re.sub(r"^```.*?^```$|`[^`]*`", "", text, flags=re.M | re.S), page


def test_links_of_pages_outside_the_site_lead_to_files():
    """The build of the site checks the links of its own pages."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("examples/**/*.md")]
    links = {
        page.parent / link
        for page in pages
        for link in re.findall(r"\]\(([^)\s:#]+)(?:#[^)\s]*)?\)", page.read_text("utf-8"))
    }
    assert len(links) > 30
    assert [str(link) for link in links if not link.exists()] == []


def test_the_index_has_one_row_for_each_study_and_its_number_is_of_the_claim_it_names():
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    index = (ROOT / "docs" / "studies" / "index.md").read_text()
    rows = re.findall(r"^\| \[.+?\]\(([a-z0-9-]+)\.md\)", index, flags=re.M)
    assert rows == tables["studies"]()
    assert set(study_names().values()) <= set(rows)
    for study in rows:
        assert tables["STUDIES"][study].names(tables["answer"](study)[0]["claim"]), study


def test_no_cell_of_the_studies_is_long_and_all_pages_have_40000_words_without_generated_tables():
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    pages = [page for page in PAGES if "results" not in page.parts]
    short = [page for page in pages if page.parent.name == "studies" or page.name == "README.md"]
    assert max(tables["longest_cell"](page.read_text()) for page in short) <= 25
    words = sum(map(tables["words_by_hand"], pages))
    words += sum(NOTEBOOKS["words"](json.loads(path.read_text("utf-8"))) for path in TUTORIALS)
    assert 10_000 < words <= 40_000


def test_the_picture_on_the_front_page_and_its_caption_show_what_was_measured():
    overview = runpy.run_path(str(ROOT / "docs" / "overview.py"))
    measured = json.loads((ROOT / "docs" / "assets" / "overview.json").read_text())
    found = {(row["stopped"], row["tasks"]): 100 * row["value"] for row in measured["gains"]}
    for row in measured["gains"]:
        assert row["runs"] == measured["universes"] * measured["runs in each"]
        assert row["value"] == pytest.approx(np.mean(row["universes"]), abs=1e-5)
        assert row["low"] < row["value"] < row["high"]
        # No step is better than the best.
        assert found["last", row["tasks"]] <= found["best", row["tasks"]]
    drawn = overview["draw"](measured).axes[2].lines
    for line, name in zip(drawn, overview["CURVES"], strict=True):
        shown = dict(zip(line.get_xdata(), line.get_ydata(), strict=True))
        assert shown == {count: found[name, count] for count in overview["COUNTS"]}
    numbers = [found[name, count] for name in ("last", "best") for count in (1, 64)]
    one, many, best, most = (f"{number:.1f} %" for number in numbers)
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text()
        assert f"after 1,200 updates {one} with one task and {many} with 64" in text
        assert f"stopped at its best step {best} and {most}" in text


def test_stocks_are_adjusted_for_dividends_and_a_missing_day_is_refused():
    stocks = runpy.run_path(str(ROOT / "docs" / "stocks.py"))
    assert len(set(stocks["TICKERS"])) == 68
    days = pd.bdate_range(stocks["FIRST"], periods=stocks["DAYS"]).strftime("%Y-%m-%d")
    raw = pd.DataFrame({"Date": [*days, "2020-01-02"]})
    raw = raw.assign(Open=8.0, High=12.0, Low=7.0, Close=10.0, Volume=5.0)
    raw["Adj Close"] = 9.0
    made = stocks["adjusted"](raw, "AAA")
    assert len(made) == stocks["DAYS"]
    values = made[["open", "high", "low", "close", "volume"]].iloc[0]
    assert values.tolist() == pytest.approx([7.2, 10.8, 6.3, 9.0, 5])
    with pytest.raises(SystemExit, match="AAA: 2767 whole days"):
        stocks["adjusted"](raw.drop(index=3), "AAA")


def saved_verdicts(folder, outcomes, seed):
    """A study's folder with a verdict of each outcome, named by its letter."""
    folder.mkdir(parents=True)
    numbers = {"estimate": 1.0, "interval": [0.5, None], "n": 4}
    verdicts = [
        {"claim": name, "outcome": "holds", "adjusted": outcome, **numbers}
        for name, outcome in outcomes.items()
    ]
    (folder / "verdict.json").write_text(json.dumps(verdicts))
    (folder / "study.json").write_text(json.dumps({"seed": seed}))


def test_verdicts_of_two_seeds_are_set_side_by_side(tmp_path):
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    holds, fails, open_ = "holds", "does-not-hold", "not-established"
    first = {"a": holds, "b": holds, "c": open_, "d": open_, "e": fails, "f": holds}
    second = {"a": holds, "b": fails, "c": holds, "d": open_, "e": fails}
    saved_verdicts(tmp_path / "fig1", first, 0)
    assert tables["stability"](tmp_path) is None
    saved_verdicts(tmp_path / "seed-1" / "fig1", second, 1)
    page = tables["stability"](tmp_path)
    # "d" is decided by neither seed, and "f" is a claim of one seed alone.
    assert "2 of 4 decided verdicts turned (50.0 %), 1 of them to the opposite" in page
    assert "| Figure 1 | 5 | 4 | 2 | 1 |" in page
    turned = [line.split(" | ")[1] for line in page.splitlines() if "](fig1.md)" in line]
    assert turned == ["b", "c"]
    assert "+ 1.000 [0.500, –] | − 1.000 [0.500, –]" in page
    assert "- Figure 1: f" in page


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path, monkeypatch, caplog):
    """All pages of `make docs`, but for what takes most of its time and can warn of nothing: the index
    that is searched, and the sources shown under what is documented.
    """
    pytest.importorskip("mkdocs")
    pytest.importorskip("latex2mathml")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.utils.yaml import yaml_load

    with open(ROOT / "mkdocs.yml", encoding="utf-8") as file:
        search, references = yaml_load(file)["plugins"]
    assert search == "search"
    references["mkdocstrings"]["handlers"]["python"]["options"]["show_source"] = False
    config = load_config("mkdocs.yml", strict=True, site_dir=str(tmp_path), plugins=[references])
    build(config)
    assert [line for line in caplog.records if line.levelno >= logging.WARNING] == []
    page = (tmp_path / "method" / "index.html").read_text()
    assert "<math" in page
    assert "arithmatex" not in page
    outside = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', page)
    assert outside == []
