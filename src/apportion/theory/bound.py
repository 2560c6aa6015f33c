"""The performance bound for one task of a family: Theorems 1 and 1', every term named.

LSPI trains on the average MDP with N T samples (Corollary 1). The error e = max_k ||e_k||_mu is
measured (the oracle form) or bounded with probability 1 - delta, which asks for Lemma 4's N.
"""

import math
from dataclasses import asdict, dataclass, replace

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from apportion.errors import InputError
from apportion.theory.concentrability import Distribution, check_distribution, concentrability
from apportion.theory.distance import task_distance
from apportion.theory.estimation import (
    Features,
    LearningConstants,
    LearningError,
    learning_error,
    samples_needed,
)
from apportion.theory.mdp import MDP
from apportion.theory.theorem import Terms, TransferConstants


@dataclass(frozen=True)
class Bound:
    """The bound for one task of a family when LSPI trains on the average MDP (Corollary 1)."""

    task: int
    tasks: int
    samples: float
    """N, per task; the path on the average MDP has N T samples."""
    iterations: int
    delta: float
    transfer: TransferConstants
    learning: LearningConstants
    distance_exact: bool
    samples_needed: float
    """Path length Lemma 4 asks for, N T."""
    trivial: float
    """2 V_max of the task, which no policy's suboptimality can exceed."""
    oracle_error: float | None = None
    reason: str | None = None
    """Why the bound is infinite, where mu does not cover sigma's paths."""

    @property
    def lemma_4_holds(self) -> bool:
        """Whether N T samples are enough for the high-probability form."""
        return self.samples * self.tasks >= self.samples_needed

    @property
    def error(self) -> LearningError:
        """The high-probability bound on e."""
        return learning_error(self.learning, self.samples * self.tasks, self.iterations, self.delta)

    @property
    def theorem_1(self) -> Terms:
        """Theorem 1, with probability 1 - delta."""
        return self.transfer.theorem_1(self.error, self.iterations)

    @property
    def theorem_1_prime(self) -> Terms:
        """Theorem 1', with probability 1 - delta."""
        return self.transfer.theorem_1_prime(self.error, self.iterations)

    @property
    def oracle(self) -> tuple[Terms, Terms] | None:
        """Theorems 1 and 1' with the measured e, where one was given."""
        if self.oracle_error is None:
            return None
        error = LearningError(0.0, self.oracle_error)
        return (
            self.transfer.theorem_1(error, self.iterations),
            self.transfer.theorem_1_prime(error, self.iterations),
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per form of the bound, one column per term."""
        forms = {"Theorem 1": self.theorem_1, "Theorem 1'": self.theorem_1_prime}
        if self.oracle is not None:
            forms |= {
                "Theorem 1, measured e": self.oracle[0],
                "Theorem 1', measured e": self.oracle[1],
            }
        return pd.DataFrame(
            {"form": name, **asdict(terms), "total": terms.total} for name, terms in forms.items()
        )

    def summary(self) -> str:
        """What the bound says, its parts, and whether it says anything."""
        t, c = self.transfer, self.learning
        how = "exactly, over all policies" if self.distance_exact else "from above"
        table = self.to_frame().to_string(index=False, float_format=lambda x: f"{x:.4g}")
        lines = [
            f"Suboptimality on task {self.task} of the policy LSPI learns on the average of {self.tasks} "
            f"tasks, N = {self.samples:,.0f} samples each, K = {self.iterations}",
            f"  C'_t = {t.first:.4g}, C'' = {t.second:.4g}, C = {c.coverage:.4g}, "
            f"eps = {t.distance:.4g} ({how}), R_max = {t.reward_bound:.4g}",
            f"  with probability {1 - self.delta:g}, or with the measured e where that is said:",
            *("  " + line for line in table.splitlines()),
            f"  trivial bound 2 V_max = {self.trivial:.4g}",
        ]
        if self.reason is not None:
            lines.append(f"  {self.reason}.")
        elif not self.lemma_4_holds:
            lines.append(
                f"  Lemma 4 fails: it asks for N T > {self.samples_needed:.3g} samples and there are "
                f"{self.samples * self.tasks:.3g}, so the high-probability bound is infinite."
            )
        if min(self.theorem_1.total, self.theorem_1_prime.total) > self.trivial:
            lines.append(
                "  The high-probability bound is vacuous here: the trivial one is smaller."
            )
        return "\n".join(lines)

    def plot(self) -> Figure:
        """Theorem 1' and its terms against N, T and eps, beside the trivial bound."""
        enough = max(self.samples, 10 * self.samples_needed / self.tasks)
        if not math.isfinite(enough):
            raise InputError(
                f"plot: the bound is infinite at every N ({self.reason or 'Lemma 4 never holds'}); "
                "there is nothing to draw"
            )
        lengths = np.geomspace(100, 1e4 * enough, 121)
        counts = np.unique(np.geomspace(1, 1000, 61).astype(int))
        distances = np.linspace(0, max(2 * float(self.transfer.distance), 0.1), 41)
        settled = replace(self, samples=enough)
        panels = (
            ("samples per task N", lengths, [replace(self, samples=float(n)) for n in lengths]),
            ("tasks T", counts, [replace(settled, tasks=int(t)) for t in counts]),
            (
                "task distance ε",
                distances,
                [
                    replace(settled, transfer=replace(self.transfer, distance=float(e)))
                    for e in distances
                ],
            ),
        )
        figure = Figure(figsize=(12, 3.8), layout="constrained")
        axes = figure.subplots(1, 3, sharey=True)
        for axis, (label, grid, bounds) in zip(axes, panels, strict=True):
            _draw_terms(axis, grid, [bound.theorem_1_prime for bound in bounds])
            axis.axhline(self.trivial, color="0.35", linestyle=":", label="trivial: 2 V_max")
            axis.set(xlabel=label, yscale="log", xscale="linear" if grid[0] == 0 else "log")
            axis.spines[["top", "right"]].set_visible(False)
        floor = min(self.theorem_1_prime.task_distance, self.trivial) / 30
        axes[0].set(
            ylabel="bound on suboptimality",
            title="infinite until Lemma 4 holds",
            ylim=(floor, None),
        )
        axes[1].set_title(f"at N = {enough:.1e}")
        axes[2].set_title(f"at N = {enough:.1e}, T = {self.tasks}")
        axes[2].legend(frameon=False, fontsize=8, loc="lower right")
        figure.suptitle("Theorem 1', term by term")
        return figure


_COLOURS = {
    "approximation": "#8c6bb1",
    "estimation": "#2b7bba",
    "propagation": "#41ab5d",
    "task_distance": "#e6550d",
}


def _draw_terms(axis, grid: np.ndarray, terms: list[Terms]) -> None:
    for name, colour in _COLOURS.items():
        height = np.array([getattr(term, name) for term in terms], float)
        if (height > 0).any():
            axis.plot(grid, height, color=colour, label=name.replace("_", " "))
    axis.plot(grid, [term.total for term in terms], color="black", linewidth=2, label="total")


def _check(family: MDP, samples: float, task: int, iterations: int, delta: float) -> None:
    if not 0 <= task < len(family):
        raise InputError(
            f"task: {task} is not among the {len(family)} tasks; choose 0 to {len(family) - 1}"
        )
    if samples < 1 or iterations < 1:
        raise InputError(f"samples {samples:g} and iterations {iterations}: both must be >= 1")
    if not 0 < delta < 1:
        raise InputError(f"delta: {delta} is outside (0, 1); it is the bound's chance to fail")


def _distribution(given: Distribution | None, name: str, states: int) -> Distribution:
    """The given distribution, checked; uniform where there is none."""
    if given is None:
        return np.full(states, 1 / states)
    check_distribution(given, name, states)
    return given


def error_bound(
    family: MDP,
    *,
    samples: float,
    task: int = 0,
    iterations: int = 20,
    delta: float = 0.1,
    mu: Distribution | None = None,
    sigma: Distribution | None = None,
    features: Features | None = None,
    oracle_error: float | None = None,
) -> Bound:
    """The performance bound for one task when LSPI trains on the family's average MDP.

    Parameters
    ----------
    family, task
        The tasks, along the leading axis, and the one to bound.
    samples, iterations
        N, samples per task (the average MDP's path has N T of them, with the task drawn anew at
        every step), and K, LSPI's iterations.
    mu, sigma, features
        Where errors and performance are measured, uniform unless given; phi(x), a row per state, one
        feature per state unless given.
    delta, oracle_error
        The bound's chance to fail; a measured e = max_k ||e_k||_mu, which adds the oracle form.

    Examples
    --------
    >>> from apportion.theory import random_family
    >>> family = random_family(states=6, actions=3, tasks=8, spread=0.1, gamma=0.7)
    >>> result = error_bound(family, samples=1e6)
    >>> result.lemma_4_holds, float(result.theorem_1.total)
    (False, inf)
    """
    _check(family, samples, task, iterations, delta)
    average = family.average()
    states = average.states
    mu = _distribution(mu, "mu", states)
    sigma = _distribution(sigma, "sigma", states)
    features = np.eye(states) if features is None else features
    own = concentrability(family[task].kernel, family.gamma, sigma=sigma, mu=mu)
    trained = concentrability(average.kernel, family.gamma, sigma=sigma, mu=mu)
    distance = task_distance(family[task], average, mu)
    learning = LearningConstants.of(average, features, mu)
    transfer = TransferConstants(
        family.gamma,
        float(average.reward_bound),
        float(own.first),
        float(trained.second),
        distance.value,
    )
    return Bound(
        task, len(family), samples, iterations, delta, transfer, learning,
        distance_exact=distance.exact,
        samples_needed=samples_needed(learning, iterations, delta),
        trivial=2 * float(family[task].value_bound),
        oracle_error=oracle_error,
        reason=own.reason or trained.reason,
    )  # fmt: skip
