"""Corollary 2: what all orderings of m entities, and all subsets of a universe of M, are worth.

Data: the synthetic problem with equal entities, m = 4 to 40. Orderings: how many real examples the
20 real ones in all m! orderings are worth, which is the tied model on the 20. Subsets: a universe of
M = 4m entities with a record of 50 periods each, and tasks that are random subsets of it; the tied model
learns from them, and from 1 to 64 independent tasks of entities of their own. The effective number of
overlapping tasks is the number of independent ones with the same regret: Hoeffding's U-statistics
guarantee floor(M/m) to all subsets together, the corollary counts C(M, m).
A cell is an m; a row is the regret of one run, arm and number of tasks or examples.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apportion.statistics import Estimate, mean_over, of_means
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import ends_of, panels
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes
from apportion.studies.theory.families import one_by_one
from apportion.studies.theory.fig1 import equivalent_samples
from apportion.studies.theory.subsets import (
    ENTITIES,
    INDEPENDENT,
    OVERLAPPING,
    RATIO,
    REAL,
    ordering_regrets,
    sizes_of,
    subset_regrets,
)
from apportion.theory.theorem import corollary_2


def plan(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """Orderings and subsets: m = 4 and 10 and 6 universes at quick scale, to 40 and 64 at the paper's."""
    count = {"quick": 6, "paper": 64}[scale]
    known = ENTITIES[:2] if scale == "quick" else ENTITIES
    cells = Cell.each("entities", "entities", known)
    compute = one_by_one("{entities} entities", measure, runs=count, seed=seed)
    settings = {"runs": count, "scale": scale, "seed": seed}
    return Plan("corollary2", cells, compute, conclude, settings)


def measure(entities: int, *, runs: int, seed: int) -> pd.DataFrame:
    """The regret of every run, arm and number."""
    key_data = jax.random.key_data(jax.random.key(seed))
    columns = [
        *(("overlapping", number) for number in OVERLAPPING),
        *(("independent", number) for number in INDEPENDENT),
        ("tied", REAL),
        *(("real", number) for number in sizes_of(entities)),
    ]
    both = [f(entities, runs, key_data) for f in (subset_regrets, ordering_regrets)]
    arms, numbers = zip(*columns, strict=True)
    return pd.DataFrame(
        {
            "entities": entities,
            "arm": np.repeat(arms, runs),
            "number": np.repeat(numbers, runs),
            "run": np.tile(np.arange(runs), len(columns)),
            "regret": np.concatenate(both, 1).T.ravel(),
        }
    )


@concludes(
    "corollary2", "Corollary 2: what all orderings and all subsets of the entities are worth"
)
def conclude(rows: pd.DataFrame, settings: dict[str, Any]) -> Conclusion:
    """Table, verdicts and figure from the regret of every run."""
    verdicts = (*_subset_verdicts(rows), *_ordering_verdicts(rows))
    return _table(rows), verdicts, lambda: _plot(rows), _notes(rows)


def _regrets(rows: Any, m: int, arm: str, number: int) -> np.ndarray:
    chosen = rows[(rows.entities == m) & (rows.arm == arm) & (rows.number == number)]
    return chosen.sort_values("run").regret.to_numpy()


def log_effective(means: np.ndarray, drawn: int) -> np.ndarray:
    """The log of an effective number, from the regret of 1 to 64 independent tasks and of those drawn.

    A mean over T random subsets has the variance of all of them, and 1/T of what a single one has
    beyond it (Blom 1976): the latter is taken off, so that the number is of all subsets.

    >>> regrets = np.array([1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 10 + (1 - 1 / 10) / 256])
    >>> float(np.exp(log_effective(regrets, 256)).round(6))
    10.0
    """
    found = equivalent_samples(means[..., :-1], means[..., -1], INDEPENDENT)
    return np.asarray(np.log((1 - 1 / drawn) / np.maximum(1 / found - 1 / drawn, 1e-9)))


def _beside_independent(rows: Any, m: int) -> np.ndarray:
    """Runs by arms: 1 to 64 independent tasks, and the most overlapping ones."""
    arms = [("independent", number) for number in INDEPENDENT]
    arms += [("overlapping", OVERLAPPING[-1])]
    return np.stack([_regrets(rows, m, *arm) for arm in arms], -1)


def of_all(rows: Any, m: int) -> Estimate:
    """The log of the effective number of all subsets."""
    return of_means(_beside_independent(rows, m), partial(log_effective, drawn=OVERLAPPING[-1]))


def entities_in(rows: Any) -> list[int]:
    """The m that were computed."""
    return sorted(int(m) for m in rows.entities.unique())


def worth(rows: Any, m: int) -> Estimate:
    """The log of how many times their number 20 examples in all orderings are worth."""
    sizes = sizes_of(m)
    curve = [_regrets(rows, m, "real", number) for number in sizes]
    values = np.stack([_regrets(rows, m, "tied", REAL), *curve], -1)

    def ratio(means):
        return np.log(equivalent_samples(means[..., 1:], means[..., 0], sizes) / REAL)

    return of_means(values, ratio)


def _table(rows: Any) -> pd.DataFrame:
    records = []
    for m in entities_in(rows):
        for (arm, number), part in rows[rows.entities == m].groupby(["arm", "number"], sort=False):
            mean = mean_over(part.regret.to_numpy())
            records.append(
                (m, arm, float(number), "regret", mean.value, mean.low, mean.high, mean.n)
            )
        for arm, counted, found in (
            ("all subsets", corollary_2(RATIO * m, m).tasks, of_all(rows, m)),
            ("all orderings", math.factorial(m), worth(rows, m)),
        ):
            ends = np.exp([found.value, found.low, found.high])
            records.append((m, arm, float(counted), "worth", *ends, found.n))
    columns = ["entities", "arm", "number", "measure", "value", "low", "high", "runs"]
    return pd.DataFrame(records, columns=columns)


def _growth(rows: Any) -> Estimate:
    """By how much the log of the gain from all subsets grows with each further entity."""
    known = entities_in(rows)
    values = np.stack([_beside_independent(rows, m) for m in known], 1)
    x = np.asarray(known, float) - np.mean(known)

    def growth(means):
        return (log_effective(means, OVERLAPPING[-1]) * x).sum(-1) / (x**2).sum()

    return of_means(values, growth)


def _within(
    logs: Sequence[Estimate], numbers: Sequence[float], factor: float, claim: str
) -> Verdict:
    """Whether each number is what it should be, to a factor; the worst ratio is shown."""
    ratios = [
        replace(e, **{end: getattr(e, end) - math.log(number) for end in ("value", "low", "high")})
        for e, number in zip(logs, numbers, strict=True)
    ]
    bounds = {"above": -math.log(factor), "below": math.log(factor)}
    return Verdict.of_all(claim, ratios, **bounds, paper=False).scaled(math.exp)


def _subset_verdicts(rows: Any) -> Iterator[Verdict]:
    everyone = [of_all(rows, m) for m in entities_in(rows)]
    claim = (
        "subsets: the gain is exponential in m (growth of its log with each entity, >= log(M/m))"
    )
    yield Verdict.of(claim, _growth(rows), above=math.log(RATIO))
    claim = "all subsets are worth at least floor(M/m) = 4 tasks, as Hoeffding says (least number)"
    yield Verdict.of_all(claim, everyone, above=math.log(RATIO), paper=False).scaled(math.exp)
    claim = "and at most 2 (M/m)^2 = 32 tasks, whatever m (largest number)"
    yield Verdict.of_all(claim, everyone, below=math.log(2 * RATIO**2), paper=False).scaled(
        math.exp
    )


def _ordering_verdicts(rows: Any) -> list[Verdict]:
    claim = (
        "all m! orderings are worth m times as many examples, to a factor of 4 (worst ratio to m)"
    )
    known = entities_in(rows)
    return [_within([worth(rows, m) for m in known], known, 4, claim)]


def _notes(rows: Any) -> tuple[str, ...]:
    lines = []
    for m in entities_in(rows):
        everyone, orders = math.exp(of_all(rows, m).value), math.exp(worth(rows, m).value)
        lines.append(
            f"m = {m}: the {corollary_2(RATIO * m, m).tasks:.3g} subsets of {RATIO * m} entities are "
            f"worth {everyone:.1f} independent tasks; all {math.factorial(m):.3g} orderings are worth "
            f"{orders:.1f} times as many examples."
        )
    return (
        *lines,
        "Hoeffding's floor(M/m) is what entities allow to one mean; a regression's noise is a product of "
        "two such means, for which overlapping subsets can count up to about (M/m)^2.",
    )


def _plot(rows: Any) -> Figure:
    figure, (left, right) = panels(13, 4.6)
    _plot_tasks(left, rows)
    _plot_entities(right, rows)
    return figure


def _plot_tasks(axis: Axes, rows: Any) -> None:
    shades: dict[int, str] = dict(
        zip(ENTITIES, ("#fdae6b", "#6baed6", "#2171b5", "#08306b"), strict=True)
    )
    for m in entities_in(rows):
        for arm, numbers, style in (
            ("independent", INDEPENDENT, "o--"),
            ("overlapping", OVERLAPPING, "D-"),
        ):
            means = [_regrets(rows, m, arm, number).mean() for number in numbers]
            axis.plot(numbers, means, style, color=shades[m], markersize=4, label=f"{arm}, m = {m}")
    axis.set(xscale="log", yscale="log", xlabel="tasks", ylabel="regret on fresh states")
    axis.set_title("overlapping tasks of 4m entities saturate")
    axis.legend(frameon=False, fontsize=8, ncols=2)


def _plot_entities(axis: Axes, rows: Any) -> None:
    known = entities_in(rows)
    counted = [float(corollary_2(RATIO * m, m).tasks) for m in known]
    axis.plot(known, counted, "k--", linewidth=1, label="counted: C(4m, m)")
    _bars(axis, known, [of_all(rows, m) for m in known], "#2b7bba", "all subsets: tasks")
    orders = [worth(rows, m) for m in known]
    _bars(axis, known, orders, "#e6550d", "all orderings: examples, times")
    axis.plot(known, known, ":", color="#e6550d", label="m")
    axis.axhline(RATIO, color="0.5", linestyle=":", label="floor(M/m) = 4")
    axis.axhline(RATIO**2, color="0.5", linestyle="-.", label="(M/m)² = 16")
    axis.set(xscale="log", yscale="log", ylim=(1, 1e6), xlabel="entities m of a task, M = 4m")
    axis.set(ylabel="worth", title="the gain is not exponential in m")
    axis.set_xticks(known, [str(m) for m in known])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8.5)


def _bars(axis: Axes, x, logs: list[Estimate], colour: str, label: str | None) -> None:
    middle, low, high = np.exp(ends_of(logs))
    ends = [middle - low, high - middle]
    axis.errorbar(x, middle, ends, fmt="o-", color=colour, label=label, markersize=4)
