"""Comments, docstrings, messages and pages avoid words that readers of technical English do not expect."""

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
REFUSED = re.compile(r"\b(told|anew|nobody|whoever|everybody|hence)\b", re.IGNORECASE)
NOT_YET_CLEAN = ("packages/studies/src/apportion_studies/theory/bound.py",)


def refused_in_code(source):
    """Return the refused words outside the names of a program, each with its line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = [token for token in tokens if re.search("STRING|COMMENT", tokenize.tok_name[token.type])]
    return [(token.start[0], word) for token in text for word in REFUSED.findall(token.string)]


def test_words_are_found_in_comments_and_strings_but_not_in_names():
    assert refused_in_code("told = 1  # Whoever\n'anew'\n") == [(1, "Whoever"), (2, "anew")]


def test_no_refused_word_is_used():
    code = [file for src in ("src", "packages/*/src") for file in ROOT.glob(f"{src}/**/*.py")]
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/tutorials/*.*"), ROOT / "README.md"]
    found = {str(file.relative_to(ROOT)): refused_in_code(file.read_text("utf-8")) for file in code}
    found |= {str(p.relative_to(ROOT)): REFUSED.findall(p.read_text("utf-8")) for p in pages}
    assert len(found) > 100
    assert [item for item in found.items() if item[1] and item[0] not in NOT_YET_CLEAN] == []
