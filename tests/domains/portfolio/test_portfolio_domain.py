"""Portfolios as a domain: a run chooses once and looks at nothing later, and answers what it is asked."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio import SimulatedMarket, backtest
from apportion.domains.portfolio.baselines import BASELINES
from apportion.domains.portfolio.domain import (
    DOMAIN,
    PortfolioAllocateOptions,
    PortfolioBacktestOptions,
    PortfolioCertifyOptions,
    PriceOptions,
)
from apportion.domains.portfolio.run import _describe_choice
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.domains.portfolio.validation import (
    ETA_GRID,
    K_GRID,
    select_variant,
    validation_years,
)
from apportion.errors import InputError
from apportion.report.page import page
from apportion.runs.folder import load_run
from apportion.runs.policy_file import load_policy
from apportion.runs.progress import Quiet, TrainingStatus
from apportion.runs.runner import Stopped, resume_run, start_run

DRAWN = SimulatedMarket.draw(universe=6, days=1100, seed=3).prices
# Two come late, so that the training's first days have few to hold.
LISTED = np.arange(1100)[:, None] >= np.array([0, 60, 0, 0, 90, 0])
PRICES = replace(DRAWN, close=np.where(LISTED, DRAWN.close, np.nan))
UNTIL = "2002-12-15"
TINY = PortfolioJob(
    until=UNTIL, validation=2, tasks=3, task_size=4, steps=6, members=2, window=6, batch=12, hidden=4,
    learning_rate=3e-2, tracking_error_weight=0.0, chunk=3, max_weight=0.4, min_weight=0.02,
    max_turnover=0.3,
)  # fmt: skip


class Watched(Quiet):
    """Remembers what was reported to it, and once does something about it."""

    def __init__(self, title: str = "", act=None):
        self.seen: list[tuple[str, int]] = []
        self.stages: list[str] = []
        self.title, self.act = title, act

    def training(self, status: TrainingStatus, title: str = "training") -> None:
        self.seen.append((title, status.step))
        if title == self.title and self.act is not None:
            self.act()

    def stage(self, name: str, done: float = 0.0) -> None:
        self.stages.append(name)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def die() -> None:
    raise SystemError("killed")


@pytest.fixture(scope="module", autouse=True)
def few_baselines():
    """Each is a program of its own, compiled for every length of the backtest."""
    few = {name: BASELINES[name] for name in ("buy-and-hold", "best-crp", "olmar")}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backtest, "BASELINES", few)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("portfolio")
    PRICES.to_frame().to_csv(folder / "prices.csv")
    return folder


@pytest.fixture(scope="module")
def settings(place) -> PortfolioJob:
    return replace(TINY, prices=place / "prices.csv")


@pytest.fixture(scope="module")
def whole(place, settings):
    progress = Watched()
    outcome = start_run(place / "whole", "portfolio", settings, DOMAIN.prepare(settings), progress)
    return outcome, progress.seen


def test_a_run_chooses_and_then_trains_as_chosen(whole, place):
    outcome, seen = whole
    chosen = outcome.results["chosen"]
    assert chosen["trust"] in K_GRID
    assert chosen["trade_fraction"] in ETA_GRID
    assert chosen["updates"] in (3, 6)
    titles = [title for title, _ in seen]
    assert titles == sorted(titles)  # choosing, then training
    assert max(step for title, step in seen if title == "training") == chosen["updates"]
    policy = load_policy(place / "whole").policy  # pyright: ignore[reportAttributeAccessIssue]
    assert float(policy.trade_fraction) == pytest.approx(chosen["trade_fraction"])
    assert float(policy.policy.trust) == pytest.approx(chosen["trust"])
    headline = json.loads((place / "whole/headline.json").read_text())
    for text in (outcome.summary, headline["words"][0]):
        assert "chosen: trust " in text
        assert "2001-2002" in text
    table = pd.read_csv(place / "whole" / "choice.csv")
    assert list(table) == ["trust", "trade_fraction", "steps", "2001", "2002", "sharpe_gain"]
    assert len(table) == len(K_GRID) * len(ETA_GRID) * 2
    # Its limits bound every day of the backtest.
    shares = pd.read_csv(place / "whole" / "allocations.csv", index_col=0)
    assert list(shares) == list(PRICES.tickers)
    assert shares.max().max() <= 0.4 + 1e-6
    assert shares.min().min() >= 0.02 - 1e-6


def test_a_run_is_backtested_beside_baselines(whole, place):
    run, watched = load_run(place / "whole"), Watched()
    told = DOMAIN.backtest(run, PortfolioBacktestOptions(baselines=("olmar",)), watched)
    assert told.to_json()["net"]["policy"] == whole[0].results["net"]["policy"]
    assert watched.stages == [f"backtest: {name}" for name in told.net]
    assert told.trained_until == "2002-12-14"
    some = PRICES.tickers[1:]
    asked = PortfolioBacktestOptions(
        start="2002-12-01", end="2002-12-20", cost=0.0, tickers=some, baselines=()
    )
    with pytest.warns(UserWarning, match="do not predict later ones"):
        few = DOMAIN.backtest(run, asked, Quiet())
    assert few.tickers == some
    assert 0 < few.in_sample < len(few.dates)
    assert list(few.net) == ["policy", "lazy-crp", "equal-crp"]
    np.testing.assert_allclose(few.net["policy"], few.gross["policy"], atol=1e-12)
    with pytest.raises(InputError, match="'olmr' is not one of equal-crp.*olmar"):
        DOMAIN.backtest(run, PortfolioBacktestOptions(baselines=("olmr",)), Quiet())
    gains = DOMAIN.gains(run, "lazy-crp", PortfolioCertifyOptions())
    assert len(gains.values) == 4
    assert gains.baseline == "lazy-crp"


def test_a_run_shows_its_choice_and_keeps_it_to_its_settings(whole, place):
    sections = DOMAIN.sections(place / "whole")
    assert [section.title for section in sections] == ["Choice", "Value against baselines"]
    text = page("A run", sections)
    for words in ("All 32 variants", "best-crp (hindsight)", "test period"):
        assert words in text
    assert DOMAIN.sections(place) == []
    # A choice belongs to the settings it was made with.
    settings = place / "whole" / "settings.toml"
    before = settings.read_text()
    settings.write_text(before.replace("hidden = 4", "hidden = 5"))
    with pytest.raises(InputError, match=r"was changed since choice\.json was saved"):
        _ = load_run(place / "whole").choice
    settings.write_text(before)


def test_a_valid_file_is_described(place):
    checked = DOMAIN.check(PriceOptions(place / "prices.csv"))
    facts = checked.to_json()["prices"]
    assert (facts["tickers"], facts["days"], facts["jumps"]) == (6, 1100, [])
    assert facts["fingerprint"] in checked.summary()
    assert checked.to_frame().shape == (1100, 6)
    with pytest.raises(InputError, match="give --prices FILE"):
        DOMAIN.check(PriceOptions(allow_jumps=("all",)))


def test_later_prices_change_neither_the_choice_nor_the_policy(whole, place, settings):
    later = PRICES.close.copy()
    cut = PRICES.row(UNTIL)
    assert 0 < cut < len(later) - 1
    later[cut:] *= np.random.default_rng(0).uniform(0.5, 2, later[cut:].shape)
    replace(PRICES, close=later).to_frame().to_csv(place / "later.csv")
    settings = replace(settings, prices=place / "later.csv", allow_jumps=("all",))
    # A stop that is asked for in the last chunk comes before the backtest.
    last = whole[0].results["chosen"]["updates"]
    seen = Watched("training")
    seen.act = lambda: seen.seen[-1][1] == last and interrupt()
    with pytest.raises(Stopped, match=f"after step {last} of {last}; all is saved"):
        start_run(place / "later", "portfolio", settings, DOMAIN.prepare(settings), seen)
    touched = resume_run(place / "later", DOMAIN.prepare(settings), Quiet())
    assert touched.results["net"] != whole[0].results["net"]
    for file in ("choice.csv", "policy.safetensors"):
        assert (place / "later" / file).read_bytes() == (place / "whole" / file).read_bytes()


def test_a_run_that_is_stopped_and_killed_wherever_it_is_ends_the_same(
    whole, place, settings, monkeypatch, capfd
):
    folder = place / "broken"

    def resume(progress) -> None:
        resume_run(folder, DOMAIN.prepare(settings), progress)

    with pytest.raises(Stopped, match="stopped while choosing, after step 3 of 6"):
        start_run(
            folder, "portfolio", settings, DOMAIN.prepare(settings), Watched("choosing", interrupt)
        )
    assert load_run(folder).choice is None
    with pytest.raises(SystemError):
        resume(Watched("training", die))
    assert load_run(folder).choice == load_run(place / "whole").choice
    # A signal in the backtest ends it at once.
    left = threading.Event()

    def endless(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        left.wait()

    class Left(BaseException):
        """In place of the end of the process."""

    def leave(code: int) -> None:
        assert code == 2
        raise Left

    seen = Watched()
    with monkeypatch.context() as patched:
        patched.setattr(backtest, "backtest_with_baselines", endless)
        patched.setattr(os, "_exit", leave)
        with pytest.raises(Left):
            resume(seen)
    assert "choosing" not in {title for title, _ in seen.seen}
    left.set()
    assert "stopped at once; the training is saved" in capfd.readouterr().err
    assert not load_run(folder).finished
    resume(Quiet())
    for file in ("choice.json", "choice.csv", "policy.safetensors", "results.json", "values.csv"):
        assert (folder / file).read_bytes() == (place / "whole" / file).read_bytes(), file


def test_years_are_validated_on_where_they_are_long_enough(settings):
    days = TINY.window + TINY.batch
    assert validation_years(PRICES, TINY, 3) == [2001, 2002]  # 2000 has nothing before it
    assert validation_years(PRICES, TINY, 1) == [2002]
    assert validation_years(PRICES, TINY, 0) == []
    assert validation_years(PRICES.until("2002-03-01"), TINY, 3) == [2001]
    assert validation_years(PRICES.until("2001-03-01"), TINY, 3) == []
    assert PRICES.row("2001-01-01") > days
    with pytest.raises(InputError, match="have no calendar year of 126 days or more"):
        select_variant(PRICES.until("2001-03-01"), TINY)
    # Without such a year settings are taken as given.
    short = replace(settings, until="2001-03-01")
    assert DOMAIN.prepare(short).choose is None
    assert DOMAIN.prepare(replace(settings, validation=0)).choose is None
    given = _describe_choice(PRICES.until("2001-03-01"), short, None)
    assert "trust 0.5, trade fraction 0.1 and 6 updates as given; the prices, " in given


@pytest.mark.slow
def test_a_run_with_cash_is_tested_and_asked(place, tmp_path):
    settings = replace(TINY, prices=place / "prices.csv", cash=True, validation=0, steps=2)
    folder = tmp_path / "run"
    trained = start_run(folder, "portfolio", settings, DOMAIN.prepare(settings), Quiet())
    assert trained.results["net"]["policy"]["wealth"] < trained.results["gross"]["policy"]["wealth"]
    held = pd.read_csv(folder / "allocations.csv", index_col=0)
    assert list(held) == ["cash", *PRICES.tickers]
    assert held[list(PRICES.tickers)].max().max() <= 0.4 + 1e-6
    told = DOMAIN.allocate(load_run(folder), PortfolioAllocateOptions())
    assert list(told.shares) == list(held)
    (tmp_path / "today.csv").write_text("ticker,share\ncash,1\n")
    held = PortfolioAllocateOptions(holdings=tmp_path / "today.csv")
    told = DOMAIN.allocate(load_run(folder), held)
    assert told.shares["cash"] == pytest.approx(0.9, abs=0.1)
