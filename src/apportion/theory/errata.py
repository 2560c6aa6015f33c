"""The lines of the paper's proof, each tried on random pairs of MDPs: which hold and which do not.

A pair is an MDP M, a task M_t, distributions sigma and mu, and a bounded function V~ with its greedy
policy pi_K. A line that fails on any pair is false; the true ones must never fail.
"""

import numpy as np
import pandas as pd
from jaxtyping import Float

from apportion.theory.concentrability import concentrability
from apportion.theory.distance import bellman_difference
from apportion.theory.mdp import MDP, norm

STATES, ACTIONS, GAMMA, TOLERANCE = 2, 2, 0.7, 1e-9


def check_lines(pairs: int = 2000) -> pd.DataFrame:
    """Try every line on `pairs` random pairs: the line, whose it is, and on how many pairs it fails.

    >>> frame = check_lines(50)
    >>> int(frame[frame.source == "corrected"].violations.sum())
    0
    """
    rng = np.random.default_rng(0)
    mdp, task = (_random(rng, pairs) for _ in range(2))
    v_max = mdp.value_bound[:, None]
    guess = rng.uniform(-1, 1, (pairs, STATES)) * v_max
    last = mdp.greedy(guess)
    (best, value), (best_t, value_t) = mdp.optimal(), task.optimal()
    of_last, of_last_t = mdp.value(last), task.value(last)
    d_last = bellman_difference(task, mdp, last)
    d_guess = task.operator(last, guess) - mdp.operator(last, guess)
    gain_t, loss = value_t - value, of_last - of_last_t
    triangle = np.abs(gain_t) + np.abs(value - of_last) + np.abs(loss)
    carried = _carry(task, best_t, np.abs(bellman_difference(task, mdp, best_t)))
    carried = carried + _carry(task, best, np.abs(bellman_difference(task, mdp, best)))
    value_last_t = task.value(last)
    other_way = value_last_t - mdp.operator(last, value_last_t)
    telescoped = (value_t - mdp.value(best_t)) + (value - of_last) + loss
    excess = {
        ("V_t* - V_t^piK = |..| + |..| + |..|", "printed"): _away(value_t - of_last_t, triangle),
        ("V_t* - V_t^piK <= |..| + |..| + |..|", "corrected"): value_t - of_last_t - triangle,
        ("(a) V_t* - V* <= (I - g P_t)^-1 d_t", "printed, true"): gain_t
        - _carry(task, best_t, bellman_difference(task, mdp, best_t)),
        ("(a) |V_t* - V*| <= sum of (I - g P_t)^-1 |d_t|", "printed, true"): np.abs(gain_t)
        - carried,
        ("(a) mixed: V_t - V = (I - g P_t)^-1 D V_t", "mixed"): _away(
            -loss, _carry(task, last, other_way)
        ),
        ("(a) mixed: V_t - V = (I - g P)^-1 D V", "mixed"): _away(-loss, _carry(mdp, last, d_last)),
        ("V_t - V = (I - g P_t)^-1 D V", "corrected"): _away(-loss, _carry(task, last, d_last)),
        ("(b) first line", "printed"): d_guess,
        ("(b) V - V_t <= (I - g P_t)^-1 (-d - d~)", "printed"): loss
        - _carry(task, last, -d_last - d_guess),
        ("(b) V - V_t >= (I - g P_t)^-1 (-d + d~)", "printed"): _carry(task, last, d_guess - d_last)
        - loss,
        ("(b) |V - V_t| <= (I - g P_t)^-1 |d|", "corrected"): np.abs(loss)
        - _carry(task, last, np.abs(d_last)),
        ("Theorem 1': V_t* - V_t^piK <= three signed parts", "corrected"): value_t
        - of_last_t
        - telescoped,
        **_norms(mdp, task, loss, d_last, rng),
    }
    rows = [
        (line, source, int((excess.reshape(pairs, -1).max(-1) > TOLERANCE).sum()), pairs)
        for (line, source), excess in excess.items()
    ]
    return pd.DataFrame(rows, columns=["line", "source", "violations", "pairs"])


def _random(rng: np.random.Generator, pairs: int) -> MDP:
    # Sparse rows, so that some kernels reach states that others hardly do.
    kernel = rng.dirichlet(np.full(STATES, 0.05), (pairs, STATES, ACTIONS))
    kernel = kernel / kernel.sum(-1, keepdims=True)
    return MDP(kernel, rng.uniform(-1, 1, (pairs, STATES, ACTIONS)), GAMMA)


def _carry(mdp: MDP, policy: np.ndarray, source: np.ndarray) -> np.ndarray:
    kernel, _ = mdp.under(policy)
    return np.linalg.solve(np.eye(mdp.states) - mdp.gamma * kernel, source[..., None])[..., 0]


def _away(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.abs(left - right)


def _norms(
    mdp: MDP,
    task: MDP,
    loss: Float[np.ndarray, "pairs states"],
    difference: Float[np.ndarray, "pairs states"],
    rng: np.random.Generator,
) -> dict[tuple[str, str], np.ndarray]:
    """||V - V_t||_sigma <= sqrt(C') ||d||_mu / (1 - g), with C' as corrected and as printed."""
    sigma, mu = rng.dirichlet(np.full(mdp.states, 0.3), (2, len(mdp)))
    sigma, mu = (0.999 * weights + 0.001 / mdp.states for weights in (sigma, mu))
    # Mixing in a little of everything keeps every constant finite.
    sigma, mu = (weights / weights.sum(-1, keepdims=True) for weights in (sigma, mu))
    left, right = norm(loss, sigma), norm(difference, mu) / (1 - mdp.gamma)

    def excess(kernel, start, measure):
        constant = concentrability(kernel, mdp.gamma, sigma=start, mu=measure).first
        return left - np.sqrt(constant) * right

    line = "||V - V_t||_sigma <= sqrt(C') ||d||_mu / (1 - g)"
    return {
        (f"{line}, C' of M_t", "corrected"): excess(task.kernel, sigma, mu),
        (f"{line}, C' of M", "printed"): excess(mdp.kernel, sigma, mu),
        (f"{line}, sigma and mu swapped", "printed"): excess(task.kernel, mu, sigma),
    }
