"""A job in a folder: failures leave nothing half done, one process writes, signals stop it."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from apportion.cli import main
from apportion.domains.budget.settings import BudgetSettings
from apportion.errors import InputError
from apportion.runs import runner
from apportion.runs.files import only_writer
from apportion.runs.folder import load_run
from apportion.runs.progress import Quiet, _Lines
from apportion.runs.runner import JobResult, PreparedJob, Stopped, start_run
from apportion.runs.signals import stoppable

SETTINGS = BudgetSettings()


def start(folder: Path, train: Callable[..., JobResult]) -> JobResult:
    return start_run(folder, "budget", SETTINGS, PreparedJob({}, train), Quiet())


def raising(error: BaseException) -> Callable[..., JobResult]:
    def train(on_chunk, resume):
        raise error

    return train


def test_settings_that_are_refused_late_leave_no_folder(tmp_path):
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        with pytest.raises(InputError, match="too late"):
            start(tmp_path / name, raising(InputError("too late")))
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "there").iterdir()) == []


def test_a_run_that_was_stopped_or_broke_keeps_its_folder(tmp_path):
    for name, error in (("stopped", Stopped("later")), ("broken", RuntimeError("a bug"))):
        with pytest.raises(type(error)):
            start(tmp_path / name, raising(error))
        assert (tmp_path / name / "settings.toml").exists()


def test_the_tests_after_training_show_their_progress(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runner, "_REPORT_SECONDS", 0.01)

    def train(recorder, resume):
        recorder.trained = time.monotonic()
        time.sleep(0.1)
        raise Stopped("enough")

    with pytest.raises(Stopped):
        start_run(tmp_path / "run", "budget", SETTINGS, PreparedJob({}, train), _Lines(0.0))
    assert "testing the policy for 0 s" in capsys.readouterr().err


def test_who_is_refused_leaves_the_folder_of_the_other_alone(tmp_path):
    """Before the first checkpoint too, when a run that is refused is taken back."""
    with only_writer(tmp_path):
        (tmp_path / "environment.json").write_text("{}")
        with pytest.raises(InputError, match="another process is writing in it"):
            start(tmp_path, raising(AssertionError("work was begun")))
        assert (tmp_path / "environment.json").read_text() == "{}"


def test_what_was_killed_before_its_settings_is_begun_again(tmp_path):
    with only_writer(tmp_path / "run"):
        (tmp_path / "run" / "environment.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "run", raising(KeyboardInterrupt()))
    assert load_run(tmp_path / "run").job == "budget"
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "environment.json").write_text("{}")
    with pytest.raises(InputError, match=r"contains other files, such as environment\.json"):
        start(tmp_path / "others", raising(AssertionError("work was begun")))


SMALL = "--steps 40 --chunk 2 --universe 6 --held-out 2 --task-size 2 --tasks 2 --hidden 4"


@pytest.mark.parametrize("room", [0, 12])
def test_a_full_disk_is_said_in_a_sentence_and_keeps_every_file_whole(
    room, tmp_path, monkeypatch, capfd
):
    sync, calls = os.fsync, []

    def full_after_some(handle):
        calls.append(handle)
        if len(calls) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    def command(*words):
        with pytest.raises(SystemExit) as left:
            main([*words, "--quiet"])
        return left.value.code, *capfd.readouterr()

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_after_some)
        code, out, err = command("train", "budget", "--out", str(folder), *SMALL.split())
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "No space left on device; free some space" in err
    assert "apportion resume" in err
    assert not list(tmp_path.rglob("*.part"))
    if not room:
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        return
    assert json.loads((folder / "environment.json").read_text())["data"]
    saved = load_run(folder).newest_checkpoint()
    assert saved is not None
    assert saved[0] == 2


# One call of hours that comes back to Python at its end alone, as compiled programs do.
ENDLESS = """
import hashlib
from apportion.runs.signals import stoppable

def endless():
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

stoppable(endless)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_compiled_work_at_once(number):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    # Well into the call.
    time.sleep(0.2)
    os.kill(process.pid, number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors == "apportion: stopped at once; there was nothing to save\n"


def test_what_work_returns_raises_and_warns_comes_through():
    before = signal.getsignal(signal.SIGINT)
    assert stoppable(lambda: "done") == "done"
    with pytest.raises(ZeroDivisionError):
        stoppable(lambda: 1 / 0)
    with pytest.warns(UserWarning, match="careful"):
        stoppable(lambda: warnings.warn("careful", stacklevel=1))
    assert signal.getsignal(signal.SIGINT) is before
