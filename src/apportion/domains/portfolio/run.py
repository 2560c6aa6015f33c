"""Training job of a portfolio run on a file of prices, and the results of the run.

Trust, trade fraction and the number of updates are selected on validation years in the training period.
Prices are read and validated before JAX starts.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from apportion.domains.portfolio.prices import Prices, load_prices
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.errors import InputError

if TYPE_CHECKING:
    from apportion.domains.portfolio.record import Backtest
    from apportion.domains.portfolio.validation import Choice
    from apportion.policy import Policy
    from apportion.runs.runner import JobResult, PreparedJob
    from apportion.training import OnChunk, Resume


def prepare_run(settings: PortfolioJob) -> "PreparedJob":
    """Read and validate the prices, and drop the days from `until` on."""
    prices = load_prices(settings.prices, allow_jumps=settings.allow_jumps)
    known = prices if settings.until is None else prices.until(settings.until)
    if not len(known.dates):
        raise InputError(
            f"until {settings.until}: the prices begin on {prices.dates[0]}; choose a later day"
        )
    from apportion.domains.portfolio import allocation, backtest, training, validation
    from apportion.runs.runner import PreparedJob
    from apportion.runs.signals import tested_after_training
    from apportion.training import Chunks

    # Raise for settings that do not fit the data, before the folder is created.
    training.draw_portfolio_tasks(len(known.tickers), settings)
    training.training_market(known, settings)

    def choose(on_chunk: "OnChunk") -> dict[str, Any]:
        alone, years = replace(settings, members=1), settings.validation
        return validation.select_variant(
            known, alone, years=years, every=settings.chunk, on_chunk=on_chunk
        ).to_dict()

    def train(
        on_chunk: "OnChunk", resume: "Resume", made: dict[str, Any] | None = None
    ) -> "JobResult":
        choice = None if made is None else validation.Choice.from_dict(made)
        applied = settings if choice is None else choice.applied(settings)
        chunks = Chunks(settings.chunk, on_chunk=on_chunk)
        done = training.train_portfolio(known, applied, chunks=chunks, state=resume)
        about = {
            "job": "portfolio",
            "window": settings.window,
            "channels": known.channels,
            "cost": settings.cost,
            "last": str(known.dates[-1]),
            "trained_on": [known.tickers[i] for i in done.seen],
            "chosen": _describe_choice(known, settings, choice),
            "rules": {
                "min_weight": settings.min_weight,
                "max_weight": settings.max_weight,
                "cash": settings.cash,
            },
        }
        trained, result = allocation.TrainedPolicy.of(done.policy, about), None
        if len(known.dates) < len(prices.dates):
            result = tested_after_training(
                lambda: backtest.backtest_with_baselines(trained, prices, start=settings.until)
            )
        shares = trained.shares(prices)
        day, names = str(prices.dates[-1]), list(shares)
        following = {"after": day, "entity": names, "share": list(shares.values())}
        return _outcome(done.policy, about, settings, result, choice, pd.DataFrame(following))

    data = {
        "source": "embedded" if settings.prices is None else str(settings.prices),
        "tickers": len(known.tickers),
        "first": str(known.dates[0]),
        "last": str(known.dates[-1]),
        "fingerprint": known.fingerprint,
    }
    some = validation.validation_years(known, settings, settings.validation)
    return PreparedJob(data, train, choose if some else None)


@dataclass(frozen=True, eq=False)
class CheckedPrices:
    """A valid price file."""

    path: Path
    prices: Prices

    def to_json(self) -> dict[str, Any]:
        """Return the facts that `apportion check --json` prints."""
        prices = self.prices
        facts = {
            "file": str(self.path),
            "tickers": len(prices.tickers),
            "days": len(prices.dates),
            "first": str(prices.dates[0]),
            "last": str(prices.dates[-1]),
            "series": ["close"] if prices.high is None else ["close", "high", "low"],
            "jumps": list(map(str, prices.jumps)),
            "fingerprint": prices.fingerprint,
        }
        return {"prices": facts}

    def to_frame(self) -> pd.DataFrame:
        """Return the closes."""
        return self.prices.to_frame()

    def summary(self) -> str:
        """Describe the file in one line, followed by one line per accepted move."""
        moves = [f"moves far: {jump}" for jump in self.prices.jumps]
        return "\n".join([f"{self.path}: valid; {self.prices.summary()}", *moves])


def _describe_choice(prices: Prices, settings: PortfolioJob, choice: "Choice | None") -> str:
    """Describe how trust, trade fraction and the number of updates were set."""
    if choice is not None:
        return f"chosen: {choice.summary()}"
    from apportion.domains.portfolio.validation import no_validation_year

    given = (
        f"trust {settings.trust:g}, trade fraction {settings.trade_fraction:g} and "
        f"{settings.steps:,} updates as given"
    )
    return f"{given}; {no_validation_year(prices, settings)}" if settings.validation else given


def _outcome(
    policy: "Policy",
    about: dict[str, Any],
    settings: PortfolioJob,
    result: "Backtest | None",
    choice: "Choice | None",
    following: pd.DataFrame,
) -> "JobResult":
    """Return the results of a run, with a backtest if there are days after training."""
    from apportion.runs.runner import JobResult

    notes, tables = [about["chosen"]], {"next": following}
    headline: dict[str, Any] = {"title": "A portfolio", "words": notes}
    if result is None:
        results: dict[str, Any] = {"trained_until": about["last"]}
        notes.insert(
            0,
            f"trained on every day up to {about['last']}; test it with apportion backtest on later "
            "days",
        )
        headline["subtitle"] = settings.method
        summary = "\n".join(notes)
    else:
        from apportion.domains.portfolio.record import LAZY

        # Low turnover alone is a gain, so the baseline has low turnover too.
        ahead = result.against("policy", LAZY)
        card = {
            "label": "Annual log growth over lazy rebalancing, net",
            "value": f"{ahead.value:+.4f}",
            "interval": f"[{ahead.low:+.4f}, {ahead.high:+.4f}]",
            "note": f"{result.dates[0]} to {result.dates[-1]}, by blocks of days",
            "outcome": ahead.outcome,
        }
        headline["cards"] = [card]
        results, summary = result.to_json(), f"{result.summary()}\n{about['chosen']}"
        dates = [str(day) for day in result.dates]
        wealth = {name: np.cumprod(1 + returns) for name, returns in result.net.items()}
        shares = dict(zip(result.tickers, result.allocations["policy"].T, strict=True))
        tables |= {
            "values": pd.DataFrame({"date": dates} | wealth),
            "allocations": pd.DataFrame({"date": dates} | shares),
            "strategies": result.to_frame(),
        }
    if choice is not None:
        made = {"trust": choice.k, "trade_fraction": choice.eta, "updates": choice.steps}
        results, tables = results | {"chosen": made}, tables | {"choice": choice.to_frame()}
    return JobResult(policy, results, summary, about, headline, tables)
