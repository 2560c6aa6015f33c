"""A study of a few cells that computes at once, notes which cells were computed, and fails on request;
and how any study is performed in a folder.
"""

import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.certify.statistics import mean_over
from apportion.errors import InputError
from apportion.studies.engine import Cell, CellStore, Plan, perform_plans
from apportion.studies.executors import Serial
from apportion.studies.study import FigureResult, Verdict

FILES = ("table.csv", "verdict.json", "figure.png", "rows.parquet")


def perform(plan, folder, executor=None, **options):
    """A study in a folder, by this process unless another executor is given."""
    store = CellStore(plan, folder, "apportion study toy")
    [done] = perform_plans([store], executor or Serial(), **options)
    return done


def same_files(one: Path, other: Path) -> bool:
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in FILES)


def computed(log):
    """The cells that were computed or begun, in that order."""
    return Path(log).read_text().split() if Path(log).exists() else []


def compute(cells, progress, *, seed, log, trouble):
    for done, cell in enumerate(cells):
        progress(f"cell {cell.name}", done / len(cells))
        if log is not None:
            what, times = trouble.get(cell.name, ("", 0))
            begun = computed(log).count(cell.name)
            with open(log, "a") as file:
                file.write(f"{cell.name}\n")
            if begun < times:
                _fail(what, log)
        values = np.random.default_rng([seed, cell["number"]]).normal(size=4)
        yield cell, pd.DataFrame({"number": cell["number"], "value": values})


def _fail(what, log):
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "full":
        raise MemoryError("the GPU is full")
    if what == "refuse":
        raise InputError("the data is wrong")
    if what == "wait":
        while not Path(log).with_name("go").exists():
            time.sleep(0.05)


def conclude(rows, settings, *, figures):
    verdict = Verdict.of("the mean is above zero", mean_over(rows.value.to_numpy()))
    table = rows.groupby("number", as_index=False).value.mean()
    return [FigureResult(name, "Means", table, [verdict], Figure, ["A note."]) for name in figures]


def toy(log=None, *, scale="quick", seed=0, name="toy", figures=(), cells=6, trouble=None):
    """A plan of two programs, a and b, whose cells alternate.

    `log` is a file that notes the cells computed; `trouble` says what happens to a cell the first so many
    times: {"cell-0": ("die", 1)}.
    """
    return Plan(
        name,
        tuple(Cell(f"cell-{n}", {"number": n}, program="ab"[n % 2]) for n in range(cells)),
        partial(compute, seed=seed, log=log, trouble=trouble or {}),
        partial(conclude, figures=figures or (name,)),
        {"scale": scale, "seed": seed},
    )
