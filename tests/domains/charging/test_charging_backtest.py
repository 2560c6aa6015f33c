"""A policy beside the schedulers: sums, leads and their intervals, and that training pays."""

import jax
import numpy as np
import pytest

from apportion.domains.charging.backtest import OPTIMUM, POLICY, backtest_saved, backtest_schedules
from apportion.domains.charging.forecasts import Predictor
from apportion.domains.charging.problem import CHANNELS
from apportion.domains.charging.schedulers import SCHEDULERS, simulate
from apportion.domains.charging.sessions import RATE_KW, read_sessions
from apportion.domains.charging.settings import ChargingSettings
from apportion.domains.charging.training import Garages, prepare_charging, train_charging
from apportion.errors import InputError
from apportion.policy import Pooled
from apportion.trees import take
from learning import assert_mean_above, optimised

SETTINGS = ChargingSettings(
    method="mtl", site=("jpl",), until="2019-06-30", tasks=10, task_size=6, steps=40, days=8,
    hidden=12, members=6, chunk=40,
)  # fmt: skip


@pytest.fixture(scope="module")
def garages():
    return Garages.of(read_sessions(), SETTINGS)


@pytest.fixture(scope="module")
def untrained():
    return Pooled(CHANNELS, 4, key=jax.random.key(0))


@pytest.fixture(scope="module")
def result(garages, untrained):
    days = garages.unseen_stations("jpl").between("2019-05-01", "2019-05-20")
    medians = garages.predictor.medians
    return backtest_schedules(untrained, days, medians, capacity=0.15, task_size=6, tasks=3), days


def test_every_schedule_delivers_what_its_own_simulation_does(result, garages):
    tested, days = result
    for name in ("llf", "equal", "clairvoyant"):
        alone = simulate(
            days.garage(),
            SCHEDULERS[name],
            0.15 * 6 * RATE_KW,
            garages.predictor.medians,
            tested.members,
        )
        assert tested.drawn_kwh[name] == pytest.approx(alone, abs=1e-3)
        assert tested.served[name] == pytest.approx(alone.sum() / tested.need_kwh.sum(), rel=1e-5)


def test_an_untrained_policy_is_nearly_equal_shares_and_nobody_beats_the_optimum(result):
    tested, _ = result
    assert tested.served[POLICY] == pytest.approx(tested.served["equal"], abs=0.01)
    assert max(tested.served, key=lambda name: tested.served[name]) == OPTIMUM
    assert tested.served["clairvoyant"] >= tested.served["llf"]


def test_a_lead_is_the_difference_of_what_was_served_and_its_interval_that_of_days(result):
    tested, _ = result
    lead = tested.ahead("llf")
    assert lead.value == pytest.approx(tested.served[POLICY] - tested.served["llf"], abs=1e-6)
    gains = (tested.drawn_kwh[POLICY] - tested.drawn_kwh["llf"]).sum((0, 2, 3))
    needs = tested.need_kwh.sum((0, 2, 3))
    # A jackknife over days is another way to the same standard error.
    left_out = [np.delete(gains, d).sum() / np.delete(needs, d).sum() for d in range(len(gains))]
    error = np.sqrt((len(gains) - 1) * np.var(left_out))
    assert (lead.high - lead.low) / 2 == pytest.approx(2.1 * error, rel=0.15)
    assert lead.n == len(tested.dates)
    wider = tested.ahead("llf", both=True)
    assert wider.high - wider.low > lead.high - lead.low


def test_fairness_and_cars_left_short_are_their_formulas(result):
    tested, _ = result
    shares = tested.drawn_kwh["llf"] / np.where(tested.need_kwh > 0, tested.need_kwh, np.nan)
    assert tested.short("llf") == pytest.approx(np.nanmean(shares[tested.need_kwh > 0] < 0.8))
    one = shares[0, 0][tested.need_kwh[0, 0] > 0]
    jain = one.sum() ** 2 / (len(one) * (one**2).sum())
    assert 0 < tested.fairness("llf") <= 1
    assert jain <= 1


@optimised()
def test_training_serves_more_than_equal_shares_at_stations_never_seen(garages):
    trained = train_charging(garages, SETTINGS)
    days = garages.unseen_stations("jpl")
    leads = []
    for member in range(SETTINGS.members):
        tested = backtest_schedules(
            take(trained.policy, member), days, garages.predictor.medians, capacity=0.15,
            task_size=6, tasks=4, optimum=False, peers={"equal": SCHEDULERS["equal"]},
        )  # fmt: skip
        leads.append(100 * tested.ahead("equal").value)
    assert_mean_above(leads, 0.0)


def test_the_predictor_survives_being_saved(garages):
    saved = garages.predictor.to_dict()
    again = Predictor.from_dict(saved)
    np.testing.assert_array_equal(again.need, garages.predictor.need)
    with pytest.raises(InputError, match="damaged"):
        Predictor.from_dict(saved | {"need": [float("nan")] * 8})
    with pytest.raises(InputError, match="train it again"):
        Predictor.from_dict({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity": (0.3, 0.1)}, "0 < least <= most"),
        ({"held_out": 1.0}, "below 1"),
        ({"task_size": 60}, "too few for tasks of 60"),
        ({"site": ("nowhere",)}, "nowhere"),
        ({"until": "2018-01-01"}, "no working day"),
        ({"until": "soon"}, "is not a day"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(changes, message):
    with pytest.raises(InputError, match=message):
        prepare_charging(ChargingSettings(**({"site": ("jpl",)} | changes)))


def test_a_backtest_refuses_what_it_cannot_do(untrained, garages):
    from apportion.domains.charging.training import facts_of

    saved = facts_of(garages, SETTINGS)
    frame = read_sessions()
    for options, message in (
        ({}, "choose one with --site"),
        ({"site": "jpl", "stations": 99}, "52 to choose from"),
        ({"site": "jpl", "capacity": 0.0}, "0 < capacity"),
        ({"site": "jpl", "start": "2030-01-01"}, "no working day"),
    ):
        with pytest.raises(InputError, match=message):
            backtest_saved(untrained, saved, frame, **options)
    with pytest.raises(InputError, match="not for charging"):
        backtest_saved(untrained, {"job": "budget"}, frame)
