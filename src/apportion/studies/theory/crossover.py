"""When to pool: multi-task against single-task LSPI over N and the distance of the tasks.

Data: random families of 8 tasks (12 states, 3 actions, gamma .7), samples drawn uniformly over
state-action pairs. Table: mean suboptimality of both at every N and distance. Claims: Corollary 1's
1/sqrt(NT) and its eps; and the line, which the paper does not draw, where one overtakes the other.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from apportion.statistics import Estimate, bootstrap, compare
from apportion.studies.study import Study, Verdict
from apportion.theory.lspi import lspi_finite
from apportion.theory.mdp import MDP, random_family
from apportion.theory.samples import draw_counts

STATES, ACTIONS, TASKS, GAMMA, NOISE = 12, 3, 8, 0.7, 0.1
SIZES = (72, 144, 288, 576, 1152, 2304, 4608, 9216)
SPREADS = (0.0, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)

Grid = Float[np.ndarray, "spreads sizes runs"]


def measure(spread: float, runs: int, seed: int) -> dict[str, Float[np.ndarray, "sizes runs"]]:
    """Suboptimality on the tasks, single and multi, and errors on the average MDP, for every N."""
    family = random_family(
        states=STATES,
        actions=ACTIONS,
        tasks=TASKS,
        spread=spread,
        gamma=GAMMA,
        runs=runs,
        seed=seed,
    )
    average = family.average()
    best = average.backup(average.optimal()[1])
    features = np.eye(STATES * ACTIONS).reshape(STATES, ACTIONS, -1)
    rng = np.random.default_rng(seed)
    rows = []
    counts, drawn = None, 0
    for size in SIZES:
        more = draw_counts(family, size - drawn, noise=NOISE, rng=rng)
        counts, drawn = more if counts is None else counts + more, size
        pool = counts.pooled()
        single = lspi_finite(counts.visits, counts.moves, counts.rewards, features, GAMMA)
        multi = lspi_finite(pool.visits, pool.moves, pool.rewards, features, GAMMA)
        rows.append(
            {
                "single": family.suboptimality(single.policy).mean((-1, -2)),
                "multi": family.suboptimality(multi.policy[:, None]).mean((-1, -2)),
                "error": np.sqrt(((multi.action_values - best) ** 2).mean((-1, -2))),
                "average": average.suboptimality(multi.policy).mean(-1),
            }
        )
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


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
    lead = np.log(single.mean(-1)) - np.log(multi.mean(-1))
    if lead[-1] > 0:
        return np.inf
    if lead[0] <= 0:
        return 0.0
    place = int(np.argmax(lead <= 0))
    share = lead[place - 1] / (lead[place - 1] - lead[place])
    grid = np.log(SIZES)
    return float(np.exp(grid[place - 1] + share * (grid[place] - grid[place - 1])))


def _over_runs(values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A statistic of the mean over runs (the last axis), with a bootstrap interval."""

    def resampled(runs, axis=-1):
        return statistic(np.moveaxis(values, -1, 0)[runs.astype(int)].mean(runs.ndim - 1))

    return bootstrap(np.arange(values.shape[-1], dtype=float), resampled, resamples=2000)


def _slope(curves: Float[np.ndarray, "*resamples sizes"]) -> np.ndarray:
    x = np.log(SIZES) - np.log(SIZES).mean()
    # Long samples may leave no suboptimality at all in a few families.
    return (np.log(np.maximum(curves, 1e-7)) * x).sum(-1) / (x**2).sum()


def run(
    *,
    families: int | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> Study:
    """Multi-task against single-task LSPI: 20 families at quick scale, 100 at the paper's.

    Parameters
    ----------
    families
        Random families at every distance, in place of the scale's number.
    """
    runs = families if families is not None else {"quick": 20, "paper": 100}[scale]
    results = []
    for number, spread in enumerate(SPREADS):
        if progress is not None:
            progress(f"distance {spread:g}", number / len(SPREADS))
        results.append(measure(spread, runs, seed))
    grids = {name: np.stack([result[name] for result in results]) for name in results[0]}
    lines = pd.DataFrame(
        {
            "spread": SPREADS,
            "crossover": [crossing(r["single"], r["multi"]) for r in results],
            "predicted": [
                predicted_crossover(
                    random_family(
                        states=STATES,
                        actions=ACTIONS,
                        tasks=TASKS,
                        spread=s,
                        gamma=GAMMA,
                        runs=runs,
                        seed=seed,
                    )
                )
                for s in SPREADS
            ],
        }
    )
    return Study(
        name="crossover",
        title="When to pool: multi-task against single-task LSPI",
        table=_table(grids, lines),
        verdicts=(*_judge(grids), _judge_prediction(grids, lines)),
        draw=lambda: _draw(grids, lines),
        readings=_read(grids, lines),
        settings={"families": runs, "scale": scale, "seed": seed},
    )


def _table(grids: dict[str, Grid], lines: pd.DataFrame) -> pd.DataFrame:
    rows = [
        {
            "spread": spread,
            "samples": size,
            **{name: grid[s, n].mean() for name, grid in grids.items()},
            "families": grids["multi"].shape[-1],
        }
        for s, spread in enumerate(SPREADS)
        for n, size in enumerate(SIZES)
    ]
    return pd.DataFrame(rows).merge(lines, on="spread")


def _judge(grids: dict[str, Grid]) -> tuple[Verdict, ...]:
    single, multi = grids["single"], grids["multi"]
    error, average = (_over_runs(grids[name][0], _slope) for name in ("error", "average"))
    small, near, far = SIZES.index(144), SPREADS.index(0.1), SPREADS.index(0.4)
    steps = _over_runs(multi[near:, -1], lambda c: np.diff(c, axis=-1).min(-1))
    gain, loss = (
        compare(single[0, small], multi[0, small]),
        compare(multi[far, -1], single[far, -1]),
    )
    return (
        Verdict.of(
            "the pool's Q error falls like 1/sqrt(NT) (slope in [-.65, -.40])",
            error,
            holds=-0.65 <= error.value <= -0.40,
        ),
        Verdict.of(
            "suboptimality on the average MDP falls at least like 1/sqrt(NT) (slope <= -.5)",
            average,
            holds=average.value <= -0.5,
        ),
        Verdict.of(
            "at N = 9216 multi-task suboptimality grows with the distance (least step, .1 to .8)",
            steps,
            holds=steps.above_zero,
        ),
        Verdict.of(
            "equal tasks, N = 144: pooling beats learning alone (suboptimality saved)",
            gain,
            holds=gain.above_zero,
        ),
        Verdict.of(
            "distance .4, N = 9216: learning alone beats pooling (suboptimality saved)",
            loss,
            holds=loss.above_zero,
            paper=False,
        ),
    )


def _judge_prediction(grids: dict[str, Grid], lines: pd.DataFrame) -> Verdict:
    crossover, predicted = lines.crossover.to_numpy(), lines.predicted.to_numpy()
    inside = np.flatnonzero((crossover >= SIZES[0]) & (crossover <= SIZES[-1]))
    ratios = predicted[inside] / crossover[inside]
    runs = grids["single"].shape[-1]
    draws = np.random.default_rng(0).integers(0, runs, (400, runs))
    again = [
        np.median(
            [
                predicted[s]
                / max(crossing(*(grids[arm][s][:, d] for arm in ("single", "multi"))), 1)
                for s in inside
            ]
        )
        for d in draws
    ]
    low, high = np.quantile(again, [0.025, 0.975])
    claim = "the rule behind should_pool predicts every crossover to a factor of 3 (median ratio)"
    holds = bool(ratios.min() >= 1 / 3 and ratios.max() <= 3)
    return Verdict(
        claim, holds, float(np.median(ratios)), (float(low), float(high)), runs, paper=False
    )


def _read(grids: dict[str, Grid], lines: pd.DataFrame) -> tuple[str, ...]:
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


def _draw(grids: dict[str, Grid], lines: pd.DataFrame) -> Figure:
    figure = Figure(figsize=(13, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.15))
    shades = ("#08519c", "#6baed6", "#fdae6b", "#e6550d", "#a63603")
    chosen = (0.0, 0.05, 0.1, 0.2, 0.4)
    alone = grids["single"].mean(-1)
    left.fill_between(SIZES, alone.min(0), alone.max(0), color="0.75", alpha=0.7, linewidth=0)
    left.plot(SIZES, alone.mean(0), "k--", label="alone (all distances)")
    for spread, colour in zip(chosen, shades, strict=True):
        curve = grids["multi"][SPREADS.index(spread)].mean(-1)
        left.plot(
            SIZES, curve, "o-", color=colour, markersize=4, label=f"pooled, distance {spread:g}"
        )
    left.set(xscale="log", yscale="log", xlabel="samples per task N", ylabel="mean suboptimality")
    left.set_title("pooling starts lower and stops at its distance")
    left.legend(frameon=False, fontsize=8.5, loc="lower left")
    ratio = np.log10(grids["multi"].mean(-1) / grids["single"].mean(-1))
    limit = 2.0
    places = np.arange(len(SIZES))
    mesh = right.pcolormesh(
        places,
        np.arange(len(SPREADS)),
        ratio,
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        shading="nearest",
    )
    for name, style, label in (("predicted", "k--", "predicted"), ("crossover", "k-o", "measured")):
        inside = lines[name].between(SIZES[0] / 1.4, SIZES[-1] * 1.4)
        # Neighbouring sizes are a factor of two apart.
        across = np.log2(lines[name][inside] / SIZES[0])
        right.plot(across, np.flatnonzero(inside), style, markersize=5, label=f"{label} crossover")
    right.set_yticks(range(len(SPREADS)), [f"{spread:g}" for spread in SPREADS])
    right.set(xlabel="samples per task N", ylabel="distance: share of a task that is its own")
    right.set(title="blue: pool; red: learn alone", xlim=(-0.5, len(SIZES) - 0.5))
    right.legend(frameon=True, framealpha=0.9, fontsize=9, loc="lower left")
    for axis, ticks in ((left, SIZES), (right, places)):
        axis.set_xticks(ticks, [str(size) for size in SIZES], rotation=30)
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    bar = figure.colorbar(mesh, ax=right, ticks=[-2, -1, 0, 1, 2])
    bar.ax.set_yticklabels(["1/100", "1/10", "equal", "10x", "100x"])
    bar.set_label("suboptimality, pooled / alone")
    return figure
