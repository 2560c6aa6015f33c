"""Names, layouts, days and numbers as people write them: read where it is certain, else refused."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from apportion.domains.portfolio.prices import from_frame, load_prices
from apportion.errors import InputError

DAYS = pd.bdate_range("2019-01-01", periods=40)
CLOSES = pd.DataFrame(
    10 + np.random.default_rng(0).random((40, 3)), DAYS, ["AAA", "BBB", "CCC"]
).rename_axis("date")
LONG = CLOSES.reset_index().melt("date", var_name="ticker", value_name="close")


def named(*names: str) -> pd.DataFrame:
    return CLOSES.set_axis(list(names), axis=1)


def dated(days) -> pd.DataFrame:
    return CLOSES.set_axis(list(days), axis=0).rename_axis("date")


@pytest.mark.parametrize(
    "names",
    [
        ("LOW", "OPEN", "Volume"),
        ("DATE", "NA", "nan"),
        ("000001", "600000", "1"),
        ("True", "None", "AAA.1"),
        ("aaa", "AAA", "Aaa"),
    ],
)
def test_tickers_are_text_and_stay_what_they_are(names, tmp_path):
    named(*names).to_csv(tmp_path / "wide.csv")
    named(*names).rename_axis("day").to_csv(tmp_path / "day.csv")
    named(*names).to_parquet(tmp_path / "wide.parquet")
    long = LONG.replace(dict(zip(CLOSES, names, strict=True)))
    long.to_csv(tmp_path / "long.csv", index=False)
    for file in tmp_path.iterdir():
        prices = load_prices(file)
        assert prices.tickers == names
        np.testing.assert_allclose(prices.close, CLOSES.to_numpy(), rtol=1e-12)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("AAA", " AAA", "CCC"), 'columns 2 ("AAA") and 3 (" AAA") are both called AAA'),
        (("AAA", "BBB", "AAA"), 'columns 2 ("AAA") and 4 ("AAA") are both called AAA'),
        (("AAA", "", "CCC"), "column 3 has no name"),
        (("AAA", "Unnamed: 2", "CCC"), "column 3 has no name"),
        (("Close", "High", "Low"), '"ticker" is missing beside "close"'),
        (("Adj Close", "BBB", "CCC"), '"ticker" is missing beside "adj close"'),
        (("Open", "High", "Low"), '"ticker" is missing beside "high"'),
    ],
)
def test_names_that_leave_doubt_are_refused(names, words, tmp_path):
    named(*names).to_csv(tmp_path / "p.csv")
    with pytest.raises(InputError) as caught:
        load_prices(tmp_path / "p.csv")
    assert words in str(caught.value)


def test_one_name_in_two_spellings_is_refused_in_a_long_file(tmp_path):
    LONG.replace({"BBB": " AAA"}).to_csv(tmp_path / "p.csv", index=False)
    with pytest.raises(InputError, match='" AAA" at line 42 and "AAA" differ by spaces only'):
        load_prices(tmp_path / "p.csv")


def test_a_written_index_is_left_out_only_where_it_counts_the_rows(tmp_path):
    CLOSES.reset_index().to_csv(tmp_path / "p.csv")
    assert load_prices(tmp_path / "p.csv").tickers == tuple(CLOSES)
    CLOSES.reset_index().sample(frac=1, random_state=0).to_parquet(tmp_path / "p.parquet")
    np.testing.assert_array_equal(load_prices(tmp_path / "p.parquet").close, CLOSES)
    CLOSES.reset_index().set_axis(range(3, 43)).to_csv(tmp_path / "p.csv")
    with pytest.raises(InputError, match="column 1 has no name; drop it if it is a written index"):
        load_prices(tmp_path / "p.csv")


@pytest.mark.parametrize("name", ["adj close", "Adj Close", "ADJ_CLOSE", "AdjClose"])
def test_adjusted_closes_are_the_closes_and_adjust_highs_and_lows(name, tmp_path):
    table = LONG.assign(high=LONG.close * 1.1, low=LONG.close * 0.9)
    table = table.assign(**{name: LONG.close / 4})
    table.to_csv(tmp_path / "p.csv", index=False)
    prices = load_prices(tmp_path / "p.csv")
    np.testing.assert_allclose(prices.close, CLOSES / 4)
    np.testing.assert_allclose(prices.high, CLOSES / 4 * 1.1)
    np.testing.assert_allclose(prices.low, CLOSES / 4 * 0.9)
    table.drop(columns="close").to_csv(tmp_path / "p.csv", index=False)
    with pytest.raises(InputError, match='"close" is missing beside "adj close" and "high"'):
        load_prices(tmp_path / "p.csv")


FACTORS = {"Close": 2.0, "High": 2.2, "Low": 1.8, "Open": 2.0, "Volume": 1e6}


def yfinance(*, adjusted: bool, by_ticker: bool, labels: bool) -> pd.DataFrame:
    """A frame as yfinance returns it: closes are CLOSES, or twice that beside adjusted ones."""
    factors = ({"Adj Close": 1.0} if adjusted else {}) | FACTORS
    scale = 1.0 if adjusted else 0.5
    fields = {field: CLOSES * factor * scale for field, factor in factors.items()}
    frame = pd.concat({"Adj Close": CLOSES} | fields if adjusted else fields, axis=1)
    frame.columns.names = ["Price", "Ticker"] if labels else [None, None]
    frame = frame.rename_axis("Date")
    return frame.swaplevel(axis=1).sort_index(axis=1) if by_ticker else frame


@pytest.mark.parametrize("adjusted", [False, True])
@pytest.mark.parametrize("by_ticker", [False, True])
@pytest.mark.parametrize("labels", [False, True])
def test_frames_of_yfinance_are_read_as_what_they_are(adjusted, by_ticker, labels, tmp_path):
    frame = yfinance(adjusted=adjusted, by_ticker=by_ticker, labels=labels)
    frame.to_csv(tmp_path / "three.csv")
    frame.rename_axis(None).to_csv(tmp_path / "two.csv")
    frame.reset_index().to_csv(tmp_path / "column.csv", index=False)
    frame.to_parquet(tmp_path / "levels.parquet")
    flat = frame.set_axis([str(column) for column in frame.columns], axis=1)
    flat.reset_index().to_parquet(tmp_path / "tuples.parquet")
    tables = [load_prices(file) for file in sorted(tmp_path.iterdir())]
    for prices in [*tables, from_frame(frame)]:
        assert prices.tickers == tuple(CLOSES)
        np.testing.assert_allclose(prices.close, CLOSES.to_numpy())
        np.testing.assert_allclose(prices.high, CLOSES.to_numpy() * 1.1)
        np.testing.assert_array_equal(prices.dates, DAYS.to_numpy())


def test_frames_of_yfinance_that_are_incomplete_are_refused(tmp_path):
    frame = yfinance(adjusted=False, by_ticker=False, labels=True)
    frame.drop(columns=("Close", "BBB")).to_csv(tmp_path / "p.csv")
    with pytest.raises(InputError, match='BBB has no column "close", which others have'):
        load_prices(tmp_path / "p.csv")
    frame.drop(columns="Low", level=0).to_csv(tmp_path / "p.csv")
    with pytest.raises(InputError, match='"low" is missing beside "high"'):
        load_prices(tmp_path / "p.csv")
    frame.drop(columns="Close", level=0).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(InputError, match="several levels"):
        load_prices(tmp_path / "p.parquet")


def test_rows_may_come_in_any_order(tmp_path):
    CLOSES.sample(frac=1, random_state=1).to_csv(tmp_path / "wide.csv")
    LONG.sample(frac=1, random_state=1).to_csv(tmp_path / "long.csv", index=False)
    for file in tmp_path.iterdir():
        prices = load_prices(file).select(tuple(CLOSES))
        np.testing.assert_array_equal(prices.dates, DAYS.to_numpy())
        np.testing.assert_allclose(prices.close, CLOSES)


def test_the_line_of_a_fault_is_that_of_the_file_whatever_the_order_and_blank_lines(tmp_path):
    header, *lines = CLOSES.iloc[::-1].to_csv().splitlines()
    lines[4] = lines[4].rpartition(",")[0] + ",-1"
    (tmp_path / "p.csv").write_text("\n".join([header, "", "", *lines, ""]))
    with pytest.raises(InputError, match=r'"CCC" has 1 negative .* \(line 8\)'):
        load_prices(tmp_path / "p.csv")


OFFSETS = [f"{day:%Y-%m-%d} 00:00:00-0{5 - (n > 20)}:00" for n, day in enumerate(DAYS)]
FORMATS = ["%d/%m/%Y", "%m/%d/%Y", "%Y%m%d", "%d.%m.%Y", "%d-%b-%Y", "%B %d, %Y", "%Y/%m/%d"]


@pytest.mark.parametrize("days", [OFFSETS, *map(DAYS.strftime, FORMATS)], ids=lambda days: days[0])
def test_days_are_read_where_the_column_tells_how_they_are_written(days, tmp_path):
    dated(days).to_csv(tmp_path / "p.csv")
    np.testing.assert_array_equal(load_prices(tmp_path / "p.csv").dates, DAYS.to_numpy())


def test_days_of_parquet_files_are_read_by_their_type(tmp_path):
    for days in (DAYS.date, DAYS.strftime("%Y%m%d").astype(int), DAYS.tz_localize("US/Eastern")):
        dated(days).to_parquet(tmp_path / "p.parquet")
        np.testing.assert_array_equal(load_prices(tmp_path / "p.parquet").dates, DAYS.to_numpy())


MIXED = [day.strftime("%d/%m/%Y" if n % 2 else "%m/%d/%Y") for n, day in enumerate(DAYS)]
# Each day is the first to twelfth of a month, so nothing tells days from months.
EITHER = [f"{n % 12 + 1:02}/{n // 12 + 1:02}/2019" for n in range(40)]


@pytest.mark.parametrize(
    ("days", "words"),
    [
        (MIXED, 'days before months, as "14/01/2019" at line 11, and after them'),
        (EITHER, "may have the day or the month first, and no other row tells"),
        (DAYS.strftime("%d/%m/%y"), 'not dates, first "01/01/19" at line 2'),
        (range(43_000, 43_040), 'not dates, first "43000"'),
        (["2019-02-30", *DAYS.strftime("%Y-%m-%d")[1:]], '1 values that are not dates, first "2019-02-30"'),
        (["", *DAYS.strftime("%Y-%m-%d")[1:]], '1 values that are not dates, first ""'),
    ],
)  # fmt: skip
def test_days_that_may_be_read_in_two_ways_or_none_are_refused(days, words, tmp_path):
    dated(days).to_csv(tmp_path / "p.csv")
    with pytest.raises(InputError) as caught:
        load_prices(tmp_path / "p.csv")
    assert words in str(caught.value)
    assert "write days as 2019-01-02" in str(caught.value)


@pytest.mark.parametrize("decimal", [",", "."])
def test_semicolons_and_tabs_separate_with_either_decimal_mark(decimal, tmp_path):
    CLOSES.to_csv(tmp_path / "a.csv", sep=";", decimal=decimal)
    CLOSES.to_csv(tmp_path / "b.csv", sep="\t", decimal=decimal)
    LONG.to_csv(tmp_path / "c.csv", sep=";", decimal=decimal, index=False)
    (tmp_path / "d.csv").write_text("\ufeff" + CLOSES.to_csv(sep=";", decimal=decimal))
    for file in tmp_path.iterdir():
        prices = load_prices(file)
        assert prices.tickers == tuple(CLOSES)
        np.testing.assert_allclose(prices.close, CLOSES)


def semicolons(path: Path, cell: str) -> Path:
    """A file of numbers with three decimals behind commas, and one cell of one's own."""
    lines = CLOSES.to_csv(sep=";", decimal=",", float_format="%.3f").splitlines()
    lines[5] = lines[5].rpartition(";")[0] + f";{cell}"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("10,500", "may have a decimal comma or one of thousands"),
        ("10.5", 'has a comma and "10.5" at line 6 a point'),
        ("1.010,5", 'has a comma and "1.010,5" at line 6 a point'),
    ],
)
def test_numbers_that_may_be_read_in_two_ways_are_refused(cell, words, tmp_path):
    with pytest.raises(InputError) as caught:
        load_prices(semicolons(tmp_path / "p.csv", cell))
    assert words in str(caught.value)


def test_one_number_that_can_only_have_a_decimal_comma_tells_for_all(tmp_path):
    for cell in ("10,5", "0,250", "1010,250"):
        close = load_prices(semicolons(tmp_path / "p.csv", cell)).close
        assert close[4, 2] == float(cell.replace(",", "."))
        assert 10 < close[0, 0] < 11


def test_a_file_without_rows_and_commas_inside_numbers_are_named(tmp_path):
    (tmp_path / "p.csv").write_text("date,AAA,BBB\n")
    with pytest.raises(InputError, match="has names but no rows"):
        load_prices(tmp_path / "p.csv")
    CLOSES.map("1,{:.2f}".format).to_csv(tmp_path / "p.csv")
    with pytest.raises(InputError, match="such as 1234.5, without commas"):
        load_prices(tmp_path / "p.csv")
