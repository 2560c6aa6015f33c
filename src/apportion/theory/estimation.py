"""How large LSTD's error e can be with probability 1 - delta (Lazaric, Ghavamzadeh, Munos 2012).

e <= (1+g) sqrt(C) [ 2/sqrt(1-g^2) (2 sqrt2 E0 + E2)
                     + 2/(1-g) V_max L sqrt(d/nu) (sqrt(8 log(8dK/delta)/n) + 1/n) + E1 ],
provided the path is long enough for Lemma 4: n > (288 L^2 Lam/omega) max{Lam/b, 1}^{1/kappa} with
omega = omega_mu / C. Mixing is beta_i <= betabar exp(-b i^kappa) with betabar = kappa = 1 here.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from apportion.errors import InputError
from apportion.theory.concentrability import Distribution, contraction, stationary_constant
from apportion.theory.distance import ENUMERABLE
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
            approximation=approximation_error(mdp, features),
            mixing=-math.log(tau) if tau > 0 else math.inf,
        )


def approximation_error(mdp: MDP, features: Features) -> float:
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


def _deviation(lam: float, n: float, mixing: float) -> float:
    """f(Lam) = sqrt((2 Lam / n) max{Lam/b, 1})."""
    return math.sqrt(2 * lam / n * _slowness(lam, mixing))


def _slowness(lam: float, mixing: float) -> float:
    return max(lam / mixing, 1.0) if mixing > 0 else math.inf


def _lam(n: float, d: int, delta: float) -> float:
    return 2 * (d + 1) * math.log(6 * math.e * n) + 1 + math.log(18 / delta)


def _lam2(n: float, delta: float) -> float:
    return 1 - math.log(delta) + math.log(max(6.0, n))


def lemma_4_asks(constants: LearningConstants, n: float, iterations: int, delta: float) -> float:
    """The right-hand side of Lemma 4's condition at a path of n samples; it holds where n is larger."""
    omega = constants.smallest_eigenvalue / constants.coverage
    if omega <= 0 or constants.mixing <= 0:
        return math.inf
    lam = _lam(n, constants.dimension, delta / (4 * iterations))
    return 288 * constants.feature_bound**2 * lam / omega * _slowness(lam, constants.mixing)


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

    @property
    def total(self) -> Number:
        """The bound on e."""
        return self.approximation + self.estimation


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
    f1 = _deviation(_lam(n, d, share), n, constants.mixing)
    f2 = _deviation(_lam2(n, share), n, constants.mixing)
    root_nu = math.sqrt(omega) / 2 - 6 * length * f1
    e1 = 24 * v_max * f1
    e2 = 12 * (v_max + length * v_max / math.sqrt(omega)) * f2
    noise = math.sqrt(8 * math.log(8 * d * iterations / delta) / n) + 1 / n
    noise *= length * math.sqrt(d) / root_nu
    estimation = 2 / math.sqrt(1 - g**2) * e2 + 2 / (1 - g) * v_max * noise + e1
    return LearningError(approximation, scale * estimation)
