"""The sorted schedulers against acnportal 0.3.3, the simulator of the Adaptive Charging Network.

Stations are AeroVironment's: whole amperes from 6 to 32, or none. Set APPORTION_ACNPORTAL_PYTHON to
the Python of an environment with acnportal, or install one in .peers.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from garages import acnportal_days

from apportion_charging.days import Days
from apportion_charging.forecasts import Predictor, add_forecasts
from apportion_charging.garage import Physics
from apportion_charging.schedulers import SCHEDULERS, simulate
from apportion_charging.sessions import read_sessions
from apportion_charging.site import embedded_site

pytestmark = pytest.mark.peer
OWN = Path(__file__).parents[3] / ".peers" / "acnportal" / "bin" / "python"
PYTHON = os.environ.get("APPORTION_ACNPORTAL_PYTHON", str(OWN))
STATIONS, DAYS = 10, 20
LINEAR = Physics(taper=False, gaps=0.0)
"""Our set-points, with acnportal's batteries and meters: no taper and no gaps."""
CELLS = [(site, phi) for site in ("caltech", "jpl") for phi in (0.1, 0.15)]


def comparable(site: str) -> Days:
    """Return days on which both simulators can follow the same rules.

    acnportal never gives a car more than its request and, in the last period, no more than the
    rest of it; our simulator does not know when a car is full. Needs are therefore cut to the
    request, and all requests are raised by one period's energy, which changes no order. Ties of
    arrival are in whole periods, as in acnportal.
    """
    days = Days.of(read_sessions(), site, embedded_site(site), physics=LINEAR)
    days = days.between("2019-06-01", "2019-12-31")
    days = days.between(None, days.dates[DAYS - 1])
    days = days.at(np.random.default_rng(0).choice(len(days.stations), STATIONS, replace=False))
    garage = add_forecasts(days, Predictor.fit(days)).garage
    there, hours = garage.there, LINEAR.period_hours
    more = np.asarray(days.wiring.max_kw)[:, None] * hours
    garage = replace(
        garage,
        arrived=np.where(there, garage.arrival * hours, 0).astype(np.float32),
        need_kwh=np.minimum(garage.need_kwh, garage.requested_kwh),
        requested_kwh=np.where(there, garage.requested_kwh + more, 0).astype(np.float32),
        said_energy=there,
        said_departure=there,
    )
    return replace(days, garage=garage)


class Both(NamedTuple):
    days: Days
    capacity: float
    theirs: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=CELLS, ids=str)
def both(request, tmp_path_factory):
    if not Path(PYTHON).is_file():
        pytest.skip("APPORTION_ACNPORTAL_PYTHON names no python with acnportal 0.3.3")
    site, phi = request.param
    days = comparable(site)
    capacity = phi * float(days.wiring.max_kw.sum())
    folder = tmp_path_factory.mktemp("acnportal")
    return Both(days, capacity, acnportal_days(PYTHON, days, capacity, folder))


@pytest.mark.parametrize("name", ["edf", "llf", "fcfs", "largest-remaining"])
def test_the_same_energy_is_delivered(both, name):
    days, capacity, theirs = both.days, both.capacity, both.theirs
    ours = simulate(days, [SCHEDULERS[name]], capacity).energy_kwh[0, 0][days.garage.begins]
    total, expected = ours.sum(), theirs[name].sum()
    need = days.garage.need_kwh[days.garage.begins]
    apart = np.abs(ours - theirs[name])
    print(
        f"\n{name}: ours {total:.3f} kWh, acnportal's {expected:.3f} of {need.sum():.1f}; "
        f"{total / expected - 1:+.4%}; sessions differ by {apart.mean():.3f} kWh in the mean, "
        f"{apart.max():.3f} at most; theirs took {theirs[f'{name}/seconds']:.1f} s"
    )
    assert total == pytest.approx(expected, rel=5e-3)
