"""Scores of a model on the server's samples: the probability of each right answer.

Answers are classes, or rows of scores or probabilities; tasks other than classification have a loss
for each sample. Scores are by sample, independent of the number and the names of classes.
"""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from flwr.app import ArrayRecord, RecordDict
from scipy.special import softmax

from apportion.bridges.flower.updates import ModelArrays, only_model, write_model
from apportion.domains.federated.aggregators import (
    CHANCE_OFFSET,
    is_better,
    is_harmful,
    passes_gate,
)
from apportion.errors import InputError

Answers = Callable[[ArrayRecord], Any]
"""Maps a model to its answers for the server's samples, or to its losses on them."""
Tune = Callable[[ArrayRecord, np.ndarray], ArrayRecord]
"""Trains a model on the server's samples at these positions."""
FOLDS = 4
"""Number of parts of the samples for cross-fitting; each is held out once."""
T = TypeVar("T")
_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Judged:
    """Scores of a model on each sample."""

    chances: np.ndarray
    """Probability of the right answer, or exp(-loss / scale)."""
    right: np.ndarray
    """Whether the most likely answer is right."""
    known: np.ndarray
    """Degree to which the model claims to know each sample, in [0, 1]; see `is_trusted`."""

    @property
    def logs(self) -> np.ndarray:
        """Log of each probability, for the gate."""
        return np.log(self.chances + CHANCE_OFFSET)

    @property
    def losses(self) -> np.ndarray:
        """Minus the log of each probability; with `score`, the loss divided by `ServerData.scale`."""
        # A probability below 1e-300 is rounded to 0.
        return -np.log(np.maximum(self.chances, 1e-300))

    def is_better(self, other: "Judged", errors: float = 1.0) -> bool:
        """Whether this model is better than another by more than `errors` standard errors."""
        return bool(is_better(self.logs - other.logs, errors=errors))

    def passes_gate(self, fedavg: "Judged") -> bool:
        """Whether the model is used instead of FedAvg's."""
        kept, gains = kept_samples(len(self.logs)), self.logs - fedavg.logs
        return bool(passes_gate(gains, self.right * 1.0 - fedavg.right, kept, True))

    def is_harmful(self, last: "Judged") -> bool:
        """Whether this model is clearly worse than the last one."""
        return bool(is_harmful(self.logs - last.logs, self.right * 1.0 - last.right))

    @property
    def accuracy(self) -> float:
        """Fraction of right answers."""
        return float(self.right.mean())


_LARGEST_LOSS_RATIO = 1.5
"""Largest mean loss, relative to the median client's, with which a client passes the screening: the inverse
of the smallest accuracy ratio."""


def kept_samples(count: int) -> np.ndarray:
    """Return the mask of the samples kept for the gate: every fourth, as in the simulator."""
    return np.arange(count) % 4 == 3


class ServerData:
    """Scores of models on the server's samples, by the user's `predict` and `labels` or `score`."""

    def __init__(
        self,
        predict: Answers | None,
        labels: Any,
        score: Answers | None = None,
        tune: Tune | None = None,
    ):
        if predict is not None and score is not None:
            raise InputError("give either predict with labels, or score, but not both")
        if predict is None and labels is not None:
            raise InputError(
                "labels without predict: give predict too, which returns a model's answers"
            )
        if predict is None and score is None:
            raise InputError(
                "the server has no samples: give predict with labels, or score; without samples use "
                "Flower's FedAvg"
            )
        self.predict, self.score, self.tune = predict, score, tune
        self.name = "predict" if score is None else "score"
        self.labels = None if predict is None else _classes(labels)
        self.scale = 1.0

    @property
    def fingerprint(self) -> str:
        """Short digest of the labels."""
        known = b"" if self.labels is None else self.labels.tobytes()
        return hashlib.sha256(known).hexdigest()[:16]

    def try_out(self, model: ModelArrays) -> None:
        """Raise InputError if `predict` or `score` fails on this model."""
        try:
            self._judged(model)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.name}: it fails on the first model ({why})") from error

    def begin_round(self, start: ModelArrays) -> None:
        """Set the unit of losses: the mean loss of the model that was sent out."""
        losses = None if self.score is None else self._guarded(self._losses, start)
        if losses is not None:
            self.scale = float(losses.mean()) or 1.0

    def judged(self, model: ModelArrays) -> Judged | None:
        """Score a model; None if the user's function fails."""
        return self._guarded(self._judged, model)

    def _guarded(self, judge: Callable[[ModelArrays], T], model: ModelArrays) -> T | None:
        """Log a failure of the user's function and return None, so that the round goes on."""
        try:
            return judge(model)
        except Exception as error:
            _log.warning("%s: %s: %s", self.name, type(error).__name__, error)
            return None

    def _judged(self, model: ModelArrays) -> Judged:
        if self.predict is None or self.labels is None:
            losses = self._losses(model)
            chances = np.exp(-losses / self.scale)
            return Judged(chances, chances > np.exp(-1), np.ones(len(losses)))
        answers, labels = np.asarray(self.predict(write_model(model))), self.labels
        _check_answers(answers, labels)
        if answers.ndim == 1:
            right = answers == labels
            return Judged(right.astype(float), right, _known(answers, labels))
        rows = answers.astype(np.float64)
        # Rows that are not probabilities are scores.
        if (rows < 0).any() or np.abs(rows.sum(-1) - 1).max() >= 1e-3:
            rows = softmax(rows, axis=-1)
        chances = rows[np.arange(len(labels)), labels]
        if not np.isfinite(chances).all():
            raise ValueError("its scores are not finite")
        guesses = answers.argmax(-1)
        return Judged(chances, guesses == labels, _known(guesses, labels))

    def right_answers(
        self, clients: Sequence[Judged], before: Judged, doubted: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the right answers of clients and of the model sent out, for the screening.

        With `score`, a client has all answers right, or none if its mean loss is too large: above that
        of the model sent out, and above 1.5 times the median client's by more than a standard error,
        or by anything if the client is doubted.
        """
        if self.score is None:
            return np.stack([own.right for own in clients]), before.right
        losses = np.stack([own.losses for own in clients])
        means, count = losses.mean(1), losses.shape[1]
        median = losses[np.argsort(means)[(len(means) - 1) // 2]]
        excess = losses - _LARGEST_LOSS_RATIO * median
        errors = np.where(doubted, 0.0, excess.std(1) / np.sqrt(count))
        wrong = (excess.mean(1) > errors) & (means > before.losses.mean())
        return np.repeat(~wrong[:, None], count, axis=1), np.ones(count, bool)

    def tuned(self, model: ModelArrays, judged: Judged) -> tuple[ModelArrays, Judged] | None:
        """Train a model on the samples; None unless it improves held-out ones by a standard error.

        Models trained on three quarters of the samples score the rest; these scores are returned.
        """
        count, parts = len(judged.logs), []
        folds = np.arange(count) % FOLDS
        for fold in range(FOLDS):
            own = self._guarded(partial(self._train, chosen=np.flatnonzero(folds != fold)), model)
            part = None if own is None else self.judged(own)
            if part is None:
                return None
            parts.append(part)
        found = [np.choose(folds, [vars(part)[name] for part in parts]) for name in vars(judged)]
        held_out = Judged(*found)
        if not held_out.is_better(judged) or held_out.accuracy < judged.accuracy:
            return None
        made = self._guarded(partial(self._train, chosen=np.arange(count)), model)
        return None if made is None else (made, held_out)

    def _train(self, model: ModelArrays, chosen: np.ndarray) -> ModelArrays:
        assert self.tune is not None
        made = only_model(RecordDict({"arrays": self.tune(write_model(model), chosen)}), model)
        if isinstance(made, str):
            raise ValueError(f"tune: {made}")
        return made

    def _losses(self, model: ModelArrays) -> np.ndarray:
        assert self.score is not None
        losses = np.asarray(self.score(write_model(model)), np.float64)
        if losses.ndim != 1 or len(losses) == 0 or not (losses >= 0).all():
            raise ValueError(f"{losses.shape}; return a loss of at least 0 for each sample, (n,)")
        return losses


def _known(guesses: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return how often a sample's class is named relative to how often it occurs, at most 1."""
    asked = np.bincount(labels)
    named = np.bincount(
        np.clip(guesses.astype(np.int64), -1, len(asked)) + 1, minlength=len(asked) + 1
    )
    return np.minimum(named[labels + 1] / asked[labels], 1.0)


def _check_answers(answers: np.ndarray, labels: np.ndarray) -> None:
    """Raise ValueError unless the answers are classes or rows of scores for these labels."""
    shape, n = answers.shape, len(labels)
    rows = f"return a row of scores or probabilities for each sample, ({n}, classes)"
    if shape[:1] != (n,) or answers.ndim > 2:
        raise ValueError(f"it returns {shape} for {n} labels; {rows}")
    single = answers.ndim == 2 and shape[1] == 1
    if single or (answers.ndim == 1 and answers.dtype.kind not in "iub"):
        raise ValueError(
            f"it returns one {answers.dtype} per sample, {shape}; {rows}; for the probability p of class "
            "1, return np.stack([1 - p, p], axis=1)"
        )
    if answers.ndim == 2 and labels.max() >= shape[1]:
        from_one = " start at 1 and" if labels.min() == 1 and labels.max() == shape[1] else ""
        raise ValueError(
            f"it returns {shape[1]} classes, and labels{from_one} go up to {labels.max()}; classes "
            f"count from 0: give labels of 0 to {shape[1] - 1}, or {rows}"
        )


def _classes(labels: Any) -> np.ndarray:
    given = np.asarray(labels)
    if given.ndim != 1 or len(given) == 0 or given.dtype.kind not in "iu" or given.min() < 0:
        raise InputError(
            f"labels: {given.dtype} of shape {given.shape}; give the classes 0, 1, ... of the "
            "server's samples, at least one"
        )
    return given.astype(np.int64)
