"""The real server through simulated hours of faults; `garage_loop.py` runs longer ones."""

import asyncio

import pytest

pytest.importorskip("ocpp")
from garage_loop import Loop, compare, make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("loop"))


def test_three_hours_of_faults_keep_every_limit(run, tmp_path):
    loop = Loop(run, tmp_path, seed=1, days=0.125)
    served = asyncio.run(loop.live_through())
    assert served > 0
    assert loop.counts["minutes"] == 180


@pytest.mark.slow
def test_half_a_day_of_faults_serves_what_the_undisturbed_garage_does(run):
    plain, disturbed, counts = compare(run, seed=2, days=0.5)
    assert abs(plain - disturbed) < 0.02
    assert counts["minutes"] == 720
