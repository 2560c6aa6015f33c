"""Task distance and concentrability of finite MDPs.

Task distance: eps >= ||D_t^pi V^pi||_mu for every policy, with D_t^pi V = T_t^pi V - T^pi V. It is exact
if the A^S policies are few enough to enumerate, and a rigorous upper bound otherwise.

Concentrability: c(m) = sup over pi_1..pi_m of || d(sigma P^{pi_1}..P^{pi_m}) / d mu ||_inf, exact by
dynamic programming: H_0^y = 1_y, H_{m+1}^y(x) = max_a sum_x' P(x'|x,a) H_m^y(x'), c(m) = max_y sigma
H_m^y / mu(y). C' = (1-g) sum g^m c(m) and C'' = (1-g)^2 sum m g^{m-1} c(m), with rigorous tails. The
paper exchanges sigma and mu, for which Theorem 1 is false.
"""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from apportion.errors import InputError
from apportion.theory.mdp import MDP, Kernel, every_policy, norm

Distribution = Float[np.ndarray, "... states"]
_CUT = 1e-12
"""Sums over m are truncated at gamma^m below this; a bound of the tail is added."""


@dataclass(frozen=True)
class Concentrability:
    """First- and second-order discounted average concentrability of a kernel."""

    coefficients: Float[np.ndarray, "*batch horizon"]
    """c(0), c(1), ..."""
    first: Float[np.ndarray, "*batch"]
    """Upper bound of C', whose error is at most the tail."""
    second: Float[np.ndarray, "*batch"]
    """Upper bound of C'', whose error is at most the tail."""


def _check_distribution(weights: Distribution, name: str, states: int) -> None:
    """Raise if the weights are not a distribution over the states."""
    if weights.shape[-1] != states:
        raise InputError(
            f"{name}: {weights.shape[-1]} weights for {states} states; pass one per state"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise InputError(f"{name}: weights must be finite and >= 0")
    if (np.abs(weights.sum(-1) - 1) > 1e-8).any():
        raise InputError(
            f"{name}: the weights sum to {weights.sum(-1).flat[0]:.6g}; they must sum to 1"
        )


def concentrability(
    kernel: Kernel,
    gamma: float,
    *,
    sigma: Float[np.ndarray, "..."],
    mu: Float[np.ndarray, "..."],
) -> Concentrability:
    """Compute c(m), C' and C'' of a kernel.

    Parameters
    ----------
    kernel
        P of the task for C'_t, and of the training MDP for C''.
    sigma
        Distribution under which performance is measured.
    mu
        Distribution under which errors are measured.

    Examples
    --------
    >>> uniform = np.full((3, 2, 3), 1 / 3)
    >>> third = np.full(3, 1 / 3)
    >>> result = concentrability(uniform, 0.9, sigma=third, mu=third)
    >>> round(float(result.first), 6), round(float(result.second), 6)
    (1.0, 1.0)
    """
    states = kernel.shape[-1]
    _check_distribution(sigma, "sigma", states)
    _check_distribution(mu, "mu", states)
    if not 0 < gamma < 1:
        raise InputError(f"gamma: {gamma} is outside (0, 1); choose a discount in it")
    horizon = math.ceil(math.log(_CUT) / math.log(gamma)) + 1
    lead = kernel.shape[:-3]
    reach = np.broadcast_to(np.eye(states), (*lead, states, states))
    # mu(y) = 0 does no harm if y cannot be reached: 0/0 counts as 0, c/0 as infinity.
    inverse = np.divide(1.0, mu, out=np.full(mu.shape, np.inf), where=mu > 0)
    live = _reachable(kernel, sigma)
    coefficients, cap = [], np.zeros(())
    for _ in range(horizon + 1):
        coefficients.append(_ratio(np.einsum("...x,...xy->...y", sigma, reach), inverse).max(-1))
        cap = _ratio(reach * live[..., None], inverse[..., None, :]).max((-1, -2))
        reach = np.einsum("...xaz,...zy->...xay", kernel, reach).max(-2)
    c = np.stack(coefficients, -1)
    m = np.arange(horizon + 1)
    first = (1 - gamma) * (gamma**m * c).sum(-1) + gamma ** (horizon + 1) * cap
    tail = ((horizon + 1) * gamma**horizon * (1 - gamma) + gamma ** (horizon + 1)) * cap
    second = (1 - gamma) ** 2 * (m[1:] * gamma ** (m[1:] - 1) * c[..., 1:]).sum(-1) + tail
    return Concentrability(c, np.asarray(first), np.asarray(second))


def _reachable(kernel: np.ndarray, sigma: np.ndarray) -> np.ndarray:
    """Return the states that paths from sigma can reach; only these enter the tail."""
    step = kernel.max(-2) > 0
    live = np.broadcast_to(sigma > 0, (*kernel.shape[:-3], kernel.shape[-1]))
    for _ in range(kernel.shape[-1]):
        live = live | (live[..., None] & step).any(-2)
    return live


def _ratio(mass: np.ndarray, inverse: np.ndarray) -> np.ndarray:
    return np.multiply(mass, inverse, out=np.zeros(mass.shape), where=mass > 0)


def stationary_constant(kernel: Kernel, mu: Distribution) -> float:
    """Return the smallest C with mu <= C rho^pi for every policy pi: max_x mu(x) / min_pi rho^pi(x).

    The smallest stationary mass of x is the optimal average cost of the MDP whose cost is 1 in x and 0
    elsewhere; relative value iteration computes it for all x at once. C is infinite if some policy avoids
    a state with positive mu.

    Examples
    --------
    >>> third = np.full(3, 1 / 3)
    >>> round(stationary_constant(np.full((3, 2, 3), 1 / 3), third), 9)
    1.0
    """
    states = kernel.shape[-1]
    _check_distribution(mu, "mu", states)
    if (mu[_avoidable(kernel)] > 0).any():
        return math.inf
    # The lazy chain has the same stationary distributions and is aperiodic.
    lazy = 0.5 * (np.eye(states)[:, None, :] + kernel)
    relative = np.zeros((states, states))
    least = np.zeros(states)
    for _ in range(200_000):
        after = np.eye(states) + np.einsum("xaz,zy->xay", lazy, relative).min(1)
        change = after - relative
        # The optimal average cost lies between the smallest and the largest change of every sweep.
        least = np.maximum(change.min(0), 0.0)
        relative = after - after.min(0)
        if (np.ptp(change, axis=0) < 1e-12).all():
            break
    seen = mu > 0
    with np.errstate(divide="ignore"):
        return float((mu[seen] / least[seen]).max())


def _avoidable(kernel: Float[np.ndarray, "states actions states"]) -> np.ndarray:
    """Return the states that some policy never visits from some start; their smallest mass is 0."""
    states = kernel.shape[-1]
    safe = ~np.eye(states, dtype=bool)
    for _ in range(states):
        # A start stays safe for y if some action leads only to starts that are safe for y.
        leads_out = np.einsum("xaz,zy->xay", (kernel > 0).astype(int), (~safe).astype(int)) > 0
        safe = safe & ~leads_out.all(1)
    return np.asarray(safe.any(0))


def contraction(kernel: Float[np.ndarray, "states actions states"]) -> float:
    """Return Dobrushin's coefficient tau: half the largest L1 distance between two rows (x, a)."""
    rows = kernel.reshape(-1, kernel.shape[-1])
    return float(0.5 * np.abs(rows[:, None] - rows[None]).sum(-1).max())


ENUMERABLE = 20_000
"""Largest number of policies to enumerate."""
_AT_ONCE = 200_000
"""Policies evaluated at once, over all tasks."""


def distance_by_enumeration(task: MDP, mdp: MDP, mu: Distribution) -> Float[np.ndarray, "*batch"]:
    """Return the exact eps: the largest ||d_t^pi||_mu over all deterministic policies.

    >>> one = MDP(np.ones((1, 1, 1)), np.zeros((1, 1)), 0.5)
    >>> other = MDP(np.ones((1, 1, 1)), np.ones((1, 1)), 0.5)
    >>> float(distance_by_enumeration(other, one, np.ones(1)))
    1.0
    """
    policies = every_policy(mdp.states, mdp.actions)
    lead = np.broadcast_shapes(task.reward.shape[:-2], mdp.reward.shape[:-2])
    policies = policies.reshape(len(policies), *(1,) * len(lead), mdp.states)
    # Evaluate in pieces to limit memory.
    pieces = np.array_split(policies, -(-len(policies) * math.prod(lead) // _AT_ONCE))
    largest = []
    for piece in pieces:
        value = mdp.value(piece)
        largest.append(norm(task.operator(piece, value) - value, mu).max(0))
    return np.asarray(np.max(largest, 0))


def distance_upper_bound(task: MDP, mdp: MDP, mu: Distribution) -> float:
    """Return an upper bound on eps that needs no enumeration of policies.

    Each state uses its worst action and the smaller of two bounds on |dR + gamma dP V|: with V anywhere in
    [V_lo, V_hi], and |dR| + gamma/2 ||dP||_1 span(V) with span(V) <= span(R) / (1 - gamma tau).
    """
    gamma = mdp.gamma
    gap_reward = task.reward - mdp.reward
    gap_kernel = task.kernel - mdp.kernel
    low = MDP(mdp.kernel, -mdp.reward, gamma).optimal()[1] * -1
    high = mdp.optimal()[1]
    rise, fall = np.maximum(gap_kernel, 0), np.minimum(gap_kernel, 0)
    most = gap_reward + gamma * (rise @ high + fall @ low)
    least = gap_reward + gamma * (rise @ low + fall @ high)
    interval = np.maximum(np.abs(most), np.abs(least))
    span = np.ptp(mdp.reward) / (1 - gamma * contraction(mdp.kernel))
    by_span = np.abs(gap_reward) + gamma / 2 * np.abs(gap_kernel).sum(-1) * span
    return float(norm(np.minimum(interval, by_span).max(-1), mu))


@dataclass(frozen=True)
class Distance:
    """The eps of a task, and whether it is exact or an upper bound."""

    value: float
    exact: bool


def task_distance(task: MDP, mdp: MDP, mu: Distribution) -> Distance:
    """Return eps between a task and the training MDP, exact if A^S <= 20,000, else an upper bound."""
    _check_distribution(mu, "mu", mdp.states)
    if task.reward.shape != mdp.reward.shape or task.gamma != mdp.gamma:
        raise InputError(
            f"task distance: {task.reward.shape} states and actions at gamma {task.gamma} against "
            f"{mdp.reward.shape} at gamma {mdp.gamma}; both MDPs must share all three"
        )
    if mdp.actions**mdp.states <= ENUMERABLE:
        return Distance(float(distance_by_enumeration(task, mdp, mu)), True)
    return Distance(distance_upper_bound(task, mdp, mu), False)
