"""How a study was computed: command, commit, versions, data, and every stretch of computing.

It stands in `study.json` from the first cell on, so that a study that was stopped, went on elsewhere
or was adopted from a sibling still says where each of its numbers was computed.
"""

import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import apportion
from apportion.errors import InputError
from apportion.runs.atomic import read_json, write_json
from apportion.runs.environment import versions
from apportion.studies.store import CellStore
from apportion.studies.study import plain


def commit() -> str | None:
    """The commit of the package's source, marked where files were changed; None outside a checkout."""
    folder = Path(apportion.__file__).parent
    # A package installed inside somebody's repository is no part of that repository.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{found} with changes" if found and changed else found


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def stretches_in(folder: Path) -> list[dict[str, Any]]:
    """Every stretch of computing that a study's folder tells of."""
    path = folder / "study.json"
    content = read_json(path) if path.exists() else {}
    found = content.get("computing", []) if isinstance(content, dict) else None
    if not isinstance(found, list) or not all(map(_is_stretch, found)):
        raise InputError(
            f"{path}: does not say how the study was computed; put it back from a copy"
        )
    return found


def _is_stretch(found: Any) -> bool:
    """Whether it is what `Record.write` wrote."""
    if not isinstance(found, dict) or not isinstance(found.get("started"), str):
        return False
    try:
        _moment(found)
    except ValueError:
        return False
    return isinstance(found.get("device"), str) and isinstance(found.get("seconds"), int | float)


def seconds_of(computing: Iterable[dict[str, Any]]) -> float:
    """Seconds in which at least one of these stretches went on.

    >>> noon = "2026-01-01T12:00:00+00:00"
    >>> seconds_of([{"started": noon, "seconds": 5.0}, {"started": noon, "seconds": 7.0}])
    7.0
    """
    spans = sorted((_moment(stretch), stretch["seconds"]) for stretch in computing)
    total, end = 0.0, float("-inf")
    for start, seconds in spans:
        total += max(start + seconds - max(start, end), 0.0)
        end = max(end, start + seconds)
    return round(total, 1)


def _moment(stretch: dict[str, Any]) -> float:
    return datetime.fromisoformat(stretch["started"]).timestamp()


@dataclass(frozen=True)
class Record:
    """What `study.json` says of how a study was computed."""

    store: CellStore
    command: str
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    begun: float = field(default_factory=time.monotonic)
    commit: str | None = field(default_factory=commit)
    versions: dict[str, str | None] = field(default_factory=versions)

    def facts(self, computing: list[dict[str, Any]]) -> dict[str, Any]:
        """Command, commit, versions, seed and data; devices of all stretches, the seconds in which at
        least one of them went on, and each.
        """
        settings = self.store.plan.settings
        devices = dict.fromkeys(stretch["device"] for stretch in computing)
        return {
            "command": self.command,
            "commit": self.commit,
            "versions": self.versions,
            "device": ", ".join(devices) or None,
            "seed": settings.get("seed"),
            "data": settings.get("data"),
            "seconds": seconds_of(computing),
            "computing": computing,
        }

    def write(self, device: str, cells: int) -> None:
        """Write this stretch, in place of what it wrote before: its seconds and cells so far."""
        stretch = {
            "started": self.started,
            "seconds": round(time.monotonic() - self.begun, 1),
            "device": device,
            "cells": cells,
            "commit": self.commit,
        }
        plan, folder = self.store.plan, self.store.folder
        with self.store.lock():
            others = [s for s in stretches_in(folder) if s["started"] != self.started]
            about = {"name": plan.study, "settings": plan.settings}
            write_json(folder / "study.json", plain(about | self.facts([*others, stretch])))


def write_whole(
    folder: Path,
    command: str,
    processes: int,
    seconds: float,
    computing: dict[str, Sequence[dict[str, Any]]],
) -> None:
    """Write `all.json`: the seconds of the command that concluded all studies, and of each study.

    Parameters
    ----------
    folder
        The folder of the studies' folders.
    command, processes, seconds
        What the user called, with so many processes, and how long it took.
    computing
        The stretches of every study. Where they last longer than the command, some were computed before.
    """
    stretches = list(chain(*computing.values()))
    content = {
        "command": command,
        "commit": commit(),
        "versions": versions(),
        "device": ", ".join(dict.fromkeys(stretch["device"] for stretch in stretches)),
        "processes": processes,
        "seconds": round(seconds, 1),
        "seconds_computing": seconds_of(stretches),
        "studies": {study: seconds_of(own) for study, own in computing.items()},
    }
    write_json(folder / "all.json", content)
