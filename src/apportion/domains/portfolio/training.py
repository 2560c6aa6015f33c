"""From prices to a policy: Algorithm 1 with the direct gradient on the market's tasks.

STL, MTL and P-MTL are settings of it; the seeds of an ensemble are one `vmap`. Memory holds w_{n-1}
for every period of every task, refreshed by each batch's own drifted allocations.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from apportion.algorithm import RunState
from apportion.composition import Ensemble, PartialTrading, ShrunkToEqual
from apportion.domains.portfolio.costs import Costs
from apportion.domains.portfolio.market import Market, equal
from apportion.domains.portfolio.price_table import Prices
from apportion.domains.portfolio.settings import PortfolioSettings
from apportion.errors import InputError
from apportion.learners.direct import Direct
from apportion.policy import Policy, Recurrent
from apportion.priority import Priority
from apportion.scorers import SCORERS
from apportion.tasks import Tasks, count_tasks, draw_tasks, split_entities
from apportion.training import OnChunk, Resume, Training, train_runs


@dataclass(frozen=True)
class PortfolioTraining:
    """A trained portfolio policy with what it was made from."""

    policy: Policy
    """Ready to use: the ensemble, shrunk and trading part of the way as the settings say."""
    training: Training
    settings: PortfolioSettings
    tasks: Tasks
    seen: np.ndarray
    """Instruments trained on, as columns of the prices."""
    unseen: np.ndarray
    fingerprint: str
    """Of the prices it was trained on."""


def train_portfolio(
    prices: Prices,
    settings: PortfolioSettings | None = None,
    *,
    chunk: int = 500,
    on_chunk: OnChunk | None = None,
    state: RunState | Resume | None = None,
) -> PortfolioTraining:
    """Train on all rows of `prices`.

    Parameters
    ----------
    prices
        Everything the policy may learn from; cut it with `prices.until` to keep a test period.
    settings
        Defaults to the policy worth having.
    chunk, on_chunk, state
        As in `apportion.training.train`: steps between visits of `on_chunk`, and a state to go on
        from.

    Examples
    --------
    >>> from apportion.domains.portfolio import KnownTruth
    >>> settings = PortfolioSettings(
    ...     tasks=4, task_size=3, steps=10, members=2, window=8, batch=16, hidden=4)
    >>> done = train_portfolio(KnownTruth.draw(universe=6, days=80).prices, settings)
    >>> int(done.training.state.step.max())
    10
    """
    settings = PortfolioSettings() if settings is None else settings
    seen, unseen, tasks = choose_tasks(len(prices.tickers), settings)
    market = training_market(prices, settings)
    key = jax.random.key(settings.seed)
    policy_key, run_key = jax.random.split(key)
    training = train_runs(
        market,
        tasks,
        first_policies(settings, market, jax.random.split(policy_key, settings.members)),
        learner(settings),
        steps=settings.updates,
        selection=selection(settings),
        chunk=chunk,
        on_chunk=on_chunk,
        state=state,
        keys=jax.random.split(run_key, settings.members),
        **algorithm_settings(settings, market),
    )
    policy = compose(training.policy, settings)
    return PortfolioTraining(policy, training, settings, tasks, seen, unseen, prices.fingerprint)


def choose_tasks(
    universe: int, settings: PortfolioSettings
) -> tuple[np.ndarray, np.ndarray, Tasks]:
    """Instruments to train on, instruments held out, and the tasks among the former."""
    seen, unseen = split_entities(universe, settings.held_out, seed=settings.seed)
    return seen, unseen, tasks_among(seen, settings)


def tasks_among(instruments: np.ndarray, settings: PortfolioSettings) -> Tasks:
    """The tasks that the settings draw among these instruments."""
    if settings.task_size > len(instruments):
        raise InputError(
            f"task_size {settings.task_size}: only {len(instruments)} instruments are there to "
            "train on; choose smaller tasks, hold fewer instruments out, or give more"
        )
    # A small universe has few subsets: then all of them are the tasks.
    count = min(settings.tasks, count_tasks(len(instruments), settings.task_size))
    tasks = draw_tasks(instruments, settings.task_size, count, seed=settings.seed)
    return tasks[:1] if settings.method == "stl" else tasks


def training_market(prices: Prices, settings: PortfolioSettings) -> Market:
    """The market over every period that has a full window behind it."""
    market = Market.of(
        prices, window=settings.window, costs=Costs(settings.cost), tracking=settings.tracking
    )
    if market.horizon < settings.batch:
        raise InputError(
            f"prices: {len(prices.dates)} days leave {market.horizon} periods, but a batch has "
            f"{settings.batch}; give more days, or a smaller batch or window"
        )
    return market


def first_policies(settings: PortfolioSettings, market: Market, keys: PRNGKeyArray) -> Policy:
    """Untrained policies, stacked, one for each key; each gives nearly equal shares."""
    channels = market.prices.shape[-1]
    return eqx.filter_vmap(lambda key: Recurrent(channels, settings.hidden, key=key))(keys)


def learner(settings: PortfolioSettings) -> Direct:
    """The direct policy gradient over batches of consecutive days."""
    return Direct(settings.batch, settings.learning_rate)


def selection(settings: PortfolioSettings) -> Priority:
    """Prioritised, or with alpha = 0 uniform."""
    alpha = settings.alpha if settings.method == "pmtl" else 0.0
    return Priority(alpha, settings.beta, settings.smoothing, 1 - 1 / settings.task_size)


def algorithm_settings(settings: PortfolioSettings, market: Market) -> dict:
    """Algorithm 1's other settings: memory of the whole period, full from the start."""
    if settings.scorer not in SCORERS:
        raise InputError(f"scorer {settings.scorer!r}: choose one of {', '.join(SCORERS)}")
    return {
        "scorer": SCORERS[settings.scorer],
        "acting": settings.acting,
        "history": market.horizon,
        "warm_up": market.horizon,
        "recency": settings.recency,
    }


def compose(members: Policy, settings: PortfolioSettings) -> Policy:
    """Stacked policies as one: averaged, shrunk to equal shares, trading part of the way."""
    return PartialTrading(ShrunkToEqual(Ensemble(members), settings.k), settings.eta)


def blank_policy(settings: PortfolioSettings, channels: int) -> Policy:
    """A composed policy of the right structure, to load saved numbers into."""
    keys = jax.random.split(jax.random.key(0), settings.members)
    members = eqx.filter_vmap(lambda key: Recurrent(channels, settings.hidden, key=key))(keys)
    return compose(members, settings)


def next_allocation(
    policy: Policy, prices: Prices, *, window: int, held: np.ndarray | None = None
) -> Float[Array, " entities"]:
    """The allocation for the period after the last row, given today's drifted shares (or equal)."""
    if len(prices.dates) < window:
        raise InputError(
            f"prices: {len(prices.dates)} days, but a decision sees {window}; give more days"
        )
    market = Market.ending(prices, window=window)
    task = Tasks.of([range(len(prices.tickers))])[0]
    shares = equal(task) if held is None else jnp.asarray(held, jnp.float32)
    history = market.windows(task, jnp.zeros((), jnp.int32))
    return policy.allocate(policy.encode(history, task.mask), shares, task.mask)
