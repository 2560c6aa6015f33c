"""Beyond the paper's federation: unequal tasks, other partitions and sizes, and byzantine clients.

Claims, all ours: prioritisation pays where tasks differ in difficulty; a policy trained on one split
of 10 clients carries over to others; learned shares withstand label flipping as well as the median,
the trimmed mean and Krum. Each is measured against FedAvg on the same batches. A cell is one trained
policy, or one aggregator that learns nothing, of one seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.federated.aggregators import (
    UNIFORM,
    Aggregator,
    Krum,
    Median,
    PolicyAggregator,
    TrimmedMean,
    run_episode_sets,
)
from apportion.domains.federated.digits import Digits, embedded_digits
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.training import (
    build,
    evaluation_keys,
    read_digits,
    train_policies,
)
from apportion.errors import InputError
from apportion.statistics import compare
from apportion.studies.cells import Cell, Plan, Progress, Rows
from apportion.studies.federated.worlds import (
    FLIPPED,
    World,
    flipped_labels,
    other_federations,
    unequal_tasks,
)
from apportion.studies.registry import Scale
from apportion.studies.study import Study, Verdict
from apportion.tasks import TaskSets
from apportion.trees import take

DEFENCES: dict[str, Aggregator] = {
    "FedAvg": UNIFORM,
    "median": Median(),
    "trimmed mean": TrimmedMean(0.3),
    "Krum": Krum(3),
}
PRIORITIES = {
    "the paper's": {"scorer": "reward-variance", "alpha": 0.5, "beta": 1.0},
    "reward variance": {"scorer": "reward-variance", "alpha": 1.0, "beta": 0.0},
    "gradient norm": {"scorer": "gradient-norm", "alpha": 1.0, "beta": 0.0},
    "realised gain": {"scorer": "realised-gain", "alpha": 1.0, "beta": 0.0},
}
"""Ways to sample tasks where they are unequal: the paper's corrects the bias, the others keep it."""
TITLES = {
    "unequal": "tasks of unequal difficulty",
    "transfer": "policies carried over",
    "poisoned": "label-flipping clients",
}
FEW = 5
"""Seeds below which a bootstrap interval over them is no evidence."""

Found = dict[tuple[str, str], dict[str, np.ndarray]]
"""Test accuracy (seeds, rounds) of each method, by experiment and setting."""


def sizes(scale: Scale, *, seed: int = 0) -> FederatedSettings:
    """Settings of the experiments; `paper` has clients enough for tasks of 50."""
    if scale == "paper":
        return FederatedSettings(
            clients=(120, 60), seen=(70, 40), unseen=4, test=4000, steps=24, seed=seed
        )
    return FederatedSettings(
        model="perceptron", width=32, rounds=8, unseen=4, steps=8, samples=60, seed=seed
    )


def plan(*, scale: Scale = "quick", seed: int = 0, digits: Digits | None = None) -> Plan:
    """The cells of all three experiments; `paper` needs all of MNIST, and a GPU.

    `quick` shows the policy the richer state only, and tries fewer priorities and sizes.
    """
    if scale == "paper" and digits is None:
        raise InputError("federations at paper size need the whole of MNIST: give --mnist FILE")
    seeds, states = range(seed, seed + 6), ("accuracy", "rich")
    priorities, widths = tuple(PRIORITIES), (5, 20, 50)
    if scale == "quick":
        seeds, states = range(seed, seed + 2), ("rich",)
        priorities, widths = ("the paper's", "realised gain"), (5, 20)
    settings = sizes(scale, seed=seed)
    data = (embedded_digits() if digits is None else digits).summary()
    extent = {"seeds": list(seeds), "states": states, "priorities": priorities, "widths": widths}
    return Plan(
        "federations",
        tuple(_cell(values, own) for values in _runs(states, priorities) for own in seeds),
        partial(compute, settings=settings, widths=widths, digits=digits),
        conclude,
        {"data": data, **settings.to_dict(), **extent},
    )


def _runs(states: Sequence[str], priorities: Sequence[str]) -> Iterator[dict[str, str]]:
    """What is computed for every seed, as a cell's values; `method` is one of Algorithm 1's, or an
    aggregator that learns nothing.
    """
    for state in states:
        own = {"experiment": "unequal", "setting": f"{state} state", "state": state}
        yield own | {"label": "FedAvg", "method": "FedAvg", "priority": ""}
        yield own | {"label": "MTL", "method": "mtl", "priority": priorities[0]}
        for priority in priorities:
            yield own | {"label": f"P-MTL, {priority}", "method": "pmtl", "priority": priority}
    others = [("transfer", "", ("FedAvg",)), *(("poisoned", kind, DEFENCES) for kind in FLIPPED)]
    for experiment, setting, baselines in others:
        own = {"experiment": experiment, "setting": setting, "priority": ""}
        for state in states:
            yield own | {"label": f"MTL, {state} state", "method": "mtl", "state": state}
        for name in baselines:
            yield own | {"label": name, "method": name, "state": states[0]}


def _cell(values: dict[str, str], seed: int) -> Cell:
    """A cell; those of one priority, and seeds of one aggregator, share a program."""
    where, label = (values["experiment"], values["setting"]), values["label"]
    return Cell(
        _joined(*where, label, str(seed)),
        values | {"seed": seed},
        program=_joined(*where, values["priority"] or label),
    )


def _joined(*words: str) -> str:
    """Words as a file's name.

    Examples
    --------
    >>> _joined("unequal", "rich state", "P-MTL, the paper's")
    'unequal-rich-state-p-mtl-the-papers'
    """
    plain = "-".join(filter(None, words)).lower().replace(" ", "-")
    return "".join(letter for letter in plain if letter.isalnum() or letter == "-")


def compute(
    cells: Sequence[Cell],
    progress: Progress,
    *,
    settings: FederatedSettings,
    widths: Sequence[int],
    digits: Digits | None = None,
) -> Rows:
    """Train the cells' policies in one `vmap`, then try all of them in every setting."""
    first, seeds = cells[0], [cell["seed"] for cell in cells]
    digits = read_digits(settings) if digits is None else digits
    world = _world(first, replace(settings, state=first["state"]), digits, widths)
    if first["method"] in DEFENCES:
        aggregators = DEFENCES[first["method"]]
    else:
        aggregators = _trained(world, digits, cells, progress)
    frames: list[list[pd.DataFrame]] = [[] for _ in cells]
    for setting, (partition, tasks) in world.tried.items():
        federation, _ = build(world.settings, digits, partition)
        unseen = TaskSets.of([tasks(seed) for seed in seeds])
        keys = evaluation_keys(seeds, settings.unseen)
        record = run_episode_sets(federation, aggregators, unseen, keys)
        for run, cell in enumerate(cells):
            rows = take(record, run).to_frame()[["task", "round", "tested"]]
            about = {"experiment": cell["experiment"], "setting": setting, "method": cell["label"]}
            frames[run].append(rows.assign(**about, seed=cell["seed"]))
    for cell, own in zip(cells, frames, strict=True):
        yield cell, pd.concat(own, ignore_index=True)
    progress(f"{first.program}: tried on unseen tasks", 1.0)


def _world(cell: Cell, settings: FederatedSettings, digits: Digits, widths: Sequence[int]) -> World:
    match cell["experiment"]:
        case "unequal":
            return unequal_tasks(settings, digits)
        case "transfer":
            return other_federations(settings, digits, widths)
        case _:
            return flipped_labels(settings, digits, cell["setting"])


def _trained(world: World, digits: Digits, cells: Sequence[Cell], progress: Progress) -> Aggregator:
    federation, _ = build(world.settings, digits, world.partition)

    def report_progress(chunk):
        what = f"{cells[0].program}: {chunk.step} of {chunk.steps} updates"
        progress(what, 0.8 * chunk.step / chunk.steps)

    trained = train_policies(
        replace(world.settings, **PRIORITIES.get(cells[0]["priority"], {})),
        federation,
        [world.training(cell["seed"]) for cell in cells],
        [cell["method"] for cell in cells],
        [cell["seed"] for cell in cells],
        on_chunk=report_progress,
    )
    return PolicyAggregator(trained.policy)


def conclude(rows: pd.DataFrame, settings: dict[str, Any]) -> Study:
    """The study of the cells' rows; a seed, its tasks averaged, is an experiment."""
    found = _curves(rows)
    table = _table(found)
    return Study(
        "federations",
        "Federations beyond the paper's: unequal tasks, transfer, byzantine clients",
        table,
        tuple(_verdicts(found)),
        lambda: _plot(table),
        tuple(_notes(table)),
        settings,
    )


def _curves(rows: pd.DataFrame) -> Found:
    found: Found = {}
    names = ["experiment", "setting", "method"]
    for _, own in rows.groupby(names, sort=False):
        experiment, setting, method = (str(own[name].iloc[0]) for name in names)
        found.setdefault((experiment, setting), {})[method] = _mean_over_tasks(own)
    return found


def _mean_over_tasks(rows: pd.DataFrame) -> np.ndarray:
    seeds, rounds = (len(rows[column].unique()) for column in ("seed", "round"))
    tested = rows.sort_values(["seed", "task", "round"])["tested"].to_numpy(float)
    return tested.reshape(seeds, -1, rounds).mean(1)


def _table(found: Found) -> pd.DataFrame:
    rows = []
    for (experiment, setting), methods in found.items():
        for method, tested in methods.items():
            gain = compare(tested[:, -1], methods["FedAvg"][:, -1])
            rows.append(
                {
                    "experiment": experiment,
                    "setting": setting,
                    "method": method,
                    "experiments": len(tested),
                    "final": float(tested[:, -1].mean()),
                    "mean over rounds": float(tested.mean()),
                    "gain": gain.value,
                    "gain low": gain.low,
                    "gain high": gain.high,
                }
            )
    return pd.DataFrame(rows)


def _verdicts(found: Found):
    for (experiment, setting), methods in found.items():
        learned = [name for name in methods if "MTL" in name]
        if experiment == "unequal":
            for name in [name for name in learned if name != "MTL"]:
                gain = compare(methods[name].mean(1), methods["MTL"].mean(1))
                claim = f"unequal tasks, {setting}: {name}, beats MTL in mean accuracy"
                yield Verdict.of(claim, gain, holds=gain.above_zero, paper=False)
            continue
        rivals = [name for name in methods if name not in learned]
        rival = max(rivals, key=lambda name: float(methods[name][:, -1].mean()))
        for name in learned:
            gain = compare(methods[name][:, -1], methods[rival][:, -1])
            claim = f"{experiment}, {setting}: {name}, beats {rival} after the last round"
            yield Verdict.of(claim, gain, holds=gain.above_zero, paper=False)


def _notes(table: pd.DataFrame):
    """For each experiment, where learned shares stand against FedAvg, from worst to best."""
    records = sorted(table.to_dict("records"), key=lambda row: row["gain"])
    for experiment, title in TITLES.items():
        rows = [r for r in records if r["experiment"] == experiment and "MTL" in r["method"]]
        if not rows:
            continue
        worst, best = (
            f"{100 * row['gain']:+.1f} ({row['setting']}: {row['method']})"
            for row in (rows[0], rows[-1])
        )
        above = sum(row["gain low"] > 0 for row in rows)
        yield (
            f"{title}: above FedAvg in {above} of {len(rows)} cases after the last round, "
            f"from {worst} to {best} points"
        )
    seeds = min(row["experiments"] for row in records)
    if seeds < FEW:
        yield f"{seeds} seeds show that it runs; their intervals mean little."


def _plot(table: pd.DataFrame) -> Figure:
    records = [row for row in table.to_dict("records") if row["method"] != "FedAvg"]
    shown = {name: title for name, title in TITLES.items() if name in set(table["experiment"])}
    figure = Figure(figsize=(4 + 3.5 * len(shown), 5), layout="constrained")
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, (experiment, title) in zip(panels, shown.items(), strict=True):
        rows = [row for row in reversed(records) if row["experiment"] == experiment]
        several = len({row["setting"] for row in rows}) > 1
        names = [f"{row['setting']}: {row['method']}" if several else row["method"] for row in rows]
        for place, row in enumerate(rows):
            low, gain, high = (100 * row[end] for end in ("gain low", "gain", "gain high"))
            if np.isfinite(high - low):
                axes.plot([low, high], [place, place], color="0.6", linewidth=2)
            axes.plot(gain, place, "o", color="C3" if "MTL" in row["method"] else "0.3", ms=5)
        axes.axvline(0, color="0.4", linewidth=0.8, linestyle="--")
        axes.set_yticks(range(len(rows)), names, fontsize=7)
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("points over FedAvg, last round", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    return figure
