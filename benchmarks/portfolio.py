"""Days of trading a second: our market against vectorised NumPy.

    python benchmarks/portfolio.py

A day of one environment: an action for 10 instruments becomes shares, prices move, costs are taken,
and windows of 31 days of 3 channels are shown. Ours is one compiled scan over the year; NumPy's is a
Gymnasium vector environment that does the same work with arrays over all environments.
"""

from collections.abc import Callable

import equinox as eqx
import gymnasium
import jax
import numpy as np
from table import alternate, facts, options, per_second, ratio, spread, write

from apportion.domains.portfolio import Market, SimulatedMarket
from apportion.simplex import Head
from apportion.tasks import draw_tasks

WINDOW, ENTITIES, UNIVERSE, COST, REACH, DAYS, TURNS = 31, 10, 50, 0.0025, 5.0, 250, 5


class NumpyMarket(gymnasium.vector.VectorEnv):
    """The same market in NumPy: all environments by one call, no loop over them."""

    def __init__(self, count: int, prices: np.ndarray, members: np.ndarray):
        self.num_envs, self.prices, self.members = count, prices, members[:, None]
        self.back = np.arange(WINDOW)[None, :, None] - WINDOW

    def reset(self, *, seed=None, options=None):
        self.n = np.full(self.num_envs, WINDOW)
        self.held = np.full((self.num_envs, ENTITIES), 1 / ENTITIES, np.float32)
        return self.show(), {}

    def show(self) -> dict[str, np.ndarray]:
        seen = self.prices[self.n[:, None, None] + self.back, self.members]
        history = 10 * (seen / seen[:, -1:, :, :1] - 1)
        return {"history": history.transpose(0, 2, 1, 3), "held": self.held}

    def step(self, actions):
        scores = np.exp(REACH * np.clip(actions, -1, 1))
        shares = scores / scores.sum(1, keepdims=True)
        members = self.members[:, 0]
        before, after = self.prices[self.n - 1][:, :, 0], self.prices[self.n][:, :, 0]
        rows = np.arange(self.num_envs)[:, None]
        grown = shares * after[rows, members] / before[rows, members]
        growth = grown.sum(1)
        kept = 1 - COST * np.abs(shares - self.held).sum(1)
        self.held = (grown / growth[:, None]).astype(np.float32)
        self.n = self.n + 1
        ended = self.n >= len(self.prices)
        self.n = np.where(ended, WINDOW, self.n)
        return self.show(), np.log(kept * growth), np.zeros_like(ended), ended, {}


def stepped(env: gymnasium.vector.VectorEnv, actions: np.ndarray) -> Callable[[], float]:
    """Days a second, all environments together, by one call a day."""
    env.reset(seed=0)

    def year() -> None:
        for action in actions:
            env.step(action)

    return per_second(env.num_envs * len(actions), year)


def scanned(market: Market, tasks, actions: np.ndarray) -> Callable[[], float]:
    """The same by one compiled scan, which hands back rewards and sums what was shown."""
    head = Head()

    @eqx.filter_jit
    def run(market, tasks, actions):
        def episode(task, actions):
            def day(state, action):
                seen = market.observe(task, state)
                shares = head(REACH * action, task.mask)
                step = market.step(task, state, shares, key=jax.random.key(0))
                return step.state, (step.reward, seen.history.sum())

            first = market.reset(task, key=jax.random.key(0))
            return jax.lax.scan(day, first, actions)[1]

        return jax.vmap(episode, in_axes=(0, 1))(tasks, actions)

    days = actions.shape[0] * actions.shape[1]
    return per_second(days, lambda: jax.block_until_ready(run(market, tasks, actions)))


def measure(count: int) -> dict:
    prices = SimulatedMarket.draw(universe=UNIVERSE, days=1000, seed=0).prices
    market = Market.of(prices, window=WINDOW)
    tasks = draw_tasks(UNIVERSE, ENTITIES, count, seed=0)
    values, members = np.asarray(market.prices), np.asarray(tasks.members)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (DAYS, count, ENTITIES)).astype(np.float32)
    sides = {
        "ours, one scan": scanned(market, tasks, actions),
        "NumPy": stepped(NumpyMarket(count, values, members), actions),
    }
    found = alternate(sides, TURNS)
    ratios = {"scan to NumPy": ratio(*found.values())}
    return {"environments": count} | {name: spread(own) for name, own in found.items()} | ratios


def main() -> None:
    asked = options(__doc__).parse_args()
    about = facts("gymnasium", numpy=np.__version__)
    text = (
        "All environments together; medians over turns taken alternately, with the least and the "
        f"most. A turn has {DAYS} days."
    )
    rows = [measure(count) for count in (1, 30, 300)]
    write("portfolio", "Days of trading a second", text, rows, about, asked.out)


if __name__ == "__main__":
    main()
