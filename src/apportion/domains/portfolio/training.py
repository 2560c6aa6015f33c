"""Training of portfolio policies: Algorithm 1 with the direct gradient on the tasks of a market.

`train_portfolio_runs` trains all portfolio policies, with one `vmap` over runs that differ in seed, method,
tasks or days. Memory holds w_{n-1} for every period of every task and is refreshed by the drifted
allocations of each batch.
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
    """Result of `train_portfolio`."""

    policy: Policy
    """The ensemble, with the trust, trade fraction and turnover limit of the settings."""
    training: TrainingResult
    tasks: Task
    seen: np.ndarray
    """Training instruments, as columns of the prices."""
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
    prices : Prices
        Training data; use `prices.until` to exclude a test period.
    settings : PortfolioSettings, optional
        By default the practical policy.
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
    """Train independent runs in one `vmap`.

    Parameters
    ----------
    tasks
        One stack for all runs, or one for each run.
    policy_keys, run_keys
        Keys of each run, for its initial parameters and for training.
    priority
        Task samplers stacked by run, if runs differ in method; by default that of the settings.
    lengths
        Number of periods of the market that each run trains on.
    market_axes
        Leaves of the market that differ by run, as `in_axes` of `vmap`.
    learner, replay, explore
        Learner, memory and exploration noise. By default `Direct` with the batch size and learning rate of
        the settings, a memory of the whole period that is full from the start, and no noise.
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
    """Return a stack of untrained policies, one for each key."""

    def make(key):
        policy = Recurrent(channels, settings.hidden, head=settings.head(), key=key)
        return _limit_turnover(policy, settings.max_turnover)

    return eqx.filter_vmap(make)(keys)


def draw_portfolio_tasks(
    universe: int, settings: PortfolioSettings
) -> tuple[np.ndarray, np.ndarray, Task]:
    """Return training instruments, held-out instruments, and tasks of the training instruments.

    If the policy can hold cash, the last entity of the universe, it is the first entity of every task.
    """
    seen, unseen = split_entities(universe, settings.held_out, seed=settings.seed)
    if settings.task_size > len(seen):
        raise InputError(
            f"task_size {settings.task_size}: there are only {len(seen)} training instruments; choose "
            "smaller tasks, hold fewer instruments out, or give more"
        )
    # A small universe has fewer subsets than settings.tasks; all of them are used.
    count = min(settings.tasks, count_tasks(len(seen), settings.task_size))
    tasks = settings.trained_tasks(draw_tasks(seen, settings.task_size, count, seed=settings.seed))
    return seen, unseen, tasks.with_entity(universe) if settings.cash else tasks


def training_market(prices: Prices, settings: PortfolioSettings) -> Market:
    """Return the market of all periods with a full window before them."""
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
    """Combine stacked policies into one, with trust, trade fraction and turnover of `settings`."""
    return combine_members(members, settings.trust, settings.trade_fraction, settings.max_turnover)


def combine_members(
    members: Policy,
    trust: float | Float[Array, ""],
    trade_fraction: float | Float[Array, ""],
    max_turnover: float = 2.0,
) -> Policy:
    """Average stacked policies, shrink to equal shares, trade part of the way, limit turnover."""
    # The turnover limit applies to the combined policy, not to each member.
    members = members.policy if isinstance(members, LimitedTurnover) else members
    target = ShrunkToEqual(Ensemble(members), trust)
    return _limit_turnover(PartialTrading(target, trade_fraction), max_turnover)


def _limit_turnover(policy: Policy, max_turnover: float) -> Policy:
    """Limit the turnover of a policy, unless the limit has no effect."""
    return policy if max_turnover >= 2 else LimitedTurnover(policy, max_turnover)
