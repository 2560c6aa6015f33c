"""State of each client, x_{i,n} = f(v_{i,n}): the policy's input, computed without its data.

The paper's state is the accuracy of the client's model on the server's evaluation set (`Raw`).
`Invariant` is the default. It depends on samples instead of classes, so it supports any score and
any number of classes. `Accuracy` and `Rich` are variants of the paper's state for Figure 6.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from apportion.domains.federated.data import CLASSES
from apportion.policy import largest

Channels = Float[Array, "entities channels"]


class SampleScores(eqx.Module):
    """Probability of the right answer to each of the server's samples."""

    models: Float[Array, "entities samples"]
    towards: Float[Array, "entities samples"]
    """Scores of FedAvg's aggregate moved a quarter of the way to the client's model."""
    fedavg: Float[Array, " samples"]
    """Scores of FedAvg's aggregate."""
    before: Float[Array, " samples"]
    """Scores of the aggregate that the clients started from."""
    shown: Bool[Array, " samples"]
    """Whether the policy sees each sample; the others are for the gate or padding."""


class ClassScores(eqx.Module):
    """Accuracy on the evaluation set by class."""

    correct: Float[Array, "entities classes"]
    """Fraction of the set that belongs to each class and is classified correctly."""
    frequency: Float[Array, " classes"]
    """Fraction of the set that belongs to each class."""


class Submission(eqx.Module):
    """The server's information about a round: updates, counts, absences, and scores of the models."""

    updates: Float[Array, "entities parameters"]
    """Each model minus the aggregate it started from."""
    mask: Bool[Array, " entities"]
    counts: Float[Array, " entities"]
    """Number of samples that each client reports."""
    absent: Float[Array, " entities"]
    """Rounds since each client last took part."""
    move: Float[Array, " parameters"]
    """Last change of the aggregate, in the coordinates of the updates."""
    n: Float[Array, ""]
    """Number of rounds before this one."""
    scores: SampleScores | ClassScores
    """The scores that the state reads."""

    def centred(self, values: Channels) -> Channels:
        """Subtract the mean over the clients."""
        mask = self.mask[:, None]
        mean = jnp.where(mask, values, 0.0).sum(0) / mask.sum()
        return jnp.where(mask, values - mean, 0.0)


class ClientState(eqx.Module):
    """Maps a round's submission to channels of each client."""

    channels: ClassVar[int]
    reads: ClassVar[Literal["classes", "samples"]]
    """Kind of scores that the state needs."""

    @abstractmethod
    def __call__(self, submission: Submission) -> Channels:
        """Compute the channels of every client."""


class Raw(ClientState):
    """The paper's state: the accuracy on the evaluation set, not scaled."""

    channels = 1
    reads = "classes"

    def __call__(self, submission: Submission) -> Channels:
        assert isinstance(submission.scores, ClassScores)
        return submission.scores.correct.sum(-1, keepdims=True)


class Accuracy(ClientState):
    """5 (accuracy on the evaluation set - mean over the clients): `Raw`, scaled to learn faster."""

    channels = 1
    reads = "classes"

    def __call__(self, submission: Submission) -> Channels:
        return 5 * submission.centred(Raw()(submission))


class Rich(ClientState):
    """`Accuracy`, accuracy by class, and the update's log norm and cosine to the mean one, all centred."""

    channels = 1 + CLASSES + 2
    reads = "classes"

    def __call__(self, submission: Submission) -> Channels:
        assert isinstance(submission.scores, ClassScores)
        share = jnp.maximum(submission.scores.frequency, 1e-6)
        by_class = submission.centred(submission.scores.correct / share[None, :])
        updates = jnp.where(submission.mask[:, None], submission.updates, 0.0)
        mean = updates.sum(0) / submission.mask.sum()
        norms = jnp.linalg.norm(updates, axis=-1) + 1e-12
        cosines = (
            jnp.matmul(updates, mean, precision="highest") / norms / (jnp.linalg.norm(mean) + 1e-12)
        )
        geometry = submission.centred(5 * jnp.stack([jnp.log(norms), cosines], -1))
        return jnp.concatenate([Accuracy()(submission), by_class, geometry], -1)


QUARTER = 0.25
"""Fraction of the way from FedAvg's aggregate to a client's model at which a model is scored."""
_MAX_COUNT_RATIO = 10.0
"""Cap on sample counts, as a multiple of the median count."""


def _lower_median(values: Any, mask: Any) -> Any:
    """Return the median of the real values, or the lower of two middle values."""
    xp = values.__array_namespace__()
    return xp.sort(xp.where(mask, values, xp.inf))[(mask.sum() - 1) // 2]


def shares_by_samples(counts: Any, mask: Any) -> Any:
    """Compute FedAvg's shares with capped counts, so that no client dominates by a large count.

    Accepts JAX arrays (simulator) or NumPy arrays (Flower).
    """
    xp = counts.__array_namespace__()
    real = xp.where(mask, counts, 0.0)
    capped = xp.minimum(real, _MAX_COUNT_RATIO * _lower_median(real, mask))
    return capped / xp.maximum(capped.sum(), 1e-12)


_LEAST_ACCURACY_RATIO = 2 / 3
"""Smallest accuracy, relative to the median client's, with which a client passes the screening.

Chosen from 1/2 and 2/3 in trials with ten clients and 200 samples: the ratio was above .65 for 99 %
of honest clients. For clients that shift all labels it was mostly .3 to .6 after long training, and
.6 to 1 after short training; the screening does not detect the latter."""
UNCHANGED_RATIO = 0.01
"""A model is unchanged if its update is shorter than this fraction of the median update."""


def is_trusted(right: Any, before: Any, known: Any, norms: Any, doubted: Any, mask: Any) -> Any:
    """Whether each client passes the screening on the server's samples; others get no share.

    A client fails if its accuracy on the samples that it claims to know is below two thirds of the
    median client's by more than a standard error, and below that of the model sent out. A client
    that failed in its last round has no tolerance of a standard error. A client also fails if it
    returns the model unchanged. Clients claim to know a class in proportion to how often they name
    it, at most as often as it occurs. With two classes of ten a client is wrong on most samples and
    right on those that it claims to know. If at least half of the clients fail, all pass.

    Parameters
    ----------
    right, known : array of shape (clients, samples)
        Whether an answer is right, and the degree to which the client claims to know it, in [0, 1].
    before : array of shape (samples,)
        Whether each answer of the model sent out is right.
    norms, doubted, mask : array of shape (clients,)
        Lengths of the updates, whether the client failed in its last round, and which rows are clients.

    Examples
    --------
    >>> import numpy as np
    >>> right = np.arange(20) < np.array([[18], [16], [16], [9], [2]])
    >>> known, ones = np.ones((5, 20)), np.ones(5)
    >>> is_trusted(right, right[1], known, ones, ones < 1, ones > 0).tolist()
    [True, True, True, True, False]
    >>> is_trusted(right, right[1], known, ones, ones > 0, ones > 0).tolist()
    [True, True, True, False, False]
    """
    xp = known.__array_namespace__()
    asked = xp.maximum(known.sum(1), 1e-6)
    hits = (known * right).sum(1)
    least = _LEAST_ACCURACY_RATIO * _lower_median(hits / asked, mask)
    allowance = xp.where(doubted, 0.0, xp.sqrt(least * (1 - least) / asked))
    # The 0.5 is the continuity correction of the normal approximation.
    passes = (hits + 0.5) / asked >= least - allowance
    passes = (passes | (hits >= (known * before).sum(1))) & mask
    passes = passes & (norms >= UNCHANGED_RATIO * _lower_median(norms, mask))
    return xp.where(2 * passes.sum() > mask.sum(), passes, mask)


def average(
    shares: Float[Array, " entities"], models: Float[Array, "entities parameters"]
) -> Float[Array, " parameters"]:
    """Compute sum_i a_i v_i in full precision."""
    return jnp.matmul(shares, models, precision="highest")


GEOMETRY_CHANNELS = 9
"""Channels of `Invariant` that do not depend on the server's samples; they come first."""


def _geometry(submission: Submission) -> Channels:
    """Compute the channels of the geometry of the updates and of the sample counts.

    The first channel is the log of FedAvg's share, as `AggregationPolicy` expects.
    """
    mask, n = submission.mask, submission.n
    m = mask.sum()
    share = shares_by_samples(submission.counts, mask)
    log_share = jnp.log(jnp.maximum(share, 1e-12))
    updates = jnp.where(mask[:, None], submission.updates, 0.0)
    norms = jnp.linalg.norm(updates, axis=-1)
    norm = jnp.log((norms + 1e-12) / (_lower_median(norms, mask) + 1e-12))
    directions = updates / (norms + 1e-12)[:, None]
    mean = average(share, updates)
    pairs = jnp.matmul(directions, directions.T, precision="highest")
    others = mask[None, :] & ~jnp.eye(len(mask), dtype=bool)
    ones = jnp.ones(len(mask))

    def cosines(other: Float[Array, " parameters"]) -> Float[Array, " entities"]:
        length = jnp.linalg.norm(other) + 1e-12
        return jnp.matmul(directions, other / length, precision="highest")

    channels = [
        log_share,
        jnp.clip(norm, -3.0, 3.0),
        2 * cosines(mean),
        cosines(submission.move),
        jnp.where(others, pairs, 0.0).sum(1) / jnp.maximum(m - 1, 1),
        largest(jnp.where(others, pairs, -1.0)),
        jnp.log1p(submission.absent),
        ones * n / (n + 10),
        ones * jnp.log(m / 10) / 2,
    ]
    return jnp.where(mask[:, None], jnp.stack(channels, -1), 0.0)


class Invariant(ClientState):
    """Geometry of the updates, sample counts, and scores on the server's samples; independent of classes.

    One channel weights samples by errors: a model that is right where most are wrong has rare data.
    """

    channels = GEOMETRY_CHANNELS + 8
    reads = "samples"

    def __call__(self, submission: Submission) -> Channels:
        scores, mask = submission.scores, submission.mask
        assert isinstance(scores, SampleScores)
        count = scores.shown.sum()
        weight = scores.shown / jnp.maximum(count, 1)
        mean = jnp.where(mask[:, None], scores.models, 0.0).sum(0) / mask.sum()
        gap = scores.models - mean[None, :]
        hard = weight * (1 - mean)
        own, before, fedavg = scores.models @ weight, scores.before @ weight, scores.fedavg @ weight
        slope = (scores.towards @ weight - fedavg) / QUARTER
        ones = jnp.ones(len(mask))
        channels = [
            4 * submission.centred(own[:, None])[:, 0],
            3 * (gap @ hard) / (hard.sum() + 1e-6),
            5 * submission.centred((jax.nn.relu(gap) @ weight)[:, None])[:, 0],
            3 * (own - before),
            jnp.clip(4 * slope, -3.0, 3.0),
            ones * before,
            ones * 3 * (fedavg - before),
            ones * (jnp.log10(jnp.maximum(count, 1)) - 2),
        ]
        shown = jnp.where(mask[:, None], jnp.stack(channels, -1), 0.0)
        return jnp.concatenate([_geometry(submission), shown], -1)


STATES: dict[str, ClientState] = {
    "invariant": Invariant(),
    "raw": Raw(),
    "accuracy": Accuracy(),
    "rich": Rich(),
}
"""States by their names in the settings."""
