"""Digests of the installed packages that results are computed with: which files changed since."""

import ast
import hashlib
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from apportion.runs.plugins import policy_packages


@cache
def code_lines(text: str) -> str:
    """Return the lines of a module without blank lines, comments, docstrings and imports."""
    left_out = {
        line
        for node in ast.walk(_parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(text.splitlines(), start=1)
    kept = (line for number, line in lines if number not in left_out)
    return "\n".join(line for line in kept if line.strip() and not line.lstrip().startswith("#"))


def _parse(text: str) -> ast.Module:
    """Parse a module; Python 3.11 raises SystemError if another thread parses at the same time."""
    try:
        return ast.parse(text)
    except SystemError:
        return ast.parse(text)


@cache
def file_digests() -> dict[str, str]:
    """Return a digest of each file of the library and of the packages that register with it.

    Comments, docstrings and imports of a module do not change its digest.
    """
    found = {}
    for package in sorted(policy_packages()):
        spec = find_spec(package)
        for folder in map(Path, (spec and spec.submodule_search_locations) or ()):
            for file in sorted(folder.rglob("*")):
                if file.is_file() and "__pycache__" not in file.parts:
                    name = f"{package}/{file.relative_to(folder).as_posix()}"
                    found[name] = _digest(file)
    return found


def _digest(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix == ".py":
        content = code_lines(content.decode()).encode()
    return hashlib.sha256(content).hexdigest()[:8]


def package_digests() -> str:
    """Return one digest for each package, as `study.json` records them.

    >>> package_digests().startswith("apportion ")
    True
    """
    packages: dict[str, dict[str, str]] = {}
    for name, digest in file_digests().items():
        packages.setdefault(name.partition("/")[0], {})[name] = digest
    return ", ".join(
        f"{package} {hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]}"
        for package, files in packages.items()
    )


def changed_files(before: dict[str, str]) -> list[str]:
    """Return the files that are new, gone or different since these digests were recorded."""
    now = file_digests()
    return sorted(name for name in before.keys() | now if before.get(name) != now.get(name))
