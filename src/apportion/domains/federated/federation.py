"""Federated learning as an allocation problem: shares a_{i,n} average the clients' models v_{i,n}.

A round: every client trains from the aggregate, the server scores the submitted models on its
evaluation set, the policy sees the last H scores of each, and R_t = L(sum_i a_i v_i), the accuracy
of the aggregate. The state holds the models just submitted, so that nothing is trained twice; an
episode is one scan, and many of them one `vmap`.
"""

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Int, PRNGKeyArray

from apportion.domains.federated.digits import CLASSES, Digits
from apportion.domains.federated.model import ClientModel
from apportion.domains.federated.partitions import Partition
from apportion.domains.federated.states import Accuracy, ClientState, Submission
from apportion.errors import InputError
from apportion.problem import Observation, Problem, Step
from apportion.simplex import equal_shares
from apportion.tasks import Task

Model = Float[Array, " parameters"]
Models = Float[Array, "entities parameters"]


class FederationState(eqx.Module):
    """The round, the aggregate, the models trained from it, and what the policy sees of them."""

    n: Int[Array, ""]
    aggregate: Model
    models: Models
    history: Float[Array, "entities window channels"]
    held: Float[Array, " entities"]


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
    """

    images: Float[Array, "samples side side"]
    labels: Int[Array, " samples"]
    index: Int[Array, "universe owned"]
    local_labels: Int[Array, "universe owned"]
    counts: Int[Array, " universe"]
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
        chosen = _server_sets(digits, evaluation, test, sets, seed)
        self.evaluation, self.test = (jnp.asarray(part, jnp.int32) for part in chosen)
        self.learning_rate = jnp.asarray(learning_rate, float)
        self.state = Accuracy() if state is None else state
        self.model = model
        self.universe = partition.universe
        self.horizon, self.epochs, self.batch = rounds, epochs, batch
        self.window, self.block = window, block

    @property
    def channels(self) -> int:
        """Channels of the history that the policy reads."""
        return self.state.channels(CLASSES)

    def reset(self, task: Task, *, key: PRNGKeyArray) -> FederationState:
        model_key, train_key = jax.random.split(key)
        first, _ = ravel_pytree(self.model.start(key=model_key))
        history = jnp.zeros((task.width, self.window, self.channels))
        held = equal_shares(task.mask)
        return self._round(task, jnp.zeros((), jnp.int32), first, history, held, train_key)

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
        aggregate = average(allocation, state.models)
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
        n = state.n + 1
        following = self._round(task, n, aggregate, state.history, shares, key)
        return Step(following, reward, jnp.array(False), n >= self.horizon)

    def test_accuracy(self, model: Model) -> Float[Array, ""]:
        """Accuracy on the images kept for the end."""
        return self.correct(model[None, :], self.test).sum()

    def _round(self, task, n, aggregate, history, held, key) -> FederationState:
        # A client's batches depend on who it is, not on its place in the task.
        keys = jax.vmap(lambda member: jax.random.fold_in(key, member))(task.members)
        models = jax.vmap(lambda c, k: self.train(aggregate, c, key=k))(task.members, keys)
        submission = Submission(
            self.correct(models, self.evaluation),
            self._frequency(self.evaluation),
            models - aggregate[None, :],
            task.mask,
        )
        shown = self.state(submission)
        history = jnp.concatenate([history[:, 1:], shown[:, None, :]], axis=1)
        return FederationState(n, aggregate, models, history, held)

    def _blank(self) -> dict[str, Array]:
        """Parameters of the clients' model that are all zero, for their shapes alone."""
        shapes = jax.eval_shape(lambda: self.model.start(key=jax.random.key(0)))
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def train(self, model: Model, client: Int[Array, ""], *, key: PRNGKeyArray) -> Model:
        """A client's epochs of SGD from the aggregate, in its own random order."""
        _, unravel = ravel_pytree(self._blank())
        owned = self.index.shape[1]
        steps = -(-owned // self.batch)
        places = jnp.arange(steps * self.batch)

        def order(key):
            # Real images first; what lies beyond the client's own count weighs nothing.
            chance = jax.random.uniform(key, (owned,))
            ranked = jnp.argsort(jnp.where(jnp.arange(owned) < self.counts[client], chance, 2.0))
            return jnp.pad(ranked, (0, steps * self.batch - owned))

        orders = jax.vmap(order)(jax.random.split(key, self.epochs))
        weights = (places < self.counts[client]).astype(jnp.float32)
        batches = orders.reshape(self.epochs * steps, self.batch)
        weights = jnp.tile(weights.reshape(steps, self.batch), (self.epochs, 1))

        @jax.grad
        def slope(parameters, images, labels, weight):
            logits = self.model.logits(parameters, images)
            own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
            loss = jax.nn.logsumexp(logits, axis=-1) - own
            return (weight * loss).sum() / jnp.maximum(weight.sum(), 1.0)

        def descend(parameters, batch):
            order, weight = batch
            images = self.images[self.index[client, order]]
            gradient = slope(parameters, images, self.local_labels[client, order], weight)
            step = self.learning_rate
            return jax.tree.map(lambda p, g: p - step * g, parameters, gradient), None

        trained, _ = jax.lax.scan(descend, unravel(model), (batches, weights))
        return ravel_pytree(trained)[0]

    def correct(self, models: Models, chosen: Int[Array, " chosen"]) -> Float[Array, "entities _"]:
        """The part of the chosen images that is of a class and that each model gets right.

        Block after block of images, so that memory is bounded however many models there are.
        """
        _, unravel = ravel_pytree(self._blank())
        size = chosen.shape[0]
        blocks = -(-size // min(self.block, size))
        length = -(-size // blocks)
        padded = jnp.pad(chosen, (0, blocks * length - size)).reshape(blocks, length)
        real = (jnp.arange(blocks * length) < size).reshape(blocks, length)

        def score_block(block):
            places, real = block
            images, labels = self.images[places], self.labels[places]
            classes = jax.nn.one_hot(labels, CLASSES) * real[:, None]

            def right(model):
                answer = self.model.logits(unravel(model), images).argmax(-1)
                return (answer == labels).astype(jnp.float32) @ classes

            return jax.vmap(right)(models)

        return jax.lax.map(score_block, (padded, real)).sum(0) / size

    def _frequency(self, chosen: Int[Array, " chosen"]) -> Float[Array, " classes"]:
        return jax.nn.one_hot(self.labels[chosen], CLASSES).mean(0)


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
