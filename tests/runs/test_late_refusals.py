"""What goes wrong after a folder was made leaves nothing half done behind."""

import errno
import json
import os
import tempfile

import pytest

import apportion.runs.runner as runner
from apportion.cli import main
from apportion.domains.budget.settings import BudgetSettings
from apportion.errors import InputError
from apportion.runs.files import require_free, require_writable
from apportion.runs.progress import open_progress
from apportion.runs.runner import PreparedJob, Stopped, start_run


def started(folder, monkeypatch, error: Exception) -> None:
    """Start a run whose training ends with this error at once."""

    def train(on_chunk, resume):
        raise error

    monkeypatch.setattr(runner, "prepare", lambda *_: PreparedJob({}, train))
    with open_progress(quiet=True) as progress, pytest.raises(type(error)):
        start_run(folder, "budget", BudgetSettings(), progress)


def test_settings_that_are_refused_late_leave_no_folder(tmp_path, monkeypatch):
    started(tmp_path / "new", monkeypatch, InputError("too late"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "there").mkdir()
    started(tmp_path / "there", monkeypatch, InputError("too late"))
    assert list((tmp_path / "there").iterdir()) == []


def test_a_run_that_was_stopped_or_broke_keeps_its_folder(tmp_path, monkeypatch):
    for name, error in (("stopped", Stopped("later")), ("broken", RuntimeError("a bug"))):
        started(tmp_path / name, monkeypatch, error)
        assert (tmp_path / name / "settings.toml").exists()


def test_a_full_disk_is_said_in_a_sentence_and_leaves_no_part_of_a_file(
    tmp_path, monkeypatch, capfd
):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit) as left:
        main(["train", "budget", "--out", str(tmp_path / "run"), "--quiet"])
    out, err = capfd.readouterr()
    assert (left.value.code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "No space left on device; make room" in err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_disk_that_is_full_later_keeps_every_file_whole(tmp_path, monkeypatch, capfd):
    sync, calls = os.fsync, []

    def full_after_some(handle):
        calls.append(handle)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", full_after_some)
    small = "--steps 40 --chunk 2 --universe 6 --held-out 2 --task-size 2 --tasks 2 --hidden 4"
    with pytest.raises(SystemExit) as left:
        main(["train", "budget", "--out", str(tmp_path / "run"), "--quiet", *small.split()])
    assert left.value.code == 2
    assert "apportion resume" in capfd.readouterr().err
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["data"]
    assert not list(tmp_path.rglob("*.part"))
    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(SystemExit) as left:
        main(["resume", str(tmp_path / "run"), "--quiet"])
    assert left.value.code == 0


def test_folders_that_cannot_be_written_are_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is a file; choose a folder that can be made"):
        require_writable(tmp_path / "file" / "deep" / "run")

    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(InputError, match="cannot be written to"):
        require_free(tmp_path / "run")
    monkeypatch.setattr(runner, "prepare", lambda *_: pytest.fail("work was begun"))
    with open_progress(quiet=True) as progress, pytest.raises(InputError, match="be written to"):
        start_run(tmp_path / "run", "budget", BudgetSettings(), progress)


def test_an_empty_folder_and_hidden_files_are_room_enough(tmp_path):
    (tmp_path / ".gitkeep").touch()
    require_free(tmp_path)
