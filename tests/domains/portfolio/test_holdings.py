import json

import numpy as np
import pytest

from apportion.domains.portfolio.holdings import read_holdings
from apportion.errors import InputError

TICKERS = ("A", "B", "C")


def test_shares_come_in_the_order_of_the_tickers_and_the_rest_holds_nothing(tmp_path):
    table = tmp_path / "today.csv"
    table.write_text("ticker,share\nC,0.25\n A ,0.75\n")
    np.testing.assert_array_equal(read_holdings(table, TICKERS), [0.75, 0, 0.25])


def test_what_allocate_prints_serves_as_holdings(tmp_path):
    file = tmp_path / "today.json"
    for content in ({"B": 1.0}, {"date": "2019-01-02", "allocation": {"B": 1.0}}):
        file.write_text(json.dumps(content))
        np.testing.assert_array_equal(read_holdings(file, TICKERS), [0, 1, 0])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("ticker,share\nD,1\n", "D is not among the prices"),
        ("ticker,share\nA,0.5\nA,0.5\n", "a ticker occurs twice"),
        ("ticker,share\nA,0.5\n", "the shares sum to 0.5"),
        ("ticker,share\nA,1.5\nB,-0.5\n", "the smallest is -0.5"),
        ("ticker,share\nA,much\n", "not a table of shares"),
        ("name,weight\nA,1\n", "not a table of shares"),
        ("", "not a table of shares"),
    ],
)
def test_holdings_that_are_wrong_are_refused_in_one_sentence(content, sentence, tmp_path):
    file = tmp_path / "today.csv"
    file.write_text(content)
    with pytest.raises(InputError, match=f"today.csv: .*{sentence}"):
        read_holdings(file, TICKERS)


def test_a_missing_file_of_holdings_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_holdings(tmp_path / "none.csv", TICKERS)
