"""Certificates: right as often as they say, equal to slow arithmetic, the same however often one asks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import programs
from apportion.certify.betting import _STAKES, bounds, log_wealth, trust
from apportion.certify.certificate import Gains, _autocorrelations, _block_means
from apportion.errors import InputError

benchmark = programs.benchmark("certificates")
PATHS = 300
GAINS = arrays.arrays(float, st.integers(1, 30), elements=st.floats(-1, 1, width=32))


@pytest.mark.parametrize("kind", benchmark.NULLS)
def test_no_more_than_one_in_twenty_is_certified_without_a_gain_at_any_time(kind):
    # A verdict once reached stays, so this is stopping at the best moment. Of 10,000 paths:
    # docs/results/certificates/simulated.csv.
    draw, block = benchmark.NULLS[kind]
    paths = draw(np.random.default_rng(7), PATHS)
    verdicts = [Gains(own, -1.0, 1.0).certify(block=block).verdict for own in paths]
    assert verdicts.count("certified") <= 0.05 * PATHS
    if kind != "worse than nothing":
        assert PATHS - verdicts.count("not yet") <= 0.05 * PATHS


@pytest.mark.parametrize("persistence", [0.3, 0.7, 0.9])
def test_autocorrelated_gains_are_not_decided_on_one_by_one(persistence):
    # Bet on regardless, 9, 64 and 90 % of such paths would have a verdict at some time.
    paths = benchmark.autocorrelated(np.random.default_rng(7), PATHS, persistence, 0.4)
    made = [Gains(own, -1.0, 1.0).certify() for own in paths]
    assert sum(one.verdict != "not yet" for one in made) <= 0.05 * PATHS + 9
    told = [one.autocorrelation[-1] for one in made]
    assert np.mean(told) == pytest.approx(persistence, abs=0.1)
    shown = next(one for one in made if one.autocorrelated[-1])
    assert f"({shown.autocorrelation[-1]:+.2f} from one to the next)" in shown.summary()
    assert "longer blocks: " in shown.summary()
    assert shown.to_json()["autocorrelated"]


def test_autocorrelation_is_that_of_the_last_hundred():
    values = np.random.default_rng(0).normal(size=130).cumsum()
    found = _autocorrelations(values, 100)
    for n in (2, 50, 130):
        last = values[max(n - 100, 0) : n]
        last = last - last.mean()
        assert found[n - 1] == pytest.approx((last[1:] * last[:-1]).sum() / (last**2).sum())
    assert _autocorrelations(np.full(9, 0.3), 100).tolist() == [0.0] * 9


def test_losses_beyond_the_bound_are_told_and_withhold_the_certificate_where_they_outweigh():
    steady = np.tile([0.04, 0.01, 0.03], 40)
    assert Gains.within(steady, 0.05).certify().verdict == "certified"
    rare = steady.copy()
    rare[[30, 70]] = -1.0
    made = Gains.within(rare, 0.05).certify()
    assert (made.verdict, made.gains.losses_beyond) == ("certified", 2)
    assert "2 of them losses, the worst of -100 points" in made.summary()
    assert "with losses in full the mean gain is +0.958" in made.summary()
    rare[[30, 70]] = -4.0
    made = Gains.within(rare, 0.05).certify()
    assert (made.verdict, made.to_json()["losses_beyond"]) == ("not yet", 2)
    assert "with losses in full the mean gain is -" in made.summary()


def slow_wealth(gains: list[float], mean: float, low: float) -> list[float]:
    """Bet by bet: the next stake is the mean of all stakes, each weighed by what it has won."""
    purses, wealth, path = [1 / len(_STAKES)] * len(_STAKES), 1.0, []
    for gain in gains:
        stake = sum(f * w for f, w in zip(_STAKES, purses, strict=True)) / sum(purses)
        factor = 1 + stake * (gain - mean) / (mean - low)
        purses = [
            w * (1 + f * (gain - mean) / (mean - low)) for f, w in zip(_STAKES, purses, strict=True)
        ]
        wealth *= factor
        path.append(wealth)
    return path


@given(GAINS)
def test_the_wealth_is_that_of_predictable_bets_one_after_the_other(gains):
    for mean in (0.0, -0.4, 0.3):
        path = np.exp(log_wealth(gains, mean, -1.0))
        assert path == pytest.approx(slow_wealth(gains.tolist(), mean, -1.0), rel=1e-9)
        assert (path >= 0).all()


def test_the_bounds_are_those_of_a_search_through_all_means():
    rng = np.random.default_rng(2)
    for shift in (-0.5, 0.2):
        gains = np.clip(rng.normal(shift, 0.2, 25), -1, 1)
        found = bounds(gains, -1.0, 1.0, 0.1)
        lower, upper = -1.0, 1.0
        tried = [round(-1 + k / 500, 12) for k in range(1, 1000)]
        below = {m: slow_wealth(gains.tolist(), m, -1.0) for m in tried}
        above = {m: slow_wealth((-gains).tolist(), -m, -1.0) for m in tried}
        for n in range(25):
            lower = max([lower, *(m for m in tried if below[m][n] >= 20)])
            upper = min([upper, *(m for m in tried if above[m][n] >= 20)])
            assert found.lower[n] == pytest.approx(lower, abs=1e-9)
            assert found.upper[n] == pytest.approx(upper, abs=1e-9)
        assert found.lower[-1] < gains.mean() < found.upper[-1]


@given(GAINS, st.floats(0.05, 0.5), st.integers(1, 3))
def test_turning_the_gains_round_turns_the_verdict_round(gains, alpha, block):
    # Repeated, so that there are verdicts among them.
    gains = np.tile(gains, 8)
    there = Gains(gains, -1.0, 1.5).certify(alpha=alpha, block=block)
    back = Gains(-gains, -1.5, 1.0).certify(alpha=alpha, block=block)
    turned = {"certified": "harmful", "harmful": "certified", "not yet": "not yet"}
    assert back.verdict == turned[there.verdict]
    assert back.log_better.tolist() == there.log_worse.tolist()
    # Both ends are rounded outwards to a thousandth of the range, each from its own side.
    assert back.bounds.lower == pytest.approx(-there.bounds.upper, abs=1e-9)


@given(GAINS, st.integers(1, 4))
@settings(max_examples=8)
def test_asking_after_every_period_changes_nothing(gains, block):
    whole = Gains(gains, -1.0, 1.0).certify(alpha=0.3, block=block)
    for n in range(len(gains) + 1):
        asked = Gains(gains[:n], -1.0, 1.0).certify(alpha=0.3, block=block)
        k = len(asked.means)
        assert k == n // block
        assert asked.log_better.tolist() == whole.log_better[:k].tolist()
        assert asked.bounds.lower.tolist() == whole.bounds.lower[:k].tolist()
        if asked.verdict != "not yet" and not whole.changed:
            assert (whole.verdict, whole.decided) == (asked.verdict, asked.decided)


def test_missing_periods_are_left_out_and_the_last_block_waits():
    holes = np.array([0.2, np.nan, np.nan, np.nan, 0.4, 0.0, 0.9])
    means, ends = _block_means(holes, 2)
    assert (means.tolist(), ends.tolist()) == ([0.2, 0.2], [1, 5])
    made = Gains(holes, -1.0, 1.0, periods=np.array(list("abcdefg"))).certify(block=2)
    plain = Gains(np.array([0.2, 0.2]), -1.0, 1.0).certify()
    assert made.log_better.tolist() == plain.log_better.tolist()
    assert made.to_frame().period.tolist() == ["b", "f"]
    nothing = Gains(np.full(4, np.nan), -1.0, 1.0).certify()
    assert nothing.verdict == "not yet"
    assert "no complete block" in nothing.summary()
    assert nothing.to_json()["mean"] is None


def test_gains_that_turn_bring_the_newer_verdict_and_say_that_they_changed():
    made = Gains(np.repeat([0.5, -0.9], [40, 200]), -1.0, 1.0).certify()
    assert made.verdict == "harmful"
    assert made.changed
    assert "changed" in made.summary()
    assert Gains(np.full(40, 0.5), -1.0, 1.0).certify().verdict == "certified"


def test_trust_is_the_capped_logarithm_of_the_wealth_and_is_lost_as_fast_as_it_is_won():
    gains = np.array([0.2, -0.1, 0.3, 0.1, 0.2, 1.0])
    wealth = log_wealth(gains, 0.0, -1.0) / np.log(20)
    assert trust(gains, -1.0, 0.05) == pytest.approx(np.clip(wealth, 0, 1))
    assert Gains(gains, -1.0, 1.0).certify().trust == pytest.approx(wealth[-1])
    # Long success buys no credit.
    for before in (40, 400):
        later = trust(np.repeat([0.5, -0.2], [before, 60]), -1.0, 0.05)[before:]
        assert later[0] > 0.5 > later[12]


def test_a_certificate_shows_itself():
    days = np.arange("2021-01-01", "2021-03-02", dtype="datetime64[D]")
    gains = Gains.within(
        np.tile([0.03, 0.01, 0.2], 20), 0.05, periods=days, baseline="llf", period="day"
    )
    made = gains.certify()
    assert gains.clipped == 20
    printed = made.to_json()
    assert (printed["verdict"], printed["clipped"], printed["bound"]) == (
        "certified", 20, [-0.05, 0.05],
    )  # fmt: skip
    assert printed["decided"] == str(days[made.ends[made.decided]])
    assert printed["wealth"]["better"] > printed["wealth"]["needed"] == 40
    assert "certified: policy against llf, since 2021-" in made.summary()
    assert str(made) == made.summary()
    assert "20 of 60 were beyond" in made.summary()
    assert len(made.to_frame()) == 60
    assert len(made.plot().axes) == 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gains(np.zeros(3), -1, 1).certify(alpha=0), "alpha is 0"),
        (lambda: Gains(np.zeros(3), -1, 1).certify(alpha=1.0), "alpha is 1"),
        (lambda: Gains(np.zeros(3), -1, 1).certify(alpha=math.nan), "alpha is nan"),
        (lambda: Gains(np.zeros(3), -1, 1).certify(block=0), "block is 0"),
        (lambda: Gains(np.zeros((3, 1)), -1, 1), "one number a period"),
        (lambda: Gains(np.array([2.0]), -1, 1), "2 is outside"),
        (lambda: Gains(np.zeros(1), 0, 1), "0 must lie between"),
        (lambda: Gains(np.zeros(2), -1, 1, periods=np.arange(3)), "in 3 periods"),
    ],
)
def test_what_cannot_be_certified_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()
