"""A controller that leaves to the policy what it has earned, and the rest to a scheduler."""

import numpy as np
import pytest

from apportion.domains.charging.controller import Controller
from apportion.errors import InputError
from domains.charging.test_controller import ABOUT, NOW, opinionated

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
    return Controller(opinionated(), ABOUT, stations=8, baseline="llf")


def kw(controller, trust, now=TWO):
    return np.array(list(controller.allocate(now, trust=trust)["allocation_kw"].values()))


def test_without_trust_the_scheduler_decides_and_with_all_of_it_the_policy(controller):
    # Least laxity first: full rate to who leaves soon, the rest to the other.
    assert kw(controller, 0.0) == pytest.approx([8 - 6.656, 6.656], abs=1e-4)
    alone = Controller(opinionated(), ABOUT, stations=8)
    assert kw(controller, 1.0) == pytest.approx(kw(alone, 1.0))
    between = 0.7 * kw(controller, 0.0) + 0.3 * kw(controller, 1.0)
    assert kw(controller, 0.3) == pytest.approx(between, abs=1e-4)


@pytest.mark.parametrize("trust", [0.0, 0.4, 1.0])
def test_at_any_trust_power_is_within_limits_and_none_goes_to_the_absent_or_full(controller, trust):
    result = controller.allocate(NOW, trust=trust)
    power = result["allocation_kw"]
    assert power["C"] == power["D"] == 0
    assert 0 <= power["B"] <= 3.3 + 1e-6
    assert sum(power.values()) + result["unused_kw"] == pytest.approx(9.0, abs=1e-5)


def test_trust_needs_a_baseline_and_a_number_from_0_to_1(controller):
    with pytest.raises(InputError, match="between 0 and 1"):
        controller.allocate(TWO, trust=1.1)
    with pytest.raises(InputError, match="name a baseline"):
        Controller(opinionated(), ABOUT, stations=8).allocate(TWO, trust=0.5)
    with pytest.raises(InputError, match="no scheduler 'clairvoyant'"):
        Controller(opinionated(), ABOUT, baseline="clairvoyant")
