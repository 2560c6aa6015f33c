"""What a charging policy gains over a scheduler, day by day: the gains that a certificate bets on.

A day's gain is the difference of the shares of that day's need that both met, over all garages drawn at
the site: what garages of one day have in common counts once. Only days after training count.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.certificate import Gains
from apportion.domains.charging.backtest import HINDSIGHT, POLICY, PolicySchedule
from apportion.domains.charging.facts import as_trained, check_facts
from apportion.domains.charging.job import backtest_policy
from apportion.domains.charging.peers import PEERS, Schedule
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.runs.policy_file import load_about, load_policy
from apportion.runs.settings import suggest

BOUND = 0.05
"""A day's gain counts at 5 points of its need at most: schedulers that share one feeder among the same
cars rarely differ by more, and what a certificate says is about gains so counted."""


def daily_gains(
    policy: Policy,
    saved: Mapping[str, Any],
    frame: pd.DataFrame,
    against: str | Schedule,
    *,
    bound: float = BOUND,
    **chosen: Any,
) -> Gains:
    """A policy's gains over a scheduler on the days after training.

    Parameters
    ----------
    saved
        What was saved with the policy.
    against
        The name of a scheduler, the folder of another charging run, or a scheduler of your own. Another
        run's policy is shown this run's predictions, on days after both were trained.
    bound
        What a day's gain counts at most; decide on it before you look.
    chosen
        Site, stations, capacity and tasks, as in `backtest_policy`.
    """
    saved = dict(saved)
    name, schedule = against if isinstance(against, str) else "own", against
    if isinstance(schedule, str):
        schedule, until = _scheduler(schedule)
        own = saved.get("until", {})
        saved["until"] = {s: max(own.get(s, ""), until.get(s, "")) for s in {*own, *until}}
    found = backtest_policy(policy, saved, frame, peers={name: schedule}, optimum=False, **chosen)
    needed = found.by_day().astype(float)
    more = found.by_day(POLICY).astype(float) - found.by_day(name).astype(float)
    # A day on which nobody needed anything says nothing.
    share = np.where(needed > 0, more / np.where(needed > 0, needed, 1.0), np.nan)
    return Gains.within(
        share, bound, periods=found.dates, baseline=name, period="day", unit="the day's need"
    )


def _scheduler(name: str) -> tuple[Schedule, dict[str, str]]:
    """A scheduler by its name, or by the folder of its run with the last days it was trained on."""
    if name in PEERS and name not in HINDSIGHT:
        return PEERS[name], {}
    if not Path(name).is_dir():
        known = [peer for peer in PEERS if peer not in HINDSIGHT]
        raise InputError(
            f"there is no scheduler {name!r} to certify against; choose {', '.join(known)}, or the "
            f"folder of another charging run{suggest(name, known)}"
        )
    about = load_about(name)
    if about.get("job") != "charging":
        raise InputError(f"{name}: its policy is not one for charging; give another baseline")
    check_facts(about)
    return PolicySchedule(as_trained(load_policy(name), about)), about.get("until", {})
