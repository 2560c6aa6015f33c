"""A policy saved when less was seen of a station decides as it did then.

`saved_before` holds one that was saved with 18 channels by the code of that time, and its decisions.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from apportion.domains.charging.backtest import POLICY
from apportion.domains.charging.controller import Controller
from apportion.domains.charging.facts import as_trained, check_facts
from apportion.domains.charging.gains import daily_gains
from apportion.domains.charging.job import about, backtest_policy
from apportion.domains.charging.problem import CHANNELS, CHANNELS_BEFORE
from apportion.domains.charging.sessions import read_sessions
from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.charging.training import Garages
from apportion.errors import InputError
from apportion.runs.policy_file import load_about, load_policy

FOLDER = Path(__file__).parent / "saved_before"
THEN: dict[str, Any] = json.loads((FOLDER / "decided.json").read_text())
FRAME = read_sessions().loc[lambda rows: rows.arrival < "2019-07-13"]
SOME = {"site": "jpl", "start": "2019-07-01", "end": "2019-07-12", "tasks": 2}


@pytest.mark.parametrize("past", ["alone", "with the past"])
def test_a_controller_offers_what_it_did(past):
    earlier: Any = FRAME[(FRAME.site == "jpl") & (FRAME.arrival < "2019-07-02")]
    given = {"earlier": earlier} if past == "with the past" else {}
    controller = Controller(load_policy(FOLDER), load_about(FOLDER), stations=4, **given)
    kw = controller.allocate(THEN["now"])["allocation_kw"]
    assert kw == pytest.approx(THEN[past], rel=1e-6)


def test_cars_draw_what_they_did():
    policy, saved = load_policy(FOLDER), load_about(FOLDER)
    tested = backtest_policy(policy, saved, FRAME, peers={}, optimum=False, **SOME)
    assert tested.by_day(POLICY) == pytest.approx(THEN["drawn_kwh"], rel=1e-6)
    # As a baseline of a certificate, too.
    gains = daily_gains(policy, saved, FRAME, str(FOLDER), **SOME)
    assert gains.values.tolist() == [0.0] * len(THEN["drawn_kwh"])


def test_how_much_is_seen_is_saved_and_checked():
    saved = load_about(FOLDER)
    assert "channels" not in saved
    policy = load_policy(FOLDER)
    assert getattr(as_trained(policy, saved), "channels", None) == CHANNELS_BEFORE
    settings = ChargingSettings(site=("jpl",), until="2019-06-30")
    now = about(Garages.of(FRAME, settings), settings)
    assert now["channels"] == CHANNELS
    assert as_trained(policy, now) is policy
    for wrong in (0, CHANNELS + 1, "20", True, 18.0):
        with pytest.raises(InputError, match="channels"):
            check_facts(saved | {"channels": wrong})
