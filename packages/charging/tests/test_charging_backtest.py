"""A policy compared with the schedulers: sums, leads, daily gains, and the effect of training."""

import json
from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest

from apportion.domains.demonstration import SINGLE_TASKS
from apportion.errors import InputError
from apportion.policy import Pooled
from apportion.runs.policy_file import save_policy
from apportion.runs.progress import Quiet
from apportion.trees import take
from apportion_charging import demonstration
from apportion_charging.backtest import (
    OPTIMUM,
    POLICY,
    backtest_saved,
    backtest_schedules,
    busiest_day,
    check_facts,
    daily_gains,
    read_certificate,
)
from apportion_charging.days import Days
from apportion_charging.problem import CHANNELS, PolicySchedule
from apportion_charging.schedulers import CLAIRVOYANT, SCHEDULERS, simulate
from apportion_charging.sessions import _inspect_frame, read_sessions
from apportion_charging.settings import ChargingSettings
from apportion_charging.site import Site, embedded_site
from apportion_charging.training import Garages, _card, _collect_facts, train_charging
from learning import assert_mean_above, optimised

pytestmark = pytest.mark.usefixtures("few_schedulers")

SETTINGS = ChargingSettings(
    method="mtl", site=("jpl",), until="2019-06-30", tasks=10, task_size=6, steps=30, days=8,
    hidden=12, members=4, chunk=30,
)  # fmt: skip
FRAME = read_sessions().loc[lambda rows: rows.arrival < "2019-08-01"]
SOME = {"site": "jpl", "tasks": 3, "embedded": True}
RATE_KW = 6.656


@pytest.fixture(scope="module")
def garages():
    return Garages.of(FRAME, SETTINGS)


@pytest.fixture(scope="module")
def saved(garages):
    return _collect_facts(garages, SETTINGS)


@pytest.fixture(scope="module")
def untrained():
    return Pooled(CHANNELS, 4, key=jax.random.key(0))


@pytest.fixture(scope="module")
def tested(saved, untrained):
    """The backtest of an untrained policy on the days after training."""
    return backtest_saved(untrained, saved, FRAME, **SOME)


def test_every_schedule_delivers_what_its_own_simulation_does_and_nobody_beats_the_optimum(
    tested, garages, untrained
):
    days = garages.all_days["jpl"].between("2019-07-01")
    assert tested.dates.tolist() == days.dates.tolist()
    for name, schedule in ((POLICY, PolicySchedule(untrained)), ("llf", SCHEDULERS["llf"])):
        alone = simulate(days, [schedule], 0.15 * 6 * RATE_KW, tested.members).energy_kwh[0]
        assert tested.drawn_kwh[name] == pytest.approx(alone, abs=1e-3)
        assert tested.served[name] == pytest.approx(alone.sum() / tested.need_kwh.sum(), rel=1e-5)
    assert max(tested.served, key=lambda name: tested.served[name]) == OPTIMUM


def test_a_lead_is_the_difference_of_what_was_served_and_its_interval_that_of_days(tested):
    lead = tested.ahead("llf")
    assert lead.value == pytest.approx(tested.served[POLICY] - tested.served["llf"], abs=1e-6)
    gains = (tested.drawn_kwh[POLICY] - tested.drawn_kwh["llf"]).sum((0, 2, 3))
    needs = tested.need_kwh.sum((0, 2, 3))
    # A jackknife over days estimates the same standard error.
    left_out = [np.delete(gains, d).sum() / np.delete(needs, d).sum() for d in range(len(gains))]
    error = np.sqrt((len(gains) - 1) * np.var(left_out))
    assert (lead.high - lead.low) / 2 == pytest.approx(2.1 * error, rel=0.15)
    # Days without any need do not count.
    assert lead.n == (needs > 0).sum()


def test_the_card_of_a_test_compares_with_the_rule_that_is_best_for_the_objective(tested):
    for objective in ("energy", "fair", "promise", "cost"):
        own = replace(tested, objective=objective)
        leads = {name: own.ahead(name).value for name in SCHEDULERS if name != CLAIRVOYANT}
        assert own.best_rule == min(leads, key=lambda name: leads[name])
        card = _card("here", own)
        assert f"over {own.best_rule}, the best rule: here" in card["label"]
        assert card["value"] == f"{100 * leads[own.best_rule]:+.2f} points"


def test_the_demonstration_compares_with_the_rule_that_serves_most(untrained, monkeypatch):
    tested, shape = [], (demonstration._REPETITIONS, 2 + SINGLE_TASKS)

    def backtest(*given, **options):
        tested.append(backtest_schedules(*given, **options))
        return tested[-1]

    policies = jax.tree.map(lambda x: np.broadcast_to(x, (*shape, *x.shape)), untrained)
    monkeypatch.setattr(demonstration, "train_methods", lambda *given, **options: policies)
    monkeypatch.setattr(demonstration, "backtest_schedules", backtest)
    monkeypatch.setattr(demonstration, "_TESTED", ("2021-05-01", "2021-05-14"))
    shown = demonstration.demonstrate_charging(0, Quiet())
    # Networks are named by their places, such as "(0, 1)".
    rules = {n: x for n, x in tested[0].served.items() if n != POLICY and not n.startswith("(")}
    assert rules.keys() > {"equal", "llf"}
    best = max(rules, key=lambda name: rules[name])
    level = shown.levels.set_index("method").level
    assert level[f"best rule ({best})"] == pytest.approx(100 * rules[best], rel=0.1)


def test_a_result_shows_itself(tested, untrained, garages):
    assert tested.to_json().keys() == {
        *("site", "start", "end", "days", "stations", "capacity", "capacity_kw", "served", "ahead"),
        *("objective", "measures"),
    }
    table = tested.to_frame()
    assert table.schedule.tolist() == sorted(tested.served, key=lambda n: -tested.served[n])
    # The columns have the same order for any order of rows, and a lead is in points.
    measures = ["served", "left_short", "fairness", "kept", "cost_per_kwh"]
    assert list(table.columns) == ["schedule", *measures, "ahead", "low", "high"]
    free = replace(tested, cost={}).to_frame()
    assert list(free.columns) == ["schedule", *measures[:-1], "ahead", "low", "high"]
    lead = f"{100 * tested.ahead('llf').value:+.2f}"
    lines = [line.split() for line in tested.summary().splitlines()]
    assert next(line for line in lines if line[0] == "llf")[-3] == lead
    for name in tested.served:
        assert name in tested.summary()
    assert len(tested.plot().axes[0].patches) == len(tested.served)
    days = garages.all_days["jpl"].between("2019-07-01")
    power = busiest_day(untrained, days, tested)
    need = tested.need_kwh.sum((2, 3))
    task, _ = np.unravel_index(need.argmax(), need.shape)
    assert list(power.columns[1:-1]) == [days.stations[i] for i in tested.members[task]]
    together = power.drop(columns="time").sum(axis=1)
    assert together.to_numpy() == pytest.approx(0.15 * 6 * RATE_KW, rel=1e-4)
    assert tested.capacity_kw == pytest.approx(0.15 * 6 * RATE_KW)


@pytest.mark.slow
@optimised()
def test_training_serves_more_than_least_laxity_at_stations_never_seen(garages):
    trained = train_charging(garages, SETTINGS)
    days = garages.unseen_stations("jpl").between("2019-05-20")
    first, *others = (take(trained.policy, member) for member in range(SETTINGS.members))
    schedulers = {str(place): PolicySchedule(other) for place, other in enumerate(others)}
    served = backtest_schedules(
        first, days, capacity=0.15, task_size=6, tasks=3, optimum=False,
        schedulers=schedulers | {"llf": SCHEDULERS["llf"]},
    ).served  # fmt: skip
    assert_mean_above([100 * (served[name] - served["llf"]) for name in (POLICY, *schedulers)], 0.0)


def test_a_backtest_refuses_what_it_cannot_do(untrained, saved):
    for options, message in (
        ({}, "choose one with --site"),
        ({"site": "jpl", "stations": 99}, "52 to choose from"),
        ({"site": "jpl", "end": "2019-05-09"}, "no day with a car"),
        ({"site": "jpl", "capacity": 0.0}, "capacity 0.0: give a share"),
        ({"site": "jpl", "start": "2030-01-01"}, "no day with a car"),
    ):
        with pytest.raises(InputError, match=message):
            backtest_saved(untrained, saved, FRAME, **options)
    with pytest.raises(InputError, match="not for charging"):
        backtest_saved(untrained, {"job": "budget"}, FRAME)
    for changed in ({"channels": 18}, {"channels": True}, {"task_size": 0}, {"recall": 1}):
        with pytest.raises(InputError, match=f"facts are wrong .{next(iter(changed))}"):
            check_facts(saved | changed)


def test_a_gain_is_the_difference_of_the_shares_of_the_days_need_after_training(
    untrained, saved, tested
):
    gains = daily_gains(untrained, saved, FRAME, "llf", **SOME)
    assert gains.labels().tolist() == tested.dates.tolist()
    assert str(gains.labels()[0]) > "2019-06-30"
    need = tested.need_kwh.sum((0, 2, 3), dtype=float)
    ours, theirs = (tested.drawn_kwh[n].sum((0, 2, 3), dtype=float) for n in (POLICY, "llf"))
    with np.errstate(invalid="ignore"):
        counted = np.clip((ours - theirs) / need, -0.05, 0.05)
    assert gains.values == pytest.approx(counted, abs=1e-6, nan_ok=True)
    assert (gains.low, gains.high, gains.period) == (-0.05, 0.05, "day")
    # Garages drawn from a site's stations do not have the fingerprint of the site.
    assert gains.site is None
    # A narrower bound clips large gains.
    narrow = daily_gains(untrained, saved, FRAME, "llf", bound=0.001, **SOME)
    assert narrow.clipped == (np.abs(gains.values) > 0.001).sum() > 0
    assert narrow.values == pytest.approx(np.clip(gains.values, -0.001, 0.001), nan_ok=True)


def test_the_baseline_may_be_the_users_own_or_another_run(untrained, saved, tmp_path):
    named = daily_gains(untrained, saved, FRAME, "llf", **SOME)
    own = daily_gains(untrained, saved, FRAME, SCHEDULERS["llf"], **SOME)
    np.testing.assert_array_equal(own.values, named.values)
    other = saved | {"until": {"jpl": "2019-07-12"}}
    save_policy(Pooled(CHANNELS, 4, key=jax.random.key(1)), tmp_path, other)
    gains = daily_gains(untrained, saved, FRAME, str(tmp_path), **SOME)
    # Only days after both were trained count.
    assert str(gains.labels()[0]) > "2019-07-12"
    assert np.nanmax(np.abs(gains.values)) > 0
    save_policy(untrained, tmp_path / "same", saved)
    same = daily_gains(untrained, saved, FRAME, str(tmp_path / "same"), **SOME)
    assert not np.nan_to_num(same.values).any()
    with pytest.raises(InputError, match="no scheduler 'clairvoyant' to certify against"):
        daily_gains(untrained, saved, FRAME, "clairvoyant", **SOME)
    with pytest.raises(InputError, match="no scheduler 'xxx"):
        daily_gains(untrained, saved, FRAME, 300 * "x", **SOME)


def test_a_garage_that_a_file_describes_is_tested_whole_and_its_certificate_is_refused_for_another(
    untrained, saved, tmp_path
):
    whole = embedded_site("jpl")
    site = replace(whole, stations=dict(list(whole.stations.items())[:6]))
    own, other = tmp_path / "jpl.toml", Site(site.stations, feeder_kw=60.0, volts=208.0)
    own.write_text(site.to_toml())
    july = FRAME[(FRAME.arrival < "2019-07-06") & FRAME.station.isin(site.stations)]
    gains = daily_gains(untrained, saved, july, "llf", site=str(own))
    assert gains.site == site.fingerprint
    path, made = tmp_path / "certificate.json", gains.certify().to_json()
    path.write_text(json.dumps(made))
    assert read_certificate(path, site) == made
    path.write_text(json.dumps(made | {"verdict": "harmful", "trust": 0.4}))
    assert read_certificate(path, site)["trust"] == 0
    path.write_text(json.dumps(made))
    with pytest.raises(InputError, match="it is not of this site, 6 stations"):
        read_certificate(path, other)
    # Garages drawn at a site have no fingerprint, so the certificate is not valid for the site.
    for content, said in ((made | {"site": None}, "certify the policy with --site"),
                          ([], "no certificate"), (made | {"trust": 2}, "no certificate")):  # fmt: skip
        path.write_text(json.dumps(content))
        with pytest.raises(InputError, match=said):
            read_certificate(path, site)


CUT = np.datetime64("2019-07-11")


def with_future(frame: pd.DataFrame, seed: int, names: Sequence[str]) -> pd.DataFrame:
    """Append random sessions after the cut, of any station, site, hour, stay and power."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(1, 80))
    # Days are in standard time: in summer, local time is an hour ahead.
    arrival = CUT.astype("datetime64[s]") + rng.integers(3600, 10 * 86_400, number)
    more = pd.DataFrame(
        {
            "site": rng.choice(["jpl", "elsewhere"], number, p=[0.9, 0.1]),
            "station": rng.choice(names, number),
            "arrival": arrival,
            "departure": arrival + rng.integers(600, 40 * 3600, number),
            "stated_departure": arrival + rng.integers(600, 40 * 3600, number),
            "requested_kwh": rng.uniform(0, 90, number),
            "delivered_kwh": rng.uniform(0, 60, number),
        }
    )
    return _inspect_frame(
        pd.concat([frame.astype({"site": str, "station": str}), more], ignore_index=True),
        "sessions",
    ).frame


@pytest.mark.filterwarnings("ignore:jpl. .* at stations that were not there")
def test_no_bit_of_what_is_said_of_a_day_depends_on_later_ones(saved, untrained, garages):
    before = FRAME[FRAME.arrival < CUT]
    description = garages.descriptions["jpl"]
    gains = daily_gains(untrained, saved, before, "llf", **SOME)
    assert str(gains.labels()[-1]) == str(Days.of(before, "jpl", description).over)
    for seed in range(2):
        later = with_future(before, seed, [*description.stations, "new", "newer"])
        again = daily_gains(untrained, saved, later, "llf", **SOME)
        assert len(again.values) > len(gains.values)
        assert again.labels()[: len(gains.values)].tolist() == gains.labels().tolist()
        assert again.values[: len(gains.values)].tobytes() == gains.values.tobytes()


def test_stations_that_training_did_not_know_redraw_nothing(saved, untrained, tested):
    new = FRAME[FRAME.site == "jpl"].tail(2).assign(station=["AAA", "ZZZ"])
    both = pd.concat([FRAME, new], ignore_index=True).astype({"site": str, "station": str})
    more = _inspect_frame(both, "s").frame
    with pytest.warns(
        UserWarning, match=r"jpl: 2 sessions at stations .*\(AAA, ZZZ\) are left out"
    ):
        again = backtest_saved(untrained, saved, more, optimum=False, **SOME)
    np.testing.assert_array_equal(again.members, tested.members)
    np.testing.assert_array_equal(again.drawn_kwh["llf"], tested.drawn_kwh["llf"])
    other = _inspect_frame(FRAME[FRAME.site == "jpl"].assign(station="elsewhere"), "s").frame
    with pytest.raises(InputError, match="none of its stations, such as elsewhere, was there"):
        backtest_saved(untrained, saved, other, **SOME)
    strange = _inspect_frame(FRAME[FRAME.site == "jpl"].assign(site="strange"), "s").frame
    with pytest.raises(InputError, match='site "strange" was not trained on'):
        daily_gains(untrained, saved, strange, "llf", tasks=3)


def test_a_site_is_the_same_whatever_its_case_and_training_days_are_warned_of(saved, untrained):
    loud = _inspect_frame(FRAME[FRAME.site == "jpl"].assign(site="JPL"), "s").frame
    quick = {"tasks": 3, "optimum": False, "schedulers": {}}
    found = backtest_saved(untrained, saved, loud, **quick)
    assert str(found.dates[0]) > "2019-06-30"
    assert backtest_saved(untrained, saved, FRAME, site="Jpl", **quick).dates[0] == found.dates[0]
    with pytest.warns(UserWarning, match="trained on days of jpl up to 2019-06-"):
        backtest_saved(untrained, saved, FRAME, site="jpl", start="2019-06-24", **quick)
