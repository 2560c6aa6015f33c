"""What a step of Algorithm 1 costs as its problem grows, with the exponents of that growth.

    python benchmarks/growth.py

Along each axis one size grows and the others stay: tasks T (trees draw, weigh and score in log T, and
memory has slots for the tasks in use only), entities of a task m, the universe M, and independent runs
side by side. An exponent is the slope of log seconds in log size: over the whole axis, and between its
two largest sizes, where what does not grow weighs least.
"""

import math
import statistics
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from table import alternate, facts, median_seconds, options, spread, write

from apportion import Direct, Recurrent, Replay, Task
from apportion.algorithm import Algorithm, advance, begin
from apportion.domains.budget.problem import Budget

AXES = {
    "tasks": (30, 1_000, 100_000, 1_000_000),
    "entities": (5, 50, 500),
    "universe": (50, 500, 5_000),
    "runs": (1, 10, 100, 1_000),
}
STEPS, TURNS = 100, 7
USUAL = {"tasks": 30, "entities": 10, "universe": 200, "runs": 1}


def prepare(steps: int, tasks: int, entities: int, universe: int, runs: int):
    """A function that makes steps and returns seconds a step (all runs together), and MiB kept."""
    key = jax.random.key(0)
    problem = Budget.simulate(universe=max(universe, entities))
    # Neighbours of a random entity: distinct, and drawn at once.
    first = jax.random.randint(key, (tasks, 1), 0, problem.universe)
    members = (first + jnp.arange(entities)) % problem.universe
    replay = Replay(length=64, slots=min(tasks, 1024), act_periods=4)
    policy = Recurrent(channels=2, key=key)
    algorithm = Algorithm.of(
        problem, Task(members, members >= 0), policy, Direct(32), replay=replay
    )
    begun = eqx.filter_jit(eqx.filter_vmap(lambda key: begin(algorithm, policy, key)))
    forward = eqx.filter_jit(
        eqx.filter_vmap(lambda state: advance(algorithm, state, steps)), donate="all"
    )
    held = [forward(begun(jax.random.split(key, runs)))[0]]
    leaves = jax.tree.leaves((held[0].memory, held[0].priority_state))
    kept = sum(leaf.nbytes for leaf in leaves) / 2**20

    def several() -> None:
        held[0] = jax.block_until_ready(forward(held[0]))[0]

    return lambda: median_seconds(several) / steps, kept


def slope(sizes: list[int], seconds: list[float]) -> float:
    """Of log seconds in log size, by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(each) for each in seconds]
    return statistics.linear_regression(x, y).slope


def along(axis: str, sizes: tuple[int, ...]) -> Iterator[dict]:
    """One axis: its sizes by turns."""
    sides: dict[str, Callable[[], float]] = {}
    kept: dict[str, float] = {}
    for size in sizes:
        # A step of a thousand runs is a thousand steps.
        length = max(STEPS // (size if axis == "runs" else 1), 3)
        sides[str(size)], kept[str(size)] = prepare(length, **(USUAL | {axis: size}))
    found = alternate(sides, TURNS)
    medians = [statistics.median(found[str(size)]) for size in sizes]
    for place, size in enumerate(sizes):
        last = place == len(sizes) - 1
        yield {
            "axis": axis,
            "size": f"{size:,}",
            "microseconds a step": spread([1e6 * each for each in found[str(size)]]),
            "to the smallest": medians[place] / medians[0],
            "exponent": slope(list(sizes), medians) if last else None,
            "at the end": slope(list(sizes[-2:]), medians[-2:]) if last else None,
            "MiB of trees and memory": kept[str(size)],
        }


def main() -> None:
    asked = options(__doc__).parse_args()
    about = facts()
    usual = ", ".join(f"{name} {size}" for name, size in USUAL.items())
    text = (
        "Medians over turns taken alternately, with the least and the most. Where an axis does "
        f"not grow: {usual}. A step of several runs is a step of each."
    )
    rows = (row for axis, sizes in AXES.items() for row in along(axis, sizes))
    write("growth", "What a step costs as the problem grows", text, rows, about, asked.out)


if __name__ == "__main__":
    main()
