"""Charging end to end on the command line; `test_toy_domain` tests every command with a small domain."""

import json
from dataclasses import replace

import pandas as pd
import pytest

from apportion.runs import environment
from apportion_charging.sessions import read_sessions
from apportion_charging.site import embedded_site
from cli.command import apportion, assert_refused, one_object
from learning import optimised

pytestmark = pytest.mark.usefixtures("few_schedulers")


def test_a_garage_is_trained_tested_and_asked(tmp_path):
    names = ("garage", "sessions.csv", "later.csv", "jpl.toml")
    garage, file, later, site = (tmp_path / name for name in names)
    # Four stations of twelve are held out, and four are tested on as many days: the program that walks
    # days is compiled once.
    whole, sessions = embedded_site("jpl"), read_sessions()
    stations = dict(list(whole.stations.items())[:12])
    site.write_text(replace(whole, stations=stations).to_toml())
    june = sessions.arrival.between("2021-06-07", "2021-06-12")
    august = sessions.arrival.between("2021-08-02", "2021-08-07")
    for path, days in ((file, june), (later, june | august)):
        sessions[days & sessions.station.isin(stations)].to_csv(path, index=False)
    small = "--steps 4 --days 2 --chunk 2 --hidden 4 --tasks 4 --task-size 4 --held-out 0.34"
    some = ("--site", site, "--until", "2021-06-11", "--out", garage, "--json")
    printed = one_object(apportion("train", "charging", "--sessions", file, *small.split(), *some))
    assert "jpl, stations never seen" in printed["results"]
    assert len(pd.read_parquet(garage / "metrics.parquet")) == 4
    asked = "--start 2021-08-02 --end 2021-08-06 --stations 4 --tasks 1 --capacity 0.2 --json"
    tested = one_object(apportion("backtest", garage, "--sessions", later, *asked.split()))
    assert (tested["days"], tested["stations"]) == (5, 4)
    assert tested["capacity"] == pytest.approx(0.2)
    assert {"policy", "llf", "clairvoyant", "optimum"} < set(tested["served"])
    now = tmp_path / "now.json"
    first, second, *_ = stations
    car = {"id": first, "plugged": True, "arrival": "2021-08-03 08:00", "max_kw": 6.0}
    told = {"time": "2021-08-03 09:00", "capacity_kw": 20, "stations": [car, {"id": second}]}
    now.write_text(json.dumps(told))
    given = one_object(apportion("allocate", garage, "--now", now, "--json"))
    # Whole amperes at 208 V, within what the car says it takes.
    assert given["allocation_a"][first] == 28
    assert given["allocation_kw"][first] == pytest.approx(28 * 0.208, abs=1e-5)
    assert given["allocation_kw"][second] == 0
    assert given["unused_kw"] == pytest.approx(20 - 28 * 0.208, abs=1e-4)
    assert_refused(apportion("backtest", garage, "--prices", now), "no option --prices")


@pytest.mark.slow
@optimised()
def test_a_trained_garage_is_certified_over_least_laxity_first(tmp_path):
    # Of 20 seeds all are certified by the 64th of these 198 days.
    settings = (
        "--method mtl --site jpl --until 2019-06-30 --tasks 10 --task-size 6 --steps 100 --days 8"
    )
    folder = tmp_path / "run"
    train = ("train", "charging", *settings.split(), "--hidden", 12, "--chunk", 100)
    one_object(apportion(*train, "--out", folder, "--json"))
    asked = ("certify", folder, "--against", "llf", "--site", "jpl", "--tasks", 4, "--block", 1)
    some = (*asked, "--json")
    found = one_object(apportion(*some, "--out", tmp_path / "found"))
    assert found["verdict"] == "certified"
    assert 0 < found["lower"] < found["mean"] < found["upper"]
    # Asked on the day of the verdict, with the sessions there were then: the same path up to there.
    sessions = read_sessions()
    until = sessions[sessions.arrival < pd.Timestamp(found["decided"]) + pd.Timedelta(days=1)]
    until.to_csv(tmp_path / "then.csv", index=False)
    later = ("--data", tmp_path / "then.csv", "--out", tmp_path / "then")
    then = one_object(apportion(*some, *later))
    assert (then["verdict"], then["decided"]) == ("certified", found["decided"])
    early, table = (pd.read_csv(tmp_path / name / "certificate.csv") for name in ("then", "found"))
    # A gain is a difference of shares in single precision: near 0 it is known to some units of that, and
    # days are simulated side by side with others than then.
    pd.testing.assert_frame_equal(early, table[: len(early)], rtol=1e-4, atol=1e-6)


def test_a_bug_exits_with_1_and_a_traceback(monkeypatch):
    monkeypatch.setattr(environment, "devices", lambda: 1 / 0)
    done = apportion("check")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError" in done.stderr
    assert "this is a bug in apportion" in done.stderr
