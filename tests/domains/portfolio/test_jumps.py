"""Splits that were not adjusted for are found, crashes are not."""

import numpy as np
import pytest

from apportion.domains.portfolio import Prices, SimulatedMarket
from apportion.domains.portfolio.domain import prepare, read_prices
from apportion.domains.portfolio.prices import find_jumps, refuse_jumps
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.errors import InputError
from apportion.studies.registry import Request, command_of, read_data

STEADY = SimulatedMarket.draw(universe=4, days=60).prices


def moved(relative: float, row: int = 30, column: int = 1) -> Prices:
    """Steady prices, one of which is multiplied by `relative` from one day on."""
    close = STEADY.close.copy()
    close[row:, column] *= relative * close[row - 1, column] / close[row, column]
    return Prices(STEADY.dates, STEADY.tickers, close)


@pytest.mark.parametrize("split", [(2, 1), (3, 1), (3, 2), (4, 1), (5, 1), (10, 1), (20, 1)])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("beside", [0.992, 1.0, 1.008])
def test_a_split_is_named_with_the_market_moving_beside_it(split, reverse, beside):
    one, other = split[::-1] if reverse else split
    (jump,) = find_jumps(moved(other / one * beside))
    assert (jump.day, jump.ticker) == (str(STEADY.dates[30]), STEADY.tickers[1])
    assert jump.split == f"{one}:{other}"


@pytest.mark.parametrize("crash", [0.8, 0.75, 0.7, 0.68, 0.65, 0.62, 0.6, 0.52, 1.25, 1.4, 1.45])
def test_a_crash_or_a_leap_of_a_real_stock_passes(crash):
    assert find_jumps(moved(crash)) == []


def test_simulated_markets_and_listings_do_not_jump():
    assert find_jumps(SimulatedMarket.draw(universe=20, days=2000).prices) == []
    close = STEADY.close.copy()
    close[:20, 0] = close[40:, 2] = np.nan
    assert find_jumps(Prices(STEADY.dates, STEADY.tickers, close)) == []


def test_a_spike_is_refused_both_ways_and_many_days_are_counted():
    close = STEADY.close.copy()
    close[10, 0] *= 100
    with pytest.raises(InputError, match=r"prices.csv: .* on 2\d.*, .* -99.*--allow-jumps") as one:
        refuse_jumps(Prices(STEADY.dates, STEADY.tickers, close), "prices.csv")
    assert "\n" not in str(one.value)
    close[::2] *= 3
    with pytest.raises(InputError, match=r"and \d+ more;"):
        refuse_jumps(Prices(STEADY.dates, STEADY.tickers, close), "prices.csv")


def test_a_file_with_a_split_is_trained_on_only_where_that_is_allowed(tmp_path):
    file = tmp_path / "split.csv"
    moved(0.5).to_frame().to_csv(file)
    small = {"tasks": 2, "task_size": 3, "window": 8, "batch": 16, "validation": 0}
    with pytest.raises(InputError, match=r"split.csv: .*looks like a split of 2:1"):
        prepare(PortfolioJob(prices=file, **small))
    assert prepare(PortfolioJob(prices=file, allow_jumps=True, **small)).data["tickers"] == 4
    assert len(read_prices(file, allow_jumps=True).dates) == 60


def test_a_study_reads_a_file_with_a_split_only_where_that_is_allowed(tmp_path):
    file = tmp_path / "split.csv"
    moved(0.5).to_frame().to_csv(file)
    with pytest.raises(InputError, match=r"split.csv: .*looks like a split of 2:1.*--allow-jumps"):
        read_data(Request(prices=file))
    allowed = Request(prices=file, allow_jumps=True)
    assert len(read_data(allowed)["prices"].dates) == 60
    assert "--allow-jumps" in command_of("fig3", tmp_path, allowed)
    assert "--allow-jumps" not in command_of("fig1", tmp_path, allowed)


def test_a_file_that_was_changed_is_read_again(tmp_path):
    file = tmp_path / "prices.csv"
    moved(1.0).to_frame().to_csv(file)
    before = read_prices(file)
    assert read_prices(file) is before
    moved(1.01).to_frame().to_csv(file)
    assert read_prices(file).fingerprint != before.fingerprint


def test_the_embedded_stocks_are_not_asked_about():
    assert len(read_prices(None).tickers) == 20
