"""Both theorems against measured values: suboptimality of LSPI on every task and Theorems 1 and 1'.

Data: random families of 8 tasks (6 states, 3 actions, gamma .7) at several distances. LSPI trains on the
average MDP for K = 20 iterations. e is measured, eps is exact over all policies, and all norms use the
uniform distribution over states. Claims: measured <= Theorem 1' <= Theorem 1 in every run. The
high-probability form is reported too; it is vacuous. A cell is a distance; a row is a task of a family,
with its loss and every term.

Approximation: the same with approximate values. The features are the first d of six cosines over the
states. LSPI learns from one path with a new task at every step (the theorem's), from a path of each task,
from independent draws, and without noise. Claims: no family breaks either theorem; few features leave an
error that no sample removes, the corollary's c. A cell is a kind of sample with a d; a row is a family.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from apportion.certify.statistics import compare, mean_over
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import band, panels
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion.theory import bound as theorems
from apportion.theory import lspi
from apportion.theory.distance import concentrability, distance_by_enumeration
from apportion.theory.mdp import MDP, norm, random_family
from apportion_studies.theory.common import by_run, never_broken, one_by_one

_FAMILIES = {
    "quick": {"bound": 100, "approximation": 10},
    "paper": {"bound": 500, "approximation": 100},
}
"""Random families: of all distances together, and at each one."""
_STATES, _ACTIONS, _TASKS, _GAMMA, _ITERATIONS, _SAMPLES = 6, 3, 8, 0.7, 20, 125
_SPREADS = (0.0, 0.05, 0.1, 0.2, 0.4)
_THREE_SPREADS = (0.0, 0.1, 0.4)
_DIMENSIONS = (2, 3, 4, 6)
_SAMPLINGS = {
    "one path": lspi.one_path,
    "a path of each task": lspi.separate_paths,
    "independent draws": lspi.independent_draws,
    "no noise": lspi.limit,
}
_PARTS = {"error": "estimation", "propagation": "propagation", "distance": "task_distance"}
_PARTS |= {"total": "total"}
_UNIFORM = np.full(_STATES, 1 / _STATES)


def bound(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """Both theorems against the measured suboptimality, with all features and with few."""
    families = _FAMILIES[scale]
    cells = [
        Cell.alone(f"bound-distance-{spread:g}", {"figure": "bound", "spread": spread})
        for spread in _SPREADS
    ]
    cells += [
        Cell.alone(
            f"approximation-{sampling.replace(' ', '-')}-{dimension}",
            {"figure": "approximation", "sampling": sampling, "dimension": dimension},
        )
        for sampling, dimension in product(_SAMPLINGS, _DIMENSIONS)
    ]
    compute = partial(one_by_one, partial(_measure, families=families, seed=seed))
    settings = {
        name: {"families": number, "samples": _SAMPLES} for name, number in families.items()
    }
    return Plan("bound", tuple(cells), compute, _conclude, settings | {"seed": seed})


def _measure(figure: str, families: dict[str, int], seed: int, **values: Any) -> pd.DataFrame:
    if figure == "bound":
        spread = values["spread"]
        own = seed * len(_SPREADS) + _SPREADS.index(spread)
        return _measure_tasks(spread, families[figure] // len(_SPREADS), own).assign(figure=figure)
    # All kinds of samples and all d use the same families.
    frames = [
        _measure_features(
            **values, spread=spread, runs=families[figure], seed=seed * len(_THREE_SPREADS) + number
        )
        for number, spread in enumerate(_THREE_SPREADS)
    ]
    return pd.concat(frames, ignore_index=True).assign(figure=figure)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    own = dict(iter(rows.groupby("figure")))
    return [
        _conclude_bound(own["bound"], settings["seed"]),
        _conclude_approximation(own["approximation"]),
    ]


def _draw_family(spread: float, runs: int | None = None, seed: int = 0) -> MDP:
    """Random tasks of the study's size, at a given distance."""
    shape = {"states": _STATES, "actions": _ACTIONS, "tasks": _TASKS}
    return random_family(**shape, gamma=_GAMMA, spread=spread, runs=runs, seed=seed)


def _held_against_theorems(
    family: MDP, learned: lspi.PathResult
) -> tuple[np.ndarray, np.ndarray, np.ndarray, theorems.Terms, theorems.Terms]:
    """For LSPI on the average MDP, return e = max_k ||e_k||_mu (runs, 1), the loss of each task, the eps
    of the tasks over all policies, and the bounds of Theorems 1 and 1'.
    """
    alone = family.average()[:, None]
    residual = learned.values - alone.operator(learned.policies[:, :-1], learned.values)
    error = norm(residual, _UNIFORM).max(-1)[:, None]
    loss = norm(family.suboptimality(learned.policies[:, -1:]), _UNIFORM)
    own, trained = (
        concentrability(mdp.kernel, mdp.gamma, sigma=_UNIFORM, mu=_UNIFORM)
        for mdp in (family, alone)
    )
    distance = distance_by_enumeration(family, alone, _UNIFORM)
    known = (own.first, trained.second, distance)
    constants = theorems.TransferConstants(_GAMMA, alone.reward_bound, *known)
    given = theorems.LearningError(0.0, error)
    plain = constants.theorem_1(given, _ITERATIONS)
    return error, loss, distance, plain, constants.theorem_1_prime(given, _ITERATIONS)


def _measure_tasks(spread: float, runs: int, seed: int) -> pd.DataFrame:
    """LSPI on `runs` families: a row for each task, with the measured loss and every term."""
    family = _draw_family(spread, runs, seed)
    average = family.average()
    sizes, key = {"length": _SAMPLES * _TASKS, "iterations": _ITERATIONS}, jax.random.key(seed)
    features = np.eye(_STATES)
    learned = lspi.lspi_paths(average.kernel, average.reward, features, _GAMMA, **sizes, key=key)
    error, loss, distance, plain, prime = _held_against_theorems(family, learned)
    columns = {
        "spread": spread,
        "run": np.arange(runs)[:, None],
        "task": np.arange(_TASKS)[None],
        "epsilon": distance,
        "e": error,
        "measured": loss,
        "trivial": 2 * family.value_bound,
    }
    for name, terms in (("theorem_1", plain), ("theorem_1_prime", prime)):
        columns |= {f"{name}_{part}": getattr(terms, term) for part, term in _PARTS.items()}
    return pd.DataFrame(
        {name: np.broadcast_to(value, (runs, _TASKS)).ravel() for name, value in columns.items()}
    )


def _conclude_bound(rows: Any, seed: int) -> FigureResult:
    """Table, verdicts and figure from every task of every family."""
    table = rows.loc[:, "spread":"theorem_1_prime_total"].astype({"task": int})
    shares = table.assign(
        theorem_1=table.measured / table.theorem_1_total,
        theorem_1_prime=table.measured / table.theorem_1_prime_total,
        order=table.theorem_1_prime_total / table.theorem_1_total,
    )
    vacuous = theorems.error_bound(
        _draw_family(0.1, seed=seed), samples=1e6, iterations=_ITERATIONS
    )
    notes = (
        f"Measured suboptimality is at most {shares.theorem_1_prime.max():.3f} "
        f"of Theorem 1' and {shares.theorem_1.max():.3f} of Theorem 1, over "
        f"{len(table)} task-runs of {table.groupby(['spread', 'run']).ngroups} families.",
        f"Theorem 1' is {(table.theorem_1_total / table.theorem_1_prime_total).median():.1f} times "
        "tighter than Theorem 1 (median).",
        f"Theorem 1' is below the trivial bound in "
        f"{(table.theorem_1_prime_total < table.trivial).mean():.0%} of the task-runs, Theorem 1 in "
        f"{(table.theorem_1_total < table.trivial).mean():.0%}.",
        f"With e bounded in probability instead of measured, Lemma 4 asks for N T > "
        f"{vacuous.samples_needed:.1e} samples on such a family: the full bound is infinite at any "
        "practical N.",
    )
    title = "Theorem 1 against the truth: LSPI on the average MDP of random families"
    found = (table.round(6), _bound_verdicts(shares), lambda: _plot_bound(shares), notes)
    return FigureResult("bound", title, *found)


def _bound_verdicts(shares: Any) -> Iterator[Verdict]:
    """Share of families that break a bound, and whether losses grow with the distance."""
    claim = "suboptimality exceeds Theorem 1, constants corrected, in no run (share)"
    yield never_broken(shares, "theorem_1", claim)
    claim = "suboptimality exceeds Theorem 1' in no run (share)"
    yield never_broken(shares, "theorem_1_prime", claim, paper=False)
    claim = "Theorem 1' is above Theorem 1 in no run (share)"
    yield never_broken(shares, "order", claim, paper=False)
    families = shares.groupby(["spread", "run"]).measured.mean().unstack("run").to_numpy()
    steps = [compare(far, near) for near, far in pairwise(families)]
    claim = "suboptimality grows with the distance of the tasks (least step between neighbours)"
    yield Verdict.of_all(claim, steps)


def _plot_bound(shares: Any) -> Figure:
    """Mean suboptimality and its bounds by distance."""
    figure, [axis] = panels(7, 4.6, 1)
    means = shares.groupby("spread").mean(numeric_only=True)
    for label, column in (
        ("trivial: 2 V_max", "trivial"),
        ("Theorem 1", "theorem_1_total"),
        ("Theorem 1'", "theorem_1_prime_total"),
        ("its error term", "theorem_1_prime_error"),
        ("its propagation term", "theorem_1_prime_propagation"),
        ("its distance term", "theorem_1_prime_distance"),
        ("measured", "measured"),
    ):
        axis.plot(range(len(_SPREADS)), means[column], "o-", markersize=4, label=label)
    axis.set(yscale="log", ylabel="mean over tasks", title="measured suboptimality and its bounds")
    axis.set_ylim(1e-5, None)
    axis.set_xticks(range(len(_SPREADS)), [f"{spread:g}" for spread in _SPREADS])
    axis.set_xlabel("distance: share of a task that is its own")
    axis.legend(fontsize=8, ncols=2)
    return figure


def _cosines(dimension: int) -> Float[np.ndarray, "states dimension"]:
    """A constant and the first cosines over the states, orthonormal under mu."""
    place = (np.arange(_STATES) + 0.5) / _STATES
    waves = np.sqrt(2.0) * np.cos(np.pi * np.outer(place, np.arange(dimension)))
    waves[:, 0] = 1.0
    return waves


def _measure_features(
    sampling: str, dimension: int, spread: float, runs: int, seed: int
) -> pd.DataFrame:
    """LSPI on `runs` families: loss, error, and the ratio of the loss to each bound."""
    family = _draw_family(spread, runs, seed)
    features = _cosines(dimension)
    sizes, rng = {"samples": _SAMPLES, "iterations": _ITERATIONS}, np.random.default_rng(seed)
    learned = lspi.lspi_from_moves(family, features, _SAMPLINGS[sampling], **sizes, rng=rng)
    error, loss, _, plain, prime = _held_against_theorems(family, learned)
    bounds: Any = np.nan
    if sampling == "no noise":
        # The approximation term of the bound on e for each family; without noise it is the only term.
        known = (theorems.LearningConstants.of(mdp, features, _UNIFORM) for mdp in family.average())
        bounds = [
            theorems.learning_error(one, 1e6, _ITERATIONS, 0.1).approximation for one in known
        ]
    return pd.DataFrame(
        {
            "sampling": sampling,
            "dimension": dimension,
            "spread": spread,
            "run": np.arange(runs),
            "loss": loss.mean(-1),
            "e": error[:, 0],
            "theorem_1": (loss / plain.total).max(-1),
            "theorem_1_prime": (loss / prime.total).max(-1),
            "informative": (prime.total < 2 * family.value_bound).mean(-1),
            "e_bound": bounds,
        }
    )


def _conclude_approximation(rows: Any) -> FigureResult:
    """Table, verdicts and figure from every family."""
    rows = rows.astype({"dimension": int})
    by: Any = rows.groupby(["sampling", "dimension", "spread"], sort=False)
    means = by[["loss", "e", "informative", "e_bound"]].mean()
    worst = by[["theorem_1", "theorem_1_prime"]].max().add_suffix("_worst")
    table = pd.concat([means, worst, by.size().rename("families")], axis=1)
    few = rows[rows.dimension < _STATES]
    calm = few[few.sampling == "no noise"]
    losses = rows[rows.sampling == "one path"].groupby(["dimension", "spread"]).loss.mean()
    notes = (
        f"With few features suboptimality reaches {few.theorem_1_prime.max():.3f} of Theorem 1' at most, "
        f"and {few.theorem_1.max():.3f} of Theorem 1, over {few.groupby(['spread', 'run']).ngroups} "
        f"families, {len(_DIMENSIONS) - 1} numbers of features and {len(_SAMPLINGS)} kinds of samples.",
        f"Theorem 1' is below the trivial bound in {few.informative.mean():.0%} of the cases.",
        f"Without noise e is {(calm.e / calm.e_bound).median():.3f} of its approximation term (median).",
        f"Two features in place of six cost {losses[2, 0.0] - losses[6, 0.0]:.4f} of suboptimality with "
        f"equal tasks, where e rises from {_errors(rows, 'one path', 6, 0.0).mean():.3f} to "
        f"{_errors(rows, 'one path', 2, 0.0).mean():.3f}.",
        f"Distance .4, all features: e is {_errors(rows, 'a path of each task', 6, 0.4).mean():.4f} on a "
        f"path of each task and {_errors(rows, 'one path', 6, 0.4).mean():.4f} on one path.",
    )
    title = "Theorem 1 with few features, on paths and on independent draws"
    table, verdicts = table.reset_index().round(6), _approximation_verdicts(rows)
    return FigureResult(
        "approximation", title, table, verdicts, lambda: _plot_approximation(rows), notes
    )


def _errors(rows: Any, sampling: str, dimension: int, spread: float) -> np.ndarray:
    return by_run(rows, "e", sampling=sampling, dimension=dimension, spread=spread)


def _approximation_verdicts(rows: Any) -> Iterator[Verdict]:
    """Whether any kind of sample breaks a bound, and the effect of features and samples on e."""
    few = rows[rows.dimension < _STATES]
    claim = "few features: suboptimality exceeds Theorem 1 in no run (share)"
    yield never_broken(few, "theorem_1", claim)
    claim = "few features: it exceeds Theorem 1' in no run (share)"
    yield never_broken(few, "theorem_1_prime", claim, paper=False)
    calm = few[few.sampling == "no noise"].assign(error=lambda own: own.e / own.e_bound)
    claim = "without noise e is within its approximation term in all runs (share not)"
    yield never_broken(calm, "error", claim)
    left = [_errors(rows, "no noise", d, s) for d in _DIMENSIONS[:-1] for s in _THREE_SPREADS]
    claim = "few features leave an error e that no sample removes, the c (least mean, no noise)"
    yield Verdict.of_all(claim, [mean_over(values) for values in left])
    apart, same = (
        compare(
            _errors(rows, "a path of each task", _STATES, spread),
            _errors(rows, "one path", _STATES, spread),
        )
        for spread in (_THREE_SPREADS[-1], 0.0)
    )
    claim = (
        "distance .4, all features: a path of each task errs more than one path of the average (e)"
    )
    yield Verdict.of(claim, apart, paper=False)
    usual = _errors(rows, "one path", _STATES, 0.0).mean()
    ends = {name: getattr(same, name) / usual for name in ("value", "low", "high", "error")}
    claim = "equal tasks, all features: the two differ by less than a tenth of e (difference / e)"
    yield Verdict.of(claim, replace(same, **ends), above=-0.1, below=0.1, paper=False)
    informative = few.groupby(["spread", "run"]).informative.mean()
    claim = "few features: Theorem 1' says more than the trivial bound in most cases (share - 1/2)"
    yield Verdict.of(claim, mean_over(informative.to_numpy() - 0.5), paper=False)


def _plot_approximation(rows: Any) -> Figure:
    """The error e by number of features and kind of sample, at two distances."""
    figure, axes = panels(13, 4.6, sharey=True)
    for axis, spread in zip(axes, (0.0, 0.4), strict=True):
        for number, name in enumerate(_SAMPLINGS):
            ends = [mean_over(_errors(rows, name, d, spread)) for d in _DIMENSIONS]
            band(axis, _DIMENSIONS, ends, f"C{number}", name)
        axis.set(xlabel="features d, of 6 states", title=f"distance {spread:g}")
    axes[0].set_ylabel("error e (mean over families)")
    axes[0].legend(fontsize=8)
    return figure
