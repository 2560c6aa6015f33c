"""Damaged files: bytes flipped, cut and repeated, or content changed so that the file still parses.

`mutate` takes a sound file and a source of random choices, `random.Random` or Hypothesis's.
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
    """Change a file of this name one to three times, in its bytes or in its content."""
    change_content = _CHANGES.get(name.rpartition(".")[2], _bytes)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        try:
            content = (_bytes if rng.random() < 0.3 else change_content)(content, rng)
        except Exception:
            # A file that is already broken cannot be parsed.
            content = _bytes(content, rng)
    return content


def _bytes(content: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(content) + 1)
    before, after = content[:place], content[place:]
    span = rng.choice([1, 1, 2, 4, 16, 200])
    deep = rng.choice([b"[", b"{", b"(", b'{"a":']) * DEEP
    whole = rng.choice([b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"PAR1PAR1", b"\n"])
    noise = bytes(rng.randrange(256) for _ in range(span))
    cut, flipped = before + after[span:], before + noise + after[span:]
    repeated = before + before[-span:] * rng.choice([1, 2, 50]) + after
    return rng.choice(
        [cut, before + noise + after, repeated, before, before + deep + after, whole, flipped]
    )


def change_value(value: Any, rng: random.Random) -> Any:
    """JSON with one part replaced, removed, renamed, repeated or nested."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        nested = value
        for _ in range(rng.choice([0, 3, DEEP]) if rng.random() < 0.1 else 0):
            nested = [nested]
        return rng.choice([*VALUES, nested])
    place = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    kind, changed = rng.randrange(8), value.copy()
    if kind == 0:
        del changed[place]
    elif kind == 1 and isinstance(changed, dict):
        changed[rng.choice(["x", "", str(place) + " ", str(place).upper()])] = changed.pop(place)
    elif kind == 2 and isinstance(changed, list):
        changed.extend(changed[: rng.choice([1, 40])])
    else:
        changed[place] = change_value(value[place], rng)
    return changed


def _json(content: bytes, rng: random.Random) -> bytes:
    text = json.dumps(change_value(json.loads(content), rng))
    if rng.random() < 0.1:
        # A name that is there twice, and a number longer than Python reads.
        text = rng.choice([text.replace("{", '{"time": 1, ', 1), text.replace("1", "1" * 5000, 1)])
    return text.encode("utf-8", "surrogatepass")


def _toml(content: bytes, rng: random.Random) -> bytes:
    lines = content.decode().splitlines()
    k = rng.choice([k for k, line in enumerate(lines) if " = " in line and line[0] != "#"])
    name = lines[k].partition(" = ")[0]
    value = f"{name} = {rng.choice(LITERALS)}"
    lines[k] = rng.choice(
        [value, value, "", f"{name}x = 1", f"[{name}]", f"{lines[k]}\n{lines[k]}"]
    )
    return "\n".join(lines).encode()


def _csv(content: bytes, rng: random.Random) -> bytes:
    rows = list(csv.reader(io.StringIO(content.decode())))
    r, c = rng.randrange(len(rows)), rng.randrange(len(rows[0]))
    kind = rng.randrange(9)
    if kind == 0:
        del rows[r]
    elif kind == 1:
        rows.append(list(rows[r]))
    elif kind == 2:
        rows = [row[:c] + row[c + 1 :] for row in rows]
    elif kind == 3:
        rows[0][c] = str(rng.choice([*TEXTS, *rows[0], ""]))
    elif kind == 4:
        rows[r] = rows[r][: rng.randrange(len(rows[r]) + 1)]
    else:
        changed = rows[r][c] + rng.choice(["Z", "+01:00", ",", "e5"])
        rows[r][c] = str(rng.choice([*VALUES, changed]))
    out = io.StringIO()
    csv.writer(out, delimiter=rng.choice([",", ",", ",", ";", "\t"])).writerows(rows)
    return out.getvalue().encode("utf-8", "surrogatepass")


def _parquet(content: bytes, rng: random.Random) -> bytes:
    frame = pd.read_parquet(io.BytesIO(content))
    name, kind = rng.choice(list(frame.columns)), rng.randrange(8)
    odd = [None, True, 0.5, b"x", pd.Timestamp("2019-01-01"), [1, 2], [], ["x"]]
    if kind == 0:
        frame = frame.drop(columns=name)
    elif kind == 1:
        frame = frame.rename(columns={name: rng.choice([*TEXTS, "('a', 'b')", "date", "cell"])})
    elif kind == 2:
        frame[name] = frame[name].astype(str)
    elif kind == 3:
        frame = frame.iloc[: rng.randrange(3)]
    elif kind == 4:
        frame[name] = pd.Series([rng.choice(odd)] * len(frame))
    elif kind == 5:
        frame = frame.set_index(name)
    else:
        cells = frame[name].astype(object).tolist()
        numbers = [float("nan"), float("inf"), -1.0, 0.0, 1e308, None]
        cells[rng.randrange(len(cells))] = rng.choice(numbers)
        frame[name] = pd.Series(cells, frame.index)
    return frame.to_parquet()


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    arrays, about = _unpack(content, "a sound file")
    if rng.random() < 0.4 or not arrays:
        return pack(arrays, change_value(about, rng))
    name = rng.choice(sorted(arrays))
    array, kind = arrays.pop(name), rng.randrange(6)
    if kind == 1:
        arrays[rng.choice(["x", name + "/x"])] = array
    elif kind == 2:
        arrays[name] = array.astype(rng.choice([np.int32, np.float64, np.bool_, np.uint8]))
    elif kind == 3:
        arrays[name] = array[None] if rng.random() < 0.5 else array.ravel()[:0]
    elif kind > 3:
        arrays[name] = array.copy()
        if array.size:
            place = rng.randrange(array.size)
            arrays[name].flat[place] = rng.choice([np.nan, np.inf, 3e38, -1, 0, 5])
    return pack(arrays, about)


_CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "json": _json,
    "toml": _toml,
    "csv": _csv,
    "parquet": _parquet,
    "safetensors": _safetensors,
}
"""By the ending of a name, the function that changes the content."""
