"""Every Python block of the documentation and the README runs, in order, one namespace a page."""

import logging
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r"^--8<--\n(.+)\n--8<--$")


def blocks(page):
    """(line, code) of every Python block that stands on the page itself."""
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        if not INCLUDED.match(found[1].strip()):
            yield text[: found.start(1)].count("\n") + 1, found[1]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(blocks(page))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_code_blocks_of_the_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    for line, code in blocks(page):
        # Padding makes a failure's line number the page's own.
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)


def test_every_example_that_a_page_includes_is_there():
    for page in PAGES:
        for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
            included = INCLUDED.match(found[1].strip())
            assert included is None or (ROOT / included[1]).is_file(), page


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
