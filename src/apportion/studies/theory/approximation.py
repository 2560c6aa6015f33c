"""Theorem 1 where values are only approximated: few features, and samples of every kind.

Data: random families of 8 tasks (6 states, 3 actions, gamma .7) at three distances; the first d of six
cosines over the states as features. LSPI learns on the average MDP from one path with the task drawn
anew at every step (the theorem's), from a path of each task, from independent draws, and without noise;
e is measured, eps is exact. Claims: no family breaks either theorem; few features leave an error that no
sample removes, the corollary's c. A cell is a kind of sample with a d; a row is a family.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apportion.statistics import Estimate, compare, mean_over
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import error_bars, panels
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes
from apportion.studies.theory.families import (
    errors_of,
    never_broken,
    one_by_one,
    transfer_constants,
    uniform,
)
from apportion.theory.estimation import LearningConstants, LearningError, learning_error
from apportion.theory.mdp import MDP, random_family
from apportion.theory.sampled import (
    independent_draws,
    limit,
    lspi_from_moves,
    one_path,
    separate_paths,
)

STATES, ACTIONS, TASKS, GAMMA, ITERATIONS, SAMPLES = 6, 3, 8, 0.7, 20, 125
SPREADS = (0.0, 0.1, 0.4)
DIMENSIONS = (2, 3, 4, 6)
SAMPLINGS = {
    "one path": one_path,
    "a path of each task": separate_paths,
    "independent draws": independent_draws,
    "no noise": limit,
}
draw_family = partial(random_family, states=STATES, actions=ACTIONS, tasks=TASKS, gamma=GAMMA)
"""Random tasks of the study's size, at a given distance."""


def cosines(dimension: int) -> Float[np.ndarray, "states dimension"]:
    """The first cosines over the states, a constant before all; orthogonal and of length 1 under mu."""
    place = (np.arange(STATES) + 0.5) / STATES
    waves = np.sqrt(2.0) * np.cos(np.pi * np.outer(place, np.arange(dimension)))
    waves[:, 0] = 1.0
    return waves


def measure(sampling: str, dimension: int, spread: float, runs: int, seed: int) -> pd.DataFrame:
    """LSPI on `runs` families: the loss, the error, and the share of each bound that is reached."""
    family = draw_family(spread=spread, runs=runs, seed=seed)
    features, average = cosines(dimension), family.average()
    sizes, rng = {"samples": SAMPLES, "iterations": ITERATIONS}, np.random.default_rng(seed)
    learned = lspi_from_moves(family, features, SAMPLINGS[sampling], **sizes, rng=rng)
    error, measured = errors_of(family, learned)
    constants = transfer_constants(family)
    given = LearningError(0.0, error)
    plain = constants.theorem_1(given, ITERATIONS).total
    prime = constants.theorem_1_prime(given, ITERATIONS).total
    return pd.DataFrame(
        {
            "sampling": sampling,
            "dimension": dimension,
            "spread": spread,
            "run": np.arange(runs),
            "loss": measured.mean(-1),
            "e": error[:, 0],
            "theorem_1": (measured / plain).max(-1),
            "theorem_1_prime": (measured / prime).max(-1),
            "informative": (prime < 2 * family.value_bound).mean(-1),
            "e_bound": _error_bound(average, features) if sampling == "no noise" else np.nan,
        }
    )


def _error_bound(average: MDP, features: np.ndarray) -> Float[np.ndarray, " runs"]:
    """The approximation term of the bound on e, family by family: what is left of it without noise."""
    mdps = (average[run] for run in range(len(average)))
    found = (LearningConstants.of(mdp, features, uniform(mdp)) for mdp in mdps)
    return np.array([learning_error(one, 1e6, ITERATIONS, 0.1).approximation for one in found])


def plan(*, scale: Scale = "quick", seed: int = 0, families: int | None = None) -> Plan:
    """Both theorems with few features: 10 families at each distance at quick scale, 100 at the paper's.

    Parameters
    ----------
    families
        Random families at every distance, in place of the scale's number.
    """
    runs = families if families is not None else {"quick": 10, "paper": 100}[scale]
    cells = (
        Cell.alone(
            f"{sampling.replace(' ', '-')}-{dimension}",
            {"sampling": sampling, "dimension": dimension},
        )
        for sampling, dimension in product(SAMPLINGS, DIMENSIONS)
    )
    compute = one_by_one("{sampling}, {dimension} features", measure_all, runs=runs, seed=seed)
    settings = {"families": runs, "samples": SAMPLES, "scale": scale, "seed": seed}
    return Plan("approximation", tuple(cells), compute, conclude, settings)


def measure_all(sampling: str, dimension: int, *, runs: int, seed: int) -> pd.DataFrame:
    """The families of every distance; all kinds of samples and all d see the same families."""
    frames = [
        measure(sampling, dimension, spread, runs, seed * len(SPREADS) + number)
        for number, spread in enumerate(SPREADS)
    ]
    return pd.concat(frames, ignore_index=True)


@concludes("approximation", "Theorem 1 with few features, on paths and on independent draws")
def conclude(rows: pd.DataFrame, settings: dict[str, Any]) -> Conclusion:
    """Table, verdicts and figure from every family."""
    verdicts = (*_theorem_verdicts(rows), *_error_verdicts(rows))
    return _table(rows), verdicts, lambda: _plot(rows), _notes(rows)


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    by: Any = rows.groupby(["sampling", "dimension", "spread"], sort=False)
    means = by[["loss", "e", "informative", "e_bound"]].mean()
    worst = by[["theorem_1", "theorem_1_prime"]].max().add_suffix("_worst")
    return pd.concat([means, worst, by.size().rename("families")], axis=1).reset_index().round(6)


def _theorem_verdicts(rows: Any) -> list[Verdict]:
    """In how many families a bound is broken, by any kind of sample."""
    few = rows[rows.dimension < STATES]
    bound = few[few.sampling == "no noise"].assign(error=lambda rows: rows.e / rows.e_bound)
    claims = (
        (few, "theorem_1", "few features: suboptimality exceeds Theorem 1 in no run (share)", True),
        (few, "theorem_1_prime", "few features: it exceeds Theorem 1' in no run (share)", False),
        (bound, "error", "without noise e is within its approximation term in all runs (share not)",
         True),
    )  # fmt: skip
    return [never_broken(*claim) for claim in claims]


def _errors(rows: Any, sampling: str, dimension: int, spread: float) -> np.ndarray:
    chosen = rows[
        (rows.sampling == sampling) & (rows.dimension == dimension) & (rows.spread == spread)
    ]
    return chosen.sort_values("run").e.to_numpy()


def _error_verdicts(rows: Any) -> Iterator[Verdict]:
    """What few features and other kinds of samples add to e."""
    left = [_errors(rows, "no noise", d, s) for d in DIMENSIONS[:-1] for s in SPREADS]
    far = SPREADS[-1]
    apart, same = (
        compare(
            _errors(rows, "a path of each task", STATES, spread),
            _errors(rows, "one path", STATES, spread),
        )
        for spread in (far, 0.0)
    )
    informative = rows[rows.dimension < STATES].groupby(["spread", "run"]).informative.mean()
    claim = "few features leave an error e that no sample removes, the c (least mean, no noise)"
    yield Verdict.of_all(claim, [mean_over(values) for values in left])
    claim = (
        "distance .4, all features: a path of each task errs more than one path of the average (e)"
    )
    yield Verdict.of(claim, apart, paper=False)
    claim = "equal tasks, all features: the two differ by less than a tenth of e (difference / e)"
    differ = _relative(same, _errors(rows, "one path", STATES, 0.0).mean())
    yield Verdict.of(claim, differ, above=-0.1, below=0.1, paper=False)
    claim = "few features: Theorem 1' says more than the trivial bound in most cases (share - 1/2)"
    yield Verdict.of(claim, mean_over(informative.to_numpy() - 0.5), paper=False)


def _relative(estimate: Estimate, scale: float) -> Estimate:
    """An estimate in units of a number."""
    ends = {name: getattr(estimate, name) / scale for name in ("value", "low", "high", "error")}
    return replace(estimate, **ends)


def _notes(rows: Any) -> tuple[str, ...]:
    few = rows[rows.dimension < STATES]
    calm = few[few.sampling == "no noise"]
    losses = rows[rows.sampling == "one path"].groupby(["dimension", "spread"]).loss.mean()
    return (
        f"With few features suboptimality reaches {few.theorem_1_prime.max():.3f} of Theorem 1' at most, "
        f"and {few.theorem_1.max():.3f} of Theorem 1, over {few.groupby(['spread', 'run']).ngroups} "
        f"families, {len(DIMENSIONS) - 1} numbers of features and {len(SAMPLINGS)} kinds of samples.",
        f"Theorem 1' is below the trivial bound in {few.informative.mean():.0%} of the cases.",
        f"Without noise e is {(calm.e / calm.e_bound).median():.3f} of its approximation term (median).",
        f"Two features in place of six cost {losses[2, 0.0] - losses[6, 0.0]:.4f} of suboptimality with "
        f"equal tasks, where e rises from {_errors(rows, 'one path', 6, 0.0).mean():.3f} to "
        f"{_errors(rows, 'one path', 2, 0.0).mean():.3f}.",
        f"Distance .4, all features: e is {_errors(rows, 'a path of each task', 6, 0.4).mean():.4f} on a "
        f"path of each task and {_errors(rows, 'one path', 6, 0.4).mean():.4f} on one path.",
    )


_COLOURS = ("#2b7bba", "#e6550d", "#31a354", "0.35")


def _plot(rows: pd.DataFrame) -> Figure:
    figure, (left, right) = panels(13, 4.6)
    _plot_errors(left, rows)
    _plot_shares(right, rows)
    for axis in (left, right):
        axis.set_xticks(range(len(DIMENSIONS)), [str(d) for d in DIMENSIONS])
        axis.set_xlabel("features d, of 6 states")
    return figure


def _plot_errors(axis: Axes, rows: pd.DataFrame) -> None:
    for (name, colour), shift in zip(
        zip(SAMPLINGS, _COLOURS, strict=True), (-0.12, -0.04, 0.04, 0.12), strict=True
    ):
        for spread, style in ((0.0, "o-"), (0.4, "D--")):
            ends = [mean_over(_errors(rows, name, d, spread)) for d in DIMENSIONS]
            label = name if spread == 0.0 else None
            places = np.arange(len(DIMENSIONS)) + shift
            error_bars(axis, places, ends, fmt=style, color=colour, markersize=4, label=label)
    axis.set(ylabel="error e (mean over families)", ylim=(0, None))
    axis.set_title("few features leave an error (full: equal tasks, dashed: distance .4)")
    axis.legend(frameon=False, fontsize=9)


def _plot_shares(axis: Axes, rows: pd.DataFrame) -> None:
    rng = np.random.default_rng(0)
    for column, label, colour in (
        ("theorem_1", "Theorem 1", "0.55"),
        ("theorem_1_prime", "Theorem 1'", "#2b7bba"),
    ):
        place = rows.dimension.map(DIMENSIONS.index) + rng.uniform(-0.25, 0.25, len(rows))
        shown = np.maximum(rows[column], 1e-6)
        axis.scatter(place, shown, s=5, alpha=0.3, color=colour, linewidth=0, label=label)
    axis.axhline(1, color="black", linewidth=1)
    axis.text(len(DIMENSIONS) - 1.4, 1.2, "the bound", fontsize=9)
    axis.set(yscale="log", ylabel="suboptimality / bound (1e-6: none)")
    axis.set_title("the worst task of every family lies below")
    for handle in axis.legend(frameon=False, markerscale=3, loc=(0.02, 0.15)).legend_handles:
        if handle is not None:
            handle.set_alpha(1)
