"""Gradient steps of the portfolio's policy a second, ours and PyTorch's, as ratios.

    python benchmarks/gradient_step.py cpu --peer PYTHON
    python benchmarks/gradient_step.py gpu [--out DIR]

On a processor PyTorch lives in an environment of its own, whose interpreter is PYTHON; ours and its eager
mode learn at the same sizes by turns. On a graphics card ours trains 1, 10, 90 and 900 learners at once at
the paper's size, and PyTorch, in the same environment and process, does the same step: eager, by
torch.nn.RNN (cuDNN), and eager with all learners in one batched product. A turn's rate is that of
its median step.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import table

CHANNELS, HIDDEN, DAYS, UNIVERSE, TASKS, COST, RATE = 3, 25, 1000, 50, 30, 0.0025, 2.8e-4
TURNS = 9


@dataclass(frozen=True)
class Row:
    """A row of the table: sizes, learners at once, and steps of a turn."""

    name: str
    window: int
    batch: int
    entities: int
    learners: int
    steps: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.window, self.batch, self.entities


ROWS = [
    Row("H31 B109 m10", 31, 109, 10, 1, 20),
    Row("H16 B50 m10", 16, 50, 10, 1, 40),
    Row("H8 B32 m5", 8, 32, 5, 1, 100),
    Row("H8 B32 m5, ten learners", 8, 32, 5, 10, 40),
]
CARD = {
    Row("1 learner", 31, 109, 10, 1, 2500): 50,
    Row("10 learners", 31, 109, 10, 10, 2500): 50,
    Row("90 learners", 31, 109, 10, 90, 1000): 20,
    Row("900 learners", 31, 109, 10, 900, 500): 5,
}
"""On a card; a turn's steps are made in five calls of up to 500 as training makes them. With them those of
PyTorch with all learners in one product."""


def ours(row: Row) -> Callable[[], float]:
    """A function that makes a turn of steps and returns steps a second, all learners together."""
    import equinox as eqx
    import jax

    from apportion import Direct, Recurrent, draw_tasks
    from apportion.algorithm import Algorithm, advance, begin
    from apportion.domains.portfolio import Market, SimulatedMarket
    from apportion.kernels.gpu import as_graphs
    from apportion.memory import Replay

    market = Market.of(
        SimulatedMarket.draw(universe=UNIVERSE, days=DAYS, seed=0).prices, window=row.window
    )
    keys = jax.random.split(jax.random.key(0), row.learners)
    policies = eqx.filter_vmap(lambda key: Recurrent(CHANNELS, HIDDEN, key=key))(keys)
    whole = Replay(length=market.horizon, warm_up=market.horizon, recency=5e-5, act_periods=0)
    algorithm = Algorithm.of(
        market,
        draw_tasks(UNIVERSE, row.entities, TASKS, seed=0),
        Recurrent(CHANNELS, HIDDEN, key=keys[0]),
        Direct(row.batch, RATE),
        replay=whole,
    )
    # A chunk is one call. Short chunks give several times, and their median compares with the peer's.
    length = max(row.steps // 5, 1)
    forward = eqx.filter_jit(
        eqx.filter_vmap(lambda state: advance(algorithm, state, length)),
        donate="all",
        compiler_options=as_graphs(),
    )
    start = eqx.filter_jit(eqx.filter_vmap(lambda policy, key: begin(algorithm, policy, key)))
    held = [forward(start(policies, keys))[0]]

    def step() -> None:
        held[0] = jax.block_until_ready(forward(held[0]))[0]

    return lambda: row.learners * length / table.median_seconds(step, 5)


def loop(x, from_input, from_state, bias):
    """PyTorch's recurrence, one period after the other: the last state. x is (window, learners, rows,
    channels), with parameters for each learner; of one learner without that axis."""
    import torch

    h = x.new_zeros(*x.shape[1:-1], HIDDEN)
    for k in range(len(x)):
        h = torch.tanh(x[k] @ from_input + h @ from_state + bias)
    return h


def theirs(
    window: int, batch: int, entities: int, learners: int = 1, *, device="cpu", library=False
) -> Callable[[], None]:
    """The same step in PyTorch, of one learner or of many at once, each with its own parameters, task and
    batch: windows gathered, a tanh recurrence (by torch.nn.RNN where `library` says so), softmax, the
    reward after costs in the state that the previous allocation leads to, Adam, and the write-back of the
    batch's states.
    """
    import torch

    torch.manual_seed(0)
    own = (learners,) if learners > 1 else ()
    # Only what is set up: as a default for all, a device slows every call of a step.
    with torch.device(device):
        returns = 0.01 * torch.randn(DAYS, UNIVERSE, 1)
        prices = returns.cumsum(0).exp() * torch.ones(1, 1, CHANNELS)
        tasks = torch.stack([torch.randperm(UNIVERSE)[:entities] for _ in range(TASKS)])
        held = torch.full((learners, TASKS, DAYS, entities), 1 / entities)
        cell = torch.nn.RNN(CHANNELS, HIDDEN) if library else None
        shapes = [(CHANNELS, HIDDEN), (HIDDEN, HIDDEN), (1, HIDDEN)]
        parameters = [torch.nn.Parameter(0.2 * torch.randn(*own, *shape)) for shape in shapes]
        score, of_held = (torch.nn.Parameter(0.2 * torch.randn(*own, n, 1)) for n in (HIDDEN, 1))
        back, following = torch.arange(window) - window, torch.arange(batch)
        each = torch.arange(learners)[:, None]
    learned = parameters if cell is None else list(cell.parameters())
    optimiser = torch.optim.Adam([*learned, score, of_held], lr=RATE)

    def step() -> None:
        t = torch.randint(TASKS, (learners,), device=device)
        first = torch.randint(window, DAYS - batch, (learners, 1), device=device)
        members, rows = tasks[t][:, None, :], first + following
        seen = prices[(rows[..., None] + back)[..., None], members[:, :, None]]
        x = 10 * (seen / seen[:, :, -1:, :, :1] - 1)
        x = x.permute(2, 0, 1, 3, 4).reshape(window, *own, batch * entities, CHANNELS)
        h = loop(x, *parameters) if cell is None else cell(x)[1]
        before = held[each, t[:, None], rows]
        scores = (h @ score).view(learners, batch, entities)
        allocation = torch.softmax(scores + of_held * before, -1)
        grown = allocation * prices[rows[..., None], members, 0]
        grown = grown / prices[rows[..., None] - 1, members, 0]
        growth = grown.sum(-1)
        after = grown / growth[..., None]
        arrived = torch.cat([before[..., :1, :], after[..., :-1, :]], -2)
        kept = 1 - COST * (allocation - arrived).abs().sum(-1)
        optimiser.zero_grad()
        (-learners * torch.log(kept * growth).mean()).backward()
        optimiser.step()
        held[each, t[:, None], rows] = arrived.detach()

    for _ in range(5):
        step()
    return step


def in_other_process(python: str, row: Row, threads: int) -> float:
    """A turn of PyTorch in its own environment."""
    sizes = (*row.sizes, row.steps, threads)
    return float(table.printed_by(python, __file__, "as-peer", *sizes).split()[-1])


def as_peer(window: int, batch: int, entities: int, steps: int, threads: int) -> None:
    import torch

    torch.set_num_threads(threads)
    print(1 / table.median_seconds(theirs(window, batch, entities), steps))


def on_card(row: Row, batched_steps: int) -> dict:
    """One number of learners: those of PyTorch that take one learner run them one after another."""
    import torch

    def turn_of(
        learners: int = 1, steps: int = 50, *, library: bool = False
    ) -> Callable[[], float]:
        step = theirs(*row.sizes, learners, device="cuda", library=library)
        length = max(steps // 5, 1)

        def several() -> None:
            for _ in range(length):
                step()
            torch.cuda.synchronize()

        return lambda: learners * length / table.median_seconds(several, 5)

    sides = {"ours": ours(row), "eager": turn_of(), "torch.nn.RNN": turn_of(library=True)}
    if row.learners > 1:
        sides["eager, batched"] = turn_of(row.learners, batched_steps)
    rates = table.alternate(sides, TURNS)
    own = rates.pop("ours")
    return {
        "learners": row.learners,
        "ours": table.spread(own),
        "eager": table.spread(rates["eager"]),
        "torch.nn.RNN": table.spread(rates["torch.nn.RNN"]),
        "eager, batched": table.spread(rates["eager, batched"]) if row.learners > 1 else None,
        "ratio to eager": table.ratio(own, rates["eager"]),
        "ratio to the best": table.ratio(own, table.best(rates)),
    }


def on_cores(row: Row, python: str) -> dict:
    """One size; the peer has one thread or one for each core."""
    sides = {"ours": ours(row)}
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        sides[f"{threads} threads"] = partial(in_other_process, python, row, threads)
    rates = table.alternate(sides, TURNS)
    own = rates.pop("ours")
    return {
        "size": row.name,
        "ours": table.spread(own),
        "PyTorch, eager": table.spread(table.best(rates)),
        "ratio": table.ratio(own, table.best(rates)),
    }


def on_cpu(asked: argparse.Namespace) -> None:
    about = table.facts(torch=table.version_in(asked.peer, "torch"))
    text = (
        "Medians over turns taken alternately, with the least and the most. The peer is eager "
        "PyTorch with one thread or one for each core, whichever was faster in that turn."
    )
    rows = (on_cores(row, asked.peer) for row in ROWS)
    title = "Gradient steps a second against PyTorch"
    table.write("gradient_step", title, text, rows, about, asked.out)


def on_gpu(asked: argparse.Namespace) -> None:
    import torch

    # JAX would take most of the card's memory at once; PyTorch needs its part.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    about = table.facts(torch=torch.__version__)
    text = (
        "All learners together, H31 B109 m10; medians over turns taken alternately, with the least "
        "and the most. `eager` and `torch.nn.RNN` (cuDNN) train one learner after another."
    )
    rows = (on_card(row, batched_steps) for row, batched_steps in CARD.items())
    title = "Gradient steps a second on a graphics card"
    table.write("gradient_step_gpu", title, text, rows, about, asked.out)


def main() -> None:
    if sys.argv[1:2] == ["as-peer"]:
        return as_peer(*map(int, sys.argv[2:]))
    parser = table.options(__doc__, peer="PyTorch, for cpu")
    parser.add_argument("where", choices=["cpu", "gpu"])
    asked = parser.parse_args()
    on_cpu(asked) if asked.where == "cpu" else on_gpu(asked)


if __name__ == "__main__":
    main()
