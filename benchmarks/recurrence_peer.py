"""The portfolio's gradient step in PyTorch, for `gpu.py` and, in a process of its own, `recurrence.py`.

The same sizes and the same work: windows gathered, a tanh recurrence, softmax, the reward after costs
in the state that the previous allocation leads to, Adam, and the write-back of the batch's states.
"""

import statistics
import sys
import time

import torch

CHANNELS, HIDDEN, DAYS, UNIVERSE, TASKS, COST = 3, 25, 1000, 50, 30, 0.0025


def loop(x, from_input, from_state, bias):
    """The last state, one period after the other; x is (window, rows, channels), or (window, learners,
    rows, channels) with parameters for each learner."""
    h = x.new_zeros(*x.shape[1:-1], HIDDEN)
    for k in range(len(x)):
        h = torch.tanh(x[k] @ from_input + h @ from_state + bias)
    return h


def prepare(window: int, batch: int, entities: int, *, device: str = "cpu", library: bool = False):
    """One learner's step: the recurrence as a loop, or by torch.nn.RNN where `library` says so."""
    torch.manual_seed(0)
    # Only what is set up: as a default for all, a device slows every call of a step.
    with torch.device(device):
        prices, tasks, held = market(entities)
        score, of_held = (torch.nn.Parameter(0.2 * torch.randn(shape)) for shape in ((HIDDEN,), ()))
        cell = torch.nn.RNN(CHANNELS, HIDDEN) if library else None
        parameters = recurrent(()) if cell is None else list(cell.parameters())
        back, following = torch.arange(window) - window, torch.arange(batch)
    optimiser = torch.optim.Adam([*parameters, score, of_held], lr=2.8e-4)

    def step() -> None:
        # Drawn on the host, so that no step waits for the device.
        t = int(torch.randint(TASKS, ()))
        members = tasks[t]
        rows = int(torch.randint(window, DAYS - batch, ())) + following
        seen = prices[(rows[:, None] + back)[:, :, None], members]
        x = 10 * (seen / seen[:, -1:, :, :1] - 1)
        x = x.permute(1, 0, 2, 3).reshape(window, batch * entities, CHANNELS)
        h = loop(x, *parameters) if cell is None else cell(x)[1][0]
        before = held[t, rows]
        allocation = torch.softmax((h @ score).view(batch, entities) + of_held * before, -1)
        grown = allocation * prices[rows][:, members, 0] / prices[rows - 1][:, members, 0]
        loss, arrived = outcome(allocation, grown, before)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        held[t, rows] = arrived.detach()

    return step


def prepare_many(window: int, batch: int, entities: int, learners: int, *, device: str = "cpu"):
    """A step of many learners at once, each with its own parameters, task and batch."""
    torch.manual_seed(0)
    with torch.device(device):
        prices, tasks, held = market(entities)
        held = held.repeat(learners, 1, 1, 1)
        parameters = recurrent((learners,))
        score = torch.nn.Parameter(0.2 * torch.randn(learners, HIDDEN, 1))
        of_held = torch.nn.Parameter(0.2 * torch.randn(learners, 1, 1))
        back, following = torch.arange(window) - window, torch.arange(batch)
        each = torch.arange(learners)
    optimiser = torch.optim.Adam([*parameters, score, of_held], lr=2.8e-4)

    def step() -> None:
        t = torch.randint(TASKS, (learners,), device=device)
        members = tasks[t][:, None, :]
        rows = torch.randint(window, DAYS - batch, (learners, 1), device=device) + following
        seen = prices[(rows[..., None] + back)[..., None], members[:, :, None]]
        x = 10 * (seen / seen[:, :, -1:, :, :1] - 1)
        x = x.permute(2, 0, 1, 3, 4).reshape(window, learners, batch * entities, CHANNELS)
        h = loop(x, *parameters)
        before = held[each[:, None], t[:, None], rows]
        scores = (h @ score).view(learners, batch, entities)
        allocation = torch.softmax(scores + of_held * before, -1)
        grown = allocation * prices[rows[..., None], members, 0]
        grown = grown / prices[rows[..., None] - 1, members, 0]
        loss, arrived = outcome(allocation, grown, before)
        optimiser.zero_grad()
        (learners * loss).backward()
        optimiser.step()
        held[each[:, None], t[:, None], rows] = arrived.detach()

    return step


def market(entities: int):
    """Prices, tasks, and what each task holds on each day."""
    returns = 0.01 * torch.randn(DAYS, UNIVERSE, 1)
    prices = returns.cumsum(0).exp() * torch.ones(1, 1, CHANNELS)
    tasks = torch.stack([torch.randperm(UNIVERSE)[:entities] for _ in range(TASKS)])
    return prices, tasks, torch.full((TASKS, DAYS, entities), 1 / entities)


def recurrent(learners: tuple[int, ...]):
    """A, B and b of the recurrence."""
    between = (1,) if learners else ()
    shapes = ((CHANNELS, HIDDEN), (HIDDEN, HIDDEN), (*between, HIDDEN))
    return [torch.nn.Parameter(0.2 * torch.randn(*learners, *shape)) for shape in shapes]


def outcome(allocation, grown, before):
    """The loss of consecutive days, and what was held when each of them came."""
    growth = grown.sum(-1)
    after = grown / growth[..., None]
    arrived = torch.cat([before[..., :1, :], after[..., :-1, :]], -2)
    kept = 1 - COST * (allocation - arrived).abs().sum(-1)
    return -torch.log(kept * growth).mean(), arrived


def main() -> None:
    window, batch, entities, steps, threads = (int(text) for text in sys.argv[1:])
    torch.set_num_threads(threads)
    step = prepare(window, batch, entities)
    for _ in range(5):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        times = []
        for _ in range(steps):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
        print(1 / statistics.median(times), flush=True)


if __name__ == "__main__":
    main()
