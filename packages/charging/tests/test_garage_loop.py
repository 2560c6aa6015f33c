"""The real server through simulated hours of faults; `garage_loop.py` runs longer ones."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("ocpp")
from garage_loop import HttpLoop, Loop, compare, end_under_traffic


@pytest.mark.parametrize("kind", [Loop, HttpLoop])
def test_three_hours_of_faults_keep_every_limit(run, tmp_path, kind):
    loop = kind(run, tmp_path, seed=1, days=0.125)
    served = asyncio.run(loop.live_through())
    assert served > 0
    assert loop.counts["minutes"] == 180


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Loop, HttpLoop])
def test_a_day_of_faults_serves_what_the_undisturbed_garage_does(run, kind):
    # Over seeds the difference of a day has a standard deviation of 0.55 points.
    plain, disturbed, counts = compare(run, seed=12, days=1, kind=kind)
    assert abs(plain - disturbed) < 0.01
    assert counts["minutes"] == 1440


@pytest.mark.slow
def test_signals_under_traffic_end_the_server_within_five_seconds(run, tmp_path):
    seconds = asyncio.run(end_under_traffic(run, tmp_path, 5, np.random.default_rng(0)))
    assert max(seconds) < 5
