"""A study in several processes: the same files, whoever dies, and a stop that everyone hears."""

import json
import multiprocessing
import os
import signal

import pytest

from apportion.runs.runner import Stopped
from apportion.studies.registry import Request, perform
from cli.command import apportion, assert_refused

FILES = ("table.csv", "verdict.json", "figure.png", "rows.parquet")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The study computed by one process."""
    folder = tmp_path_factory.mktemp("alone") / "bound"
    assert [done.missing for done in perform("bound", folder, Request())] == [0]
    return folder


def same_files(one, other):
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in FILES)


def once(action):
    """A progress function that acts at the first cell that is there."""
    acted = []

    def progress(what, fraction):
        if fraction > 0 and not acted:
            acted.append(what)
            action()

    return progress


def test_the_cells_of_several_processes_are_those_of_one(alone, tmp_path):
    done = apportion("study", "bound", "--processes", 2, "--out", tmp_path / "several")
    assert done.returncode == 0, done.stderr
    assert "of 5 cells" in done.stderr
    assert "computed in" in done.stdout
    assert same_files(tmp_path / "several", alone)
    about = json.loads((tmp_path / "several" / "study.json").read_text())
    assert sum(stretch["cells"] for stretch in about["computing"]) == 5
    assert not multiprocessing.active_children()


def test_what_a_killed_process_was_at_is_computed_all_the_same(alone, tmp_path):
    def kill():
        for child in multiprocessing.active_children():
            child.kill()

    [done] = perform("bound", tmp_path, Request(), processes=2, progress=once(kill))
    assert done.missing == 0
    assert same_files(tmp_path, alone)


def test_a_request_to_stop_ends_every_process(alone, tmp_path):
    def ask():
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"of 5 cells of bound are saved in .*; the same command"):
        list(perform("bound", tmp_path, Request(), processes=2, progress=once(ask)))
    assert not multiprocessing.active_children()
    assert [done.missing for done in perform("bound", tmp_path, Request())] == [0]
    assert same_files(tmp_path, alone)


@pytest.mark.parametrize("other", [("--cells", "1/2"), ("--draw",), ("--on", "ray")])
def test_processes_stand_alone(tmp_path, other):
    done = apportion("study", "bound", "--processes", 2, *other, "--out", tmp_path / "new")
    told = " ".join(other) if other[0] == "--on" else other[0]
    assert_refused(done, f"leave {told} out")
    assert not (tmp_path / "new").exists()


def test_no_process_computes_nothing(tmp_path):
    done = apportion("study", "bound", "--processes", 0, "--out", tmp_path / "new")
    assert_refused(done, "processes is 0", "at least 1")
