"""Folders of runs and the policies in them."""

import json
from pathlib import Path

import numpy as np
from refusals import WIDE, assert_refused, cases, of

from apportion.runs.files import read_arrays, to_json, write_arrays
from apportion.runs.policy_file import _digest

PRICES = {"p.csv": WIDE}
ARRAYS = "run/policy.safetensors"
YOUNG = {"d/settings.toml": 'job = "budget"\n'}
JPL = "certify run --site jpl"
LLF, LAZY, FEDAVG = (f"certify run --against {name}" for name in ("llf", "lazy-crp", "fedavg"))
ALLOCATE, BACKTEST = "allocate run --prices p.csv", "backtest run --prices p.csv"


@cases(
    ("backtest nowhere", "backtest nowhere", "nowhere: no such folder"),
    ("backtest an empty folder", "backtest d", "contains no run", {"d/f": ""}),
    ("report on nothing", "report d", "neither a run nor a study", {"d/f": ""}),
    ("report, verdicts cut", "report d", "verdict.json: not valid JSON", {"d/verdict.json": "["}),
    ("report, no steps", "report d", "no rows yet", YOUNG | {"d/metrics.csv": "step,reward\n"}),
    *of(
        "budget",
        ("backtest a budget", "backtest run", ("a run of budget", "no backtest")),
        ("resume, cut", "resume run --json", "results.json: not valid", {"run/results.json": "{"}),
    ),
    *of("budget", ("report of others", "report run", "not written", {"run/report.html": "mine"})),
    *of("begun", ("backtest too early", "backtest run", ("not finished", "resume"))),
    *of(
        "unfinished",
        ("resume, other data", "resume run", "the data has changed since the run started"),
        *(
            (f"resume, {content}", "resume run", words, {f"run/{file}": content})
            for file, content, words in (
                ("settings.toml", "seed = 1", "there is no domain"),
                ("environment.json", '{"data": 1e999}', "(1e999 is not a finite number)"),
                ("environment.json", "[]", "environment.json: has no versions"),
            )
        ),
    ),
    *of(
        "portfolio",
        ("policy changed", BACKTEST, "policy.json: was changed", {"run/policy.json": '{"a": 5}'}),
        ("other arrays", BACKTEST, "not a file that apportion wrote", {ARRAYS: b"abc" * 99}),
        ("no arrays", BACKTEST, "policy.safetensors: no such file", {ARRAYS: Path.unlink}),
        ("no sums", ALLOCATE, "SHA256SUMS: is missing", {"run/SHA256SUMS": Path.unlink}),
        ("start is no day", f"{BACKTEST} --start 01/02/2019", "'01/02/2019' is not a day"),
        ("start too late", f"{BACKTEST} --start 2030-01-01", "no period between 2030-01-01"),
        ("start too early", f"{BACKTEST} --start 2000-01-05", "no period between 2000-01-05"),
        ("end first", f"{BACKTEST} --start 2000-02-05 --end 2000-01-01", "no period between"),
        files=PRICES,
    ),
    *of(
        "portfolio",
        ("backtest, no prices", "backtest run --prices none.csv", "none.csv: no such file"),
    ),
    # Certificates.
    ("a file of others", "certify f --against FedAvg", "f", {"f": "x"}),
    *of("budget", ("of a budget", "certify run --against equal", "budget has no gains")),
    *of(
        "charging",
        ("no such scheduler", f"{JPL} --against lfl", "did you mean llf?"),
        ("one that looks ahead", f"{JPL} --against clairvoyant", ("'clairvoyant'", "choose equal")),
        ("of two sites", LLF, ("2 sites", "--site")),
    ),
    *of(
        "portfolio",
        ("no such strategy", "certify run --against lazy", "did you mean lazy-crp?"),
        ("a market, bound", f"{LAZY} --data p.csv --bound -1", "--bound is -1"),
        files=PRICES,
    ),
    *of(
        "portfolio",
        ("another kind", "certify run --against other", "other", {"other/settings.toml": "a = 1"}),
    ),
    *of("federated", ("of a federation", FEDAVG, "federated has no gains")),
)
def test_a_folder_that_is_wrong_is_refused(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)


def tampered(arrays: dict | None = None, about: dict | None = None) -> dict:
    """A policy's two files with numbers changed, and matching digests."""

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

    return PRICES | {ARRAYS: tamper}


MEMBERS = "policy/policy/members"
OF_HELD = f"{MEMBERS}/score/of_held"
HUGE = {f"{MEMBERS}/score/of_features": 3e38, f"{MEMBERS}/recurrence/bias": 9}


@cases(
    *of(
        "portfolio",
        (
            "trade of 5",
            BACKTEST,
            ("trade_fraction is 5", "between 0 and 1"),
            tampered({"trade_fraction": 5}),
        ),
        ("nan inside", ALLOCATE, "not finite", tampered({OF_HELD: np.nan})),
        ("huge inside", ALLOCATE, "allocation has numbers that", tampered(HUGE)),
        ("another job", ALLOCATE, "trained for 'budget'", tampered(about={"job": "budget"})),
        *(
            (f"{fact} of {value}", ALLOCATE, "metadata saved", tampered(about={fact: value}))
            for fact, value in (
                *(("window", 0), ("channels", 2), ("cost", "x")),
                *(("last", "x"), ("rules", {"max_weight": 7}), ("rules", {"cash": "yes"})),
            )
        ),
    ),
)
def test_every_number_of_a_policy_file_is_checked(case, tmp_path, monkeypatch, capfd):
    assert_refused(case, tmp_path, monkeypatch, capfd)
