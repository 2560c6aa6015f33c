"""The graphics card's figures by one command: gradient steps against PyTorch, and federated episodes.

    python benchmarks/gpu.py --out DIR [--mnist mnist.npz] [--kernels] [--tiny]

Ours trains 1, 10, 90 and 900 learners at once at the paper's size; PyTorch does the same step on the
same card in the same process: eager, by torch.nn.RNN (cuDNN), and eager with all learners in one
batched product. Needs JAX and PyTorch in one environment, both with the card. `--kernels` also counts
what the card did in a step of ours. With MNIST's file it goes on to `federated_gpu.py`. `--tiny` tries
every path at small sizes, on a processor too.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from kernels import Trace, busy, by_kernel
from recurrence import Row, prepare
from recurrence_peer import prepare as prepare_one
from recurrence_peer import prepare_many
from table import alternate, best, facts, ratio, spread, write

# Learners at once, and the steps of a turn: ours, in five calls of up to 500 steps as training makes them,
# and those of PyTorch with all in one product.
LEARNERS = {1: (2500, 50), 10: (2500, 50), 90: (1000, 20), 900: (500, 5)}
TINY = {1: (5, 5), 3: (5, 5)}
ALONE = 50
"""Steps of a turn of one learner in PyTorch."""
PRODUCT = 28 * 25
"""Numbers in the parameters A and B: a step multiplies each row of each period by them three times."""
TRACED = 100
"""Steps whose kernels are counted."""
LONGEST = 6
"""Kernels that the table names."""


def turn_of(step: Callable[[], None], steps: int, learners: int) -> Callable[[], float]:
    """A turn of a peer: its median rate over five goes, each waited for."""

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def turn() -> float:
        times = []
        for _ in range(5):
            begun = time.perf_counter()
            for _ in range(max(steps // 5, 1)):
                step()
            wait()
            times.append(time.perf_counter() - begun)
        return learners * max(steps // 5, 1) / statistics.median(times)

    for _ in range(3):
        step()
    wait()
    return turn


def measure(
    row: Row, turn: Callable[[], float], batched_steps: int, turns: int, device: str
) -> dict:
    """One number of learners: those of PyTorch that take one learner run them one after another."""
    sizes = (row.window, row.batch, row.entities)
    eager = prepare_one(*sizes, device=device)
    library = prepare_one(*sizes, device=device, library=True)
    sides = {
        "ours": turn,
        "eager": turn_of(eager, ALONE, 1),
        "torch.nn.RNN": turn_of(library, ALONE, 1),
    }
    if row.learners > 1:
        many = prepare_many(*sizes, row.learners, device=device)
        sides["eager, batched"] = turn_of(many, batched_steps, row.learners)
    rates = alternate(sides, turns)
    ours = rates.pop("ours")
    operations = 3 * 2 * row.window * row.batch * row.entities * PRODUCT
    return {
        "learners": row.learners,
        "ours": spread(ours),
        "eager": spread(rates["eager"]),
        "torch.nn.RNN": spread(rates["torch.nn.RNN"]),
        "eager, batched": spread(rates["eager, batched"]) if row.learners > 1 else None,
        "ratio to eager": ratio(ours, rates["eager"]),
        "ratio to the best": ratio(ours, best(rates)),
        "TFLOP/s of ours": operations * statistics.median(ours) / 1e12,
    }


def count(row: Row, rate: float) -> dict:
    """What the card does in a step of ours; `rate` is that of steps that nobody traced."""
    steps = 5 * max(min(row.steps, TRACED) // 5, 1)
    turn = prepare(replace(row, steps=steps), **each_step_a_graph())
    trace = Trace()
    trace.start()
    turn()
    ran = trace.stop()
    found, working = by_kernel(ran, steps), busy(ran) / steps
    step = 1e6 * row.learners / rate
    return {
        "learners": row.learners,
        "launches a step": len(ran) / steps,
        "µs a step": step,
        "µs a kernel runs": working,
        "µs idle": step - working,
        "longest, µs a step": ", ".join(
            f"`{kernel.name}` {kernel.microseconds:.1f}" for kernel in found[:LONGEST]
        ),
        "_kernels": [asdict(kernel) for kernel in found],
    }


def each_step_a_graph() -> dict[str, str]:
    """Options with which a step is recorded as in training, but not the loop around it.

    Of a loop within a graph a trace shows one round, or none.
    """
    from apportion.gpu import GRAPHS

    recorded = "xla_gpu_enable_command_buffer"
    return {recorded: str(GRAPHS[recorded]).replace("WHILE,", "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mnist", type=Path, help="for the federated episodes")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="count what the card does in a step")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the command")
    options = parser.parse_args()
    # JAX would take most of the card's memory at once; PyTorch and the second program need their part.
    environment = dict(os.environ)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = facts(torch=torch.__version__, device_of_torch=device)
    window, batch, entities = (4, 8, 3) if options.tiny else (31, 109, 10)
    rows, counted = [], []
    for learners, (steps, batched_steps) in (TINY if options.tiny else LEARNERS).items():
        row = Row(f"{learners} learners", window, batch, entities, learners, steps)
        turn = prepare(row)
        rows.append(measure(row, turn, batched_steps, options.turns, device))
        # Written after each, so that a run cut short leaves what it had.
        write(
            "gpu",
            "Gradient steps a second on a graphics card",
            f"All learners together, H{window} B{batch} m{entities}; medians over turns taken "
            "alternately, with the least and the most. `eager` and `torch.nn.RNN` (cuDNN) train one "
            "learner after another.",
            rows,
            about,
            options.out,
        )
        if options.kernels:
            counted.append(count(row, rows[-1]["ours"]["median"]))
            write(
                "gpu_kernels",
                "What a graphics card does in a gradient step",
                f"Kernels of a step of all learners together, from a trace of up to {TRACED} steps; the "
                "step itself was timed without one. Kernels side by side are busy once; what no kernel "
                "accounts for is idle.",
                counted,
                about,
                options.out,
            )
    if options.mnist is None:
        print("federated episodes: skipped, for no --mnist was given")
        return
    program = Path(__file__).with_name("federated_gpu.py")
    asked = ["--mnist", str(options.mnist), "--out", str(options.out)]
    torch.cuda.empty_cache()
    done = subprocess.run([sys.executable, str(program), *asked], check=False, env=environment)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
