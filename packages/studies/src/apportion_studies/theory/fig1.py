"""Figure 1: LSPI on the synthetic problem, real against permuted examples, and the gap due to eps.

Data: m = 10 entities, examples drawn from the state-action space. Arms: N real examples; 20 real examples
permuted up to N, as in the paper; and, ours, the equivariant model on the 20 real examples, which is
equivalent to all m! orderings of them. Claims: regret falls with N; permuting helps; eps causes a gap.
The bound is evaluated on this problem as far as possible. States are drawn independently of the past,
so C = C' = C'' = 1 and no mixing is needed; eps and R_max are exact. e is not available: the theorem is
about LSTD of V on a path, the figure about LSTD of Q with a ridge. So we report the terms of eps and K
with e = 0, a lower limit of every form of the bound, and the number of samples that Lemma 4 requires. A
cell is an eps; a row is the regret of one run, arm and N.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure

from apportion.certify.statistics import Estimate, compare, mean_over, of_means
from apportion.domains import synthetic
from apportion.domains.synthetic import reward, separate_basis, spaced_betas, tied_basis
from apportion.studies.engine import Cell, Plan
from apportion.studies.figures import band, panels
from apportion.studies.registry import Scale
from apportion.studies.study import FigureResult, Verdict, select
from apportion.theory.bound import (
    LearningConstants,
    LearningError,
    TransferConstants,
    samples_needed,
)
from apportion.theory.lspi import in_float64
from apportion_studies.theory.common import log_slope, means_by, never_broken, one_by_one

_SEEDS = {"quick": 20, "paper": 40}
SIZES = (20, 50, 100, 200, 500, 1000, 2000)
_EPSILONS = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)
_ARMS = ("real", "permuted", "tied")
_REAL = SIZES[0]
_FRESH, _GAMMA, _ITERATIONS = 1000, 0.5, 5
_DELTA = 0.1
"""Failure probability of the high-probability form."""

_Regrets = Float[np.ndarray, "runs arms sizes"]


@in_float64
def _regrets_of(betas, fresh, runs: int, key_data):
    """Mean regret on fresh states: runs, by arm (real, permuted, tied), by number of examples.

    The fresh states, and each run's states, allocations and noise, are the same for every arm and beta.
    """
    betas, fresh = jnp.asarray(betas), jnp.asarray(fresh)
    draw_key, permute_key = jax.random.split(jax.random.wrap_key_data(key_data))
    real = synthetic.draw_examples((runs, SIZES[-1]), betas, key=draw_key)
    permuted = synthetic.permute_examples(real[:, :_REAL], SIZES[-1], key=permute_key)
    both = jax.tree.map(lambda *leaves: jnp.stack(leaves, 1), real, permuted)
    best = reward(
        fresh, jax.vmap(synthetic.entropic_allocation, (0, None))(fresh, betas), betas
    ).mean()

    def regret(examples, basis):
        theta = synthetic.lspi_simplex(examples, jnp.asarray(basis), _GAMMA, iterations=_ITERATIONS)
        chosen = jax.vmap(synthetic.simplex_greedy, (None, 0))(theta, fresh)
        return best - reward(fresh, chosen, betas).mean()

    m = betas.shape[0]
    separate = jax.vmap(jax.vmap(lambda examples: regret(examples, synthetic.separate_basis(m))))
    curves = jnp.stack([separate(both[:, :, :n]) for n in SIZES], -1)
    alone = jax.vmap(lambda examples: regret(examples, synthetic.tied_basis(m)))(real[:, :_REAL])
    level = jnp.broadcast_to(alone[:, None, None], (runs, 1, len(SIZES)))
    return jnp.concatenate([curves, level], 1)


def equivalent_samples(
    curve: np.ndarray, level: np.ndarray, sizes: Sequence[int] = SIZES
) -> np.ndarray:
    """The N at which a falling curve reaches a level, between its points on log-log axes."""
    curve, level = np.broadcast_arrays(np.log(curve), np.log(level)[..., None])
    place = np.clip((curve > level).sum(-1), 1, len(sizes) - 1)[..., None]
    above, below = (np.take_along_axis(curve, place - shift, -1)[..., 0] for shift in (1, 0))
    share = np.clip((above - level[..., 0]) / (above - below), 0, 1)
    grid, place = np.log(sizes), place[..., 0]
    return np.asarray(np.exp(grid[place - 1] + share * (grid[place] - grid[place - 1])))


def _ordering_distance(betas: Float[np.ndarray, " entities"]) -> float:
    """The theorem's eps between this task and the average of its orderings.

    States are independent of the past, so that only rewards differ: it is the largest
    |sum_i (beta_i - mean beta) (-a_i log a_i)| over allocations, the same on either side of the mean
    for evenly spaced betas.
    """
    above = betas - betas.mean()
    above = above[above > 1e-12]
    if above.size == 0:
        return 0.0
    shares = in_float64(synthetic.entropic_allocation)(np.zeros_like(above), above)
    return float(-(above * shares * np.log(shares)).sum())


def _reward_bound(betas: Float[np.ndarray, " entities"]) -> float:
    """R_max: the reward of the best allocation if every x_i is 1; no reward is below 0."""
    ones = np.ones_like(betas)
    shares = in_float64(synthetic.entropic_allocation)(ones, betas)
    return float((shares - betas * shares * np.log(shares)).sum())


def _least_bounds(epsilon: float) -> tuple[float, float, float]:
    """Theorem 1 and Theorem 1' with e = 0, and the trivial bound 2 V_max.

    A task is the entities in their order. Training uses the average over all orderings, in which every
    entity has the mean beta.
    """
    betas = spaced_betas(10, epsilon)
    average = np.full_like(betas, betas.mean())
    known = TransferConstants(_GAMMA, _reward_bound(average), 1.0, 1.0, _ordering_distance(betas))
    nothing = LearningError(0.0, 0.0)
    forms = (known.theorem_1, known.theorem_1_prime)
    first, second = (float(form(nothing, _ITERATIONS).total) for form in forms)
    return first, second, 2 * _reward_bound(betas) / (1 - _GAMMA)


def _examples_asked(basis: Float[np.ndarray, "features dimension"]) -> float:
    """Samples that Lemma 4 requires with these features; infinite if the features are dependent."""
    examples = synthetic.draw_examples((50_000,), jnp.full(10, 0.5), key=jax.random.key(0))
    features = synthetic.simplex_features(examples.states, examples.allocations)
    taken = np.asarray(features, float) @ basis
    eigenvalue = float(np.linalg.eigvalsh(taken.T @ taken / len(taken))[0])
    # The norm is largest if one entity has everything.
    whole = np.eye(10)[:1]
    largest = np.asarray(synthetic.simplex_features(jnp.ones((1, 10)), jnp.asarray(whole)), float)
    constants = LearningConstants(
        gamma=_GAMMA,
        value_bound=_reward_bound(np.full(10, 0.5)) / (1 - _GAMMA),
        coverage=1.0,
        dimension=basis.shape[1],
        feature_bound=float(np.linalg.norm(largest @ basis)),
        smallest_eigenvalue=eigenvalue if eigenvalue > 1e-9 else 0.0,
        approximation=0.0,
        mixing=math.inf,
    )
    return samples_needed(constants, _ITERATIONS, _DELTA)


def fig1(*, scale: Scale = "quick", seed: int = 0) -> Plan:
    """All three panels of Figure 1."""
    cells = Cell.each("eps", "epsilon", _EPSILONS)
    compute = partial(one_by_one, partial(_measure, runs=_SEEDS[scale], seed=seed))
    return Plan("fig1", cells, compute, _conclude, {"seeds": _SEEDS[scale], "gamma": _GAMMA})


def _measure(epsilon: float, *, runs: int, seed: int) -> pd.DataFrame:
    """The regret of every run, arm and N; the tied model sees the 20 real examples alone."""
    fresh = np.random.default_rng(0).uniform(size=(_FRESH, 10))
    key_data = jax.random.key_data(jax.random.key(seed))
    regrets = _regrets_of(spaced_betas(10, epsilon), fresh, runs, key_data)
    names = {"epsilon": [epsilon], "run": range(runs), "arm": _ARMS, "samples": SIZES}
    index = pd.MultiIndex.from_product(list(names.values()), names=list(names))
    rows: Any = pd.DataFrame({"regret": regrets.ravel()}, index).reset_index()
    return rows[(rows.arm != "tied") | (rows.samples == _REAL)].reset_index(drop=True)


def _conclude(rows: Any, settings: dict[str, Any]) -> list[FigureResult]:
    """Table, verdicts and figure from the regret of every run."""
    regrets = {}
    for epsilon in _EPSILONS:
        real, permuted, tied = (
            select(rows, epsilon=epsilon, arm=arm)
            .pivot(index="run", columns="samples", values="regret")
            .to_numpy()
            for arm in _ARMS
        )
        # The tied arm has the same value at every N.
        regrets[epsilon] = np.stack([real, permuted, np.broadcast_to(tied, real.shape)], 1)
    table = means_by(rows, ["epsilon", "arm", "samples"], "regret", "runs")
    worth = math.exp(_worth(regrets).value)
    same, far = (regrets[epsilon].mean(0) for epsilon in (0.0, 0.8))
    gaps = _gaps(regrets).mean(0)
    notes = (
        f"At eps = 0 the 20 tied examples are worth about {worth:.0f} real ones "
        f"({worth / _REAL:.0f}x): the order of m, not exponential.",
        f"Permuting saturates at the tied model's level: {same[1, -1]:.4f} at N = 2000 against "
        f"{same[2, 0]:.4f} (eps = 0), {far[1, -1]:.4f} against {far[2, 0]:.4f} (eps = .8).",
        f"At eps = .8 permuting helps against 20 real examples ({far[0, 0]:.3f} to "
        f"{far[1, -1]:.3f}) and hurts against 50 real ones ({far[0, 1]:.3f}) and more.",
        f"The theorem's eps is {_ordering_distance(spaced_betas(10, 0.8)) / 0.8:.3f} times the range of "
        "the betas, so that the range is a fair stand-in for it; C' = C'' = 1.",
        "Gap at N = 2000: "
        + ", ".join(f"{gap:.4f} at eps {e:g}" for e, gap in zip(regrets, gaps, strict=True))
        + ".",
        *_notes_on_the_bound(regrets),
    )
    title = "Figure 1: what permuting 20 examples is worth on the synthetic problem"
    found = (table, _verdicts(regrets), lambda: _plot(regrets), notes)
    return [FigureResult("fig1", title, *found)]


def _notes_on_the_bound(regrets: dict[float, _Regrets]) -> Iterator[str]:
    for epsilon in (0.0, 0.8):
        first, second, trivial = _least_bounds(epsilon)
        measured = regrets[epsilon][:, 1, -1].mean() / (1 - _GAMMA)
        yield (
            f"eps = {epsilon:g}, with e = 0: Theorem 1 allows a suboptimality of {first:.3g}, Theorem 1' "
            f"of {second:.3g}, no policy's is above {trivial:.3g}; that of 20 examples permuted up to 2000 "
            f"is {measured:.3g} (mean over states)."
        )
    separate = np.delete(separate_basis(10), -2, 1)
    yield (
        "Lemma 4 asks for "
        f"{_examples_asked(separate):.2g} samples with parameters of each entity's own (less one offset, "
        f"for all ten depend on each other), {_examples_asked(tied_basis(10)):.2g} with shared ones: "
        f"at {SIZES[-1]} examples the high-probability form is infinite."
    )
    yield "That the gap grows like the square of eps was seen before the slope was asked for."


def _gaps(regrets: dict[float, _Regrets]) -> Float[np.ndarray, "runs epsilons"]:
    """Excess regret of permuted over real examples at N = 2000."""
    return np.stack([values[:, 1, -1] - values[:, 0, -1] for values in regrets.values()], 1)


def _worth(regrets: dict[float, _Regrets]) -> Estimate:
    """The log of the number of real examples that 20 tied ones are worth at eps = 0."""
    return of_means(regrets[0.0], lambda c: np.log(equivalent_samples(c[..., 0, :], c[..., 2, 0])))


def _verdicts(regrets: dict[float, _Regrets]) -> Iterator[Verdict]:
    same, far = regrets[0.0], regrets[0.8]
    for name, values in (("eps = 0", same), ("eps = .8", far)):
        falling = of_means(values, lambda c: log_slope(c[..., 0, 2:], np.array(SIZES[2:])))
        claim = (
            f"{name}: regret falls with the number of real examples (slope of log regret, N >= 100)"
        )
        yield Verdict.of(claim, falling, below=0.0)
        claim = f"{name}: permuting 20 examples up to 2000 lowers their regret (by)"
        yield Verdict.of(claim, compare(values[:, 1, 0], values[:, 1, -1]))
    gaps = _gaps(regrets)
    claim = "eps = .8: a gap is left between 20 permuted and 2000 real examples"
    yield Verdict.of(claim, mean_over(gaps[:, -1]))
    claim = "the gap at N = 2000 grows with eps (least step between neighbouring eps)"
    yield Verdict.of_all(claim, [mean_over(step) for step in np.diff(gaps).T])
    growth = of_means(gaps[:, 2:], lambda g: log_slope(g, np.array(_EPSILONS[2:])))
    claim = (
        "the gap grows like eps, as the bound's term, rather than like its square (slope below 1.5)"
    )
    yield Verdict.of(claim, growth, below=1.5, paper=False)
    shares = pd.DataFrame(
        {"spread": epsilon, "run": run, "share": regret / (1 - _GAMMA) / _least_bounds(epsilon)[0]}
        for epsilon, values in regrets.items()
        for run, regret in enumerate(values[:, 1, -1])
    )
    claim = (
        "no run on permuted examples loses more than Theorem 1 allows with e = 0 (share that does)"
    )
    yield never_broken(shares, "share", claim)
    first, second, trivial = _least_bounds(_EPSILONS[-1])
    for name, least in (("1", first), ("1'", second)):
        claim = f"eps = .8: with e = 0 Theorem {name} says more than that no policy loses more than 2 V_max"
        ratio, says = least / trivial, least < trivial
        yield Verdict(
            f"{claim} (ratio)", says, ratio, (ratio, ratio), 1, name == "1", not says, exact=True
        )
    late = of_means(same, lambda c: log_slope(c[..., 1, 4:], np.array(SIZES[4:])))
    claim = "eps = 0: permuted examples gain like 1/sqrt(NT) (slope over N = 500 to 2000 is <= -.5)"
    yield Verdict.of(claim, late, below=-0.5)
    ratio = of_means(same, lambda c: np.log(c[..., 2, 0] / c[..., 1, -1]))
    claim = (
        "eps = 0: the tied model on the 20 real examples does no worse than 2000 permuted (ratio)"
    )
    yield Verdict.of(claim, ratio, below=0.0, paper=False).scaled(math.exp)
    claim = "eps = 0: 20 tied examples are worth at least m/2 = 5 times as many real ones (number)"
    least = math.log(5 * _REAL)
    yield Verdict.of(claim, _worth(regrets), above=least, paper=False).scaled(math.exp)
    claim = (
        "eps = .8: permuting hurts against as many real examples, from 50 on (least excess regret)"
    )
    harm = [compare(far[:, 1, n], far[:, 0, n]) for n in range(1, len(SIZES))]
    yield Verdict.of_all(claim, harm, paper=False)


def _plot(regrets: dict[float, _Regrets]) -> Figure:
    """Regret by number of examples for different and for identical entities, and the gap."""
    names = (
        "N real examples",
        "20 real examples, permuted up to N",
        "20 real examples, tied model",
    )
    figure, axes = panels(13, 4.2, 3)
    axes[0].sharey(axes[1])
    for axis, epsilon in zip(axes, (0.8, 0.0), strict=False):
        for arm, name in enumerate(names):
            ends = [mean_over(column) for column in regrets[epsilon][:, arm].T]
            band(axis, SIZES, ends, f"C{arm}", name)
        axis.set(xscale="log", yscale="log", xlabel="examples N", title=f"ε = {epsilon:g}")
        axis.set_xticks(SIZES, [str(n) for n in SIZES], rotation=30)
        axis.minorticks_off()
    axes[0].set_ylabel("regret on fresh states")
    axes[1].legend(fontsize=9)
    gaps = [mean_over(column) for column in _gaps(regrets).T]
    band(axes[2], list(regrets), gaps, "C1", "permuted − real")
    axes[2].set(xlabel="ε: range of the betas", ylabel="regret, permuted − real")
    axes[2].set_title("gap at N = 2000")
    return figure
