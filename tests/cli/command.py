"""Call the command line in the process of the tests, and check its output."""

import json
import os
import subprocess
import tempfile
from contextlib import redirect_stderr, redirect_stdout

import pytest

from apportion.cli import main

Done = subprocess.CompletedProcess[str]


def apportion(*arguments: object) -> Done:
    """Run a command in this process, which has started JAX and compiled programs already.

    Standard output and standard error are caught at the file descriptors, where `main` switches them.
    """
    kept = [os.dup(stream) for stream in (1, 2)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            with redirect_stdout(out), redirect_stderr(err):
                code = _exit_code(arguments)
        finally:
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
        texts = [_whole(file) for file in (out, err)]
    return subprocess.CompletedProcess(list(map(str, arguments)), code, *texts)


def _exit_code(arguments: tuple[object, ...]) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(map(str, arguments)))
    assert isinstance(left.value.code, int)
    return left.value.code


def _whole(file) -> str:
    file.flush()
    file.seek(0)
    return file.read()


def one_object(done: Done) -> dict:
    """Return the JSON object on standard output; it must be the only output."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    content = json.loads(done.stdout)
    assert isinstance(content, dict)
    return content


def assert_refused(done: Done, *words: str) -> None:
    """Check for exit code 2, no standard output, and one line with the words on standard error."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    for word in words:
        assert word in done.stderr
