import io
import sys

from apportion.runs.progress import TrainingStatus, _Lines, open_progress


def _status(step: int) -> TrainingStatus:
    return TrainingStatus(step, 100, 0.25, 0.02)


def test_plain_lines_go_to_standard_error_and_not_too_often(capsys):
    lines = _Lines(seconds=3600.0)
    for step in range(10, 101, 10):
        lines.training(_status(step))
    lines.note("a note")
    # Compiling takes long and says nothing else: it is shown right after a note.
    lines.stage("compiling")
    lines.stage("testing", 0.5)
    out, err = capsys.readouterr()
    assert out == ""
    first, last, note, compiling = err.splitlines()
    assert compiling == "compiling"
    assert "step 10 of 100" in first
    assert "step 100 of 100" in last
    assert note == "a note"


def test_a_terminal_shows_one_line_redrawn_in_place_and_keeps_notes(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    with open_progress() as progress:
        assert isinstance(progress, _Lines)
        progress.seconds = 0.0
        progress.training(_status(10), "first")
        progress.training(_status(20), "first")
        progress.training(_status(100), "second")
        progress.stage("testing", 0.25)
        progress.note("a note")
    _, first, second, last, stage, note, rest = terminal.getvalue().split("\r\x1b[K")
    assert first == "first: step 10 of 100, reward 0.25, fro"
    assert "steps/s" in second
    # The speed is that of the title; the last line is never cut.
    assert last == "second: step 100 of 100, reward 0.25, from equal 0.02\n"
    assert stage == "testing (25%)"
    assert (note, rest) == ("a note\n", "")
