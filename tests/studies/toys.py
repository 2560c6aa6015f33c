"""A study of a few cells that computes at once, and says which cells it computed."""

from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.statistics import mean_over
from apportion.studies.engine import Cell, Plan
from apportion.studies.study import FigureResult, Verdict


class Computed(list):
    """The names of the cells that were computed."""


def compute(cells, progress, *, seed, computed):
    for done, cell in enumerate(cells):
        progress(f"cell {cell.name}", done / len(cells))
        computed.append(cell.name)
        values = np.random.default_rng([seed, cell["number"]]).normal(size=4)
        yield cell, pd.DataFrame({"number": cell["number"], "value": values})


def conclude(rows, settings, *, name):
    verdict = Verdict.of("the mean is above zero", mean_over(rows.value.to_numpy()))
    table = rows.groupby("number", as_index=False).value.mean()
    return [FigureResult(name, "Means", table, [verdict], Figure, ["A note."])]


def toy(computed=None, *, scale="quick", seed=0, name="toy", cells=6):
    return Plan(
        name,
        tuple(Cell(f"cell-{n}", {"number": n}, program="ab"[n % 2]) for n in range(cells)),
        partial(compute, seed=seed, computed=Computed() if computed is None else computed),
        partial(conclude, name=name),
        {"scale": scale, "seed": seed},
    )
