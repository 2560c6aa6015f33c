"""The controller: kW within limits, the same as in simulation, full cars remembered, bad input named."""

import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion.domains.charging.controller import Controller, _offer
from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import EarlierDays, Predictor, add_forecasts
from apportion.domains.charging.problem import CHANNELS
from apportion.domains.charging.schedulers import PolicySchedule
from apportion.domains.charging.sessions import read_sessions
from apportion.errors import InputError
from domains.charging.garages import opinionated, walk

FRAME = read_sessions()
DAYS = Days.of(FRAME, "jpl").between("2019-05-01", "2019-05-31")
PREDICTOR = Predictor.fit(DAYS)
ABOUT = {"job": "charging", "predictor": PREDICTOR.to_dict(), "channels": CHANNELS}
NOW = {
    "time": "2021-06-01 09:00",
    "capacity_kw": 9.0,
    "stations": [
        {"id": "A", "plugged": True, "arrival": "2021-06-01 08:10", "requested_kwh": 20,
         "stated_departure": "2021-06-01 12:00", "delivered_kwh": 3, "offered_kw": 6, "drawn_kw": 6},
        {"id": "B", "max_kw": 3.3, "plugged": True, "arrival": "2021-06-01 07:10"},
        {"id": "C", "plugged": False},
        {"id": "D", "plugged": True, "arrival": "2021-06-01 07:30", "offered_kw": 4, "drawn_kw": 1},
    ],
}  # fmt: skip


TWO = {
    "time": "2021-06-01 09:00",
    "capacity_kw": 8.0,
    "stations": [
        {"id": "late", "plugged": True, "arrival": "2021-06-01 08:10", "requested_kwh": 20,
         "stated_departure": "2021-06-01 18:00"},
        {"id": "soon", "plugged": True, "arrival": "2021-06-01 08:30", "requested_kwh": 20,
         "stated_departure": "2021-06-01 11:00"},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def controller():
    return Controller(opinionated(1.0), ABOUT, stations=8, baseline="llf")


@pytest.mark.parametrize("trust", [0.0, 0.4, 1.0])
def test_power_is_within_limits_and_capacity_and_none_goes_to_the_absent_or_full(controller, trust):
    result = controller.allocate(NOW, trust=trust)
    kw = result["allocation_kw"]
    assert kw["C"] == kw["D"] == 0
    assert 0 <= kw["B"] <= 3.3 + 1e-6
    assert sum(kw.values()) + result["unused_kw"] == pytest.approx(9.0, abs=1e-5)
    # In whatever order the stations are told.
    turned = controller.allocate(NOW | {"stations": NOW["stations"][::-1]}, trust=trust)
    assert turned["allocation_kw"] == pytest.approx(kw, abs=1e-5)


def test_without_trust_the_scheduler_decides_and_with_all_of_it_the_policy(controller):
    alone = Controller(opinionated(1.0), ABOUT, stations=8)

    def kw(controller, trust):
        return np.array(list(controller.allocate(TWO, trust=trust)["allocation_kw"].values()))

    # Least laxity first: full rate to who leaves soon, the rest to the other.
    assert kw(controller, 0.0) == pytest.approx([8 - 6.656, 6.656], abs=1e-4)
    assert kw(controller, 1.0) == pytest.approx(kw(alone, 1.0))
    between = 0.7 * kw(controller, 0.0) + 0.3 * kw(controller, 1.0)
    assert kw(controller, 0.3) == pytest.approx(between, abs=1e-4)
    with pytest.raises(InputError, match="between 0 and 1"):
        controller.allocate(TWO, trust=1.1)
    with pytest.raises(InputError, match="name a baseline"):
        alone.allocate(TWO, trust=0.5)
    with pytest.raises(InputError, match="no scheduler 'clairvoyant'"):
        Controller(opinionated(), ABOUT, baseline="clairvoyant")


def test_a_full_car_stays_full_until_it_leaves(controller):
    controller.allocate(NOW)
    later = copy.deepcopy(NOW) | {"time": "2021-06-01 09:15"}
    later["stations"][3] |= {"offered_kw": 0, "drawn_kw": 0}
    assert controller.allocate(later)["allocation_kw"]["D"] == 0
    later["stations"][3]["arrival"] = "2021-06-01 09:10"
    assert controller.allocate(later)["allocation_kw"]["D"] > 0


def test_a_controller_recalls_the_sessions_it_is_given_and_works_without():
    volume, about = 10.0, ABOUT | {"recall": True}
    days = Days.of(FRAME, "jpl").between(None, DAYS.dates[-1])
    day = len(days) - 1
    past = FRAME[(FRAME.site == "jpl") & (FRAME.arrival < str(days.dates[day]))]
    nothing = EarlierDays.of(None, PREDICTOR)
    fresh = replace(days, garage=nothing.apply(days.garage, days.dates))
    (now, recalled), (_, forgetful) = (
        simulated(known.at(range(8)), day, volume)
        for known in (add_forecasts(days, PREDICTOR, recall=True), fresh)
    )
    apart = np.abs(np.subtract(recalled, forgetful)).max()
    assert apart > 0.05
    for earlier, expected in ((past, recalled), (None, forgetful)):
        controller = Controller(opinionated(volume), about, stations=8, earlier=earlier)
        kw = list(controller.allocate(now)["allocation_kw"].values())
        assert kw == pytest.approx(expected, abs=0.02 * apart)
    with pytest.raises(InputError, match="of 2 sites"):
        Controller(opinionated(), about, stations=4, earlier=FRAME)
    with pytest.raises(InputError, match="recalls no earlier days"):
        Controller(opinionated(), ABOUT, stations=4, earlier=FRAME)


def simulated(days: Days, day: int, volume: float) -> tuple[dict, list[float]]:
    """What a controller of eight stations sees at 11:00 on a day, and what is right to offer then."""
    n, capacity = 44, jnp.float32(7.0)
    garage = jax.tree.map(lambda x: x[day], days.garage)
    seen = jax.tree.map(lambda x: x[n], walk("equal", garage, capacity)[0])
    expected = _offer(PolicySchedule(opinionated(volume)), seen)
    midnight = f"{days.dates[day]}"

    def clock(periods) -> str:
        after = float(periods) * pd.Timedelta(minutes=15)
        return str((pd.Timestamp(midnight) + after).round("s"))

    stations = []
    for i, name in enumerate(days.stations):
        k = int(((garage.arrival[i] <= n) & (garage.departure[i] > n)).argmax())
        plugged = bool(seen.plugged[i])
        car = {"id": name, "plugged": plugged}
        if plugged:
            car |= {
                "arrival": clock(garage.arrived[i, k]),
                "delivered_kwh": float(seen.got_kwh[i]),
                "offered_kw": float(seen.offered_kw[i]),
                "drawn_kw": float(seen.drawn_kw[i]),
                "full": not bool(seen.can_draw[i]),
            }
            if bool(garage.stated[i, k]):
                car |= {
                    "requested_kwh": float(garage.requested_kwh[i, k]),
                    "stated_departure": clock(garage.stated_departure[i, k]),
                }
        stations.append(car)
    assert bool(seen.can_draw.any())
    now = {"time": f"{midnight} 11:00", "capacity_kw": float(capacity), "stations": stations}
    return now, expected.tolist()


def test_all_findings_are_said_at_once(controller):
    now = copy.deepcopy(NOW) | {"time": 5}
    now["stations"][0]["drawn_kw"] = -1
    with pytest.raises(InputError) as caught:
        controller.allocate(now)
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(InputError, match="not for charging"):
        Controller(opinionated(), {"job": "portfolio"})
