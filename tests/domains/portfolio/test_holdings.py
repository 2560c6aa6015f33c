import json

import numpy as np
import pytest

from apportion.domains.portfolio.orders import read_holdings
from apportion.errors import InputError

TICKERS = ("A", "B", "C")


def test_shares_come_in_the_order_of_the_tickers_and_the_rest_holds_nothing(tmp_path):
    table = tmp_path / "today.csv"
    table.write_text("ticker,share\nC,0.25\n A ,0.75\n")
    np.testing.assert_array_equal(read_holdings(table, TICKERS).amounts, [0.75, 0, 0.25])


def test_what_allocate_prints_serves_as_holdings(tmp_path):
    file = tmp_path / "today.json"
    for content in ({"B": 1.0}, {"date": "2019-01-02", "allocation": {"B": 1.0}}):
        file.write_text(json.dumps(content))
        np.testing.assert_array_equal(read_holdings(file, TICKERS).amounts, [0, 1, 0])


def test_quantities_and_cash_are_read_from_either_kind_of_file(tmp_path):
    table, file = tmp_path / "today.csv", tmp_path / "today.json"
    table.write_text("Ticker, Quantity\ncash,12.5\nC,3\n")
    file.write_text('{"quantities": {"C": 3}, "cash": 12.5}')
    for path in (table, file):
        held = read_holdings(path, TICKERS, cash=True)
        assert held.counted
        assert held.cash == 12.5
        np.testing.assert_array_equal(held.amounts, [0, 0, 3])
        # What is not held needs no price.
        np.testing.assert_array_equal(held.values(np.array([1, np.nan, 2])), [12.5, 0, 0, 6])


def test_cash_must_be_named_only_where_the_policy_may_hold_it(tmp_path):
    table = tmp_path / "today.csv"
    table.write_text("ticker,quantity\nA,1\n")
    assert read_holdings(table, TICKERS).cash == 0
    with pytest.raises(InputError, match=r"today.csv: says nothing of cash"):
        read_holdings(table, TICKERS, cash=True)
    with pytest.raises(InputError, match='"cash" is among the prices'):
        read_holdings(table, ("A", "cash"))


def test_a_missing_file_of_holdings_is_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_holdings(tmp_path / "none.csv", TICKERS)
