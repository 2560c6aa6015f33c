"""Does a policy grow more than equal shares on fields that it never saw? A cell is a seed."""

from dataclasses import replace
from functools import partial

from apportion.certify.statistics import compare
from apportion.domains.training import compare_with_equal, train_problem
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import forest
from apportion.studies.study import FigureResult, Verdict
from irrigation.domain import IrrigationSettings
from irrigation.fields import Fields


def irrigation(*, scale="quick", seed=0):
    settings = IrrigationSettings(steps={"quick": 300, "paper": 3000}[scale])
    cells = tuple(Cell.alone(f"seed-{n}", {"seed": n}) for n in range(seed, seed + 4))
    about = {"steps": settings.steps}
    return Plan("irrigation", cells, partial(_compute, settings), _conclude, about)


def _compute(settings, cells, progress):
    for done, cell in enumerate(cells):
        progress(cell.name, done / len(cells))
        seed = cell["seed"]
        seen, unseen = (Fields.draw(seed=s) for s in (seed, 1000 + seed))
        policy = train_problem(seen, replace(settings, seed=seed))
        found = compare_with_equal(unseen, policy, settings, seed=seed)
        yield cell, found.to_frame().assign(seed=seed)


def _conclude(rows, settings):
    table = rows.groupby("seed", as_index=False)[["policy", "equal shares"]].mean()
    gain = compare(table["policy"].to_numpy(), table["equal shares"].to_numpy())
    verdict = Verdict.of("the policy grows more on fields never seen", gain, paper=False)
    draw = partial(forest, {"fields never seen": {"policy": gain}}, "growth over equal shares")
    return [FigureResult("irrigation", "Water for fields never seen", table, [verdict], draw)]
