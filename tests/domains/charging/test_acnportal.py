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
from apportion.domains.charging.garage import PERIOD_HOURS, RATE_KW, Garage
from apportion.domains.charging.schedulers import SCHEDULERS, simulate_all
from apportion.domains.charging.sessions import read_sessions

pytestmark = pytest.mark.peer
OWN = Path(__file__).parents[3] / ".peers" / "acnportal" / "bin" / "python"
PYTHON = os.environ.get("APPORTION_ACNPORTAL_PYTHON", str(OWN))
PROGRAM = Path(__file__).with_name("acnportal_days.py")
STATIONS, DAYS = 10, 20
CELLS = [(site, phi) for site in ("caltech", "jpl") for phi in (0.1, 0.15)]


def comparable(site: str) -> tuple[Garage, np.ndarray, np.ndarray]:
    """Days on which both simulators can play by the same rules, and what both believe was stated.

    acnportal never gives a car more than it asked for and, in its last period, no more than is left of
    that, while ours does not know when a car has had enough. So needs are cut to the request, and all
    requests raised by one period's energy, which changes no order. Ties of arrival are of whole periods
    there.
    """
    days = Days.of(read_sessions(), site).between("2019-06-01", "2019-12-31")
    days = days.between(None, days.dates[DAYS - 1])
    days = days.at(np.random.default_rng(0).choice(len(days.stations), STATIONS, replace=False))
    garage = Predictor.fit(days).apply(days.garage)
    there, arrived = garage.there, garage.arrival.astype(np.float32)
    asked, leaves = garage.requested_kwh, garage.stated_departure
    need = np.minimum(garage.need_kwh, asked)
    asked = np.where(there, asked + RATE_KW * PERIOD_HOURS, 0)
    garage = replace(
        garage,
        arrived=np.where(there, arrived, 0).astype(np.float32),
        need_kwh=need.astype(np.float32),
        requested_kwh=asked.astype(np.float32),
        stated=there,
    )
    return garage, asked, leaves


class Both(NamedTuple):
    days: Garage
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
        arrival=days.arrival,
        departure=days.departure,
        need=days.need_kwh,
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
        f"\n{name}: ours {total:.3f} kWh, acnportal's {expected:.3f} of {days.need_kwh.sum():.1f}; "
        f"{total / expected - 1:+.4%}; a session differs by {apart:.3f} kWh at most"
    )
    assert total == pytest.approx(expected, rel=1e-3)
