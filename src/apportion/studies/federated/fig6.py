"""Figure 6: learned aggregation against FedAvg over the rounds of unseen federations.

Data: MNIST split so that 8 clients of a task see only 0-5 and 2 only 6-9. Every method trains with
the same number of episodes; the claims are that learned shares beat FedAvg, that multi-task beats
single-task learning, and, ours, what prioritisation and a richer client state add.
"""

import json
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.federated.digits import Digits
from apportion.domains.federated.settings import FederatedSettings, paper_size
from apportion.domains.federated.training import read_digits
from apportion.errors import InputError
from apportion.statistics import compare
from apportion.studies.federated.fig6_runs import TOTALS, Progress, compute
from apportion.studies.study import Study, Verdict

LABELS = {"stl": "STL", "mtl": "MTL", "pmtl": "P-MTL"}
INFORMED = 0.45


def run(
    *,
    digits: Digits | None = None,
    scale: Literal["quick", "paper"] = "quick",
    seed: int = 0,
    progress: Progress | None = None,
) -> Study:
    """Train and compare; `quick` needs two cores and minutes, `paper` a GPU and all of MNIST."""
    if scale == "paper":
        if digits is None:
            raise InputError("figure 6 at paper size needs the whole of MNIST: give --mnist FILE")
        settings = paper_size(None, seed=seed)
        seeds, richer, totals = tuple(range(seed, seed + 3)), ("rich",), TOTALS
    else:
        # Fewer rounds, updates and tasks than the default: four policies in three minutes.
        settings = FederatedSettings(
            state="accuracy", rounds=12, steps=10, learning_rate=2e-2, unseen=6, seed=seed
        )
        seeds, richer, totals = (seed,), ("rich",), (0.2, INFORMED)
    digits = read_digits(settings) if digits is None else digits
    arrays = compute(settings, digits, seeds=seeds, richer=richer, totals=totals, progress=progress)
    return study_from(arrays)


def study_from(arrays: dict[str, Any]) -> Study:
    """The study of runs computed here or elsewhere (see `fig6_runs.load`)."""
    curves = _curves(arrays)
    settings = json.loads(str(arrays["settings"]))
    table = _table(curves)
    return Study(
        "fig6",
        "Figure 6: aggregation of federated models, unseen tasks",
        table,
        tuple(_verdicts(curves)),
        lambda: _draw(arrays, curves),
        tuple(_readings(arrays, table)),
        settings | {"seeds": arrays["seeds"].tolist(), "device": str(arrays["device"])},
    )


def _curves(arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    """Test accuracy (experiments, rounds) of each method; an experiment is a seed and a task."""
    totals = np.asarray(arrays["totals"])

    def flat(accuracy):
        return np.asarray(accuracy, float).reshape(-1, accuracy.shape[-1])

    # Equal shares of 8 + 2 clients are a fixed share of .2 on the two.
    curves = {"FedAvg": flat(arrays["fixed"][np.argmin(np.abs(totals - 0.2))])}
    for name, accuracy in zip(arrays["methods"], arrays["tested"], strict=True):
        method, _, state = str(name).partition("-")
        label = LABELS[method] + (f", {state} state" if state else "")
        curves[label] = flat(accuracy)
    curves |= {
        f"fixed share {total:g}": flat(accuracy)
        for total, accuracy in zip(totals, arrays["fixed"], strict=True)
        if abs(total - 0.2) > 1e-6
    }
    return curves


def _table(curves: dict[str, np.ndarray]) -> pd.DataFrame:
    rounds = next(iter(curves.values())).shape[-1]
    shown = [n for n in (1, 5, 10, 15, 20, 50) if n <= rounds]
    rows = []
    for name, accuracy in curves.items():
        mean = accuracy.mean(0)
        above = np.flatnonzero(mean > 0.9)
        rows.append(
            {"method": name, "experiments": len(accuracy)}
            | {f"round {n}": mean[n - 1] for n in shown}
            | {
                "final": mean[-1],
                "mean over rounds": mean.mean(),
                "first round above .90": int(above[0]) + 1 if len(above) else None,
            }
        )
    table = pd.DataFrame(rows)
    return table.astype({"first round above .90": "Int64"})


def _verdicts(curves: dict[str, np.ndarray]):
    fedavg = curves["FedAvg"]
    for name in ("STL", "MTL", "P-MTL"):
        gain = compare(curves[name][:, -1], fedavg[:, -1])
        claim = f"{name} beats FedAvg in final test accuracy on unseen tasks"
        yield Verdict.of(claim, gain, holds=gain.above_zero)
        gain = compare(curves[name].mean(1), fedavg.mean(1))
        claim = f"{name} beats FedAvg in mean accuracy over the rounds"
        yield Verdict.of(claim, gain, holds=gain.above_zero)
    gain = compare(curves["MTL"][:, -1], curves["STL"][:, -1])
    yield Verdict.of("MTL beats STL in final test accuracy", gain, holds=gain.above_zero)
    yield Verdict.of(
        "MTL is not worse than STL by more than .01", gain, holds=gain.value > -0.01, paper=False
    )
    gain = compare(curves["P-MTL"].mean(1), curves["MTL"].mean(1))
    claim = "prioritisation adds to mean accuracy where tasks are equally hard"
    yield Verdict.of(claim, gain, holds=gain.above_zero, paper=False)
    for name in [name for name in curves if name.endswith("state")]:
        gain = compare(curves[name][:, -1], curves["MTL"][:, -1])
        claim = f"{name}, adds to MTL's final accuracy"
        yield Verdict.of(claim, gain, holds=gain.above_zero, paper=False)
        gap = compare(curves[f"fixed share {INFORMED:g}"][:, -1], curves[name][:, -1])
        claim = f"{name}, comes within .005 of the share that knows the minority"
        yield Verdict.of(claim, gap, holds=gap.value < 0.005, paper=False)


def _readings(arrays: dict[str, Any], table: pd.DataFrame):
    rows = table.set_index("method")
    fixed = [name for name in rows.index if name.startswith("fixed")]
    best = max(fixed, key=lambda name: float(rows.loc[name, "final"]))
    for name in rows.index[~rows.index.str.startswith("fixed")]:
        yield (
            f"{name}: {rows.loc[name, 'final']:.3f} after the last round, "
            f"{rows.loc[name, 'mean over rounds']:.3f} on average over the rounds"
        )
    yield f"best of the fixed shares at the end: {best}, {rows.loc[best, 'final']:.3f}"
    for name, shares in zip(arrays["methods"], arrays["shares"], strict=True):
        minority = shares[..., -2:].sum(-1).mean((0, 1))
        middle = minority[len(minority) // 2]
        yield (
            f"{name}: share on the two minority clients {minority[0]:.2f} in the first round, "
            f"{middle:.2f} half-way, {minority[-1]:.2f} in the last"
        )


def _draw(arrays: dict[str, Any], curves: dict[str, np.ndarray]) -> Figure:
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, *right = figure.subplots(1, 3)
    styles = {"FedAvg": ("0.35", "-"), f"fixed share {INFORMED:g}": ("0.35", ":")}
    learned = [name for name in curves if not name.startswith("fixed") and name != "FedAvg"]
    styles |= {name: (f"C{place}", "-") for place, name in enumerate(learned)}
    for name, (color, style) in styles.items():
        accuracy = curves[name]
        rounds = np.arange(1, accuracy.shape[1] + 1)
        left.plot(rounds, accuracy.mean(0), style, color=color, linewidth=1.6, label=name)
        if name in ("FedAvg", "MTL"):
            low, high = np.quantile(accuracy, (0.1, 0.9), axis=0)
            left.fill_between(rounds, low, high, color=color, alpha=0.15, linewidth=0)
    floor = min(curves["FedAvg"].mean(0)[1:].min(), curves["MTL"].mean(0)[1:].min())
    left.set_ylim(max(floor - 0.05, 0), None)
    left.set_title("test accuracy of the aggregate (band: 10-90% of runs)", fontsize=9, loc="left")
    left.legend(fontsize=8, frameon=False, loc="lower right")
    names = [str(name) for name in arrays["methods"]]
    top = 0.0
    for axes, method in zip(right, ("stl", "mtl"), strict=True):
        shares = arrays["shares"][names.index(method)].mean((0, 1))
        rounds = np.arange(1, len(shares) + 1)
        for client in range(shares.shape[1]):
            minority = client >= shares.shape[1] - 2
            axes.plot(
                rounds,
                shares[:, client],
                color="C3" if minority else "0.7",
                linewidth=1.8 if minority else 0.9,
            )
        axes.axhline(1 / shares.shape[1], color="0.4", linewidth=0.8, linestyle="--")
        top = max(top, shares.max())
        title = f"{LABELS[method]}: share of each client (minority red; dashed 1/10)"
        axes.set_title(title, fontsize=9, loc="left")
    for axes in right:
        axes.set_ylim(0, 1.1 * top)
    for axes in (left, *right):
        axes.set_xlabel("round", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    return figure
