"""A study as independent cells, each computed once and saved as soon as it is finished, then concluded.

A `Plan` lists its cells (a method, a year, an experiment or a seed), computes those it is handed and
turns the rows of all of them into a `Study`. An executor computes what is missing; this process alone
saves. A study that is stopped, or dies, goes on from its saved cells when it is started again with the
same settings. Its folder holds

cells.json           which plan the cells are of
cells/NAME.parquet   the rows of a finished cell, while others are missing
rows.parquet         the rows of all cells
SHA256SUMS           the checksums of these files
study.json           how it was computed; once it is concluded, what `Study.save` writes
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
"""Increases when the engine changes the rows of a cell; results computed before are then stale."""

OnProgress = Callable[[str, float], None]
"""Called with what was just done and the fraction of all work done so far; it may raise to stop."""


@dataclass(frozen=True)
class Cell:
    """One independent part of a study.

    Examples
    --------
    >>> Cell("mtl-2019-0", {"method": "mtl", "year": 2019, "experiment": 0}, program="mtl")["year"]
    2019
    """

    name: str
    """Unique in its study, and fit to be a file's name."""
    values: dict[str, Any] = field(compare=False)
    """What the cell is, in plain values."""
    program: str = ""
    """Cells of one program are computed together."""

    @classmethod
    def alone(cls, name: str, values: dict[str, Any]) -> "Cell":
        """A cell with a program of its own, where nothing is gained by computing several together."""
        return cls(name, values, program=name)

    @classmethod
    def each(cls, label: str, name: str, values: Sequence[float]) -> "tuple[Cell, ...]":
        """A cell with a program of its own for every value.

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
    """What a study computes, and what it concludes from it.

    Functions are module-level ones or `functools.partial` of them, so that a plan can be sent to
    another process or machine.
    """

    study: str
    cells: tuple[Cell, ...]
    compute: Callable[[Sequence[Cell], OnProgress], Rows]
    """The rows of cells of one program, each as soon as it is finished. A cell's rows depend on the cell
    alone, not on the others in its batch."""
    conclude: Callable[[pd.DataFrame, dict[str, Any]], Sequence[FigureResult]]
    """The figures from the rows of all cells, in the plan's order, and the settings."""
    settings: dict[str, Any]
    """Everything needed to run it again, in plain values; cells of other settings are refused. Under
    `data`, where there is any, what the data is, with its fingerprint."""
    on_processor: bool = False
    """Its programs are too small for a GPU, and are computed beside it."""
    at_once: int | None = None
    """So many processes may compute its programs, for no more of them have room on one large GPU."""
    keep: Callable[[pd.DataFrame], pd.DataFrame] = _everything
    """What is kept of the rows of all cells once all are there."""

    @property
    def digest(self) -> str:
        """What two plans must agree in for one to go on from the other's cells."""
        names = [cell.name for cell in self.cells]
        whole = {"study": self.study, "cells": names, "settings": self.settings}
        content = json.dumps(whole, sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def source(self) -> str:
        """Digest of the study's own code.

        It covers the modules of `compute` and `conclude` and the modules beside them that they import.
        Comments, docstrings, imports and the package that holds the modules do not change it.
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


def _programs_of(plan: Plan, cells: Sequence[Cell]) -> list[Program]:
    """These cells of a plan by their programs, in the order of each program's first cell."""
    together: dict[str, list[Cell]] = {}
    for cell in cells:
        together.setdefault(cell.program, []).append(cell)
    return [Program(plan, tuple(members)) for members in together.values()]


@dataclass(frozen=True)
class CellResult:
    """A finished cell: its rows, and how long it took on which device."""

    study: str
    cell: Cell
    content: bytes
    """Its rows as Parquet, encoded by whoever computed them: the first process has only to write them."""
    seconds: float
    device: str


OnEvent = Callable[[str, float], None]
"""Called now and then with what is being done, and how many cells' worth of unfinished work is done
beyond what has been yielded; it may raise to stop."""


class Executor(ABC):
    """Who computes programs."""

    @abstractmethod
    def execute(self, programs: Sequence[Program], on_event: OnEvent) -> Generator[CellResult]:
        """Compute programs, the first ones first; each cell as it is finished, in any order."""


@dataclass(frozen=True)
class StudyResult:
    """A study that is concluded, and the seconds that its cells took, added up."""

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
    """Compute what is missing of these studies side by side, and conclude each once its cells are there.

    Parameters
    ----------
    stores
        The studies in their folders; the programs of the first come first.
    executor
        Who computes.
    draw
        Compute nothing: conclude from the cells that are there.
    progress
        Called with what is being done and the fraction done.

    Raises
    ------
    InputError
        A folder holds cells of other settings, another process writes in it, or with `draw` cells are
        missing.
    Stopped
        The user asked to stop; finished cells are saved.
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
                    f"stopped: {there} of {total} cells of {studies} are saved in {folder}; the same "
                    "command goes on from there"
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
"""What `study.json` says of how the cells were computed."""


class CellStore:
    """A study in its folder: the cells that are there, where the next one goes, and how long they took.

    Parameters
    ----------
    plan, folder
        The study, and where it is kept.
    command
        What a user types to have it computed alone.
    run
        What was typed to have it computed, alone or with others; `command` unless given.
    """

    def __init__(self, plan: Plan, folder: Path, command: str = "", run: str = "") -> None:
        self.plan, self.folder = plan, Path(folder)
        # Now, and not when a cell is done: this is the code that was read, whatever is written since.
        made = {"command": command, "run": run or command}
        self._now = made | {"commit": _commit(), "source": plan.source}
        self._now["packages"] = package_digests()
        self._files = dict[str, str]()
        self._seconds, self._computed = 0.0, dict[str, dict[str, None]]()
        self._changed, self._recorded = False, 0.0

    def check(self) -> None:
        """Refuse a folder that holds cells of other settings, or says nothing sensible of its cells."""
        if self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder}: is a file; choose a folder")
        mark = self.folder / "cells.json"
        content = read_json(mark) if mark.exists() else {"digest": self.plan.digest}
        if not isinstance(content, dict) or not isinstance(content.get("digest"), str):
            raise InputError(f"{mark}: is damaged; put it back from a copy")
        if content["digest"] != self.plan.digest:
            raise InputError(
                f"{self.folder}: holds cells of a study with other settings or data; choose another "
                "folder, or give the settings it was begun with"
            )
        path = self.folder / "study.json"
        content = read_json(path) if path.exists() else {}
        told = content if isinstance(content, dict) else {"seconds": None}
        seconds = told.get("seconds", 0.0)
        said = {name: told.get(name) or "" for name in _HOW}
        if not isinstance(seconds, int | float) or not all(
            isinstance(one, str) for one in said.values()
        ):
            raise InputError(
                f"{path}: does not say how the study was computed; put it back from a copy"
            )
        files = told.get("files")
        self._files = files if isinstance(files, dict) else {}
        self._seconds = float(seconds)
        self._computed = {
            name: dict.fromkeys(filter(None, one.split("; "))) for name, one in said.items()
        }

    def open(self) -> None:
        """Make the folder this plan's."""
        mark = {"study": self.plan.study, "digest": self.plan.digest}
        write_json(self.folder / "cells.json", mark)

    def names(self) -> set[str] | None:
        """What the folder holds; None where there is none."""
        return {one.name for one in self.folder.iterdir()} if self.folder.exists() else None

    def leave_as(self, before: set[str] | None) -> None:
        """Remove what a study that was refused has begun, where no cell of it is there yet."""
        new = (self.names() or set()) - (before or set())
        if new <= {"cells.json", LOCK}:
            for name in new:
                (self.folder / name).unlink()
            if before is None and self.folder.exists():
                self.folder.rmdir()

    def missing(self) -> list[Cell]:
        """Cells whose rows are not there yet, in their order."""
        if (self.folder / "rows.parquet").exists():
            return []
        return [cell for cell in self.plan.cells if not self._file(cell).exists()]

    def require_all(self) -> None:
        """Refuse a folder in which cells are missing."""
        if missing := self.missing():
            raise InputError(
                f"{self.folder}: {len(missing)} of {len(self.plan.cells)} cells are missing "
                f"(first: {missing[0].name}); compute them with the same command without --draw"
            )

    def save(self, done: CellResult) -> None:
        """Keep a finished cell's rows, atomically, and how it was computed in how many seconds."""
        write_checked(self.folder, f"cells/{done.cell.name}.parquet", done.content)
        self._seconds += done.seconds
        for name, one in (self._now | {"device": done.device}).items():
            self._computed.setdefault(name, {})[one or ""] = None
        self._files, self._changed = file_digests(), True
        # Not at every cell: a program may end with a hundred at once.
        if time.monotonic() - self._recorded > 1.0:
            self.record()

    def rows(self) -> pd.DataFrame:
        """The rows of all cells, in the plan's order; once all are there they are one file."""
        self.require_all()
        whole = self.folder / "rows.parquet"
        if not whole.exists():
            frames = [_read_rows(self._file(cell), [cell]) for cell in self.plan.cells]
            try:
                content = self.plan.keep(pd.concat(frames, ignore_index=True))
                write_checked(self.folder, whole.name, pack_rows(content))
            except (ValueError, TypeError) as error:
                raise InputError(
                    f"{self.folder / 'cells'}: the cells do not fit together ({first_line(error)}); "
                    "remove the one that was changed, and the same command computes it again"
                ) from None
        shutil.rmtree(self.folder / "cells", ignore_errors=True)
        return _read_rows(whole, self.plan.cells)

    def conclude(self) -> StudyResult:
        """Tables, figures and verdicts from the rows of all cells, written to the folder.

        Raises
        ------
        InputError
            Cells are missing, or a file in the folder is not what the study wrote.
        """
        rows, plan = self.rows(), self.plan
        try:
            study = Study(plan.study, tuple(plan.conclude(rows, plan.settings)), plan.settings)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise InputError(
                f"{self.folder / 'rows.parquet'}: nothing can be concluded from it "
                f"({type(error).__name__}: {error}); put back what the study wrote, and if this is what "
                "it wrote, please report a bug in apportion"
            ) from error
        study.save(self.folder, self._facts())
        self._changed = False
        return StudyResult(plan.study, self.folder, study, round(self._seconds, 1))

    def record(self) -> None:
        """Write to `study.json` how the cells that are there were computed, if that is not known yet."""
        if self._changed:
            about = {"name": self.plan.study, "settings": self.plan.settings}
            with checksummed(self.folder, "study.json"):
                write_json(self.folder / "study.json", plain(about | self._facts()))
            self._changed, self._recorded = False, time.monotonic()

    def _facts(self) -> dict[str, Any]:
        """How the cells were computed, which drawing them anew does not change; seed, data, versions."""
        settings = self.plan.settings
        # Several where it went on after a change: no result of one commit, and it says so.
        how = {name: "; ".join(filter(None, self._computed.get(name, ()))) or None for name in _HOW}
        return {
            **how,
            "versions": versions() | plugin_versions(),
            "seed": settings.get("seed"),
            "data": settings.get("data"),
            "seconds": round(self._seconds, 1),
            "files": self._files,
        }

    def _file(self, cell: Cell) -> Path:
        return self.folder / "cells" / f"{cell.name}.parquet"


def _read_rows(path: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """The rows of these cells, in their order; a file of anything else is refused."""
    again = "put it back, or remove it, and the same command computes it again"
    rows = read_rows(path, again)
    names = list(dict.fromkeys(map(str, rows["cell"]))) if "cell" in rows else []
    if names != [cell.name for cell in cells]:
        raise InputError(
            f"{path}: is not what the study wrote (it holds rows of other cells); {again}"
        )
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
