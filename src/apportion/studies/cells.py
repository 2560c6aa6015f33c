"""A study as independent cells, each computed once: a method, a year, an experiment or a seed.

A `Plan` lists its cells, computes those it is handed and turns the rows of all of them into a `Study`.
Cells that share a program are computed as one batch, a `vmap` over cells; several devices share a
batch.
"""

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import pandas as pd

from apportion.errors import InputError

if TYPE_CHECKING:
    from apportion.studies.study import Study

Progress = Callable[[str, float], None]
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
Save = Callable[[Cell, pd.DataFrame], None]


@dataclass(frozen=True)
class Plan:
    """What a study computes, and what it concludes from it.

    Functions are module-level ones or `functools.partial` of them, so that a plan can be sent to
    another machine.
    """

    study: str
    cells: tuple[Cell, ...]
    compute: Callable[[Sequence[Cell], Progress], Rows]
    """The rows of cells of one program, each as soon as it is finished. A cell's rows depend on the cell
    alone, not on the others in its batch."""
    conclude: "Callable[[pd.DataFrame, dict[str, Any]], Study]"
    """Figure and verdicts from the rows of all cells, in the plan's order, and the settings."""
    settings: dict[str, Any]
    """Everything needed to run it again, in plain values; cells of other settings are refused. Under
    `data`, where there is any, what the data is, with its fingerprint."""
    family: str = ""
    """Studies of one family and equal settings share their cells."""
    on_processor: bool = False
    """Its programs are too small for a GPU, and are computed beside it."""

    @property
    def digest(self) -> str:
        """What the cells of two plans must agree in to be exchanged."""
        names = [cell.name for cell in self.cells]
        whole = {"family": self.family or self.study, "cells": names, "settings": self.settings}
        content = json.dumps(whole, sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def devices(self) -> list[Any]:
        """What of this machine computes its cells."""
        return jax.local_devices(backend="cpu" if self.on_processor else None)

    def run(self, progress: Progress = lambda what, fraction: None) -> "Study":
        """Compute all cells on this machine and conclude, without a folder."""
        found: dict[str, pd.DataFrame] = {}
        compute_here(
            self,
            self.cells,
            lambda cell, rows: found.update({cell.name: rows.assign(cell=cell.name)}),
            progress,
        )
        rows = pd.concat([found[cell.name] for cell in self.cells], ignore_index=True)
        return self.conclude(rows, self.settings)


def share_of(cells: Sequence[Cell], share: str) -> list[Cell]:
    """The I-th of N shares of the cells, as `--cells I/N` names it, programs kept together.

    Examples
    --------
    >>> [cell.name for cell in share_of([Cell(n, {}) for n in "abcde"], "2/2")]
    ['c', 'd', 'e']
    """
    place, _, parts = share.partition("/")
    if not (place.isdecimal() and parts.isdecimal() and 1 <= int(place) <= int(parts)):
        raise InputError(f"cells {share!r}: write I/N with 1 <= I <= N, such as 1/4")
    return _parts(cells, int(parts))[int(place) - 1]


def batches(cells: Sequence[Cell], devices: int = 1) -> list[list[Cell]]:
    """Cells of one program together, split evenly among devices.

    Examples
    --------
    >>> cells = [Cell(name, {}, program=name[0]) for name in ("a1", "a2", "a3", "b1")]
    >>> [[cell.name for cell in batch] for batch in batches(cells, 2)]
    [['a1'], ['a2', 'a3'], ['b1']]
    """
    programs: dict[str, list[Cell]] = {}
    for cell in cells:
        programs.setdefault(cell.program, []).append(cell)
    return [
        part
        for members in programs.values()
        for part in _parts(members, min(devices, len(members)))
    ]


def _parts(cells: Sequence[Cell], count: int) -> list[list[Cell]]:
    """Cells in so many parts of nearly equal size, in order."""
    bounds = [len(cells) * part // count for part in range(count + 1)]
    return [list(cells[a:b]) for a, b in pairwise(bounds)]


class Place(ABC):
    """Where cells are computed."""

    @abstractmethod
    def device(self, plan: Plan) -> str:
        """What computes a plan's cells there, in words."""

    @abstractmethod
    def compute(self, plan: Plan, cells: Sequence[Cell], save: Save, progress: Progress) -> None:
        """Compute cells, and save the rows of each as soon as they are there."""


class ThisMachine(Place):
    """The devices of this machine."""

    def device(self, plan: Plan) -> str:
        """Kind and number of the devices, such as `2 x gpu: NVIDIA H200`."""
        return describe(plan.devices())

    def compute(self, plan: Plan, cells: Sequence[Cell], save: Save, progress: Progress) -> None:
        """Compute cells, each device a share of every program's."""
        compute_here(plan, cells, save, progress)


def describe(devices: Sequence[Any]) -> str:
    """Devices of one kind, in words."""
    name = f"{devices[0].platform}: {devices[0].device_kind}"
    return name if len(devices) == 1 else f"{len(devices)} x {name}"


def compute_here(plan: Plan, cells: Sequence[Cell], save: Save, progress: Progress) -> None:
    """Compute cells on this machine's devices, each device a share of every program's cells."""
    devices = plan.devices()
    waiting = batches(cells, len(devices))
    done = np.zeros(len(waiting))
    numbers = iter(range(len(waiting)))
    turn = threading.Lock()
    stopped = threading.Event()

    def compute(number: int) -> None:
        def report(what: str, fraction: float) -> None:
            with turn:
                done[number] = fraction * len(waiting[number])
                if stopped.is_set():
                    raise _OtherDeviceStopped
                progress(what, done.sum() / len(cells))

        for cell, rows in plan.compute(waiting[number], report):
            with turn:
                save(cell, rows)
        done[number] = len(waiting[number])

    def work(device: Any) -> None:
        with jax.default_device(device):
            while not stopped.is_set():
                with turn:
                    number = next(numbers, None)
                if number is None:
                    return
                try:
                    compute(number)
                except BaseException:
                    stopped.set()
                    raise

    if len(devices) == 1:
        return work(devices[0])
    with ThreadPoolExecutor(len(devices)) as pool:
        workers = [pool.submit(work, device) for device in devices]
    errors = [error for worker in workers if (error := worker.exception()) is not None]
    # The one that stopped the others says why.
    for error in sorted(errors, key=lambda error: isinstance(error, _OtherDeviceStopped)):
        raise error


class _OtherDeviceStopped(Exception):
    """Another device's thread has raised; this one ends at its next report."""
