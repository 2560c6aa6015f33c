"""Corollary 2: the worth of all orderings of m entities, and of all subsets of a universe of M.

Data: the synthetic problem with equal entities, m = 4 to 40. Orderings: the number of real examples that
20 real examples in all m! orderings are worth; these orderings are the tied model on the 20 examples.
Subsets: a universe of M = 4m entities with a record of 50 periods each, and tasks that are random subsets
of it. The tied model learns from them, and from 1 to 64 independent tasks with separate entities. The
effective number of overlapping tasks is the number of independent tasks with the same regret: Hoeffding's
U-statistics guarantee floor(M/m) for all subsets together, the corollary counts C(M, m).
A cell is an m; a row is the regret of one run, arm and number of tasks or examples.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.certify.statistics import Estimate, mean_over, of_means
from apportion.domains import synthetic
from apportion.domains.synthetic import Examples, reward
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion.theory.bound import corollary_2
from apportion.theory.lspi import in_float64
from apportion_studies.theory.common import by_run, one_by_one
from apportion_studies.theory.fig1 import equivalent_samples

_ENTITIES = {"quick": (4, 10), "paper": (4, 10, 20, 40)}
_RUNS = {"quick": 6, "paper": 64}
_RATIO = 4
"""Size of the universe over size of a task, M / m."""
_OVERLAPPING = (16, 256)
_INDEPENDENT = (1, 4, 16, 64)
_REAL, _PERIODS, _FRESH, _GAMMA, _BETA, _NOISE = 20, 50, 500, 0.5, 0.5, 0.02
# The bias of Figure 1's ridge would dominate for many tasks of 20 or more entities.
_RIDGE = 1e-7
_MULTIPLES = (0.5, 1, 2, 4)


def corollary2(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """Plan a cell for each number of entities."""
    cells = Cell.each("entities", "entities", _ENTITIES[scale])
    compute = partial(one_by_one, partial(_measure, runs=_RUNS[scale], seed=seed))
    return Plan("corollary2", cells, compute, _conclude, {"runs": _RUNS[scale]})


def _sizes_of(m: int) -> tuple[int, ...]:
    """Return numbers of real examples around 20 m, for the comparison with 20 tied examples."""
    return tuple(int(_REAL * m * multiple) for multiple in _MULTIPLES)


@in_float64
def _regrets_of(m: int, runs: int, key_data):
    """Return the regret on fresh states, (runs, arms), with arms in the order of `_measure`.

    The tied model learns from overlapping tasks, from independent tasks and from 20 real examples.
    The separate model learns from increasing numbers of real examples.
    """
    fresh = jnp.asarray(np.random.default_rng(0).uniform(size=(_FRESH, m)))
    betas = jnp.full(m, _BETA)
    shares = jax.vmap(synthetic.entropic_allocation, (0, None))(fresh, betas)
    best = reward(fresh, shares, betas)
    tied, separate = (
        jnp.asarray(basis(m)) for basis in (synthetic.tied_basis, synthetic.separate_basis)
    )

    def regret(examples, basis):
        theta = synthetic.lspi_simplex(examples, basis, _GAMMA, ridge=_RIDGE)
        chosen = jax.vmap(synthetic.simplex_greedy, (None, 0))(theta, fresh)
        return (best - reward(fresh, chosen, betas)).mean()

    def one(key):
        keys = jax.random.split(key, 3)
        record, others = (
            _draw_record(_RATIO * m, keys[0]),
            _draw_record(_INDEPENDENT[-1] * m, keys[2]),
        )
        order = jax.random.uniform(keys[1], (_OVERLAPPING[-1], _RATIO * m))
        drawn = jnp.argsort(order, -1)[:, :m]
        alone = jnp.arange(_INDEPENDENT[-1] * m).reshape(-1, m)
        real = synthetic.draw_examples((_sizes_of(m)[-1],), betas, noise=_NOISE, key=key)
        found = [regret(_examples_of(record, drawn[:number]), tied) for number in _OVERLAPPING]
        found += [regret(_examples_of(others, alone[:number]), tied) for number in _INDEPENDENT]
        found += [regret(real[:_REAL], tied)]
        return jnp.stack(found + [regret(real[:number], separate) for number in _sizes_of(m)])

    return jax.lax.map(one, jax.random.split(jax.random.wrap_key_data(key_data), runs))


def _draw_record(universe: int, key):
    """Draw state, next state, weight and noise of each entity in every period."""
    draws = jax.random.uniform(key, (4, _PERIODS, universe), minval=1e-12)
    return draws[0], draws[1], -jnp.log(draws[2]), _NOISE * jax.scipy.special.ndtri(draws[3])


def _examples_of(record, tasks) -> Examples:
    """Make an example per period and task; an entity's weight and noise are the same in all tasks.

    Weights are exponential, so the shares of any subset are uniform on the simplex. The noise of a
    reward is the sum of its entities' noise, weighted by their shares.
    """
    x, following, weight, luck = (
        part[:, tasks].swapaxes(0, 1).reshape(-1, tasks.shape[1]) for part in record
    )
    shares = weight / weight.sum(-1, keepdims=True)
    gained = reward(x, shares, jnp.full(x.shape[1], _BETA)) + (shares * luck).sum(-1)
    return Examples(x, shares, gained, following)


def _measure(entities: int, *, runs: int, seed: int) -> pd.DataFrame:
    """Return the regret of every run, arm and number of tasks or examples."""
    key_data = jax.random.key_data(jax.random.key(seed))
    regrets = iter(_regrets_of(entities, runs, key_data).T)
    numbers = {"overlapping": _OVERLAPPING, "independent": _INDEPENDENT, "tied": (_REAL,)}
    frames = [
        pd.DataFrame(
            {"arm": arm, "number": number, "run": np.arange(runs), "regret": next(regrets)}
        )
        for arm, own in (numbers | {"real": _sizes_of(entities)}).items()
        for number in own
    ]
    rows = pd.concat(frames, ignore_index=True)
    rows.insert(0, "entities", entities)
    return rows


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Table, verdicts and figure from the regret of every run."""
    records, notes = [], []
    known = sorted(int(m) for m in rows.entities.unique())
    for m in known:
        for (arm, number), part in rows[rows.entities == m].groupby(["arm", "number"], sort=False):
            mean = mean_over(part.regret.to_numpy())
            ends = (mean.value, mean.low, mean.high)
            records.append((m, arm, float(number), "regret", *ends, mean.n))
        subsets, orderings = corollary_2(_RATIO * m, m).tasks, math.factorial(m)
        of_subsets, of_orderings = _of_all(rows, m), _worth(rows, m)
        for arm, counted, found in (
            ("all subsets", subsets, of_subsets),
            ("all orderings", orderings, of_orderings),
        ):
            ends = np.exp([found.value, found.low, found.high])
            records.append((m, arm, float(counted), "worth", *ends, found.n))
        notes.append(
            f"m = {m}: the {subsets:.3g} subsets of {_RATIO * m} entities are "
            f"worth {math.exp(of_subsets.value):.1f} independent tasks; all {orderings:.3g} orderings "
            f"are worth {math.exp(of_orderings.value):.1f} times as many examples."
        )
    notes.append(
        "Hoeffding's floor(M/m) is what entities allow to one mean; a regression's noise is a product of "
        "two such means, for which overlapping subsets can count up to about (M/m)^2."
    )
    columns = ["entities", "arm", "number", "measure", "value", "low", "high", "runs"]
    table = pd.DataFrame(records, columns=columns)
    title = "Corollary 2: what all orderings and all subsets of the entities are worth"
    worths = {"all subsets: tasks": _of_all, "all orderings: examples, times": _worth}
    shown = {name: {f"m = {m}": of(rows, m) for m in known} for name, of in worths.items()}
    draw = partial(forest, shown, "log of the worth, M = 4m")
    return [FigureResult("corollary2", title, table, _verdicts(rows, known), draw, notes)]


def _regrets(rows: Any, m: int, arm: str, number: int) -> np.ndarray:
    return by_run(rows, "regret", entities=m, arm=arm, number=number)


def _log_effective(means: np.ndarray) -> np.ndarray:
    """Return the log of the effective number of tasks, from mean regrets of `_beside_independent`.

    A mean over T random subsets has the variance of the mean over all subsets, plus 1/T of the
    excess variance of a single subset (Blom 1976). The second term is removed.

    >>> regrets = np.array([1.0, 1 / 4, 1 / 16, 1 / 64, 1 / 10 + (1 - 1 / 10) / 256])
    >>> float(np.exp(_log_effective(regrets)).round(6))
    10.0
    """
    drawn = _OVERLAPPING[-1]
    found = equivalent_samples(means[..., :-1], means[..., -1], _INDEPENDENT)
    return np.asarray(np.log((1 - 1 / drawn) / np.maximum(1 / found - 1 / drawn, 1e-9)))


def _beside_independent(rows: Any, m: int) -> np.ndarray:
    """Return regrets (runs, arms): 1 to 64 independent tasks, then the most overlapping tasks."""
    arms = [("independent", number) for number in _INDEPENDENT]
    arms += [("overlapping", _OVERLAPPING[-1])]
    return np.stack([_regrets(rows, m, *arm) for arm in arms], -1)


def _of_all(rows: Any, m: int) -> Estimate:
    """Return the log of the number of independent tasks that all subsets are worth."""
    return of_means(_beside_independent(rows, m), _log_effective)


def _worth(rows: Any, m: int) -> Estimate:
    """Return the log of the factor by which all orderings multiply the worth of 20 examples."""
    sizes = _sizes_of(m)
    curve = [_regrets(rows, m, "real", number) for number in sizes]
    values = np.stack([_regrets(rows, m, "tied", _REAL), *curve], -1)
    return of_means(
        values, lambda c: np.log(equivalent_samples(c[..., 1:], c[..., 0], sizes) / _REAL)
    )


def _verdicts(rows: Any, known: list[int]) -> Iterator[Verdict]:
    values = np.stack([_beside_independent(rows, m) for m in known], 1)
    x = np.asarray(known, float) - np.mean(known)

    def growth(means):
        """Slope of the log of the gain from all subsets in the number of entities."""
        return (_log_effective(means) * x).sum(-1) / (x**2).sum()

    claim = (
        "subsets: the gain is exponential in m (growth of its log with each entity, >= log(M/m))"
    )
    yield Verdict.of(claim, of_means(values, growth), above=math.log(_RATIO))
    everyone = [_of_all(rows, m) for m in known]
    claim = "all subsets are worth at least floor(M/m) = 4 tasks, as Hoeffding says (least number)"
    yield Verdict.of_all(claim, everyone, above=math.log(_RATIO), paper=False).scaled(math.exp)
    claim = "and at most 2 (M/m)^2 = 32 tasks, whatever m (largest number)"
    most = math.log(2 * _RATIO**2)
    yield Verdict.of_all(claim, everyone, below=most, paper=False).scaled(math.exp)
    ratios = []
    for m in known:
        found = _worth(rows, m)
        ends = {end: getattr(found, end) - math.log(m) for end in ("value", "low", "high")}
        ratios.append(replace(found, **ends))
    claim = (
        "all m! orderings are worth m times as many examples, to a factor of 4 (worst ratio to m)"
    )
    found = Verdict.of_all(claim, ratios, above=-math.log(4), below=math.log(4), paper=False)
    yield found.scaled(math.exp)
