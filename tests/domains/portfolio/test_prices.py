"""Reading price files: what is right is read, what is wrong is said in one sentence."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio import Prices, embedded_prices, load_prices
from apportion.domains.portfolio.prices import from_frame
from apportion.errors import InputError

DAYS = pd.bdate_range("2015-01-01", periods=40)
TICKERS = ["AMD", "IBM", "KO"]


def wide() -> pd.DataFrame:
    values = 10 + np.arange(40 * 3).reshape(40, 3) / 7
    return pd.DataFrame(values, index=DAYS, columns=TICKERS).rename_axis("date")


def long() -> pd.DataFrame:
    table = wide().reset_index().melt("date", var_name="ticker", value_name="close")
    return table.assign(high=table.close * 1.01, low=table.close * 0.99, volume=7)


def save(frame: pd.DataFrame, path, index: bool = False):
    frame.to_csv(path, index=index)
    return path


def test_long_and_wide_csv_and_parquet_give_the_same_closes(tmp_path):
    long().to_parquet(tmp_path / "long.parquet")
    wide().to_parquet(tmp_path / "wide.parquet")
    files = [
        save(long(), tmp_path / "long.csv"),
        save(wide(), tmp_path / "wide.csv", index=True),
        tmp_path / "long.parquet",
        tmp_path / "wide.parquet",
    ]
    tables = [load_prices(file) for file in files]
    for table in tables:
        assert table.tickers == tuple(TICKERS)
        np.testing.assert_allclose(table.close, wide().to_numpy(), rtol=1e-12)
    assert [table.channels for table in tables] == [3, 1, 3, 1]
    assert tables[2].fingerprint != tables[3].fingerprint


def test_columns_are_found_whatever_their_case_and_order(tmp_path):
    frame = long().rename(columns=str.title)[["Low", "Close", "Ticker", "High", "Date"]]
    prices = load_prices(save(frame, tmp_path / "p.csv"))
    assert prices.channels == 3
    assert prices.close[0, 0] == pytest.approx(10.0)


def test_the_fingerprint_sees_every_number_and_name():
    plain = from_frame(wide())
    touched = wide()
    touched.iloc[17, 2] += 1e-9
    assert plain.fingerprint == from_frame(wide()).fingerprint
    assert plain.fingerprint != from_frame(touched).fingerprint
    assert plain.fingerprint != from_frame(wide().rename(columns={"KO": "PEP"})).fingerprint


def test_rows_are_found_by_day_and_cut_before_it():
    prices = from_frame(wide())
    assert prices.row("2015-01-03") == 2  # a Saturday: the Monday after it
    assert prices.until("2015-01-05").dates[-1] == np.datetime64("2015-01-02")
    assert prices.row("2030-01-01") == 40
    for text in ("soon", "2015", "01/02/2015", "", "today"):
        with pytest.raises(InputError, match="not a day"):
            prices.row(text)


def test_selecting_tickers_reorders_columns():
    prices = from_frame(wide()).select(["KO", "AMD"])
    np.testing.assert_array_equal(prices.close, wide()[["KO", "AMD"]].to_numpy())
    with pytest.raises(InputError, match="PEP is not among the 3"):
        from_frame(wide()).select(["PEP"])


def spoil(frame: pd.DataFrame, row: int, column: str, value) -> pd.DataFrame:
    frame = frame.astype({column: object})
    frame.loc[row, column] = value
    return frame


BAD = {
    "text": (lambda: spoil(long(), 5, "close", "n/k"), r'"close" has 1 .*"n/k".*AMD \(line 7\)'),
    "negative": (
        lambda: spoil(long(), 41, "close", -2.0),
        r"negative values, first at .* IBM .*> 0",
    ),
    "zero": (lambda: spoil(long(), 3, "low", 0.0), r'"low" has 1 zero values.*AMD \(line 5\)'),
    "missing value": (lambda: spoil(long(), 2, "close", np.nan), r"missing values.*fill them in"),
    "infinite": (lambda: spoil(long(), 2, "close", np.inf), r"infinite values"),
    "duplicate day": (
        lambda: pd.concat([long().iloc[:1], long()]),
        r"occurs twice for AMD at line 3",
    ),
    "high below low": (lambda: spoil(long(), 9, "high", 1.0), r'"high" is below "low" on 1 rows'),
    "no close": (lambda: long().drop(columns="close"), r'column "close" is missing'),
    "no date": (lambda: long().drop(columns="date"), r'column "date" is missing'),
    "no ticker": (lambda: long().drop(columns="ticker"), r'column "ticker" is missing'),
    "high alone": (lambda: long().drop(columns="low"), r'"low" is missing beside "high"'),
    "not a day": (lambda: spoil(long(), 4, "date", "yesterday"), r'"yesterday" at line 6'),
    "a day left out": (
        lambda: long().drop(index=44),
        r"IBM has no row on 1 of 40 days, first 2015-01-07",
    ),
    "too short": (lambda: long()[long().date < "2015-01-20"], r"13 days found.*at least 33"),
    "too few tickers": (lambda: long()[long().ticker == "KO"], r"1 ticker found; at least 2"),
    "unnamed row": (lambda: spoil(long(), 4, "ticker", None), r'"ticker" is empty at line 6'),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_file_gets_one_sentence_with_file_place_and_way_out(tmp_path, fault):
    make, message = BAD[fault]
    path = save(make(), tmp_path / "prices.csv")
    with pytest.raises(InputError, match=message) as caught:
        load_prices(path)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    assert ";" in text


def test_bad_wide_files_name_the_ticker_and_the_line(tmp_path):
    frame = wide()
    frame.iloc[6, 1] = -1
    with pytest.raises(InputError, match=r'"IBM" has 1 negative .* \(line 8\)'):
        load_prices(save(frame, tmp_path / "w.csv", index=True))
    with pytest.raises(InputError, match="occurs twice at line 42"):
        load_prices(save(pd.concat([wide(), wide().iloc[-1:]]), tmp_path / "w.csv", index=True))
    with pytest.raises(InputError, match='"date" is missing'):
        load_prices(save(wide(), tmp_path / "w.csv"))


def test_what_is_no_table_at_all_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_prices(tmp_path / "absent.csv")
    (tmp_path / "p.parquet").write_text("date,ticker")
    with pytest.raises(InputError, match="cannot be read"):
        load_prices(tmp_path / "p.parquet")
    (tmp_path / "p.csv").write_text("")
    with pytest.raises(InputError, match="cannot be read"):
        load_prices(tmp_path / "p.csv")


def test_embedded_prices_are_twenty_stocks():
    prices = embedded_prices()
    assert prices.close.shape == (8313, 20)
    assert "20 tickers x 8313 days" in prices.summary()


def test_checking_a_file_starts_no_compiler():
    code = (
        "import sys; from apportion.domains.portfolio import load_prices; "
        "assert 'jax' not in sys.modules and 'skfolio' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_relatives_start_at_one():
    days = np.array(["2024-01-02", "2024-01-03"], "datetime64[D]")
    prices = Prices(days, ("A", "B"), np.array([[1.0, 2.0], [1.1, 2.0]]))
    np.testing.assert_allclose(prices.relatives(), [[1, 1], [1.1, 1]])
