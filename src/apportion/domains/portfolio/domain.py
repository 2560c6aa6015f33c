"""The domain `portfolio`: options and commands.

Importing this module does not import JAX; prices are read and validated before JAX starts.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apportion.domains.domain import Demonstration, Domain
from apportion.domains.portfolio.settings import PortfolioJob, all_or_named, check_cost
from apportion.errors import InputError

if TYPE_CHECKING:
    from apportion.certify.certificate import Gains
    from apportion.domains.portfolio.allocation import NextAllocation, TrainedPolicy
    from apportion.domains.portfolio.prices import Prices
    from apportion.domains.portfolio.record import Backtest
    from apportion.domains.portfolio.run import CheckedPrices
    from apportion.report.page import Section
    from apportion.runs.folder import Run
    from apportion.runs.progress import Progress
    from apportion.runs.runner import PreparedJob


_GLOSSARY = {
    "Equal CRP": "Equal shares, restored every day (a constantly rebalanced portfolio).",
    "lazy-crp": "Equal shares, restored a tenth of the way each day; no learning, little trading.",
    "hindsight": "Chosen with knowledge of the whole test period, such as the best constant shares.",
    "in-sample": "Days that the policy was trained on; results on them do not predict later days.",
    "drawdown": "Fall of a value below its highest value so far.",
    "turnover": "The sum of all changes of shares in a period; 2 exchanges everything.",
    "Sharpe ratio": "Mean return divided by its standard deviation, annualised.",
    "trust, trade fraction": (
        "Weight of the learned policy against equal shares (trust 0: equal shares), and fraction of the "
        "way to the target that is traded each day."
    ),
}
"""Terms that the page of a portfolio run explains."""


@dataclass(frozen=True)
class PriceOptions:
    """Price file, and the moves to accept in it."""

    prices: Path | None = None
    """CSV or Parquet file of daily prices; by default the prices that the run was trained on."""
    allow_jumps: tuple[str, ...] | None = None
    """Accept these large daily moves, each TICKER:DAY; without a value, accept all."""


@dataclass(frozen=True)
class PortfolioBacktestOptions(PriceOptions):
    """Results are net and gross of costs, with wealth 1 at the close before --start.

    The first period ends on the first trading day on or after --start; earlier rows are history.
    """

    start: str | None = None
    """First day, such as 2019-01-01; by default the day after the last training day."""
    end: str | None = None
    """Last day; by default the last in the file."""
    cost: float | None = None
    """Commission; by default the one used in training."""
    tickers: tuple[str, ...] | None = None
    """Instruments to test on; by default all in the file."""
    baselines: tuple[str, ...] | None = None
    """Baselines in addition to Equal CRP and lazy rebalancing; by default all."""

    def __post_init__(self):
        if self.cost is not None:
            check_cost(self.cost)


@dataclass(frozen=True)
class PortfolioAllocateOptions(PriceOptions):
    """Allocation for the next period, and the trades from today's holdings to it."""

    holdings: Path | None = None
    """Today's holdings: a CSV file of ticker and quantity with a row for cash, or of ticker and share; by
    default equal shares. With holdings, the result lists trades as shares, and in money for quantities."""


@dataclass(frozen=True)
class PortfolioCertifyOptions:
    """Gains are weekly log growth, net of costs."""

    data: Path | None = None
    """Prices with days after the training days; by default the run's own file."""
    bound: float = 0.01
    """Largest absolute gain of a week, as log growth; gains are clipped to it. A policy with rare, large
    weekly losses needs a larger bound. Choose it before looking at the data."""
    allow_jumps: tuple[str, ...] | None = None
    """Accept these large daily moves, each TICKER:DAY; without a value, accept all."""


class PortfolioDomain(Domain):
    """Wealth allocated to instruments in every period."""

    name = "portfolio"
    settings = PortfolioJob
    backtest_options = PortfolioBacktestOptions
    allocate_options = PortfolioAllocateOptions
    certify_options = PortfolioCertifyOptions
    check_options = PriceOptions
    examples = (
        "train portfolio --prices prices.csv --out runs/first",
        "backtest runs/first --prices prices.csv --start 2019-01-01 --baselines olmar momentum",
        "allocate runs/first --prices prices.csv --json",
        "allocate runs/first --holdings today.csv --out trades.csv",
        "certify runs/first --against lazy-crp --data prices.csv --json",
        "check --prices prices.csv",
    )
    glossary = _GLOSSARY

    def prepare(self, settings: PortfolioJob) -> "PreparedJob":
        """Read and validate the prices, and drop the days that are not for training."""
        from apportion.domains.portfolio.run import prepare_run

        return prepare_run(settings)

    def backtest(
        self, run: "Run", options: PortfolioBacktestOptions, progress: "Progress"
    ) -> "Backtest":
        """Compare a finished run's policy with baselines, by default on all days after training."""
        prices = _own_prices(run, options.prices, options.allow_jumps)
        prices = prices if options.tickers is None else prices.select(options.tickers)
        from apportion.domains.portfolio.backtest import backtest_with_baselines

        return backtest_with_baselines(
            _trained(run),
            prices,
            start=options.start,
            end=options.end,
            cost=options.cost,
            baselines=options.baselines,
            on_strategy=lambda name, done: progress.stage(f"backtest: {name}", done),
        )

    def allocate(self, run: "Run", options: PortfolioAllocateOptions) -> "NextAllocation":
        """Return the shares of the next period, and the trades from today's holdings."""
        prices = _own_prices(run, options.prices, options.allow_jumps)
        from apportion.domains.portfolio.prices import check_last_day

        check_last_day(prices)
        from apportion.domains.portfolio.allocation import allocate_next

        return allocate_next(_trained(run), prices, options.holdings)

    def gains(self, run: "Run", against: str, options: Any) -> "Gains":
        """Return the weekly gains of a finished run's policy over a baseline or another run."""
        prices = _own_prices(run, options.data, options.allow_jumps)
        from apportion.domains.portfolio.backtest import weekly_gains

        return weekly_gains(_trained(run), prices, against, bound=options.bound)

    def check(self, options: PriceOptions) -> "CheckedPrices":
        """Validate and describe a price file."""
        if options.prices is None:
            raise InputError("--allow-jumps needs a price file; give --prices FILE")
        from apportion.domains.portfolio.prices import load_prices
        from apportion.domains.portfolio.run import CheckedPrices

        prices = load_prices(options.prices, allow_jumps=all_or_named(options.allow_jumps))
        return CheckedPrices(options.prices, prices)

    def demonstrate(self, seed: int, progress: "Progress") -> Demonstration:
        from apportion.domains.portfolio.demonstration import demonstrate_portfolio

        return demonstrate_portfolio(seed, progress)

    def sections(self, folder: Path) -> "list[Section]":
        """Return sections with the choice and value against baselines."""
        from apportion.domains.portfolio.sections import portfolio_sections

        return portfolio_sections(folder)


DOMAIN = PortfolioDomain()


def _trained(run: "Run") -> "TrainedPolicy":
    from apportion.domains.portfolio.allocation import TrainedPolicy
    from apportion.runs.policy_file import load_about

    return TrainedPolicy.of(run.policy, load_about(run.folder))


def _own_prices(run: "Run", given: Path | None, allow_jumps: tuple[str, ...] | None) -> "Prices":
    """Return the given prices, or those that the run was trained on.

    Moves that were accepted for training remain accepted for the training prices.
    """
    from apportion.domains.portfolio.prices import load_prices

    allow_jumps = all_or_named(allow_jumps)
    if given is not None:
        return load_prices(given, allow_jumps=allow_jumps)
    own = run.settings.get("prices")
    allowed = (*(allow_jumps or ()), *run.settings.get("allow_jumps", ()))
    return load_prices(Path(own) if own else None, allow_jumps=allowed)
