"""Two processes that write to one folder at the same moment: one is refused, or both leave whole files."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import apportion.runs.runner as runner
from apportion.composition import EqualShares
from apportion.domains.budget.settings import BudgetSettings
from apportion.errors import InputError
from apportion.runs.atomic import read_json
from apportion.runs.folder import load_run
from apportion.runs.job import Outcome, PreparedJob
from apportion.runs.place import only_writer
from apportion.runs.progress import Quiet

SETTINGS = BudgetSettings()

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["apportion.runs.runner", "apportion.domains.budget.domain"])


@dataclass(frozen=True)
class Figures:
    """What a backtest found, as far as it is written."""

    number: int = 3

    def to_json(self) -> dict:
        return {"number": self.number}

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"number": [self.number] * 1000})


def _trained(on_chunk, resume) -> Outcome:
    # Long enough for the other to come.
    time.sleep(0.5)
    return Outcome(EqualShares(), {"done": True}, "")


def train(folder: Path) -> None:
    runner.prepare = lambda *_: PreparedJob({}, _trained)
    runner.start_run(folder, "budget", SETTINGS, Quiet())


def study(folder: Path) -> None:
    from apportion.studies.folder import complete
    from apportion.studies.theory import bound

    complete(bound.plan(families=4, samples=20), folder)


def backtest(folder: Path) -> None:
    from apportion.cli.backtest import _write

    _write(Figures(), folder)


def certify(folder: Path) -> None:
    from apportion.certificate import Gains
    from apportion.cli.certify import _write

    _write(Gains(np.linspace(-0.5, 0.5, 40), -1.0, 1.0).certify(), folder)


def _write_at_once(job: Callable[[Path], None], folder: Path, both, found) -> None:
    both.wait()
    try:
        job(folder)
        found.put("wrote")
    except InputError as error:
        found.put(f"refused: {error}")
    except BaseException as error:
        found.put(f"{type(error).__name__}: {error}")


def write_twice(job: Callable[[Path], None], folder: Path) -> list[str]:
    """What became of two processes that were let go at the same moment."""
    both, found = _CONTEXT.Barrier(2), _CONTEXT.Queue()
    writers = [
        _CONTEXT.Process(target=_write_at_once, args=(job, folder, both, found)) for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    told = sorted(found.get(timeout=300) for _ in writers)
    for writer in writers:
        writer.join()
    return told


def test_of_two_that_train_in_one_folder_one_is_refused(tmp_path):
    refused, wrote = write_twice(train, tmp_path / "run")
    assert wrote == "wrote"
    assert "another process is writing in it" in refused or "already holds a run" in refused
    run = load_run(tmp_path / "run")
    assert run.results == {"done": True}
    assert run.policy == EqualShares()


def test_two_that_compute_one_study_both_end(tmp_path):
    assert write_twice(study, tmp_path / "study") == ["wrote", "wrote"]
    assert not (tmp_path / "study" / "cells").exists()
    assert not list(tmp_path.rglob(".*.part"))
    computed = read_json(tmp_path / "study" / "study.json")["computing"]
    cells = pd.read_parquet(tmp_path / "study" / "rows.parquet")["cell"].nunique()
    assert sum(stretch["cells"] for stretch in computed) >= cells


def test_of_two_backtests_into_one_folder_one_is_refused(tmp_path):
    refused, wrote = write_twice(backtest, tmp_path / "out")
    assert wrote == "wrote"
    assert "another process is writing in it" in refused or "holds other files" in refused
    assert read_json(tmp_path / "out" / "results.json") == {"number": 3}
    assert len(pd.read_csv(tmp_path / "out" / "table.csv")) == 1000


def test_two_certificates_in_one_folder_are_both_whole(tmp_path):
    assert write_twice(certify, tmp_path / "out") == ["wrote", "wrote"]
    assert read_json(tmp_path / "out" / "certificate.json")["verdict"] == "not yet"
    assert len(pd.read_csv(tmp_path / "out" / "certificate.csv")) == 40
    assert (tmp_path / "out" / "certificate.png").read_bytes()[-8:-4] == b"IEND"
    assert not list(tmp_path.rglob(".*.part"))


def test_who_is_refused_leaves_the_folder_of_the_other_alone(tmp_path, monkeypatch):
    """Before the first checkpoint too, when a run that is refused is taken back."""
    monkeypatch.setattr(runner, "prepare", lambda *_: PreparedJob({}, lambda *_: None))
    with only_writer(tmp_path / "run"):
        (tmp_path / "run" / "environment.json").write_text("{}")
        with pytest.raises(InputError, match="another process is writing in it"):
            runner.start_run(tmp_path / "run", "budget", SETTINGS, Quiet())
        assert (tmp_path / "run" / "environment.json").read_text() == "{}"


def test_what_was_killed_before_its_settings_is_begun_again(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "prepare", lambda *_: PreparedJob({}, interrupted))
    with only_writer(tmp_path / "run"):
        (tmp_path / "run" / "environment.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt):
        runner.start_run(tmp_path / "run", "budget", SETTINGS, Quiet())
    assert load_run(tmp_path / "run").job == "budget"
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "environment.json").write_text("{}")
    with pytest.raises(InputError, match=r"holds other files, such as environment\.json"):
        runner.start_run(tmp_path / "others", "budget", SETTINGS, Quiet())
