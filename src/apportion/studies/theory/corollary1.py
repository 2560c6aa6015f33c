"""Corollary 1 in the number of tasks: how fast suboptimality falls with T, and the floor that eps sets.

Data: random families of 64 tasks (6 states, 3 actions, gamma .7), N = 36 samples of each, drawn
uniformly over state-action pairs. LSPI learns from the pool of the first T tasks and is held against
the optimum of each of them; the floor is what the average MDP's own optimum loses there, without any
sampling. The corollary's O(1/sqrt(NT)) and O(eps) are upper bounds: each is tried as a bound, and as
a rate. A cell is a distance of the tasks; a row is a family at one T.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from apportion.statistics import compare, mean_over, of_means
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import error_bars, panels
from apportion.studies.registry import Scale
from apportion.studies.study import Conclusion, Verdict, concludes
from apportion.studies.theory.families import log_slope, never_broken, one_by_one
from apportion.theory.concentrability import concentrability
from apportion.theory.distance import distance_by_enumeration
from apportion.theory.lspi import lspi_finite
from apportion.theory.mdp import MDP, norm, random_family
from apportion.theory.samples import Counts, draw_counts

STATES, ACTIONS, GAMMA, SAMPLES, NOISE = 6, 3, 0.7, 36, 0.1
TASKS = (1, 2, 4, 8, 16, 32, 64)
LATE = TASKS.index(8)
"""From here on every state-action pair has 16 samples or more, and rates are rates."""
SPREADS = (0.0, 0.05, 0.1, 0.2, 0.4)
_UNIFORM = np.full(STATES, 1 / STATES)
_FEATURES = np.eye(STATES * ACTIONS).reshape(STATES, ACTIONS, -1)

Curves = Float[np.ndarray, "runs tasks"]
draw_family = partial(random_family, states=STATES, actions=ACTIONS, tasks=TASKS[-1], gamma=GAMMA)
"""Random tasks of the study's size, at a given distance."""


def measure(spread: float, runs: int, seed: int) -> pd.DataFrame:
    """A row for each family and T: what the pool's policy loses, the floor, and the error of its Q.

    The distance eps and its term in Theorem 1' are those of all 64 tasks.
    """
    family = draw_family(spread=spread, runs=runs, seed=seed)
    counts = draw_counts(family, SAMPLES, noise=NOISE, rng=np.random.default_rng(seed))
    best = family.optimal()[1]
    epsilon, share = _distances(family, best)
    frames = []
    for number in TASKS:
        part = family[:, :number]
        average = part.average()
        top, value = average.optimal()
        pool = Counts(
            counts.visits[:, :number], counts.moves[:, :number], counts.rewards[:, :number]
        ).pooled()
        learned = lspi_finite(pool.visits, pool.moves, pool.rewards, _FEATURES, GAMMA)
        off = learned.action_values - average.backup(value)
        columns = {
            "loss": (best[:, :number] - part.value(learned.policy[:, None])).mean((-1, -2)),
            "floor": (best[:, :number] - part.value(top[:, None])).mean((-1, -2)),
            "error": np.sqrt((off**2).mean((-1, -2))),
            "epsilon": epsilon,
            "share": share,
        }
        frames.append(
            pd.DataFrame({"spread": spread, "tasks": number, "run": np.arange(runs), **columns})
        )
    return pd.concat(frames, ignore_index=True)


def _distances(family: MDP, best: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean eps of a family's tasks, and the largest share a task's floor takes of its eps term."""
    average = family.average()
    distance = distance_by_enumeration(family, average[:, None], _UNIFORM)
    first = concentrability(family.kernel, GAMMA, sigma=_UNIFORM, mu=_UNIFORM).first
    floor = norm(best - family.value(average.optimal()[0][:, None]), _UNIFORM)
    term = 2 * distance * np.sqrt(first) / (1 - GAMMA)
    with np.errstate(invalid="ignore"):
        share = np.where(distance > 1e-12, floor / term, 0.0)
    return distance.mean(-1), share.max(-1)


def plan(*, scale: Scale = "quick", seed: int = 0, families: int | None = None) -> Plan:
    """Suboptimality against T and eps: 40 families at quick scale, 400 at the paper's.

    Parameters
    ----------
    families
        Random families at every distance, in place of the scale's number.
    """
    runs = families if families is not None else {"quick": 40, "paper": 400}[scale]
    cells = Cell.each("distance", "spread", SPREADS)
    compute = one_by_one("distance {spread:g}", measure, runs=runs, seed=seed)
    settings = {"families": runs, "samples": SAMPLES, "scale": scale, "seed": seed}
    return Plan("corollary1", cells, compute, conclude, settings)


@concludes(
    "corollary1",
    "Corollary 1: suboptimality against the number of tasks, and the floor that eps sets",
)
def conclude(rows: pd.DataFrame, settings: dict[str, Any]) -> Conclusion:
    """Table, verdicts and figure from every family at every T."""
    curves = {name: _curves(rows, name) for name in ("loss", "floor", "error", "epsilon", "share")}
    verdicts = (*_rate_verdicts(curves), *_floor_verdicts(curves), _inside_verdict(rows))
    return _table(curves), verdicts, lambda: _plot(curves), _notes(curves)


def _curves(rows: pd.DataFrame, name: str) -> dict[float, Curves]:
    """Families by T, for each distance."""
    return {
        spread: rows[rows.spread == spread]
        .pivot(index="run", columns="tasks", values=name)
        .to_numpy()
        for spread in SPREADS
    }


def _table(curves: dict[str, dict[float, Curves]]) -> pd.DataFrame:
    rows = []
    for spread in SPREADS:
        for t, number in enumerate(TASKS):
            loss = mean_over(curves["loss"][spread][:, t])
            rest = {name: curves[name][spread][:, t].mean() for name in ("floor", "error")}
            ends = {"loss": loss.value, "low": loss.low, "high": loss.high}
            epsilon = curves["epsilon"][spread][:, t].mean()
            rows.append(
                {"spread": spread, "tasks": number, **ends, **rest, "epsilon": epsilon, "n": loss.n}
            )
    return pd.DataFrame(rows).round(9)


def _rate_verdicts(curves: dict[str, dict[float, Curves]]) -> Iterator[Verdict]:
    late = np.asarray(TASKS[LATE:], float)
    loss, error = (
        of_means(curves[name][0.0][:, LATE:], lambda mean: log_slope(mean, late))
        for name in ("loss", "error")
    )
    equal = curves["loss"][0.0]
    claim = "equal tasks: the error of Q falls like 1/sqrt(T) (slope, T >= 8, in [-.6, -.4])"
    yield Verdict.of(claim, error, above=-0.6, below=-0.4)
    claim = "equal tasks: suboptimality falls at least like 1/sqrt(T) (slope, T >= 8, <= -.5)"
    yield Verdict.of(claim, loss, below=-0.5)
    claim = "equal tasks: and no faster, as a rate would have it (slope, T >= 8, >= -.6)"
    yield Verdict.of(claim, loss, above=-0.6, paper=False)
    claim = "equal tasks: twice the tasks always lose less (least step)"
    yield Verdict.of_all(claim, [compare(few, more) for few, more in pairwise(equal.T)])


def _floors(curves: dict[str, dict[float, Curves]]) -> Float[np.ndarray, "runs two spreads"]:
    """The floor and eps of all 64 tasks, in the families of every distance above 0."""
    return np.stack(
        [
            np.stack([curves[name][spread][:, -1] for spread in SPREADS[1:]], -1)
            for name in ("floor", "epsilon")
        ],
        1,
    )


def _floor_verdicts(curves: dict[str, dict[float, Curves]]) -> Iterator[Verdict]:
    slope = of_means(_floors(curves), lambda m: log_slope(m[..., 0, :], m[..., 1, :]))
    far = np.stack([curves[name][SPREADS[-1]][:, -1] for name in ("loss", "floor")], -1)
    met = of_means(far, lambda m: np.log(m[..., 0] / m[..., 1]))
    claim = "distance .4: 64 tasks lose what the floor says, to a tenth (loss / floor)"
    yield Verdict.of(claim, met, above=-np.log(1.1), below=np.log(1.1)).scaled(
        lambda x: float(np.exp(x))
    )
    claim = "the floor grows no slower than eps (slope in eps, >= 1)"
    yield Verdict.of(claim, slope, above=1.0)
    claim = "the floor is proportional to eps (slope in eps, <= 1.2)"
    yield Verdict.of(claim, slope, below=1.2, paper=False)


def _inside_verdict(rows: pd.DataFrame) -> Verdict:
    claim = (
        "the floor exceeds the eps term of Theorem 1' on a task of no family (share of families)"
    )
    # The same families at several distances are one unit.
    return never_broken(rows, "share", claim, by=["run"])


def _notes(curves: dict[str, dict[float, Curves]]) -> tuple[str, ...]:
    loss, floor = ({s: curves[name][s].mean(0) for s in SPREADS} for name in ("loss", "floor"))
    shares = np.concatenate([curves["share"][spread][:, -1] for spread in SPREADS[1:]])
    return (
        f"Equal tasks lose {loss[0.0][0]:.4f} alone and {loss[0.0][-1]:.5f} in a pool of 64: the value's "
        "error falls like 1/sqrt(T), and what the policy loses falls like its square, about 1/T.",
        "The corollary's rate is an upper bound and no rate: a policy loses only where an error changes "
        "its action, which is the rarer the smaller the error is.",
        *(
            f"Distance {s:g}: alone {loss[s][0]:.4f}, 64 pooled {loss[s][-1]:.4f}, floor "
            f"{floor[s][-1]:.4f} at eps {curves['epsilon'][s].mean():.4f}."
            for s in SPREADS[1:]
        ),
        f"A task's floor is at most {shares.max():.2f} of its eps term in Theorem 1'.",
    )


_SHADES = ("#08519c", "#6baed6", "#fdae6b", "#e6550d", "#a63603")


def _plot(curves: dict[str, dict[float, Curves]]) -> Figure:
    figure, (left, right) = panels(13, 4.6)
    _plot_tasks(left, curves)
    _plot_floor(right, curves)
    return figure


def _plot_tasks(axis: Axes, curves: dict[str, dict[float, Curves]]) -> None:
    for spread, colour in zip(SPREADS, _SHADES, strict=True):
        ends = [mean_over(column) for column in curves["loss"][spread].T]
        label = f"distance {spread:g}" if spread else "equal tasks"
        axis.plot(TASKS, [e.value for e in ends], "o-", color=colour, label=label, markersize=4)
        low = [max(e.low, 1e-5) for e in ends]
        axis.fill_between(TASKS, low, [e.high for e in ends], color=colour, alpha=0.2, linewidth=0)
        if spread:
            floor = curves["floor"][spread].mean(0)
            axis.plot(TASKS[1:], floor[1:], ":", color=colour)
    late = np.asarray(TASKS[LATE:], float)
    start = curves["loss"][0.0][:, LATE].mean()
    for power, style in ((-0.5, "--"), (-1.0, "-.")):
        line = start * (late / late[0]) ** power
        axis.plot(late, line, style, color="0.35", linewidth=1, label=f"slope {power:g}")
    axis.set(xscale="log", yscale="log", xlabel="tasks T, 36 samples each")
    axis.set(ylabel="mean suboptimality", title="more tasks help down to the floor (dotted)")
    axis.set_xticks(TASKS, [str(t) for t in TASKS])
    axis.minorticks_off()
    axis.legend(frameon=False, fontsize=8.5, loc="lower left")


def _plot_floor(axis: Axes, curves: dict[str, dict[float, Curves]]) -> None:
    floor, epsilon = _floors(curves).mean(0)
    ends = [mean_over(column) for column in _floors(curves)[:, 0].T]
    error_bars(axis, epsilon, ends, fmt="o-", color="#e6550d", label="floor of 64 tasks")
    for power, style in ((1.0, "--"), (2.0, "-.")):
        line = floor[0] * (epsilon / epsilon[0]) ** power
        axis.plot(epsilon, line, style, color="0.35", linewidth=1, label=f"slope {power:g}")
    axis.set(xscale="log", yscale="log", xlabel="distance ε of a task from the average (mean)")
    axis.set(ylabel="floor: suboptimality without sampling", title="the floor against ε")
    axis.legend(frameon=False, fontsize=9)
