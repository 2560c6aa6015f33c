import io
import re
import sys

import pytest

from apportion.runs.progress import (
    Quiet,
    TrainingStatus,
    _collapse_warning,
    _Lines,
    _Live,
    open_progress,
)


def _status(step: int, warning: str = "") -> TrainingStatus:
    return TrainingStatus(step, 100, 0.25, 0.02, ("3 (40%)", "1 (20%)"), warning)


@pytest.mark.parametrize(
    ("deviation", "width", "done", "words"),
    [
        (0.0, 10, 0.5, "equal shares"),
        (0.0, 10, 0.05, ""),
        (0.2, 10, 0.5, ""),
        (0.899, 10, 0.01, "one entity"),
        (0.0, 1, 0.9, ""),
    ],
)
def test_a_collapsed_policy_is_warned_of(deviation, width, done, words):
    warning = _collapse_warning(deviation, width, done)
    assert words in warning
    assert bool(warning) == bool(words)


def test_plain_lines_go_to_standard_error_and_not_too_often(capsys):
    lines = _Lines(seconds=3600.0)
    for step in range(10, 101, 10):
        lines.training(_status(step, "" if step < 50 else "it collapsed"))
    lines.note("a note")
    out, err = capsys.readouterr()
    assert out == ""
    first, warned, last, note = err.splitlines()
    assert "step 10 of 100" in first
    assert "step 50 of 100" in warned
    assert "it collapsed" in warned
    assert "step 100 of 100" in last
    assert note == "a note"


def test_quiet_says_nothing(capsys):
    with open_progress(quiet=True) as progress:
        progress.training(_status(1))
        progress.stage("words", 0.5)
        progress.note("words")
    assert isinstance(progress, Quiet)
    assert capsys.readouterr() == ("", "")


def _terminal(monkeypatch) -> io.StringIO:
    """Make standard error a terminal."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    return terminal


def test_the_live_display_shows_speed_and_time_left_from_the_second_chunk_on(monkeypatch):
    _terminal(monkeypatch)
    with open_progress() as progress:
        assert isinstance(progress, _Live)
        progress.training(_status(10, "it collapsed"), "P-MTL [bold]")
        for part in ("step 10 of 100", "0.25", "3 (40%)", "it collapsed", "P-MTL [bold]"):
            assert part in _drawn(progress)
        assert "steps/s" not in _drawn(progress)
        progress.training(_status(10), "first")
        progress.training(_status(20), "first")
        assert "steps/s" in _drawn(progress)
        assert re.search(r"\d+:\d\d", _drawn(progress))
        progress.training(_status(10), "second")
        assert "steps/s" not in _drawn(progress)
        assert "step 10 of 100" in _drawn(progress)
        # A stage shows its fraction, and drops the numbers of training.
        progress.stage("testing", 0.25)
        assert "testing" in _drawn(progress)
        assert "25%" in _drawn(progress)
        assert "reward" not in _drawn(progress)
        progress.stage("saving")
        assert "25%" not in _drawn(progress)


def _drawn(progress: _Live) -> str:
    """The display without colours."""
    with progress._console.capture() as capture:
        progress._console.print(progress._live.renderable)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capture.get())
