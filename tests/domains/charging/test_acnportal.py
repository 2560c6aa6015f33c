"""The sorted schedulers against acnportal 0.3.3, the simulator of the Adaptive Charging Network.

Set APPORTION_ACNPORTAL_PYTHON to the python of an environment with acnportal, or have one in .peers.
"""

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from apportion.domains.charging.days import Days
from apportion.domains.charging.forecasts import Predictor
from apportion.domains.charging.garage import physics_of
from apportion.domains.charging.schedulers import SCHEDULERS, simulate_all
from apportion.domains.charging.sessions import read_sessions
from apportion.domains.charging.site import embedded_site

pytestmark = pytest.mark.peer
OWN = Path(__file__).parents[3] / ".peers" / "acnportal" / "bin" / "python"
PYTHON = os.environ.get("APPORTION_ACNPORTAL_PYTHON", str(OWN))
PROGRAM = Path(__file__).with_name("acnportal_days.py")
STATIONS, DAYS, RATE_KW = 10, 20, 6.656
CELLS = [(site, phi) for site in ("caltech", "jpl") for phi in (0.1, 0.15)]


def comparable(site: str) -> tuple[Days, np.ndarray, np.ndarray]:
    """Days on which both simulators can play by the same rules, and what both believe was stated.

    acnportal never gives a car more than it asked for and, in its last period, no more than is left of
    that, while ours does not know when a car has had enough. So needs are cut to the request, and all
    requests raised by one period's energy, which changes no order. Ties of arrival are of whole periods
    there. Days are apart, and any power may be offered: set-points are ours.
    """
    days = Days.of(
        read_sessions(), site, embedded_site(site), physics=physics_of(ideal=True), quiet=0.3
    )
    days = days.between("2019-06-01", "2019-12-31")
    days = days.between(None, days.dates[DAYS - 1])
    days = days.at(np.random.default_rng(0).choice(len(days.stations), STATIONS, replace=False))
    garage = Predictor.fit(days).apply(days.garage)
    there = garage.begins & (garage.departure <= 96)
    arrived, asked, leaves = garage.arrival / 4, garage.requested_kwh, garage.stated_departure * 4
    need = np.minimum(garage.need_kwh, asked)
    asked = np.where(there, asked + RATE_KW / 4, 0)
    garage = replace(
        garage,
        arrival=np.where(there, garage.arrival, 0),
        departure=np.where(there, garage.departure, 0),
        arrived=np.where(there, arrived, 0).astype(np.float32),
        need_kwh=need.astype(np.float32),
        requested_kwh=asked.astype(np.float32),
    )
    return replace(days, garage=garage), asked, leaves


class Both(NamedTuple):
    days: Days
    capacity: float
    theirs: dict[str, np.ndarray]


@pytest.fixture(scope="module", params=CELLS, ids=str)
def both(request, tmp_path_factory):
    if not Path(PYTHON).is_file():
        pytest.skip("APPORTION_ACNPORTAL_PYTHON names no python with acnportal 0.3.3")
    site, phi = request.param
    days, asked, leaves = comparable(site)
    capacity = phi * STATIONS * RATE_KW
    folder = tmp_path_factory.mktemp("acnportal")
    np.savez(
        folder / "days.npz",
        arrival=days.garage.arrival,
        departure=days.garage.departure,
        need=days.garage.need_kwh,
        requested=asked,
        leaves=leaves,
        capacity=capacity,
    )
    command = [PYTHON, str(PROGRAM), str(folder / "days.npz"), str(folder / "energy.npz")]
    subprocess.run(command, check=True)
    return Both(days, capacity, dict(np.load(folder / "energy.npz")))


@pytest.mark.parametrize("name", ["edf", "llf", "fcfs"])
def test_the_same_energy_is_delivered(both, name):
    days, capacity, theirs = both.days, both.capacity, both.theirs
    ours = simulate_all(days, [SCHEDULERS[name]], capacity)[0, 0]
    total, expected = ours.sum(), theirs[name].sum()
    apart = np.abs(ours - theirs[name]).max()
    print(
        f"\n{name}: ours {total:.3f} kWh, acnportal's {expected:.3f} of {days.garage.need_kwh.sum():.1f}; "
        f"{total / expected - 1:+.4%}; a session differs by {apart:.3f} kWh at most"
    )
    assert total == pytest.approx(expected, rel=1e-3)
