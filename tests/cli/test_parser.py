"""What the parser makes of arguments: settings, help, and one sentence for each mistake."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

import apportion.runs.runner
from apportion.cli import COMMANDS, main
from apportion.runs.registry import JOBS, settings_of
from apportion.runs.settings import describe_fields


def run(arguments: list[str], capfd) -> tuple[int, str, str]:
    """The command line in this process, for speed: the same `main`, down to the file descriptors."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    out, err = capfd.readouterr()
    return left.value.code, out, err


@pytest.fixture
def settings_given(monkeypatch, capfd):
    """A function from arguments of `train` to the folder and the settings that training gets."""
    calls = []
    monkeypatch.setattr(apportion.runs.runner, "start_run", lambda *given, **_: calls.append(given))

    def parse(*arguments: str):
        code, _, err = run(["train", *arguments, "--quiet"], capfd)
        assert code == 0, err
        folder, _, settings, _ = calls.pop()
        return folder, settings

    return parse


CONFIG = """
job = "federated"
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
        assert (settings.seed, settings.clients) == (6, (31, -1))
        assert (settings.task_sizes, settings.gamma, settings.learning_rate) == ((1, 2), 1, 0.003)
        assert settings.mnist == Path("/a folder/x=y.npz")
        assert settings.rounds == settings_of("federated")().rounds


def test_numbers_may_be_negative_and_in_scientific_notation(settings_given):
    _, settings = settings_given("budget", "--out", "x", "--beta", "-2.5", "--alpha=-1e-3")
    assert (settings.beta, settings.alpha) == (-2.5, -0.001)


@pytest.mark.parametrize("job", JOBS)
def test_help_shows_every_setting_with_its_description_default_and_choices(job, capfd):
    code, out, err = run(["train", job, "--help"], capfd)
    assert (code, err) == (0, "")
    text = " ".join(re.sub("[│─╭╮╰╯`]", " ", out).split())
    kind = settings_of(job)
    hints, descriptions = get_type_hints(kind), describe_fields(kind)
    for field in fields(kind):
        assert f"--{field.name.replace('_', '-')} " in text
        assert descriptions[field.name].replace("`", "") in text
        if field.default is not None:
            assert f"[default: {field.default}]" in text
        if get_origin(hints[field.name]) is Literal:
            assert f"[choices: {', '.join(get_args(hints[field.name]))}]" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capfd):
    code, out, err = run([command, "--help"], capfd)
    assert (code, err) == (0, "")
    assert f"Usage: apportion {command}" in out
    assert f"apportion {command} " in " ".join(out.split()).partition("xample:")[2]
    assert command in run([], capfd)[1]


def test_the_version_is_printed(capfd):
    assert re.fullmatch(r"apportion \d+\.\d+.*\n", run(["--version"], capfd)[1])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["train", "budget"],
            "train budget: --out DIR is missing; see apportion train budget --help",
        ),
        (["train", "budget", "--outt=x"], "there is no option --outt; did you mean --out?"),
        (["train", "budget", "--out"], "--out needs a value"),
        (
            ["train", "budget", "--out", "x", "--zz", "1"],
            "no option --zz; see apportion train budget",
        ),
        (["train", "budget", "--out", "x", "--seed", "2.5"], "--seed is '2.5'; it must be a whole"),
        (["train", "budget", "--out", "x", "--noise", "a"], "--noise is 'a'; it must be a number"),
        (["train", "budget", "--out", "x", "--seed", "1", "--seed", "2"], "--seed is given twice"),
        (["train", "federated", "--out", "x", "--clients", "3"], "--clients needs 2 values"),
        (["study"], "NAME is missing; choose fig1"),
        (["allocate", "a", "b"], "'b' is one argument too many"),
        (["check", "--json=x"], "--json is 'x'; it must be true or false"),
        (["nonsense"], "choose demo, train, resume"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_described_in_one_sentence(arguments, sentence, capfd):
    code, out, err = run(arguments, capfd)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert sentence in err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('sed = "a"', "no setting is called 'sed'; did you mean seed?"),
        ('seed = "a"', "seed is 'a'; it must be of type int"),
        ('method = "ptml"', "method is 'ptml'; it is one of pmtl, mtl, stl; did you mean pmtl?"),
        ('job = "federated"', "these are settings of 'federated', not of 'budget'"),
        ("seed = ", "not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_of_settings_names_the_file(content, sentence, tmp_path, capfd):
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    code, out, err = run(["train", "budget", "--out", "x", "--config", str(file)], capfd)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert f"{file}: " in err
    assert sentence in err


def test_the_first_help_page_starts_no_parser():
    check = (
        "import sys, apportion.cli\n"
        "try:\n    apportion.cli.main(['--help'])\n"
        "finally:\n    assert 'cyclopts' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"usage:")


def test_a_reader_that_leaves_early_is_no_bug():
    command = f"{sys.executable} -m apportion train portfolio --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("Usage:")
    assert done.stderr == ""
