"""Draws docs/assets/overview.png, the picture of the landing page.

    python docs/overview.py            measures, some minutes, and draws
    python docs/overview.py --draw     draws what was measured

Left: tasks drawn from a universe. Middle: what a trained policy gives to campaigns it never saw.
Right: the gain over equal shares on campaigns never seen against the number of tasks trained on, after
all updates and with the best possible number of updates for each run, which only those campaigns
themselves could reveal. The numbers are in docs/assets/overview.json.
"""

import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
from matplotlib.figure import Figure

from apportion import Direct, Recurrent, Replay, draw_tasks, split_entities, train
from apportion.certify.statistics import mean_over
from apportion.composition import EqualShares
from apportion.domains.budget.problem import Budget
from apportion.problem import evaluate
from apportion.training import Chunks
from apportion.trees import stack, take

COUNTS = (1, 4, 16, 64)
UNIVERSES, RUNS = 4, 24
STEPS, EVERY = 1200, 25
COLOURS = ["#0f766e", "#d97706", "#3b5bdb", "#b3452c", "#7c4dbd"]
FOLDER = Path(__file__).parent / "assets"
CURVES = {
    "last": ("#d97706", f"after {STEPS:,} updates"),
    "best": ("#0f766e", "each run stopped at its best"),
}


@eqx.filter_jit
def rewards(problem, policies, tasks):
    """The mean reward of each policy."""

    def one(policy):
        return evaluate(problem, policy, tasks, key=jax.random.key(9)).mean_reward.mean()

    return eqx.filter_vmap(one)(policies)


def learning_curves(universe, count):
    """The gain on unseen campaigns every few updates, runs by times; and shares on the first task."""
    problem = Budget.simulate(universe=60, periods=80, seed=universe)
    seen, unseen = split_entities(60, held_out=20, seed=universe)
    fresh = draw_tasks(unseen, 5, 20, seed=1)
    own = [draw_tasks(seen, 5, count, seed=100 + run) for run in range(RUNS)]
    keys = jax.random.split(jax.random.key(1 + universe), RUNS)
    first = eqx.filter_vmap(lambda key: Recurrent(channels=2, hidden=8, key=key))(keys)
    equal = float(evaluate(problem, EqualShares(), fresh, key=jax.random.key(9)).mean_reward.mean())
    found = []

    def on_chunk(chunk):
        found.append(np.asarray(rewards(problem, chunk.policy, fresh)) / equal - 1)

    done = train(
        problem,
        stack(own),
        first,
        Direct(16, 1e-2),
        steps=STEPS,
        replay=Replay(warm_up=32, act_periods=1),
        chunks=Chunks(EVERY, EVERY, on_chunk),
        key=keys,
    )
    shown = evaluate(problem, take(done.policy, 0), fresh[:1], key=jax.random.key(9))
    return np.stack(found, 1), np.asarray(shown.allocations[0, 0])


def summarise(count, curves):
    """The gains of all runs after all updates and at their best, and the interval over runs.

    `curves` is universes by runs by times. What universes differ by is taken off before the interval.
    """
    rows = []
    for name, gains in (("last", curves[..., -1]), ("best", curves.max(-1))):
        centred = gains - gains.mean(1, keepdims=True) + gains.mean()
        e = mean_over(centred.ravel())
        row = {"tasks": count, "stopped": name, "value": e.value, "low": e.low, "high": e.high}
        row |= {"runs": e.n, "universes": gains.mean(1).astype(float).round(5).tolist()}
        rows.append(row)
    steps = EVERY * (1 + curves.argmax(-1))
    return [*rows[:-1], rows[-1] | {"median updates": int(np.median(steps))}]


def measure():
    rows, shares = [], None
    for count in COUNTS:
        found = [learning_curves(universe, count) for universe in range(UNIVERSES)]
        rows += summarise(count, np.stack([curves for curves, _ in found]))
        shares = found[0][1]
        print(rows[-2:], flush=True)
    return {
        "gains": rows,
        "universes": UNIVERSES,
        "runs in each": RUNS,
        "updates": STEPS,
        "tested every": EVERY,
        "shares": np.asarray(shares).round(4).tolist(),
    }


def draw(measured):
    rows, shares = measured["gains"], np.array(measured["shares"])
    figure = Figure(figsize=(12, 3.9), layout="constrained")
    universe, stack, curve = figure.subplots(1, 3, width_ratios=[1, 1.25, 1.25])
    seen, unseen = split_entities(60, held_out=20)
    column = {entity: place for place, entity in enumerate([*seen, *unseen])}
    tasks = np.asarray(draw_tasks(seen, 5, 12, seed=3).members)
    universe.axvspan(39.5, 60, color="#eceeea", linewidth=0)
    for row, task in enumerate(tasks):
        universe.plot([-0.5, 60], [row, row], color="#dcdfd9", linewidth=0.7, zorder=1)
        colour = COLOURS[row % len(COLOURS)]
        universe.scatter([column[i] for i in task], [row] * 5, s=30, color=colour, zorder=3)
    universe.text(50, -1.1, "never trained on", ha="center", fontsize=9, color="#5d6965")
    universe.set_title("tasks: subsets of a universe", loc="left", fontsize=11)
    universe.set(xlim=(-1, 60), ylim=(11.7, -1.8), xlabel="60 entities", ylabel="task")
    universe.set(xticks=[], yticks=[])
    universe.spines[:].set_visible(False)

    stack.stackplot(np.arange(len(shares)), shares.T, colors=COLOURS, alpha=0.85)
    stack.set_title("one policy, on campaigns it never saw", loc="left", fontsize=11)
    stack.set(xlim=(0, len(shares) - 1), ylim=(0, 1), xlabel="period", ylabel="share of the budget")

    for name, (colour, label) in CURVES.items():
        chosen = [row for row in rows if row["stopped"] == name]
        x = [row["tasks"] for row in chosen]
        low, middle, high = ([100 * row[k] for row in chosen] for k in ("low", "value", "high"))
        curve.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        curve.plot(x, middle, "o-", color=colour, linewidth=2, markersize=5, label=label)
    curve.set_xscale("log", base=2)
    curve.set_xticks(COUNTS, [str(count) for count in COUNTS])
    curve.set_title("gain on campaigns never seen", loc="left", fontsize=11)
    curve.set(xlabel="tasks trained on", ylabel="gain over equal shares, %", ylim=(0, None))
    curve.legend(frameon=False, fontsize=9)
    for axes in (stack, curve):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    if sys.argv[1:] != ["--draw"]:
        (FOLDER / "overview.json").write_text(json.dumps(measure()) + "\n")
    measured = json.loads((FOLDER / "overview.json").read_text())
    draw(measured).savefig(FOLDER / "overview.png", dpi=150)
