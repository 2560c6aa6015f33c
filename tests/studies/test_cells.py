"""Studies as cells: saved one by one, resumed, shared out, adopted, refused; and on several devices."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pandas as pd
import pytest

import apportion.cli.study  # noqa: F401, before the registry holds toys
from apportion.cli import main
from apportion.errors import InputError
from apportion.runs.runner import Stopped
from apportion.studies import registry
from apportion.studies.engine import (
    CellStore,
    Record,
    complete,
    compute_unclaimed,
    programs_of,
    share_of,
)
from apportion.studies.theory import bound
from studies.toys import Computed, toy

FILES = ("table.csv", "verdict.json", "figure.png", "rows.parquet")


def same_files(one: Path, other: Path) -> bool:
    return all((one / file).read_bytes() == (other / file).read_bytes() for file in FILES)


def stop_after(computed, count):
    """A progress function that asks the process to stop, as Ctrl-C does, once so many are computed."""

    def progress(what, fraction):
        if len(computed) == count:
            os.kill(os.getpid(), signal.SIGINT)

    return progress


def test_a_stopped_study_goes_on_without_computing_a_cell_again(tmp_path):
    whole = complete(toy(), tmp_path / "whole")
    assert whole.missing == 0
    computed = Computed()
    with pytest.raises(Stopped, match=r"2 of 6 cells of toy are saved in .*; the same command"):
        complete(toy(computed), tmp_path / "cut", progress=stop_after(computed, 2))
    first = list(computed)
    assert len(first) == 2
    assert not (tmp_path / "cut" / "verdict.json").exists()
    complete(toy(computed), tmp_path / "cut")
    assert sorted(computed) == [f"cell-{n}" for n in range(6)]
    assert same_files(tmp_path / "whole", tmp_path / "cut")


def test_a_study_that_died_goes_on_from_its_saved_cells(tmp_path):
    computed = Computed()

    def die(what, fraction):
        if len(computed) == 3:
            raise MemoryError

    with pytest.raises(MemoryError):
        complete(toy(computed), tmp_path / "cut", progress=die)
    complete(toy(computed), tmp_path / "cut")
    complete(toy(), tmp_path / "whole")
    assert len(computed) == 6
    assert same_files(tmp_path / "whole", tmp_path / "cut")


def test_a_finished_study_computes_nothing_again(tmp_path):
    computed = Computed()
    for _ in range(2):
        complete(toy(computed), tmp_path)
    assert len(computed) == 6
    assert not (tmp_path / "cells").exists()


def test_shares_computed_one_after_the_other_draw_the_same_study(tmp_path):
    computed = Computed()
    half = complete(toy(computed), tmp_path / "shared", cells="1/2")
    assert (half.study, half.missing, half.cells) == (None, 3, 6)
    with pytest.raises(InputError, match=r"3 of 6 cells are missing \(first: cell-3\)"):
        complete(toy(computed), tmp_path / "shared", draw=True)
    again = complete(toy(computed), tmp_path / "shared", cells="1/2")
    assert again.missing == 3
    assert complete(toy(computed), tmp_path / "shared", cells="2/2").missing == 0
    assert len(computed) == 6
    complete(toy(), tmp_path / "whole")
    assert same_files(tmp_path / "whole", tmp_path / "shared")
    for file in ("table.csv", "verdict.json", "figure.png"):
        (tmp_path / "shared" / file).unlink()
    complete(toy(computed), tmp_path / "shared", draw=True)
    assert len(computed) == 6
    assert same_files(tmp_path / "whole", tmp_path / "shared")


def test_shares_computed_in_two_folders_are_drawn_where_their_cells_are_put_together(tmp_path):
    for place, share in (("one", "1/2"), ("other", "2/2")):
        complete(toy(), tmp_path / place / "toy", cells=share)
    for file in (tmp_path / "other" / "toy" / "cells").iterdir():
        file.rename(tmp_path / "one" / "toy" / "cells" / file.name)
    complete(toy(), tmp_path / "one" / "toy", draw=True)
    complete(toy(), tmp_path / "whole")
    assert same_files(tmp_path / "whole", tmp_path / "one" / "toy")


def test_drawing_where_nothing_was_computed_makes_no_folder(tmp_path):
    with pytest.raises(InputError, match="6 of 6 cells are missing"):
        complete(toy(), tmp_path / "none", draw=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("change", [{"seed": 1}, {"scale": "paper"}, {"cells": 5}])
def test_a_folder_with_cells_of_other_settings_is_refused(tmp_path, change):
    complete(toy(), tmp_path, cells="1/2")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(InputError, match="holds cells of a study with other settings or data"):
        complete(toy(**change), tmp_path)
    after = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert before == after


def test_a_file_where_a_folder_should_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; choose a folder"):
        complete(toy(), tmp_path / "file")


def test_a_sibling_of_the_same_family_and_settings_gives_its_rows(tmp_path):
    computed = Computed()
    complete(toy(computed, name="one", family="toys"), tmp_path / "one")
    complete(toy(computed, name="two", family="toys"), tmp_path / "two")
    assert len(computed) == 6
    assert (tmp_path / "two" / "table.csv").exists()
    about = json.loads((tmp_path / "two" / "study.json").read_text())
    assert (about["name"], about["computing"][0]["cells"]) == ("two", 6)
    complete(toy(computed, name="two", family="toys", seed=1), tmp_path / "three")
    complete(toy(computed, name="four"), tmp_path / "four")
    assert len(computed) == 18


def test_every_stretch_of_computing_is_recorded(tmp_path):
    computed = Computed()
    with pytest.raises(Stopped):
        complete(toy(computed, seed=7), tmp_path, progress=stop_after(computed, 2))
    early = json.loads((tmp_path / "study.json").read_text())
    assert [stretch["cells"] for stretch in early["computing"]] == [2]
    complete(toy(computed, seed=7), tmp_path, command="apportion study toy")
    complete(toy(computed, seed=7), tmp_path, command="apportion study toy", draw=True)
    about = json.loads((tmp_path / "study.json").read_text())
    assert [stretch["cells"] for stretch in about["computing"]] == [2, 4]
    assert all(stretch["seconds"] >= 0 for stretch in about["computing"])
    assert about["computing"][0] == early["computing"][0]
    assert about["device"] == about["computing"][0]["device"] == "cpu: cpu"
    assert (about["seed"], about["notes"]) == (7, ["A note."])
    assert about["command"] == "apportion study toy"
    assert about["versions"]["jax"]
    # Forty digits in a checkout, nothing elsewhere.
    assert about["commit"] is None or len(about["commit"].split()[0]) == 40


def test_cells_that_are_finished_at_once_are_recorded_together(tmp_path, monkeypatch):
    written = []
    write = Record.write
    monkeypatch.setattr(Record, "write", lambda *told: written.append(told[2]) or write(*told))
    complete(toy(cells=40), tmp_path)
    assert (written[0], written[-1]) == (1, 40)
    assert len(written) < 40


def test_shares_are_all_cells_once_and_programs_are_batches():
    cells = toy(cells=7).cells
    for parts in (1, 2, 3, 7, 9):
        shares = [share_of(cells, f"{part + 1}/{parts}") for part in range(parts)]
        assert [cell for share in shares for cell in share] == list(cells)
    for wrong in ("0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"):
        with pytest.raises(InputError, match="write I/N"):
            share_of(cells, wrong)
    found = programs_of(cells, 2)
    assert [len({cell.program for cell in batch}) for batch in found] == [1] * 4
    assert sorted(cell.name for batch in found for cell in batch) == [c.name for c in cells]


def test_a_study_of_the_registry_has_its_scale_and_seed_among_its_settings():
    plan = registry.make_plan("bound", scale="quick", seed=11)
    assert (plan.settings["scale"], plan.settings["seed"]) == ("quick", 11)
    assert plan.digest != registry.make_plan("bound", seed=12).digest


def test_every_study_of_the_registry_has_a_plan():
    for name in registry.STUDIES:
        assert registry.find_plan(name).__name__ == "plan"


def run_cli(arguments, capfd):
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in arguments])
    out, err = capfd.readouterr()
    return left.value.code, out, err


@pytest.fixture
def toys(monkeypatch):
    """The registry with two toy studies that share their cells; the names of computed cells."""
    computed = Computed()
    plans = {
        name: lambda *, scale, seed, name=name: toy(
            computed, scale=scale, seed=seed, name=name, family="toys"
        )
        for name in ("fig3", "fig4")
    }
    monkeypatch.setattr(registry, "find_plan", plans.__getitem__)
    for name in set(registry.STUDIES) - set(plans):
        monkeypatch.delitem(registry.STUDIES, name)
    return computed


def test_all_studies_go_to_folders_of_their_own(toys, tmp_path, capfd):
    code, out, _ = run_cli(["study", "all", "--out", tmp_path, "--quiet", "--json"], capfd)
    assert code == 0
    assert set(json.loads(out)["studies"]) == {"fig3", "fig4"}
    assert len(toys) == 6
    whole = json.loads((tmp_path / "all.json").read_text())
    assert whole["command"] == (
        f"apportion study all --scale quick --seed 0 --out {tmp_path} --processes 1"
    )
    assert set(whole["studies"]) == {"fig3", "fig4"}
    assert whole["seconds"] >= whole["seconds_computing"] == whole["studies"]["fig3"]
    assert (whole["device"], whole["processes"]) == ("cpu: cpu", 1)
    for name in ("fig3", "fig4"):
        assert (tmp_path / name / "report.html").exists()
        assert "A note." in (tmp_path / name / "report.html").read_text()
        about = json.loads((tmp_path / name / "study.json").read_text())
        assert about["command"] == (
            f"apportion study {name} --scale quick --seed 0 --out {tmp_path / name}"
        )


def test_how_long_all_took_is_not_written_by_drawing_nor_over_a_file_of_others(
    toys, tmp_path, capfd
):
    command = ["study", "all", "--out", tmp_path, "--quiet"]
    code, _, _ = run_cli(command, capfd)
    assert code == 0
    before = (tmp_path / "all.json").read_bytes()
    code, _, _ = run_cli([*command, "--draw"], capfd)
    assert (code, (tmp_path / "all.json").read_bytes()) == (0, before)
    (tmp_path / "all.json").write_text("{}")
    code, _, err = run_cli(command, capfd)
    assert code == 2
    assert "is not what a study wrote" in err
    assert (tmp_path / "all.json").read_text() == "{}"


def test_the_command_line_stops_shares_and_draws(toys, tmp_path, capfd, monkeypatch):
    command = ["study", "fig3", "--out", tmp_path / "fig3", "--seed", "3"]
    stopping = stop_after(toys, 1)
    with monkeypatch.context() as patch:
        patch.setattr("apportion.runs.progress.Quiet.stage", lambda _, *what: stopping(*what))
        code, out, err = run_cli([*command, "--quiet"], capfd)
    assert (code, out) == (2, "")
    assert err.startswith("apportion: stopped: 1 of 6 cells of fig3 are saved")
    assert len(err.splitlines()) == 1
    code, out, _ = run_cli([*command, "--cells", "1/2", "--quiet"], capfd)
    assert code == 0
    assert "3 of 6 cells are missing" in out
    code, _, err = run_cli([*command, "--draw", "--quiet"], capfd)
    assert code == 2
    assert "3 of 6 cells are missing" in err
    code, _, err = run_cli(["study", "fig3", "--out", tmp_path / "fig3", "--quiet"], capfd)
    assert code == 2
    assert "other settings" in err
    code, _, _ = run_cli([*command, "--cells", "2/2", "--quiet"], capfd)
    assert code == 0
    assert len(toys) == 6
    code, _, _ = run_cli([*command, "--draw", "--quiet"], capfd)
    assert code == 0
    assert json.loads((tmp_path / "fig3" / "study.json").read_text())["seed"] == 3


def test_data_that_a_study_does_not_read_is_refused(tmp_path, capfd):
    arguments = ["study", "bound", "--transitions", tmp_path / "x.csv", "--out", tmp_path / "no"]
    code, _, err = run_cli(arguments, capfd)
    assert code == 2
    assert "leave --transitions out" in err
    assert not (tmp_path / "no").exists()


TWO_DEVICES = """
import sys
from dataclasses import replace
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 2)
from test_cells import noting_devices
from apportion.studies.engine import complete
from apportion.studies.theory import bound

devices = set()
plan = bound.plan(families=5)
complete(replace(plan, compute=noting_devices(plan.compute, devices)), Path(sys.argv[1]))
assert devices == {0, 1}, devices
"""


def noting_devices(compute, devices):
    """The same computation, with the devices it runs on."""

    def noting(cells, progress):
        devices.update(device.id for device in jnp.zeros(1).devices())
        yield from compute(cells, progress)

    return noting


def test_two_devices_share_the_cells_and_find_the_same(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, str(tmp_path / "two")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    about = json.loads((tmp_path / "two" / "study.json").read_text())
    assert about["device"] == "2 x cpu: cpu"
    complete(bound.plan(families=5), tmp_path / "alone" / "one")
    assert same_files(tmp_path / "alone" / "one", tmp_path / "two")


def test_a_device_that_fails_stops_the_others_and_says_why(tmp_path, monkeypatch):
    import jax

    [device] = jax.local_devices()
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [device, device])
    computed = Computed()
    plan = toy(computed, cells=40)

    def failing(cells, progress):
        if cells[0].name == "cell-0":
            raise InputError("the data is wrong")
        yield from plan.compute(cells, progress)

    store = CellStore(plan, tmp_path)
    with pytest.raises(InputError, match="the data is wrong"):
        complete(replace(plan, compute=failing), tmp_path)
    assert store.missing()


def test_what_another_process_is_at_is_left_to_it(tmp_path):
    computed = Computed()
    plan = toy(computed)
    store = CellStore(plan, tmp_path)
    first, second = programs_of(plan.cells)
    with store.claim(first) as ours:
        assert ours
        assert [compute_unclaimed(store, program) for program in (first, second)] == [False, True]
        assert computed == [cell.name for cell in second]
        assert not store.complete()
    assert [compute_unclaimed(store, program) for program in (first, second)] == [True, False]
    assert sorted(computed) == [cell.name for cell in plan.cells]
    assert not (tmp_path / "verdict.json").exists()
    complete(plan, tmp_path)
    complete(toy(), tmp_path / "alone")
    assert same_files(tmp_path, tmp_path / "alone")
    assert not compute_unclaimed(store, first)
    assert not (tmp_path / ".claims").exists()


def test_a_half_finished_program_is_claimed_as_a_whole(tmp_path):
    plan = toy(computed := Computed())
    store = CellStore(plan, tmp_path).open()
    first, _ = programs_of(plan.cells)
    store.save(first[0], pd.DataFrame({"number": [0], "value": [0.0]}))
    with store.claim(first):
        assert not compute_unclaimed(store, first)
    assert not computed
    assert compute_unclaimed(store, first)
    assert computed == [cell.name for cell in first[1:]]


def test_a_study_is_complete_once_nobody_is_at_its_cells(tmp_path):
    store = CellStore(toy(), tmp_path)
    first, second = programs_of(store.plan.cells)
    compute_unclaimed(store, first)
    assert not store.complete()
    compute_unclaimed(store, second)
    with store.claim(second):
        assert not store.complete()
    assert store.complete()


def test_studies_that_share_cells_are_computed_once():
    asked = {
        name: registry.Asked(toy(name=name, family=family), Path(name), "")
        for name, family in (("one", "a"), ("two", "b"), ("three", "a"))
    }
    assert registry.by_cells(asked) == {"one": ["one", "three"], "two": ["two"]}


def test_the_longest_programs_begin_first_and_a_processor_beside_the_gpu():
    assert set(registry.LONGEST) <= set(registry.STUDIES)
    turns = [registry.turns_of(registry.STUDIES, number) for number in range(3)]
    assert all(sorted(turn) == sorted(registry.STUDIES) for turn in turns)
    assert turns[0] == turns[1]
    beside = [name for name in registry.STUDIES if registry.on_processor(name)]
    assert set(turns[0][-len(beside) :]) == set(turns[2][: len(beside)]) == set(beside)
    for turn in turns:
        # Of what is computed at one place, nothing comes before what takes longer.
        for here in (set(beside), set(registry.STUDIES) - set(beside)):
            long = [name for name in registry.LONGEST if name in here]
            assert [name for name in turn if name in here][: len(long)] == long
