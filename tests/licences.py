"""The licences of what our packages need, with all extras: `python tests/licences.py` lists them.

Read from the metadata of what is installed. A licence that is not among the accepted ones is an error, so
that each new one is read first.
"""

import re
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

ACCEPTED = (
    *("0bsd", "apache", "bsd", "cc0", "hpnd", "isc", "mit", "psf", "unlicense", "zlib"),
    *("mpl 2", "mpl-2", "mozilla public license 2", "matplotlib", "python-2"),
    *("python software foundation", "public domain"),
)
"""Words, in small letters, of which each licence has one: permissive ones, and the MPL, which asks only
that changes to its own files be published."""


OWN = ("apportion", "apportion-charging", "apportion-studies")


def needed() -> dict[str, Distribution]:
    """Return every installed package that our packages need with all their extras, by name."""
    found: dict[str, Distribution] = {}
    waiting = [
        (name, frozenset(distribution(name).metadata.get_all("Provides-Extra") or []))
        for name in OWN
    ]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            # Not for this machine, or an extra that is not installed.
            continue
        for text in found[name].requires or []:
            wanted = Requirement(text)
            asked = [{"extra": extra} for extra in (*extras, "")]
            if wanted.marker is None or any(wanted.marker.evaluate(each) for each in asked):
                plain = re.sub(r"[-_.]+", "-", wanted.name).lower()
                waiting.append((plain, frozenset(wanted.extras)))
    return dict(sorted(found.items()))


def licence_of(package: Distribution) -> str:
    """What the metadata says, in one line."""
    about = package.metadata
    stated = [about.get("License-Expression") or ""]
    stated += [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if line.startswith("License ::") and not line.endswith("OSI Approved")
    ]
    stated.append((about.get("License") or "").strip().partition("\n")[0])
    return next((text for text in stated if text and text != "UNKNOWN"), "")


def is_accepted(licence: str) -> bool:
    """Whether all that must be kept to, or one of those to choose from, was looked at.

    >>> is_accepted("MIT AND Zlib"), is_accepted("MIT AND AGPL-3.0"), is_accepted("MIT OR GPL-2.0")
    (True, False, True)
    """
    return any(
        all(any(word in part for word in ACCEPTED) for part in choice.split(" and "))
        for choice in licence.lower().split(" or ")
    )


def listed() -> dict[str, str]:
    """Every package's licence."""
    return {name: licence_of(found) for name, found in needed().items()}


if __name__ == "__main__":
    odd = {name: text for name, text in listed().items() if not is_accepted(text)}
    for package, text in listed().items():
        print(f"{package:32} {text}{'    NOT ACCEPTED' if package in odd else ''}")
    sys.exit(bool(odd))
