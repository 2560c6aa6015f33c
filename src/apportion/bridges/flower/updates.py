"""Replies of a Flower round: the usable models v_{i,n}, and the reasons to refuse others.

A reply is usable if it contains one record of finite arrays with the names and shapes of the model
v_n that was sent out. No reply raises an error here. `ClientMemory` contains the server's data on
its clients by node id, and saves it in a file.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flwr.app import Array, ArrayRecord, Message, RecordDict

from apportion.domains.federated.states import shares_by_samples
from apportion.errors import InputError
from apportion.problem import Observation
from apportion.runs.files import read_arrays, write_arrays
from apportion.simplex import Mask

ModelArrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class ClientUpdate:
    """A usable reply: node, model, distance from the model sent out, and content."""

    node: int
    model: ModelArrays
    norm: float
    content: RecordDict


def read_model(record: ArrayRecord) -> ModelArrays:
    """Return the arrays of a record by name; they share its memory and are read-only."""
    return {name: np.asarray(_viewed(array), order="C") for name, array in record.items()}


def _viewed(array: Array) -> np.ndarray:
    """View an array in its serialised bytes, without a copy."""
    if array.stype != "numpy.ndarray" or array.data[:7] != b"\x93NUMPY\x01":
        return array.numpy()
    head = BytesIO(array.data)
    np.lib.format.read_magic(head)
    shape, by_columns, kind = np.lib.format.read_array_header_1_0(head)
    if 0 in shape:
        return array.numpy()
    flat = np.frombuffer(array.data, kind, math.prod(shape), head.tell())
    return flat.reshape(shape, order="F" if by_columns else "C")


def shapes_of(model: ModelArrays) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's arrays by name."""
    return {name: array.shape for name, array in model.items()}


def write_model(model: ModelArrays) -> ArrayRecord:
    """Convert arrays into a record."""
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in model.items()})


def weighted_sum(weights: np.ndarray, models: Sequence[ModelArrays]) -> ModelArrays:
    """Compute sum_i w_i v_i in float64 and cast to the models' types; integers are rounded."""
    return {
        name: _weighted(weights, [model[name] for model in models], models[0][name])
        for name in models[0]
    }


def moved(
    models: Sequence[ModelArrays],
    start: ModelArrays,
    move: ModelArrays | None,
    shares: np.ndarray,
    step: float,
    momentum: float,
) -> ModelArrays:
    """Compute start + step (sum_i a_i v_i - start) + momentum x move in float64, cast to start's types.

    Integer arrays are averaged, and so are arrays that would become negative although their average
    is not, such as the variances of a batch normalisation.
    """
    weights = np.array([*(step * shares), 1 - step, *([] if move is None else [momentum])])
    made = {}
    for name, first in start.items():
        own = [model[name] for model in models]
        if first.dtype.kind == "f":
            last = [] if move is None else [move[name]]
            made[name] = _weighted(weights, [*own, first, *last], first)
            if not (made[name] < 0).any():
                continue
            rows = [array.reshape(-1) for array in own]
            if any((_block(shares, rows, part) < 0).any() for part in _blocks(first.size)):
                continue
        made[name] = _weighted(shares, own, first)
    return made


BLOCK = 1 << 18
"""Number of values converted to float64 at once, to bound memory."""


def _blocks(size: int, rows: int = 1) -> list[slice]:
    """Return slices that cover an array of this size; shorter if rows are processed together."""
    block = max(1024, BLOCK // rows)
    return [slice(first, first + block) for first in range(0, size, block)]


def _block(weights: np.ndarray, rows: Sequence[np.ndarray], part: slice) -> np.ndarray:
    """Compute a slice of a weighted sum, in float64."""
    total = np.zeros(len(rows[0][part]))
    for weight, own in zip(weights, rows, strict=True):
        total += weight * own[part].astype(np.float64)
    return total


def _weighted(weights: np.ndarray, arrays: Sequence[np.ndarray], like: np.ndarray) -> np.ndarray:
    """Compute a weighted sum in the shape and type of `like`."""
    made = np.empty_like(like, order="C", subok=False)
    flat, rows = made.reshape(-1), [array.reshape(-1) for array in arrays]
    for part in _blocks(flat.size):
        flat[part] = _cast(_block(weights, rows, part), like.dtype)
    return made


def _cast(array: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Cast an array; round if the new type is an integer."""
    rounded = np.rint(array) if kind.kind != "f" and array.dtype.kind == "f" else array
    return rounded.astype(kind, copy=False)


def geometry(
    models: Sequence[ModelArrays], start: ModelArrays, move: ModelArrays | None = None
) -> np.ndarray:
    """Rotate the updates, and the server's last move as the last row, into few coordinates.

    The inner products of the rows do not change, so states can use them instead of the updates.
    """
    gram = np.zeros((len(models) + 1, len(models) + 1))
    for name in _floats(start):
        first = start[name].reshape(-1)
        rows = [model[name].reshape(-1) for model in models]
        last = None if move is None else move[name].reshape(-1)
        for part in _blocks(first.size, len(gram)):
            before = first[part].astype(np.float64)
            stacked = np.zeros((len(gram), len(before)))
            for place, own in enumerate(rows):
                stacked[place] = own[part] - before
            if last is not None:
                stacked[-1] = last[part]
            gram += stacked @ stacked.T
    values, vectors = np.linalg.eigh(gram)
    return vectors * np.sqrt(np.maximum(values, 0.0))


def usable(
    replies: Iterable[Message], start: ModelArrays
) -> tuple[list[ClientUpdate], dict[int, str]]:
    """Return the usable replies, sorted by node, and the reasons to refuse the others."""
    updates: list[ClientUpdate] = []
    refused: dict[int, str] = {}
    for message in sorted(replies, key=lambda message: message.metadata.src_node_id):
        node = message.metadata.src_node_id
        if message.has_error():
            refused[node] = f"failed: {str(message.error.reason)[:200]}"
            continue
        model = only_model(message.content, start)
        if isinstance(model, str):
            refused[node] = model
            continue
        updates.append(ClientUpdate(node, model, _distance(model, start), message.content))
    return updates, refused


def sample_counts(updates: Sequence[ClientUpdate], key: str) -> np.ndarray:
    """Return the numbers of samples that the clients report; all 1 if one is missing or invalid."""

    def claim(content: RecordDict) -> float:
        values = [record.get(key) for record in content.metric_records.values()]
        return next((float(value) for value in values if isinstance(value, int | float)), math.nan)

    counts = np.array([claim(update.content) for update in updates])
    usable = np.isfinite(counts).all() and (counts > 0).all()
    return counts if usable else np.ones(len(updates))


def fedavg_shares(counts: np.ndarray) -> np.ndarray:
    """Compute FedAvg's shares with capped counts, as in the simulator."""
    return shares_by_samples(counts, np.ones(len(counts), bool))


def only_model(content: RecordDict, start: ModelArrays) -> ModelArrays | str:
    """Return a reply's model in the types and order of the model sent out, or why it is refused."""
    records = list(content.array_records.values())
    if len(records) != 1:
        return f"misshapen: it contains {len(records)} records of arrays instead of one"
    try:
        model = read_model(records[0])
    except Exception as error:  # no reply may stop the round
        return f"misshapen: its arrays cannot be read ({str(error)[:200]})"
    if model.keys() != start.keys():
        odd = sorted(model.keys() ^ start.keys())[0]
        return f"misshapen: array {odd!r} is missing or unexpected"
    for name, array in model.items():
        if array.shape != start[name].shape:
            return f"misshapen: array {name!r} is {array.shape}, not {start[name].shape}"
        if array.dtype.kind not in "fiub":
            return f"misshapen: array {name!r} is of type {array.dtype}"
        with np.errstate(over="ignore", invalid="ignore"):
            as_kept = array.astype(start[name].dtype, copy=False)
        if not (np.isfinite(array).all() and np.isfinite(as_kept).all()):
            return f"not finite: array {name!r}"
    return {name: _cast(model[name], own.dtype) for name, own in start.items()}


def _floats(model: ModelArrays) -> list[str]:
    return [name for name, array in model.items() if array.dtype.kind == "f"]


def _distance(model: ModelArrays, start: ModelArrays) -> float:
    total = 0.0
    for name in _floats(start):
        own, first = model[name].reshape(-1), start[name].reshape(-1)
        for part in _blocks(own.size):
            apart = own[part].astype(np.float64) - first[part]
            total += float(apart @ apart)
    return float(np.sqrt(total))


def padded_width(count: int) -> int:
    """Return the next power of two, at least 8; few widths limit the number of compilations."""
    return max(8, 1 << (count - 1).bit_length())


class _ClientPast(NamedTuple):
    """A client's last H states, its last share, and the round of its last reply."""

    history: np.ndarray
    share: float
    seen: int


class ClientNote(NamedTuple):
    """Outcome of a client in a round."""

    round: int
    node: int
    outcome: str
    accuracy: float
    share: float


class RoundNote(NamedTuple):
    """Source and accuracy of a round's model, for `summary`."""

    n: int
    by: str
    accuracy: float


class ClientMemory:
    """State between rounds: every client's past, the model sent out and its last change.

    `samples` is the fingerprint of the server's samples.
    """

    def __init__(self, window: int, samples: str = ""):
        self.window, self.samples = window, samples
        self.rounds = 0
        self.norms: deque[list[float]] = deque(maxlen=window)
        """Norms of all updates in the last rounds."""
        self.usual = 0.0
        """The largest median of these norms so far."""
        self.start: ModelArrays | None = None
        self.move: ModelArrays | None = None
        self.made: ModelArrays | None = None
        """The last aggregated model."""
        self.clients: dict[int, _ClientPast] = {}
        self.doubted: set[int] = set()
        """Clients that failed the screening when they last replied."""
        self.notes: list[ClientNote] = []
        self.round_notes: list[RoundNote] = []

    def send(self, model: ModelArrays) -> None:
        """Store the model sent out and its change."""
        before, self.move = self.start, None
        if before is not None and shapes_of(before) == shapes_of(model):
            self.move = {name: model[name] - before[name] for name in _floats(model)}
        self.start = model

    def usual_norm(self, norms: list[float]) -> float:
        """Return the largest median norm so far; late clients' updates are as large as at first."""
        self.norms.append(norms)
        positive = [norm for some in self.norms for norm in some if norm > 0]
        middle = median_low(positive) if positive else math.inf
        if math.isfinite(middle):
            self.usual = max(self.usual, middle)
        return self.usual or math.inf

    def absence(self, node: int) -> int:
        """Return the number of rounds since a client last replied."""
        return self.rounds - (self.clients[node].seen if node in self.clients else 0)

    def observation(self, nodes: Sequence[int], shown: np.ndarray) -> tuple[Observation, Mask]:
        """Return the policy's padded observation; a new client has no past and an equal share."""
        m = len(nodes)
        width = padded_width(m)
        mask = np.arange(width) < m
        history = np.zeros((width, self.window, shown.shape[1]), np.float32)
        held = np.zeros(width, np.float32)
        for i, node in enumerate(nodes):
            history[i] = self._extended(node, shown[i])
            held[i] = self.clients[node].share if node in self.clients else 1 / m
        held = held / held.sum() if held.sum() > 0 else mask / np.float32(m)
        observation = Observation(jnp.asarray(history), jnp.asarray(held, jnp.float32))
        return observation, jnp.asarray(mask)

    def keep(self, nodes: Sequence[int], shown: np.ndarray, shares: np.ndarray) -> None:
        """Store the states and shares of these clients."""
        for node, own, share in zip(nodes, shown, shares, strict=True):
            past = self._extended(node, own)
            self.clients[node] = _ClientPast(past, float(share), self.rounds + 1)

    def end_round(self, note: RoundNote) -> None:
        """Count a round and store its note."""
        self.rounds += 1
        self.round_notes.append(note)

    def _extended(self, node: int, shown: np.ndarray) -> np.ndarray:
        """Return the last states of a client; after an absence, copies of the present state."""
        if self.absence(node):
            return np.tile(shown, (self.window, 1)).astype(np.float32)
        blank = np.zeros((self.window, len(shown)), np.float32)
        past = self.clients[node].history if node in self.clients else blank
        return np.concatenate([past[1:], shown[None, :]])

    def save(self, path: Path) -> None:
        """Write the memory atomically, without pickle."""
        start, made = self.start or {}, self.made or {}
        arrays = {f"history/{node}": own.history for node, own in self.clients.items()}
        arrays |= {f"start/{name}": own for name, own in start.items()}
        arrays |= {f"made/{name}": own for name, own in made.items()}
        outcomes = sorted({note[2] for note in self.notes})
        numbers = [(n, node, outcomes.index(outcome)) for n, node, outcome, *_ in self.notes]
        arrays["notes"] = np.array(numbers, np.int64).reshape(-1, 3)
        arrays["measures"] = np.array([note[3:] for note in self.notes]).reshape(-1, 2)
        about = {
            "outcomes": outcomes,
            "rounds": self.rounds,
            "samples": self.samples,
            "rounds_made": [
                [note.n, note.by, note.accuracy if np.isfinite(note.accuracy) else None]
                for note in self.round_notes
            ],
            "norms": list(self.norms),
            "usual": self.usual,
            "names": list(made),
            "clients": [[node, own.share, own.seen] for node, own in self.clients.items()],
            "doubted": sorted(self.doubted),
        }
        write_arrays(path, arrays, about)

    @classmethod
    def restored(cls, path: Path, window: int, samples: str) -> "ClientMemory":
        """Read the memory from a file; raise InputError if it belongs to another federation."""
        arrays, about = read_arrays(path)
        memory = cls(window, samples)
        try:
            memory.rounds, memory.usual = about["rounds"], about["usual"]
            memory.norms.extend(about["norms"])
            memory.doubted.update(about["doubted"])
            known = about["samples"]
            for node, share, seen in about["clients"]:
                memory.clients[node] = _ClientPast(arrays[f"history/{node}"], share, seen)
            # The file sorts arrays; `names` has their order in the model.
            memory.start = {name: arrays[f"start/{name}"] for name in about["names"]}
            memory.made = {name: arrays[f"made/{name}"] for name in about["names"]}
            numbers, measures = arrays["notes"].tolist(), arrays["measures"].tolist()
            memory.notes = [
                ClientNote(n, node, about["outcomes"][code], accuracy, share)
                for (n, node, code), (accuracy, share) in zip(numbers, measures, strict=True)
            ]
            memory.round_notes = [
                RoundNote(n, by, np.nan if accuracy is None else accuracy)
                for n, by, accuracy in about["rounds_made"]
            ]
        except (KeyError, ValueError, IndexError) as error:
            raise InputError(
                f"{path}: is not a checkpoint of this strategy ({error}); name another file, or remove it"
            ) from error
        if known != samples or any(len(own.history) != window for own in memory.clients.values()):
            raise InputError(
                f"{path}: belongs to a server with other samples (labels with fingerprint {known}, here "
                f"{samples}) or another window; name another file"
            )
        return memory
