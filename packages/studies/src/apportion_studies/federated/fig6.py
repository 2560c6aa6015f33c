"""Figure 6: test accuracy of learned aggregation over the rounds of a federation.

Data: MNIST split so that 8 clients of a task have only 0-5 and 2 only 6-9. As in the paper, the policy
reads raw accuracies on 1,000 of the server's images and is trained by PPO; all methods have the same
number of episodes; the aggregate is tested on all 10,000 images. Claims: MTL beats FedAvg, and STL. Each
is tested on unseen clients and on the clients of the task that STL learned from. Our additions: tests on
the 9,000 images that are not used in training; centred and scaled accuracies, and a richer state;
prioritisation, with initial scores on their own scale; unlike tasks, with one to four minority clients and
labels mixed by each client, because the paper attributes MTL's gain to the variety of clients; and
policies after half and twice as many updates. A seed assigns the images, draws the server's images and has
16 test tasks. The paper's comparisons and those on unlike tasks have 12 seeds; the centred state on alike
tasks has 8, and the learning curve, the rich state, prioritisation and other fixed shares have 4, the
first ones. A cell is one policy after some updates, or one fixed share of the minority, with one seed. At
paper size clients compute in bfloat16; FedAvg is also tested in float32, to show what that changes.
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
from jaxtyping import Array, Key, PyTree
from matplotlib.figure import Figure

from apportion.certify.statistics import compare
from apportion.domains.federated import data
from apportion.domains.federated.aggregators import (
    Aggregator,
    EpisodeRecord,
    Fixed,
    PolicyAggregator,
    run_episodes,
)
from apportion.domains.federated.data import Digits
from apportion.domains.federated.federation import Federation, paper_world, server_sets
from apportion.domains.federated.settings import PPOSettings, paper_size, reduced_size
from apportion.domains.federated.training import train_paper_policies
from apportion.domains.settings import METHOD_NAMES
from apportion.errors import InputError
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import panels
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.tasks import Task
from apportion.trees import stack, take

_PAPER, _OURS, _RICHER = "raw", "accuracy", "rich"
"""States of a client: the paper's accuracies, centred and scaled accuracies, and a richer state."""
_STATES = {_PAPER: "", _OURS: ", centred state", _RICHER: ", rich state"}
_ALIKE, _UNLIKE = "alike", "unlike"
_Arm = tuple[str, str, str]
"""Tasks, state and method of policies."""
_ARMS: dict[Scale, tuple[_Arm, ...]] = {
    "quick": (
        *((_ALIKE, _PAPER, method) for method in ("stl", "mtl")),
        *((_UNLIKE, _OURS, method) for method in ("stl", "mtl", "pmtl")),
    ),
    "paper": (
        *((_ALIKE, _PAPER, method) for method in ("stl", "mtl")),
        *((_ALIKE, _OURS, method) for method in ("stl", "mtl")),
        (_ALIKE, _RICHER, "mtl"),
        *((_UNLIKE, _OURS, method) for method in ("stl", "mtl", "pmtl")),
    ),
}
_EQUAL, _INFORMED = 0.2, 0.45
"""Share of the minority under FedAvg (2 of 10 clients), and if the server knows the minority."""
_TOTALS = (_EQUAL, 0.3, _INFORMED, 0.6)
"""Fixed shares of the minority."""
_SEEDS, _TESTED, _UPDATES = 12, 16, 10
"""Seeds at paper size, test tasks of each, and updates of a policy."""
_TOGETHER = 4
"""Seeds per program, limited by GPU memory; the first program also has the learning curve."""
_FEWER_SEEDS: dict[_Arm, int] = {
    (_ALIKE, _OURS, "stl"): 8,
    (_ALIKE, _OURS, "mtl"): 8,
    (_ALIKE, _RICHER, "mtl"): _TOGETHER,
    (_UNLIKE, _OURS, "pmtl"): _TOGETHER,
}
"""Number of seeds of the arms that have fewer than `_SEEDS`."""
_AT_ONCE, _EXACT, _BLOCK = 2, "float32", 100
"""Runs tested at once; the exact precision, and its images per block, limited by GPU memory."""


def fig6(*, scale: Scale = "quick", seed: int = 0, digits: Digits | None = None) -> Plan:
    """Plan the cells; `quick` takes minutes on two cores, `paper` needs a GPU and all of MNIST."""
    if scale == "paper":
        if digits is None:
            raise InputError("figure 6 at paper size needs the whole of MNIST: give --images FILE")
        settings = paper_size(None, state=_PAPER, seed=seed, unseen=_TESTED, steps=_UPDATES)
        seeds, totals = range(_SEEDS * seed, _SEEDS * (seed + 1)), _TOTALS
    else:
        # Fewer rounds, updates and tasks than the default: five policies in three minutes.
        settings = reduced_size(
            state=_PAPER, rounds=8, steps=10, learning_rate=2e-2, unseen=3, seed=seed
        )
        seeds, totals = range(seed, seed + 1), (_EQUAL, _INFORMED)
    fixed = [(_ALIKE, total, settings.precision) for total in totals]
    fixed += [(_UNLIKE, _EQUAL, settings.precision)]
    if scale == "paper":
        fixed.append((_ALIKE, _EQUAL, _EXACT))
    cells = []
    for tasks, total, precision in fixed:
        few = total != _EQUAL or precision != settings.precision
        for own in seeds[:_TOGETHER] if few else seeds:
            values = {"tasks": tasks, "state": _PAPER, "method": "fixed", "total": total}
            values |= {"seed": own, "updates": 0, "precision": precision}
            exact = f"-{_EXACT}" if precision != settings.precision else ""
            name = f"fixed-{tasks}{exact}-{total:g}-{own}"
            cells.append(Cell(name, values, f"fixed-{tasks}{exact}"))
    for arm in _ARMS[scale]:
        tasks, state, method = arm
        for own in seeds[: _FEWER_SEEDS.get(arm, _SEEDS)]:
            # Compilation dominates on two cores, computation on a GPU.
            program, name, marks = f"{tasks}-{state}", f"{tasks}-{state}-{method}-{own}", [1.0]
            if scale == "paper":
                together = (own - seeds[0]) // _TOGETHER
                program += f"-{method}-{together}"
                if arm in _ARMS["paper"][:2] and not together:
                    marks += [0.5, 2.0]
            for times in marks:
                values = {"tasks": tasks, "state": state, "method": method, "seed": own}
                values |= {"total": float("nan"), "updates": int(times * settings.steps)}
                values |= {"precision": settings.precision}
                after = "" if times == 1 else f"-after-{values['updates']}"
                cells.append(Cell(name + after, values, program))
    known = data.embedded_digits() if digits is None else digits
    about = {"data": known.summary(), **settings.to_dict(), "seeds": list(seeds)}
    computing = partial(_compute_fig6, settings=settings, digits=digits)
    # At paper size a program takes 12 GiB of a GPU.
    return Plan("fig6", tuple(cells), computing, _conclude, about, at_once=5)


def _compute_fig6(
    cells: Sequence[Cell],
    progress: OnProgress,
    *,
    settings: PPOSettings,
    digits: Digits | None = None,
) -> Rows:
    """Train the cells' policies in one `vmap`, then test all of them on the tasks of their seeds.

    Cells with the same seed and method but fewer updates are earlier states of one policy.

    Task 0 is the first training task, the only one that single-task learning uses. The clients of
    all other tasks are unseen.
    """
    here = replace(settings, state=cells[0]["state"], unlike=cells[0]["tasks"] == _UNLIKE)
    digits = data.read_digits(here) if digits is None else digits
    seeds = [cell["seed"] for cell in cells]
    federation, tasks = paper_world(here, digits, seeds)
    if cells[0]["method"] == "fixed":
        totals = jnp.array([cell["total"] for cell in cells])
        aggregators = eqx.filter_vmap(lambda total: Fixed.minority(total, here.task_sizes))(totals)
    else:
        marks, kept = {cell["updates"] for cell in cells}, {}

        def on_chunk(chunk):
            if chunk.step in marks:
                # The next chunk reuses the memory of this one.
                kept[chunk.step] = jax.tree.map(jnp.copy, eqx.filter(chunk.policy, eqx.is_array))
            what = f"{cells[0].program}: {chunk.step} of {chunk.steps} updates"
            progress(what, 0.9 * chunk.step / chunk.steps)

        runs = {
            (cell["method"], cell["seed"]): own for cell, (own, _) in zip(cells, tasks, strict=True)
        }
        methods, own_seeds = zip(*runs, strict=True)
        world, axes = _redrawn(federation, digits, here, own_seeds)
        longest = replace(here, steps=max(marks))
        trained = train_paper_policies(
            longest, world, [*runs.values()], methods, own_seeds, axes=axes, on_chunk=on_chunk
        )
        places = {run: place for place, run in enumerate(runs)}
        found = [
            take(kept[cell["updates"]], places[cell["method"], cell["seed"]]) for cell in cells
        ]
        policies = eqx.combine(stack(found), trained.policy)
        aggregators = PolicyAggregator(policies)
    exact = cells[0]["precision"] == _EXACT
    block = _BLOCK if exact else here.block
    here = replace(here, precision=cells[0]["precision"], block=block)
    world, _ = _redrawn(paper_world(here, digits, seeds)[0], digits, here, seeds)
    tested = stack([own[:1].joined(unseen) for own, unseen in tasks])
    # The same first models and batches for every method of a seed.
    keys = stack([jax.random.split(jax.random.key(1000 + s), 1 + here.unseen) for s in seeds])
    with jax.default_matmul_precision("highest" if exact else None):
        record = _run_sets(world, aggregators, tested, keys)
    for run, cell in enumerate(cells):
        yield cell, take(record, run).to_frame().assign(**cell.values)
    progress(f"{cells[0].program}: tried on own and unseen tasks", 1.0)


def _sets_of(federation: Federation) -> tuple[PyTree, PyTree]:
    """Return the leaves that `_redrawn` replaces."""
    return federation.evaluation, federation.test


def _redrawn(
    federation: Federation, digits: Digits, settings: PPOSettings, seeds: Sequence[int]
) -> tuple[Federation, PyTree]:
    """Give each run its own evaluation and test sets; return the federation and its `vmap` axes."""
    drawn = [server_sets(digits, settings, settings.sets, seed=seed) for seed in seeds]
    stacked = tuple(map(jnp.stack, zip(*drawn, strict=True)))
    shared = jax.tree.map(lambda _: None, federation)
    axes = eqx.tree_at(_sets_of, shared, (0, 0), is_leaf=lambda leaf: leaf is None)
    return eqx.tree_at(_sets_of, federation, stacked), axes


@eqx.filter_jit
def _run_sets(
    federation: Federation, aggregators: Aggregator, tasks: Task, keys: Key[Array, "runs tasks"]
) -> EpisodeRecord:
    """Run each aggregator on its own tasks and server sets, a few runs at a time."""
    arrays, rest = eqx.partition(aggregators, eqx.is_array)

    def one(run):
        sets, arrays, tasks, keys = run
        here = eqx.tree_at(_sets_of, federation, sets)
        return run_episodes(here, eqx.combine(arrays, rest), tasks, keys)

    return jax.lax.map(one, (_sets_of(federation), arrays, tasks, keys), batch_size=_AT_ONCE)


_Curves = dict[tuple[str, str, str], np.ndarray]
"""Accuracy (seeds, tasks, rounds) by method, clients (own, unseen) and images (all, disjoint)."""


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Return the figure from the rows of all cells."""

    def label(
        method: str, total: float, state: str, tasks: str, updates: int, precision: str
    ) -> str:
        where = "" if tasks == _ALIKE else ", unlike tasks"
        where += "" if precision == settings["precision"] else f", {precision}"
        if method == "fixed":
            return ("FedAvg" if abs(total - _EQUAL) < 1e-6 else f"fixed share {total:g}") + where
        after = "" if updates == settings["steps"] else f", {updates} updates"
        return METHOD_NAMES[method] + _STATES[state] + where + after

    # The evaluation images are part of the paper's test set.
    evaluation, test = settings["evaluation"], settings["test"]
    every = (evaluation * rows.evaluated + test * rows.tested) / (evaluation + test)
    rows = rows.assign(all=every, clients=np.where(rows.task == 0, "own", "unseen"))
    kinds = rows[["method", "total", "state", "tasks", "updates", "precision"]].to_numpy()
    rows = rows.assign(label=[label(*values) for values in kinds])
    # Order: FedAvg, learned aggregation, fixed shares.
    names = sorted(
        dict.fromkeys(rows.label), key=lambda name: (name != "FedAvg", name.startswith("fixed"))
    )
    curves: _Curves = {
        (name, clients, images): _by_round(
            select(rows, label=name, clients=clients), [{"disjoint": "tested"}.get(images, images)]
        )[..., 0]
        for name, clients, images in product(names, ("unseen", "own"), ("all", "disjoint"))
    }
    columns = [str(column) for column in rows if str(column).startswith("share ")]
    learned = [name for name in names if not name.startswith(("FedAvg", "fixed"))]
    # Mean share of each client by round (rounds, clients); the minority comes last.
    shares = {
        name: _by_round(select(rows, label=name, clients="unseen"), columns).mean((0, 1))
        for name in learned
    }
    records = []
    for name, clients in product(names, ("unseen", "own")):
        own = curves[name, clients, "all"]
        mean, above = own.mean((0, 1)), np.flatnonzero(own.mean((0, 1)) > 0.9)
        records.append(
            {"method": name, "clients": clients, "experiments": own.shape[0] * own.shape[1]}
            | {f"round {n}": mean[n - 1] for n in (1, 5, 10, 15, 20, 50) if n <= len(mean)}
            | {"final": mean[-1], "mean over rounds": mean.mean()}
            | {"final, disjoint images": curves[name, clients, "disjoint"][..., -1].mean()}
            | {"first round above .90": int(above[0]) + 1 if len(above) else None}
        )
    table = pd.DataFrame(records).astype({"first round above .90": "Int64"})
    unseen: Any = table[table.clients == "unseen"].set_index("method")
    best = max((name for name in names if name.startswith("fixed")), key=unseen.final.get)
    notes = [
        f"All of it on unseen clients and all {evaluation + test:,} images unless a row says otherwise.",
        *(
            f"{name}: {unseen.final[name]:.3f} after the last round, "
            f"{unseen['mean over rounds'][name]:.3f} on average over the rounds "
            f"({len(curves[name, 'unseen', 'all'])} seeds)"
            for name in (*(name for name in names if name.startswith("FedAvg")), *learned)
        ),
        f"best of the fixed shares at the end: {best}, {unseen.final[best]:.3f}",
    ]
    verdicts = _verdicts(curves, f"all {evaluation + test:,} images", 2 * settings["steps"])
    title = "Figure 6: aggregation of federated models"
    draw = partial(_plot, curves, shares)
    return [FigureResult("fig6", title, table, verdicts, draw, notes)]


def _by_round(rows: Any, columns: list[str]) -> np.ndarray:
    """Columns as an array (seeds, tasks, rounds, columns)."""
    sizes = (rows[name].nunique() for name in ("seed", "task", "round"))
    ordered = rows.sort_values(["seed", "task", "round"])[columns]
    return ordered.to_numpy(float).reshape(*sizes, len(columns))


def _measured(
    curves: _Curves, name: str, clients: str = "unseen", images: str = "all", *, along: bool = False
) -> np.ndarray:
    """Return each seed's accuracy after the last round, or (`along`) its mean over the rounds. The
    tasks of a seed share a policy, so a seed is one unit.
    """
    own = curves[name, clients, images]
    return (own.mean(-1) if along else own[..., -1]).mean(-1)


def _verdicts(curves: _Curves, everything: str, twice: int) -> Iterator[Verdict]:
    """Yield the paper's claims, then the effect of each departure, for the methods in `curves`."""
    ours, rich, unlike = _STATES[_OURS], _STATES[_RICHER], f"{_STATES[_OURS]}, unlike tasks"
    final, along = "final test accuracy", "mean accuracy over the rounds"
    names = {name for name, _, _ in curves}

    def verdict(claim: str, first: str, second: str, *where: str, **options: Any):
        bounds = {
            name: options.pop(name) for name in ("above", "below", "paper") if name in options
        }
        if {first, second} <= names:
            found = {name: _measured(curves, name, *where, **options) for name in (first, second)}
            # Arms with fewer seeds have the first seeds of the others.
            least = min(map(len, found.values()))
            found = {name: own[:least] for name, own in found.items()}
            levels = {name: float(own.mean()) for name, own in found.items()}
            yield Verdict.of(claim, compare(*found.values()), levels=levels, **bounds)

    # The paper attributes MTL's lead over STL to the variety of clients.
    settings = {
        "": ("{clients} clients, " + everything, "FedAvg"),
        ours: ("{clients} clients, centred state", "FedAvg"),
        unlike: ("{clients} clients, unlike tasks", "FedAvg, unlike tasks"),
    }
    for (kind, (where, plain)), clients in product(settings.items(), ("unseen", "own")):
        for other, measure in product((plain, "STL" + kind), (final, along)):
            by_paper = not kind or (kind == unlike and clients == "unseen" and other != plain)
            options = {"along": measure == along, "paper": by_paper}
            claim = (
                f"MTL beats {other.split(',')[0]} in {measure} ({where.format(clients=clients)})"
            )
            yield from verdict(claim, "MTL" + kind, other, clients, **options)
    pair, alike = (("MTL" + kind, "STL" + kind) for kind in (unlike, ours))
    if {*pair, *alike} <= names:
        claim = "many tasks add more if they are unlike than if they are alike (final accuracy)"
        leads = [np.subtract(*(_measured(curves, name) for name in both)) for both in (pair, alike)]
        leads = [lead[: min(map(len, leads))] for lead in leads]
        levels = {"unlike": float(leads[0].mean()), "alike": float(leads[1].mean())}
        yield Verdict.of(claim, compare(*leads), levels=levels)
    for first, other in (("STL", "FedAvg"), ("MTL", "FedAvg"), ("MTL", "STL")):
        claim = f"{first} beats {other} in {final} (unseen clients, disjoint images)"
        yield from verdict(claim, first, other, "unseen", "disjoint", paper=False)
    claim = "MTL is not worse than STL by more than .01"
    yield from verdict(claim, "MTL", "STL", above=-0.01, paper=False)
    claim = f"MTL ends higher after twice as many updates ({twice})"
    yield from verdict(claim, f"MTL, {twice} updates", "MTL", paper=False)
    claim = "prioritisation adds to mean accuracy if tasks are unlike"
    yield from verdict(claim, "P-MTL" + unlike, "MTL" + unlike, along=True, paper=False)
    claim = "centring and scaling the accuracies adds to MTL's final accuracy"
    yield from verdict(claim, "MTL" + ours, "MTL", paper=False)
    claim = "a richer state adds to MTL's final accuracy, centred state"
    yield from verdict(claim, "MTL" + rich, "MTL" + ours, paper=False)
    claim = "FedAvg's final accuracy in bfloat16 is within .005 of that in float32"
    bounds = {"above": -0.005, "below": 0.005, "paper": False}
    yield from verdict(claim, "FedAvg", f"FedAvg, {_EXACT}", **bounds)
    claim = f"MTL{rich}, comes within .005 of the share that knows the minority"
    yield from verdict(claim, f"fixed share {_INFORMED:g}", "MTL" + rich, below=0.005, paper=False)


def _plot(curves: _Curves, shares: dict[str, np.ndarray]) -> Figure:
    """Plot the test accuracy and the share of each client by round."""
    figure, (left, *right) = panels(12, 3.8, 3)
    mean = {
        name: own.mean((0, 1))
        for (name, clients, images), own in curves.items()
        if (clients, images) == ("unseen", "all") and not name.endswith("unlike tasks")
    }
    rounds = np.arange(1, len(mean["FedAvg"]) + 1)
    for name in (
        "FedAvg",
        f"fixed share {_INFORMED:g}",
        *(name for name in shares if name in mean and not name.endswith(" updates")),
    ):
        left.plot(rounds, mean[name], label=name)
    left.set(title="test accuracy of the aggregate", xlabel="round")
    left.set_ylim(mean["FedAvg"][1:].min(), None)
    left.legend(fontsize=8)
    for axis, name in zip(right, ("STL", "MTL"), strict=True):
        axis.plot(rounds, shares[name][:, :-2], color="0.7")
        axis.plot(rounds, shares[name][:, -2:], color="C3")
        axis.set(title=f"{name}: share of each client (minority red)", xlabel="round")
        axis.set_ylim(0, 1.1 * max(shares["STL"].max(), shares["MTL"].max()))
    return figure
