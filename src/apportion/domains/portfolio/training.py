"""From prices to policies: Algorithm 1 with the direct gradient on the market's tasks.

`train_portfolio_runs` is the one trainer behind every portfolio policy: runs differ in seed, method, tasks
or days, and are one `vmap`. Memory holds w_{n-1} for every period of every task, refreshed by each
batch's own drifted allocations.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key, PyTree

from apportion.algorithm import RunState
from apportion.composition import Ensemble, LimitedTurnover, PartialTrading, ShrunkToEqual
from apportion.domains.portfolio.market import Costs, Market
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.errors import InputError
from apportion.learners.direct import Direct
from apportion.learners.learner import Learner
from apportion.memory import Replay
from apportion.policy import GaussianLogits, Policy, Recurrent
from apportion.priority import Priority
from apportion.tasks import Task, count_tasks, draw_tasks, split_entities
from apportion.training import Chunks, Resume, TrainingResult, train


@dataclass(frozen=True)
class PortfolioTraining:
    """A trained portfolio policy with what it was made from."""

    policy: Policy
    """Ready to use: the ensemble, shrunk and trading part of the way as the settings say."""
    training: TrainingResult
    tasks: Task
    seen: np.ndarray
    """Instruments trained on, as columns of the prices."""
    unseen: np.ndarray


def train_portfolio(
    prices: Prices,
    settings: PortfolioSettings | None = None,
    *,
    chunks: Chunks | None = None,
    state: RunState | Resume | None = None,
) -> PortfolioTraining:
    """Train on all rows of `prices`.

    Parameters
    ----------
    prices
        Everything the policy may learn from; cut it with `prices.until` to keep a test period.
    settings
        Defaults to the practical policy.
    chunks, state
        As in `apportion.training.train`.

    Examples
    --------
    >>> from apportion.domains.portfolio import SimulatedMarket
    >>> settings = PortfolioSettings(
    ...     tasks=4, task_size=3, steps=10, members=2, window=8, batch=16, hidden=4)
    >>> done = train_portfolio(SimulatedMarket.draw(universe=6, days=80).prices, settings)
    >>> done.training.state.step.tolist()
    [10, 10]
    """
    settings = PortfolioSettings() if settings is None else settings
    seen, unseen, tasks = draw_portfolio_tasks(len(prices.tickers), settings)
    policy_key, run_key = jax.random.split(jax.random.key(settings.seed))
    training = train_portfolio_runs(
        training_market(prices, settings),
        tasks,
        settings,
        policy_keys=jax.random.split(policy_key, settings.members),
        run_keys=jax.random.split(run_key, settings.members),
        chunks=chunks,
        state=state,
    )
    return PortfolioTraining(compose(training.policy, settings), training, tasks, seen, unseen)


def train_portfolio_runs(
    market: Market,
    tasks: Task,
    settings: PortfolioSettings,
    *,
    policy_keys: Key[Array, " runs"],
    run_keys: Key[Array, " runs"],
    priority: Priority | None = None,
    lengths: Int[Array, " runs"] | None = None,
    market_axes: PyTree = None,
    learner: Learner | None = None,
    replay: Replay | None = None,
    explore: GaussianLogits | None = None,
    chunks: Chunks | None = None,
    state: RunState | Resume | None = None,
) -> TrainingResult:
    """Independent runs in one `vmap`, each from its own first parameters.

    Parameters
    ----------
    tasks
        One stack for all runs, or one for each.
    policy_keys, run_keys
        One of each for every run: what makes its first parameters, and its randomness.
    priority
        Where runs differ in method: selections stacked by run. By default the settings'.
    lengths
        How many of the market's periods each run may learn from.
    market_axes
        Which leaves of the market differ by run, for markets that are stacked.
    learner, replay, explore
        How batches are learned from, how memory is filled and read, and the noise of what is acted; by
        default as the settings say, with memory of the whole period, full from the start, and no noise.
    """
    first = untrained_policies(market.prices.shape[-1], settings, policy_keys)
    if lengths is not None:
        shared = jax.tree.map(lambda _: None, market)
        market_axes = eqx.tree_at(lambda m: m.length, shared, 0, is_leaf=lambda x: x is None)
        market = eqx.tree_at(lambda m: m.length, market, lengths)
    if learner is None:
        learner = Direct(settings.batch, settings.learning_rate)
    if replay is None:
        replay = Replay(
            length=market.horizon, warm_up=market.horizon,
            recency=settings.recency, act_periods=settings.act_periods,
        )  # fmt: skip
    return train(
        market,
        tasks,
        first,
        learner,
        steps=settings.steps,
        priority=settings.priority() if priority is None else priority,
        scorer=settings.scorer_function(),
        replay=replay,
        explore=explore,
        chunks=chunks,
        resume_from=state,
        problem_axes=market_axes,
        key=run_keys,
    )


def untrained_policies(
    channels: int, settings: PortfolioSettings, keys: Key[Array, " runs"]
) -> Policy:
    """Return the policies that training starts from, stacked, one for each key."""

    def make(key):
        policy = Recurrent(channels, settings.hidden, head=settings.head(), key=key)
        return _limit_turnover(policy, settings.max_turnover)

    return eqx.filter_vmap(make)(keys)


def draw_portfolio_tasks(
    universe: int, settings: PortfolioSettings
) -> tuple[np.ndarray, np.ndarray, Task]:
    """Instruments to train on, instruments held out, and the tasks among the former.

    Where the settings have cash, the universe's last entity, it stands in front of every task.
    """
    seen, unseen = split_entities(universe, settings.held_out, seed=settings.seed)
    if settings.task_size > len(seen):
        raise InputError(
            f"task_size {settings.task_size}: only {len(seen)} instruments are there to train on; "
            "choose smaller tasks, hold fewer instruments out, or give more"
        )
    # A small universe has few subsets: then all of them are the tasks.
    count = min(settings.tasks, count_tasks(len(seen), settings.task_size))
    tasks = settings.trained_tasks(draw_tasks(seen, settings.task_size, count, seed=settings.seed))
    return seen, unseen, tasks.with_entity(universe) if settings.cash else tasks


def training_market(prices: Prices, settings: PortfolioSettings) -> Market:
    """Return the market over every period that has a full window before it."""
    market = Market.of(
        prices,
        window=settings.window,
        costs=Costs(settings.cost, cash=settings.cash),
        tracking=settings.tracking_error_weight,
        head=settings.head(),
    )
    if market.horizon < settings.batch:
        raise InputError(
            f"prices: {len(prices.dates)} days leave {market.horizon} periods, but a batch has "
            f"{settings.batch}; give more days, or a smaller batch or window"
        )
    return market


def compose(members: Policy, settings: PortfolioSettings) -> Policy:
    """Combine stacked policies into one as the settings say."""
    return combine_members(members, settings.trust, settings.trade_fraction, settings.max_turnover)


def combine_members(
    members: Policy,
    trust: float | Float[Array, ""],
    trade_fraction: float | Float[Array, ""],
    max_turnover: float = 2.0,
) -> Policy:
    """Average stacked policies, shrink to equal shares, trade part of the way, limit turnover."""
    # The limit is that of the whole, not of each member.
    members = members.policy if isinstance(members, LimitedTurnover) else members
    target = ShrunkToEqual(Ensemble(members), trust)
    return _limit_turnover(PartialTrading(target, trade_fraction), max_turnover)


def _limit_turnover(policy: Policy, max_turnover: float) -> Policy:
    """Return the policy with limited turnover; the policy itself if nothing is limited."""
    return policy if max_turnover >= 2 else LimitedTurnover(policy, max_turnover)
