"""Domains and studies of installed packages, found by their entry points.

A package registers a domain in the entry-point group `apportion.domains` and a study in
`apportion.studies`. The library registers its own domains in the same way. Only packages that
registered an entry point may contribute policy classes to saved files (`policy_packages`).
"""

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from apportion.errors import InputError, first_line

DOMAINS = "apportion.domains"
STUDIES = "apportion.studies"


@cache
def find_plugins(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name, in alphabetical order.

    Raises
    ------
    InputError
        If two installed packages register the same name.
    """
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=group), key=lambda point: point.name):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise InputError(
                f"two installed packages register {point.name!r} in {group}: {_package(other)} and "
                f"{_package(point)}; uninstall one of them"
            )
    return found


def load_plugin(group: str, name: str) -> Any:
    """Import and return the object that an entry point names.

    Raises
    ------
    InputError
        If the object cannot be imported.
    """
    point = find_plugins(group)[name]
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"{name}: {point.value} of the package {_package(point)} cannot be imported "
            f"({first_line(error)}); reinstall {_package(point)}"
        ) from error


def policy_packages() -> frozenset[str]:
    """Return the top-level modules whose policy classes a saved file may name."""
    points = [*find_plugins(DOMAINS).values(), *find_plugins(STUDIES).values()]
    return frozenset({"apportion", *(point.module.partition(".")[0] for point in points)})


def plugin_versions() -> dict[str, str]:
    """Return the versions of the packages that register domains or studies."""
    points = [*find_plugins(DOMAINS).values(), *find_plugins(STUDIES).values()]
    return {point.dist.name: point.dist.version for point in points if point.dist is not None}


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.module
