"""The performance bound for one task of a family: Theorems 1 and 1' and Corollary 2, every term named.

||V_t* - V_t^{pi_K}||_sigma is at most
Theorem 1:  2/(1-g)^2 { sqrt(C'') e + g^{(K-1)/2} R_max + 3 eps sqrt(2 C'_t) }
Theorem 1': 2g/(1-g)^2 sqrt(C'') e + 2 R_max g^K/(1-g) + 2 eps sqrt(C'_t)/(1-g)
LSPI trains on the average MDP with n = N T samples (Corollary 1). The error e = max_k ||e_k||_mu is
measured (the oracle form) or bounded with probability 1 - delta (Lazaric, Ghavamzadeh, Munos 2012):
e <= (1+g) sqrt(C) [ 2/sqrt(1-g^2) (2 sqrt2 E0 + E2)
                     + 2/(1-g) V_max L sqrt(d/nu) (sqrt(8 log(8dK/delta)/n) + 1/n) + E1 ],
provided the path is long enough for Lemma 4: n > (288 L^2 Lam/omega) max{Lam/b, 1}^{1/kappa} with
omega = omega_mu / C. Mixing is beta_i <= betabar exp(-b i^kappa) with betabar = kappa = 1 here.
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
"""One number, or one for each of many families and tasks."""


@dataclass(frozen=True)
class LearningConstants:
    """What the error of LSTD on one MDP depends on, besides the number of samples."""

    gamma: float
    value_bound: float
    """V_max."""
    coverage: float
    """C: mu <= C rho^pi for every policy."""
    dimension: int
    """d, the number of features."""
    feature_bound: float
    """L = sup_x ||phi(x)||_2."""
    smallest_eigenvalue: float
    """omega_mu, of the Gram matrix of the features under mu."""
    approximation: float
    """E0: the worst over policies of the best fit to V^pi."""
    mixing: float
    """b = -log tau, tau the Dobrushin coefficient."""

    @classmethod
    def of(
        cls, mdp: MDP, features: Float[np.ndarray, "..."], mu: Distribution
    ) -> "LearningConstants":
        """Measure an MDP and a feature space."""
        if features.ndim != 2 or features.shape[0] != mdp.states:
            raise InputError(
                f"features: shape {features.shape} for {mdp.states} states; give one row per state"
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
    """E0 = sup over pi of inf_f ||f - V^pi||_{rho^pi}; V_max, which f = 0 reaches, where A^S is large."""
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
    """The right-hand side of Lemma 4's condition at a path of n samples; it holds where n is larger."""
    omega = constants.smallest_eigenvalue / constants.coverage
    if omega <= 0 or constants.mixing <= 0:
        return math.inf
    lam = _lam(n, constants.dimension, delta / (4 * iterations))
    return 288 * constants.feature_bound**2 * lam / omega * max(lam / constants.mixing, 1.0)


def _unlearnable(constants: LearningConstants) -> str | None:
    """Why no number of samples N T satisfies Lemma 4, where none does."""
    reason = None
    if constants.smallest_eigenvalue <= 0:
        reason = (
            "under mu the features are linearly dependent, so that their smallest eigenvalue is 0; leave "
            "some out, or let mu reach every state"
        )
    elif constants.mixing <= 0:
        reason = (
            "under some policies the average MDP never forgets where it began (its mixing rate is 0), so "
            "that one path tells of one beginning alone"
        )
    elif not math.isfinite(constants.coverage):
        reason = "a policy stays in states that mu does not reach (C is infinite); let mu reach every state"
    return None if reason is None else f"No number of samples N T is enough: {reason}"


def samples_needed(constants: LearningConstants, iterations: int, delta: float) -> float:
    """The shortest path that satisfies Lemma 4; infinite where none does."""
    n = 2.0
    # The condition grows like log(n)^2, so that n <- right-hand side climbs to its fixed point.
    for _ in range(200):
        asked = lemma_4_asks(constants, n, iterations, delta)
        if not math.isfinite(asked) or abs(asked - n) <= 1e-9 * n:
            return math.floor(asked) + 1.0 if math.isfinite(asked) else math.inf
        n = max(asked, 2.0)
    return math.floor(n) + 1.0


@dataclass(frozen=True)
class LearningError:
    """The bound on e, in its two parts; estimation is infinite where Lemma 4 fails."""

    approximation: Number
    estimation: Number


def learning_error(
    constants: LearningConstants, n: float, iterations: int, delta: float
) -> LearningError:
    """The high-probability bound on e = max_k ||e_k||_mu for K paths of n samples each."""
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
    """A bound's parts: they add up to `total`."""

    approximation: Number
    estimation: Number
    propagation: Number
    task_distance: Number

    @property
    def total(self) -> Number:
        """The bound."""
        return self.approximation + self.estimation + self.propagation + self.task_distance


def _carry(constant: Number, error: Number) -> Number:
    """Their product; infinite with the constant even at error 0, which mu then fails to witness."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(constant), np.inf, constant * np.asarray(error))[()]


@dataclass(frozen=True)
class TransferConstants:
    """What carries errors and distances to suboptimality: C'_t, C'', eps, R_max, gamma."""

    gamma: float
    reward_bound: Number
    first: Number
    """C'_t, with the kernel of the task."""
    second: Number
    """C'', with the kernel of the MDP trained on."""
    distance: Number
    """eps."""

    def theorem_1(self, error: LearningError, iterations: int) -> Terms:
        """The paper's bound, with the constants that make it true."""
        scale = 2 / (1 - self.gamma) ** 2
        return Terms(
            _carry(scale * np.sqrt(self.second), error.approximation),
            _carry(scale * np.sqrt(self.second), error.estimation),
            scale * self.gamma ** ((iterations - 1) / 2) * self.reward_bound,
            _carry(scale * 3 * np.sqrt(2 * self.first), self.distance),
        )

    def theorem_1_prime(self, error: LearningError, iterations: int) -> Terms:
        """The tighter bound."""
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
    """Corollary 2: how many tasks a universe holds, and the paper's lower bound on it."""

    tasks: int
    """C(M, m)."""
    at_least: float
    """(M/m)^m."""


def corollary_2(universe: int, size: int) -> TaskCount:
    """T = C(M, m) >= (M/m)^m; exponential in m while m is well below M, and it peaks at m = M/2.

    Overlapping subsets are dependent, so that the gain in samples is less than T suggests.

    >>> corollary_2(50, 10)
    TaskCount(tasks=10272278170, at_least=9765625.0)
    """
    if not 1 <= size <= universe:
        raise InputError(f"size: {size} does not fit a universe of {universe} entities")
    return TaskCount(math.comb(universe, size), (universe / size) ** size)


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
    coverage: float
    """C."""
    distance_exact: bool
    samples_needed: float
    """Path length Lemma 4 asks for, N T."""
    trivial: float
    """2 V_max of the task, which no policy's suboptimality can exceed."""
    theorem_1: Terms
    """With probability 1 - delta, as is `theorem_1_prime`."""
    theorem_1_prime: Terms
    oracle: tuple[Terms, Terms] | None
    """Both with the measured e, where one was given."""
    reason: str | None
    """Why the bound is infinite however many samples there are, where it is."""

    @property
    def lemma_4_holds(self) -> bool:
        """Whether N T samples are enough for the high-probability form."""
        return self.samples * self.tasks >= self.samples_needed

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
        t = self.transfer
        how = "exactly, over all policies" if self.distance_exact else "from above"
        table = self.to_frame().to_string(index=False, float_format=lambda x: f"{x:.4g}")
        lines = [
            f"Suboptimality on task {self.task} of the policy LSPI learns on the average of {self.tasks} "
            f"tasks, N = {self.samples:,.0f} samples each, K = {self.iterations}",
            f"  C'_t = {t.first:.4g}, C'' = {t.second:.4g}, C = {self.coverage:.4g}, "
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
        N, samples per task (the average MDP's path has N T of them, with the task drawn again at
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
    if not 0 <= task < len(family):
        raise InputError(
            f"task: {task} is not among the {len(family)} tasks; choose 0 to {len(family) - 1}"
        )
    if samples < 1 or iterations < 1:
        raise InputError(f"samples {samples:g} and iterations {iterations}: both must be >= 1")
    if not 0 < delta < 1:
        raise InputError(f"delta: {delta} is outside (0, 1); it is the bound's chance to fail")
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
        reason=own.reason or trained.reason or _unlearnable(learning),
    )  # fmt: skip
