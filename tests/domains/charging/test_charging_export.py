"""The exported controller, in a process that has NumPy alone, answers as the controller does."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion.composition import Ensemble
from apportion.domains.charging import controller as live
from apportion.domains.charging.controller import Controller
from apportion.domains.charging.export import export_controller
from apportion.domains.charging.forecasts import EarlierDays, Predictor
from apportion.domains.charging.problem import CHANNELS
from apportion.domains.charging.site import Branch
from apportion.errors import InputError
from apportion.policy import Pooled
from domains.charging.garages import SITE, days_of, opinionated, random_garage
from domains.charging.live_garage import play, stays_of

NAMES = list(SITE.stations)
BRANCHES = {"back": Branch(20.0, tuple(NAMES[1:5]))}
GARAGE = replace(
    SITE, feeder_kw=None, feeder_a=48.0, branches=BRANCHES, timezone="America/Los_Angeles"
)
DAYS = days_of(*(random_garage(seed) for seed in range(16)))
PREDICTOR = Predictor.fit(DAYS)
TEAM = Ensemble.of([opinionated(), opinionated(1.0)])
BROKEN = eqx.tree_at(lambda p: p.score.of_held, opinionated(), jnp.array(jnp.nan))
ALONE = """
import importlib.util, json, sys
assert not any(map(importlib.util.find_spec, ("jax", "apportion", "pandas", "equinox", "scipy")))
import decide
wishes, state, found, run = [], None, [], decide._wishes
def noted(schedule, seen):
    wishes.append(run(schedule, seen))
    return wishes[-1]
decide._wishes = noted
for now in json.load(sys.stdin):
    answer, state = decide.decide(now, state)
    found.append((answer, state, [kw.tolist() for kw in wishes[-2:]]))
print(json.dumps(found).replace("NaN", "null"))
"""


def alone(folder: Path, *words: str, **options) -> Any:
    """The JSON that a Python says which finds NumPy and nothing else."""
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    for own in Path(np.__file__).parents[1].glob("numpy*"):
        if not (packages / own.name).exists():
            (packages / own.name).symlink_to(own)
    given, where = [sys.executable, "-S", *words], {"PYTHONPATH": str(packages)}
    done = subprocess.run(
        given, cwd=folder, env=where, capture_output=True, text=True, check=False, **options
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def troubled(now: dict, rng: np.random.Generator) -> dict:
    """What a controller is told on a bad day: silent meters, data that cannot be, no power for a while."""
    stations = []
    for station in now["stations"]:
        trouble = rng.integers(40)
        odd = [{"drawn_kw": None, "delivered_kwh": None}] * 6
        odd += [{"requested_kwh": -1}, {"arrival": "yesterday"}, {"colour": "red"}, {"full": True}]
        odd += [
            {"max_kw": 4.0},
            {"fixed_a": 9},
            {"offered_a": 7},
            {"drawn_kw": 1e6},
            {"full": False},
        ]
        if trouble > 0:
            stations.append(station | (odd[trouble - 1] if trouble <= len(odd) else {}))
    hour = pd.Timestamp(now["time"]).hour
    return now | {"stations": stations, "capacity_kw": {9: 0, 13: 15.0, 15: -3}.get(hour)}


@pytest.mark.parametrize(
    ("policy", "facts", "options"),
    [
        (opinionated(), {"recall": True}, {}),
        (TEAM, {"objective": "cost"}, {"trust": 0.6, "baseline": "equal"}),
        (BROKEN, {}, {}),
    ],
    ids=["recalls", "leaves power unused", "cannot decide"],
)
def test_a_day_of_troubles_is_decided_alike(policy, facts, options, tmp_path, monkeypatch):
    about = {"job": "charging", "predictor": PREDICTOR.to_dict(), "channels": CHANNELS, **facts}
    rng, asked, answers, wishes = np.random.default_rng(1), [], [], []
    file = tmp_path / "state.json"

    def controller() -> Controller:
        made = Controller(policy, about, GARAGE, state=file, **options)
        if facts.get("recall"):
            made.past = EarlierDays.of(DAYS, PREDICTOR)
        return made

    running = controller()
    export_controller(running, tmp_path)
    run = live._wishes

    def noted(schedule, seen):
        wishes.append(run(schedule, seen))
        return wishes[-1]

    monkeypatch.setattr(live, "_wishes", noted)

    def ask(now: dict) -> dict[str, int]:
        nonlocal running
        if len(asked) == 40:
            running = controller()
        asked.append(troubled(now, rng) if len(asked) != 20 else None)
        answer = running.allocate(asked[-1])
        answers.append((answer, json.loads(file.read_text()), np.array(wishes[-2:])))
        return answer.allocation_a

    play(GARAGE, stays_of(DAYS.between(DAYS.dates[-1]), whole=True), ask, 15)
    found = alone(tmp_path, "-c", ALONE, input=json.dumps(asked))
    assert len(answers) > 60
    assert sum(max(answer.allocation_a.values()) >= 6 for answer, *_ in answers) > 40
    assert sum(bool(answer.warnings) for answer, *_ in answers) > 20
    for (told, state, kw), (answer, known, own_kw) in zip(found, answers, strict=True):
        assert told["allocation_a"] == answer.allocation_a
        assert told["allocation_kw"] == pytest.approx(answer.allocation_kw, abs=1e-6)
        assert told["unused_kw"] == pytest.approx(answer.unused_kw, abs=1e-6)
        assert told["decided_by"] == answer.decided_by
        assert told["warnings"] == list(answer.warnings)
        close = 1e-6 * GARAGE.capacity_kw
        np.testing.assert_allclose(np.array(kw, float), own_kw, rtol=0, atol=close)
        assert (state["time"], state["site"]) == (known["time"], known["site"])
        assert state["stations"].keys() == known["stations"].keys()
        for name, car in known["stations"].items():
            assert state["stations"][name] == pytest.approx(car, abs=1e-6)
    # The same file keeps the state of both, and the command line says the same.
    now = tmp_path / "now.json"
    now.write_text(json.dumps(asked[50]))
    kept = file.read_text()
    told = alone(tmp_path, "decide.py", "now.json", "--state", "state.json")
    after = json.loads(file.read_text())
    file.write_text(kept)
    assert told["allocation_a"] == controller().allocate(asked[50]).allocation_a
    assert after == json.loads(file.read_text())


class Mine(Pooled):
    """A policy of one's own."""


def test_a_policy_of_ones_own_is_not_exported(tmp_path):
    about = {"job": "charging", "predictor": PREDICTOR.to_dict(), "channels": CHANNELS}
    own = Controller(Mine(CHANNELS, 4, key=0), about, GARAGE)
    with pytest.raises(InputError, match="Mine is not part of apportion"):
        export_controller(own, tmp_path)
    assert not list(tmp_path.iterdir())
