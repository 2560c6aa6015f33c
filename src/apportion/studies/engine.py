"""The study engine: compute independent cells, save each one when it is finished, and conclude.

A `Plan` lists its cells (such as a method, a year, an experiment or a seed), computes cells, and turns the
rows of all cells into a `Study`. An executor computes the missing cells; only this process writes files. A
study that was stopped or killed continues from its saved cells when it is started again with the same
settings. Its folder contains

cells.json           the digest of the plan
cells/NAME.parquet   the rows of a finished cell, while others are missing
rows.parquet         the rows of all cells
SHA256SUMS           checksums of these files
study.json           how the cells were computed and, after the conclusion, what `Study.save` writes
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

import apportion
from apportion.errors import InputError, first_line
from apportion.runs.environment import versions
from apportion.runs.files import (
    LOCK,
    checksummed,
    only_writer,
    pack_rows,
    read_json,
    read_rows,
    write_checked,
    write_json,
)
from apportion.runs.plugins import plugin_versions
from apportion.runs.runner import Stopped, interrupts
from apportion.runs.sources import code_lines, file_digests, package_digests
from apportion.studies.study import FigureResult, Study, plain

_ROWS_VERSION = 1
"""Version of the rows of a cell; results of an earlier version are stale."""

OnProgress = Callable[[str, float], None]
"""Called with a description and the fraction of all work done so far; it may raise to stop."""


@dataclass(frozen=True)
class Cell:
    """One independent part of a study.

    Examples
    --------
    >>> Cell("mtl-2019-0", {"method": "mtl", "year": 2019, "experiment": 0}, program="mtl")["year"]
    2019
    """

    name: str
    """Unique in its study, and valid as a file name."""
    values: dict[str, Any] = field(compare=False)
    """Parameters of the cell, as plain values."""
    program: str = ""
    """Name of the program; cells of one program are computed together."""
    on_processor: bool = False
    """Compute on the CPU, because the program is too small for a GPU."""

    @classmethod
    def alone(cls, name: str, values: dict[str, Any]) -> "Cell":
        """Return a cell with its own program, if computing several together has no advantage."""
        return cls(name, values, program=name)

    @classmethod
    def each(cls, label: str, name: str, values: Sequence[float]) -> "tuple[Cell, ...]":
        """Return one cell with its own program for each value.

        Examples
        --------
        >>> [cell.name for cell in Cell.each("distance", "spread", (0.0, 0.1))]
        ['distance-0', 'distance-0.1']
        """
        return tuple(cls.alone(f"{label}-{value:g}", {name: value}) for value in values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


Rows = Iterator[tuple[Cell, pd.DataFrame]]


def _everything(rows: pd.DataFrame) -> pd.DataFrame:
    return rows


@dataclass(frozen=True)
class Plan:
    """The cells of a study, how they are computed, and how the study concludes from them.

    Functions must be module-level functions or `functools.partial` of them, so that a plan can be sent to
    another process or machine.
    """

    study: str
    cells: tuple[Cell, ...]
    compute: Callable[[Sequence[Cell], OnProgress], Rows]
    """Yields the rows of each cell of one program when it is finished. They must not depend on the other
    cells of the program."""
    conclude: Callable[[pd.DataFrame, dict[str, Any]], Sequence[FigureResult]]
    """Returns the figures from the rows of all cells, in the order of the plan, and the settings."""
    settings: dict[str, Any]
    """All settings as plain values; saved cells with other settings are rejected. The optional entry `data`
    describes the data and has its fingerprint."""
    on_processor: bool = False
    """Compute on the CPU, because the programs are too small for a GPU."""
    at_once: int | None = None
    """Largest number of processes that compute its programs at the same time, limited by GPU memory."""
    keep: Callable[[pd.DataFrame], pd.DataFrame] = _everything
    """Selects the rows to keep once all cells are finished."""

    @property
    def digest(self) -> str:
        """Digest of study, cells and settings; saved cells are reused only if it matches."""
        names = [cell.name for cell in self.cells]
        whole = {"study": self.study, "cells": names, "settings": self.settings}
        content = json.dumps(whole, sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def source(self) -> str:
        """Digest of the study's own code.

        It covers the modules of `compute` and `conclude` and the modules of the same package that they
        import. Comments, docstrings, imports and the name of the package do not change it.
        """
        functions = [f.func if isinstance(f, partial) else f for f in (self.compute, self.conclude)]
        waiting, code = [function.__module__ for function in functions], dict[str, str]()
        while waiting:
            module = waiting.pop()
            if module in code:
                continue
            text = Path(str(sys.modules[module].__file__)).read_text(encoding="utf-8")
            code[module] = code_lines(text)
            package = module.rpartition(".")[0]
            beside = re.findall(rf"^from {re.escape(package)}\.(\w+) import", text, re.M)
            waiting += [f"{package}.{name}" for name in beside]
        named = sorted((module.rpartition(".")[2], text) for module, text in code.items())
        return hashlib.sha256(json.dumps([_ROWS_VERSION, named]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Program:
    """Cells of a plan that are computed together, in one compiled program."""

    plan: Plan
    cells: tuple[Cell, ...]

    @property
    def on_processor(self) -> bool:
        """Whether it is computed on the CPU."""
        return self.plan.on_processor or self.cells[0].on_processor


def _programs_of(plan: Plan, cells: Sequence[Cell]) -> list[Program]:
    """Group cells by program, in the order of the first cell of each program."""
    together: dict[str, list[Cell]] = {}
    for cell in cells:
        together.setdefault(cell.program, []).append(cell)
    return [Program(plan, tuple(members)) for members in together.values()]


@dataclass(frozen=True)
class CellResult:
    """A finished cell: its rows, duration and device."""

    study: str
    cell: Cell
    content: bytes
    """Rows as Parquet; the worker encodes them, so that the main process only writes them."""
    seconds: float
    device: str


OnEvent = Callable[[str, float], None]
"""Called regularly with a description and the amount of unfinished work done, in cells; it may raise to
stop."""


class Executor(ABC):
    """Abstract base class of executors, which compute programs."""

    @abstractmethod
    def execute(self, programs: Sequence[Program], on_event: OnEvent) -> Generator[CellResult]:
        """Start programs in order, and yield each cell when it is finished."""


@dataclass(frozen=True)
class StudyResult:
    """A concluded study, and the total computing time of its cells in seconds."""

    name: str
    folder: Path
    study: Study
    seconds: float


def perform_plans(
    stores: "Sequence[CellStore]",
    executor: Executor,
    *,
    draw: bool = False,
    progress: OnProgress = lambda what, fraction: None,
) -> Iterator[StudyResult]:
    """Compute the missing cells of several studies, and conclude each study once it is complete.

    Parameters
    ----------
    stores
        The studies with their folders; programs of the first study start first.
    executor
        Computes the cells.
    draw
        Compute nothing, and conclude from the saved cells.
    progress
        Called with a description and the fraction done.

    Raises
    ------
    InputError
        If a folder has cells of other settings, another process writes in it, or with `draw` cells are
        missing.
    Stopped
        If the user requested a stop; finished cells are saved.
    """
    for store in stores:
        store.check()
        if draw:
            store.require_all()
    before = [store.names() for store in stores]
    try:
        yield from _perform(stores, executor, progress)
    except Stopped:
        raise
    except InputError:
        for store, names in zip(stores, before, strict=True):
            store.leave_as(names)
        raise


def _perform(
    stores: "Sequence[CellStore]", executor: Executor, progress: OnProgress
) -> Iterator[StudyResult]:
    named = {store.plan.study: store for store in stores}
    total = sum(len(store.plan.cells) for store in stores)
    with ExitStack() as held, interrupts() as stop:
        for store in stores:
            held.enter_context(only_writer(store.folder))
            held.callback(store.record)
        missing = {name: store.missing() for name, store in named.items()}
        programs = [one for name in named for one in _programs_of(named[name].plan, missing[name])]
        left = {name: len(cells) for name, cells in missing.items()}

        def on_event(what: str, done: float) -> None:
            there = total - sum(left.values())
            progress(f"{there} of {total} cells{what and ', '}{what}", (there + done) / total)
            if stop.requested:
                studies = " and ".join(named) if len(named) < 3 else f"{len(named)} studies"
                folder = stores[0].folder if len(stores) == 1 else stores[0].folder.parent
                raise Stopped(
                    f"stopped: {there} of {total} cells of {studies} are saved in {folder}; run the same "
                    "command to continue"
                )

        for name in [name for name, count in left.items() if not count]:
            yield named[name].conclude()
            on_event("", 0.0)
        for name in [name for name, count in left.items() if count]:
            named[name].open()
        results = executor.execute(programs, on_event)
        held.callback(results.close)
        for done in results:
            named[done.study].save(done)
            left[done.study] -= 1
            if not left[done.study]:
                yield named[done.study].conclude()


_HOW = ("command", "run", "commit", "source", "packages", "device")
"""Fields of `study.json` about how the cells were computed."""


class CellStore:
    """The saved cells of a study in its folder, and how they were computed.

    Parameters
    ----------
    plan, folder
        The study and its folder.
    command
        The command that computes this study alone.
    run
        The command that the user ran, which may compute other studies too; by default `command`.
    """

    def __init__(self, plan: Plan, folder: Path, command: str = "", run: str = "") -> None:
        self.plan, self.folder = plan, Path(folder)
        # Read here and not when a cell is finished, because the source can change in between.
        made = {"command": command, "run": run or command}
        self._now = made | {"commit": _commit(), "source": plan.source}
        self._now["packages"] = package_digests()
        self._files, self._versions = dict[str, str](), dict[str, str | None]()
        self._seconds, self._computed = 0.0, dict[str, dict[str, None]]()
        self._changed, self._recorded = False, 0.0

    def check(self) -> None:
        """Raise if the folder has cells of other settings, or damaged descriptions."""
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file; choose a folder")
        mark = self.folder / "cells.json"
        content = read_json(mark) if mark.exists() else {"digest": self.plan.digest}
        if not isinstance(content, dict) or not isinstance(content.get("digest"), str):
            raise InputError(f"{mark}: is damaged; restore it from a copy")
        if content["digest"] != self.plan.digest:
            raise InputError(
                f"{self.folder}: contains cells of a study with other settings or data; choose another "
                "folder, or use the settings that it was started with"
            )
        path = self.folder / "study.json"
        saved = read_json(path) if path.exists() else {}
        try:
            self._seconds = float(saved.get("seconds", 0.0))
            self._files = dict(saved.get("files") or {})
            self._versions = dict(saved.get("versions") or {})
            self._computed = {
                name: dict.fromkeys(filter(None, (saved.get(name) or "").split("; ")))
                for name in _HOW
            }
        except (AttributeError, TypeError, ValueError):
            raise InputError(
                f"{path}: does not record how the study was computed; restore it from a copy"
            ) from None

    def open(self) -> None:
        """Record the plan in the folder."""
        mark = {"study": self.plan.study, "digest": self.plan.digest}
        write_json(self.folder / "cells.json", mark)

    def names(self) -> set[str] | None:
        """Return the names of the files in the folder, or None if there is no folder."""
        return {one.name for one in self.folder.iterdir()} if self.folder.exists() else None

    def leave_as(self, before: set[str] | None) -> None:
        """Remove the files that a failed study created, if it has no cells."""
        new = (self.names() or set()) - (before or set())
        if new <= {"cells.json", LOCK}:
            for name in new:
                (self.folder / name).unlink()
            if before is None and self.folder.exists():
                self.folder.rmdir()

    def missing(self) -> list[Cell]:
        """Return the cells without saved rows, in order."""
        if (self.folder / "rows.parquet").exists():
            return []
        return [cell for cell in self.plan.cells if not self._file(cell).exists()]

    def require_all(self) -> None:
        """Raise if cells are missing."""
        if missing := self.missing():
            raise InputError(
                f"{self.folder}: {len(missing)} of {len(self.plan.cells)} cells are missing "
                f"(first: {missing[0].name}); compute them with the same command without --draw"
            )

    def save(self, done: CellResult) -> None:
        """Save the rows of a finished cell atomically, and record how it was computed."""
        write_checked(self.folder, f"cells/{done.cell.name}.parquet", done.content)
        self._seconds += done.seconds
        for name, one in (self._now | {"device": done.device}).items():
            self._computed.setdefault(name, {})[one or ""] = None
        self._files, self._versions = file_digests(), versions() | plugin_versions()
        self._changed = True
        # Not for every cell, because a program can finish a hundred at once.
        if time.monotonic() - self._recorded > 1.0:
            self.record()

    def rows(self) -> pd.DataFrame:
        """Return the rows of all cells in the order of the plan; combine them into one file."""
        self.require_all()
        whole = self.folder / "rows.parquet"
        if not whole.exists():
            frames = [_read_rows(self._file(cell), [cell]) for cell in self.plan.cells]
            try:
                content = self.plan.keep(pd.concat(frames, ignore_index=True))
                write_checked(self.folder, whole.name, pack_rows(content))
            except (ValueError, TypeError) as error:
                raise InputError(
                    f"{self.folder / 'cells'}: the cells cannot be combined ({first_line(error)}); "
                    "remove the one that was changed, and run the same command to compute it again"
                ) from None
        shutil.rmtree(self.folder / "cells", ignore_errors=True)
        return _read_rows(whole, self.plan.cells)

    def conclude(self) -> StudyResult:
        """Compute tables, figures and verdicts from the rows of all cells, and write them to the folder.

        Raises
        ------
        InputError
            If cells are missing or a file was changed.
        """
        rows, plan = self.rows(), self.plan
        try:
            study = Study(plan.study, tuple(plan.conclude(rows, plan.settings)), plan.settings)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InputError(
                f"{self.folder / 'rows.parquet'}: the study cannot conclude from it "
                f"({type(error).__name__}: {error}); restore the original file, or report a bug if it was "
                "not changed"
            ) from error
        study.save(self.folder, self._facts())
        self._changed = False
        return StudyResult(plan.study, self.folder, study, round(self._seconds, 1))

    def record(self) -> None:
        """Write to `study.json` how the saved cells were computed, if it has changed."""
        if self._changed:
            about = {"name": self.plan.study, "settings": self.plan.settings}
            with checksummed(self.folder, "study.json"):
                write_json(self.folder / "study.json", plain(about | self._facts()))
            self._changed, self._recorded = False, time.monotonic()

    def _facts(self) -> dict[str, Any]:
        """Return how the cells were computed, and seed, data and versions."""
        settings = self.plan.settings
        # Several values if the study continued after a change, such as of the commit.
        how = {name: "; ".join(filter(None, self._computed.get(name, ()))) or None for name in _HOW}
        return {
            **how,
            "versions": self._versions,
            "seed": settings.get("seed"),
            "data": settings.get("data"),
            "seconds": round(self._seconds, 1),
            "files": self._files,
        }

    def _file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.parquet"


def _read_rows(path: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """Read the rows of these cells; raise if the file has rows of other cells."""
    again = "restore it, or remove it and run the same command to compute it again"
    rows = read_rows(path, again)
    names = list(dict.fromkeys(map(str, rows["cell"]))) if "cell" in rows else []
    if names != [cell.name for cell in cells]:
        raise InputError(f"{path}: contains rows of other cells; {again}")
    return rows


@cache
def _commit() -> str | None:
    """Return the commit of the library's source, marked if files are changed; None outside a checkout."""
    file = Path(apportion.__file__)
    git = ["git", "--no-optional-locks", "-C", str(file.parent)]
    # A library installed inside another repository is not tracked by it.
    tracked = [*git, "ls-files", "--error-unmatch", file.name]
    describe = [*git, "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty= with changes"]
    try:
        for command in (tracked, describe):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
