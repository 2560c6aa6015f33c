"""Baselines against universal-portfolios: final wealth to six digits, and the time both take.

    python benchmarks/baselines.py --peer PYTHON [--data djia msci sp500 tse nyse_o nyse_n]

PYTHON is the interpreter of an environment with universal-portfolios (`make bench-env`). Both sides
see the package's own data sets and relatives.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from apportion.domains.portfolio.backtest import account
from apportion.domains.portfolio.baselines.online import follow, universal
from apportion.domains.portfolio.baselines.reversion import lagged_correlation, rmr, transfer
from apportion.domains.portfolio.baselines.simple import BASELINES

DATA = ("djia", "msci", "sp500", "tse", "nyse_o", "nyse_n")
FEE = 0.0025


def peer_results(python: str, data: tuple[str, ...], fee: float = FEE) -> dict[str, np.ndarray]:
    """What universal-portfolios computes, from its own environment."""
    program = Path(__file__).with_name("baselines_peer.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "peer.npz"
        subprocess.run([python, str(program), str(out), str(fee), *data], check=True)
        with np.load(out) as results:
            return dict(results)


def shipped_anticor(relatives: Any, window: int = 30) -> Any:
    """Anticor's transfers with the package's inputs: correlations of plain relatives, later to
    earlier, none between equals in growth or with oneself but negative ones, and shares that do not
    drift. The paper correlates logarithms, earlier to later, lets equals claim from each other, and
    transfers what is held after the day."""

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
    if name == "universal":
        return lambda y: universal(y, jnp.asarray(points))
    special = {"anticor": shipped_anticor, "rmr": lambda y: rmr(y, tolerance=1e-3)}
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
    """One algorithm on one data set, both sides: allocations, wealth three ways, seconds."""
    key = f"{data}/{name}"
    relatives, theirs = peer[f"{key}/relatives"], peer[f"{key}/weights"]
    with jax.enable_x64(True):
        run = jax.jit(ours(name, peer.get(f"{key}/points"))).lower(jnp.asarray(relatives)).compile()
        start = time.perf_counter()
        found = np.asarray(run(jnp.asarray(relatives)))
        seconds = time.perf_counter() - start

    def exact(allocations: np.ndarray) -> float:
        growth, keep, _ = account(allocations, relatives, fee)
        return float(np.exp(np.log(growth * keep).sum()))

    wealth = float(np.exp(np.log((found * relatives).sum(1)).sum()))
    return SimpleNamespace(
        data=data,
        name=name,
        gross=wealth,
        gross_error=abs(wealth / float(peer[f"{key}/gross"]) - 1),
        fee_error=abs(fee_accounting(found, relatives, fee) / float(peer[f"{key}/net"]) - 1),
        exact_cost_error=abs(exact(found) / exact(theirs) - 1),
        weights_error=float(np.abs(found - theirs).max()),
        seconds=seconds,
        peer_seconds=float(peer[f"{key}/seconds"]),
    )


def rows_of(turns: list[list[SimpleNamespace]]) -> list[dict]:
    """A row for each algorithm on each data set, over the turns."""
    from table import ratio, spread

    rows = []
    for same in zip(*turns, strict=True):
        ours, theirs = [one.seconds for one in same], [one.peer_seconds for one in same]
        first = same[0]
        rows.append(
            {
                "data": first.data,
                "algorithm": first.name,
                "seconds, ours": spread(ours),
                "universal-portfolios": spread(theirs),
                "ratio": ratio(theirs, ours),
                "wealth differs by": max(first.gross_error, first.fee_error),
                "_with exact costs": first.exact_cost_error,
                "_shares differ by": first.weights_error,
            }
        )
    return rows


def main() -> None:
    # Here, since the peer tests load this file from elsewhere.
    from table import RESULTS, facts, version_in, write

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", required=True, help="python of the peer's environment")
    parser.add_argument("--data", nargs="+", default=DATA, choices=DATA)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    about = facts(**{"universal-portfolios": version_in(asked.peer, "universal-portfolios")})
    turns = []
    for _ in range(asked.turns):
        peer = peer_results(asked.peer, tuple(asked.data))
        names = sorted({key.split("/")[1] for key in peer} & set(BASELINES))
        turns.append([compare(peer, data, name) for data in asked.data for name in names])
    write(
        "baselines",
        "Baselines against universal-portfolios",
        "Final wealth on the package's own data as a relative difference, and seconds, compiled; "
        "medians over turns taken alternately, with the least and the most.",
        rows_of(turns),
        about,
        asked.out,
    )
    worst = max(max(o.gross_error, o.fee_error, o.exact_cost_error) for o in turns[0])
    print(f"largest relative difference in final wealth: {worst:.2g}")
    sys.exit(0 if worst < 1e-6 else 1)


if __name__ == "__main__":
    main()
