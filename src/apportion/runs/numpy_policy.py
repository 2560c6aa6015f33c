"""Run an exported policy with NumPy alone: take this file and `policy.npz` to where it is to run.

For `Pooled` and `Recurrent`, alone or inside `Ensemble`, `ShrunkToEqual` and `PartialTrading`.
"""

import json

import numpy as np


class NumpyPolicy:
    """`policy(history, held, mask, limits)` gives the shares; without limits nothing is limited."""

    def __init__(self, path):
        with np.load(path) as file:
            self.arrays = {name: file[name].astype(float) for name in file if name != "policy"}
            self.described = json.loads(str(file["policy"]))

    def __call__(self, history, held, mask=None, limits=None):
        mask = np.ones(len(held), bool) if mask is None else np.asarray(mask, bool)
        limits = np.where(mask, 1.0 if limits is None else limits, 0.0).clip(0, 1)
        seen = np.asarray(history, float), np.asarray(held, float), mask, limits
        return _shares(self.described, self.arrays, *seen)


def _shares(described, arrays, history, held, mask, limits):
    kind, given = described["class"].rpartition(".")[2], described["arguments"]
    seen = history, held, mask, limits
    if kind == "EqualShares":
        return _fill((limits > 0) * 1.0, 0 * limits, limits)
    if kind == "Ensemble":
        inside = _inside(arrays, "members")
        count = len(next(iter(inside.values())))
        each = [{name: stack[i] for name, stack in inside.items()} for i in range(count)]
        return np.mean([_shares(given["members"], one, *seen) for one in each], axis=0)
    if kind in ("ShrunkToEqual", "PartialTrading"):
        target = _shares(given["policy"], _inside(arrays, "policy"), *seen)
        if kind == "PartialTrading":
            return _fill(held + arrays["eta"] * (target - held), 0 * limits, limits)
        equal = _fill((limits > 0) * 1.0, 0 * limits, limits)
        return equal + arrays["k"] * (target - equal)
    read = limits > 0 if (limits > 0).any() else mask
    scores = _scores(kind, given, arrays, history, held, read)
    return _head(scores, limits, read, **given["head"]["arguments"])


def _scores(kind, given, arrays, history, held, read):
    x = 0.0
    if kind == "Recurrent":
        cell = [arrays[f"recurrence/{name}"] for name in ("from_input", "from_state", "bias")]
        x = np.zeros((len(held), len(cell[2])))
        for period in history.swapaxes(0, 1):
            x = np.tanh(period @ cell[0] + x @ cell[1] + cell[2])
    elif kind == "Pooled":
        x = np.maximum(history[:, -1] @ arrays["first/weight"].T + arrays["first/bias"], 0)
        there = np.where(read[:, None], x, 0)
        pooled = np.concatenate([there.sum(0) / max(read.sum(), 1), there.max(0)])
        own = x @ arrays["own/weight"].T + arrays["own/bias"]
        x = np.maximum(own + pooled @ arrays["others"], 0)
    scores = x @ arrays["score/of_features"] + arrays["score/of_held"] * held
    return given["reach"] * np.tanh(scores / given["reach"]) if "reach" in given else scores


def _head(scores, limits, read, floor, cap, cash):
    bounded = (limits > 0) & ~(cash & (np.arange(len(limits)) == 0))
    even = 1 / max(bounded.sum(), 1)
    high = np.where(bounded, np.minimum(cap if cash else max(cap, even), limits), 0.0)
    low = np.where(bounded, np.minimum(min(floor, even), high), 0.0)
    high[0] = read[0] * 1.0 if cash else high[0]
    if not (high > 0).any():
        return high
    leader = scores[high > 0].max()
    return _fill(np.exp(np.clip(scores - leader, -30, 0)), low / max(low.sum(), 1), high)


def _fill(parts, low, high):
    """clip(tau parts, low, high) that sums to 1, or to all that `high` allows."""
    parts = np.where(high > 0, np.maximum(parts, np.exp(-30) * max(parts.max(), 1e-30)), 0)
    safe = np.where(parts > 0, parts, 1)
    taus = np.unique(np.concatenate([[0], low / safe, high / safe]))
    sums = np.clip(taus[:, None] * parts, low, high).sum(1)
    return np.clip(np.interp(min(high.sum(), 1), sums, taus) * parts, low, high)


def _inside(arrays, name):
    return {path[len(name) + 1 :]: a for path, a in arrays.items() if path.startswith(f"{name}/")}
