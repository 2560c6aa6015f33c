"""A study in several processes: the same files, whoever dies, and a stop that everyone hears."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial

import pytest

from apportion.runs.runner import Stop, Stopped
from apportion.studies.engine import CellStore, complete, programs_of
from apportion.studies.executors import Workers, compute_in_turn, workers
from apportion.studies.registry import Request, perform
from cli.command import apportion, assert_refused
from studies.toys import Computed, toy

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


def stores_of(folder, *names):
    """Toy studies in folders of their own."""
    return {name: CellStore(toy(name=name), folder / name) for name in names}


def compute_all(store):
    compute_in_turn([(store, program, "") for program in programs_of(store.plan.cells)])


@dataclass
class Process:
    """One that lives until it is told not to."""

    alive: bool = True

    def is_alive(self):
        return self.alive


def test_a_study_is_concluded_when_its_cells_are_there_whatever_came_before_it(tmp_path):
    stores = stores_of(tmp_path, "one", "two", "three")
    process = Process()
    told = []

    def progress(what, fraction):
        told.append(what)
        if len(told) == 2:
            compute_all(stores["one"])
        if len(told) == 3:
            process.alive = False

    compute_all(stores["two"])
    assert list(Workers((process,)).completed(stores, progress)) == ["two", "one", "three"]
    assert told == ["6 of 18 cells", "6 of 18 cells", "12 of 18 cells"]


def test_a_stop_that_is_asked_for_while_a_study_is_concluded_is_heard(tmp_path):
    stop = Stop()
    studies = Workers((), stop).completed(stores_of(tmp_path, "one", "two"), print)
    assert next(studies) == "one"
    stop.requested = True
    with pytest.raises(Stopped, match="0 of 12 cells of one and two are saved in .*; the same"):
        next(studies)


def test_a_signal_is_heard_from_the_processes_start_to_their_end():
    with workers(1, time.sleep) as others:
        signal.raise_signal(signal.SIGTERM)
        assert others.stop.requested
    assert not multiprocessing.active_children()


def test_a_program_that_fails_holds_nobody_up_and_is_tried_again(tmp_path):
    failed = []

    def failing(cells, progress, times):
        if cells[0].program == "a" and len(failed) < times:
            failed.append(cells[0].name)
            raise MemoryError("the card is full")
        yield from plan.compute(cells, progress)

    plan = toy(computed := Computed())
    compute_all(CellStore(replace(plan, compute=partial(failing, times=1)), tmp_path / "once"))
    assert computed == [f"cell-{number}" for number in (1, 3, 5, 0, 2, 4)]
    store = CellStore(replace(plan, compute=partial(failing, times=100)), tmp_path / "ever")
    compute_all(store)
    assert [cell.program for cell in store.missing()] == ["a"] * 3
    with pytest.raises(MemoryError, match="the card is full"):
        complete(store.plan, store.folder)


FIRST = """
import sys, time
from pathlib import Path
from apportion.studies.executors import workers

def work(number):
    Path(sys.argv[1]).touch()
    time.sleep(120)

if __name__ == "__main__":
    with workers(1, work):
        time.sleep(120)
"""


def test_processes_end_with_the_first_when_it_is_killed(tmp_path):
    (tmp_path / "first.py").write_text(FIRST)
    begun = tmp_path / "begun"
    first = subprocess.Popen(
        [sys.executable, tmp_path / "first.py", begun], stderr=subprocess.PIPE, text=True
    )
    while not begun.exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    first.kill()
    # The pipe is closed by the last process that holds it.
    first.communicate(timeout=60)


@pytest.mark.parametrize("other", [("--cells", "1/2"), ("--draw",), ("--on", "ray")])
def test_processes_stand_alone(tmp_path, other):
    done = apportion("study", "bound", "--processes", 2, *other, "--out", tmp_path / "new")
    told = " ".join(other) if other[0] == "--on" else other[0]
    assert_refused(done, f"leave {told} out")
    assert not (tmp_path / "new").exists()


def test_no_process_computes_nothing(tmp_path):
    done = apportion("study", "bound", "--processes", 0, "--out", tmp_path / "new")
    assert_refused(done, "processes is 0", "at least 1")
