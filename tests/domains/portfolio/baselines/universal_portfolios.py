"""What universal-portfolios computes, from its own environment, and our side of it: final wealth.

    python universal_portfolios.py OUT.npz FEE DATA ...

This file runs there as well as here. Both sides see the package's own data sets and relatives. Where the
package departs from an algorithm's paper, what is done about it stands beside the algorithm.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

FEE = 0.0025


def peer_results(python: str, data: tuple[str, ...], fee: float = FEE) -> dict[str, np.ndarray]:
    """What universal-portfolios computes, from its own environment."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.npz"
        subprocess.run([python, __file__, str(out), str(fee), *data], check=True)
        with np.load(out) as results:
            return dict(results)


def exact_rolling_corr(x, y, window):
    """As universal-portfolios' own, window by window. Its running sums leave rounding errors where a stock
    stands still for a whole window, and divide by them; here such correlations are not numbers.
    Means are rounded, so that ties of prices quoted in eighths are ties."""
    earlier, later = (np.lib.stride_tricks.sliding_window_view(v.values, window, 0) for v in (y, x))
    off_y, off_x = (v - v.mean(-1, keepdims=True) for v in (earlier, later))
    scale = np.sqrt((off_x**2).sum(-1)[:, :, None] * (off_y**2).sum(-1)[:, None])
    still = (np.ptp(later, -1) == 0)[:, :, None] | (np.ptp(earlier, -1) == 0)[:, None]
    correlation = np.einsum("tiw,tjw->tij", off_x, off_y) / np.where(still, np.nan, scale)
    front = window - 1
    means = np.pad(later.mean(-1).round(12), ((front, 0), (0, 0)), constant_values=np.nan)
    return np.pad(correlation, ((front, 0), (0, 0), (0, 0)), constant_values=np.nan), means


def peer_algorithms() -> dict[str, Callable]:
    from universal import algos

    class DiagonalCWMR(algos.CWMR):
        """The package takes the diagonal of a column vector, its first entry alone, and adds its square
        to every entry of the inverse covariance; the paper adds diag(x)^2."""

        def update(self, x, x_upper, mu, sigma, M, V, theta, eps):
            mu, _ = super().update(x, x_upper, mu, sigma, M, V, theta, eps)
            inner = (V - x_upper * x.T * np.sum(sigma, axis=1)) / M**2 + V * theta**2 / 2.0
            a = (inner**2 - V**2 * theta**4 / 4)[0, 0]
            b = (2 * (eps - np.log(M)) * inner)[0, 0]
            c = ((eps - np.log(M)) ** 2 - V * theta**2)[0, 0]
            lam = 0.0
            if a > 0:
                rise = np.sqrt(max(b**2 - 4 * a * c, 0.0))
                lam = min(max(0.0, (-b + rise) / (2 * a), (-b - rise) / (2 * a)), 1e7)
            root = 0.5 * (-lam * theta * V + np.sqrt(lam**2 * theta**2 * V**2 + 4 * V))
            inverse = np.linalg.inv(sigma) + theta * lam / root[0, 0] * np.diagflat(x) ** 2
            return mu, np.linalg.inv(inverse)

    return {
        "equal-crp": algos.CRP,
        "buy-and-hold": algos.BAH,
        # By default SLSQP stops at six digits.
        "best-crp": lambda: algos.BCRP(options={"ftol": 1e-15, "maxiter": 2000}),
        # Random points: those of this run are written out, for the other side to use.
        "universal": lambda: algos.UP(eval_points=500),
        "exponentiated-gradient": lambda: algos.EG(eta=0.05),
        "ons": algos.ONS,
        "pamr": lambda: algos.PAMR(eps=0.5),
        "cwmr": DiagonalCWMR,
        "olmar": lambda: algos.OLMAR(window=5, eps=10),
        "rmr": lambda: algos.RMR(window=5, eps=5, tau=1e-3),
        "anticor": lambda: algos.Anticor(window=30, c_version=False),
    }


def as_peer(out: str, fee: float, names: list[str]) -> None:
    """For every data set and algorithm: price relatives, weights, final wealth gross and with the fee."""
    import pandas as pd
    from cvxopt import solvers
    from universal import tools

    # The package leaves its solver at about six digits; the comparison needs more.
    exact = {"abstol": 1e-16, "reltol": 1e-16, "feastol": 1e-12, "show_progress": False}
    solvers.options.update(exact)
    shipped_rolling_corr, results = tools.rolling_corr, {}
    for data in names:
        # In these two, stocks stand still for a whole window.
        stands = data in ("nyse_o", "nyse_n")
        tools.rolling_corr = exact_rolling_corr if stands else shipped_rolling_corr
        prices = tools.dataset(data)
        results[f"{data}/first row"] = prices.values[0]
        columns = [f"s{i}" for i in range(prices.shape[1])]
        for name, make in peer_algorithms().items():
            # Until their window is full these two take prices for relatives; prices that stand still
            # while it fills make both the same.
            still = 5 if name in ("olmar", "rmr") else 1
            values = np.vstack([np.repeat(prices.values[:1], still, 0), prices.values[1:]])
            np.random.seed(0)  # noqa: NPY002
            algorithm = make()
            result = algorithm.run(pd.DataFrame(values, columns=columns), log_progress=False)
            key = f"{data}/{name}"
            results[f"{key}/relatives"] = result.X.values
            results[f"{key}/weights"] = np.asarray(result.B)[:, : len(columns)]
            results[f"{key}/gross"] = np.array(result.total_wealth)
            result.fee = fee
            results[f"{key}/net"] = np.array(result.total_wealth)
            if name == "universal":
                results[f"{key}/points"] = np.asarray(algorithm.W)
            print(f"{data} {name}: {float(results[f'{key}/gross']):.6g}", flush=True)
    np.savez_compressed(out, **results)


def shipped_anticor(relatives: Any, window: int = 30) -> Any:
    """Anticor's transfers with the package's inputs: correlations of plain relatives, later to
    earlier, none between equals in growth or with oneself but negative ones, and shares that do not
    drift. The paper correlates logarithms, earlier to later, lets equals claim from each other, and
    transfers what is held after the day."""
    import jax.numpy as jnp

    from apportion.domains.portfolio.baselines.online import follow
    from apportion.domains.portfolio.baselines.reversion import lagged_correlation, transfer

    def update(shares, memory, y):
        recent, seen = memory
        recent, seen = jnp.concatenate([recent[1:], y[None]]), seen + 1
        correlation = lagged_correlation(recent[:window], recent[window:]).T
        growth = recent[window:].mean(0).round(12)
        claims = jnp.where(growth[:, None] > growth, correlation, 0.0)
        against = jnp.minimum(jnp.diagonal(correlation), 0.0)
        moved = transfer(shares, claims + jnp.diag(against), growth)
        return jnp.where(seen >= 2 * window, moved, shares), (recent, seen)

    start = jnp.ones((2 * window, relatives.shape[1]), relatives.dtype)
    return follow(update, (start, 0), relatives)


def ours(name: str, points: np.ndarray | None = None) -> Callable:
    """Our side of an algorithm, in the mode that has the package's settings."""
    from apportion.domains.portfolio.baselines.online import universal
    from apportion.domains.portfolio.baselines.reversion import rmr
    from apportion.domains.portfolio.baselines.simple import BASELINES

    special = {
        "universal": lambda y: universal(y, np.asarray(points)),
        "anticor": shipped_anticor,
        "rmr": lambda y: rmr(y, tolerance=1e-3),
    }
    return special.get(name, BASELINES[name])


def fee_accounting(allocations: np.ndarray, relatives: np.ndarray, fee: float) -> float:
    """Final wealth as the package counts it: the fee on what is traded is taken off the period's
    growth, and the first purchase is free."""
    growth = (allocations * relatives).sum(1)
    drifted = allocations * relatives / growth[:, None]
    traded = np.abs(allocations[1:] - drifted[:-1]).sum(1)
    growth[1:] -= fee * traded
    return float(np.exp(np.log(growth).sum()))


def compare(peer: dict[str, np.ndarray], data: str, name: str, fee: float = FEE) -> SimpleNamespace:
    """How far both sides' final wealth differs for one algorithm and data set, counted three ways."""
    import jax
    import jax.numpy as jnp

    from apportion.domains.portfolio.backtest import account

    key = f"{data}/{name}"
    relatives, theirs = peer[f"{key}/relatives"], peer[f"{key}/weights"]
    with jax.enable_x64(True):
        run = jax.jit(ours(name, peer.get(f"{key}/points")))
        found = np.asarray(run(jnp.asarray(relatives)))

    def exact(allocations: np.ndarray) -> float:
        growth, keep, _ = account(allocations, relatives, fee)
        return float(np.exp(np.log(growth * keep).sum()))

    wealth = float(np.exp(np.log((found * relatives).sum(1)).sum()))
    return SimpleNamespace(
        gross_error=abs(wealth / float(peer[f"{key}/gross"]) - 1),
        fee_error=abs(fee_accounting(found, relatives, fee) / float(peer[f"{key}/net"]) - 1),
        exact_cost_error=abs(exact(found) / exact(theirs) - 1),
    )


if __name__ == "__main__":
    as_peer(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
