"""Every kind of federation, the shipped policy beside its peers: does it ever hurt, where is it ahead?

We test these claims, all ours, in eight scenarios (model, server samples, clients): on no kind of
federation is the learned aggregation below FedAvg by more than .3 points, also not on four kinds that are
held back from training; on average over the kinds it is ahead of every rival, including those that train
on the server's samples; and under attack, in the first scenario, it is within half a point of the best
defence. A mean of kinds is about these kinds, with seeds as units; a claim about federations in general
treats kinds as a sample, and its interval is over kinds and seeds. The table also has the mean without the
kinds of the paper's split, and the notes list every rival and kind that beats the policy. A cell is one
federation: a kind, a scenario, an aggregator and a seed, which assigns images to clients. Cells of one
scenario and aggregator are one program.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.certify.statistics import Estimate, compare, over_rows_and_columns
from apportion.domains.federated import aggregators
from apportion.domains.federated.data import (
    ATTACKED,
    HELD_BACK,
    KINDS,
    TRAINING,
    Digits,
    embedded_digits,
    halves,
    read_digits,
)
from apportion.domains.federated.federation import unseen_world
from apportion.domains.federated.policy import shipped_fingerprint, shipped_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.errors import InputError
from apportion.studies.engine import Cell, OnProgress, Plan, Rows
from apportion.studies.figures import forest
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict
from apportion_studies.federated.peers import (
    Adaptive,
    FineTuned,
    GradientShares,
    Krum,
    NearestMixing,
    ServerClient,
)

PEERS: dict[str, aggregators.Aggregator] = {
    "FedAvg": aggregators.BySamples(),
    "FedAvg, step 1.5": aggregators.ServerStep(1.5),
    "FedAvgM": aggregators.ServerStep(1.0, 0.7),
    "FedAdam": Adaptive(0.1),
    "FedYogi": Adaptive(0.05, yogi=True),
    "median": aggregators.Median(),
    "trimmed mean": aggregators.TrimmedMean(0.3),
    "Krum": Krum(3),
    "nearest-neighbour mixing": NearestMixing(0.3),
    "gradient shares": GradientShares(momentum=0.0),
    "gradient shares, momentum": GradientShares(momentum=0.5),
    "server as a client": ServerClient(),
    "fine-tuned": FineTuned(),
}
"""Aggregators by name. FedAdam has Flower's defaults. FedYogi's step and FedAvgM's momentum are the
best of several on digits; FedAvg's step is one of two that were tried."""
_LEARNED = "learned"
_DEFENCES = ("median", "trimmed mean", "Krum", "nearest-neighbour mixing")
_SEEDS = 6
"""Seeds of each kind at `paper` scale."""
_FEW = 5
"""Least number of seeds for which an interval over seeds is evidence."""
_SCALES = {
    "quick": GradientSettings(rounds=10, samples=60, test=500),
    "paper": GradientSettings(
        pooling=1, samples=200, rounds=30, epochs=2, client_rate=0.1, test=8000
    ),
}
"""`paper` has images at full resolution, more samples and more rounds."""

_Found = dict[str, dict[str, np.ndarray]]
"""Test accuracy (kinds, seeds) after the last round, by scenario and method."""


@dataclass(frozen=True)
class _Scenario:
    """Settings that federations of all kinds share."""

    model: str = "perceptron"
    samples: int = 200
    """Number of samples that the server has."""
    clients: int = 10
    participation: float = 1.0
    methods: tuple[str, ...] = (*PEERS, _LEARNED)


_RIVALS = ("FedAvg", "FedAvgM", "gradient shares, momentum", "server as a client", "fine-tuned")
"""Rivals in every claim about the mean of kinds; the last three use the server's samples."""
_ALL = (*_RIVALS, _LEARNED)
_SCENARIOS = {
    "perceptron, 200 samples": _Scenario(),
    "perceptron, 20 samples": _Scenario(samples=20, methods=_ALL),
    "convolutional, 200 samples": _Scenario("convolutional", methods=_ALL),
    "convolutional, 20 samples": _Scenario("convolutional", samples=20, methods=_ALL),
    "5 clients": _Scenario(clients=5, methods=_ALL),
    "20 clients": _Scenario(clients=20, methods=_ALL),
    "50 clients": _Scenario(clients=50, methods=_ALL),
    "100 clients, a tenth a round": _Scenario(clients=100, participation=0.1, methods=_ALL),
}
"""Scenarios by name, which is the column `circumstance` of rows and table."""


def federations(*, scale: Scale = "quick", seed: int = 0, digits: Digits | None = None) -> Plan:
    """Plan all kinds, aggregators and scenarios; `paper` needs a GPU and as many images as MNIST.

    `quick` runs four kinds and six methods in one scenario.
    """
    if scale == "paper" and digits is None:
        raise InputError(
            "federations at paper size need a file such as the whole of MNIST: give --images FILE"
        )
    kinds, scenarios, count = tuple(KINDS), _SCENARIOS, _SEEDS
    if scale == "quick":
        kinds, count = ("equal", "dirichlet-0.1", "flipped-3", "paper"), 2
        usual = "perceptron, 200 samples"
        scenarios = {usual: replace(_SCENARIOS[usual], methods=(*_RIVALS, _LEARNED))}
    # Studies with different seeds share no federation.
    seeds = range(count * seed, count * (seed + 1))
    settings = replace(_SCALES[scale], seed=seed)
    _check_images(embedded_digits() if digits is None else digits, settings, scenarios)
    cells = []
    for scenario, own in scenarios.items():
        for method, kind, number in product(own.methods, kinds, seeds):
            values = {"circumstance": scenario, "method": method, "kind": kind, "seed": number}
            name = _joined(scenario, method, kind, str(number))
            cells.append(Cell(name, values, program=_joined(scenario, method)))
    about = {
        "data": (embedded_digits() if digits is None else digits).summary(),
        "policy": shipped_fingerprint(),
        **settings.to_dict(),
        "seeds": list(seeds),
        "all_kinds": list(kinds),
    }
    computing = partial(_compute_federations, settings=settings, digits=digits)
    # At paper size a program takes up to 21 GiB of a GPU.
    return Plan("federations", tuple(cells), computing, _conclude, about, at_once=4)


def _check_images(
    digits: Digits, settings: GradientSettings, scenarios: Mapping[str, _Scenario]
) -> None:
    """Raise an `InputError` if there are too few images for a scenario or its server."""
    clients, server = len(halves(digits)[1]), int(digits.server.sum())
    for name, own in scenarios.items():
        needed, tested = own.clients * settings.samples, own.samples + settings.test
        if needed > clients or tested > server:
            raise InputError(
                f"federations: {name!r} needs {needed} images for clients, which are "
                f"{1 - TRAINING:.0%} of all clients' images, and {tested} of the server's; there are "
                f"{clients} and {server}; give a larger file by --images"
            )


def _joined(*words: str) -> str:
    """Join words into a file name.

    Examples
    --------
    >>> _joined("20 clients", "FedAvg, step 1.5", "dirichlet-0.1")
    '20-clients-fedavg-step-15-dirichlet-01'
    """
    plain = "-".join(words).lower().replace(" ", "-")
    return "".join(letter for letter in plain if letter.isalnum() or letter == "-")


def _compute_federations(
    cells: Sequence[Cell],
    progress: OnProgress,
    *,
    settings: GradientSettings,
    digits: Digits | None = None,
) -> Rows:
    """Run the federations of all cells with their aggregator in one `vmap`."""
    first = cells[0]
    own = _SCENARIOS[first["circumstance"]]
    here = replace(settings, model=own.model, width=8 if own.model == "convolutional" else 32)
    digits = read_digits(settings) if digits is None else digits
    wanted = [(cell["kind"], own.clients, cell["seed"]) for cell in cells]
    federation, tasks = unseen_world(
        here, digits, wanted, samples=own.samples, participation=own.participation
    )
    # Each key determines first model, batches and server samples, the same for every aggregator.
    keys = [
        jax.random.fold_in(jax.random.key(1000 + cell["seed"]), list(KINDS).index(cell["kind"]))
        for cell in cells
    ]
    method = first["method"]
    aggregator = aggregators.Learned(shipped_policy()) if method == _LEARNED else PEERS[method]
    last = federation.horizon - 1
    record = aggregators.run_episodes(
        federation, aggregator, tasks, jnp.stack(keys), test_from=last
    )
    for cell, tested in zip(cells, np.asarray(record.tested[:, last], float), strict=True):
        yield cell, pd.DataFrame([{"tested": tested, **cell.values}])
    progress(f"{first.program}: {len(cells)} federations", 1.0)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Return table, verdicts and figure; each seed is an experiment."""
    kinds = list(dict.fromkeys(rows["kind"]))
    found: _Found = {}
    for (scenario, method), own in rows.groupby(["circumstance", "method"], sort=False):
        finals = own.pivot(index="kind", columns="seed", values="tested").loc[kinds]
        found.setdefault(scenario, {})[method] = finals.to_numpy(float)
    # Final accuracy, gain over FedAvg and lead of the learned aggregation, by kind and in the mean.
    # The plot shows the gains of the learned aggregation, and the mean gains of its rivals.
    means = {"mean of kinds": np.arange(len(kinds))}
    means["mean without the paper's split"] = np.flatnonzero(
        [_skew(kind) != "paper" for kind in kinds]
    )
    places = {kind: np.array([place]) for place, kind in enumerate(kinds)} | means
    records = []
    shown: dict[str, dict[str, Estimate]] = {scenario: {} for scenario in found}
    for scenario, methods in found.items():
        ours, plain = methods[_LEARNED], methods["FedAvg"]
        for (method, tested), (kind, own) in product(methods.items(), places.items()):
            gain, ahead = _over_seeds(tested[own], plain[own]), _over_seeds(ours[own], tested[own])
            if method == _LEARNED:
                shown[scenario][kind] = gain
            elif method in _RIVALS[1:] and kind == "mean of kinds":
                shown[scenario][f"{kind}: {method}"] = gain
            records.append(
                {"circumstance": scenario, "kind": kind, "method": method}
                | {"seeds": gain.n, "final": float(tested[own].mean())}
                | {"gain": gain.value, "gain low": gain.low, "gain high": gain.high}
                | {"ahead": ahead.value, "ahead low": ahead.low, "ahead high": ahead.high}
            )
    table = pd.DataFrame(records)
    title = "Every kind of federation: the shipped policy beside its peers"
    notes = []
    for scenario, methods in found.items():
        finals = {name: float(tested.mean()) for name, tested in methods.items()}
        order = sorted(finals, key=lambda name: -finals[name])
        shown_means = ", ".join(f"{name} {finals[name]:.3f}" for name in order)
        notes.append(f"{scenario}, mean of {len(kinds)} kinds: {shown_means}")
    notes += _where_beaten(table)
    seeds = int(table.seeds.min())
    if seeds < _FEW:
        notes.append(f"{seeds} seeds show that it runs; their intervals mean little.")
    draw = partial(forest, shown, "test accuracy over FedAvg's, last round", 2.4)
    return [FigureResult("federations", title, table, _verdicts(found, kinds), draw, notes)]


def _harmless(where: str, gains: dict[str, Estimate]) -> Verdict:
    """Test that none of these kinds is below FedAvg by more than .003, or significantly."""
    # Report a kind that refutes the claim, otherwise the one that is closest to refuting it.
    sure = [kind for kind in gains if gains[kind].high < -0.003]
    nearest = min(sure or gains, key=lambda kind: gains[kind].low)
    shown = gains[nearest]
    claim = f"{where} below FedAvg by more than .003"
    # Name the kind beside its gain and not in the claim: claims are the same for all seeds.
    levels = {nearest: shown.value}
    within = Verdict.of_all(claim, [*gains.values()], above=-0.003, paper=False, levels=levels)
    if sure:
        ends = (shown.low, shown.high)
        within = replace(within, estimate=shown.value, interval=ends)
    # A kind that is significantly below FedAvg refutes the claim, however small the difference.
    harmed = any(gain.high < 0 for gain in gains.values())
    return replace(within, holds=within.holds and not harmed)


def _skew(kind: str) -> str:
    """Return the label split of a kind, without its faults and schedules."""
    return kind.partition("+")[0]


def _over_seeds(first: np.ndarray, second: np.ndarray) -> Estimate:
    """Mean over kinds of `first - second`, both (kinds, seeds); its interval is over seeds."""
    return compare(first.mean(0), second.mean(0))


def _where_beaten(table: Any) -> list[str]:
    """List rivals significantly ahead in the mean of kinds, and kinds on which FedAvg is."""
    behind = table[(table["ahead high"] < 0) & table.method.isin(_RIVALS)]
    in_mean = behind[behind.kind == "mean of kinds"]
    by_kind = behind[(behind.method == "FedAvg") & ~behind.kind.str.startswith("mean ")]
    notes = []
    for what, own in (("in the mean of kinds", in_mean), ("on a kind", by_kind)):
        found = [
            f"{row.circumstance}, by {row.method}"
            + (f" on {row.kind}" if own is by_kind else "")
            + f": {100 * row.ahead:.1f} [{100 * row['ahead low']:.1f}, {100 * row['ahead high']:.1f}]"
            for _, row in own.iterrows()
        ]
        said = "; ".join(found) if found else "nowhere"
        rivals = "a rival" if own is in_mean else "FedAvg"
        notes.append(f"Beaten by {rivals} {what}, in points: {said}.")
    return notes


def _verdicts(found: _Found, kinds: list[str]) -> Iterator[Verdict]:
    for scenario, methods in found.items():
        ours, plain = methods[_LEARNED], methods["FedAvg"]
        levels = {name: float(tested.mean()) for name, tested in methods.items()}
        gains = {kind: compare(ours[place], plain[place]) for place, kind in enumerate(kinds)}
        held_back = {kind: gain for kind, gain in gains.items() if kind in HELD_BACK}
        for which, own in (("no kind", gains), ("no kind held back from training", held_back)):
            if own:
                yield _harmless(f"{scenario}: on {which}", own)
        rivals = [name for name in _RIVALS if name in methods]
        strongest = max(rivals, key=lambda name: levels[name])
        for rival in rivals:
            both = {"learned": levels[_LEARNED], rival: levels[rival]}
            claim = f"{scenario}: ahead of {rival}, mean of kinds"
            gain = _over_seeds(ours, methods[rival])
            yield Verdict.of(claim, gain, paper=False, levels=both)
        for which, rival in (("FedAvg", "FedAvg"), ("the strongest rival", strongest)):
            # Kinds and seeds are both samples.
            claim = f"{scenario}: ahead of {which} in federations in general"
            crossed = over_rows_and_columns(ours - methods[rival])
            both = {_LEARNED: levels[_LEARNED], rival: levels[rival]}
            yield Verdict.of(claim, crossed, paper=False, levels=both)
        attacked = [place for place, kind in enumerate(kinds) if kind in ATTACKED]
        defences = [name for name in _DEFENCES if name in methods]
        if attacked and defences:
            best = max(defences, key=lambda name: float(methods[name][attacked].mean()))
            # The same numbers choose the best defence, so test the claim against every defence.
            gaps = [_over_seeds(ours[attacked], methods[name][attacked]) for name in defences]
            both = {name: float(methods[name][attacked].mean()) for name in (_LEARNED, best)}
            claim = f"{scenario}: among attackers within .005 of the best defence"
            yield Verdict.of_all(claim, gaps, above=-0.005, paper=False, levels=both)
