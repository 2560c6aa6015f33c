"""Training for the recipe study: every cell's ensemble under two rewards, scored at each k and eta.

A cell is an experiment (a draw of held-out instruments and tasks) and a test year; its policies learn
from the days before the year alone. Rewards: the recipe's r - 15 d^2, and the paper's r.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.market import Market
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.domains.portfolio.training import training_market
from apportion.domains.portfolio.variants import SPEEDS, TRUSTS, score_variants
from apportion.domains.portfolio.walk_forward import Years, by_cell, train_cells
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.studies.portfolio.grid import Progress
from apportion.tasks import Tasks, draw_tasks, split_entities

TRACKING, PLAIN = "tracking", "paper"
REWARDS = (TRACKING, PLAIN)
"""The recipe's reward, with a penalty on tracking error, and the paper's, without."""
PAIRS = tuple((k, eta) for k in TRUSTS for eta in SPEEDS)


@dataclass(frozen=True)
class Scale:
    """How large the study is."""

    settings: PortfolioSettings
    experiments: int
    years: int
    """Test years: the last so many of the data that have enough days before them."""
    held_out: int
    shown: int
    checkpoints: int


PAPER = Scale(PortfolioSettings(tasks=100, method="mtl"), 10, 7, 18, 10, 3)
SECOND = Scale(PortfolioSettings(tasks=100, task_size=5, method="mtl"), 4, 22, 6, 6, 3)
"""For the 20 embedded stocks, 2001 to 2022."""
QUICK = Scale(
    PortfolioSettings(
        method="mtl",
        tasks=20,
        task_size=5,
        steps=210,
        window=8,
        batch=32,
        hidden=12,
        learning_rate=3e-3,
    ),
    experiments=2,
    years=6,
    held_out=6,
    shown=4,
    checkpoints=3,
)


def describe(
    prices: Prices, scale: Scale, *, seed: int = 0, rewards: Sequence[str] = REWARDS
) -> dict[str, Any]:
    """What is needed to run the study again."""
    return {
        "data": prices.summary(),
        **vars(scale.settings),
        # The study draws these itself, for each experiment anew.
        "held_out": scale.held_out,
        "seed": seed,
        "experiments": scale.experiments,
        "years": scale.years,
        "rewards": list(rewards),
    }


def compute(
    prices: Prices,
    scale: Scale,
    *,
    seed: int = 0,
    rewards: Sequence[str] = REWARDS,
    progress: Progress | None = None,
    save: Callable[[pd.DataFrame], None] | None = None,
) -> pd.DataFrame:
    """A row for each reward, experiment, year, tested, members, step, k and eta.

    Gains are over daily Equal CRP; log_gain in log percentage points a year. k = 0 learns nothing:
    with eta = 0.1 it is lazy Equal CRP. Rows with members = 1 are the mean over all seeds, each
    taken alone. `save` is given the table so far after each reward.
    """
    if not rewards or set(rewards) - set(REWARDS):
        raise InputError(f"rewards {list(rewards)}: choose from {', '.join(REWARDS)}")
    s = scale.settings
    spans = Years.of(prices, prices.years()[-scale.years :], before=s.window + s.batch)
    own, unseen = [], []
    for experiment in range(scale.experiments):
        seen, others = split_entities(len(prices.tickers), scale.held_out, seed=seed + experiment)
        own.append(draw_tasks(seen, s.task_size, s.tasks, seed=seed + experiment))
        unseen.append(draw_tasks(others, s.task_size, scale.shown, seed=seed + experiment))
    count = len(spans.years)

    def cells(tasks: list[Tasks]) -> Tasks:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *tasks)
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, count, 0), stacked)

    tile = (scale.experiments,)
    starts, days = (jnp.tile(jnp.asarray(x, jnp.int32), tile) for x in (spans.firsts, spans.days))
    test = replace(
        Market.of(prices, window=s.window, costs=Costs(s.cost, exact=True)), horizon=max(spans.days)
    )
    tested = {"own": cells([tasks[: scale.shown] for tasks in own]), "held-out": cells(unseen)}
    frames: list[pd.DataFrame] = []
    for place, reward in enumerate(rewards):
        settings = s if reward == TRACKING else replace(s, tracking=0.0)

        def on_chunk(chunk, reward=reward, place=place):
            teams = by_cell(chunk.policy, s.members)
            for members in sorted({s.members, 1}, reverse=True):
                for kind, tasks in tested.items():
                    gains = _gains(teams, members, (test, starts, days, tasks))
                    cell, pair = (i.ravel() for i in np.indices(gains["log_gain"].shape))
                    about = {
                        "reward": reward,
                        "experiment": cell // count,
                        "year": np.asarray(spans.years)[cell % count],
                        "tested": kind,
                        "members": members,
                        "steps": chunk.step,
                        "k": np.asarray(PAIRS)[pair, 0],
                        "eta": np.asarray(PAIRS)[pair, 1],
                    }
                    values = {name: value.ravel() for name, value in gains.items()}
                    frames.append(pd.DataFrame(about | values))
            if progress is not None:
                done = (place + chunk.step / chunk.steps) / len(rewards)
                progress(f"recipe, {reward} reward: step {chunk.step} of {chunk.steps}", done)

        train_cells(
            training_market(prices.until(prices.dates[spans.firsts[-1]]), settings),
            starts - s.window,
            cells(own),
            settings,
            chunk=s.updates // scale.checkpoints,
            on_chunk=on_chunk,
            # The same first parameters and batches for both rewards: they differ in nothing else.
            key=jax.random.key(seed),
        )
        if save is not None:
            save(pd.concat(frames, ignore_index=True))
    return pd.concat(frames, ignore_index=True)


def _gains(teams: Policy, members: int, where: tuple) -> dict[str, np.ndarray]:
    """Gains over daily Equal CRP, cells by variants: of the teams, or of their members one by one."""
    grid = [jnp.asarray(column, jnp.float32) for column in zip(*PAIRS, strict=True)]
    size = jax.tree.leaves(eqx.filter(teams, eqx.is_array))[0].shape[1]
    looked_at = [teams] if members == size else [_alone(teams, i) for i in range(size)]
    equal = PAIRS.index((0.0, 1.0))
    log_gains, sharpe_gains = [], []
    for team in looked_at:
        growth, sharpe = score_variants(team, *where, *grid)
        log_gains.append(100 * np.asarray(growth - growth[:, equal][:, None]).mean(-1))
        sharpe_gains.append(np.asarray(sharpe - sharpe[:, equal][:, None]).mean(-1))
    return {"log_gain": np.mean(log_gains, 0), "sharpe_gain": np.mean(sharpe_gains, 0)}


def _alone(teams: Policy, member: int) -> Policy:
    """Every cell's team without all but one of its members."""
    here = slice(member, member + 1)
    return jax.tree.map(lambda leaf: leaf[:, here] if eqx.is_array(leaf) else leaf, teams)
