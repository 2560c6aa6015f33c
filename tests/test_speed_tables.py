"""The tables of speed: sides take turns, and what is shown is what was measured."""

import json

import programs

table = programs.benchmark("table")


def test_sides_take_turns():
    order = []
    sides = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert table.alternate(sides, 2) == {"a": [1, 3], "b": [2, 4]}
    assert order == ["a", "b", "a", "b"]


def test_a_ratio_is_taken_turn_by_turn():
    assert table.ratio([2.0, 9.0, 8.0], [1.0, 3.0, 4.0]) == {"median": 2, "least": 2, "most": 3}
    assert table.best({"one": [1.0, 5.0], "two": [2.0, 4.0]}) == [2.0, 5.0]


def test_a_table_shows_spreads_and_leaves_details_to_the_file(tmp_path, capsys):
    cell = {"median": 1234.5, "least": 0.5, "most": 2000.0}
    rows = [{"size": "small | even", "ours": cell, "ratio": None, "_more": [1, 2]}]
    table.write("name", "Title", "About.", rows, {"machine": "this"}, tmp_path)
    found = json.loads((tmp_path / "name.json").read_text())
    assert found["rows"] == rows
    text = table.as_markdown(found)
    assert "| small \\| even | 1,234 (0.5-2,000) |  |" in text
    assert "_more" not in text
    assert "- machine: this" in text
    assert text in capsys.readouterr().out
