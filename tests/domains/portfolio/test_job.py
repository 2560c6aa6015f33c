"""The portfolio job: what it chooses, that it looks at nothing later, and that it chooses once."""

import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio import SimulatedMarket, domain, validation
from apportion.domains.portfolio.domain import prepare
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.domains.portfolio.validation import (
    ETA_GRID,
    K_GRID,
    Choice,
    select_variant,
    validation_tasks,
    validation_years,
)
from apportion.errors import InputError
from apportion.report.folders import write_report
from apportion.runs.folder import load_run
from apportion.runs.policy_file import load_policy
from apportion.runs.progress import Quiet, TrainingStatus
from apportion.runs.runner import Stopped, resume_run, start_run

PRICES = SimulatedMarket.draw(universe=6, days=1100, seed=3).prices
UNTIL = "2002-12-15"
TINY = PortfolioJob(
    until=UNTIL,
    validation=2,
    validation_instruments=2,
    tasks=3,
    task_size=3,
    steps=6,
    members=2,
    window=6,
    batch=12,
    hidden=4,
    learning_rate=3e-2,
    tracking=0.0,
    chunk=3,
)


class Watched(Quiet):
    """Remembers what was reported to it, and once does something about it."""

    def __init__(self, title: str = "", act=None):
        self.seen: list[tuple[str, int]] = []
        self.title, self.act = title, act

    def training(self, status: TrainingStatus, title: str = "training") -> None:
        self.seen.append((title, status.step))
        if title == self.title and self.act is not None:
            self.act()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def die() -> None:
    raise SystemError("killed")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("portfolio")
    PRICES.to_frame().to_csv(folder / "prices.csv")
    return folder


@pytest.fixture(scope="module")
def whole(place):
    progress = Watched()
    settings = replace(TINY, prices=place / "prices.csv")
    outcome = start_run(place / "whole", "portfolio", settings, progress)
    return outcome, progress.seen


def test_a_run_chooses_and_then_trains_as_chosen(whole, place):
    outcome, seen = whole
    chosen = outcome.results["chosen"]
    assert chosen["k"] in K_GRID
    assert chosen["eta"] in ETA_GRID
    assert chosen["updates"] in (3, 6)
    titles = [title for title, _ in seen]
    assert titles == sorted(titles)  # choosing, then training
    assert max(step for title, step in seen if title == "training") == chosen["updates"]
    policy = load_policy(place / "whole")
    assert float(policy.eta) == pytest.approx(chosen["eta"])  # pyright: ignore[reportAttributeAccessIssue]
    assert float(policy.policy.k) == pytest.approx(chosen["k"])  # pyright: ignore[reportAttributeAccessIssue]


def test_the_choice_is_described_in_words_with_its_table(whole, place):
    outcome, _ = whole
    apart = [PRICES.tickers[i] for i in kept_apart()]
    for text in (
        outcome.summary,
        json.loads((place / "whole/headline.json").read_text())["words"][0],
    ):
        assert "chosen: k = " in text
        assert "2001-2002" in text
        assert f"on {', '.join(apart)}, kept from training" in text
    table = pd.read_csv(place / "whole" / "choice.csv")
    assert list(table) == ["k", "eta", "steps", "2001", "2002", "sharpe_gain"]
    assert len(table) == len(K_GRID) * len(ETA_GRID) * 2
    assert "All 32 variants" in write_report(place / "whole").read_text()


def kept_apart() -> list[int]:
    tasks = validation_tasks(6, TINY, 2)
    return np.unique(np.asarray(tasks.members)).tolist()


def test_validation_instruments_teach_nothing_in_the_choice(monkeypatch):
    taught = []
    monkeypatch.setattr(
        validation, "train_ensembles", lambda _, __, tasks, *___, **____: taught.append(tasks)
    )
    with pytest.raises(ValueError, match="No objects to concatenate"):  # nothing was trained
        select_variant(PRICES, TINY, tasks=validation_tasks(6, TINY, 2))
    assert set(np.unique(taught[0].members)) == set(range(6)) - set(kept_apart())
    with pytest.raises(InputError, match="choose 0, or 2 to 3"):
        validation_tasks(6, TINY, 4)


def test_later_prices_change_neither_the_choice_nor_the_policy(whole, place):
    later = PRICES.close.copy()
    cut = PRICES.row(UNTIL)
    assert 0 < cut < len(later) - 1
    later[cut:] *= np.random.default_rng(0).uniform(0.5, 2, later[cut:].shape)
    replace(PRICES, close=later).to_frame().to_csv(place / "later.csv")
    settings = replace(TINY, prices=place / "later.csv", allow_jumps=True)
    touched = start_run(place / "later", "portfolio", settings, Quiet())
    assert touched.results["net"] != whole[0].results["net"]
    for file in ("choice.csv", "policy.safetensors"):
        assert (place / "later" / file).read_bytes() == (place / "whole" / file).read_bytes()


def test_earlier_prices_change_the_choice(whole, place):
    early = PRICES.close * np.exp(np.random.default_rng(0).normal(0, 0.1, PRICES.close.shape))
    replace(PRICES, close=early).to_frame().to_csv(place / "early.csv")
    work = prepare(replace(TINY, prices=place / "early.csv", allow_jumps=True))
    assert work.choose is not None
    other = Choice.from_dict(work.choose(lambda _: None))
    before = Choice.from_dict(load_run(place / "whole").choice or {})
    assert not np.allclose(other.table.sharpe_gain, before.table.sharpe_gain, atol=1e-3)


def test_a_run_stopped_while_choosing_and_killed_after_ends_the_same(whole, place):
    folder = place / "broken"
    settings = replace(TINY, prices=place / "prices.csv")
    with pytest.raises(Stopped, match="stopped while choosing, after step 3 of 6"):
        start_run(folder, "portfolio", settings, Watched("choosing", interrupt))
    assert load_run(folder).choice is None
    with pytest.raises(SystemError):
        resume_run(folder, Watched("training", die))
    assert load_run(folder).choice == load_run(place / "whole").choice
    last = Watched()
    resume_run(folder, last)
    assert "choosing" not in {title for title, _ in last.seen}
    for file in ("choice.json", "choice.csv", "policy.safetensors", "results.json"):
        assert (folder / file).read_bytes() == (place / "whole" / file).read_bytes(), file


def test_a_choice_belongs_to_the_settings_it_was_made_with(whole, place):
    settings = place / "whole" / "settings.toml"
    text = settings.read_text()
    settings.write_text(text.replace("hidden = 4", "hidden = 5"))
    with pytest.raises(InputError, match=r"was changed since choice\.json was saved"):
        _ = load_run(place / "whole").choice
    settings.write_text(text)


def test_years_are_validated_on_where_they_are_long_enough():
    days = TINY.window + TINY.batch
    assert validation_years(PRICES, TINY, 3) == [2001, 2002]  # 2000 has nothing before it
    assert validation_years(PRICES, TINY, 1) == [2002]
    assert validation_years(PRICES, TINY, 0) == []
    assert validation_years(PRICES.until("2002-03-01"), TINY, 3) == [2001]
    assert validation_years(PRICES.until("2001-03-01"), TINY, 3) == []
    assert PRICES.row("2001-01-01") > days
    with pytest.raises(InputError, match="hold no calendar year of 126 days or more"):
        select_variant(PRICES.until("2001-03-01"), TINY)


def test_without_a_validation_year_settings_are_taken_as_given(place):
    short = replace(TINY, prices=place / "prices.csv", until="2001-03-01")
    assert prepare(short).choose is None
    assert prepare(replace(TINY, prices=place / "prices.csv", validation=0)).choose is None
    known = PRICES.until("2001-03-01")
    assert "k = 0.5, eta = 0.1 and 6 updates as given; the prices, " in domain._describe_choice(
        known, short, None, None
    )


def test_a_choice_fixes_the_updates_of_the_policy():
    """Where steps count updates of each task, chosen updates are still the policy's."""
    settings = replace(TINY, protocol="per-task", method="mtl")
    assert settings.updates == 18
    choice = Choice(0.5, 0.1, 12, pd.DataFrame())
    assert choice.applied(settings).updates == 12


def test_a_signal_in_the_backtest_ends_it_at_once_and_the_run_is_resumed(
    whole, place, monkeypatch, capfd
):
    folder = place / "tested"
    left = threading.Event()

    def endless(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        left.wait()

    class Left(BaseException):
        """In place of the end of the process."""

    def leave(code: int) -> None:
        assert code == 2
        raise Left

    with monkeypatch.context() as patched:
        patched.setattr(domain, "backtest_policy", endless)
        patched.setattr(os, "_exit", leave)
        with pytest.raises(Left):
            start_run(folder, "portfolio", replace(TINY, prices=place / "prices.csv"), Quiet())
    left.set()
    assert "stopped at once; the training is saved" in capfd.readouterr().err
    assert not load_run(folder).finished
    resume_run(folder, Quiet())
    for file in ("results.json", "policy.safetensors", "values.csv"):
        assert (folder / file).read_bytes() == (place / "whole" / file).read_bytes()


def test_a_stop_that_is_asked_for_in_the_last_chunk_comes_before_the_backtest(place, whole):
    folder = place / "last"
    last = whole[0].results["chosen"]["updates"]
    seen = Watched("training")
    seen.act = lambda: seen.seen[-1][1] == last and interrupt()
    settings = replace(TINY, prices=place / "prices.csv")
    with pytest.raises(Stopped, match=f"after step {last} of {last}, all saved"):
        start_run(folder, "portfolio", settings, seen)
    resume_run(folder, Quiet())
    assert (folder / "results.json").read_bytes() == (place / "whole/results.json").read_bytes()
