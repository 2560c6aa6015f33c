"""Ways to make one model of many: learned shares, and those they are compared with.

An aggregator turns what the server received into a model and the shares it gave; it may remember
something from round to round. The usual defences are in `robust.py`, the server's optimisers in
`optimisers.py`, those that learn from the server's samples in `server_side.py`. An episode under an
aggregator is an `EpisodeRecord`.
"""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from apportion.composition import EqualShares
from apportion.domains.federated.federation import (
    Federation,
    FederationState,
    Model,
    Models,
    ServerSamples,
    average,
)
from apportion.domains.federated.states import shares_by_samples
from apportion.problem import Choice, Observation
from apportion.tasks import Task

Shares = Float[Array, " entities"]


class Received(eqx.Module):
    """A round's models with what the server knows of their senders."""

    models: Models
    observation: Observation
    counts: Int[Array, " entities"]
    mask: Bool[Array, " entities"]
    start: Model
    """The aggregate that the clients started from."""
    move: Model
    """That aggregate less the one before."""
    samples: ServerSamples | None = None
    federation: Federation | None = None
    """Where the server tries models on its samples."""
    key: PRNGKeyArray | None = None

    @property
    def by_samples(self) -> Shares:
        """FedAvg's shares: in proportion to the clients' samples, capped."""
        return shares_by_samples(self.counts.astype(jnp.float32), self.mask)


Memory = PyTree[Array]


class Aggregator(eqx.Module):
    """The received models to one model, and the shares that made it."""

    @abstractmethod
    def begin(self, model: Model) -> Memory:
        """What is remembered before the first round."""

    @abstractmethod
    def step(self, received: Received, memory: Memory) -> tuple[Model, Shares, Memory]:
        """Aggregate one round."""


class Memoryless(Aggregator):
    """An aggregator that sees one round at a time."""

    @abstractmethod
    def __call__(self, received: Received) -> tuple[Model, Shares]:
        """Aggregate one round."""

    def begin(self, model: Model) -> Memory:
        return ()

    def step(self, received: Received, memory: Memory) -> tuple[Model, Shares, Memory]:
        return *self(received), memory


class BySamples(Memoryless):
    """FedAvg as first published: shares in proportion to the clients' samples, capped."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        return average(received.by_samples, received.models), received.by_samples


class PolicyAggregator(Memoryless):
    """Shares by any choice of (observation, mask): a learned policy, or `EqualShares()` (FedAvg)."""

    choose: Choice

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares = self.choose(received.observation, received.mask)
        return average(shares, received.models), shares


UNIFORM = PolicyAggregator(EqualShares())
"""FedAvg with equal shares."""


class Fixed(Memoryless):
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

    def one_round(carry, key):
        state, memory = carry
        received = receive(federation, task, state, key)
        model, shares, memory = aggregator.step(received, memory)
        step = federation.continue_from(task, state, model, shares, key=key)
        return (step.state, memory), (step.reward, federation.test_accuracy(model), shares)

    first = federation.reset(task, key=reset_key)
    keys = jax.random.split(walk_key, federation.horizon)
    begun = (first, aggregator.begin(first.aggregate))
    _, (evaluated, tested, shares) = jax.lax.scan(one_round, begun, keys)
    return EpisodeRecord(evaluated, tested, shares)


def receive(
    federation: Federation, task: Task, state: FederationState, key: PRNGKeyArray
) -> Received:
    """What the server has received in a state."""
    return Received(
        state.models,
        federation.observe(task, state),
        federation.counts[task.members],
        state.present,
        state.aggregate,
        state.move,
        state.server,
        federation,
        jax.random.fold_in(key, 1),
    )


def run_each(
    federation: Federation, aggregator: Aggregator, tasks: Task, keys: Key[Array, " tasks"]
) -> EpisodeRecord:
    """One episode of every task with its own key: arrays (tasks, time, ...)."""
    return jax.vmap(lambda task, key: run_episode(federation, aggregator, task, key=key))(
        tasks, keys
    )


@eqx.filter_jit
def run_episodes(
    federation: Federation, aggregator: Aggregator, tasks: Task, *, key: PRNGKeyArray
) -> EpisodeRecord:
    """One episode of every task, each with its own key: arrays (tasks, time, ...)."""
    return run_each(federation, aggregator, tasks, jax.random.split(key, len(tasks)))


@eqx.filter_jit
def run_episode_sets(
    federation: Federation, aggregators: Aggregator, tasks: Task, keys: Key[Array, "runs tasks"]
) -> EpisodeRecord:
    """Each of stacked aggregators on its own tasks: arrays (runs, tasks, time, ...).

    An aggregator without arrays, such as `Median()`, serves every run.
    """
    return eqx.filter_vmap(run_each, in_axes=(None, eqx.if_array(0), 0, 0))(
        federation, aggregators, tasks, keys
    )
