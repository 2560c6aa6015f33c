"""`apportion certify` end to end: three kinds of runs, trained once, and everything that is refused."""

import json
from pathlib import Path

import pandas as pd
import pytest

from apportion.cli import main
from apportion.composition import EqualShares
from apportion.domains.budget.settings import BudgetSettings
from apportion.domains.charging.sessions import read_sessions
from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.charging.training import Garages, facts_of, train_charging
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.shipped import shipped_policy
from apportion.domains.portfolio.prices import embedded_prices
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.domains.portfolio.training import train_portfolio
from apportion.domains.training import averaged
from apportion.runs.folder import Run
from apportion.runs.job import Outcome
from apportion.runs.runner import finish
from learning import optimised

GARAGE = ChargingSettings(
    method="mtl", site=("jpl",), until="2019-06-30", tasks=10, task_size=6, steps=100, days=8, hidden=12,
    chunk=100,
)  # fmt: skip
MARKET = PortfolioJob(
    until="2018-12-31", k=1.0, eta=1.0, members=1, steps=30, window=10, batch=32, hidden=6, tasks=10,
    task_size=8, chunk=30,
)  # fmt: skip
FEDERATION = FederatedSettings(
    kinds="equal,paper", samples=20, width=4, pooling=4, rounds=2, epochs=1, evaluation=40, test=60
)


@pytest.fixture
def certify(capfd):
    """The command in this process: exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["certify", *map(str, arguments)])
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capfd.readouterr())

    return run


def finished(job, settings, policy, about, tmp_path_factory):
    """A run's folder without the tests that training ends with, which take longest."""
    run = Run.create(tmp_path_factory.mktemp("runs") / job, job, settings, {})
    finish(run, Outcome(policy, {}, "", facts_of, {}))
    return run.folder


@pytest.fixture(scope="module")
def garage(tmp_path_factory):
    garages = Garages.of(read_sessions(), GARAGE)
    with optimised():
        policy = averaged(train_charging(garages, GARAGE).policy, 1)
    return finished("charging", GARAGE, policy, facts_of(garages, GARAGE), tmp_path_factory)


@pytest.fixture(scope="module")
def market(tmp_path_factory):
    known = embedded_prices().until(str(MARKET.until))
    facts = {
        "job": "portfolio", "window": MARKET.window, "channels": 1, "cost": MARKET.cost,
        "last": str(known.dates[-1]),
    }  # fmt: skip
    policy = train_portfolio(known, MARKET).policy
    return finished("portfolio", MARKET, policy, facts, tmp_path_factory)


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """The policy that comes with the package, as if it had been trained here."""
    facts = {"job": "federated", "window": 5, "state": "invariant", "kinds": ["equal", "paper"]}
    return finished("federated", FEDERATION, shipped_policy(), facts, tmp_path_factory)


@pytest.fixture(scope="module")
def budget(tmp_path_factory):
    return finished("budget", BudgetSettings(), EqualShares(), {"job": "budget"}, tmp_path_factory)


def one_object(answer) -> dict:
    code, out, err = answer
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def assert_refused(answer, *words: str) -> None:
    """Exit code 2, nothing on standard output, one sentence on the other."""
    code, out, err = answer
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1, err
    for word in words:
        assert word in err


@optimised()
def test_a_charging_policy_is_certified_over_least_laxity_first(certify, garage, tmp_path):
    # Of 20 seeds all are certified by the 64th of these 198 days.
    some = ("--against", "llf", "--site", "jpl", "--tasks", 4)
    found = one_object(certify(garage, *some, "--out", tmp_path / "found", "--json"))
    assert found["verdict"] == "certified"
    assert found["start"] > "2019-06-30"
    assert (found["period"], found["bound"], found["alpha"]) == ("day", [-0.05, 0.05], 0.05)
    assert 0 < found["lower"] < found["mean"] < found["upper"]
    assert json.loads((tmp_path / "found" / "certificate.json").read_text())["verdict"]
    table = pd.read_csv(tmp_path / "found" / "certificate.csv")
    assert len(table) == found["bets"]
    assert table.better.max() >= found["wealth"]["needed"] == 40
    assert found["plot"] == str(tmp_path / "found" / "certificate.png")
    assert (tmp_path / "found" / "certificate.png").read_bytes()[:4] == b"\x89PNG"

    # Asked on the day of the verdict, with the sessions there were then: the same path up to there.
    sessions = read_sessions()
    until = sessions[sessions.arrival < pd.Timestamp(found["decided"]) + pd.Timedelta(days=1)]
    until.to_csv(tmp_path / "then.csv", index=False)
    asked = (*some, "--data", tmp_path / "then.csv", "--out", tmp_path / "then")
    then = one_object(certify(garage, *asked, "--json"))
    assert (then["verdict"], then["decided"]) == ("certified", found["decided"])
    early = pd.read_csv(tmp_path / "then" / "certificate.csv")
    pd.testing.assert_frame_equal(early, table[: len(early)], rtol=1e-4)


def test_no_policy_is_better_than_itself(certify, garage):
    found = one_object(certify(garage, "--against", garage, "--site", "jpl", "--json"))
    assert (found["verdict"], found["mean"]) == ("not yet", 0)
    assert (garage / "certificate.png").is_file()
    kept = json.loads((garage / "certificate.json").read_text())
    assert kept["plot"] == "certificate.png"
    assert kept["made"][:2] == "20"
    assert {name: kept[name] for name in found if name != "plot"} == {
        name: value for name, value in found.items() if name != "plot"
    }


def test_a_portfolio_policy_is_not_certified_over_lazy_rebalancing(certify, market, tmp_path):
    # Without a gain one policy in twenty is at most; of 12 seeds none, and none is harmful.
    plot = tmp_path / "lazy.png"
    code, out, err = certify(market, "--against", "lazy-crp", "--out", plot)
    assert code == 0, err
    assert out.startswith("not yet: policy against lazy-crp\n")
    assert "208 bets of 1 week each, 2019-01-04 to 2022-12-23" in out
    assert out.endswith(f"wrote {plot}\n")
    assert plot.is_file()
    kept = json.loads((market / "certificate.json").read_text())
    assert (kept["against"], kept["plot"]) == ("lazy-crp", str(plot))


def test_blocks_and_alpha_are_those_asked_for(certify, market, tmp_path):
    asked = ("--against", "equal-crp", "--alpha", "0.2", "--block", "4", "--bound", "0.02")
    found = one_object(certify(market, *asked, "--out", tmp_path, "--json"))
    assert (found["alpha"], found["block"], found["bets"]) == (0.2, 4, 52)
    assert (found["wealth"]["needed"], found["bound"]) == (10, [-0.02, 0.02])


def test_an_aggregation_policy_is_tried_in_federations_of_its_own(certify, federation, tmp_path):
    asked = ("--against", "fedavg", "--federations", 2, "--out", tmp_path / "plot.png")
    found = one_object(certify(federation, *asked, "--json"))
    assert (found["periods"], found["period"], found["verdict"]) == (2, "federation", "not yet")
    assert (tmp_path / "plot.png").is_file()


@pytest.mark.parametrize(
    ("run", "options", "words"),
    [
        ("garage", "--against lfl --site jpl", ["'lfl'", "did you mean llf?", "largest-remaining"]),
        ("garage", "--against clairvoyant --site jpl", ["'clairvoyant'", "choose equal"]),
        ("garage", "--against llf", ["2 sites", "--site"]),
        ("garage", "--against llf --site mars", ["mars"]),
        ("garage", "--against llf --data no.csv", ["no.csv"]),
        ("garage", "--against llf --site jpl --federations 3", ["reads no --federations"]),
        ("garage", "--against llf --site jpl --allow-jumps", ["reads no --allow-jumps"]),
        ("garage", "--site jpl", ["--against NAME is missing"]),
        ("market", "--against lazy", ["'lazy'", "did you mean lazy-crp?"]),
        ("market", "--against best-crp", ["'best-crp'"]),
        ("market", "--against lazy-crp --data no.csv", ["no.csv"]),
        ("market", "--against lazy-crp --site jpl", ["reads no --site"]),
        ("market", "--against lazy-crp --alpha 0", ["--alpha is 0", "above 0 and below 1"]),
        ("market", "--against lazy-crp --alpha 1", ["--alpha is 1"]),
        ("market", "--against lazy-crp --alpha nan", ["--alpha is nan"]),
        ("market", "--against lazy-crp --alpha much", ["--alpha is 'much'"]),
        ("market", "--against lazy-crp --block 0", ["--block is 0"]),
        ("market", "--against lazy-crp --bound -1", ["--bound is -1"]),
        ("federation", "--against fedsgd", ["'fedsgd'", "choose fedavg"]),
        ("federation", "--against fedavg --federations 0", ["federations is 0"]),
        ("federation", "--against fedavg --data no.npz", ["no.npz"]),
        ("budget", "--against equal", ["a run of 'budget'", "charging"]),
    ],
)
def test_what_the_user_can_fix_is_one_sentence_and_exit_code_2(
    certify, request, run, options, words
):
    assert_refused(certify(request.getfixturevalue(run), *options.split()), *words)


def test_a_folder_without_a_run_or_of_another_kind_is_refused(certify, garage, market, tmp_path):
    assert_refused(certify(tmp_path, "--against", "llf"), "holds no run")
    assert_refused(certify(market, "--against", garage), "reads other things")
    assert_refused(certify(garage, "--against", market, "--site", "jpl"), "not one for charging")


def test_a_place_that_cannot_hold_the_plot_is_refused_before_any_work(certify, market, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    for place in ("file", "folder.png"):
        asked = ("--against", "lazy-crp", "--out", tmp_path / place)
        assert_refused(certify(market, *asked), "give a .png file, or a folder")
    asked = ("--against", "lazy-crp", "--out", tmp_path / "file" / "plot.png")
    assert_refused(certify(market, *asked), "is a file")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize("place", ["/proc/plot.png", "/proc/certificate"])
def test_a_place_that_nobody_can_write_to_is_refused_in_a_sentence(certify, market, place):
    answer = certify(market, "--against", "lazy-crp", "--out", place)
    assert_refused(answer, "/proc", "cannot be written to")


def test_data_that_the_policy_was_trained_on_is_no_evidence(certify, garage, market, tmp_path):
    sessions = read_sessions()
    sessions[sessions.arrival < pd.Timestamp("2019-06-30")].to_csv(
        tmp_path / "old.csv", index=False
    )
    old = ("--data", tmp_path / "old.csv")
    assert_refused(certify(garage, "--against", "llf", "--site", "jpl", *old), "no working day")
    embedded_prices().until("2018-12-31").to_frame().to_csv(tmp_path / "prices.csv")
    old = ("--data", tmp_path / "prices.csv", "--allow-jumps")
    assert_refused(certify(market, "--against", "lazy-crp", *old), "needs later days")
