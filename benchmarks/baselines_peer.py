"""Runs inside the environment of universal-portfolios and writes what it computes to an .npz file.

    python baselines_peer.py OUT.npz FEE DATASET [DATASET ...]

For every data set and algorithm: price relatives, weights, final wealth gross and with the fee, and
the seconds it took. Where the package departs from an algorithm's paper, what is done about it
stands beside the algorithm.
"""

import sys
import time
import warnings

import numpy as np
import pandas as pd

warnings.simplefilter("ignore")

from cvxopt import solvers  # noqa: E402
from universal import algos, tools  # noqa: E402

# The package leaves its solver at about six digits; the comparison needs more.
solvers.options.update({"abstol": 1e-16, "reltol": 1e-16, "feastol": 1e-12, "show_progress": False})


def exact_rolling_corr(x, y, window):
    """As the package's own, window by window. Its running sums leave rounding errors where a stock
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


shipped_rolling_corr = tools.rolling_corr
# Where stocks stand still that long.
STILL = {"nyse_o", "nyse_n"}


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


ALGORITHMS = {
    "equal-crp": lambda: algos.CRP(),
    "buy-and-hold": lambda: algos.BAH(),
    # By default SLSQP stops at six digits.
    "best-crp": lambda: algos.BCRP(options={"ftol": 1e-15, "maxiter": 2000}),
    # Random points: those of this run are written out, for the other side to use.
    "universal": lambda: algos.UP(eval_points=500),
    "exponentiated-gradient": lambda: algos.EG(eta=0.05),
    "ons": lambda: algos.ONS(),
    "pamr": lambda: algos.PAMR(eps=0.5),
    "cwmr": lambda: DiagonalCWMR(),
    "cwmr as shipped": lambda: algos.CWMR(),
    "olmar": lambda: algos.OLMAR(window=5, eps=10),
    "rmr": lambda: algos.RMR(window=5, eps=5, tau=1e-3),
    "anticor": lambda: algos.Anticor(window=30, c_version=False),
}
# Until their window is full these two take prices for relatives; prices that stand still while it
# fills make both the same.
WAITING = {"olmar": 5, "rmr": 5}


def main(out: str, fee: float, names: list[str]) -> None:
    results: dict[str, np.ndarray] = {}
    for data in names:
        tools.rolling_corr = exact_rolling_corr if data in STILL else shipped_rolling_corr
        prices = tools.dataset(data)
        results[f"{data}/first row"] = prices.values[0]
        prices.columns = [f"s{i}" for i in range(prices.shape[1])]
        for name, make in ALGORITHMS.items():
            still = WAITING.get(name, 1)
            frame = pd.DataFrame(
                np.vstack([np.repeat(prices.values[:1], still, 0), prices.values[1:]]),
                columns=prices.columns,
            )
            np.random.seed(0)  # noqa: NPY002
            algorithm, start = make(), time.perf_counter()
            result = algorithm.run(frame, log_progress=False)
            seconds = time.perf_counter() - start
            key = f"{data}/{name}"
            results[f"{key}/relatives"] = result.X.values
            results[f"{key}/weights"] = np.asarray(result.B)[:, : frame.shape[1]]
            results[f"{key}/gross"] = np.array(result.total_wealth)
            result.fee = fee
            results[f"{key}/net"] = np.array(result.total_wealth)
            results[f"{key}/seconds"] = np.array(seconds)
            if name == "universal":
                results[f"{key}/points"] = np.asarray(algorithm.W)
            print(
                f"{data} {name}: {float(results[f'{key}/gross']):.6g}, {seconds:.1f} s", flush=True
            )
    np.savez_compressed(out, **results)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
