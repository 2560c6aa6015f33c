"""A portfolio's run from the command line: exit code, standard output, standard error.

Training is started as users start it, in a process of its own; the rest calls the same `main` in this
one, down to the file descriptors.
"""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from cli.command import apportion, assert_refused, in_own_process, one_object

TINY = "--steps 6 --members 2 --window 8 --batch 16 --hidden 4 --tasks 4 --task-size 3 --chunk 3"
FIELDS = {"wealth", "annual_return", "volatility", "sharpe", "max_drawdown", "turnover"}


@pytest.fixture(scope="session")
def trained(prices, tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("runs") / "first"
    days = pd.read_csv(prices)["date"]
    done = in_own_process(
        "train", "portfolio", "--prices", prices, "--out", folder, "--until", days[110],
        "--json", "--tensorboard", *TINY.split(),
    )  # fmt: skip
    return folder, one_object(done)


def test_training_writes_a_run_folder_and_one_json_object(trained):
    folder, printed = trained
    assert printed["folder"] == str(folder)
    assert printed["results"]["net"].keys() >= {"policy", "equal-crp", "buy-and-hold", "lazy-crp"}
    assert len(pd.read_parquet(folder / "metrics.parquet")) == 2 * 6
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["data"]["fingerprint"]
    assert environment["versions"]["jax"]
    assert list((folder / "tensorboard").iterdir())


def test_settings_of_a_run_run_it_again_to_the_bit(trained, tmp_path):
    folder, _ = trained
    done = apportion(
        "train", "portfolio", "--config", folder / "settings.toml", "--out", tmp_path / "b"
    )
    assert done.returncode == 0, done.stderr
    assert "equal-crp" in done.stdout
    assert "step 6 of 6" in done.stderr
    for file in ("policy.safetensors", "settings.toml", "results.json"):
        assert (tmp_path / "b" / file).read_bytes() == (folder / file).read_bytes()


def test_backtest_keeps_to_its_contract(trained, prices):
    folder, printed = trained
    days = pd.read_csv(prices)["date"]
    done = apportion("backtest", folder, "--prices", prices, "--start", days[110], "--json")
    result = one_object(done)
    about = {"start", "end", "periods", "trained_until", "in_sample_periods", "hindsight"}
    assert set(result) == {*about, "net", "gross"}
    assert (result["in_sample_periods"], result["hindsight"]) == (0, ["best-crp"])
    assert (result["start"], result["end"]) == (days[110], days.iloc[-1])
    assert result["periods"] == len(days) - 110
    for side in ("net", "gross"):
        assert {"policy", "equal-crp", "buy-and-hold"} <= set(result[side])
        assert all(set(metrics) == FIELDS for metrics in result[side].values())
    assert result == printed["results"]


def test_a_backtest_is_of_the_instruments_and_baselines_asked_for_and_written_down(
    trained, prices, tmp_path
):
    folder, _ = trained
    days, tickers = pd.read_csv(prices)["date"], list(pd.read_csv(prices).columns[1:])
    given = ("backtest", folder, "--prices", prices, "--start", days[60], "--out", tmp_path / "out")
    asked = ("--tickers", *tickers[:3], "--baselines", "olmar", "best-crp")
    done = apportion(*given, *asked)
    assert done.returncode == 0, done.stderr
    assert "3 instruments" in done.stdout
    assert "best-crp (hindsight)" in done.stdout
    assert "backtest: policy (0%)" in done.stderr
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(written["net"]) == {"policy", "equal-crp", "lazy-crp", "olmar", "best-crp"}
    trained_on = sum(day <= written["trained_until"] for day in days[60:])
    assert written["in_sample_periods"] == trained_on > 0
    assert (
        f"{trained_on} of {len(days) - 60} periods are days the policy was trained on"
        in done.stdout
    )
    table = pd.read_csv(tmp_path / "out" / "table.csv")
    assert set(table["strategy"]) == set(written["net"])
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert_refused(apportion(*given), "out", "other files")
    assert_refused(apportion(*given[:-2], "--baselines", "olmarr"), "olmarr", "olmar")


def test_allocate_keeps_to_its_contract_and_starts_from_the_holdings(trained, prices, tmp_path):
    folder, _ = trained
    tickers = list(pd.read_csv(prices).columns[1:])
    holdings = tmp_path / "today.csv"
    pd.DataFrame({"ticker": tickers[:1], "share": [1.0]}).to_csv(holdings, index=False)
    given = ("allocate", folder, "--prices", prices, "--holdings", holdings, "--json")
    result = one_object(apportion(*given))
    assert set(result) == {"date", "allocation", "orders", "cash", "value", "assumed"}
    assert result["date"] == pd.read_csv(prices)["date"].iloc[-1]
    assert list(result["allocation"]) == tickers
    assert abs(sum(result["allocation"].values()) - 1) < 1e-9
    # A tenth of the way is traded in a day, so most is still where it was.
    assert 0.85 < result["allocation"][tickers[0]] < 0.95
    holdings.write_text("ticker,share\nNOBODY,1.0\n")
    assert_refused(apportion(*given), str(holdings), "NOBODY")


def test_a_run_has_a_report(trained):
    folder, _ = trained
    printed = one_object(apportion("report", folder, "--json"))
    assert printed == {"report": str(folder / "report.html")}
    assert "</html>" in (folder / "report.html").read_text()


def test_a_finished_run_resumes_to_what_it_was(trained):
    folder, printed = trained
    assert one_object(apportion("resume", folder, "--json")) == printed


def test_an_ensemble_cut_short_resumes_to_the_same_bits(trained, tmp_path):
    folder, _ = trained
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    for left in ("results.json", "policy.safetensors", "checkpoints/step-000000006.safetensors"):
        (cut / left).unlink()
    done = apportion("resume", cut)
    assert done.returncode == 0, done.stderr
    assert "continuing after step 3" in done.stderr
    assert f"wrote {cut}" in done.stdout
    for file in ("policy.safetensors", "results.json", "checkpoints/step-000000006.safetensors"):
        assert (cut / file).read_bytes() == (folder / file).read_bytes()
    rows = [pd.read_parquet(run / "metrics.parquet") for run in (folder, cut)]
    pd.testing.assert_frame_equal(*rows, check_exact=True)
