"""What the parser makes of arguments: settings, help, and one sentence for each mistake."""

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
from apportion.runs.settings import describe_fields
from cli.command import apportion as run
from cli.command import assert_refused


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
mnist = "/a folder/x=y.npz"
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
        assert settings.mnist == Path("/a folder/x=y.npz")
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
    hints, descriptions = get_type_hints(kind), describe_fields(kind)
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
    assert command in run().stdout
    assert re.fullmatch(r"apportion \d+\.\d+.*\n", run("--version").stdout)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("trian", "did you mean train?"),
        ("nonsense", "choose demo, train, resume"),
        ("train portfoli", "did you mean portfolio?"),
        ("train budget", "train budget: --out DIR is missing; see apportion train budget --help"),
        ("train budget --outt=x", "there is no option --outt; did you mean --out?"),
        ("train budget --out", "--out needs a value"),
        ("train budget --out x --zz 1", "no option --zz; see apportion train budget"),
        ("train budget --out x --noise a", "--noise is 'a'; it must be a number"),
        ("train federated --learner ppo --out x --clients 3", "--clients needs 2 values"),
    ],
)
def test_a_mistake_is_described_in_one_sentence(arguments, sentence):
    assert_refused(run(*arguments.split()), sentence)


# What a question about the command line or a file need not wait for: each takes longer than the answer.
SLOW_TO_START = (
    *("jax", "equinox", "optax", "pandas", "scipy", "matplotlib"),
    *("sklearn", "skfolio", "flwr", "ray"),
)


@pytest.mark.parametrize(
    ("arguments", "never"),
    [
        ("--help", (*SLOW_TO_START, "cyclopts")),
        ("train portfolio --help", SLOW_TO_START),
        ("backtest --help", SLOW_TO_START),
        ("study --help", SLOW_TO_START),
        ("check --json", SLOW_TO_START),
    ],
)
def test_check_and_help_start_nothing_that_is_slow_to_start(arguments, never):
    guard = (
        "import sys, apportion.cli\n"
        "try:\n    apportion.cli.main(sys.argv[1:])\n"
        f"finally:\n    assert not set({never}) & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", guard, *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_reader_that_leaves_early_is_no_bug():
    command = f"{sys.executable} -m apportion train portfolio --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Usage:")
    assert done.stderr == ""
