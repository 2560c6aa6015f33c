"""Comments, docstrings, messages and pages avoid words that readers of technical English do not expect."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFUSED = re.compile(r"\b(told|anew|nobody|whoever|everybody|hence|of which)\b", re.IGNORECASE)
PAGES = ("*.md", "docs/*.md", "docs/*/*.md", "docs/tutorials/*.ipynb", "packages/*/README.md")
PAGES = (*PAGES, "src/**/*.html", "src/**/*.js", "packages/*/src/**/*.js")


def refused_in_code(source):
    """Return the refused words outside the names of a program, each with its line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = [token for token in tokens if re.search("STRING|COMMENT", tokenize.tok_name[token.type])]
    return [(token.start[0], word) for token in text for word in REFUSED.findall(token.string)]


def test_words_are_found_in_comments_and_strings_but_not_in_names():
    assert refused_in_code("told = 1  # Whoever\n'anew'\n") == [(1, "Whoever"), (2, "anew")]


def test_no_refused_word_is_used():
    places = ("src", "packages/*/src", "docs", "examples", "benchmarks")
    code = [file for place in places for file in ROOT.glob(f"{place}/**/*.py")]
    pages = [file for place in PAGES for file in ROOT.glob(place)]
    found = {str(file.relative_to(ROOT)): refused_in_code(file.read_text("utf-8")) for file in code}
    found |= {str(p.relative_to(ROOT)): REFUSED.findall(p.read_text("utf-8")) for p in pages}
    assert len(found) > 200
    assert [item for item in found.items() if item[1]] == []
