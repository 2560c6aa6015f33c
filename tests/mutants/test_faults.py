"""The list of deliberate faults, and what the last run of `make mutants` said of it."""

import csv
from pathlib import Path

import pytest
from faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def outcomes():
    with (ROOT / "docs" / "results" / "mutants" / "table.csv").open(newline="") as file:
        return {row["fault"]: row["outcome"] for row in csv.DictReader(file)}


def test_every_fault_has_a_name_of_its_own_and_tests_that_are_there():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for fault in FAULTS:
        file, *options = fault.tests.split()
        path, _, name = file.partition("::")
        source = (ROOT / path).read_text()
        assert not name or f"def {name}(" in source, fault.name
        assert not options or options[0] == "-k", fault.name
        assert fault.text != fault.becomes


def test_nine_in_ten_faults_were_noticed(outcomes):
    assert set(outcomes) == {fault.name for fault in FAULTS}
    killed = sum(found.startswith("killed") for found in outcomes.values())
    assert killed >= 0.9 * len(FAULTS)
