"""Arguments of the command line: settings, help, and one sentence for each mistake."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import apportion.runs.runner
from apportion.cli import COMMANDS
from apportion.domains.domain import domain_names, find_domain
from apportion.runs.settings import _describe_fields
from cli.command import apportion as run


@pytest.fixture
def settings_given(monkeypatch):
    """A function from arguments of `train` to the folder and the settings that training gets."""
    calls = []
    monkeypatch.setattr(apportion.runs.runner, "start_run", lambda *given, **_: calls.append(given))

    def parse(name: str, *arguments: str):
        monkeypatch.setattr(type(find_domain(name)), "prepare", lambda *_: None)
        done = run("train", name, *arguments, "--quiet")
        assert done.returncode == 0, done.stderr
        folder, _, settings, *_ = calls.pop()
        return folder, settings

    return parse


CONFIG = """
job = "federated"
learner = "ppo"
clients = [30, 40]
task-sizes = [1, 2]
gamma = 1
learning_rate = 0.003
images = "/a folder/x=y.npz"
seed = 5
"""


def test_the_command_line_goes_before_the_file_and_the_file_before_the_defaults(
    settings_given, tmp_path
):
    file = tmp_path / "my settings.toml"
    file.write_text(CONFIG)
    out = tmp_path / "a run"
    for config in (["--config", str(file)], [f"--config={file}"]):
        folder, settings = settings_given(
            "federated", *config, "--out", str(out), "--seed=6", "--clients", "31", "-1"
        )
        assert folder == out
        assert isinstance(settings, find_domain("federated").variants["ppo"])
        assert (settings.seed, settings.clients) == (6, (31, -1))
        assert (settings.task_sizes, settings.gamma, settings.learning_rate) == ((1, 2), 1, 0.003)
        assert settings.images == Path("/a folder/x=y.npz")
        assert settings.rounds == type(settings)().rounds
    _, settings = settings_given("budget", "--out", "x", "--beta", "-2.5", "--alpha=-1e-3")
    assert (settings.beta, settings.alpha) == (-2.5, -0.001)


def every_settings() -> list:
    found = []
    for name in domain_names():
        domain = find_domain(name)
        for learner, kind in (domain.variants or {"": domain.settings}).items():
            found.append(pytest.param(name, learner, kind, id=f"{name} {learner}"))
    return found


@pytest.mark.parametrize(("name", "learner", "kind"), every_settings())
def test_help_shows_every_setting_with_its_description_default_and_choices(
    name, learner, kind, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    done = run("train", name, *(["--learner", learner] if learner else []), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(re.sub("[│─╭╮╰╯`]", " ", done.stdout).split())
    hints, descriptions = get_type_hints(kind), _describe_fields(kind)
    for field in fields(kind):
        assert f"--{field.name.replace('_', '-')} " in text
        assert descriptions[field.name].replace("`", "") in text
        if field.default is not None:
            assert f"[default: {field.default}]" in text
        if get_origin(hints[field.name]) is Literal:
            assert f"[choices: {', '.join(get_args(hints[field.name]))}]" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command):
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: apportion {command}" in done.stdout
    assert f"apportion {command} " in " ".join(done.stdout.split()).partition("xample:")[2]


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"demo", "check"}))
def test_a_command_without_arguments_shows_its_help_or_names_what_is_missing(command):
    done = run(command)
    if command == "train":
        assert done.stdout.startswith("Usage: apportion train COMMAND")
    else:
        assert f"requires an argument; see apportion {command} --help" in done.stderr


# Slow imports, which help and `check` do not need.
GUARD = """
import sys, apportion.cli
slow = {"jax", "equinox", "optax", "pandas", "scipy", "matplotlib", "sklearn", "skfolio", "flwr", "ray"}
slow |= {"plotly"}
for arguments in sys.argv[1:]:
    try:
        apportion.cli.main(arguments.split())
    except SystemExit as left:
        assert left.code == 0, arguments
    never = slow | ({"cyclopts"} if arguments[:2] == "--" else set())
    assert not never & sys.modules.keys(), (arguments, never & sys.modules.keys())
"""


def test_check_and_help_start_nothing_that_is_slow_to_start():
    asked = ("--help", "--version", "train portfolio --help", "backtest --help", "study --help")
    command = [sys.executable, "-c", GUARD, *asked, "check --json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^apportion \d+\.\d+", done.stdout, re.MULTILINE)
    for name, purpose in COMMANDS.items():
        assert f"  {name:12} {purpose}\n" in done.stdout


def test_a_reader_that_leaves_early_is_no_bug():
    command = f"{sys.executable} -m apportion train portfolio --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Usage:")
    assert done.stderr == ""


posix = pytest.mark.skipif(sys.platform == "win32", reason="asked of a shell of POSIX")


def shell(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command line given to a shell; `$A` is the program."""
    environment = os.environ | {"A": f"{sys.executable} -m apportion"}
    command = ["bash", "-c", script, "bash", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=environment
    )


@posix
def test_a_closed_standard_output_is_said_and_a_closed_standard_error_is_no_bug():
    done = shell("$A --help >&-")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("apportion: standard output is closed;")
    done = shell("$A --version 2>&-")
    assert done.returncode == 0
    assert done.stdout.startswith("apportion ")


@posix
def test_an_end_from_outside_says_one_sentence():
    script = """
import os, signal
from apportion import cli
cli._run = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
cli.main()
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == "apportion: stopped at once, nothing more was saved\n"


@posix
def test_a_pipe_is_refused_in_words(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for command in ("check --prices", "train budget --out never --config"):
        done = run(*command.split(), pipe)
        assert done.returncode == 2
        assert done.stderr.startswith(f"apportion: {pipe}: is a pipe or a device"), done.stderr


@posix
def test_names_and_links_that_no_disk_takes_get_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    commands = (
        f"train budget --out {'n' * 300}",
        "report loop",
        "train budget --out loop",
        "check --prices loop",
        "backtest loop",
    )
    answers = {command: run(*command.split()) for command in commands}
    # A limit on what is written holds for a whole process, and would leave the programs that the tests
    # keep half written.
    alone = "JAX_ENABLE_COMPILATION_CACHE=false"
    limited = f"ulimit -f 0; {alone} $A train budget --steps 2 --out limited"
    for asked, done in (answers | {limited: shell(limited)}).items():
        assert done.returncode == 2, (asked, done.stderr)
        lines = [line for line in done.stderr.splitlines() if line.startswith("apportion: ")]
        assert len(lines) == 1, (asked, done.stderr)
        assert "Traceback" not in done.stderr, asked
