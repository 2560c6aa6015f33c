"""Portfolios as a domain: what the command line, the page and bridges may ask of them.

Importing this file starts nothing that is slow to start; prices are read and refused before JAX is started.
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
    "lazy-crp": "Equal shares, restored a tenth of the way each day; learns nothing, trades little.",
    "hindsight": "Chosen when all was known, such as the best constant shares; nobody could hold it.",
    "in-sample": "Days that the policy was trained on; they say nothing about days to come.",
    "drawdown": "How far a value lies below its own highest value so far.",
    "turnover": "The sum of all changes of shares in a period; 2 exchanges everything.",
    "Sharpe ratio": "Mean return over its standard deviation, a year.",
    "trust, trade fraction": (
        "How far the learned policy is trusted (0: equal shares), and which part of the way is traded "
        "each day."
    ),
}
"""Words that the page of a portfolio run explains."""


@dataclass(frozen=True)
class PriceOptions:
    """The prices that a command reads."""

    prices: Path | None = None
    """CSV or Parquet file of daily prices; by default a run's own, which it was trained on."""
    allow_jumps: tuple[str, ...] | None = None
    """Take these moves of a day as they are, each TICKER:DAY; without any, every one."""


@dataclass(frozen=True)
class PortfolioBacktestOptions(PriceOptions):
    """Net of costs and gross. Wealth is 1 at the close before --start; the first period ends on the first
    trading day on or after it. Earlier rows of the file serve as history.
    """

    start: str | None = None
    """First day, such as 2019-01-01; by default the day after the last one trained on."""
    end: str | None = None
    """Last day; by default the last in the file."""
    cost: float | None = None
    """Commission; by default what it was trained under."""
    tickers: tuple[str, ...] | None = None
    """Instruments to test on; by default all in the file."""
    baselines: tuple[str, ...] | None = None
    """Baselines beside Equal CRP and lazy rebalancing; by default all."""

    def __post_init__(self):
        if self.cost is not None:
            check_cost(self.cost)


@dataclass(frozen=True)
class PortfolioAllocateOptions(PriceOptions):
    """The next period's allocation, and the trades that lead to it from today's holdings."""

    holdings: Path | None = None
    """Today's holdings: a CSV of ticker and quantity with a row for cash, or of ticker and share. By
    default equal shares. With it the answer lists each trade as a share, and as money for quantities."""


@dataclass(frozen=True)
class PortfolioCertifyOptions:
    """A gain is that of a week: log growth, net of costs."""

    data: Path | None = None
    """Prices with days newer than those it was trained on; without it, the run's own file."""
    bound: float = 0.01
    """What a week's gain counts at most, as log growth: a policy that now and then loses far more in a week
    needs a larger one. Decide on it before you look."""
    allow_jumps: tuple[str, ...] | None = None
    """Take these moves of a day as they are, each TICKER:DAY; without any, every one."""


class PortfolioDomain(Domain):
    """Wealth shared out among instruments, period after period."""

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
        """Read and check the prices, and cut off what is not to be trained on."""
        from apportion.domains.portfolio.run import prepare_run

        return prepare_run(settings)

    def backtest(
        self, run: "Run", options: PortfolioBacktestOptions, progress: "Progress"
    ) -> "Backtest":
        """A finished run's policy beside baselines, by default on all days after those trained on."""
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
        """Return the next period's shares, and the trades from today's holdings."""
        prices = _own_prices(run, options.prices, options.allow_jumps)
        from apportion.domains.portfolio.prices import check_last_day

        check_last_day(prices)
        from apportion.domains.portfolio.allocation import allocate_next

        return allocate_next(_trained(run), prices, options.holdings)

    def gains(self, source: "Run | Path", against: str, options: Any) -> "Gains":
        """What a finished run's policy gained over a baseline or another run, week by week."""
        if isinstance(source, Path):
            raise InputError(f"{source}: give the folder of a portfolio run")
        prices = _own_prices(source, options.data, options.allow_jumps)
        from apportion.domains.portfolio.backtest import weekly_gains

        return weekly_gains(_trained(source), prices, against, bound=options.bound)

    def check(self, options: PriceOptions) -> "CheckedPrices":
        """What a price file holds."""
        if options.prices is None:
            raise InputError("--allow-jumps is for a file of prices; give --prices FILE")
        from apportion.domains.portfolio.prices import read_prices
        from apportion.domains.portfolio.run import CheckedPrices

        prices = read_prices(options.prices, allow_jumps=all_or_named(options.allow_jumps))
        return CheckedPrices(options.prices, prices)

    def demonstrate(self, seed: int, progress: "Progress") -> Demonstration:
        from apportion.domains.portfolio.demonstration import demonstrate_portfolio

        return demonstrate_portfolio(seed, progress)

    def sections(self, folder: Path) -> "list[Section]":
        """The next allocation, the choice, and value against baselines."""
        from apportion.domains.portfolio.sections import portfolio_sections

        return portfolio_sections(folder)


DOMAIN = PortfolioDomain()


def _trained(run: "Run") -> "TrainedPolicy":
    from apportion.domains.portfolio.allocation import TrainedPolicy
    from apportion.runs.policy_file import load_about

    return TrainedPolicy.of(run.policy, load_about(run.folder))


def _own_prices(run: "Run", given: Path | None, allow_jumps: tuple[str, ...] | None) -> "Prices":
    """The prices the user gave, or those the run was trained on.

    They may jump where the user says so now, or said so of these very prices when the run was trained.
    """
    from apportion.domains.portfolio.prices import read_prices

    allow_jumps = all_or_named(allow_jumps)
    if given is not None:
        return read_prices(given, allow_jumps=allow_jumps)
    own = run.settings.get("prices")
    allowed = (*(allow_jumps or ()), *run.settings.get("allow_jumps", ()))
    return read_prices(Path(own) if own else None, allow_jumps=allowed)
