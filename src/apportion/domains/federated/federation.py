"""Federated learning as an allocation problem: shares a_{i,n} average the clients' models v_{i,n}.

A round: every client trains from the aggregate, the server scores the submitted models on its
evaluation set, the policy sees the last H scores of each, and R_t = L(sum_i a_i v_i), the accuracy
of the aggregate. The state holds the models just submitted, so that nothing is trained twice; an
episode is one scan, and many of them one `vmap`. What clients train is in `clients.py`.
"""

import math
from dataclasses import replace
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.domains.federated.clients import Owned, descend
from apportion.domains.federated.digits import CLASSES, Digits
from apportion.domains.federated.model import ClientModel
from apportion.domains.federated.partitions import Partition
from apportion.domains.federated.scoring import by_block, chance, right
from apportion.domains.federated.states import (
    QUARTER,
    Accuracy,
    ClientState,
    Known,
    Submission,
    Tried,
    shares_by_samples,
)
from apportion.errors import InputError
from apportion.problem import Observation, Problem, Step
from apportion.simplex import equal_shares
from apportion.tasks import Task

Model = Float[Array, " parameters"]
Models = Float[Array, "entities parameters"]


class ServerSamples(eqx.Module):
    """The server's own samples in an episode: what the policy may see, and what the gate keeps."""

    places: Int[Array, " samples"]
    shown: Bool[Array, " samples"]
    kept: Bool[Array, " samples"]


class FederationState(eqx.Module):
    """The round, the aggregate, the models trained from it, and what the policy sees of them."""

    n: Int[Array, ""]
    aggregate: Model
    models: Models
    history: Float[Array, "entities window channels"]
    held: Float[Array, " entities"]
    present: Bool[Array, " entities"]
    """Who took part in the round."""
    absent: Float[Array, " entities"]
    """Rounds that have gone by without each client."""
    move: Model
    """The aggregate less the one before it."""
    server: ServerSamples


class Federation(Problem):
    """Aggregate the models of a task's clients, round after round.

    Parameters
    ----------
    digits, partition
        The data, and who holds which of it.
    model
        What each client trains.
    rounds, epochs, batch, learning_rate
        Rounds of an episode; epochs, batch size and step of each client's SGD.
    evaluation, test
        Images the server scores models on, and those it tests the aggregate on.
    sets
        `disjoint`: no image is in both sets; `paper`: the test set is all the server's images.
    window
        H, the rounds of scores that the policy sees.
    state
        What it sees of each client.
    precision
        In which the clients compute; parameters are float32.
    block
        Images scored at once, which bounds memory: activations of `block` images for each model.
    participation
        The part of a task's clients that takes part in a round, others each time.
    drawn
        Between how many and how many of the evaluation images are the server's own in an episode, others
        each time; all of them unless given.
    gate
        Whether a quarter of them is kept from the policy, for the gate to judge it by.
    """

    images: Float[Array, "samples side side"]
    labels: Int[Array, " samples"]
    index: Int[Array, "universe owned"]
    local_labels: Int[Array, "universe owned"]
    counts: Int[Array, " universe"]
    factors: Float[Array, " universe"]
    identities: Int[Array, " universe"]
    evaluation: Int[Array, " evaluation"]
    test: Int[Array, " test"]
    learning_rate: Float[Array, "*runs"]
    state: ClientState
    model: ClientModel
    universe: int = eqx.field(static=True)
    horizon: int = eqx.field(static=True)
    epochs: int = eqx.field(static=True)
    batch: int = eqx.field(static=True)
    window: int = eqx.field(static=True)
    block: int = eqx.field(static=True)
    participation: float = eqx.field(static=True)
    drawn: tuple[int, int] | None = eqx.field(static=True)
    gate: bool = eqx.field(static=True)

    def __init__(
        self,
        digits: Digits,
        partition: Partition,
        model: ClientModel,
        *,
        rounds: int = 50,
        epochs: int = 1,
        batch: int = 50,
        learning_rate: float = 0.05,
        evaluation: int = 1000,
        test: int = 9000,
        sets: Literal["disjoint", "paper"] = "disjoint",
        window: int = 5,
        state: ClientState | None = None,
        precision: Literal["float32", "bfloat16"] = "float32",
        block: int = 100,
        participation: float = 1.0,
        drawn: tuple[int, int] | None = None,
        gate: bool = False,
        seed: int = 0,
    ):
        for name, count in (("rounds", rounds), ("epochs", epochs), ("batch", batch),
                            ("window", window), ("block", block)):  # fmt: skip
            if count < 1:
                raise InputError(f"federation: {name} is {count}; it must be at least 1")
        self.images = jnp.asarray(digits.images, precision)
        self.labels = jnp.asarray(digits.labels, jnp.int32)
        self.index = jnp.asarray(partition.index, jnp.int32)
        self.local_labels = jnp.asarray(partition.labels, jnp.int32)
        self.counts = jnp.asarray(partition.counts, jnp.int32)
        self.factors = jnp.asarray(partition.factors, jnp.float32)
        self.identities = jnp.asarray(partition.identities, jnp.int32)
        chosen = _server_sets(digits, evaluation, test, sets, seed)
        self.evaluation, self.test = (jnp.asarray(part, jnp.int32) for part in chosen)
        self.learning_rate = jnp.asarray(learning_rate, float)
        self.state = Accuracy() if state is None else state
        self.model = model
        self.universe = partition.universe
        self.horizon, self.epochs, self.batch = rounds, epochs, batch
        self.window, self.block = window, block
        if not 0 < participation <= 1:
            raise InputError(f"federation: participation {participation} must be in (0, 1]")
        if drawn is not None and not 1 <= drawn[0] <= drawn[1] <= evaluation:
            raise InputError(f"federation: {drawn} samples cannot be drawn out of {evaluation}")
        self.participation, self.drawn, self.gate = participation, drawn, gate

    @property
    def channels(self) -> int:
        """Channels of the history that the policy reads."""
        return self.state.channels(CLASSES)

    def reset(self, task: Task, *, key: PRNGKeyArray) -> FederationState:
        model_key, train_key = jax.random.split(key)
        first, _ = ravel_pytree(self.model.start(key=model_key))
        blank = FederationState(
            jnp.full((), -1, jnp.int32),
            first,
            jnp.zeros((task.width, first.shape[0])),
            jnp.zeros((task.width, self.window, self.channels)),
            equal_shares(task.mask),
            task.mask,
            jnp.zeros(task.width),
            jnp.zeros_like(first),
            self._own_samples(jax.random.fold_in(key, 2)),
        )
        return self._round(task, blank, first, blank.held, train_key)

    def _own_samples(self, key: PRNGKeyArray) -> ServerSamples:
        places, real = self.evaluation, jnp.ones(self.evaluation.shape, bool)
        if self.drawn is not None:
            fewest, most = self.drawn
            order_key, count_key = jax.random.split(key)
            places = jax.random.permutation(order_key, places)[:most]
            bounds = jnp.log(jnp.array([fewest, most + 1.0]))
            count = jnp.exp(jax.random.uniform(count_key, (), minval=bounds[0], maxval=bounds[1]))
            real = jnp.arange(most) < jnp.floor(count)
        kept = real & (jnp.arange(len(real)) % 4 == 3) & self.gate
        return ServerSamples(places, real & ~kept, kept)

    def observe(self, task: Task, state: FederationState) -> Observation:
        return Observation(state.history, state.held)

    def step(
        self,
        task: Task,
        state: FederationState,
        allocation: Float[Array, " entities"],
        *,
        key: PRNGKeyArray,
    ) -> Step:
        # Of the clients that the policy apportioned among, those of the round divide what the absent had.
        shares = jnp.where(state.present, allocation, 0.0)
        shares = shares / jnp.maximum(shares.sum(), 1e-12) if self.participation < 1 else shares
        aggregate = average(shares, state.models)
        return self.continue_from(task, state, aggregate, allocation, key=key)

    def continue_from(
        self,
        task: Task,
        state: FederationState,
        aggregate: Model,
        shares: Float[Array, " entities"],
        *,
        key: PRNGKeyArray,
    ) -> Step:
        """Collect the accuracy of an aggregate however it was made, and train the next round."""
        reward = self.correct(aggregate[None, :], self.evaluation).sum()
        following = self._round(task, state, aggregate, shares, key)
        return Step(following, reward, jnp.array(False), following.n >= self.horizon)

    def test_accuracy(self, model: Model) -> Float[Array, ""]:
        """Accuracy on the images kept for the end."""
        return self.correct(model[None, :], self.test).sum()

    def _round(self, task, last, aggregate, held, key) -> FederationState:
        present, slots = self._participants(task, key)
        # A client's batches depend on who it is, not on its place in the task.
        members = task.members[slots]
        keys = jax.vmap(lambda name: jax.random.fold_in(key, name))(self.identities[members])
        trained = jax.vmap(lambda c, k: self.train(aggregate, c, key=k))(members, keys)
        models = jnp.broadcast_to(aggregate, last.models.shape).at[slots].set(trained)
        absent = jnp.where(present, 0.0, last.absent + 1)
        move, n = aggregate - last.aggregate, last.n + 1
        known = Known(
            self.counts[task.members].astype(jnp.float32), last.absent, move, n.astype(jnp.float32)
        )
        submission = Submission(
            jnp.zeros((task.width, CLASSES)),
            jax.nn.one_hot(self.labels[self.evaluation], CLASSES).mean(0),
            models - aggregate[None, :],
            present,
            known=known,
        )
        submission = self._scored(submission, models, aggregate, last.server)
        latest = jnp.concatenate([last.history[:, 1:], self.state(submission)[:, None, :]], axis=1)
        history = jnp.where(present[:, None, None], latest, last.history)
        held = jnp.where(present, held, last.held) if self.participation < 1 else held
        return FederationState(
            n, aggregate, models, history, held, present, absent, move, last.server
        )

    def _participants(self, task: Task, key: PRNGKeyArray):
        """Who takes part, as a mask and as places; as many places as the largest task needs."""
        if self.participation == 1:
            return task.mask, jnp.arange(task.width)
        # No client has this number, so that nobody's batches decide who takes part.
        chance = jax.random.uniform(jax.random.fold_in(key, 2**31 - 1), (task.width,))
        order = jnp.argsort(jnp.where(task.mask, chance, 2.0))
        count = jnp.ceil(self.participation * task.mask.sum())
        present = jnp.argsort(order) < count
        return present, order[: math.ceil(self.participation * task.width)]

    def _scored(
        self, submission: Submission, models: Models, aggregate: Model, server: ServerSamples
    ) -> Submission:
        """The submission with what its state reads of the server's samples."""
        match self.state.reads:
            case "classes":
                return replace(submission, correct=self.correct(models, self.evaluation))
            case "samples":
                assert submission.known is not None
                shares = shares_by_samples(submission.known.counts, submission.mask)
                fedavg = average(shares, models)
                towards = fedavg + QUARTER * (models - fedavg)
                both = jnp.stack([fedavg, aggregate])
                found = self.chances(jnp.concatenate([models, towards, both]), server.places)
                own, near, rest = jnp.split(found, [len(models), 2 * len(models)])
                return replace(submission, tried=Tried(own, near, rest[0], rest[1], server.shown))
            case _:
                return submission

    def train(self, model: Model, client: Int[Array, ""], *, key: PRNGKeyArray) -> Model:
        """A client's epochs of SGD from the aggregate, in its own random order; an attacker sends its
        update multiplied.
        """
        labels, count = self.local_labels[client], self.counts[client]
        owned = Owned(self.images, self.index[client], labels, count)
        return model + self.factors[client] * (self.descend(model, owned, key=key) - model)

    def descend(self, model: Model, owned: Owned, *, key: PRNGKeyArray) -> Model:
        """The model after a client's epochs of SGD on these images."""
        sizes = {"epochs": self.epochs, "batch": self.batch}
        return descend(self.model, model, owned, **sizes, learning_rate=self.learning_rate, key=key)

    def chances(
        self, models: Models, chosen: Int[Array, " chosen"]
    ) -> Float[Array, "entities chosen"]:
        """The chance that each model gives to the right class of each of the chosen images."""
        found = by_block(self.model, models, self.images, self.labels, chosen, self.block, chance)
        return jnp.moveaxis(found, 0, 1).reshape(len(models), -1)[:, : len(chosen)]

    def loss(self, model: Model, chosen: Int[Array, " chosen"]) -> Float[Array, ""]:
        """Cross-entropy on the chosen images."""
        return -jnp.log(self.chances(model[None, :], chosen) + 1e-9).mean()

    def correct(self, models: Models, chosen: Int[Array, " chosen"]) -> Float[Array, "entities _"]:
        """The part of the chosen images that is of a class and that each model gets right."""
        found = by_block(self.model, models, self.images, self.labels, chosen, self.block, right)
        return found.sum(0) / chosen.shape[0]


def average(shares: Float[Array, " entities"], models: Models) -> Model:
    """sum_i a_i v_i, in full precision also where products are faster without."""
    return jnp.matmul(shares, models, precision="highest")


def _server_sets(digits: Digits, evaluation: int, test: int, sets: str, seed: int):
    pool = np.random.default_rng(seed).permutation(np.flatnonzero(digits.server))
    needed = evaluation + (test if sets == "disjoint" else 0)
    if evaluation < 1 or test < 1 or needed > len(pool):
        raise InputError(
            f"federation: {evaluation} images to score models and {test} to test them were asked "
            f"for, but the server has {len(pool)}; ask for fewer"
        )
    return pool[:evaluation], pool[evaluation:needed] if sets == "disjoint" else pool
