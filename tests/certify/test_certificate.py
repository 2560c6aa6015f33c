"""Certificates: right as often as they say, equal to slow arithmetic, the same however often one asks."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import programs
from apportion.certify.betting import _SHARES, _STAKES, bounds, log_wealth, trust
from apportion.certify.certificate import Gains, _autocorrelations, _block_means
from apportion.errors import InputError

benchmark = programs.benchmark("certificates")
PATHS = 400
GAINS = arrays.arrays(float, st.integers(1, 30), elements=st.floats(-1, 1, width=32))


@pytest.mark.parametrize("kind", benchmark.NULLS)
def test_no_more_than_one_in_twenty_has_a_wrong_verdict_at_any_time(kind):
    # A true rate of 5 % passes with three standard errors. The rates of more paths:
    # docs/results/certificates/simulated.csv.
    found = benchmark.verdicts(kind, PATHS)
    most = PATHS * (0.05 + 3 * math.sqrt(0.05 * 0.95 / PATHS))
    assert found.count("certified") <= most
    if not kind.startswith(("worse", "drifting")):
        assert found.count("harmful") <= most


@pytest.mark.parametrize(
    ("kind", "least"), [*zip(benchmark.GAINED, (0.34, 0.87, 0.7), strict=True)]
)
def test_gains_of_independent_blocks_are_certified_as_soon_as_before(kind, least):
    found = benchmark.verdicts(kind, PATHS).count("certified") / PATHS
    assert found >= least - 2 * math.sqrt(least * (1 - least) / PATHS)


def test_dependent_blocks_and_few_blocks_are_given_as_the_reason():
    rng = np.random.default_rng(7)
    [gains] = benchmark.autocorrelated(rng, (1, 60), 0.9)
    made = Gains(gains, -1.0, 1.0).certify(block=1)
    assert (made.verdict, made.to_json()["autocorrelated"]) == ("not yet", True)
    assert (
        f"({made.autocorrelation[-1]:+.2f} from one to the next): bet on longer" in made.summary()
    )
    assert made.to_json()["wealth"]["needed"] > 100
    few = Gains(np.full(19 * 28, 0.5), -1.0, 1.0).certify()
    assert (few.verdict, few.reason) == (
        "not yet", "20 bets are needed to see whether they are independent",
    )  # fmt: skip
    enough = Gains(np.full(20 * 28, 0.5), -1.0, 1.0).certify()
    assert (enough.verdict, enough.decided, enough.reason) == ("certified", 19, None)


@pytest.mark.parametrize("lag", [1, 2])
def test_autocorrelation_is_that_of_all_before_less_what_independent_values_have(lag):
    values = 5 + np.random.default_rng(0).normal(size=130).cumsum()
    found = _autocorrelations(values, lag)
    for n in (3, 50, 130):
        own = values[:n] - values[:n].mean()
        expected = (own[lag:] * own[:-lag]).sum() / (own**2).sum() + (n - lag) / (n * (n - 1))
        assert found[n - 1] == pytest.approx(expected)
    assert _autocorrelations(np.full(9, 0.3), lag).tolist() == [0.0] * 9
    drawn = np.random.default_rng(1).normal(size=(2000, 20))
    assert abs(np.mean([_autocorrelations(own, lag)[-1] for own in drawn])) < 0.02


def test_losses_beyond_the_bound_are_told_and_withhold_the_certificate_while_they_outweigh():
    steady = np.tile([0.04, 0.01, 0.03], 40)
    assert Gains.within(steady, 0.05).certify(block=1).verdict == "certified"
    rare = steady.copy()
    rare[[30, 70]] = -1.0
    made = Gains.within(rare, 0.05).certify(block=1)
    assert (made.verdict, made.gains.losses_beyond) == ("certified", 2)
    assert "2 of them losses, the worst of -100 points" in made.summary()
    assert "with losses in full the mean gain is +0.958" in made.summary()
    # Later gains make up for the first loss, later losses take nothing back.
    early = np.append(-8.0, np.full(300, 0.03))
    asked = [Gains.within(early[:n], 0.05).certify(block=1).decided for n in (20, 250, 268, 301)]
    assert asked == [None, None, 267, 267]
    late = np.append(np.full(60, 0.03), -8.0)
    made = Gains.within(late, 0.05).certify(block=1)
    assert (made.verdict, made.decided, made.to_json()["losses_beyond"]) == ("certified", 19, 1)
    assert "with losses in full the mean gain is -" in made.summary()


def slow_wealth(gains: list[float], mean: float, low: float) -> list[float]:
    """Bet by bet: the next stake is the mean of all stakes, each weighed by what it has won."""
    purses, wealth, path = list(_SHARES), 1.0, []
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


@given(GAINS, GAINS, st.integers(1, 3), st.floats(0.3, 1.0))
@settings(max_examples=12)
def test_what_is_said_of_a_time_does_not_depend_on_what_comes_after(first, then, block, bound):
    # Repeated, so that there are verdicts among them, and losses beyond the bound.
    gains = np.append(np.tile(first, 4), np.tile(then, 4))
    whole = Gains.within(gains, bound).certify(alpha=0.3, block=block)
    for n in range(0, len(gains) + 1, 5):
        asked = Gains.within(gains[:n], bound).certify(alpha=0.3, block=block)
        k = len(asked.means)
        assert k == n // block
        assert asked.log_better.tolist() == whole.log_better[:k].tolist()
        assert asked.log_needed.tolist() == whole.log_needed[:k].tolist()
        for own, all_own in zip(asked._won, whole._won, strict=True):
            assert own.tolist() == all_own[:k].tolist()
        if asked.decided is not None:
            assert (whole.verdict, whole.decided) == (asked.verdict, asked.decided)
        else:
            assert whole.decided is None or whole.decided >= k


def test_missing_periods_are_left_out_and_the_last_block_waits():
    holes = np.array([0.2, np.nan, np.nan, np.nan, 0.4, 0.0, 0.9])
    means, ends = _block_means(holes, 2)
    assert (means.tolist(), ends.tolist()) == ([0.2, 0.2], [1, 5])
    made = Gains(holes, -1.0, 1.0, periods=np.array(list("abcdefg"))).certify(block=2)
    root = math.sqrt(2)
    plain = Gains(np.array([0.2, 0.2]), -1 / root, 1 / root).certify(block=1)
    assert made.log_better.tolist() == plain.log_better.tolist()
    assert made.to_frame().period.tolist() == ["b", "f"]
    nothing = Gains(np.full(4, np.nan), -1.0, 1.0).certify()
    assert nothing.verdict == "not yet"
    assert "no complete block" in nothing.summary()
    assert nothing.to_json()["mean"] is None


def test_gains_that_turn_leave_the_verdict_and_say_that_they_changed():
    made = Gains(np.repeat([0.5, -0.9], [40, 200]), -1.0, 1.0).certify(block=1)
    assert (made.verdict, made.decided) == ("certified", 19)
    assert made.changed
    assert "changed" in made.summary()
    assert made.trust == 0
    before = Gains(np.full(40, 0.5), -1.0, 1.0).certify(block=1)
    assert (before.verdict, before.changed) == ("certified", False)


def test_means_of_blocks_count_at_the_bound_over_the_root_of_the_block():
    made = Gains(np.repeat([0.1, 0.8], [40, 40]), -1.0, 1.0).certify(block=4)
    assert made.bet_bound == (-0.5, 0.5)
    assert made.counted.tolist() == pytest.approx([0.1] * 10 + [0.5] * 10)
    assert "a bet counts as -50 to +50 points; with bets in full the mean gain is +45" in str(made)
    # Blocks that lose all outweigh what the others gain, although they count as less.
    crashed = np.tile(np.repeat([0.1, -1.0], [36, 4]), 20)
    assert Gains(crashed, -1.0, 1.0).certify(block=4).verdict == "not yet"


def test_trust_is_the_capped_logarithm_of_the_wealth_and_is_lost_as_fast_as_it_is_won():
    gains = np.array([0.2, -0.1, 0.3, 0.1, 0.2, 1.0])
    wealth = log_wealth(gains, 0.0, -1.0) / np.log(20)
    assert trust(gains, -1.0, 0.05) == pytest.approx(np.clip(wealth, 0, 1))
    assert Gains(gains, -1.0, 1.0).certify(block=1).trust == pytest.approx(wealth[-1])
    # Long success buys no credit.
    for before in (40, 400):
        later = trust(np.repeat([0.5, -0.2], [before, 60]), -1.0, 0.05)[before:]
        assert later[0] > 0.5 > later[12]


def test_a_certificate_shows_itself():
    days = np.arange("2021-01-01", "2021-03-02", dtype="datetime64[D]")
    gains = Gains.within(
        np.tile([0.03, 0.01, 0.2], 20), 0.05, periods=days, baseline="llf", period="day"
    )
    made = gains.certify(block=1)
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
        (lambda: Gains(np.zeros((3, 1)), -1, 1), "one number per period"),
        (lambda: Gains(np.array([2.0]), -1, 1), "2 is outside"),
        (lambda: Gains(np.zeros(1), 0, 1), "0 must lie between"),
        (lambda: Gains(np.zeros(2), -1, 1, periods=np.arange(3)), "for 3 periods"),
    ],
)
def test_what_cannot_be_certified_is_refused(make, words):
    with pytest.raises(InputError, match=words):
        make()
