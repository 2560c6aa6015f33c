"""Every reader of files from outside: sound files, and the function that reads them.

`read` takes a folder of such files. It may return or raise InputError; anything else is a fault. It asserts
that numbers are finite.
"""

import hashlib
import io
import json
import math
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from mutations import mutate

from apportion.certify.statistics import compare
from apportion.composition import EqualShares, PartialTrading
from apportion.domains.domain import domain_names, find_domain
from apportion.domains.federated.data import load_images
from apportion.domains.portfolio.allocation import TrainedPolicy, read_holdings
from apportion.domains.portfolio.prices import load_prices
from apportion.domains.portfolio.simulated import SimulatedMarket
from apportion.domains.portfolio.validation import Choice
from apportion.policy import Pooled
from apportion.report import write_report
from apportion.runs.checkpoint import from_arrays, to_arrays
from apportion.runs.files import pack, read_arrays, read_json, to_json
from apportion.runs.folder import load_run
from apportion.runs.policy_file import (
    _ARRAYS,
    _DESCRIPTION,
    _digest,
    load_about,
    load_policy,
    save_policy,
)
from apportion.runs.settings import read_settings, to_toml
from apportion.studies.engine import Cell, CellStore, Plan
from apportion.studies.study import FigureResult, Verdict
from apportion_charging.backtest import check_facts
from apportion_charging.controller import Controller, read_now
from apportion_charging.forecasts import Predictor
from apportion_charging.garage import QUARTERS
from apportion_charging.problem import CHANNELS
from apportion_charging.sessions import fingerprint, inspect_sessions
from apportion_charging.site import Site, Station

Files = dict[str, bytes]
QUICK, SLOW = 8.2, 0.3


@dataclass(frozen=True)
class Reader:
    """Sound files by name, and the function that reads them from a folder."""

    files: Callable[[], Files]
    read: Callable[[Path], Any]
    mend: Callable[[Files], Files] = lambda files: files
    """Updates digests that link several files."""
    share: float = 1.0
    """Share of the inputs: quick readers get more, slow ones fewer."""


def write(files: Mapping[str, bytes], folder: Path) -> Path:
    """The files in a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def changed(reader: Reader, rng: Any) -> Files:
    """A sound set of files with one of them damaged."""
    files = dict(reader.files())
    name = rng.choice(sorted(files))
    files[name] = mutate(name, files[name], rng)
    return reader.mend(files) if rng.random() < 0.8 else files


def assert_finite(value: Any) -> None:
    """No number in plain values is nan or infinite."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            assert_finite(each)
    elif isinstance(value, float | np.ndarray):
        assert np.isfinite(value).all() if not isinstance(value, float) else math.isfinite(value)


MARKET = SimulatedMarket.draw(universe=3, days=40)
SESSIONS = """site,station,arrival,departure,stated_departure,requested_kwh,delivered_kwh
north,S1,2021-06-01 07:30:00,2021-06-01 15:00:00,2021-06-01 16:00:00,12.5,11.0
north,S2,2021-06-01 08:10:00,2021-06-01 09:40:00,,,4.5
south,000001,2021-06-02 10:00:00,2021-06-02 18:20:00,2021-06-02 17:00:00,20,18.25
north,S1,2021-06-02 07:30:00,2021-06-02 15:00:00,,,11.0
"""
INPUTS = """spaceID,connectionTime,disconnectTime,kWhDelivered,timezone,userInputs
S1,"Tue, 01 Jun 2021 14:30:00 GMT","Tue, 01 Jun 2021 20:30:00 GMT",11.0,America/Los_Angeles,\
"[{'kWhRequested': 12.5, 'requestedDeparture': 'Tue, 01 Jun 2021 21:30:00 GMT'}]"
S2,"Tue, 01 Jun 2021 15:30:00 GMT","Tue, 01 Jun 2021 20:30:00 GMT",5,America/Los_Angeles,
"""
NOW = {
    "time": "2021-06-01 09:00",
    "capacity_kw": 20.0,
    "stations": [
        {"id": "S1", "max_kw": 6.6, "plugged": True, "arrival": "2021-06-01 08:00",
         "stated_departure": "2021-06-01 17:00", "requested_kwh": 12, "delivered_kwh": 1.5,
         "offered_kw": 6, "drawn_kw": 5.5},
        {"id": "S2", "plugged": False, "full": False},
    ],
}  # fmt: skip


def _json(content: Any) -> bytes:
    return to_json(content).encode()


def _long() -> pd.DataFrame:
    prices = MARKET.prices
    columns = {"close": prices.close, "high": prices.high, "low": prices.low}
    days = np.repeat(prices.dates.astype(str), len(prices.tickers))
    rows = {"date": days, "ticker": np.tile(prices.tickers, len(prices.dates))}
    return pd.DataFrame(rows | {name: x.ravel() for name, x in columns.items() if x is not None})


def _prices(name: str, folder: Path) -> None:
    prices = load_prices(folder / name)
    assert all(jump.ticker in prices.tickers for jump in prices.jumps)
    assert (np.diff(prices.dates.astype(int)) > 0).all()
    for series in (prices.close, prices.high, prices.low):
        if series is not None:
            there = np.isfinite(series)
            assert (series[there] > 0).all()
            assert not np.isinf(series).any()
            # Unlisted before the first price and after the last, never between.
            inside = np.maximum.accumulate(there, 0) & np.maximum.accumulate(there[::-1], 0)[::-1]
            assert (there == inside).all()


def _holdings(folder: Path) -> None:
    amounts, counted = read_holdings(folder / "h.csv", ("A", "B", "000001"))
    assert np.isfinite(amounts).all()
    assert (amounts >= 0).all()
    assert counted or abs(amounts.sum() - 1) < 1e-9


_PREDICTOR = {
    **{"need": [0.1] * 9, "stay": [0.1] * 9, "medians": [9.0, 5.0]},
    "to_come_kwh": [1.0] * QUARTERS,
}


_FACTS = {
    **{"job": "charging", "task_size": 4, "capacity": [0.1, 0.3], "predictor": _PREDICTOR},
    **{"until": {"north": "2021-06-01"}, "trained_on": {"north": ["S1"]}},
}


def _sessions(folder: Path) -> None:
    checked = inspect_sessions(folder / "s.csv")
    frame = checked.frame
    checked.summary()
    fingerprint(frame)
    assert np.isfinite(frame.delivered_kwh).all()
    assert not np.isinf(frame.requested_kwh).any()
    assert not frame[["arrival", "departure"]].isna().to_numpy().any()


def _now(folder: Path) -> None:
    # Any JSON gets an answer.
    answer = _controller().allocate(read_now(folder / "now.json")).to_json()
    assert_finite([*answer["allocation_kw"].values(), answer["unused_kw"]])


@cache
def _controller() -> Controller:
    about = {"job": "charging", "predictor": _PREDICTOR, "task_size": 2}
    site = Site({"A": Station(), "B": Station(16.0)}, feeder_kw=20.0)
    return Controller(Pooled(CHANNELS, 4, key=jax.random.key(0)), about, site)


def _settings(job: str, folder: Path) -> None:
    kind = find_domain(job).settings
    made = kind(**read_settings(folder / "settings.toml", job, kind))
    assert_finite([getattr(made, field.name) for field in fields(made)])


def _run_files() -> Files:
    settings = to_toml(find_domain("portfolio").settings(), "portfolio").encode()
    table = {"k": [0.0, 0.5], "eta": [0.1, 0.1], "steps": [3, 3], "sharpe_gain": [0.0, 0.2]}
    choice = {"k": 0.5, "eta": 0.1, "steps": 3, "table": table}
    arrays, about = _state()
    about |= {"step": 3, "settings": hashlib.sha256(settings).hexdigest()}
    rows = pd.DataFrame(
        {"step": [1, 2, 3], "reward": [0.1, 0.2, 0.3], "deviation": [0.1, 0.1, 0.1]}
    )
    return {
        "settings.toml": settings,
        "environment.json": _json({"data": {"a": 1}, "versions": {"jax": "1"}, "seed": 0}),
        "choice.json": _json({"settings": about["settings"], "choice": choice}),
        "results.json": _json({"net": {"policy": {"wealth": 1.5}}}),
        "metrics.parquet/step-000000003.parquet": rows.to_parquet(),
        "checkpoints/step-000000003.safetensors": pack(arrays, about),
    }


@cache
def _first() -> Any:
    return {"policy": np.zeros(3, np.float32), "key": jax.random.key(0), "step": np.int32(3)}


def _state() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return to_arrays(jax.tree.map(jax.numpy.asarray, _first()))


def _run(folder: Path) -> None:
    run = load_run(folder)
    find_domain(run.job)
    assert_finite(run.environment)
    assert_finite(run.results)
    choice = run.choice
    if choice is not None:
        Choice.from_dict(choice)
    assert isinstance(run.metrics, pd.DataFrame)
    saved = run.newest_checkpoint()
    if saved is not None:
        assert isinstance(saved[0], int)
        from_arrays(jax.tree.map(jax.numpy.asarray, _first()), *saved[1:], str(folder))


@cache
def _policy_files() -> Files:
    about = {"job": "portfolio", "window": 8, "channels": 1, "cost": 0.0025, "trained_on": ["A"]}
    about |= {"last": "2000-01-20", "rules": {"max_weight": 0.6}}
    with tempfile.TemporaryDirectory() as folder:
        save_policy(PartialTrading(EqualShares(), 0.5), folder, about)
        return {name: (Path(folder) / name).read_bytes() for name in (_ARRAYS, _DESCRIPTION)}


def _mend_policy(files: Files) -> Files:
    """The arrays' header says which description belongs to them."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            arrays, about = read_arrays(write(files, Path(folder)) / _ARRAYS)
        about["description"] = _digest(json.loads(files[_DESCRIPTION]))
        return files | {_ARRAYS: pack(arrays, about)}
    except Exception:
        # Too broken to be mended.
        return files


def _policy(folder: Path) -> None:
    policy = load_policy(folder)
    for leaf in jax.tree.leaves(policy):
        if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            assert np.isfinite(np.asarray(leaf)).all()
    TrainedPolicy.of(policy, load_about(folder)).series(MARKET.prices)


def _facts(folder: Path) -> None:
    """What a charging policy says about itself."""
    about = read_json(folder / "about.json")
    if isinstance(about, dict):
        check_facts(about)
        Predictor.from_dict(about.get("predictor", {}))


def _conclude(rows: pd.DataFrame, settings: dict[str, Any]) -> list[FigureResult]:
    means = rows.groupby("cell")["gain"].mean()
    claim = Verdict.of("it gains", compare(means.to_numpy(), np.zeros(len(means))))
    return [FigureResult("toy", "Toy", means.reset_index(), [claim], plt.figure)]


ROWS = pd.DataFrame({"cell": ["first", "first", "second"], "gain": [0.1, 0.3, 0.2]})
PLAN = Plan(
    "toy",
    (Cell("first", {}), Cell("second", {})),
    lambda cells, progress: iter(()),
    _conclude,
    {"seed": 0},
)


def _study_files() -> Files:
    files = {
        "cells.json": _json({"study": "toy", "digest": PLAN.digest}),
        "study.json": _json({"name": "toy", "device": "cpu", "seconds": 1.5}),
    }
    parts = {f"cells/{name}.parquet": rows.to_parquet() for name, rows in ROWS.groupby("cell")}
    return files | parts


def _study(folder: Path) -> None:
    store = CellStore(PLAN, folder)
    store.check()
    store.conclude()
    plt.close("all")


def _mnist_file() -> Files:
    rng = np.random.default_rng(0)
    arrays = {
        f"{kind}_{part}": rng.integers(0, 10, (6, 4, 4) if kind == "x" else 6, np.uint8)
        for kind in "xy"
        for part in ("train", "test")
    }
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return {"mnist.npz": out.getvalue()}


def _study_page() -> Files:
    verdict = {"claim": "a", "holds": True, "outcome": "holds", "estimate": 0.5, "n": 4}
    verdict |= {"paper": True, "interval": [0.1, None], "adjusted": "holds"}
    verdict |= {"levels": {"one arm": 0.7, "another": 0.2}}
    figure = {"name": "fig1", "title": "t", "notes": ["n"]}
    figure |= {"table": "table.csv", "picture": "figure.png"}
    about = {"name": "fig1", "figures": [figure], "settings": {"seed": 0}, "seed": 0}
    return {
        "verdict.json": _json([verdict]),
        "study.json": _json(about),
        "table.csv": b"a,b\n1,2\n3,4\n",
    }


def _run_page() -> Files:
    card = {"label": "l", "value": "+1", "interval": "[0, 2]", "note": "n", "outcome": "holds"}
    head = {"title": "t", "subtitle": "s", "cards": [card], "words": ["w"], "lead": "l"}
    tables = {
        "metrics": "step,task,reward,deviation,score,loss,gradient_norm\n1,0,0.1,0.2,0.3,0.4,0.5\n",
        "values": "date,policy,equal-crp\n2020-01-01,1.0,1.1\n2020-01-02,1.0,1.1\n",
        "allocations": "date,A,B\n2020-01-01,0.5,0.5\n2020-01-02,0.5,0.5\n",
        "choice": "k,eta,steps,sharpe_gain\n0.5,0.1,3,0.2\n",
        "strategies": "strategy,wealth,wealth_low,wealth_high\npolicy,1.5,1,2\n",
        "probabilities": "step,task 0,task 1\n1,0.5,0.5\n2,0.4,0.6\n",
        "accuracy": "round,learned,fedavg\n1,0.5,0.4\n2,0.6,0.5\n",
    }
    return {
        "headline.json": _json(head),
        "settings.toml": b'job = "budget"\nseed = 0\n',
        "environment.json": b'{"versions": {"jax": "1"}, "data": {}}',
        **{f"{name}.csv": text.encode() for name, text in tables.items()},
    }


def _write_run_page(folder: Path) -> None:
    write_report(folder, find_domain(load_run(folder).job))


def _text(name: str, content: str) -> Callable[[], Files]:
    return lambda: {name: content.encode()}


def _table(name: str, frame: Callable[[], pd.DataFrame]) -> Callable[[], Files]:
    return lambda: {name: frame().to_parquet()}


SHARES = "ticker,share\nA,0.25\nB,0.5\n000001,0.25\n"
READERS: dict[str, Reader] = {
    "prices, wide CSV": Reader(
        _text("p.csv", MARKET.prices.to_frame().to_csv()), partial(_prices, "p.csv")
    ),
    "prices, long Parquet": Reader(_table("p.parquet", _long), partial(_prices, "p.parquet")),
    "holdings, CSV": Reader(_text("h.csv", SHARES), _holdings, share=QUICK),
    "sessions, CSV": Reader(_text("s.csv", SESSIONS), _sessions),
    "sessions of ACN, CSV": Reader(_text("s.csv", INPUTS), _sessions),
    "what a controller sees": Reader(_text("now.json", to_json(NOW)), _now, share=QUICK),
    **{
        f"settings of {job}": Reader(
            _text("settings.toml", to_toml(find_domain(job).settings(), job)),
            partial(_settings, job),
            share=QUICK,
        )
        for job in domain_names()
    },
    "a run's folder": Reader(cache(_run_files), _run),
    "a portfolio policy": Reader(_policy_files, _policy, _mend_policy),
    "facts of a charging policy": Reader(_text("about.json", to_json(_FACTS)), _facts, share=QUICK),
    "a study's cells": Reader(cache(_study_files), _study),
    "mnist.npz": Reader(
        cache(_mnist_file), lambda folder: load_images(folder / "mnist.npz"), share=QUICK
    ),
    "a study's page": Reader(_study_page, write_report, share=SLOW),
    "a run's page": Reader(_run_page, _write_run_page, share=SLOW),
}


def read_quietly(reader: Reader, folder: Path) -> None:
    """Read without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reader.read(folder)
