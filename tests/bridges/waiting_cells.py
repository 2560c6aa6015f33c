"""A plan for the test of a dying worker: its cells tell where they began, and wait to be let go."""

import time
from functools import partial
from pathlib import Path

import pandas as pd

from apportion.studies.engine import Cell, Plan


def compute(cells, progress, *, folder: Path):
    import ray

    for cell in cells:
        if ray.is_initialized():
            node = ray.get_runtime_context().get_node_id()
            (folder / f"{cell.name}.{node}").touch()
            while not (folder / "go").exists():
                time.sleep(0.05)
        yield cell, pd.DataFrame({"square": [cell["number"] ** 2]})


def conclude(rows, settings):
    return rows


def plan(folder: Path, count: int) -> Plan:
    cells = tuple(Cell(f"cell-{n}", {"number": n}, program=str(n)) for n in range(count))
    return Plan("squares", cells, partial(compute, folder=folder), conclude, {"count": count})
