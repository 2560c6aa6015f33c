"""A package outside apportion adds a domain and a study; every command works with them."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pandas as pd
import pytest

import apportion.cli.commands as commands
from apportion.domains import domain as registry
from apportion.runs.files import SUMS
from apportion.runs.plugins import DOMAINS, policy_packages
from apportion.runs.progress import Quiet
from cli.command import apportion, assert_refused, one_object
from plugins import EXAMPLE, example_entry_points, installed

SOURCE = Path(commands.__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def toy(tmp_path_factory):
    folder, groups = tmp_path_factory.mktemp("site"), example_entry_points()
    groups[DOMAINS]["toy"] = "cli.toy_domain:DOMAIN"
    with installed(folder, groups, EXAMPLE):
        yield registry.find_domain("toy")


def test_the_example_is_short_and_gets_every_command_from_the_library(tmp_path):
    assert sum(len(file.read_text().splitlines()) for file in EXAMPLE.rglob("*.py")) <= 120
    assert "irrigation" in policy_packages()
    run, cut = tmp_path / "run", tmp_path / "cut"
    options = ("--steps", 100, "--chunk", 50, "--quiet")
    results = one_object(apportion("train", "irrigation", "--out", run, *options, "--json"))[
        "results"
    ]
    assert set(results) == {"policy", "equal shares"}
    tested = one_object(apportion("backtest", run, "--seed", 3, "--out", cut, "--json"))
    assert set(tested) == {"policy", "equal shares"}
    assert len(pd.read_csv(cut / "table.csv")) == 30
    # As if it had been stopped before its last save.
    (run / "results.json").unlink()
    assert apportion("resume", run).returncode == 0
    apportion("report", run)
    assert "irrigation" in (run / "report.html").read_text()


def test_the_study_of_the_example_is_computed_resumed_and_judged(tmp_path):
    out = tmp_path / "study"
    done = one_object(apportion("study", "irrigation", "--out", out, "--quiet", "--json"))
    [verdict] = done["studies"]["irrigation"]
    assert verdict["holds"]
    assert verdict["n"] == 4
    for file in ("table.csv", "figure.png", "verdict.json", "rows.parquet", "report.html"):
        assert (out / file).exists()
    versions = json.loads((out / "study.json").read_text())["versions"]
    assert versions["toy-package"] == "1.0"
    assert {"apportion", "apportion-studies", "apportion-charging"} < set(versions)
    assert apportion("study", "irrigation", "--out", out, "--draw", "--quiet").returncode == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("runs") / "toy"
    learner = ("--learner", "careful", "--care", "0.25")
    return folder, one_object(apportion("train", "toy", "--out", folder, "--json", *learner))


def test_no_domain_is_named_where_domains_are_asked():
    domains = ("budget", "charging", "federated", "portfolio")
    for room, names in (("cli", domains), ("report", ("toy", *domains[1:]))):
        for file in (SOURCE / room).glob("*.py"):
            assert not re.search("|".join(names), file.read_text()), file


def test_it_is_trained_with_the_settings_of_its_learner(trained):
    folder, printed = trained
    assert printed["folder"] == str(folder)
    assert set(printed["results"]) == {"policy", "equal shares"}
    assert "care = 0.25" in (folder / "settings.toml").read_text()
    assert len(pd.read_parquet(folder / "metrics.parquet")) == 6
    command = ("train", "toy", "--out", "x")
    assert_refused(apportion(*command, "--care", "0.2"), "no option --care")
    assert_refused(apportion(*command, "--learner", "carefl"), "did you mean careful?")
    assert_refused(apportion(*command, "--toys", "no.csv"), "no.csv: no such file")
    assert not Path("x").exists()


def test_ctrl_c_saves_and_its_settings_run_it_again_to_the_same_bits(
    trained, tmp_path, monkeypatch
):
    folder, _ = trained
    again = tmp_path / "again"
    given = ("train", "toy", "--config", folder / "settings.toml", "--out", again, "--quiet")
    with monkeypatch.context() as patch:
        patch.setattr(Quiet, "training", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        assert_refused(apportion(*given), "after step 3 of 6; all is saved", f"resume {again}")
    assert len(pd.read_parquet(again / "metrics.parquet")) == 3
    resumed = apportion("resume", again)
    assert resumed.stdout.endswith(f"wrote {again}\n"), resumed.stderr
    for words in ("continuing after step 3", "step 6 of 6"):
        assert words in resumed.stderr
    last = "checkpoints/step-000000006.safetensors"
    for file in ("policy.safetensors", "settings.toml", "results.json", last):
        assert (again / file).read_bytes() == (folder / file).read_bytes()
    assert "is already finished" in apportion("resume", again).stdout


def test_it_is_backtested_with_its_own_options_alone(trained, tmp_path):
    folder, _ = trained
    given = ("backtest", folder, "--friends", "Ann", "Cy", "--out", tmp_path / "out")
    done = apportion(*given, "--json")
    assert one_object(done) == {"Ann": 0.5, "Cy": 0.5}
    assert "backtest: toys (50%)" in done.stderr
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == one_object(done)
    assert list(pd.read_csv(tmp_path / "out" / "table.csv")) == ["Ann", "Cy"]
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert apportion("backtest", folder).stdout == "share: Ann 0.5, Bob 0.5\n"
    assert_refused(apportion(*given), "out: contains other files")
    assert_refused(apportion("backtest", folder, "--toys", "no.csv"), "no.csv: no such file")
    assert_refused(apportion("backtest", folder, "--fiends", "A"), "did you mean --friends?")


def test_it_allocates_and_writes_what_it_allocated(trained, tmp_path):
    folder, _ = trained
    table, plain = tmp_path / "a.csv", tmp_path / "a.json"
    assert apportion("allocate", folder, "--out", table).stdout.endswith(f"wrote {table}\n")
    assert pd.read_csv(table).to_numpy().sum() == 1
    result = one_object(apportion("allocate", folder, "--out", plain, "--json"))
    assert json.loads(plain.read_text()) == result
    toys = tmp_path / "toys.csv"
    toys.write_text("ball\n")
    for out, words in (
        (tmp_path / "a.txt", "write to a .csv or a .json file"),
        (toys, "already exists"),
        (plain / "b.csv", "is a file"),
        (tmp_path, "write to a .csv"),
        (folder / "policy.json", "already exists"),
    ):
        assert_refused(apportion("allocate", folder, "--toys", toys, "--out", out), words)
    assert toys.read_text() == "ball\n"


def test_what_controls_nothing_live_is_not_served(trained):
    assert_refused(apportion("serve", trained[0]), "a run of toy, which has no command serve")


def test_it_is_certified_and_its_page_shows_the_certificate_and_its_sections(trained, tmp_path):
    folder, _ = trained
    asked = ("certify", folder, "--against", "chance", "--weeks", 60)
    found = one_object(apportion(*asked, "--block", 2, "--out", tmp_path / "c", "--json"))
    assert (found["verdict"], found["bets"], found["block"]) == ("certified", 30, 2)
    assert {path.name for path in (tmp_path / "c").iterdir()} == {
        SUMS,
        *(f"certificate.{kind}" for kind in ("csv", "json", "png")),
    }
    again = (*asked, "--out", tmp_path / "c")
    assert_refused(apportion(*again), "certificate.json: already exists")
    for _ in range(2):  # asked every day
        assert apportion(*asked).stdout.endswith(f"wrote {folder / 'certificate.png'}\n")
    assert json.loads((folder / "certificate.json").read_text())["bets"] == 60
    printed = one_object(apportion("report", folder, "--json"))
    assert printed == {"report": str(folder / "report.html")}
    text = (folder / "report.html").read_text()
    for words in (">Certificate<", ">Smiles<", "Who smiled", "<dt>friend</dt>", "<dd>toy</dd>"):
        assert words in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "--against requires an argument"),
        ("--against nobody", "there is no baseline 'nobody'"),
        ("--against chance --alpha 0", "--alpha is 0; it must be above 0 and below 1"),
        ("--against chance --block 0", "--block is 0; it must be at least 1 period"),
        ("--against chance --out {}/file", "is a file; choose a folder"),
        ("--against chance --out /proc/new", "is not writable"),
    ],
)
def test_a_certificate_that_cannot_be_made_is_refused(trained, options, words, tmp_path):
    (tmp_path / "file").touch()
    if "/proc" in options and not Path("/proc/self").exists():
        pytest.skip("no /proc")
    assert_refused(apportion("certify", trained[0], *options.format(tmp_path).split()), words)


def test_its_files_are_checked_and_its_examples_shown(trained, tmp_path):
    found = one_object(apportion("check", "--json"))
    assert "toys" not in found
    assert {"market", "federated", "cluster", "gym"} <= set(found["extras"])
    (tmp_path / "toys.csv").write_text("ball\n")
    checked = one_object(apportion("check", "--toys", tmp_path / "toys.csv", "--json"))
    assert checked["toys"] == 1.0
    assert_refused(apportion("check", "--toys", "no.csv"), "no.csv: no such file")
    for command, shown in (
        (("train",), "apportion train toy --out runs/toy"),
        (("backtest",), "Whom to play with."),
        (("backtest", trained[0]), "--friends Ann Bob"),
        (("train", "toy", "--learner", "careful"), "How carefully."),
    ):
        assert shown in " ".join(apportion(*command, "--help").stdout.replace("│", " ").split())


def test_a_folder_after_another_runs_folder_is_asked_for_first(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "other")
    settings = tmp_path / "other" / "settings.toml"
    settings.write_text(settings.read_text().replace('"toy"', '"budget"'))
    (tmp_path / "other" / SUMS).unlink()
    given = ("certify", "--against", tmp_path / "other", trained[0])
    assert_refused(apportion(*given), "put this folder first")


def test_a_demo_writes_a_run_with_its_page_and_replaces_none(tmp_path):
    folder = tmp_path / "demo"
    given = ("demo", "toy", "--out", folder, "--quiet", "--json")
    assert "policy" in one_object(apportion(*given))["results"]
    assert (folder / "report.html").exists()
    assert_refused(apportion(*given), "already contains a run", f"apportion resume {folder}")


def test_one_flipped_bit_of_any_file_of_a_run_is_seen(trained, tmp_path):
    folder = tmp_path / "toy"
    shutil.copytree(trained[0], folder)
    one_object(apportion("certify", folder, "--against", "chance", "--weeks", 60, "--json"))
    sums = [line.split("  ")[1] for line in (folder / SUMS).read_text().splitlines()]
    assert {"certificate.json", "environment.json", "headline.json", "results.json"} < set(sums)
    read = ("certificate.json", "environment.json", "headline.json", "settings.toml")
    for name in (*read, "policy.json", "policy.safetensors"):
        raw = (folder / name).read_bytes()
        middle = len(raw) // 2
        (folder / name).write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
        command = ("backtest",) if name.startswith("policy") else ("report",)
        assert_refused(apportion(*command, folder), name, "changed")
        (folder / name).write_bytes(raw)
    assert apportion("report", folder).stdout
