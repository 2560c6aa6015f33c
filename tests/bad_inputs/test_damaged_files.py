"""Damaged files: every reader of files from outside returns sound values or raises InputError."""

import contextlib
import io
import re
import shutil
import tempfile
import warnings
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import MARKET, WIDE, finished

from apportion.domains.domain import domain_names, find_domain
from apportion.domains.federated.data import load_images
from apportion.domains.portfolio.allocation import TrainedPolicy, read_holdings
from apportion.domains.portfolio.prices import load_prices
from apportion.errors import InputError
from apportion.runs.files import SUMS, checksummed
from apportion.runs.folder import load_run
from apportion.runs.policy_file import load_about, load_policy
from apportion.runs.settings import read_settings, to_toml
from apportion_charging.controller import read_now
from apportion_charging.sessions import inspect_sessions

ODD = ["nan", "-inf", "-1", "0", "1e999", "2" * 400, "", "x", "2019-02-30", "9999-12-31", "null"]
ODD += ["[1, 2]", "{}", '"', "\x00", "=1+1", "A" * 300, "../../x", "true", "٣", "[" * 3000]
SESSIONS = b"""site,station,arrival,departure,stated_departure,requested_kwh,delivered_kwh
north,S1,2021-06-01 07:30:00,2021-06-01 15:00:00,2021-06-01 16:00:00,12.5,11.0
north,S2,2021-06-01 08:10:00,2021-06-01 09:40:00,,,4.5
"""
NOW = b"""{"time": "2021-06-01 09:00", "capacity_kw": 20.0, "stations": [
{"id": "S1", "max_kw": 6.6, "plugged": true, "arrival": "2021-06-01 08:00", "requested_kwh": 12}]}"""
HOLDINGS = b"ticker,share\nA,0.25\nB,0.5\n000001,0.25\n"


def damage(content, rng):
    """Replace a word by something odd, or cut, repeat or overwrite some bytes."""
    words = list(re.finditer(rb"[-+.:\w]+", content))
    if words and rng.random() < 0.7:
        word = rng.choice(words)
        return content[: word.start()] + rng.choice(ODD).encode() + content[word.end() :]
    place, span = rng.randrange(len(content) + 1), rng.choice([1, 4, 200])
    before, after = content[:place], content[place:]
    noise = bytes(rng.randrange(256) for _ in range(span))
    repeated = before + before[-span:] * 50 + after
    return rng.choice([before, before + after[span:], before + noise + after[span:], repeated])


def read_prices(folder):
    prices = load_prices(next(folder.iterdir()))
    there = np.isfinite(prices.close)
    assert (prices.close[there] > 0).all()
    assert (np.diff(prices.dates.astype(int)) > 0).all()
    # Unlisted before the first price and after the last, never between.
    inside = np.maximum.accumulate(there, 0) & np.maximum.accumulate(there[::-1], 0)[::-1]
    assert (there == inside).all()


def read_shares(folder):
    amounts, counted = read_holdings(folder / "h.csv", ("A", "B", "000001"))
    assert (amounts >= 0).all()
    assert counted or abs(amounts.sum() - 1) < 1e-9


def read_sessions(folder):
    frame = inspect_sessions(folder / "s.csv").frame
    assert np.isfinite(frame.delivered_kwh).all()
    assert not frame[["arrival", "departure"]].isna().to_numpy().any()


def read_images(folder):
    load_images(folder / "m.npz")


def read_job(job, folder):
    kind = find_domain(job).settings
    kind(**read_settings(folder / "s.toml", job, kind))


def read_run(folder):
    if (folder / SUMS).exists():
        # Otherwise the checksum would refuse a damaged file before its content is read.
        with checksummed(folder, *(path.name for path in folder.iterdir() if path.name != SUMS)):
            pass
    run = load_run(folder)
    find_domain(run.job)
    assert isinstance(run.results, dict | None)
    policy = load_policy(folder)
    for leaf in jax.tree.leaves(policy):
        assert np.isfinite(np.asarray(leaf)).all()
    TrainedPolicy.of(policy, load_about(folder)).series(MARKET)


def packed(write):
    out = io.BytesIO()
    write(out)
    return out.getvalue()


IMAGES = {"x_train": np.ones((6, 4, 4), np.uint8), "y_train": np.arange(6, dtype=np.uint8)}
IMAGES |= {"x_test": IMAGES["x_train"], "y_test": IMAGES["y_train"]}
READERS = {
    "wide prices": ({"p.csv": WIDE.encode()}, read_prices),
    "Parquet": ({"p.parquet": packed(MARKET.to_frame().reset_index().to_parquet)}, read_prices),
    "holdings": ({"h.csv": HOLDINGS}, read_shares),
    "sessions": ({"s.csv": SESSIONS}, read_sessions),
    "controller": ({"now.json": NOW}, lambda folder: read_now(folder / "now.json")),
    "images": ({"m.npz": packed(lambda out: np.savez(out, **IMAGES))}, read_images),
    "run": (finished("portfolio"), read_run),
    **{
        job: (
            {"s.toml": to_toml(find_domain(job).settings(), job).encode()},
            partial(read_job, job),
        )
        for job in domain_names()
    },
}


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_a_damaged_file_is_read_or_refused(name, rng):
    sound, read = READERS[name]
    with tempfile.TemporaryDirectory() as parent, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(parent) / "f"
        if isinstance(sound, Path):
            shutil.copytree(sound, folder)
        else:
            folder.mkdir()
            for file, content in sound.items():
                (folder / file).write_bytes(content)
        read(folder)
        path = rng.choice(sorted(one for one in folder.iterdir() if one.name != SUMS))
        path.write_bytes(damage(path.read_bytes(), rng))
        with contextlib.suppress(InputError):
            read(folder)
