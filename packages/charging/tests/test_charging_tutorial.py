"""Run every command and block of the tutorial, from an export to a running controller."""

import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from cli.command import apportion

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "charging.md"
BLOCK = re.compile(r"^```(python|py|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = shlex.split("--steps 2 --days 2 --tasks 2 --hidden 8 --chunk 2 --recall=false")


@contextmanager
def served(words: list[str]):
    """Run `apportion serve` until the rest of the page is done; a signal then ends it cleanly."""
    given = [sys.executable, "-m", "apportion", *words]
    with subprocess.Popen(given, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = ""
        while "charge points connect" not in said:
            assert process.poll() is None, said
            said += process.stderr.readline()
        yield
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, process.stderr.read()


def follow(page: str) -> None:
    """Run the commands and blocks of the page in order, in the current folder."""
    names = {"__name__": "page"}
    with ExitStack() as until_the_end:
        for kind, text in BLOCK.findall(page):
            if kind != "bash":
                exec(compile(text, str(PAGE), "exec"), names)
                continue
            for line in text.replace("\\\n", " ").splitlines():
                command, _, refused = line.partition("# refused: ")
                _, *words = shlex.split(command)
                if words[0] == "serve":
                    until_the_end.enter_context(served(words))
                    continue
                done = apportion(*words, *(SHORT if words[0] == "train" else ()))
                assert done.returncode == (2 if refused else 0), (line, done.stderr)
                assert refused in done.stderr, (line, done.stderr)


def test_a_companys_export_is_read_as_the_tutorial_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    follow(page[: page.index("## Train and test")])
    assert (tmp_path / "site.toml").exists()


@pytest.mark.slow
def test_every_command_of_the_tutorial_works(tmp_path, monkeypatch):
    pytest.importorskip("uvicorn")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("APPORTION_TOKEN", raising=False)
    page = PAGE.read_text(encoding="utf-8")
    for port in ("8080", "9000"):
        with socket.create_server(("127.0.0.1", 0)) as free:
            page = page.replace(port, str(free.getsockname()[1]))
    follow(page.replace("localhost", "127.0.0.1"))
    for kept in ("state.json", "served.json", "runs/garage/certificate.json"):
        assert (tmp_path / kept).exists()
