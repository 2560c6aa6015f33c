"""Gradient steps of the portfolio's policy a second, against PyTorch's eager mode, as ratios.

Both learn at the same sizes on the same machine, turn by turn, so that what else the machine does
meets both. A turn's rate is that of its median step; the ratio is taken turn by turn. PyTorch lives
in an environment of its own: `python benchmarks/recurrence.py --peer PATH/TO/ITS/python`.
"""

import argparse
import os
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from table import RESULTS, alternate, best, facts, ratio, spread, version_in, write

PEER = Path(__file__).parent / "recurrence_peer.py"


@dataclass(frozen=True)
class Row:
    """A row of the table: sizes, learners at once, steps of a turn, and the ratio to reach."""

    name: str
    window: int
    batch: int
    entities: int
    learners: int
    steps: int
    target: float = 0.0


ROWS = [
    Row("H31 B109 m10", 31, 109, 10, 1, 20, 2.0),
    Row("H16 B50 m10", 16, 50, 10, 1, 40, 2.0),
    Row("H8 B32 m5", 8, 32, 5, 1, 100, 2.0),
    Row("H8 B32 m5, ten learners", 8, 32, 5, 10, 40, 8.0),
]


def prepare(row: Row, **options: str):
    """A function that makes a turn of steps and returns steps a second, all learners together.

    `options` are the compiler's, where they are others than those of training.
    """
    import equinox as eqx
    import jax

    from apportion import Direct, Recurrent, draw_tasks
    from apportion.algorithm import Algorithm, advance, begin
    from apportion.domains.portfolio import Market, SimulatedMarket
    from apportion.gpu import as_graphs
    from apportion.memory import Replay

    market = Market.of(
        SimulatedMarket.draw(universe=50, days=1000, seed=0).prices, window=row.window
    )
    keys = jax.random.split(jax.random.key(0), row.learners)
    policies = eqx.filter_vmap(lambda key: Recurrent(3, 25, key=key))(keys)
    whole = Replay(length=market.horizon, warm_up=market.horizon, recency=5e-5, act_periods=0)
    algorithm = Algorithm.of(
        market,
        draw_tasks(50, row.entities, 30, seed=0),
        Recurrent(3, 25, key=keys[0]),
        Direct(row.batch, 2.8e-4),
        replay=whole,
    )
    # A chunk is one call, hence short ones, of which the median is taken as of the peer's steps.
    length = max(row.steps // 5, 1)
    forward = eqx.filter_jit(
        eqx.filter_vmap(lambda state: advance(algorithm, state, length)),
        donate="all",
        compiler_options={**as_graphs(), **options},
    )
    start = eqx.filter_jit(eqx.filter_vmap(lambda policy, key: begin(algorithm, policy, key)))
    held = [forward(start(policies, keys))[0]]

    def turn() -> float:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            held[0] = jax.block_until_ready(forward(held[0]))[0]
            times.append(time.perf_counter() - begun)
        return row.learners * length / statistics.median(times)

    return turn


class Peer:
    """PyTorch in its own process: one line asks for a turn, one line answers with its rate."""

    def __init__(self, python: str, row: Row, threads: int):
        sizes = [str(n) for n in (row.window, row.batch, row.entities, row.steps, threads)]
        self._process = subprocess.Popen(
            [python, str(PEER), *sizes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def turn(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measure(row: Row, python: str, turns: int, cores: int) -> dict:
    """The peer with one thread and with all: the better of the two is what we are compared with."""
    peers = {threads: Peer(python, row, threads) for threads in sorted({1, cores})}
    sides = {"ours": prepare(row)} | {f"{n} threads": peer.turn for n, peer in peers.items()}
    rates = alternate(sides, turns)
    for peer in peers.values():
        peer.close()
    ours = rates.pop("ours")
    return {
        "size": row.name,
        "ours": spread(ours),
        "PyTorch, eager": spread(best(rates)),
        "ratio": ratio(ours, best(rates)),
        "to reach": row.target,
        "_peer by threads": {name: spread(each) for name, each in rates.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="python of an environment with PyTorch")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    about = facts(torch=version_in(options.peer, "torch"))
    rows = []
    for row in ROWS:
        rows.append(measure(row, options.peer, options.turns, cores))
        # Written after each, so that a run cut short leaves what it had.
        write(
            "recurrence",
            "Gradient steps a second against PyTorch",
            "Medians over turns taken alternately, with the least and the most. The peer is eager "
            "PyTorch with one thread or one for each core, whichever was faster in that turn.",
            rows,
            about,
            options.out,
        )


if __name__ == "__main__":
    main()
