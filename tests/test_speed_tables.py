"""The writer of the tables of speed: what is written is what was measured, in both files."""

import importlib.util
import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "table.py"


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("speed_table", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sides_take_turns(table):
    order = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert table.alternate(sides, 2) == {"a": [1, 3], "b": [2, 4]}
    assert order == ["a", "b", "a", "b"]


def test_a_ratio_is_taken_turn_by_turn(table):
    assert table.ratio([2.0, 9.0, 8.0], [1.0, 3.0, 4.0]) == {"median": 2, "least": 2, "most": 3}
    assert table.best({"one": [1.0, 5.0], "two": [2.0, 4.0]}) == [2.0, 5.0]


def test_a_table_shows_spreads_and_leaves_details_to_the_numbers(table, tmp_path, capsys):
    cell = {"median": 1234.5, "least": 0.5, "most": 2000.0}
    rows = [{"size": "small", "ours": cell, "ratio": None, "_more": [1, 2]}]
    table.write("name", "Title", "About.", rows, {"machine": "this"}, tmp_path)
    text = (tmp_path / "name.md").read_text()
    assert "| small | 1,234 (0.5-2,000) |  |" in text
    assert "_more" not in text
    assert "- machine: this" in text
    assert text.strip() == capsys.readouterr().out.strip()
    found = json.loads((tmp_path / "name.json").read_text())
    assert found["rows"] == rows
    assert found["machine"] == "this"
