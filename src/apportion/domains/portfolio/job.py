"""Training a portfolio policy from a price file, and backtesting it beside every baseline.

k, eta and the number of updates are chosen on validation years inside the training period. A policy is
equivariant, so it may be tested on instruments it never saw; days it was trained on say nothing about
days to come, and whoever asks for them is warned.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from apportion.domains.calendar import as_day
from apportion.domains.portfolio.backtest import backtest, lazy_rebalancing
from apportion.domains.portfolio.baselines.simple import BASELINES, WITHOUT_HISTORY
from apportion.domains.portfolio.commissions import Commissions, settled
from apportion.domains.portfolio.jumps import read_prices
from apportion.domains.portfolio.listings import tradable
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.record import EQUAL, LAZY, Backtest
from apportion.domains.portfolio.rules import CASH, Rules
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.domains.portfolio.training import (
    choose_tasks,
    next_allocation,
    train_portfolio,
    training_market,
)
from apportion.domains.portfolio.validation import (
    Choice,
    no_validation_year,
    select_variant,
    validation_tasks,
    validation_years,
)
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.runs.runner import Outcome, PreparedJob
from apportion.runs.settings import suggest
from apportion.runs.signals import tested_after_training
from apportion.tasks import Tasks
from apportion.training import Chunks, OnChunk, Resume

FITTED = {"minimum-variance", "risk-parity"}
"""Baselines that are fitted to a covariance."""
MOST_FOR_NEWTON = 100
"""Instruments above which the online Newton step, a programme a day, is left out unless asked for."""


def prepare(settings: PortfolioJob) -> PreparedJob:
    """Read and check the prices, and cut off what is not to be trained on."""
    prices = read_prices(settings.prices, allow_jumps=settings.allow_jumps)
    known = prices if settings.until is None else prices.until(settings.until)
    if not len(known.dates):
        raise InputError(
            f"until {settings.until}: the prices begin on {prices.dates[0]}; choose a later day"
        )
    rules = Rules.of(settings)
    # Told now, before a folder is made, if the settings do not fit the data.
    choose_tasks(len(known.tickers), settings)
    training_market(known, settings)
    held_apart = None
    if settings.validation_instruments:
        held_apart = validation_tasks(len(known.tickers), settings, settings.validation_instruments)

    def choose(on_chunk: OnChunk) -> dict[str, Any]:
        few = replace(settings, members=settings.validation_members)
        return select_variant(
            known,
            few,
            years=settings.validation,
            tasks=held_apart,
            every=settings.chunk,
            on_chunk=on_chunk,
        ).to_dict()

    def train(on_chunk: OnChunk, resume: Resume, made: dict[str, Any] | None = None) -> Outcome:
        choice = None if made is None else Choice.from_dict(made)
        applied = settings if choice is None else choice.applied(settings)
        done = train_portfolio(
            known, applied, chunks=Chunks(settings.chunk, on_chunk=on_chunk), state=resume
        )
        about = {
            "job": "portfolio",
            "window": settings.window,
            "channels": known.channels,
            "cost": settled(settings.cost),
            "last": str(known.dates[-1]),
            "trained_on": [known.tickers[i] for i in done.seen],
            "chosen": _describe_choice(known, settings, choice, held_apart),
            "rules": rules.to_dict(),
        }
        if len(prices.dates) == len(known.dates):
            outcome = _untested(done.policy, about, settings)
        else:
            test = partial(backtest_policy, done.policy, about, prices, start=settings.until)
            outcome = _tested(tested_after_training(test), done.policy, about)
        following = {"next": next_table(done.policy, prices, settings.window, rules)}
        outcome = replace(outcome, tables=outcome.tables | following)
        return outcome if choice is None else _with_choice(outcome, choice)

    some = validation_years(known, settings, settings.validation)
    source = "embedded" if settings.prices is None else str(settings.prices)
    return PreparedJob(data_of(known, source), train, choose if some else None)


def data_of(known: Prices, source: str) -> dict[str, Any]:
    """What a run's environment says of its data: the days are those trained on."""
    return {
        "source": source,
        "tickers": len(known.tickers),
        "first": str(known.dates[0]),
        "last": str(known.dates[-1]),
        "fingerprint": known.fingerprint,
    }


def _describe_choice(
    prices: Prices, settings: PortfolioJob, choice: Choice | None, held_apart: Tasks | None
) -> str:
    """How k, eta and the number of updates came about, in a sentence."""
    if choice is None:
        given = (
            f"k = {settings.k:g}, eta = {settings.eta:g} and {settings.updates:,} updates as given"
        )
        return f"{given}; {no_validation_year(prices, settings)}" if settings.validation else given
    described = f"chosen: {choice.summary()}"
    if not Rules.of(settings).none:
        described += ", all of them within the rules"
    if held_apart is None:
        return described
    apart = np.unique(np.asarray(held_apart.members))
    names = [prices.tickers[i] for i in apart if i < len(prices.tickers)]
    return f"{described}, on {', '.join(names)}, kept from training for it"


def _with_choice(outcome: Outcome, choice: Choice) -> Outcome:
    made = {"k": choice.k, "eta": choice.eta, "updates": choice.steps}
    return replace(
        outcome,
        results=outcome.results | {"chosen": made},
        tables=outcome.tables | {"choice": choice.to_frame()},
    )


def _untested(policy: Policy, about: dict[str, Any], settings: PortfolioJob) -> Outcome:
    words = (
        f"trained on every day up to {about['last']}; test it with apportion backtest on later days"
    )
    notes = [words, about["chosen"]]
    headline = {"title": "A portfolio", "subtitle": settings.method, "words": notes}
    return Outcome(policy, {"trained_until": about["last"]}, "\n".join(notes), about, headline)


def _tested(result: Backtest, policy: Policy, about: dict[str, Any]) -> Outcome:
    # Trading little is worth something by itself: what was learned shows against those who do the same.
    ahead = result.against("policy", LAZY)
    card = {
        "label": "Log growth a year over lazy rebalancing, net",
        "value": f"{ahead.value:+.4f}",
        "interval": f"[{ahead.low:+.4f}, {ahead.high:+.4f}]",
        "note": f"{result.dates[0]} to {result.dates[-1]}, by blocks of days",
        "outcome": ahead.outcome,
    }
    headline = {"title": "A portfolio", "cards": [card], "words": [about["chosen"]]}
    summary = f"{result.summary()}\n{about['chosen']}"
    return Outcome(policy, result.to_json(), summary, about, headline, tables(result))


def tables(result: Backtest) -> dict[str, pd.DataFrame]:
    """A backtest as the tables of a report: values, allocations and strategies side by side."""
    dates = [str(day) for day in result.dates]
    wealth = {name: np.cumprod(1 + returns) for name, returns in result.net.items()}
    shares = dict(zip(result.tickers, result.allocations["policy"].T, strict=True))
    return {
        "values": pd.DataFrame({"date": dates} | wealth),
        "allocations": pd.DataFrame({"date": dates} | shares),
        "strategies": result.to_frame(),
    }


def next_table(policy: Policy, prices: Prices, window: int, rules: Rules) -> pd.DataFrame:
    """The allocation after the last day of the prices, from equal holdings, as a table of a report."""
    shares = np.asarray(next_allocation(policy, prices, window=window, rules=rules), float)
    names = (CASH, *prices.tickers) if rules.cash else prices.tickers
    day = str(prices.dates[-1])
    return pd.DataFrame({"after": day, "entity": names, "share": shares / shares.sum()})


def backtest_policy(
    policy: Policy,
    about: dict[str, Any],
    prices: Prices,
    *,
    start: str | None = None,
    end: str | None = None,
    cost: Commissions | None = None,
    baselines: Sequence[str] | None = None,
    on_strategy: Callable[[str, float], None] = lambda name, done: None,
) -> Backtest:
    """Backtest a trained policy beside baselines.

    Parameters
    ----------
    about
        What was saved with the policy.
    start, end
        First and last day; by default all days after those it was trained on.
    cost
        Commissions; by default those it was trained under.
    baselines
        Their names; by default all that suit the prices.
    on_strategy
        Told the name of each strategy as its turn comes, and what part is done.
    """
    prices = accepted_data(prices, about)
    chosen, note = _chosen_baselines(baselines, prices)
    after = str(np.datetime64(about["last"]) + 1)
    if start is None and prices.row(after) < len(prices.dates):
        start = after
    if start is None or as_day(start) < as_day(after):
        warnings.warn(
            f"the policy was trained on days up to {about['last']}; what it earns on them says "
            "nothing about days to come",
            stacklevel=2,
        )
    result = backtest(
        prices,
        {"policy": policy, LAZY: lazy_rebalancing()},
        baselines={name: BASELINES[name] for name in chosen if name not in WITHOUT_HISTORY},
        hindsight={name: BASELINES[name] for name in chosen if name in WITHOUT_HISTORY},
        start=start,
        end=end,
        window=about["window"],
        cost=about["cost"] if cost is None else cost,
        rules={"policy": Rules.from_dict(about.get("rules"))},
        on_strategy=on_strategy,
    )
    notes = "; ".join(each for each in (result.note, note) if each)
    return replace(result, note=notes, trained_until=about["last"])


def _chosen_baselines(names: Sequence[str] | None, prices: Prices) -> tuple[list[str], str]:
    """The baselines to run, and a sentence on those that were left out."""
    if names is not None:
        unknown = [name for name in names if name not in (*BASELINES, LAZY)]
        if unknown:
            known = (*BASELINES, LAZY)
            raise InputError(
                f"baselines: {unknown[0]!r} is none of {', '.join(known)}{suggest(unknown[0], known)}"
            )
        # These two stand beside every policy.
        return [name for name in dict.fromkeys(names) if name not in (EQUAL, LAZY)], ""
    absent: dict[str, str] = {}
    if tradable(prices.close) is not None:
        # A price that stands still before its listing has no variance to fit.
        absent |= dict.fromkeys(sorted(FITTED), "needs all instruments listed on all days")
    if len(prices.tickers) > MOST_FOR_NEWTON:
        absent["ons"] = f"is slow above {MOST_FOR_NEWTON} instruments"
    note = "; ".join(f"{name} was left out: it {why}" for name, why in absent.items())
    return [name for name in BASELINES if name not in {EQUAL, *absent}], note


def accepted_data(prices: Prices, about: dict[str, Any]) -> Prices:
    """The prices with the series the policy was trained to read."""
    if about.get("job") != "portfolio":
        raise InputError(
            f"the policy was trained for {about.get('job', 'something else')!r}, not for prices; "
            "give the folder of a portfolio run"
        )
    _check_facts(about)
    if prices.channels < about["channels"]:
        raise InputError(
            "the policy reads close, high and low, but the prices have closes only; "
            "give a long file with columns high and low"
        )
    return replace(prices, high=None, low=None) if about["channels"] == 1 else prices


def _check_facts(about: dict[str, Any]) -> None:
    """Refuse facts kept with a policy that no settings could have had."""
    window, channels, cost = (about.get(name) for name in ("window", "channels", "cost"))
    try:
        as_day(str(about.get("last")))
        rates = np.array(list(cost.values()) if isinstance(cost, dict) else [cost], float)
        sound = bool(np.all((rates >= 0) & (rates < 0.5)))
        sound = sound and type(window) is int and window >= 1 and channels in (1, 3)
        Rules.from_dict(about.get("rules")).check_ranges()
    except (InputError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"the policy's own facts are wrong ({error}); train it again") from None
    if not sound:
        raise InputError(
            f"the policy's own facts are wrong (window {window!r}, channels {channels!r}, cost "
            f"{cost!r}); train it again"
        )
