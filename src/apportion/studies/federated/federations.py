"""Beyond the paper's federation: unequal tasks, other partitions and sizes, and clients that lie.

Claims, all ours: prioritisation pays where tasks differ in difficulty; a policy trained on one split
of 10 clients carries over to others; learned shares withstand label flipping as well as the median,
the trimmed mean and Krum. Each is measured against FedAvg on the same batches.
"""

from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.federated.digits import Digits
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.training import read_digits
from apportion.errors import InputError
from apportion.statistics import compare
from apportion.studies.federated.federations_runs import Progress, compute, sizes
from apportion.studies.study import Study, Verdict

FEW = 5
"""Seeds below which a bootstrap interval over them is no evidence."""
TITLES = {
    "unequal": "tasks of unequal difficulty",
    "transfer": "policies carried over",
    "poisoned": "label-flipping clients",
}


def run(
    *,
    digits: Digits | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Train and compare in all three experiments; `paper` needs all of MNIST, and a GPU.

    `quick` shows the policy the richer state only, and tries fewer priorities and sizes.
    """
    if scale == "paper" and digits is None:
        raise InputError("federations at paper size need the whole of MNIST: give --mnist FILE")
    settings = sizes(scale, seed=seed)
    digits = read_digits(settings) if digits is None else digits
    extent: dict[str, Any] = {"seeds": range(seed, seed + 6)}
    if scale == "quick":
        extent = {
            "seeds": range(seed, seed + 2),
            "states": ("rich",),
            "sizes": (5, 20),
            "priorities": ("the paper's", "realised gain"),
        }
    return study_from(compute(settings, digits, progress=progress, **extent), settings)


def study_from(arrays: dict[str, Any], settings: FederatedSettings) -> Study:
    """The study of runs computed here or elsewhere; a seed, its tasks averaged, is an experiment."""
    arrays = {name: np.asarray(tested).mean(1) for name, tested in arrays.items()}
    table = _table(arrays)
    return Study(
        "federations",
        "Federations beyond the paper's: unequal tasks, transfer, lies",
        table,
        tuple(_verdicts(arrays)),
        lambda: _draw(table),
        tuple(_readings(table)),
        settings.to_dict(),
    )


def _table(arrays: dict[str, Any]) -> pd.DataFrame:
    rows = []
    for name, tested in arrays.items():
        experiment, setting, method = name.split("/")
        fedavg = arrays[f"{experiment}/{setting}/FedAvg"]
        gain = compare(tested[:, -1], fedavg[:, -1])
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


def _readings(table: pd.DataFrame):
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


def _verdicts(arrays: dict[str, Any]):
    settings = dict.fromkeys(tuple(name.split("/")[:2]) for name in arrays)
    for experiment, setting in settings:
        found = {
            name.split("/")[2]: tested
            for name, tested in arrays.items()
            if name.startswith(f"{experiment}/{setting}/")
        }
        learned = [name for name in found if "MTL" in name]
        if experiment == "unequal":
            for name in [name for name in learned if name != "MTL"]:
                gain = compare(found[name].mean(1), found["MTL"].mean(1))
                claim = f"unequal tasks, {setting}: {name}, beats MTL in mean accuracy"
                yield Verdict.of(claim, gain, holds=gain.above_zero, paper=False)
            continue
        rivals = [name for name in found if name not in learned]
        rival = max(rivals, key=lambda name: float(found[name][:, -1].mean()))
        for name in learned:
            gain = compare(found[name][:, -1], found[rival][:, -1])
            claim = f"{experiment}, {setting}: {name}, beats {rival} after the last round"
            yield Verdict.of(claim, gain, holds=gain.above_zero, paper=False)


def _draw(table: pd.DataFrame) -> Figure:
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
