"""Every other command end to end: studies, garages, the demo, checks, and what is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.federated.settings import GradientSettings
from apportion.runs.settings_file import read_settings
from cli.command import apportion, assert_refused, in_own_process, one_object


def test_a_study_writes_its_folder_and_verdicts(tmp_path):
    printed = one_object(apportion("study", "should-pool", "--out", tmp_path, "--json", "--quiet"))
    verdicts = printed["studies"]["should-pool"]
    assert {"claim", "holds", "estimate", "interval", "n"} <= set(verdicts[0])
    for file in ("table.csv", "figure.png", "verdict.json", "report.html"):
        assert (tmp_path / file).stat().st_size > 0
    assert json.loads((tmp_path / "verdict.json").read_text()) == verdicts


def test_whether_to_pool_is_answered_for_a_users_own_tasks(tmp_path):
    file = tmp_path / "tasks.csv"
    rows = [f"{t},{n % 3},{n % 2},{(n % 3) * 0.1},{(n + 1) % 3}" for t in "ab" for n in range(60)]
    file.write_text("\n".join(["task,state,action,reward,next_state", *rows]) + "\n")
    command = ("study", "should-pool", "--transitions", file, "--gamma", "0.5")
    printed = one_object(apportion(*command, "--out", tmp_path / "out", "--json", "--quiet"))
    assert printed["studies"]["should-pool"]
    settings = json.loads((tmp_path / "out" / "study.json").read_text())["settings"]
    assert (settings["file"], settings["gamma"]) == ("tasks.csv", 0.5)
    wrong = apportion("study", "fig1", "--transitions", file, "--out", tmp_path / "no")
    assert wrong.returncode == 2
    assert "leave --transitions out" in wrong.stderr


@pytest.mark.slow
def test_a_federation_is_trained_and_compared_with_fedavg(tmp_path):
    small = (
        "--learner ppo --steps 2 --chunk 1 --rollouts 2 --rounds 3 --samples 20 --clients 8 4 --seen 5 2 "
        "--task-sizes 3 1 --tasks 3 --unseen 2 --pooling 4 --model perceptron --epochs 1 "
        "--test 100 --evaluation 50"
    )
    folder = tmp_path / "run"
    printed = one_object(apportion("train", "federated", "--out", folder, "--json", *small.split()))
    results = printed["results"]
    assert results["gain_final"]["n"] == results["gain_mean_over_rounds"]["n"] == 2
    difference = results["final_accuracy"] - results["final_accuracy_fedavg"]
    assert results["gain_final"]["value"] == pytest.approx(difference, abs=1e-6)
    again = read_settings(folder / "settings.toml", "federated", GradientSettings)
    assert again["task_sizes"] == (3, 1)


@pytest.mark.slow
def test_a_study_runs_on_ray(tmp_path):
    printed = one_object(
        apportion("study", "should-pool", "--on", "ray", "--out", tmp_path, "--json")
    )
    assert json.loads((tmp_path / "verdict.json").read_text()) == printed["studies"]["should-pool"]


def test_a_garage_is_trained_on_tested_and_asked(tmp_path):
    small = ["--steps", "4", "--days", "2", "--chunk", "2", "--hidden", "4", "--tasks", "4"]
    some = ["--site", "jpl", "--until", "2019-05-31", "--task-size", "5"]
    done = apportion("train", "charging", *small, *some, "--out", tmp_path / "run", "--json")
    results = one_object(done)["results"]
    assert {"jpl, stations never seen"} < set(results)
    asked = ["--site", "jpl", "--start", "2019-06-03", "--end", "2019-06-07", "--stations", "4"]
    tested = one_object(
        apportion("backtest", tmp_path / "run", *asked, "--capacity", "0.2", "--json")
    )
    assert (tested["days"], tested["stations"], tested["capacity"]) == (5, 4, 0.2)
    names = {
        "equal",
        "fcfs",
        "edf",
        "llf",
        "edf-predicted",
        "llf-predicted",
        "llf-recalled",
        "largest-remaining",
    }
    assert set(tested["served"]) == names | {"policy", "clairvoyant", "optimum"}
    assert set(tested["ahead"]) == set(tested["served"]) - {"policy"}
    assert all(e["low"] <= e["estimate"] <= e["high"] for e in tested["ahead"].values())
    now = tmp_path / "now.json"
    car = {"id": "A", "plugged": True, "arrival": "2019-06-03 08:00", "max_kw": 6.0}
    now.write_text(
        json.dumps({"time": "2019-06-03 09:00", "capacity_kw": 20, "stations": [car, {"id": "B"}]})
    )
    given = one_object(apportion("allocate", tmp_path / "run", "--now", now, "--json"))
    assert given["allocation_kw"] == pytest.approx({"A": 6.0, "B": 0.0}, abs=1e-5)
    assert given["unused_kw"] == pytest.approx(14.0, abs=1e-4)
    refused = apportion("backtest", tmp_path / "run", "--prices", now)
    assert refused.returncode == 2
    assert "reads no --prices" in refused.stderr


def test_the_demo_of_the_market_reports_what_held_and_where_its_report_is(tmp_path):
    small = ["--experiments", "2", "--steps", "10", "--tasks", "3"]
    done = apportion("demo", "market", "--out", tmp_path / "demo", *small)
    assert done.returncode == 0, done.stderr
    report = Path(done.stdout.splitlines()[-1].removeprefix("wrote "))
    assert report.is_file()
    assert "What held:" in done.stdout
    assert "What did not" in done.stdout
    assert "policies at once" in done.stderr


def test_ctrl_c_saves_and_says_how_to_resume(tmp_path):
    folder = tmp_path / "run"
    long = ["--steps", "1000000", "--chunk", "20", "--universe", "12", "--held-out", "4"]
    command = [sys.executable, "-m", "apportion", "train", "budget", "--out", str(folder), *long]
    command += ["--task-size", "3", "--quiet"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        deadline = time.monotonic() + 300
        while not list(folder.glob("checkpoints/step-*")) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=120)
    assert run.returncode == 2
    assert out == ""
    assert f"apportion resume {folder}" in err
    steps = pd.read_parquet(folder / "metrics.parquet")["step"]
    newest = max(folder.glob("checkpoints/step-*"))
    assert int(newest.stem.removeprefix("step-")) == steps.max()


# What a question about the command line or a file need not wait for: each takes longer than the answer.
SLOW_TO_START = (
    *("jax", "equinox", "optax", "pandas", "scipy", "matplotlib"),
    *("sklearn", "skfolio", "flwr", "ray"),
)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "portfolio", "--help"], ["study", "--help"], ["check", "--json"]],
    ids=" ".join,
)
def test_check_and_help_start_nothing_that_is_slow_to_start(arguments):
    guard = (
        "import sys, apportion.cli\n"
        "try:\n    apportion.cli.main(sys.argv[1:])\n"
        f"finally:\n    assert not set({SLOW_TO_START}) & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", guard, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_check_tells_what_is_installed_and_what_a_file_holds(prices):
    printed = one_object(in_own_process("check", "--prices", prices, "--json"))
    assert printed["prices"]["tickers"] == 6
    assert set(printed["extras"]) >= {"market", "federated", "cluster", "gym"}


def test_a_bug_exits_with_1_and_a_traceback():
    broken = (
        "import sys, apportion.cli, apportion.runs.environment as e\n"
        "e.devices = lambda: 1 / 0\n"
        "apportion.cli.main(['check'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", broken], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["did you mean train?"]),
        (["train", "portfoli"], ["did you mean portfolio?"]),
        (["train", "budget"], ["--out"]),
        (["train", "budget", "--out", "x", "--taskz", "3"], ["--taskz", "did you mean --tasks?"]),
        (["train", "budget", "--out", "x", "--tasks", "many"], ["--tasks", "many"]),
        (["train", "budget", "--out", "x", "--method", "ptml"], ["ptml", "pmtl"]),
        (["train", "budget", "--out", "x", "--tasks", "0"], ["tasks is 0", "at least 1"]),
        (["train", "budget", "--out", "x", "--config", "no.toml"], ["no.toml", "no such file"]),
        (["resume", "nowhere"], ["nowhere", "no such folder"]),
        (["backtest", "nowhere", "--json"], ["nowhere", "no such folder"]),
        (["allocate"], ["DIR"]),
        (["study", "fig9", "--out", "x"], ["fig9", "did you mean fig"]),
        (["report", "nowhere"], ["nowhere", "no such folder"]),
        (["check", "--prices", "no.csv"], ["no.csv", "no such file"]),
    ],
    ids=lambda value: " ".join(value[:3]),
)
def test_mistakes_are_described_in_one_sentence_with_exit_code_2(arguments, words):
    assert_refused(apportion(*arguments), *words)


def test_prices_that_are_wrong_are_refused_before_anything_is_made(prices, tmp_path):
    table = pd.read_csv(prices)
    table.iloc[5, 2] = -1.0
    table.to_csv(tmp_path / "bad.csv", index=False)
    given = ("--prices", tmp_path / "bad.csv", "--out", tmp_path / "run")
    assert_refused(apportion("train", "portfolio", *given), "negative")
    assert not (tmp_path / "run").exists()


def test_a_run_is_tested_on_its_own_data_where_no_other_is_given(tmp_path):
    from apportion.cli.options import own_data
    from apportion.runs.folder import Run

    run = Run.create(
        tmp_path / "run", "charging", ChargingSettings(sessions=tmp_path / "mine.csv"), {}
    )
    assert own_data(run, "sessions", None) == tmp_path / "mine.csv"
    assert own_data(run, "sessions", tmp_path / "other.csv") == tmp_path / "other.csv"
    embedded = Run.create(tmp_path / "embedded", "charging", ChargingSettings(), {})
    assert own_data(embedded, "sessions", None) is None
