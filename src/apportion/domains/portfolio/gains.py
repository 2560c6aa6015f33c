"""What a portfolio policy gains over a strategy, week by week: the gains that a certificate bets on.

A week's gain is the difference of both log growths, net of costs, from Monday to Friday. Only weeks
after the last day that was trained on count, and the last one only once it is over.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from apportion.certificate import Gains
from apportion.domains.portfolio.backtest import Baseline, backtest, lazy_rebalancing
from apportion.domains.portfolio.baselines.simple import BASELINES, WITHOUT_HISTORY
from apportion.domains.portfolio.job import accepted_data
from apportion.domains.portfolio.prices import Prices
from apportion.domains.portfolio.record import EQUAL, HINDSIGHT, LAZY, Backtest
from apportion.domains.portfolio.rules import Rules
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.runs.policy_file import load_about, load_policy
from apportion.runs.settings import suggest

BOUND = 0.01
"""A week's gain counts at 1 point of log growth at most: a verdict is on gains so counted, and a policy
that now and then loses far more in a week needs a larger bound."""
_FRIDAY = 4


def weekly_gains(
    policy: Policy,
    about: Mapping[str, Any],
    prices: Prices,
    against: str | Policy,
    *,
    bound: float = BOUND,
) -> Gains:
    """A policy's gains over a strategy in the weeks after training.

    Parameters
    ----------
    about
        What was saved with the policy.
    against
        The name of a baseline, the folder of another portfolio run, or a policy of your own.
    bound
        What a week's gain counts at most; decide on it before you look.
    """
    about = dict(about)
    prices = accepted_data(prices, about)
    name = against if isinstance(against, str) else "own"
    strategies, last = _strategies(against, about)
    start = str(np.datetime64(last) + 1)
    if prices.row(start) >= len(prices.dates):
        raise InputError(
            f"the prices end on {prices.dates[-1]} and the policy was trained on days up to {last}; "
            "a certificate needs later days"
        )
    found = backtest(
        prices,
        start=start,
        window=about["window"],
        cost=about["cost"],
        policies={"policy": policy} | strategies.pop("policies", {}),
        rules={"policy": Rules.from_dict(about.get("rules"))} | strategies.pop("rules", {}),
        **strategies,
    )
    weeks, gains = by_week(found, name)
    return Gains.within(
        gains, bound, periods=weeks, baseline=name, period="week", unit="log growth a week"
    )


def by_week(found: Backtest, against: str) -> tuple[np.ndarray, np.ndarray]:
    """The last day of each complete week, and the difference of both strategies' log growth in it."""
    gap = np.log1p(found.net["policy"]) - np.log1p(found.net[against])
    days = found.dates.astype("datetime64[D]")
    # 1970-01-01 was a Thursday, and weeks begin on Mondays.
    number = (days.astype(int) + 3) // 7
    over = number < number[-1]
    if (days[-1].astype(int) + 3) % 7 >= _FRIDAY:
        over[:] = True
    weeks, first = np.unique(number[over], return_index=True)
    if not len(weeks):
        return days[:0], gap[:0]
    ends = np.append(first[1:], over.sum()) - 1
    return days[ends], np.add.reduceat(gap[over], first)


def _strategies(against: str | Policy, about: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """What `backtest` is to be given, and the last day that anybody was trained on."""
    last = about["last"]
    if not isinstance(against, str):
        return {"policies": {"own": against}}, last
    if against == EQUAL:
        return {}, last
    if against == LAZY:
        return {"policies": {LAZY: lazy_rebalancing()}}, last
    if against in BASELINES and against not in HINDSIGHT:
        kind = "hindsight" if against in WITHOUT_HISTORY else "baselines"
        chosen: dict[str, Baseline] = {against: BASELINES[against]}
        return {kind: chosen}, last
    if not Path(against).is_dir():
        known = [LAZY, *(name for name in BASELINES if name not in HINDSIGHT)]
        raise InputError(
            f"there is no baseline {against!r} to certify against; choose {', '.join(known)}, or the "
            f"folder of another portfolio run{suggest(against, known)}"
        )
    other = load_about(against)
    same = all(other.get(key) == about[key] for key in ("job", "window", "channels"))
    if not same:
        raise InputError(
            f"{against}: its policy reads other things than this one (window and series of a "
            "portfolio run); give another baseline"
        )
    rules = {against: Rules.from_dict(other.get("rules"))}
    return {"policies": {against: load_policy(against)}, "rules": rules}, max(last, other["last"])
