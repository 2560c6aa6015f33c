"""Install a plug-in for a test: a folder on the path with the metadata of a package."""

import sys
from contextlib import contextmanager

from apportion.runs.plugins import find_plugins


@contextmanager
def installed(folder, group, entries):
    """Register entry points, `{name: "module:attribute"}`, as an installed package would."""
    package = folder / "toy_package-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-package\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (package / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
    sys.path.insert(0, str(folder))
    find_plugins.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        find_plugins.cache_clear()
