"""Set-points: within all limits, none below the minimum, maximal, and in order of the wishes."""

from dataclasses import replace

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from apportion_charging.days import make_stations
from apportion_charging.garage import Stations
from apportion_charging.setpoints import set_points
from apportion_charging.site import Branch, Site, Station

NAMES = [f"S{place}" for place in range(8)]
traced = []


@jax.jit
def compiled(wishes, most, stations: Stations, capacity, on, held):
    traced.append(1)
    return set_points(wishes, most, stations, capacity, on=on, held=held)


def widened(site: Site) -> Stations:
    """Pad a site's limits to three phases, so that all garages have one shape."""
    wiring = make_stations(site)
    load, limit = np.zeros((6, len(NAMES)), np.float32), np.full(6, 1e6, np.float32)
    load[: len(wiring.load)], limit[: len(wiring.load)] = wiring.load, wiring.limit_a
    return replace(wiring, load=load, limit_a=limit)


@st.composite
def garages(draw):
    """Draw eight mixed stations with a feeder, a branch, and cars that may take less or nothing."""
    cables = st.sampled_from([(16.0, (1,)), (32.0, (2,)), (32.0, (3,)), (16.0,), (32.0,), (10.5,)])
    stations = {name: Station(*draw(cables), min_a=draw(st.sampled_from([6.0, 6.0, 8.0])))
                for name in NAMES}  # fmt: skip
    site = Site(
        stations,
        feeder_a=draw(st.floats(1, 150)),
        branches={"some": Branch(draw(st.floats(1, 60)), tuple(NAMES[2:6]))},
    )
    flags = st.lists(st.booleans(), min_size=8, max_size=8)
    numbers = st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8)
    wiring = widened(site)
    share = np.array(draw(numbers), np.float32)
    most = np.where(draw(flags), wiring.max_a, np.float32(40) * np.array(draw(numbers), np.float32))
    most = np.minimum(most, wiring.max_a)
    on = np.array(draw(flags))
    held = on & np.array(draw(flags))
    capacity = np.float32(draw(st.floats(0, 1)) * site.capacity_kw)
    return share * wiring.max_kw, most, wiring, capacity, on, held


@settings(max_examples=200)
@given(garages())
def test_set_points_are_feasible_maximal_and_in_order(garage):
    wishes, most, wiring, capacity, _, held = garage
    told = np.asarray(compiled(*garage))
    assert (told == np.round(told)).all()
    assert ((told == 0) | (told >= wiring.min_a)).all()
    assert (told <= most + 1e-2).all()

    def room(amperes):
        """Return what is left of each limit, the feeder's power first."""
        used = np.append(amperes @ wiring.kw_per_a, wiring.load @ amperes)
        return np.append(capacity, wiring.limit_a) - used

    assert (room(told) > -2e-3).all()
    # Maximal: no station can have another ampere, and no station that is off can be on.
    for place in range(len(told)):
        step = np.zeros(len(told))
        step[place] = 1.0 if told[place] else wiring.min_a[place]
        could = told[place] + step[place] <= most[place] and (room(told + step) > 2e-3).all()
        assert not could, place
    # Stations that must not be switched off yet stay on, if all of them fit.
    able = np.floor(most + 1e-3) >= wiring.min_a
    wanted = np.ceil(wishes / wiring.kw_per_a - 1e-3)
    kept = np.where(held & able, np.clip(wanted, wiring.min_a, np.floor(most + 1e-3)), 0)
    if (room(kept) > 2e-3).all():
        assert (told[held & able] > 0).all()
    # All examples use one compiled program.
    assert len(traced) == 1


def told(wishes_a, feeder_a=40.0, *, on=(), held=(), capacity_kw=1e3):
    """Return amperes at 32 A stations; wishes of other stations, without a car, have no effect."""
    places, count = np.arange(len(NAMES)), len(wishes_a)
    stations = widened(Site(dict.fromkeys(NAMES, Station(32.0, (1,))), feeder_a=feeder_a))
    wishes = np.array([*wishes_a, *[32] * (len(NAMES) - count)], np.float32) * stations.kw_per_a
    most = np.where(places < count, np.float32(32), np.where(places % 2, np.float32(5), 0))
    flags = [np.isin(places, chosen) for chosen in (on, held)]
    amperes = compiled(wishes, most.astype(np.float32), stations, np.float32(capacity_kw), *flags)
    assert not amperes[count:].any()
    return amperes[:count].tolist()


def test_wishes_are_served_in_their_order_and_the_rest_is_given_away():
    # By hand: 32 of 40 A for the first, the rest for the second; the third cannot have 6.
    assert told([32, 20, 10]) == [32, 8, 0]
    # A wish below the minimum is raised to it; the rest goes to stations on, largest wish first.
    assert told([3, 10, 0]) == [8, 32, 0]
    # No other station is on, so the rest switches others on.
    assert told([32, 0, 0]) == [32, 8, 0]
    assert told([0, 0, 0], on=[2]) == [8, 0, 32]


def test_of_equal_wishes_who_is_on_goes_first_and_who_was_just_switched_on_stays():
    assert told([20, 20, 20], feeder_a=26.0) == [20, 6, 0]
    assert told([20, 20, 20], feeder_a=26.0, on=[2]) == [6, 0, 20]
    assert told([32, 32, 0], feeder_a=32.0, on=[2], held=[2]) == [26, 0, 6]
    # Held stations never break a limit.
    assert told([32, 32, 0], feeder_a=32.0, on=[2], held=[2], capacity_kw=1.0) == [0, 0, 0]
