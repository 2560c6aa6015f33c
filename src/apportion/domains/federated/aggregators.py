"""Ways to make one model of many: learned shares, and those they are compared with.

An aggregator turns what the server received into a model and the shares it gave. Shares average
whole models; the median, the trimmed mean (Yin et al. 2018) and Krum (Blanchard et al. 2017) are
the usual defences against byzantine clients. An episode under an aggregator is an `EpisodeRecord`.
"""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from apportion.composition import EqualShares
from apportion.domains.federated.federation import Federation, Model, Models, average
from apportion.problem import Choice, Observation
from apportion.tasks import Task, Tasks, TaskSets

Shares = Float[Array, " entities"]


class Received(eqx.Module):
    """A round's models with what the server knows of their senders."""

    models: Models
    observation: Observation
    counts: Int[Array, " entities"]
    mask: Bool[Array, " entities"]


class Aggregator(eqx.Module):
    """The received models to one model, and the shares that made it."""

    @abstractmethod
    def __call__(self, received: Received) -> tuple[Model, Shares]:
        """Aggregate one round."""


class BySamples(Aggregator):
    """FedAvg as first published: shares in proportion to the clients' samples."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        counts = jnp.where(received.mask, received.counts, 0).astype(jnp.float32)
        shares = counts / counts.sum()
        return average(shares, received.models), shares


class PolicyAggregator(Aggregator):
    """Shares by any choice of (observation, mask): a learned policy, or `EqualShares()` (FedAvg)."""

    choose: Choice

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares = self.choose(received.observation, received.mask)
        return average(shares, received.models), shares


UNIFORM = PolicyAggregator(EqualShares())
"""FedAvg with equal shares."""


class Fixed(Aggregator):
    """The same shares every round, by the client's place in the task: an informed yardstick."""

    shares: Shares

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares = jnp.where(received.mask, self.shares, 0.0)
        shares = shares / shares.sum()
        return average(shares, received.models), shares

    @classmethod
    def minority(cls, total: float | Array, sizes: tuple[int, int] = (8, 2)) -> "Fixed":
        """`total` spread over the last clients, the rest over the first."""
        first, last = sizes
        total = jnp.asarray(total, float)
        return cls(
            jnp.concatenate([jnp.full(first, (1 - total) / first), jnp.full(last, total / last)])
        )


class TrimmedMean(Aggregator):
    """Coordinate by coordinate, the mean without the `fraction` smallest and largest values."""

    fraction: float = eqx.field(static=True, default=0.2)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        m = received.mask.sum()
        cut = jnp.minimum((self.fraction * m).astype(jnp.int32), (m - 1) // 2)
        return _by_rank(received, cut, m - cut)


class Median(Aggregator):
    """Coordinate by coordinate, the median."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        m = received.mask.sum()
        return _by_rank(received, (m - 1) // 2, m // 2 + 1)


def _by_rank(received: Received, first: Array, end: Array) -> tuple[Model, Shares]:
    """Mean of the values ranked first..end in each coordinate; the share of a client is how much
    of the model is made of its values.
    """
    values = jnp.where(received.mask[:, None], received.models, jnp.inf)
    ranks = jnp.argsort(jnp.argsort(values, axis=0), axis=0)
    kept = (ranks >= first) & (ranks < end)
    model = jnp.where(kept, received.models, 0.0).sum(0) / (end - first)
    return model, kept.mean(1) / (end - first)


class Krum(Aggregator):
    """The one model nearest to its m - f - 2 nearest neighbours, f being the byzantine clients to
    withstand.
    """

    byzantine: int = eqx.field(static=True, default=2)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        mask, models = received.mask, received.models
        m = mask.sum()
        squares = (models**2).sum(-1)
        distances = (
            squares[:, None]
            + squares[None, :]
            - 2 * jnp.matmul(models, models.T, precision="highest")
        )
        apart = mask[None, :] & ~jnp.eye(len(mask), dtype=bool)
        ordered = jnp.sort(jnp.where(apart, distances, jnp.inf), axis=-1)
        near = jnp.arange(len(mask))[None, :] < jnp.maximum(m - self.byzantine - 2, 1)
        score = jnp.where(mask, jnp.where(near, ordered, 0.0).sum(-1), jnp.inf)
        chosen = jnp.argmin(score)
        return models[chosen], jax.nn.one_hot(chosen, len(mask))


class EpisodeRecord(eqx.Module):
    """Accuracies of the aggregate and shares of the clients, round by round."""

    evaluated: Float[Array, "*batch time"]
    """On the server's evaluation set: the reward."""
    tested: Float[Array, "*batch time"]
    """On its test set."""
    shares: Float[Array, "*batch time entities"]

    def to_frame(self) -> pd.DataFrame:
        """A row for each task and round of a record of tasks, with a column for each client's share."""
        tasks, rounds = self.tested.shape
        columns = {
            "task": np.repeat(np.arange(tasks), rounds),
            "round": np.tile(np.arange(1, rounds + 1), tasks),
            "evaluated": np.asarray(self.evaluated, float).reshape(-1),
            "tested": np.asarray(self.tested, float).reshape(-1),
        }
        shares = np.asarray(self.shares, float).reshape(tasks * rounds, -1)
        return pd.DataFrame(columns | {f"share {i}": own for i, own in enumerate(shares.T)})


def run_episode(
    federation: Federation, aggregator: Aggregator, task: Task, *, key: PRNGKeyArray
) -> EpisodeRecord:
    """One episode under an aggregator, tested every round; the same key gives the same batches."""
    reset_key, walk_key = jax.random.split(key)

    def one_round(state, key):
        received = Received(
            state.models,
            federation.observe(task, state),
            federation.counts[task.members],
            task.mask,
        )
        model, shares = aggregator(received)
        step = federation.continue_from(task, state, model, shares, key=key)
        return step.state, (step.reward, federation.test_accuracy(model), shares)

    first = federation.reset(task, key=reset_key)
    keys = jax.random.split(walk_key, federation.horizon)
    _, (evaluated, tested, shares) = jax.lax.scan(one_round, first, keys)
    return EpisodeRecord(evaluated, tested, shares)


def _run_tasks(
    federation: Federation, aggregator: Aggregator, tasks: Tasks, keys: Key[Array, " tasks"]
) -> EpisodeRecord:
    return jax.vmap(lambda task, key: run_episode(federation, aggregator, task, key=key))(
        tasks.each, keys
    )


@eqx.filter_jit
def run_episodes(
    federation: Federation, aggregator: Aggregator, tasks: Tasks, *, key: PRNGKeyArray
) -> EpisodeRecord:
    """One episode of every task, each with its own key: arrays (tasks, time, ...)."""
    return _run_tasks(federation, aggregator, tasks, jax.random.split(key, len(tasks)))


@eqx.filter_jit
def run_episode_sets(
    federation: Federation, aggregators: Aggregator, tasks: TaskSets, keys: Key[Array, "runs tasks"]
) -> EpisodeRecord:
    """Each of stacked aggregators on its own tasks: arrays (runs, tasks, time, ...).

    An aggregator without arrays, such as `Median()`, serves every run.
    """
    return eqx.filter_vmap(_run_tasks, in_axes=(None, eqx.if_array(0), 0, 0))(
        federation, aggregators, tasks.each, keys
    )
