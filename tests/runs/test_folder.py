import json
import os
import warnings
from functools import cache

import equinox as eqx
import jax
import numpy as np
import pandas as pd
import pytest

import apportion
from apportion.algorithm import Algorithm, begin
from apportion.domains.budget.problem import Budget
from apportion.domains.budget.settings import BudgetSettings
from apportion.domains.portfolio.settings import PortfolioJob
from apportion.errors import InputError
from apportion.learners.direct import Direct
from apportion.policy import Recurrent
from apportion.runs.checkpoint import from_arrays, to_arrays
from apportion.runs.folder import _KEPT_CHECKPOINTS, Run
from apportion.runs.policy_file import load_about, load_policy, save_policy
from apportion.runs.runner import JobResult, finish
from apportion.runs.settings import read_settings, to_toml
from apportion.tasks import draw_tasks

KEY = jax.random.key(7)


@pytest.fixture
def run(tmp_path):
    return Run.create(tmp_path / "run", "budget", BudgetSettings(seed=3), {"seed": 3})


def _rows(first: int, last: int) -> pd.DataFrame:
    steps = np.arange(first, last + 1)
    return pd.DataFrame({"step": steps, "reward": steps / 10, "deviation": 0.1})


@cache
def _state(hidden: int = 4):
    problem, policy = Budget.simulate(8, 20), Recurrent(2, hidden, key=KEY)
    algorithm = Algorithm.of(problem, draw_tasks(8, 3, 5), policy, Direct(4))
    return eqx.filter_jit(begin)(algorithm, policy, KEY)


def test_a_policy_is_that_of_a_finished_run(run):
    with pytest.raises(InputError, match="apportion resume"):
        _ = apportion.load_run(run.folder).policy


def test_a_policy_has_its_checksum_and_missing_files_are_named(run, tmp_path):
    finish(run, JobResult(Recurrent(2, 4, key=KEY), {}, ""))
    save_policy(Recurrent(2, 4, key=jax.random.key(8)), tmp_path / "other")
    (run.folder / "environment.json").unlink()
    with pytest.warns(UserWarning, match=r"1 of the run's files are missing, such as environment"):
        _ = run.policy
    for name in ("policy.json", "policy.safetensors"):
        (run.folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(InputError, match="the checksum in SHA256SUMS does not match"):
        _ = run.policy
    (run.folder / "SHA256SUMS").unlink()
    for load in (load_policy, load_about):
        with pytest.raises(
            InputError, match=r"SHA256SUMS: is missing or does not list policy.json"
        ):
            load(run.folder)


def test_a_run_that_stops_in_any_save_is_unfinished_or_complete(run, monkeypatch):
    """A run that counts as finished is never resumed, so its files and checksums must all exist."""
    rename = os.replace
    for stop_at in range(20):
        saves = iter(range(20))

        def stop(source, target, stop_at=stop_at, saves=saves):
            if next(saves) == stop_at:
                raise KeyboardInterrupt
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop)
            try:
                finish(run, JobResult(Recurrent(2, 4, key=KEY), {}, ""))
            except KeyboardInterrupt:
                assert not run.finished
                continue
        break
    assert stop_at > 5
    recorded = {line[66:] for line in (run.folder / "SHA256SUMS").read_text().splitlines()}
    assert recorded >= {"settings.toml", "headline.json", "policy.json", "results.json"}


def test_cutting_back_loses_no_row_before_the_step_and_keeps_none_after(run):
    for last in (2, 4, 6):
        run.write_rows("metrics", last, _rows(last - 1, last))
        run.write_checkpoint(last, {"x": np.zeros(2)}, {})
    run.truncate_after(4)
    run.write_rows("metrics", 6, _rows(5, 6))
    assert run.metrics["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert len(pd.read_parquet(run.folder / "metrics.parquet")) == 6
    assert run.newest_checkpoint()[0] == 4


def test_only_the_newest_checkpoints_are_kept_and_read_without_a_warning(run):
    for step in range(1, 8):
        run.write_checkpoint(step, {"x": np.arange(step)}, {})
    assert len(list((run.folder / "checkpoints").iterdir())) == _KEPT_CHECKPOINTS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.newest_checkpoint()[0] == 7
    assert json.loads((run.folder / "environment.json").read_text()) == {"seed": 3}


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw[:90] + b"?" + raw[91:]])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(run, damage):
    for step in (5, 10):
        run.write_checkpoint(step, {"x": np.arange(step)}, {})
    newest = run.folder / "checkpoints" / "step-000000010.safetensors"
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        step, arrays, _ = run.newest_checkpoint()
    assert step == 5
    np.testing.assert_array_equal(arrays["x"], np.arange(5))


def test_settings_changed_behind_a_checkpoint_are_noticed(run):
    run.write_checkpoint(5, {"x": np.zeros(1)}, {})
    file = run.folder / "settings.toml"
    file.write_text(file.read_text().replace("seed = 3", "seed = 4"))
    with pytest.raises(InputError, match="was changed since"):
        run.newest_checkpoint()


def test_a_state_comes_back_to_the_bit_keys_included(run):
    state = _state()
    run.write_checkpoint(0, *to_arrays(state))
    _, arrays, about = run.newest_checkpoint()
    again = from_arrays(_state(), arrays, about, "run")
    assert eqx.tree_equal(again, state)
    assert jax.random.key_impl(again.key) == jax.random.key_impl(state.key)


def test_a_checkpoint_of_other_settings_is_refused_by_name():
    arrays, about = to_arrays(_state(hidden=4))
    with pytest.raises(InputError, match=r"/recurrence/.* does not match this run"):
        from_arrays(_state(hidden=5), arrays, about, "run")
    with pytest.raises(InputError, match="is not a checkpoint"):
        from_arrays(_state(), arrays, {"format": "other"}, "run")


@pytest.mark.parametrize(
    ("job", "settings"),
    [
        ("budget", BudgetSettings(method="mtl", noise=0.25, seed=9)),
        ("portfolio", PortfolioJob(until="2019-01-01", learning_rate=1e-5)),
        ("portfolio", PortfolioJob(until='quote " back \\ tab \t é \x7f')),
    ],
)
def test_settings_survive_their_file(job, settings, tmp_path):
    file = tmp_path / "settings.toml"
    file.write_text(to_toml(settings, job))
    kind = type(settings)
    assert kind(**read_settings(file, job, kind)) == settings
    assert "# Seed of all random numbers." in file.read_text()
