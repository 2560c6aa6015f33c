"""Price files: the three layouts are read, and wrong files are refused in one sentence."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio import Prices, SimulatedMarket, embedded_prices, load_prices
from apportion.domains.portfolio.prices import check_last_day
from apportion.errors import InputError

DAYS = pd.bdate_range("2019-01-01", periods=40)
CLOSES = pd.DataFrame(
    10 + np.random.default_rng(0).random((40, 3)), DAYS, ["AMD", "IBM", "KO"]
).rename_axis("date")
LONG = CLOSES.reset_index().melt("date", var_name="ticker", value_name="close")
LONG = LONG.assign(high=LONG.close * 1.1, low=LONG.close * 0.9, volume=7)
STEADY = SimulatedMarket.draw(universe=4, days=60).prices


def test_long_and_wide_csv_and_parquet_give_the_same_closes_in_any_order(tmp_path):
    mixed = {"frac": 1, "random_state": 1}
    LONG.to_csv(tmp_path / "long.csv", index=False)
    LONG.rename(columns=str.title)[["Low", "Close", "Ticker", "High", "Date"]].to_csv(
        tmp_path / "title.csv", index=False
    )
    LONG.sample(**mixed).to_parquet(tmp_path / "long.parquet")
    LONG.set_index(["date", "ticker"]).to_parquet(tmp_path / "levels.parquet")
    CLOSES.to_csv(tmp_path / "wide.csv")
    CLOSES.sample(**mixed).to_csv(tmp_path / "mixed.csv")
    CLOSES.sample(**mixed).to_parquet(tmp_path / "wide.parquet")
    CLOSES.reset_index().sample(**mixed).to_parquet(tmp_path / "column.parquet")
    for file in tmp_path.iterdir():
        prices = load_prices(file)
        assert set(prices.tickers) == set(CLOSES)
        np.testing.assert_allclose(prices.select(list(CLOSES)).close, CLOSES, rtol=1e-12)
        np.testing.assert_array_equal(prices.dates, DAYS.to_numpy())
        assert prices.channels == (3 if file.stem in ("long", "title", "levels") else 1)


@pytest.mark.parametrize(
    "names", [("LOW", "OPEN", "VOLU"), ("DATE", "NA", "nan"), ("000001", "None", "AAA.1")]
)
def test_tickers_are_text_and_stay_what_they_are(names, tmp_path):
    wide = CLOSES.set_axis(list(names), axis=1)
    wide.to_csv(tmp_path / "wide.csv")
    wide.to_parquet(tmp_path / "wide.parquet")
    long = LONG.replace(dict(zip(CLOSES, names, strict=True)))
    long.to_csv(tmp_path / "long.csv", index=False)
    for file in tmp_path.iterdir():
        assert load_prices(file).tickers == names


def test_adjusted_closes_are_the_closes_and_adjust_highs_and_lows(tmp_path):
    LONG.assign(Adj_Close=LONG.close / 4).to_csv(tmp_path / "p.csv", index=False)
    prices = load_prices(tmp_path / "p.csv")
    np.testing.assert_allclose(prices.close, CLOSES / 4)
    np.testing.assert_allclose(prices.high, CLOSES / 4 * 1.1)
    np.testing.assert_allclose(prices.low, CLOSES / 4 * 0.9)


def yfinance(*, adjusted: bool = False, by_ticker: bool = False) -> pd.DataFrame:
    """A frame as yfinance returns it: closes are CLOSES, or twice that beside adjusted ones."""
    factors = {"Close": 2.0, "High": 2.2, "Low": 1.8, "Open": 2.0, "Volume": 1e6}
    scale = 1.0 if adjusted else 0.5
    fields = {field: CLOSES * factor * scale for field, factor in factors.items()}
    frame = pd.concat({"Adj Close": CLOSES} | fields if adjusted else fields, axis=1)
    frame.columns.names = ["Price", "Ticker"]
    frame = frame.rename_axis("Date")
    return frame.swaplevel(axis=1).sort_index(axis=1) if by_ticker else frame


@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("by_ticker", [False, True])
def test_frames_of_yfinance_are_read_as_what_they_are(adjusted, by_ticker, tmp_path):
    frame = yfinance(adjusted=adjusted, by_ticker=by_ticker)
    frame.to_csv(tmp_path / "three.csv")
    frame.rename_axis(None).to_csv(tmp_path / "two.csv")
    frame.to_parquet(tmp_path / "levels.parquet")
    for prices in map(load_prices, tmp_path.iterdir()):
        assert prices.tickers == tuple(CLOSES)
        np.testing.assert_allclose(prices.close, CLOSES.to_numpy())
        np.testing.assert_allclose(prices.high, CLOSES.to_numpy() * 1.1)
        np.testing.assert_array_equal(prices.dates, DAYS.to_numpy())


def test_frames_of_yfinance_that_are_incomplete_are_refused(tmp_path):
    path = tmp_path / "p.csv"
    for columns, level, words in (
        (("Close", "IBM"), None, "40 missing values of close, first at .* IBM"),
        ("Low", 0, "none of the layouts"),
        ("Close", 0, "none of the layouts"),
    ):
        yfinance().drop(columns=columns, level=level).to_csv(path)
        with pytest.raises(InputError, match=words):
            load_prices(path)


def test_iso_days_are_read_with_times_and_offsets_and_by_their_type(tmp_path):
    iso = DAYS.strftime("%Y-%m-%d")
    CLOSES.set_axis(iso + " 00:00:00-05:00").rename_axis("date").to_csv(tmp_path / "p.csv")
    for days in (DAYS.date, iso, DAYS.tz_localize("US/Eastern")):
        CLOSES.set_axis(days).rename_axis("date").to_parquet(tmp_path / "p.parquet")
        for name in ("p.csv", "p.parquet"):
            np.testing.assert_array_equal(load_prices(tmp_path / name).dates, DAYS.to_numpy())


LISTED = STEADY.to_frame()
LISTED.iloc[:30, 1] = LISTED.iloc[50:, 2] = np.nan


def test_files_may_begin_late_and_end_early_but_have_no_gaps(tmp_path):
    path = tmp_path / "prices.csv"
    LISTED.to_csv(path)
    np.testing.assert_allclose(load_prices(path).close, LISTED)
    long = LISTED.reset_index().melt("date", var_name="ticker", value_name="close")
    for rows in (long.dropna(), long):
        rows.to_csv(path, index=False)
        np.testing.assert_allclose(load_prices(path).select(STEADY.tickers).close, LISTED)
    LISTED.iloc[:, [0, 1]].to_csv(path)
    with pytest.raises(InputError, match="1 tickers have a price on 2000-01-03; at least 2"):
        load_prices(path)


def test_prices_stand_still_where_there_are_none():
    closes = np.array([[np.nan, 1.0, np.nan], [2.0, 3.0, np.nan], [4.0, np.nan, np.nan]])
    prices = Prices(STEADY.dates[:3], ("A", "B", "C"), closes)
    np.testing.assert_array_equal(prices.filled()[..., 0], [[2, 1, 1], [2, 3, 1], [4, 3, 1]])
    np.testing.assert_array_equal(prices.relatives(), [[1, 1, 1], [1, 3, 1], [2, 1, 1]])
    tradable = prices.select("AB").with_tomorrow(3).tradable()
    assert tradable.tolist() == [[False, True], [False, True], [True, False], [True, False]]  # pyright: ignore[reportOptionalMemberAccess]
    assert STEADY.tradable() is None


def test_the_fingerprint_sees_every_number_and_name():
    prices = load_prices(None)
    assert prices.close.shape == (8313, 20)
    assert prices.fingerprint == "32b9fe68a94d8e28" == embedded_prices().fingerprint
    assert "20 tickers x 8313 days" in prices.summary()
    steady, touched = STEADY.fingerprint, STEADY.close.copy()
    touched[17, 2] += 1e-9
    assert steady != replace(STEADY, close=touched).fingerprint
    assert steady != replace(STEADY, tickers=("A", *STEADY.tickers[1:])).fingerprint


def test_rows_are_found_by_day_and_columns_by_name():
    prices = Prices(DAYS.to_numpy().astype("datetime64[D]"), tuple(CLOSES), CLOSES.to_numpy())
    assert prices.row("2019-01-05") == 4  # a Saturday: the Monday after it
    assert prices.until("2019-01-07").dates[-1] == np.datetime64("2019-01-04")
    assert prices.row("2030-01-01") == 40
    with pytest.raises(InputError, match="not a day"):
        prices.row("01/02/2015")
    np.testing.assert_array_equal(prices.select(["KO", "AMD"]).close, CLOSES[["KO", "AMD"]])
    with pytest.raises(InputError, match="'PEP' is not among the 3"):
        prices.select(["PEP"])


def suspects(prices: Prices) -> list[str]:
    return [str(jump) for jump in prices.jumps]


def moved(relative: float, row: int = 30, column: int = 1) -> Prices:
    """Steady prices, one of which is multiplied by `relative` from one day on."""
    close = STEADY.close.copy()
    close[row:, column] *= relative * close[row - 1, column] / close[row, column]
    return Prices(STEADY.dates, STEADY.tickers, close)


@pytest.mark.parametrize(
    "split", [(2, 1), (3, 2), (8, 5), (7, 4), (20, 1), (100, 1), (1, 2), (1, 10), (1, 100)]
)
def test_a_split_is_named_with_the_market_moving_beside_it(split):
    one, other = split
    for beside in (0.992, 1.008):
        (jump,) = suspects(moved(other / one * beside))
        assert jump.startswith(f"{STEADY.tickers[1]} ")
        assert jump.endswith(f" on {STEADY.dates[30]} (looks like a split of {one}:{other})")


def test_a_crash_or_a_leap_of_a_real_stock_passes():
    for crash in (0.8, 0.74, 1.25, 1.6):
        assert suspects(moved(crash)) == []
    assert suspects(SimulatedMarket.draw(universe=20, days=2000).prices) == []


def test_a_split_of_5_to_4_is_found_by_the_usual_volume_and_one_of_2_to_1_by_any():
    volume = np.ones(STEADY.close.shape)
    for relative, times in ((0.8, 1.25), (0.5, 9.0), (0.01, 1000.0)):
        volume[30:, 1] = times
        [jump] = suspects(replace(moved(relative), volume=volume))
        assert "looks like a split" in jump
    volume[30:, 1] = 4.0
    assert suspects(replace(moved(0.8), volume=volume)) == []
    # Several instruments may change their unit on one day.
    everything = STEADY.close.copy()
    everything[30:] /= 100
    assert len(suspects(replace(STEADY, close=everything))) == 4


def test_a_fall_on_many_times_the_usual_volume_is_the_markets(tmp_path):
    """As EQIX on 2010-10-06, which fell from 105.09 to 70.34, the ratio of 3:2, when it had warned."""
    file, name = tmp_path / "prices.csv", f"EQIX:{STEADY.dates[30]}"
    table = moved(70.34 / 105.09).to_frame().rename(columns={STEADY.tickers[1]: "EQIX"})
    long = table.reset_index().melt("date", var_name="ticker", value_name="close")
    that_day = (long["ticker"] == "EQIX") & (long["date"] == str(STEADY.dates[30]))
    long.assign(volume=np.where(that_day, 31.6e6, 9e5)).to_csv(file, index=False)
    prices = load_prices(file)
    assert prices.jumps == []
    for volume in (1.35e6, None):
        rows = long if volume is None else long.assign(volume=np.where(that_day, volume, 9e5))
        rows.to_csv(file, index=False)
        # Volume is no price: the policy reads the same from the file without it.
        assert prices.fingerprint == load_prices(file, allow_jumps=["all"]).fingerprint
        with pytest.raises(InputError, match=rf"split of 3:2.*--allow-jumps {name} to accept"):
            load_prices(file, allow_jumps=["EQIX:2019-01-01"])
    for allowed in ([name], ["all"]):
        assert len(load_prices(file, allow_jumps=allowed).dates) == 60


def test_an_error_that_is_undone_the_next_day_is_found_whatever_the_volume():
    close, volume = STEADY.close.copy(), np.ones(STEADY.close.shape)
    close[30, 1] *= 3
    volume[30, 1] = 100
    assert len(suspects(Prices(STEADY.dates, STEADY.tickers, close, volume=volume))) == 2


@pytest.mark.parametrize("missing", [1, 3])
def test_an_instrument_without_its_newest_price_is_not_sold_unasked(missing):
    close = STEADY.close.copy()
    close[-missing:, 2] = np.nan
    prices, name = Prices(STEADY.dates, STEADY.tickers, close), STEADY.tickers[2]
    with pytest.raises(InputError, match=f"{name} has no price on .* remove the instrument"):
        check_last_day(prices)
    check_last_day(STEADY)
    # One that left long ago left.
    close[-20:, 2] = np.nan
    check_last_day(Prices(STEADY.dates, STEADY.tickers, close))
