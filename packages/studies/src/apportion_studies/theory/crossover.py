"""When to pool: multi-task against single-task LSPI over N, the number of tasks and their distance.

Crossover: random families of 8 tasks (12 states, 3 actions, gamma .7), samples drawn uniformly over
state-action pairs. Table: mean suboptimality of both at every N and distance. Claims: the 1/sqrt(NT) and
the eps of Corollary 1, and the N at which single-task learning overtakes, which the paper does not give.
A cell is a distance; a row is a family at one N.

Corollary 1 in the number of tasks: families of 64 tasks (6 states), N = 36 samples of each. LSPI learns
from the pool of the first T tasks and is compared with the optimum of each of them. The floor is the loss
of the average MDP's own optimum, without any sampling. The corollary's O(1/sqrt(NT)) and O(eps) are upper
bounds: each is tested as a bound and as a rate. A cell is a distance; a row is a family at one T.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from apportion.certify.statistics import compare, mean_over, of_means
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import band, panels
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion.theory.distance import concentrability, distance_by_enumeration
from apportion.theory.lspi import lspi_finite
from apportion.theory.mdp import MDP, norm, random_family
from apportion.theory.pooling import Counts, draw_counts
from apportion_studies.theory.common import log_slope, means_by, never_broken, one_by_one

_FAMILIES = {
    "quick": {"crossover": 20, "corollary1": 40},
    "paper": {"crossover": 100, "corollary1": 400},
}
"""Random families at every distance."""
_ACTIONS, _GAMMA, _NOISE = 3, 0.7, 0.1

_STATES, _TASKS = 12, 8
SIZES = (72, 144, 288, 576, 1152, 2304, 4608, 9216)
_SPREADS = (0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
_MEASURES = ("single", "multi", "error", "average")

_FEW_STATES, _SAMPLES = 6, 36
_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of tasks T."""
_LATE = _COUNTS.index(8)
"""From here on every state-action pair has at least 16 samples, enough to measure rates."""
_DISTANCES = (0.0, 0.05, 0.1, 0.2, 0.4)
_UNIFORM = np.full(_FEW_STATES, 1 / _FEW_STATES)

_Grids = dict[str, Float[np.ndarray, "spreads sizes runs"]]
_Curves = dict[str, Float[np.ndarray, "spreads runs tasks"]]


def crossover(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """Multi-task against single-task LSPI: over N, and Corollary 1 over T."""
    spreads = {"crossover": _SPREADS, "corollary1": _DISTANCES}
    cells = tuple(
        Cell.alone(f"{figure}-distance-{spread:g}", {"figure": figure, "spread": spread})
        for figure, own in spreads.items()
        for spread in own
    )
    families = _FAMILIES[scale]
    settings = {
        "crossover": {"families": families["crossover"]},
        "corollary1": {"families": families["corollary1"], "samples": _SAMPLES},
    }
    compute = partial(one_by_one, partial(_measure, families=families, seed=seed))
    return Plan("crossover", cells, compute, _conclude, settings)


def _measure(figure: str, spread: float, families: dict[str, int], seed: int) -> pd.DataFrame:
    measure = {"crossover": _measure_sizes, "corollary1": _measure_counts}[figure]
    return measure(spread, families[figure], seed).assign(figure=figure)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    own = dict(iter(rows.groupby("figure")))
    return [_conclude_crossover(own["crossover"]), _conclude_corollary1(own["corollary1"])]


def _features(states: int) -> np.ndarray:
    return np.eye(states * _ACTIONS).reshape(states, _ACTIONS, -1)


def _measure_sizes(spread: float, runs: int, seed: int) -> pd.DataFrame:
    """A row for each N and family: suboptimality on the tasks, single and multi, errors on the
    average MDP, and the crossover predicted for all families of this distance.
    """
    shape = {"states": _STATES, "actions": _ACTIONS, "tasks": _TASKS, "gamma": _GAMMA}
    family = random_family(**shape, spread=spread, runs=runs, seed=seed)
    average = family.average()
    best = average.backup(average.optimal()[1])
    rng = np.random.default_rng(seed)
    frames = []
    counts, drawn = None, 0
    for size in SIZES:
        more = draw_counts(family, size - drawn, noise=_NOISE, rng=rng)
        counts, drawn = more if counts is None else counts + more, size
        single, multi = (
            lspi_finite(own.visits, own.moves, own.rewards, _features(_STATES), _GAMMA)
            for own in (counts, counts.pooled())
        )
        columns = {
            "spread": spread,
            "samples": size,
            "run": np.arange(runs),
            "single": family.suboptimality(single.policy).mean((-1, -2)),
            "multi": family.suboptimality(multi.policy[:, None]).mean((-1, -2)),
            "error": np.sqrt(((multi.action_values - best) ** 2).mean((-1, -2))),
            "average": average.suboptimality(multi.policy).mean(-1),
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True).assign(predicted=_predicted_crossover(family))


def _predicted_crossover(family: MDP) -> float:
    """The N where a task's own noise equals its distance from the pool: sigma^2 (1 - 1/T) / d^2."""
    average = family.average()
    value = average.optimal()[1]
    later = family.kernel @ value[:, None, None, :, None]
    spread = family.kernel @ value[:, None, None, :, None] ** 2 - later**2
    variance = _NOISE**2 + _GAMMA**2 * spread.mean()
    pairs = family.states * family.actions
    apart = family.reward + _GAMMA * later[..., 0]
    distance = ((apart - apart.mean(1, keepdims=True)) ** 2).mean()
    return float(pairs * variance * (1 - 1 / _TASKS) / distance) if distance > 1e-20 else np.inf


def log_crossings(curves: Float[np.ndarray, "*resamples 2 sizes"]) -> np.ndarray:
    """The log of the N from which single-task is better than multi-task, between sizes on log axes.

    It is -inf if single-task is better at the first N, and inf if it never is.
    """
    lead = -np.diff(np.log(_above_zero(curves)), axis=-2)[..., 0, :]
    place = np.clip(np.argmax(lead <= 0, -1), 1, len(SIZES) - 1)[..., None]
    before, after = (np.take_along_axis(lead, place - back, -1)[..., 0] for back in (1, 0))
    grid, place = np.log(SIZES), place[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = before / (before - after)
    between = grid[place - 1] + share * (grid[place] - grid[place - 1])
    late = np.where(lead[..., -1] > 0, np.inf, between)
    return np.where((lead[..., 0] <= 0) & (late < np.inf), -np.inf, late)


def _above_zero(curves: np.ndarray) -> np.ndarray:
    """Clip curves above zero for the log; long samples can leave no suboptimality in a few families."""
    return np.maximum(curves, 1e-7)


def _conclude_crossover(rows: Any) -> FigureResult:
    """Table, verdicts and figure from every family at every N."""
    ordered = rows.astype({"samples": int}).sort_values(["spread", "samples", "run"])
    grids = {
        name: ordered[name].to_numpy().reshape(len(_SPREADS), len(SIZES), -1) for name in _MEASURES
    }
    pairs = np.stack([grids["single"], grids["multi"]], 1)
    measured = np.exp(log_crossings(pairs.mean(-1)))
    predicted = rows.groupby("spread").predicted.first().to_numpy()
    lines = pd.DataFrame({"spread": _SPREADS, "crossover": measured, "predicted": predicted})
    means = ordered.groupby(["spread", "samples"], as_index=False)[[*_MEASURES]].mean()
    table = means.assign(families=rows.run.nunique()).merge(lines, on="spread")
    notes = [
        f"{words}: {multi:.4f} pooled against {single:.4f} alone."
        for words, (single, multi) in (
            ("Equal tasks at N = 144", pairs[0, :, SIZES.index(144)].mean(-1)),
            ("Distance .4 at N = 9216", pairs[_SPREADS.index(0.4), :, -1].mean(-1)),
        )
    ]
    for spread, crossed, said in lines.to_numpy():
        won = f"alone wins from N = {crossed:,.0f} a task"
        if crossed == 0:
            won = f"alone wins already at N = {SIZES[0]}"
        if np.isinf(crossed):
            won = f"pooling still wins at N = {SIZES[-1]:,}"
        notes.append(f"Distance {spread:g}: {won} (predicted crossover {said:,.0f}).")
    title = "When to pool: multi-task against single-task LSPI"
    verdicts, draw = _crossover_verdicts(grids, lines), partial(_plot_crossover, grids, lines)
    return FigureResult("crossover", title, table, verdicts, draw, notes)


def _crossover_verdicts(grids: _Grids, lines: pd.DataFrame) -> Iterator[Verdict]:
    single, multi = grids["single"], grids["multi"]
    error, average = (
        of_means(grids[name][0].T, lambda mean: log_slope(_above_zero(mean), np.array(SIZES)))
        for name in ("error", "average")
    )
    small, near, far = SIZES.index(144), _SPREADS.index(0.1), _SPREADS.index(0.4)
    claim = "the pool's Q error falls like 1/sqrt(NT) (slope in [-.65, -.40])"
    yield Verdict.of(claim, error, above=-0.65, below=-0.40)
    claim = "suboptimality on the average MDP falls at least like 1/sqrt(NT) (slope <= -.5)"
    yield Verdict.of(claim, average, below=-0.5)
    steps = [compare(further, closer) for closer, further in pairwise(multi[near:, -1])]
    claim = "at N = 9216 multi-task suboptimality grows with the distance (least step, .1 to .8)"
    yield Verdict.of_all(claim, steps)
    claim = "equal tasks, N = 144: pooling beats learning alone (suboptimality saved)"
    yield Verdict.of(claim, compare(single[0, small], multi[0, small]))
    claim = "distance .4, N = 9216: learning alone beats pooling (suboptimality saved)"
    yield Verdict.of(claim, compare(multi[far, -1], single[far, -1]), paper=False)
    ratios = []
    # A resample that does not cross counts with the nearest N.
    first, last = np.log([SIZES[0], SIZES[-1]])
    for s in np.flatnonzero(lines.crossover.between(SIZES[0], SIZES[-1])):
        curves = np.stack([single[s], multi[s]]).transpose(2, 0, 1)
        said = math.log(lines.predicted[s])
        ratios.append(
            of_means(curves, lambda c, said=said: said - np.clip(log_crossings(c), first, last))
        )
    claim = (
        "the rule behind should_pool predicts every crossover to a factor of 3 (the worst ratio)"
    )
    third = math.log(3)
    yield Verdict.of_all(claim, ratios, above=-third, below=third, paper=False).scaled(math.exp)


def _plot_crossover(grids: _Grids, lines: pd.DataFrame) -> Figure:
    """Left: mean suboptimality against N; right: the crossover, predicted and measured."""
    figure, (left, right) = panels(13, 4.6)
    multi, single = (_above_zero(grids[arm].mean(-1)) for arm in ("multi", "single"))
    left.plot(SIZES, single.mean(0), "k--", label="alone (all distances)")
    for spread, curve in zip(_SPREADS[:-1], multi, strict=False):
        left.plot(SIZES, curve, "o-", markersize=4, label=f"pooled, distance {spread:g}")
    left.set(xscale="log", yscale="log", xlabel="samples per task N", ylabel="mean suboptimality")
    left.set_title("pooling starts lower and stops at its distance")
    for name, label, style in (
        ("predicted", "predicted", "k--"),
        ("crossover", "measured", "C0o-"),
    ):
        right.plot(lines.spread, lines[name].where(lines[name].between(1, 1e9)), style, label=label)
    right.set(xscale="log", yscale="log", ylabel="crossover: samples per task N")
    right.set(xlabel="distance: share of a task that is its own", title="learning alone wins above")
    right.set_xticks(_SPREADS[1:], [f"{spread:g}" for spread in _SPREADS[1:]])
    right.minorticks_off()
    for axis in (left, right):
        axis.legend(fontsize=8)
    return figure


def _measure_counts(spread: float, runs: int, seed: int) -> pd.DataFrame:
    """A row for each family and T: loss of the pool's policy, floor, and error of its Q.

    The mean distance eps, and the largest ratio of a task's floor to its eps term in Theorem 1', are
    those of all 64 tasks.
    """
    shape = {"states": _FEW_STATES, "actions": _ACTIONS, "tasks": _COUNTS[-1], "gamma": _GAMMA}
    family = random_family(**shape, spread=spread, runs=runs, seed=seed)
    counts = draw_counts(family, _SAMPLES, noise=_NOISE, rng=np.random.default_rng(seed))
    best, average = family.optimal()[1], family.average()
    distance = distance_by_enumeration(family, average[:, None], _UNIFORM)
    first = concentrability(family.kernel, _GAMMA, sigma=_UNIFORM, mu=_UNIFORM).first
    floor = norm(best - family.value(average.optimal()[0][:, None]), _UNIFORM)
    term = 2 * distance * np.sqrt(first) / (1 - _GAMMA)
    with np.errstate(invalid="ignore"):
        share = np.where(distance > 1e-12, floor / term, 0.0)
    frames = []
    for number in _COUNTS:
        part = family[:, :number]
        average = part.average()
        top, value = average.optimal()
        pool = Counts(
            counts.visits[:, :number], counts.moves[:, :number], counts.rewards[:, :number]
        ).pooled()
        learned = lspi_finite(pool.visits, pool.moves, pool.rewards, _features(_FEW_STATES), _GAMMA)
        off = learned.action_values - average.backup(value)
        columns = {
            "spread": spread,
            "tasks": number,
            "run": np.arange(runs),
            "loss": (best[:, :number] - part.value(learned.policy[:, None])).mean((-1, -2)),
            "floor": (best[:, :number] - part.value(top[:, None])).mean((-1, -2)),
            "error": np.sqrt((off**2).mean((-1, -2))),
            "epsilon": distance.mean(-1),
            "share": share.max(-1),
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def _conclude_corollary1(rows: Any) -> FigureResult:
    """Table, verdicts and figure from every family at every T."""
    ordered = rows.sort_values(["spread", "run", "tasks"])
    curves = {
        name: ordered[name].to_numpy().reshape(len(_DISTANCES), -1, len(_COUNTS))
        for name in ("loss", "floor", "error", "epsilon", "share")
    }
    by, others = ["spread", "tasks"], ["floor", "error", "epsilon"]
    table: Any = means_by(rows.astype({"tasks": int}), by, "loss", "n")
    table = table.merge(rows.groupby(by)[others].mean().reset_index(), on=by)
    table = table[[*by, "loss", "low", "high", *others, "n"]]
    loss, floor, epsilon = (curves[name].mean(1) for name in ("loss", "floor", "epsilon"))
    notes = (
        f"Equal tasks lose {loss[0, 0]:.4f} alone and {loss[0, -1]:.5f} in a pool of 64: the value's "
        "error falls like 1/sqrt(T), and what the policy loses falls like its square, about 1/T.",
        "The corollary's rate is an upper bound and no rate: a policy loses only where an error changes "
        "its action, which is the rarer the smaller the error is.",
        *(
            f"Distance {_DISTANCES[s]:g}: alone {loss[s, 0]:.4f}, 64 pooled {loss[s, -1]:.4f}, floor "
            f"{floor[s, -1]:.4f} at eps {epsilon[s].mean():.4f}."
            for s in range(1, len(_DISTANCES))
        ),
        f"A task's floor is at most {curves['share'][1:, :, -1].max():.2f} of its eps term in Theorem 1'.",
    )
    # The same families at several distances are one unit.
    claim = (
        "the floor exceeds the eps term of Theorem 1' on a task of no family (share of families)"
    )
    inside = never_broken(rows, "share", claim, by=["run"])
    verdicts, draw = (*_corollary1_verdicts(curves), inside), partial(_plot_corollary1, curves)
    title = "Corollary 1: suboptimality against the number of tasks, and the floor that eps sets"
    return FigureResult("corollary1", title, table.round(9), verdicts, draw, notes)


def _floors(curves: _Curves) -> Float[np.ndarray, "runs two spreads"]:
    """The floor and eps of all 64 tasks, in the families of every distance above 0."""
    return np.stack([curves[name][1:, :, -1].T for name in ("floor", "epsilon")], 1)


def _corollary1_verdicts(curves: _Curves) -> Iterator[Verdict]:
    late = np.asarray(_COUNTS[_LATE:], float)
    loss, error = (
        of_means(curves[name][0][:, _LATE:], lambda mean: log_slope(mean, late))
        for name in ("loss", "error")
    )
    claim = "equal tasks: the error of Q falls like 1/sqrt(T) (slope, T >= 8, in [-.6, -.4])"
    yield Verdict.of(claim, error, above=-0.6, below=-0.4)
    claim = "equal tasks: suboptimality falls at least like 1/sqrt(T) (slope, T >= 8, <= -.5)"
    yield Verdict.of(claim, loss, below=-0.5)
    claim = "equal tasks: and no faster, as a rate would have it (slope, T >= 8, >= -.6)"
    yield Verdict.of(claim, loss, above=-0.6, paper=False)
    claim = "equal tasks: twice the tasks always lose less (least step)"
    steps = [compare(few, more) for few, more in pairwise(curves["loss"][0].T)]
    yield Verdict.of_all(claim, steps)
    slope = of_means(_floors(curves), lambda m: log_slope(m[..., 0, :], m[..., 1, :]))
    far = np.stack([curves[name][-1, :, -1] for name in ("loss", "floor")], -1)
    met = of_means(far, lambda m: np.log(m[..., 0] / m[..., 1]))
    claim = "distance .4: 64 tasks lose what the floor says, to a tenth (loss / floor)"
    tenth = math.log(1.1)
    yield Verdict.of(claim, met, above=-tenth, below=tenth).scaled(math.exp)
    claim = "the floor grows no slower than eps (slope in eps, >= 1)"
    yield Verdict.of(claim, slope, above=1.0)
    claim = "the floor is proportional to eps (slope in eps, <= 1.2)"
    yield Verdict.of(claim, slope, below=1.2, paper=False)


def _plot_corollary1(curves: _Curves) -> Figure:
    """Mean suboptimality against T, and the floor."""
    figure, [axis] = panels(7, 4.6, 1)
    for number, (spread, loss) in enumerate(zip(_DISTANCES, curves["loss"], strict=True)):
        ends = [mean_over(column) for column in loss.T]
        band(axis, _COUNTS, ends, f"C{number}", f"distance {spread:g}")
        if spread:
            axis.plot(_COUNTS[1:], curves["floor"][number].mean(0)[1:], ":", color=f"C{number}")
    axis.set(xscale="log", yscale="log", xlabel="tasks T, 36 samples each")
    axis.set(ylabel="mean suboptimality", title="more tasks help down to the floor (dotted)")
    axis.legend(fontsize=9)
    return figure
