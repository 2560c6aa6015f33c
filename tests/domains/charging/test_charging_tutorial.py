"""The tutorial, from a company's export to a running controller: every command and block in order."""

import re
import shlex
from pathlib import Path

import pytest

from cli.command import apportion

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "charging.md"
BLOCK = re.compile(r"^```(python|py|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = [
    "--steps",
    "2",
    "--days",
    "2",
    "--tasks",
    "2",
    "--hidden",
    "8",
    "--chunk",
    "2",
    "--no-recall",
]


@pytest.mark.slow
def test_every_command_of_the_tutorial_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for kind, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if kind != "bash":
            exec(compile(text, str(PAGE), "exec"), names)
            continue
        for line in text.splitlines():
            _, *words = shlex.split(line, comments=True)
            done = apportion(*words, *(SHORT if words[0] == "train" else ()))
            assert done.returncode == (2 if "# refused" in line else 0), (line, done.stderr)
    assert (tmp_path / "state.json").exists()
    refused = apportion("check", "--sessions", "export.csv").stderr
    assert 'separated by ";"' in refused
    assert 'sep=";", decimal=","' in refused
