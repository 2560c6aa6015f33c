"""Install a plug-in for a test: a folder on the path with the metadata of a package."""

import sys
import tomllib
from contextlib import contextmanager
from pathlib import Path

from apportion.runs.plugins import find_plugins

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"


@contextmanager
def installed(folder, groups, *sources):
    """Register entry points, `{group: {name: "module:attribute"}}`, as an installed package would."""
    package = folder / "toy_package-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (package / "entry_points.txt").write_text("\n".join([*lines, ""]))
    added = [str(folder), *map(str, sources)]
    sys.path[:0] = added
    find_plugins.cache_clear()
    try:
        yield
    finally:
        for path in added:
            sys.path.remove(path)
        find_plugins.cache_clear()


def example_entry_points():
    """The entry points of the example plug-in, from its own pyproject.toml."""
    return tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
