"""When to pool: multi-task against single-task LSPI over N and the distance of the tasks.

Data: random families of 8 tasks (12 states, 3 actions, gamma .7), samples drawn uniformly over
state-action pairs. Table: mean suboptimality of both at every N and distance. Claims: Corollary 1's
1/sqrt(NT) and its eps; and the line, which the paper does not draw, where one overtakes the other.
A cell is a distance; a row is a family at one N.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from apportion.statistics import compare, of_means
from apportion.studies.engine import Cell, Plan
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes
from apportion.studies.theory.families import log_slope, one_by_one
from apportion.theory.lspi import lspi_finite
from apportion.theory.mdp import MDP, random_family
from apportion.theory.samples import draw_counts

STATES, ACTIONS, TASKS, GAMMA, NOISE = 12, 3, 8, 0.7, 0.1
SIZES = (72, 144, 288, 576, 1152, 2304, 4608, 9216)
SPREADS = (0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)

MEASURES = ("single", "multi", "error", "average")

Grid = Float[np.ndarray, "spreads sizes runs"]
draw_family = partial(random_family, states=STATES, actions=ACTIONS, tasks=TASKS, gamma=GAMMA)
"""Random tasks of the study's size, at a given distance."""


def measure(spread: float, runs: int, seed: int) -> pd.DataFrame:
    """A row for each N and family: suboptimality on the tasks, single and multi, errors on the
    average MDP, and the crossover predicted for all families of this distance.
    """
    family = draw_family(spread=spread, runs=runs, seed=seed)
    average = family.average()
    best = average.backup(average.optimal()[1])
    features = np.eye(STATES * ACTIONS).reshape(STATES, ACTIONS, -1)
    rng = np.random.default_rng(seed)
    frames = []
    counts, drawn = None, 0
    for size in SIZES:
        more = draw_counts(family, size - drawn, noise=NOISE, rng=rng)
        counts, drawn = more if counts is None else counts + more, size
        pool = counts.pooled()
        single = lspi_finite(counts.visits, counts.moves, counts.rewards, features, GAMMA)
        multi = lspi_finite(pool.visits, pool.moves, pool.rewards, features, GAMMA)
        columns = {
            "single": family.suboptimality(single.policy).mean((-1, -2)),
            "multi": family.suboptimality(multi.policy[:, None]).mean((-1, -2)),
            "error": np.sqrt(((multi.action_values - best) ** 2).mean((-1, -2))),
            "average": average.suboptimality(multi.policy).mean(-1),
        }
        frames.append(
            pd.DataFrame({"spread": spread, "samples": size, "run": np.arange(runs), **columns})
        )
    return pd.concat(frames, ignore_index=True).assign(predicted=predicted_crossover(family))


def predicted_crossover(family: MDP) -> float:
    """The N where a task's own noise equals its distance from the pool: sigma^2 (1 - 1/T) / d^2."""
    average = family.average()
    value = average.optimal()[1]
    later = family.kernel @ value[:, None, None, :, None]
    spread = family.kernel @ value[:, None, None, :, None] ** 2 - later**2
    variance = NOISE**2 + GAMMA**2 * spread.mean()
    pairs = family.states * family.actions
    apart = family.reward + GAMMA * later[..., 0]
    distance = ((apart - apart.mean(1, keepdims=True)) ** 2).mean()
    return float(pairs * variance * (1 - 1 / TASKS) / distance) if distance > 1e-20 else np.inf


def crossing(single: np.ndarray, multi: np.ndarray) -> float:
    """The N from which single-task is better, on log axes: 0 where it is at once, inf where never."""
    curves = np.stack([single.mean(-1), multi.mean(-1)])
    lead = -np.diff(np.log(_above_zero(curves)), axis=0)[0]
    if lead[-1] > 0:
        return np.inf
    return 0.0 if lead[0] <= 0 else float(np.exp(log_crossings(curves)))


def log_crossings(curves: Float[np.ndarray, "*resamples 2 sizes"]) -> np.ndarray:
    """The log of where each pair of mean curves crosses, or of the nearest N looked at."""
    lead = -np.diff(np.log(_above_zero(curves)), axis=-2)[..., 0, :]
    place = np.clip(np.argmax(lead <= 0, -1), 1, len(SIZES) - 1)[..., None]
    before, after = (np.take_along_axis(lead, place - back, -1)[..., 0] for back in (1, 0))
    grid, place = np.log(SIZES), place[..., 0]
    with np.errstate(divide="ignore", invalid="ignore"):
        share = before / (before - after)
    between = grid[place - 1] + share * (grid[place] - grid[place - 1])
    late = np.where(lead[..., -1] > 0, grid[-1], between)
    return np.where(lead[..., 0] <= 0, grid[0], late)


def _slope(curves: Float[np.ndarray, "*resamples sizes"]) -> Float[np.ndarray, "*resamples"]:
    """Least-squares slope of the log of a curve against log N."""
    return log_slope(_above_zero(curves), np.array(SIZES))


def _above_zero(curves: np.ndarray) -> np.ndarray:
    """Curves that have logarithms; long samples may leave no suboptimality at all in a few families."""
    return np.maximum(curves, 1e-7)


def plan(*, scale: Scale = "quick", seed: int = 0, families: int | None = None) -> Plan:
    """Multi-task against single-task LSPI: 20 families at quick scale, 100 at the paper's.

    Parameters
    ----------
    families
        Random families at every distance, in place of the scale's number.
    """
    runs = families if families is not None else {"quick": 20, "paper": 100}[scale]
    cells = Cell.each("distance", "spread", SPREADS)
    compute = one_by_one("distance {spread:g}", measure, runs=runs, seed=seed)
    settings = {"families": runs, "scale": scale, "seed": seed}
    return Plan("crossover", cells, compute, conclude, settings)


@concludes("crossover", "When to pool: multi-task against single-task LSPI")
def conclude(rows: pd.DataFrame, settings: dict[str, Any]) -> Conclusion:
    """Table, verdicts and figure from every family at every N."""
    grids = {name: _grid(rows, name) for name in MEASURES}
    measured = [crossing(*arms) for arms in zip(grids["single"], grids["multi"], strict=True)]
    predicted = rows.groupby("spread").predicted.first().to_numpy()
    lines = pd.DataFrame({"spread": SPREADS, "crossover": measured, "predicted": predicted})
    verdicts = (*_verdicts(grids), _prediction_verdict(grids, lines))
    return _table(rows, lines), verdicts, lambda: _plot(grids, lines), _notes(grids, lines)


def _grid(rows: pd.DataFrame, name: str) -> Grid:
    ordered = rows.sort_values(["spread", "samples", "run"])[name].to_numpy()
    return ordered.reshape(len(SPREADS), len(SIZES), -1)


def _table(rows: Any, lines: pd.DataFrame) -> pd.DataFrame:
    means = rows.groupby(["spread", "samples"], as_index=False)[[*MEASURES]].mean()
    return means.assign(families=rows.run.nunique()).merge(lines, on="spread")


def _verdicts(grids: dict[str, Grid]) -> Iterator[Verdict]:
    single, multi = grids["single"], grids["multi"]
    error, average = (of_means(grids[name][0].T, _slope) for name in ("error", "average"))
    small, near, far = SIZES.index(144), SPREADS.index(0.1), SPREADS.index(0.4)
    late = multi[near:, -1]
    steps = [compare(further, closer) for closer, further in pairwise(late)]
    gain, loss = (
        compare(single[0, small], multi[0, small]),
        compare(multi[far, -1], single[far, -1]),
    )
    claim = "the pool's Q error falls like 1/sqrt(NT) (slope in [-.65, -.40])"
    yield Verdict.of(claim, error, above=-0.65, below=-0.40)
    claim = "suboptimality on the average MDP falls at least like 1/sqrt(NT) (slope <= -.5)"
    yield Verdict.of(claim, average, below=-0.5)
    claim = "at N = 9216 multi-task suboptimality grows with the distance (least step, .1 to .8)"
    yield Verdict.of_all(claim, steps)
    claim = "equal tasks, N = 144: pooling beats learning alone (suboptimality saved)"
    yield Verdict.of(claim, gain)
    claim = "distance .4, N = 9216: learning alone beats pooling (suboptimality saved)"
    yield Verdict.of(claim, loss, paper=False)


def _prediction_verdict(grids: dict[str, Grid], lines: pd.DataFrame) -> Verdict:
    crossover, predicted = lines.crossover.to_numpy(), lines.predicted.to_numpy()
    inside = np.flatnonzero((crossover >= SIZES[0]) & (crossover <= SIZES[-1]))
    ratios = []
    for s in inside:
        curves = np.stack([grids[arm][s] for arm in ("single", "multi")]).transpose(2, 0, 1)
        said = math.log(predicted[s])
        ratios.append(of_means(curves, lambda c, said=said: said - log_crossings(c)))
    claim = (
        "the rule behind should_pool predicts every crossover to a factor of 3 (the worst ratio)"
    )
    third = math.log(3)
    return Verdict.of_all(claim, ratios, above=-third, below=third, paper=False).scaled(math.exp)


def _notes(grids: dict[str, Grid], lines: pd.DataFrame) -> tuple[str, ...]:
    small, far = SIZES.index(144), SPREADS.index(0.4)
    single, multi = grids["single"].mean(-1), grids["multi"].mean(-1)
    return (
        f"Equal tasks at N = 144: {multi[0, small]:.4f} pooled against {single[0, small]:.4f} alone.",
        f"Distance .4 at N = 9216: {multi[far, -1]:.4f} pooled against {single[far, -1]:.4f} alone.",
        *(
            f"Distance {spread:g}: {_won(measured)} (predicted crossover {predicted:,.0f})."
            for spread, measured, predicted in lines.to_numpy()
        ),
    )


def _won(crossover: float) -> str:
    if crossover == 0:
        return f"alone wins already at N = {SIZES[0]}"
    if np.isinf(crossover):
        return f"pooling still wins at N = {SIZES[-1]:,}"
    return f"alone wins from N = {crossover:,.0f} a task"


def _plot(grids: dict[str, Grid], lines: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _plot_curves(left, grids)
    mesh = _plot_map(right, grids, lines)
    for axis, ticks in ((left, SIZES), (right, np.arange(len(SIZES)))):
        axis.set_xticks(ticks, [str(size) for size in SIZES], rotation=30)
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    bar = figure.colorbar(mesh, ax=right, ticks=[-2, -1, 0, 1, 2])
    bar.ax.set_yticklabels(["1/100", "1/10", "equal", "10x", "100x"])
    bar.set_label("suboptimality, pooled / alone")
    return figure


def _plot_curves(axis: Axes, grids: dict[str, Grid]) -> None:
    shades = ("#08519c", "#6baed6", "#fdae6b", "#e6550d", "#a63603")
    chosen = (0.0, 0.05, 0.1, 0.2, 0.4)
    alone = grids["single"].mean(-1)
    axis.fill_between(SIZES, alone.min(0), alone.max(0), color="0.75", alpha=0.7, linewidth=0)
    axis.plot(SIZES, alone.mean(0), "k--", label="alone (all distances)")
    for spread, colour in zip(chosen, shades, strict=True):
        curve = grids["multi"][SPREADS.index(spread)].mean(-1)
        axis.plot(
            SIZES, curve, "o-", color=colour, markersize=4, label=f"pooled, distance {spread:g}"
        )
    axis.set(xscale="log", yscale="log", xlabel="samples per task N", ylabel="mean suboptimality")
    axis.set_title("pooling starts lower and stops at its distance")
    axis.legend(frameon=False, fontsize=8.5, loc="lower left")


def _plot_map(axis: Axes, grids: dict[str, Grid], lines: pd.DataFrame) -> QuadMesh:
    multi, single = (_above_zero(grids[arm].mean(-1)) for arm in ("multi", "single"))
    x, y, limit = np.arange(len(SIZES)), np.arange(len(SPREADS)), 2.0
    style = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit, "shading": "nearest"}
    mesh = axis.pcolormesh(x, y, np.log10(multi / single), **style)
    for name, line, label in (("predicted", "k--", "predicted"), ("crossover", "k-o", "measured")):
        inside = lines[name].between(SIZES[0] / 1.4, SIZES[-1] * 1.4)
        # Neighbouring sizes are a factor of two apart.
        across = np.log2(lines[name][inside] / SIZES[0])
        axis.plot(across, np.flatnonzero(inside), line, markersize=5, label=f"{label} crossover")
    axis.set_yticks(range(len(SPREADS)), [f"{spread:g}" for spread in SPREADS])
    axis.set(xlabel="samples per task N", ylabel="distance: share of a task that is its own")
    axis.set(title="blue: pool; red: learn alone", xlim=(-0.5, len(SIZES) - 0.5))
    axis.legend(frameon=True, framealpha=0.9, fontsize=9, loc="lower left")
    return mesh
