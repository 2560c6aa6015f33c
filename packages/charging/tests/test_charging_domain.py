"""The charging domain as the command line, the page and the bridges use it."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import pandas as pd
import pytest

from apportion.errors import InputError
from apportion.policy import Pooled
from apportion.runs.folder import Run
from apportion.runs.runner import finish
from apportion_charging.domain import (
    DOMAIN,
    ChargingBacktestOptions,
    ChargingCertifyOptions,
    ChargingCheckOptions,
    _read_own,
)
from apportion_charging.problem import CHANNELS
from apportion_charging.sessions import read_sessions
from apportion_charging.settings import ChargingSettings
from apportion_charging.site import describe_sites, saved_site
from apportion_charging.training import Garages, _judge_policy

pytestmark = pytest.mark.usefixtures("few_schedulers")

SETTINGS = ChargingSettings(site=("jpl",), until="2019-06-14", task_size=6, hidden=4, held_out=0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of an untrained policy, with its own file of sessions."""
    folder = tmp_path_factory.mktemp("charging")
    path = folder / "sessions.parquet"
    frame = read_sessions()
    frame[(frame.site == "jpl") & (frame.arrival < "2019-07-01")].to_parquet(path)
    garages = Garages.of(read_sessions(path), replace(SETTINGS, sessions=path))
    policy = Pooled(CHANNELS, SETTINGS.hidden, key=jax.random.key(0))
    settings = ChargingSettings(sessions=path, site=("jpl",), until="2019-06-14", task_size=6)
    made = Run.create(folder / "run", "charging", settings, {"data": {}, "versions": {}})
    finish(made, _judge_policy(policy, garages, SETTINGS))
    return made


def test_importing_the_domain_or_reading_sessions_for_it_starts_no_jax():
    program = (
        "import sys; from apportion_charging.domain import DOMAIN; "
        "loaded = {'jax', 'pandas'} & set(sys.modules); "
        "from apportion_charging.domain import ChargingCheckOptions as Options; "
        "DOMAIN.check(Options()); sys.exit(bool(loaded) or 'jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_run_is_backtested_and_certified_on_its_own_file(run):
    tested = DOMAIN.backtest(run, ChargingBacktestOptions(end="2019-06-30"))
    assert tested.site == "jpl"
    assert "2019-06-14" < str(tested.dates[0]) < str(tested.dates[-1]) <= "2019-06-30"
    gains = DOMAIN.gains(run, "llf", ChargingCertifyOptions(bound=0.02))
    assert (gains.baseline, gains.high) == ("llf", 0.02)


def test_a_file_is_checked(run, tmp_path):
    path = run.folder.parent / "sessions.parquet"
    checked = DOMAIN.check(ChargingCheckOptions(sessions=path))
    assert checked.to_json()["sessions"]["file"] == str(path)
    assert len(checked.to_frame()) == len(pd.read_parquet(path))
    prepared = DOMAIN.prepare(replace(SETTINGS, sessions=path))
    assert any("52 stations (52 of" in note for note in prepared.notes), prepared.notes
    with pytest.raises(InputError, match="no such file"):
        DOMAIN.check(ChargingCheckOptions(sessions=tmp_path / "none.csv"))
    with pytest.raises(InputError, match="no day with a car"):
        DOMAIN.prepare(replace(SETTINGS, until="2018-01-01"))


def test_its_page_shows_every_scheduler(run):
    [schedules] = DOMAIN.sections(run.folder)
    assert len(schedules.parts) == 1
    assert DOMAIN.sections(run.folder.parent) == []
    assert DOMAIN.demo().until == "2019-12-31"


def test_a_run_remembers_its_zone(tmp_path):
    path, site = tmp_path / "s.csv", tmp_path / "site.toml"
    path.write_text(
        "station,arrival,departure,delivered_kwh\na,2019-07-01T15:00Z,2019-07-01T16:00Z,5\n"
    )
    site.write_text("feeder_kw = 20\n[stations.a]\n")
    zone = "America/Los_Angeles"
    run: Any = SimpleNamespace(settings={"sessions": "other.csv", "timezone": zone})
    assert _read_own(run, path, ChargingBacktestOptions())[0].arrival[0].hour == 8
    told = ChargingBacktestOptions(timezone="Europe/Berlin")
    assert _read_own(run, path, told)[0].arrival[0].hour == 17
    # Certificates and the controller use the run's zone too, so their sites are equal.
    saved = saved_site({"timezone": zone}, str(site))
    described = describe_sites(_read_own(run, path, told)[0], (str(site),), timezone=zone)
    assert saved.timezone == zone
    assert described["garage"].fingerprint == saved.fingerprint
