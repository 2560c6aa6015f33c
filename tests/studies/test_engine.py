"""Studies as cells: saved one by one, resumed, drawn, refused, and performed side by side."""

import importlib
import json
import os
import shutil
import signal
from dataclasses import replace

import pandas as pd
import pytest

import apportion.cli.commands  # noqa: F401, before the registry holds toys
from apportion.cli import main
from apportion.errors import InputError
from apportion.report import write_report
from apportion.report.study import study_page
from apportion.runs.files import checksummed, only_writer, write_json
from apportion.runs.runner import Stopped
from apportion.runs.sources import package_digests
from apportion.studies import registry
from apportion.studies.engine import CellStore, Plan, perform_plans
from apportion.studies.executors import Serial
from studies.toys import FILES, computed, perform, same_files, toy

CELLS = [f"cell-{n}" for n in range(6)]


def after(log, count, action):
    """A progress function that acts once so many cells are computed."""

    def progress(what, fraction):
        if len(computed(log)) == count:
            action()

    return progress


def ask_to_stop():
    os.kill(os.getpid(), signal.SIGINT)


def about(folder):
    return json.loads((folder / "study.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The toy's folder, computed undisturbed."""
    folder = tmp_path_factory.mktemp("whole") / "toy"
    perform(toy(), folder)
    return folder


def test_a_folder_holds_what_the_plan_keeps_of_all_rows(tmp_path):
    plan = replace(toy(), keep=lambda rows: rows[rows.value == rows.value.max()])
    with pytest.raises(InputError, match="rows of other cells"):
        perform(plan, tmp_path / "fewer")
    plan = replace(
        toy(), keep=lambda rows: rows.assign(value=rows.value.where(rows.number == 3, 0))
    )
    table = perform(plan, tmp_path / "blanked").study.figure().table
    assert table[table.value != 0].number.tolist() == [3]
    assert (pd.read_parquet(tmp_path / "blanked" / "rows.parquet").value != 0).sum() == 4


def test_a_stopped_study_goes_on_without_computing_a_cell_again(whole, tmp_path):
    log, cut = tmp_path / "log", tmp_path / "cut"
    with pytest.raises(Stopped, match=r"2 of 6 cells of toy are saved in .*; run the same command"):
        perform(toy(log), cut, progress=after(log, 2, ask_to_stop))
    assert len(computed(log)) == 2
    assert not (cut / "verdict.json").exists()
    assert (early := about(cut))["device"] == "cpu: cpu"
    assert "figures" not in early
    done = perform(toy(log), cut)
    assert sorted(computed(log)) == CELLS
    assert same_files(whole, cut)
    assert done.seconds >= early["seconds"] >= 0
    perform(toy(log), cut)
    # Drawing computes nothing.
    for file in FILES[:3]:
        (cut / file).unlink()
    perform(toy(log), cut, draw=True)
    assert len(computed(log)) == 6
    assert same_files(whole, cut)
    assert not (cut / "cells").exists()
    told = about(cut)
    assert (told["seconds"], told["command"]) == (done.seconds, "apportion study toy")
    assert (told["seed"], told["figures"][0]["notes"]) == (0, ["A note."])
    assert told["versions"]["jax"]
    assert (told["run"], told["source"]) == ("apportion study toy", toy().source)
    # Forty digits in a checkout, nothing elsewhere.
    assert told["commit"] is None or len(told["commit"].split()[0]) == 40


def test_a_folder_that_is_none_or_anothers_or_damaged_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"6 of 6 cells are missing \(first: cell-0\)"):
        perform(toy(), tmp_path / "none", draw=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; choose a folder"):
        perform(toy(), tmp_path / "file")
    with only_writer(tmp_path / "busy"), pytest.raises(InputError, match="another process is writ"):
        perform(toy(), tmp_path / "busy")
    (tmp_path / "busy" / "cells.json").write_text("[]")
    with pytest.raises(InputError, match=r"cells\.json: is damaged"):
        perform(toy(), tmp_path / "busy")
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "study.json").write_text('{"seconds": "long"}')
    with pytest.raises(InputError, match="does not record how the study was computed"):
        perform(toy(), tmp_path / "told")


def test_one_flipped_bit_of_the_rows_turns_no_verdict(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "toy")
    path = tmp_path / "toy" / "rows.parquet"
    raw = bytearray(path.read_bytes())
    for place in (10, len(raw) // 2, len(raw) - 40):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        with pytest.raises(InputError, match=r"rows.parquet: the checksum in .*remove it"):
            perform(toy(), tmp_path / "toy", draw=True)
    path.write_bytes(raw)
    perform(toy(), tmp_path / "toy", draw=True)
    assert same_files(whole, tmp_path / "toy")


def test_one_flipped_bit_of_any_file_is_seen_by_the_report(whole, tmp_path):
    folder = tmp_path / "toy"
    shutil.copytree(whole, folder)
    for name in ("figure.png", "study.json", "table.csv", "verdict.json"):
        raw = (folder / name).read_bytes()
        middle = len(raw) // 2
        (folder / name).write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
        with pytest.raises(InputError, match=rf"{name}: the checksum in SHA256SUMS does not match"):
            write_report(folder)
        (folder / name).write_bytes(raw)
    assert write_report(folder).exists()


@pytest.mark.parametrize("made", [False, True])
def test_a_study_that_is_refused_leaves_nothing(tmp_path, made):
    folder, log = tmp_path / "refused", tmp_path / "log"
    if made:
        folder.mkdir()
    with pytest.raises(InputError, match="the data is wrong"):
        perform(toy(log, trouble={"cell-0": ("refuse", 1)}), folder)
    assert folder.exists() == made
    assert not made or not list(folder.iterdir())
    # What was computed before it stays.
    with pytest.raises(InputError, match="the data is wrong"):
        perform(toy(log, trouble={"cell-4": ("refuse", 1)}), folder)
    assert (folder / "cells" / "cell-0.parquet").exists()


def test_a_study_of_several_figures_writes_each_under_its_name(tmp_path):
    done = perform(toy(name="pair", figures=("one", "two")), tmp_path)
    names = {file.name for file in tmp_path.iterdir() if not file.name.startswith(".")}
    assert names == {
        *("one.csv", "one.png", "two.csv", "two.png"),
        *("cells.json", "rows.parquet", "study.json", "verdict.json", "SHA256SUMS"),
    }
    verdicts = json.loads((tmp_path / "verdict.json").read_text())
    assert [verdict["figure"] for verdict in verdicts] == ["one", "two"]
    files = [
        (figure["name"], figure["table"], figure["picture"])
        for figure in about(tmp_path)["figures"]
    ]
    assert files == [("one", "one.csv", "one.png"), ("two", "two.csv", "two.png")]
    assert done.study.figure("two").name == "two"


def test_studies_side_by_side_are_concluded_as_their_cells_are_there(tmp_path):
    log = tmp_path / "log"
    plans = [toy(log, name=name) for name in ("one", "two", "three")]
    perform(plans[1], tmp_path / "two")
    told = []
    stores = [CellStore(plan, tmp_path / plan.study) for plan in plans]
    results = perform_plans(stores, Serial(), progress=lambda *what: told.append(what))
    assert [done.name for done in results] == ["two", "one", "three"]
    assert told[1] == ("6 of 18 cells, one: cell cell-0", 6 / 18)
    assert told[-1] == ("18 of 18 cells", 1.0)
    assert len(computed(log)) == 18
    again = [CellStore(toy(log, name=n, seed=1), tmp_path / "again" / n) for n in "abc"]
    with pytest.raises(Stopped, match="9 of 18 cells of 3 studies are saved in"):
        list(perform_plans(again, Serial(), progress=after(log, 27, ask_to_stop)))


def test_the_registry_gives_plans_their_settings_and_finds_figures():
    plan = registry.make_plan("bound", scale="quick", seed=11)
    assert (plan.settings["scale"], plan.settings["seed"]) == ("quick", 11)
    assert plan.digest != registry.make_plan("bound", seed=12).digest
    assert plan.on_processor
    for name, study in registry.study_names().items():
        assert registry._find_plan(name) is registry._find_plan(study)
    with pytest.raises(InputError, match=r"no study 'boun'; .* did you mean bound\?"):
        registry._find_plan("boun")


@pytest.fixture
def toys(monkeypatch, tmp_path):
    """The registry with two toy studies; the log of computed cells."""
    log = tmp_path / "log"
    plans = {
        name: lambda *, scale, seed, name=name: toy(log, scale=scale, seed=seed, name=name)
        for name in ("bound", "fig5")
    }
    monkeypatch.setattr(registry, "_find_plan", plans.__getitem__)
    entries = {name: registry.installed_studies()[name] for name in plans}
    monkeypatch.setattr(registry, "installed_studies", lambda: entries)
    return log


def run_cli(arguments, capfd):
    with pytest.raises(SystemExit) as left:
        main([str(argument) for argument in [*arguments, "--quiet"]])
    out, err = capfd.readouterr()
    return left.value.code, out, err


def test_all_studies_go_to_folders_of_their_own(toys, tmp_path, capfd):
    code, out, _ = run_cli(["study", "all", "--out", tmp_path / "all", "--json"], capfd)
    assert code == 0
    assert set(json.loads(out)["studies"]) == {"bound", "fig5"}
    assert len(computed(toys)) == 12
    for name in ("bound", "fig5"):
        folder = tmp_path / "all" / name
        assert (folder / "report.html").exists()
        command = f"apportion study {name} --scale quick --seed 0 --out {folder}"
        assert about(folder)["command"] == command
        run = f"apportion study all --scale quick --seed 0 --out {folder.parent}"
        assert about(folder)["run"] == run
    # What is drawn anew was computed as before.
    before = about(tmp_path / "all" / "fig5")
    code, _, _ = run_cli(["study", "fig5", "--out", tmp_path / "all" / "fig5", "--draw"], capfd)
    assert (code, about(tmp_path / "all" / "fig5")) == (0, before)


def test_a_study_that_goes_on_with_other_code_says_so(tmp_path, monkeypatch):
    log = tmp_path / "log"
    plan = toy(log, trouble={"cell-1": ("full", 1)})
    with pytest.raises(MemoryError):
        perform(plan, tmp_path / "toy")
    first = about(tmp_path / "toy")
    monkeypatch.setattr("apportion.studies.engine._ROWS_VERSION", 2)
    monkeypatch.setattr("apportion.studies.engine._commit", lambda: "a" * 40)
    perform(plan, tmp_path / "toy")
    then = about(tmp_path / "toy")
    assert then["source"] == f"{first['source']}; {plan.source}"
    assert then["commit"] == "; ".join(filter(None, [first["commit"], "a" * 40]))


STUDY = """
"What it is."
import math
from {room}.shared import compute
def conclude(rows, settings):
    # Why.
    return []
"""


def test_a_page_counts_the_files_of_the_packages_that_changed_since(whole, tmp_path):
    folder = shutil.copytree(whole, tmp_path / "study")
    before = about(folder)
    files = before["files"]
    assert {"apportion/studies/engine.py", "apportion_studies/catalogue.py"} <= files.keys()
    assert before["packages"] == package_digests()
    assert f"0 of {len(files)} files" in study_page(folder)
    changed = files | {"apportion/policy.py": "0", "apportion/gone.py": "0"}
    with checksummed(folder, "study.json"):
        write_json(folder / "study.json", before | {"files": changed})
    assert f"2 of {len(changed)} files" in study_page(folder)


@pytest.fixture
def source_of(tmp_path, monkeypatch):
    """The digest of a small study in a package of this name, after some replacements in its modules."""
    monkeypatch.syspath_prepend(tmp_path)

    def digest(room, **changes):
        files = {"shared": "def compute(cells, progress): yield 1\n", "other": "x = 1\n"}
        (tmp_path / room).mkdir()
        for name, text in (files | {"study": STUDY.format(room=room)}).items():
            old, new = changes.get(name, ("", ""))
            assert old in text
            (tmp_path / room / f"{name}.py").write_text(text.replace(old, new))
        module = importlib.import_module(f"{room}.study")
        return Plan("toy", (), module.compute, module.conclude, {}).source

    return digest


def test_the_source_of_a_study_is_its_code_and_that_beside_it_wherever_it_is(source_of):
    first = source_of("first")
    assert source_of("moved") == first
    assert source_of("described", study=("What it is", "Other")) == first
    assert source_of("commented", study=("Why", "How")) == first
    assert source_of("imported", study=("import math", "import json")) == first
    assert source_of("beside", other=("1", "2")) == first
    assert source_of("concluded", study=("[]", "[1]")) != first
    assert source_of("computed", shared=("1", "2")) != first


def test_without_studies_the_package_to_install_is_named(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(registry, "installed_studies", dict)
    for name in ("fig1", "all"):
        code, out, err = run_cli(["study", name, "--out", tmp_path / "none"], capfd)
        assert (code, out) == (2, "")
        assert "pip install apportion-studies" in err


def test_the_command_line_stops_goes_on_and_draws(toys, tmp_path, capfd, monkeypatch):
    command = ["study", "bound", "--out", tmp_path / "bound", "--seed", "3"]
    stopping = after(toys, 1, ask_to_stop)
    with monkeypatch.context() as patch:
        patch.setattr("apportion.runs.progress.Quiet.stage", lambda _, *what: stopping(*what))
        code, out, err = run_cli(command, capfd)
    assert (code, out) == (2, "")
    assert err.startswith("apportion: stopped: 1 of 6 cells of bound are saved")
    assert len(err.splitlines()) == 1
    code, _, err = run_cli([*command, "--draw"], capfd)
    assert code == 2
    assert "5 of 6 cells are missing" in err
    code, _, err = run_cli(command[:4], capfd)
    assert code == 2
    assert "other settings" in err
    for more in ([], ["--draw"]):
        code, _, _ = run_cli([*command, *more], capfd)
        assert code == 0
    assert len(computed(toys)) == 6
    assert about(tmp_path / "bound")["seed"] == 3


def test_data_that_a_study_does_not_read_is_refused_and_left_out_of_all(
    tmp_path, monkeypatch, toys
):
    monkeypatch.setattr(registry, "_read_data", lambda request: {"digits": None})
    with pytest.raises(InputError, match="study bound reads no digits; omit --images"):
        list(registry.perform("bound", tmp_path / "no", registry.Request()))
    assert not (tmp_path / "no").exists()
    assert len(list(registry.perform("all", tmp_path / "all", registry.Request()))) == 2
