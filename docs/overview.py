"""Draws docs/assets/overview.png, the picture of the landing page: python docs/overview.py

Left: tasks drawn from a universe. Middle: what a trained policy gives to campaigns it never saw.
Right: the gain over equal shares against the number of tasks trained on, on the tasks themselves
and on campaigns never seen, with 95 % intervals over runs.
"""

import json
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
from apportion.trees import stack, take

COUNTS = (1, 2, 4, 16, 64)
RUNS = 6
COLOURS = ["#0f766e", "#d97706", "#3b5bdb", "#b3452c", "#7c4dbd"]
FOLDER = Path(__file__).parent / "assets"


def gain(problem, policy, tasks):
    key = jax.random.key(9)
    learned = evaluate(problem, policy, tasks, key=key).mean_reward.mean()
    equal = evaluate(problem, EqualShares(), tasks, key=key).mean_reward.mean()
    return float(learned / equal - 1)


def measure():
    problem = Budget.simulate(universe=60, periods=80, seed=0)
    seen, unseen = split_entities(60, held_out=20)
    fresh = draw_tasks(unseen, 5, 20, seed=1)
    rows, shares = [], None
    for count in COUNTS:
        own = [draw_tasks(seen, 5, count, seed=100 + run) for run in range(RUNS)]
        keys = jax.random.split(jax.random.key(1), RUNS)
        first = eqx.filter_vmap(lambda key: Recurrent(channels=2, hidden=8, key=key))(keys)
        done = train(
            problem,
            stack(own),
            first,
            Direct(16, 1e-2),
            steps=600,
            replay=Replay(warm_up=32, act_periods=1),
            key=keys,
        )
        policies = [take(done.policy, run) for run in range(RUNS)]
        for place, gains in (
            ("own", [gain(problem, p, t) for p, t in zip(policies, own, strict=True)]),
            ("unseen", [gain(problem, p, fresh) for p in policies]),
        ):
            rows.append({"tasks": count, "where": place, **mean_over(np.array(gains)).to_dict()})
        shares = evaluate(problem, policies[0], fresh[:1], key=jax.random.key(9)).allocations[0, 0]
        print(rows[-2:], flush=True)
    return rows, np.asarray(shares)


def draw(rows, shares):
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

    for colour, where, label in (
        ("#d97706", "own", "on the tasks trained on"),
        ("#0f766e", "unseen", "on campaigns never seen"),
    ):
        chosen = [row for row in rows if row["where"] == where]
        x = [row["tasks"] for row in chosen]
        low, middle, high = ([100 * row[k] for row in chosen] for k in ("low", "value", "high"))
        curve.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        curve.plot(x, middle, "o-", color=colour, linewidth=2, markersize=5, label=label)
    curve.set_xscale("log", base=2)
    curve.set_xticks(COUNTS, [str(count) for count in COUNTS])
    curve.set_title("more tasks: less over-fitting", loc="left", fontsize=11)
    curve.set(xlabel="tasks trained on, same number of updates", ylabel="gain over equal shares, %")
    curve.legend(frameon=False, fontsize=9)
    for axes in (stack, curve):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    rows, shares = measure()
    measured = {"gains": rows, "shares": shares.round(4).tolist()}
    (FOLDER / "overview.json").write_text(json.dumps(measured) + "\n")
    draw(rows, shares).savefig(FOLDER / "overview.png", dpi=150)
