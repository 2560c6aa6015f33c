"""What a step of Algorithm 1 costs against the number of tasks T, as a ratio to T = 30.

The trees make drawing, weighting and scoring O(log T), and memory has slots for the tasks in use
only, so the ratio at a million tasks is to stay below 1.3. Every T runs in its own process, so that
its peak memory is its own; the runs alternate, and the best of each counts.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

SIZES = (30, 1_000, 100_000, 1_000_000)


def measure(total: int, steps: int, repeats: int) -> dict[str, float]:
    import jax

    from apportion import Direct, Recurrent, Replay, Tasks
    from apportion.algorithm import Algorithm
    from apportion.domains.budget.problem import Budget
    from apportion.training import _advance as advance
    from apportion.training import _begin as begin

    key = jax.random.key(0)
    problem = Budget.simulate(universe=200)
    # Distinctness is not what is timed: random members are drawn at once.
    members = jax.random.randint(key, (total, 10), 0, 200)
    tasks = Tasks(members, members >= 0)
    replay = Replay(length=64, slots=1024, act_periods=4)
    policy = Recurrent(channels=2, key=key)
    algorithm = Algorithm.of(problem, tasks, policy, Direct(32), replay=replay)
    state = begin(algorithm, policy, key)
    state, _ = jax.block_until_ready(advance(algorithm, state, steps, 1))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(advance(algorithm, state, steps, 1))
        times.append((time.perf_counter() - start) / steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves((state.memory, state.selection)))
    return {"seconds": min(times), "peak_gib": peak, "kept_mib": kept / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", type=int)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.steps, 3)))
        return
    found: dict[int, list[dict[str, float]]] = {size: [] for size in SIZES}
    for _ in range(arguments.rounds):
        for size in SIZES:
            command = [
                sys.executable,
                __file__,
                "--one",
                str(size),
                "--steps",
                str(arguments.steps),
            ]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[size].append(json.loads(out.splitlines()[-1]))
    base = min(row["seconds"] for row in found[SIZES[0]])
    print(
        f"{'tasks':>10} {'us a step':>10} {'ratio':>6} {'trees and memory':>17} {'peak of process':>16}"
    )
    for size, rows in found.items():
        seconds = min(row["seconds"] for row in rows)
        print(
            f"{size:>10,} {1e6 * seconds:>10.0f} {seconds / base:>6.2f} "
            f"{rows[0]['kept_mib']:>13.1f} MiB {max(r['peak_gib'] for r in rows):>12.2f} GiB"
        )


if __name__ == "__main__":
    main()
