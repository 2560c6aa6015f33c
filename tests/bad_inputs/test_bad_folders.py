"""Folders of runs and the policies in them."""

import json
from pathlib import Path

import numpy as np
from refusals import WIDE, assert_refused, cases

from apportion.runs.files import read_arrays, to_json, write_arrays
from apportion.runs.policy_file import _digest

PRICES = {"p.csv": WIDE}
ALLOCATE, BACKTEST = "allocate run --prices p.csv", "backtest run --prices p.csv"


@cases(
    ("backtest nowhere", "backtest nowhere", ("nowhere: no such folder",)),
    ("backtest a file", "backtest f", ("f: no such folder",), {"f": ""}),
    ("backtest an empty folder", "backtest d", ("holds no run",), {"d/f": ""}),
    ("backtest a budget", "backtest run", ("a run of budget", "no backtest"), {}, "budget"),
    ("backtest too early", "backtest run", ("not finished", "resume"), {}, "begun"),
    ("allocate nowhere", "allocate nowhere", ("nowhere: no such folder",)),
    ("allocate what", "allocate", ("DIR is missing",)),
    ("allocate two", "allocate a b", ("'b' is one argument too many",)),
    ("allocate a budget", "allocate run", ("a run of budget",), {}, "budget"),
    ("resume nowhere", "resume nowhere", ("no such folder",)),
    ("resume an empty folder", "resume d", ("holds no run",), {"d/f": ""}),
    (
        "resume a broken file",
        "resume run",
        ("settings.toml: not valid TOML",),
        {"run/settings.toml": "seed ="},
        "unfinished",
    ),
    (
        "resume no job",
        "resume run",
        ("there is no domain",),
        {"run/settings.toml": "seed = 1"},
        "unfinished",
    ),
    (
        "resume a slip",
        "resume run",
        ("did you mean seed?",),
        {"run/settings.toml": 'job = "budget"\nsed = 1'},
        "unfinished",
    ),
    (
        "resume, environment cut",
        "resume run",
        ("environment.json: not valid JSON",),
        {"run/environment.json": '{"data":'},
        "unfinished",
    ),
    (
        "resume, a number beyond all",
        "resume run",
        ("environment.json: not valid JSON (1e999 is no number)",),
        {"run/environment.json": '{"data": 1e999, "versions": {}}'},
        "unfinished",
    ),
    (
        "resume, environment empty",
        "resume run",
        ("environment.json: not valid JSON",),
        {"run/environment.json": ""},
        "unfinished",
    ),
    (
        "resume, environment a list",
        "resume run",
        ("environment.json: does not say",),
        {"run/environment.json": "[]"},
        "unfinished",
    ),
    (
        "resume, other data",
        "resume run",
        ("the data is not what the run started with",),
        {},
        "unfinished",
    ),
    (
        "resume, results cut",
        "resume run --json",
        ("results.json: not valid JSON",),
        {"run/results.json": "{"},
        "budget",
    ),
    (
        "backtest, settings cut",
        BACKTEST,
        ("settings.toml: not valid TOML",),
        PRICES | {"run/settings.toml": "a"},
        "portfolio",
    ),
    (
        "policy cut",
        BACKTEST,
        ("policy.json: not valid JSON",),
        PRICES | {"run/policy.json": "{"},
        "portfolio",
    ),
    (
        "policy changed",
        BACKTEST,
        ("policy.json: was changed",),
        PRICES | {"run/policy.json": '{"eta": 5}'},
        "portfolio",
    ),
    (
        "policy with NaN",
        BACKTEST,
        ("policy.json: not valid JSON", "NaN"),
        PRICES | {"run/policy.json": '{"a": NaN}'},
        "portfolio",
    ),
    (
        "arrays cut",
        BACKTEST,
        ("policy.safetensors",),
        PRICES | {"run/policy.safetensors": b"\x08"},
        "portfolio",
    ),
    (
        "arrays of others",
        BACKTEST,
        ("not a file that apportion wrote",),
        PRICES | {"run/policy.safetensors": b"abc" * 99},
        "portfolio",
    ),
    (
        "no arrays",
        BACKTEST,
        ("policy.safetensors: no such file",),
        PRICES | {"run/policy.safetensors": lambda path: path.unlink()},
        "portfolio",
    ),
    (
        "start is no day",
        f"{BACKTEST} --start 01/02/2019",
        ("'01/02/2019' is not a day",),
        PRICES,
        "portfolio",
    ),
    ("start is a year", f"{BACKTEST} --start 2000", ("'2000' is not a day",), PRICES, "portfolio"),
    ("start is empty", f"{BACKTEST} --start ''", ("is not a day",), PRICES, "portfolio"),
    (
        "start too late",
        f"{BACKTEST} --start 2030-01-01",
        ("after the last day",),
        PRICES,
        "portfolio",
    ),
    (
        "start too early",
        f"{BACKTEST} --start 2000-01-05",
        ("days of history before it",),
        PRICES,
        "portfolio",
    ),
    ("end is no day", f"{BACKTEST} --end never", ("'never' is not a day",), PRICES, "portfolio"),
    (
        "end before start",
        f"{BACKTEST} --start 2000-02-05 --end 2000-01-01",
        ("no trading day lies",),
        PRICES,
        "portfolio",
    ),
    (
        "backtest, site",
        f"{BACKTEST} --site jpl",
        ("a run of portfolio takes no --site",),
        PRICES,
        "portfolio",
    ),
    (
        "backtest, no prices",
        "backtest run --prices none.csv",
        ("none.csv: no such file",),
        {},
        "portfolio",
    ),
    (
        "allocate, no prices",
        "allocate run --prices none.csv",
        ("none.csv: no such file",),
        {},
        "portfolio",
    ),
    ("report nowhere", "report nowhere", ("no such folder",)),
    ("report on nothing", "report d", ("neither a run nor a study",), {"d/f": ""}),
    (
        "report, verdicts cut",
        "report d",
        ("verdict.json: not valid JSON",),
        {"d/verdict.json": "["},
    ),
    (
        "report, metrics cut",
        "report d",
        ("metrics.parquet: cannot be read",),
        {"d/metrics.parquet": "PAR1"},
    ),
    ("report, no steps", "report d", ("no rows yet",), {"d/metrics.csv": "step,reward\n"}),
)
def test_a_folder_that_is_wrong_is_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


LLF, LAZY, FEDAVG = (f"certify run --against {name}" for name in ("llf", "lazy-crp", "fedavg"))


@cases(
    ("of nothing", "certify d --against llf", ("holds no run",), {"d/f": ""}),
    ("of a budget", "certify run --against equal", ("budget has no gains",), {}, "budget"),
    (
        "no such scheduler",
        "certify run --against lfl --site jpl",
        ("did you mean llf?",),
        {},
        "charging",
    ),
    (
        "one that looks ahead",
        "certify run --against clairvoyant --site jpl",
        ("'clairvoyant'", "choose equal"),
        {},
        "charging",
    ),
    ("of two sites", LLF, ("2 sites", "--site"), {}, "charging"),
    ("of no site", f"{LLF} --site mars", ("mars",), {}, "charging"),
    ("no sessions", f"{LLF} --data no.csv", ("no.csv",), {}, "charging"),
    (
        "a garage, federations",
        f"{LLF} --federations 3",
        ("takes no --federations",),
        {},
        "charging",
    ),
    ("a garage, jumps", f"{LLF} --allow-jumps", ("takes no --allow-jumps",), {}, "charging"),
    ("a garage, bound", f"{LLF} --site jpl --bound 0", ("--bound is 0",), {}, "charging"),
    (
        "no such strategy",
        "certify run --against lazy",
        ("did you mean lazy-crp?",),
        PRICES,
        "portfolio",
    ),
    ("one in hindsight", "certify run --against best-crp", ("'best-crp'",), PRICES, "portfolio"),
    ("no later prices", f"{LAZY} --data no.csv", ("no.csv",), {}, "portfolio"),
    ("a market, site", f"{LAZY} --site jpl", ("takes no --site",), {}, "portfolio"),
    ("a market, bound", f"{LAZY} --data p.csv --bound -1", ("--bound is -1",), PRICES, "portfolio"),
    (
        "no such rule",
        "certify run --against fedsgd",
        ("'fedsgd'", "choose fedavg"),
        {},
        "federated",
    ),
    ("no federation", f"{FEDAVG} --federations 0", ("federations is 0",), {}, "federated"),
    ("no digits", f"{FEDAVG} --data no.npz", ("no.npz",), {}, "federated"),
    ("a file of others", "certify f --against FedAvg", ("f",), {"f": "x"}),
    (
        "another kind",
        "certify run --against other",
        ("other",),
        {"other/settings.toml": "a = 1"},
        "portfolio",
    ),
)
def test_a_certificate_that_cannot_be_made_is_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


def tampered(arrays: dict | None = None, about: dict | None = None) -> dict:
    """A policy's two files with numbers changed, and every checksum made to fit."""

    def tamper(path: Path) -> None:
        found, header = read_arrays(path)
        description = path.with_name("policy.json")
        content = json.loads(description.read_text())
        content["about"] |= about or {}
        text = to_json(content)
        description.write_text(text)
        found = {name: np.full_like(a, (arrays or {}).get(name, a)) for name, a in found.items()}
        header = {"format": header["format"], "description": _digest(json.loads(text))}
        write_arrays(path, found, header)

    return PRICES | {"run/policy.safetensors": tamper}


@cases(
    ("eta of 5", BACKTEST, ("eta is 5", "between 0 and 1"), tampered({"eta": 5}), "portfolio"),
    ("eta of nan", ALLOCATE, ("eta is nan",), tampered({"eta": np.nan}), "portfolio"),
    ("k below 0", ALLOCATE, ("k is -1",), tampered({"policy/k": -1}), "portfolio"),
    (
        "nan inside",
        ALLOCATE,
        ("not finite",),
        tampered({"policy/policy/members/score/of_held": np.nan}),
        "portfolio",
    ),
    (
        "window of 0",
        ALLOCATE,
        ("own facts are wrong", "window 0"),
        tampered(about={"window": 0}),
        "portfolio",
    ),
    (
        "window is text",
        ALLOCATE,
        ("own facts are wrong",),
        tampered(about={"window": "8"}),
        "portfolio",
    ),
    (
        "two channels",
        BACKTEST,
        ("own facts are wrong",),
        tampered(about={"channels": 2}),
        "portfolio",
    ),
    (
        "cost of 5",
        BACKTEST,
        ("own facts are wrong", "cost 5"),
        tampered(about={"cost": 5}),
        "portfolio",
    ),
    (
        "cost is text",
        BACKTEST,
        ("own facts are wrong",),
        tampered(about={"cost": "x"}),
        "portfolio",
    ),
    (
        "last is no day",
        BACKTEST,
        ("own facts are wrong", "not a day"),
        tampered(about={"last": "x"}),
        "portfolio",
    ),
    (
        "weight of 7",
        ALLOCATE,
        ("own facts are wrong",),
        tampered(about={"rules": {"max_weight": 7}}),
        "portfolio",
    ),
    (
        "no such rule",
        ALLOCATE,
        ("own facts are wrong",),
        tampered(about={"rules": {"most": 7}}),
        "portfolio",
    ),
    (
        "another job",
        ALLOCATE,
        ("trained for 'budget'",),
        tampered(about={"job": "budget"}),
        "portfolio",
    ),
)
def test_every_number_of_a_policy_file_is_checked(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
