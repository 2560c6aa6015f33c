"""Figure 6: test accuracy of learned aggregation over the rounds of unseen federations.

Data: MNIST split so that 8 clients of a task see only 0-5 and 2 only 6-9. Every method trains with
the same number of episodes; the claims are that learned shares beat FedAvg, that multi-task beats
single-task learning, and, ours, what prioritisation and a richer client state add. A cell is one
trained policy, or one fixed share on the minority, of one seed; a seed deals the clients anew.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.domains.federated import data
from apportion.domains.federated.aggregators import Fixed, PolicyAggregator, run_episodes
from apportion.domains.federated.data import Digits
from apportion.domains.federated.federation import paper_world
from apportion.domains.federated.settings import PPOSettings, paper_size, reduced_size
from apportion.domains.federated.training import train_paper_policies
from apportion.domains.settings import METHOD_NAMES
from apportion.errors import InputError
from apportion.statistics import Estimate, compare
from apportion.studies.engine import Cell, Plan, Progress, Rows
from apportion.studies.figures import panels
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion.trees import stack, take

METHODS = ("stl", "mtl", "pmtl")
RICHER = "rich"
"""The client state that MTL is trained on as well."""
EQUAL, INFORMED = 0.2, 0.45
"""The minority's share under FedAvg, 2 of 10 clients, and that of a server that knows them."""
TOTALS = (0.1, EQUAL, 0.3, 0.4, INFORMED, 0.5, 0.6, 0.8)
"""Fixed shares on the minority."""

Curves = dict[str, np.ndarray]
"""Test accuracy (experiments, rounds) of each method; an experiment is a seed and a task."""


def fig6(*, scale: Scale = "quick", seed: int = 0, digits: Digits | None = None) -> Plan:
    """The cells; `quick` needs two cores and minutes, `paper` a GPU and all of MNIST."""
    if scale == "paper":
        if digits is None:
            raise InputError("figure 6 at paper size needs the whole of MNIST: give --mnist FILE")
        settings, seeds, totals = paper_size(None, seed=seed), range(seed, seed + 8), TOTALS
    else:
        # Fewer rounds, updates and tasks than the default: four policies in three minutes.
        settings = reduced_size(
            state="accuracy", rounds=12, steps=10, learning_rate=2e-2, unseen=6, seed=seed
        )
        seeds, totals = range(seed, seed + 1), (EQUAL, INFORMED)
    cells = []
    for total, own in product(totals, seeds):
        values = {"method": "fixed", "total": total, "state": settings.state, "seed": own}
        cells.append(Cell(f"fixed-{total:g}-{own}", values, program="fixed"))
    runs = [(settings.state, method) for method in METHODS] + [(RICHER, "mtl")]
    for (state, method), own in product(runs, seeds):
        values = {"method": method, "total": float("nan"), "state": state, "seed": own}
        cells.append(Cell(f"{state}-{method}-{own}", values, program=f"{state}-{method}"))
    known = data.embedded_digits() if digits is None else digits
    about = {"data": known.summary(), **settings.to_dict(), "seeds": list(seeds)}
    computing = partial(compute_fig6, settings=settings, digits=digits)
    return Plan("fig6", tuple(cells), computing, _conclude, about)


_run_sets = eqx.filter_jit(eqx.filter_vmap(run_episodes, in_axes=(None, eqx.if_array(0), 0, 0)))


def compute_fig6(
    cells: Sequence[Cell],
    progress: Progress,
    *,
    settings: PPOSettings,
    digits: Digits | None = None,
) -> Rows:
    """Train the cells' policies in one `vmap`, then try all of them on their seeds' unseen tasks."""
    here = replace(settings, state=cells[0]["state"])
    digits = data.read_digits(here) if digits is None else digits
    seeds = [cell["seed"] for cell in cells]
    federation, tasks = paper_world(here, digits, seeds)
    if cells[0]["method"] == "fixed":
        totals = jnp.array([cell["total"] for cell in cells])
        aggregators = eqx.filter_vmap(lambda total: Fixed.minority(total, here.task_sizes))(totals)
    else:

        def report_progress(chunk):
            what = f"{here.state} state: {chunk.step} of {chunk.steps} updates"
            progress(what, 0.9 * chunk.step / chunk.steps)

        methods, own = [cell["method"] for cell in cells], [own for own, _ in tasks]
        trained = train_paper_policies(
            here, federation, own, methods, seeds, on_chunk=report_progress
        )
        aggregators = PolicyAggregator(trained.policy)
    unseen = stack([own for _, own in tasks])
    # The same first models and batches for every method of a seed.
    keys = stack([jax.random.split(jax.random.key(1000 + seed), here.unseen) for seed in seeds])
    record = _run_sets(federation, aggregators, unseen, keys)
    for run, cell in enumerate(cells):
        yield cell, take(record, run).to_frame().assign(**cell.values)
    progress(f"{cells[0].program}: tried on unseen tasks", 1.0)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """The study of the cells' rows."""

    def label(method: str, total: float, state: str) -> str:
        """The client state is named where it is not the usual one."""
        if method == "fixed":
            return "FedAvg" if abs(total - EQUAL) < 1e-6 else f"fixed share {total:g}"
        return METHOD_NAMES[method] + ("" if state == settings["state"] else f", {state} state")

    labels = [label(*values) for values in rows[["method", "total", "state"]].to_numpy()]
    methods = {str(name): own for name, own in rows.groupby(labels, sort=False)}
    # FedAvg, the learned ones, the fixed shares.
    order = sorted(methods, key=lambda name: (name != "FedAvg", not _is_learned(name)))
    curves = {name: _by_round(methods[name], ["tested"])[..., 0] for name in order}
    clients = [str(column) for column in rows if str(column).startswith("share ")]
    # Mean share of each client by round (rounds, clients); the minority comes last.
    shares = {
        name: _by_round(methods[name], clients).mean(0) for name in curves if _is_learned(name)
    }
    records = []
    for name, own in curves.items():
        mean, above = own.mean(0), np.flatnonzero(own.mean(0) > 0.9)
        records.append(
            {"method": name, "experiments": len(own)}
            | {f"round {n}": mean[n - 1] for n in (1, 5, 10, 15, 20, 50) if n <= len(mean)}
            | {"final": mean[-1], "mean over rounds": mean.mean()}
            | {"first round above .90": int(above[0]) + 1 if len(above) else None}
        )
    table = pd.DataFrame(records).astype({"first round above .90": "Int64"})
    final, along = (table.set_index("method")[name] for name in ("final", "mean over rounds"))
    fixed = [name for name in curves if name.startswith("fixed")]
    best = max(fixed, key=lambda name: final[name])
    notes = [
        f"{name}: {final[name]:.3f} after the last round, {along[name]:.3f} on average over the rounds"
        for name in ("FedAvg", *shares)
    ]
    notes.append(f"best of the fixed shares at the end: {best}, {final[best]:.3f}")
    for name, own in shares.items():
        minority = own[:, -2:].sum(-1)
        notes.append(
            f"{name}: share on the two minority clients {minority[0]:.2f} in the first round, "
            f"{minority[len(minority) // 2]:.2f} half-way, {minority[-1]:.2f} in the last"
        )
    verdicts = _verdicts(curves, len(set(rows["seed"])))
    title = "Figure 6: aggregation of federated models, unseen tasks"
    return [FigureResult("fig6", title, table, verdicts, lambda: _plot(curves, shares), notes)]


def _is_learned(name: str) -> bool:
    return name != "FedAvg" and not name.startswith("fixed")


def _by_round(rows: pd.DataFrame, columns: list[str]) -> np.ndarray:
    """Columns as an array (experiments, rounds, columns)."""
    rounds = len(rows["round"].unique())
    ordered = rows.sort_values(["seed", "task", "round"])[columns]
    return ordered.to_numpy(float).reshape(-1, rounds, len(columns))


def gain_over(first: np.ndarray, second: np.ndarray, seeds: int) -> Estimate:
    """The mean of first - second, over seeds: the tasks of a seed share its policy and are one unit."""
    return compare(first.reshape(seeds, -1).mean(1), second.reshape(seeds, -1).mean(1))


def _verdicts(curves: Curves, seeds: int) -> Iterator[Verdict]:
    last = {name: curve[:, -1] for name, curve in curves.items()}
    mean = {name: curve.mean(1) for name, curve in curves.items()}
    for name in map(METHOD_NAMES.__getitem__, METHODS):
        claim = f"{name} beats FedAvg in final test accuracy on unseen tasks"
        yield Verdict.of(claim, gain_over(last[name], last["FedAvg"], seeds))
        claim = f"{name} beats FedAvg in mean accuracy over the rounds"
        yield Verdict.of(claim, gain_over(mean[name], mean["FedAvg"], seeds))
    gain = gain_over(last["MTL"], last["STL"], seeds)
    yield Verdict.of("MTL beats STL in final test accuracy", gain)
    claim = "MTL is not worse than STL by more than .01"
    yield Verdict.of(claim, gain, above=-0.01, paper=False)
    claim = "prioritisation adds to mean accuracy where tasks are equally hard"
    yield Verdict.of(claim, gain_over(mean["P-MTL"], mean["MTL"], seeds), paper=False)
    for name in [name for name in curves if name.endswith("state")]:
        claim = f"{name}, adds to MTL's final accuracy"
        yield Verdict.of(claim, gain_over(last[name], last["MTL"], seeds), paper=False)
        gap = gain_over(last[f"fixed share {INFORMED:g}"], last[name], seeds)
        claim = f"{name}, comes within .005 of the share that knows the minority"
        yield Verdict.of(claim, gap, below=0.005, paper=False)


def _plot(curves: Curves, shares: Curves) -> Figure:
    """Test accuracy by round, then each client's share under STL and under MTL."""
    figure, (left, *right) = panels(12, 3.8, 3)
    rounds = np.arange(1, curves["FedAvg"].shape[1] + 1)
    for name in ("FedAvg", f"fixed share {INFORMED:g}", *shares):
        left.plot(rounds, curves[name].mean(0), label=name)
    left.set(title="test accuracy of the aggregate", xlabel="round")
    left.set_ylim(curves["FedAvg"].mean(0)[1:].min(), None)
    left.legend(fontsize=8)
    for axis, name in zip(right, ("STL", "MTL"), strict=True):
        axis.plot(rounds, shares[name][:, :-2], color="0.7")
        axis.plot(rounds, shares[name][:, -2:], color="C3")
        axis.set(title=f"{name}: share of each client (minority red)", xlabel="round")
        axis.set_ylim(0, 1.1 * max(shares["STL"].max(), shares["MTL"].max()))
    return figure
