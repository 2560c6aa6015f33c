"""The portfolio's gradient step in eager PyTorch, for `recurrence.py`: answers each line with a rate.

The same sizes and the same work: windows gathered, a tanh recurrence, softmax, the reward after costs
in the state that the previous allocation leads to, Adam, and the write-back of the batch's states.
"""

import statistics
import sys
import time

import torch

CHANNELS, HIDDEN, DAYS, UNIVERSE, TASKS, COST = 3, 25, 1000, 50, 30, 0.0025


def prepare(window: int, batch: int, entities: int):
    torch.manual_seed(0)
    returns = 0.01 * torch.randn(DAYS, UNIVERSE, 1)
    prices = returns.cumsum(0).exp() * torch.ones(1, 1, CHANNELS)
    tasks = torch.stack([torch.randperm(UNIVERSE)[:entities] for _ in range(TASKS)])
    held = torch.full((TASKS, DAYS, entities), 1 / entities)
    shapes = ((CHANNELS, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN,), ())
    parameters = [torch.nn.Parameter(0.2 * torch.randn(shape)) for shape in shapes]
    from_input, from_state, bias, score, of_held = parameters
    optimiser = torch.optim.Adam(parameters, lr=2.8e-4)
    back = torch.arange(window) - window

    def step() -> None:
        t = int(torch.randint(TASKS, ()))
        members = tasks[t]
        rows = int(torch.randint(window, DAYS - batch, ())) + torch.arange(batch)
        seen = prices[(rows[:, None] + back)[:, :, None], members]
        x = 10 * (seen / seen[:, -1:, :, :1] - 1)
        x = x.permute(1, 0, 2, 3).reshape(window, batch * entities, CHANNELS)
        h = torch.zeros(batch * entities, HIDDEN)
        for k in range(window):
            h = torch.tanh(x[k] @ from_input + h @ from_state + bias)
        before = held[t, rows]
        allocation = torch.softmax((h @ score).view(batch, entities) + of_held * before, -1)
        grown = allocation * prices[rows][:, members, 0] / prices[rows - 1][:, members, 0]
        growth = grown.sum(-1)
        after = grown / growth[:, None]
        arrived = torch.cat([before[:1], after[:-1]])
        kept = 1 - COST * (allocation - arrived).abs().sum(-1)
        loss = -torch.log(kept * growth).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        held[t, rows] = arrived.detach()

    return step


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
