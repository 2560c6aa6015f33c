"""Files made wrong: bytes flipped, cut and repeated; and what the bytes mean, changed so that they parse.

`mutate` takes a sound file and a source of choices, `random.Random` or Hypothesis's. Where a file carries
a checksum it is made to fit again, as somebody who means harm would.
"""

import csv
import io
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from apportion.runs.files import _unpack, pack

DEEP = 3000
NUMBERS = [0, -1, 1, 2, 7, 0.5, -0.5, 1e-320, 1e308, -1e308, 2**31, 2**63, 10**400, 0.1 + 0.2]
ODD = [float("nan"), float("inf"), float("-inf"), None, True, False, "", " ", "x", "\x00", "\ud800"]
TEXTS = ["nan", "inf", "-3", "1e999", "2019-02-30", "2019-01-02", "9999-12-31", "0001-01-01", "٣"]
TEXTS += ["A" * 300, "../../etc/passwd", "=1+1", '"', "NaT", "<b>", "apportion.policy.Policy", "é"]
LITERALS = ["nan", "-inf", "-1", "0", "1e400", "2" * 30, "2" * 5000, '"x"', "[]", "[1, 2]", "{}"]
LITERALS += ["true", "1979-05-27", "07:32:00", "0.5", "1.5", '""', '"\\u0000"', "{a = 1}"]
LITERALS += ["[" * DEEP + "]" * DEEP]
NESTED = [[], {}, [[]], [1, 2], {"a": 1}, {"array": "x"}, {"class": "os.system"}]
VALUES = [*NUMBERS, *ODD, *TEXTS, *NESTED]


def mutate(name: str, content: bytes, rng: random.Random) -> bytes:
    """A file of this name changed one to three times, in its bytes or in what they mean."""
    inside = _INSIDE.get(name.rpartition(".")[2])
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = _bytes if inside is None or rng.random() < 0.3 else inside
        try:
            content = change(content, rng)
        except Exception:
            # What is broken already cannot be parsed to be changed further.
            content = _bytes(content, rng)
    return content


def _bytes(content: bytes, rng: random.Random) -> bytes:
    raw = bytearray(content)
    place = rng.randrange(len(raw) + 1)
    span = rng.choice([1, 1, 2, 4, 16, 200])
    kind = rng.randrange(8)
    if kind == 0:
        raw[place : place + span] = b""
    elif kind == 1:
        raw[place:place] = bytes(rng.randrange(256) for _ in range(span))
    elif kind == 2:
        raw[place:place] = raw[max(place - span, 0) : place] * rng.choice([1, 2, 50])
    elif kind == 3:
        raw = raw[:place]
    elif kind == 4:
        raw[place:place] = rng.choice([b"[" * DEEP, b"{" * DEEP, b"(" * DEEP, b'{"a":' * DEEP])
    elif kind == 5:
        whole = [b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"PAR1PAR1", b"\n"]
        raw = bytearray(rng.choice(whole))
    elif raw:
        for _ in range(rng.choice([1, 1, 2, 8])):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


def change_value(value: Any, rng: random.Random) -> Any:
    """JSON with one part of it replaced, removed, renamed, repeated or nested."""
    inner = value if isinstance(value, dict | list) else None
    if not inner or rng.random() < 0.15:
        nested = value
        if rng.random() < 0.1:
            for _ in range(rng.choice([3, DEEP])):
                nested = [nested]
        return rng.choice([*VALUES, nested])
    places = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
    place = rng.choice(places)
    kind = rng.randrange(8)
    changed = inner.copy()
    if kind == 0:
        del changed[place]
    elif kind == 1 and isinstance(changed, dict):
        changed[rng.choice(["x", "", str(place) + " ", str(place).upper()])] = changed.pop(place)
    elif kind == 2 and isinstance(changed, list):
        changed.extend(changed[: rng.choice([1, 40])])
    else:
        changed[place] = change_value(inner[place], rng)
    return changed


def _json(content: bytes, rng: random.Random) -> bytes:
    text = json.dumps(change_value(json.loads(content), rng))
    if rng.random() < 0.1:
        # A name that is there twice, and a number longer than Python reads.
        text = rng.choice([text.replace("{", '{"time": 1, ', 1), text.replace("1", "1" * 5000, 1)])
    return text.encode("utf-8", "surrogatepass")


def _toml(content: bytes, rng: random.Random) -> bytes:
    lines = content.decode().splitlines()
    values = [k for k, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    k = rng.choice(values)
    name = lines[k].partition(" = ")[0]
    value = f"{name} = {rng.choice(LITERALS)}"
    twice = lines[k] + "\n" + lines[k]
    lines[k] = rng.choice([value, value, "", f"{name}x = 1", f"[{name}]", twice])
    return "\n".join(lines).encode()


def _csv(content: bytes, rng: random.Random) -> bytes:
    rows = list(csv.reader(io.StringIO(content.decode())))
    r, width = rng.randrange(len(rows)), len(rows[0])
    c = rng.randrange(max(width, 1))
    kind = rng.randrange(10)
    if kind == 0:
        del rows[r]
    elif kind == 1:
        rows.append(list(rows[r]))
    elif kind == 2:
        rows = [row[:c] + row[c + 1 :] for row in rows]
    elif kind == 3:
        rows = [[*row, row[c] if c < len(row) else ""] for row in rows]
    elif kind == 4:
        rows[0][c] = str(rng.choice([*TEXTS, *rows[0], ""]))
    elif kind == 5:
        rows[r] = rows[r][: rng.randrange(len(rows[r]) + 1)]
    else:
        rows[r][c] = str(
            rng.choice([*VALUES, str(rows[r][c]) + rng.choice(["Z", "+01:00", ",", "e5"])])
        )
    out = io.StringIO()
    csv.writer(out, delimiter=rng.choice([",", ",", ",", ";", "\t"])).writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def _parquet(content: bytes, rng: random.Random) -> bytes:
    frame = pd.read_parquet(io.BytesIO(content))
    name = rng.choice(list(frame.columns))
    kind = rng.randrange(10)
    if kind == 0:
        frame = frame.drop(columns=name)
    elif kind == 1:
        frame = frame.rename(columns={name: rng.choice([*TEXTS, "('a', 'b')", "date", "cell"])})
    elif kind == 2:
        frame[name] = frame[name].astype(str)
    elif kind == 3:
        frame = frame.iloc[: rng.randrange(3)]
    elif kind == 4:
        frame = pd.concat([frame, frame.iloc[:1]])
    elif kind == 5:
        frame[name] = [rng.choice([[1, 2], [], ["x"]])] * len(frame)
    elif kind == 6:
        frame[name] = pd.Series(
            [rng.choice([None, True, 0.5, b"x", pd.Timestamp("2019-01-01")])] * len(frame)
        )
    elif kind == 7:
        frame = frame.set_index(name)
    else:
        cells = frame[name].astype(object).tolist()
        cells[rng.randrange(len(cells))] = rng.choice(
            [float("nan"), float("inf"), -1.0, 0.0, 1e308, None]
        )
        frame[name] = pd.Series(cells, frame.index)
    return frame.to_parquet()


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    arrays, about = _unpack(content, "a sound file")
    if rng.random() < 0.4 or not arrays:
        return pack(arrays, change_value(about, rng))
    name = rng.choice(sorted(arrays))
    kind = rng.randrange(6)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[rng.choice(["x", name + "/x"])] = arrays.pop(name)
    elif kind == 2:
        arrays[name] = arrays[name].astype(rng.choice([np.int32, np.float64, np.bool_, np.uint8]))
    elif kind == 3:
        arrays[name] = arrays[name][None] if rng.random() < 0.5 else arrays[name].ravel()[:0]
    else:
        array = arrays[name].copy()
        if array.size:
            array.flat[rng.randrange(array.size)] = rng.choice([np.nan, np.inf, 3e38, -1, 0, 5])
        arrays[name] = array
    return pack(arrays, about)


def _npz(content: bytes, rng: random.Random) -> bytes:
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    name = rng.choice(sorted(arrays))
    kind = rng.randrange(5)
    if kind == 0:
        del arrays[name]
    elif kind == 1:
        arrays[name] = arrays[name].astype(
            rng.choice([np.float32, np.int64, object, str, np.bool_])
        )
    elif kind == 2:
        arrays[name] = arrays[name][: rng.randrange(2)]
    elif kind == 3:
        arrays[name] = arrays[name].reshape(rng.choice([(-1,), (1, -1)]))
    else:
        array = arrays[name].astype(np.int64)
        array.flat[rng.randrange(max(array.size, 1))] = rng.choice([-1, 10, 256, 2**40])
        arrays[name] = array
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


_INSIDE: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "json": _json,
    "toml": _toml,
    "csv": _csv,
    "parquet": _parquet,
    "safetensors": _safetensors,
    "npz": _npz,
}
"""By a name's ending, how what the bytes mean is changed."""
