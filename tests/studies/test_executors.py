"""Programs in several processes: the same rows, whoever dies, and a stop that ends every process."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from apportion.errors import InputError
from apportion.runs.runner import Stopped
from apportion.studies import executors
from apportion.studies.engine import Plan, _programs_of
from apportion.studies.executors import Processes, Serial
from apportion.studies.registry import make_plan
from studies.toys import computed, perform, same_files, toy


def test_deaths_are_made_good_a_stop_ends_every_process_and_the_rows_are_the_same(tmp_path):
    log = tmp_path / "log"
    waiting = dict.fromkeys(("cell-4", "cell-5"), ("wait", 9))
    plan = toy(log, trouble={"cell-2": ("die", 1)} | waiting)

    def ask(what, fraction):
        if fraction > 0.6 and {"cell-4", "cell-5"} <= set(computed(log)):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"4 of 6 cells of toy are saved in .*; run the same command"):
        perform(plan, tmp_path / "two", Processes(2), progress=ask)
    assert not multiprocessing.active_children()
    # What was finished before a death or a stop is not computed again.
    (tmp_path / "go").touch()
    perform(plan, tmp_path / "two")
    assert [computed(log).count(f"cell-{n}") for n in range(6)] == [1, 1, 2, 1, 2, 2]
    perform(toy(), tmp_path / "one")
    assert same_files(tmp_path / "two", tmp_path / "one")


def test_a_stopped_process_and_one_without_news_are_named(tmp_path, monkeypatch):
    log, seen = tmp_path / "log", []
    plan = toy(log, trouble={"cell-0": ("wait", 9)})
    monkeypatch.setattr(executors, "_SILENT_SECONDS", 0.2)

    def watch(what, fraction):
        if "no message" in what and not seen:
            seen.append(what)
            os.kill(multiprocessing.active_children()[0].pid, signal.SIGSTOP)
        if "stopped" in what and len(seen) == 1:
            seen.append(what)
            os.kill(int(what.rstrip("`").split()[-1]), signal.SIGCONT)
            (tmp_path / "go").touch()

    perform(plan, tmp_path / "toy", Processes(1), progress=watch)
    assert re.fullmatch(r"0 of 6 cells, no message from process \d+ for a minute", seen[0])
    assert re.search(r"process (\d+) is stopped; continue it with `kill -CONT \1`", seen[1])


@pytest.fixture
def threads(monkeypatch):
    """Workers that are threads, which start at once; a program is begun twice at most."""

    class Thread(threading.Thread):
        def kill(self):
            pass

    class End:
        """One end of a pipe, which the thread keeps open when the first process closes it."""

        def __init__(self, end):
            self.recv, self.send, self.end = end.recv, end.send, end

        def close(self):
            pass

    def pipe():
        ours, theirs = multiprocessing.Pipe()
        ends.append(ours)
        return ours, End(theirs)

    ends = []
    context = SimpleNamespace(Pipe=pipe, Process=Thread)
    monkeypatch.setattr(multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(executors, "_ATTEMPTS", 2)
    # A thread cannot be killed, but ends with its pipe.
    monkeypatch.setattr(Thread, "join", lambda self: [end.close() for end in ends])
    return monkeypatch


@pytest.mark.parametrize(
    ("what", "error", "words", "begun"),
    [("full", MemoryError, "the GPU is full", 3), ("refuse", InputError, "the data is wrong", 1)],
)
def test_what_fails_again_and_what_is_refused_is_told(tmp_path, threads, what, error, words, begun):
    log = tmp_path / "log"
    with pytest.raises(error, match=words):
        perform(toy(log, trouble={"cell-0": (what, 9)}), tmp_path / "toy", Processes(1))
    assert computed(log).count("cell-0") == begun


def test_no_more_programs_of_a_study_are_computed_at_once_than_fit_together(tmp_path, threads):
    plan = replace(toy(), at_once=1)
    waiting = [(program, 1) for program in _programs_of(plan, plan.cells)]
    assert executors._take(waiting, 1, beside=True) is None
    assert executors._take(waiting, 0, beside=True) is not None
    assert len(waiting) == 1
    perform(plan, tmp_path / "one", Processes(2))
    perform(toy(), tmp_path / "two")
    assert same_files(tmp_path / "one", tmp_path / "two")


@pytest.fixture
def begun(threads):
    """Every worker that is begun."""
    found, worker = [], executors._Worker
    threads.setattr(executors, "_Worker", lambda *args: found.append(worker(*args)) or found[-1])
    return found


def test_who_computed_what_takes_much_memory_makes_place_before_it_computes_another_study(begun):
    much = replace(toy(), study="much", at_once=1)
    plans = [much, toy()]
    programs = [one for plan in plans for one in _programs_of(plan, plan.cells)]
    results = list(Processes(1).execute(programs, lambda what, done: None))
    assert [one.study for one in results] == ["much"] * 6 + ["toy"] * 6
    assert [worker.programs for worker in begun] == [2, 2]


def test_where_a_gpu_is_full_fewer_go_on(tmp_path, begun):
    log = tmp_path / "log"
    perform(toy(log, trouble={"cell-0": ("full", 2)}), tmp_path / "toy", Processes(3))
    assert computed(log).count("cell-0") == 3
    # The first has had no other program: it ends. The second makes place for a third.
    assert len(begun) == 3


def test_a_worker_that_always_dies_is_given_up_in_a_sentence(tmp_path, threads):
    threads.setattr(executors, "_work", lambda connection, number, plans: connection.end.close())
    with pytest.raises(InputError, match="cell cell-0 died 2 times.*fewer --processes"):
        perform(toy(), tmp_path / "toy", Processes(1))


def test_no_worker_waits_while_the_first_process_saves_or_concludes(tmp_path, threads):
    log = tmp_path / "log"
    plan = toy(log)
    results = Processes(1).execute(_programs_of(plan, plan.cells), lambda what, done: None)
    next(results)
    deadline = time.monotonic() + 60
    while len(computed(log)) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    results.close()


def test_one_worker_of_three_begins_with_what_is_computed_beside_a_gpu():
    def plan(name: str, on_processor: bool) -> Plan:
        return Plan(name, toy().cells[:1], toy().compute, toy().conclude, {}, on_processor)

    cells = (replace(toy().cells[0], on_processor=True),)
    plans = [plan("long", False), plan("short", False), plan("beside", True)]
    plans.append(replace(plan("cell", False), cells=cells))
    waiting = [(one, 1) for plan in plans for one in _programs_of(plan, plan.cells)]
    taken = [
        executors._take(waiting, 0, beside=beside)[0].plan.study
        for beside in (True, False, True, True)
    ]
    assert taken == ["beside", "long", "cell", "short"]


FIRST = """
import sys
from pathlib import Path
from apportion.studies.engine import CellStore, perform_plans
from apportion.studies.executors import Processes
from studies.toys import toy

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    plan = toy(folder / "log", trouble={"cell-0": ("wait", 9)})
    list(perform_plans([CellStore(plan, folder / "toy")], Processes(1)))
"""


def test_processes_end_with_the_first_when_it_is_killed(tmp_path):
    (tmp_path / "first.py").write_text(FIRST)
    tests = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    first = subprocess.Popen(
        [sys.executable, tmp_path / "first.py", tmp_path],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": tests},
    )
    while not (tmp_path / "log").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.1)
    first.kill()
    # The pipe is closed by the last process that holds it.
    first.communicate(timeout=60)


@pytest.mark.slow
def test_compiled_programs_give_the_same_rows_in_several_processes(tmp_path):
    for name, executor in (("one", Serial()), ("two", Processes(2))):
        assert perform(make_plan("equivariance"), tmp_path / name, executor).name == "equivariance"
    assert same_files(tmp_path / "one", tmp_path / "two")
