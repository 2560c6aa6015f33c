"""Performance bound for one task of a family: Theorems 1 and 1' and Corollary 2, term by term.

||V_t* - V_t^{pi_K}||_sigma is at most
Theorem 1:  2/(1-g)^2 { sqrt(C'') e + g^{(K-1)/2} R_max + 3 eps sqrt(2 C'_t) }
Theorem 1': 2g/(1-g)^2 sqrt(C'') e + 2 R_max g^K/(1-g) + 2 eps sqrt(C'_t)/(1-g)
LSPI trains on the average MDP with n = N T samples (Corollary 1). The error e = max_k ||e_k||_mu is
measured (the oracle form) or bounded with probability 1 - delta (Lazaric, Ghavamzadeh, Munos 2012):
e <= (1+g) sqrt(C) [ 2/sqrt(1-g^2) (2 sqrt2 E0 + E2)
                     + 2/(1-g) V_max L sqrt(d/nu) (sqrt(8 log(8dK/delta)/n) + 1/n) + E1 ],
if the path is long enough for Lemma 4: n > (288 L^2 Lam/omega) max{Lam/b, 1}^{1/kappa} with
omega = omega_mu / C. Mixing is beta_i <= betabar exp(-b i^kappa); here betabar = kappa = 1.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float

from apportion.errors import InputError
from apportion.theory.distance import (
    ENUMERABLE,
    Distribution,
    concentrability,
    contraction,
    stationary_constant,
    task_distance,
)
from apportion.theory.mdp import MDP, every_policy

Features = Float[np.ndarray, "states dimension"]
Number = float | Float[np.ndarray, "..."]
"""A number, or an array over families and tasks."""


@dataclass(frozen=True)
class LearningConstants:
    """Constants in the error of LSTD on one MDP, apart from the number of samples."""

    gamma: float
    value_bound: float
    """V_max."""
    coverage: float
    """C: mu <= C rho^pi for every policy."""
    dimension: int
    """Number of features d."""
    feature_bound: float
    """L = sup_x ||phi(x)||_2."""
    smallest_eigenvalue: float
    """omega_mu, of the Gram matrix of the features under mu."""
    approximation: float
    """E0: the largest error, over policies, of the best fit to V^pi."""
    mixing: float
    """b = -log tau, tau the Dobrushin coefficient."""

    @classmethod
    def of(
        cls, mdp: MDP, features: Float[np.ndarray, "..."], mu: Distribution
    ) -> "LearningConstants":
        """Compute the constants of an MDP and its features."""
        if features.ndim != 2 or features.shape[0] != mdp.states:
            raise InputError(
                f"features: shape {features.shape} for {mdp.states} states; pass one row per state"
            )
        gram = features.T @ (mu[:, None] * features)
        tau = contraction(mdp.kernel)
        return cls(
            gamma=mdp.gamma,
            value_bound=float(mdp.value_bound),
            coverage=stationary_constant(mdp.kernel, mu),
            dimension=features.shape[1],
            feature_bound=float(np.linalg.norm(features, axis=1).max()),
            smallest_eigenvalue=max(float(np.linalg.eigvalsh(gram)[0]), 0.0),
            approximation=_approximation_error(mdp, features),
            mixing=-math.log(tau) if tau > 0 else math.inf,
        )


def _approximation_error(mdp: MDP, features: Features) -> float:
    """Return E0 = sup_pi inf_f ||f - V^pi||_{rho^pi}, or its bound V_max (f = 0) if A^S is large."""
    if np.linalg.matrix_rank(features) == mdp.states:
        return 0.0
    if mdp.actions**mdp.states > ENUMERABLE:
        return float(mdp.value_bound)
    policies = every_policy(mdp.states, mdp.actions)
    weights = np.sqrt(np.maximum(mdp.stationary(policies), 0.0))[..., None]
    target = weights * mdp.value(policies)[..., None]
    design = weights * features
    missed = target - design @ (np.linalg.pinv(design) @ target)
    return float(np.sqrt((missed**2).sum((-1, -2))).max())


def _lam(n: float, d: int, delta: float) -> float:
    return 2 * (d + 1) * math.log(6 * math.e * n) + 1 + math.log(18 / delta)


def lemma_4_asks(constants: LearningConstants, n: float, iterations: int, delta: float) -> float:
    """Return the right-hand side of Lemma 4's condition for n samples, which holds if n is larger."""
    omega = constants.smallest_eigenvalue / constants.coverage
    if omega <= 0 or constants.mixing <= 0:
        return math.inf
    lam = _lam(n, constants.dimension, delta / (4 * iterations))
    return 288 * constants.feature_bound**2 * lam / omega * max(lam / constants.mixing, 1.0)


def samples_needed(constants: LearningConstants, iterations: int, delta: float) -> float:
    """Return the length of the shortest path that satisfies Lemma 4, or infinity."""
    n = 2.0
    # The right-hand side grows like log(n)^2, so the fixed-point iteration converges.
    for _ in range(200):
        asked = lemma_4_asks(constants, n, iterations, delta)
        if not math.isfinite(asked) or abs(asked - n) <= 1e-9 * n:
            return math.floor(asked) + 1.0 if math.isfinite(asked) else math.inf
        n = max(asked, 2.0)
    return math.floor(n) + 1.0


@dataclass(frozen=True)
class LearningError:
    """The two parts of the bound on e; estimation is infinite if Lemma 4 does not hold."""

    approximation: Number
    estimation: Number


def learning_error(
    constants: LearningConstants, n: float, iterations: int, delta: float
) -> LearningError:
    """Return the high-probability bound on e = max_k ||e_k||_mu for K paths of n samples each."""
    g, v_max = constants.gamma, constants.value_bound
    d, length = constants.dimension, constants.feature_bound
    if not math.isfinite(constants.coverage):
        return LearningError(math.inf, math.inf)
    scale = (1 + g) * math.sqrt(constants.coverage)
    approximation = scale * 2 / math.sqrt(1 - g**2) * 2 * math.sqrt(2) * constants.approximation
    if n <= lemma_4_asks(constants, n, iterations, delta):
        return LearningError(approximation, math.inf)
    share = delta / (4 * iterations)
    omega = constants.smallest_eigenvalue / constants.coverage
    # f(Lam) = sqrt((2 Lam / n) max{Lam/b, 1}) of Lam and of Lam2.
    f1, f2 = (
        math.sqrt(2 * lam / n * max(lam / constants.mixing, 1.0))
        for lam in (_lam(n, d, share), 1 - math.log(share) + math.log(max(6.0, n)))
    )
    root_nu = math.sqrt(omega) / 2 - 6 * length * f1
    e1 = 24 * v_max * f1
    e2 = 12 * (v_max + length * v_max / math.sqrt(omega)) * f2
    noise = math.sqrt(8 * math.log(8 * d * iterations / delta) / n) + 1 / n
    noise *= length * math.sqrt(d) / root_nu
    estimation = 2 / math.sqrt(1 - g**2) * e2 + 2 / (1 - g) * v_max * noise + e1
    return LearningError(approximation, scale * estimation)


@dataclass(frozen=True)
class Terms:
    """Terms of a bound; their sum is `total`."""

    approximation: Number
    estimation: Number
    propagation: Number
    task_distance: Number

    @property
    def total(self) -> Number:
        """The bound."""
        return self.approximation + self.estimation + self.propagation + self.task_distance


def _carry(constant: Number, error: Number) -> Number:
    """Return the product; an infinite constant gives infinity even if the error is 0."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(constant), np.inf, constant * np.asarray(error))[()]


@dataclass(frozen=True)
class TransferConstants:
    """Constants that relate errors and distances to suboptimality: C'_t, C'', eps, R_max, gamma."""

    gamma: float
    reward_bound: Number
    first: Number
    """C'_t, from the kernel of the task."""
    second: Number
    """C'', from the kernel of the training MDP."""
    distance: Number
    """eps."""

    def theorem_1(self, error: LearningError, iterations: int) -> Terms:
        """Return the paper's bound, with corrected constants."""
        scale = 2 / (1 - self.gamma) ** 2
        return Terms(
            _carry(scale * np.sqrt(self.second), error.approximation),
            _carry(scale * np.sqrt(self.second), error.estimation),
            scale * self.gamma ** ((iterations - 1) / 2) * self.reward_bound,
            _carry(scale * 3 * np.sqrt(2 * self.first), self.distance),
        )

    def theorem_1_prime(self, error: LearningError, iterations: int) -> Terms:
        """Return the tighter bound."""
        g = self.gamma
        scale = 2 * g / (1 - g) ** 2
        return Terms(
            _carry(scale * np.sqrt(self.second), error.approximation),
            _carry(scale * np.sqrt(self.second), error.estimation),
            2 * self.reward_bound * g**iterations / (1 - g),
            _carry(2 * np.sqrt(self.first) / (1 - g), self.distance),
        )


@dataclass(frozen=True)
class TaskCount:
    """Number of tasks in a universe, and the paper's lower bound on it (Corollary 2)."""

    tasks: int
    """C(M, m)."""
    at_least: float
    """(M/m)^m."""


def corollary_2(universe: int, size: int) -> TaskCount:
    """Count the tasks of a universe: T = C(M, m) >= (M/m)^m, with its maximum at m = M/2.

    Overlapping subsets are dependent, so the gain in samples is smaller than T suggests.

    >>> corollary_2(50, 10)
    TaskCount(tasks=10272278170, at_least=9765625.0)
    """
    if not 1 <= size <= universe:
        raise InputError(f"size: {size} does not fit a universe of {universe} entities")
    return TaskCount(math.comb(universe, size), (universe / size) ** size)


@dataclass(frozen=True)
class Bound:
    """Bound for one task of a family if LSPI trains on the average MDP (Corollary 1)."""

    task: int
    tasks: int
    samples: float
    """N per task; the path on the average MDP has N T samples."""
    iterations: int
    delta: float
    transfer: TransferConstants
    coverage: float
    """C."""
    distance_exact: bool
    samples_needed: float
    """Smallest N T for which Lemma 4 holds."""
    trivial: float
    """2 V_max of the task, an upper bound for every policy."""
    theorem_1: Terms
    """With probability 1 - delta, as is `theorem_1_prime`."""
    theorem_1_prime: Terms
    oracle: tuple[Terms, Terms] | None
    """Both bounds with the measured e, if there is one."""

    @property
    def lemma_4_holds(self) -> bool:
        """Whether N T samples are enough for the high-probability bound."""
        return self.samples * self.tasks >= self.samples_needed

    def to_frame(self) -> pd.DataFrame:
        """Return a table with one row per form of the bound and one column per term."""
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
        """Describe the bound, its terms, and whether it is vacuous."""
        t = self.transfer
        how = "exactly, over all policies" if self.distance_exact else "from above"
        table = self.to_frame().to_string(index=False, float_format=lambda x: f"{x:.4g}")
        lines = [
            f"Suboptimality on task {self.task} of the policy LSPI learns on the average of {self.tasks} "
            f"tasks, N = {self.samples:,.0f} samples each, K = {self.iterations}",
            f"  C'_t = {t.first:.4g}, C'' = {t.second:.4g}, C = {self.coverage:.4g}, "
            f"eps = {t.distance:.4g} ({how}), R_max = {t.reward_bound:.4g}",
            f"  with probability {1 - self.delta:g}, or given the measured e:",
            *("  " + line for line in table.splitlines()),
            f"  trivial bound 2 V_max = {self.trivial:.4g}",
        ]
        if not self.lemma_4_holds:
            lines.append(
                f"  Lemma 4 does not hold: it needs N T > {self.samples_needed:.3g} samples, there are "
                f"{self.samples * self.tasks:.3g}. The high-probability bound is infinite."
            )
        if min(self.theorem_1.total, self.theorem_1_prime.total) > self.trivial:
            lines.append("  The high-probability bound is vacuous: the trivial bound is smaller.")
        return "\n".join(lines)


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
    """Compute the performance bound for one task if LSPI trains on the average MDP of a family.

    Parameters
    ----------
    family, task
        MDPs stacked along the leading axis, and the index of the task to bound.
    samples, iterations
        N, the samples per task (the path of the average MDP has N T samples and samples the task again at
        every step), and K, the iterations of LSPI.
    mu, sigma, features
        Distributions of errors and of performance, by default uniform; phi(x), one row per state, by
        default one indicator feature per state.
    delta, oracle_error
        Probability that the bound fails; a measured e = max_k ||e_k||_mu, which adds the oracle form.

    Examples
    --------
    >>> from apportion.theory import random_family
    >>> family = random_family(states=6, actions=3, tasks=8, spread=0.1, gamma=0.7)
    >>> result = error_bound(family, samples=1e6)
    >>> result.lemma_4_holds, float(result.theorem_1.total)
    (False, inf)
    """
    if not 0 <= task < len(family):
        raise InputError(
            f"task: {task} is not among the {len(family)} tasks; choose 0 to {len(family) - 1}"
        )
    if samples < 1 or iterations < 1:
        raise InputError(f"samples {samples:g} and iterations {iterations}: both must be >= 1")
    if not 0 < delta < 1:
        raise InputError(f"delta: {delta} is outside (0, 1); it is the bound's failure probability")
    average = family.average()
    states = average.states
    uniform = np.full(states, 1 / states)
    mu, sigma = (uniform if given is None else given for given in (mu, sigma))
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
    errors = [learning_error(learning, samples * len(family), iterations, delta)]
    if oracle_error is not None:
        errors.append(LearningError(0.0, oracle_error))
    forms = [
        (transfer.theorem_1(error, iterations), transfer.theorem_1_prime(error, iterations))
        for error in errors
    ]
    return Bound(
        task, len(family), samples, iterations, delta, transfer, learning.coverage,
        distance_exact=distance.exact,
        samples_needed=samples_needed(learning, iterations, delta),
        trivial=2 * float(family[task].value_bound),
        theorem_1=forms[0][0],
        theorem_1_prime=forms[0][1],
        oracle=forms[1] if oracle_error is not None else None,
    )  # fmt: skip
