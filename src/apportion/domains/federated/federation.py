"""Federated learning as an allocation problem: shares a_{i,n} average the clients' models v_{i,n}.

In each round every client trains from the aggregate, and the server scores the submitted models on
its evaluation set. The policy observes the last H states of each client. The reward is
R_t = L(sum_i a_i v_i), the accuracy of the aggregate. The state contains the submitted models. An
episode is one `scan`, and many episodes are one `vmap`. `clients.py` has the clients' training.

A world is a federation with its tasks: the paper's (`paper_world`), or many kinds of federations for
training (`training_world`) and for tests on other clients (`unseen_world`).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from apportion.domains.federated.clients import (
    ClientModel,
    Convolutional,
    Owned,
    Perceptron,
    descend,
    unravelled,
)
from apportion.domains.federated.data import (
    CLASSES,
    Digits,
    Partition,
    Wanted,
    halves,
    kinds_of,
    mixture,
    paper_split,
    skewed_tasks,
)
from apportion.domains.federated.settings import FederationSettings, GradientSettings, PPOSettings
from apportion.domains.federated.states import (
    QUARTER,
    STATES,
    ClassScores,
    ClientState,
    SampleScores,
    Submission,
    average,
    is_trusted,
    shares_by_samples,
)
from apportion.errors import InputError
from apportion.problem import Observation, Problem, Step
from apportion.simplex import equal_shares
from apportion.tasks import Task

Model = Float[Array, " parameters"]
Models = Float[Array, "entities parameters"]
_SERVER_FRACTION = 0.35
"""Fraction of the training federations' images that belongs to their server."""


class ServerSamples(eqx.Module):
    """The server's samples in an episode: those that the policy sees and those kept for the gate."""

    places: Int[Array, " samples"]
    shown: Bool[Array, " samples"]
    kept: Bool[Array, " samples"]


class FederationState(eqx.Module):
    """The round, the aggregate, the models trained from it, and the policy's view of them."""

    n: Int[Array, ""]
    aggregate: Model
    models: Models
    history: Float[Array, "entities window channels"]
    held: Float[Array, " entities"]
    present: Bool[Array, " entities"]
    """Clients that took part in the round."""
    trusted: Bool[Array, " entities"]
    """Clients that took part and passed the screening on the server's samples."""
    doubted: Bool[Array, " entities"]
    """Clients that failed the screening in their last round."""
    absent: Float[Array, " entities"]
    """Rounds since each client last took part and was trusted."""
    move: Model
    """Last change of the aggregate."""
    server: ServerSamples
    rate: Float[Array, ""]
    """Step size of the clients in the episode."""
    participation: Float[Array, ""]
    """Fraction of the clients that takes part in each round of the episode."""


class Federation(Problem):
    """Aggregate the models of a task's clients, round after round.

    Parameters
    ----------
    digits, partition : Digits, Partition
        The images, and which client holds which of them.
    settings : FederationSettings
        The clients' training and the policy's state.
    sets : {"disjoint", "paper"}
        `disjoint`: no image is in both sets; `paper`: the test set has all the server's images.
    participation : float or tuple of float
        Fraction of a task's clients that takes part in a round; of several, each episode draws one.
    rates : tuple of float, optional
        Smallest and largest step size of the clients, drawn log-uniformly in every episode; by default
        `settings.client_rate`.
    drawn : tuple of int, optional
        Smallest and largest number of the server's evaluation images in an episode, drawn for every
        episode; by default all.
    gate : bool
        Whether a quarter of the server's images is reserved for the gate, unseen by the policy.
    """

    images: Float[Array, "samples side side"]
    labels: Int[Array, " samples"]
    index: Int[Array, "universe owned"]
    local_labels: Int[Array, "universe owned"]
    counts: Int[Array, " universe"]
    factors: Float[Array, " universe"]
    claims: Float[Array, " universe"]
    begins: Float[Array, " universe"]
    identities: Int[Array, " universe"]
    comes: Float[Array, " universe"]
    stays: Float[Array, " universe"]
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
    participation: tuple[float, ...] = eqx.field(static=True)
    rates: tuple[float, float] | None = eqx.field(static=True)
    whole: bool = eqx.field(static=True)
    """Whether all clients take part in every round."""
    classes: int = eqx.field(static=True)
    drawn: tuple[int, int] | None = eqx.field(static=True)
    gate: bool = eqx.field(static=True)

    def __init__(
        self,
        digits: Digits,
        partition: Partition,
        settings: FederationSettings,
        *,
        sets: Literal["disjoint", "paper"] = "disjoint",
        participation: float | tuple[float, ...] = 1.0,
        rates: tuple[float, float] | None = None,
        drawn: tuple[int, int] | None = None,
        gate: bool = False,
    ):
        self.images = jnp.asarray(digits.images, settings.precision)
        self.labels = jnp.asarray(digits.labels, jnp.int32)
        self.index = jnp.asarray(partition.index, jnp.int32)
        self.local_labels = jnp.asarray(partition.labels, jnp.int32)
        self.counts = jnp.asarray(partition.counts, jnp.int32)
        self.factors = jnp.asarray(partition.factors, jnp.float32)
        self.claims = jnp.asarray(partition.claims, jnp.float32)
        self.begins = jnp.asarray(partition.begins, jnp.float32)
        self.identities = jnp.asarray(partition.identities, jnp.int32)
        self.comes = jnp.asarray(partition.comes, jnp.float32)
        self.stays = jnp.asarray(partition.stays, jnp.float32)
        self.evaluation, self.test = server_sets(digits, settings, sets, seed=settings.seed)
        self.learning_rate = jnp.asarray(settings.client_rate, float)
        self.state = STATES[settings.state]
        models = {"convolutional": Convolutional, "perceptron": Perceptron}
        self.classes = digits.classes
        if settings.state == "rich" and self.classes != CLASSES:
            raise InputError(
                f"state rich is for {CLASSES} classes, and the images have {self.classes}; choose another"
            )
        side = digits.images.shape[1]
        self.model = models[settings.model](side, settings.width, classes=self.classes)
        self.universe, self.horizon = partition.universe, settings.rounds
        self.epochs, self.batch = settings.epochs, settings.batch
        self.window, self.block = settings.window, settings.block
        self.participation = participation if isinstance(participation, tuple) else (participation,)
        if not all(0 < fraction <= 1 for fraction in self.participation):
            raise InputError(f"federation: participation {participation} must be in (0, 1]")
        if rates is not None and not 0 < rates[0] <= rates[1]:
            raise InputError(f"federation: rates {rates} must be positive, the smaller first")
        if drawn is not None and not 1 <= drawn[0] <= drawn[1] <= settings.evaluation:
            raise InputError(
                f"federation: {drawn} samples cannot be drawn out of {settings.evaluation}"
            )
        self.rates, self.drawn, self.gate = rates, drawn, gate
        self.whole = self.participation == (1,) and bool((partition.stays >= 1).all())

    @property
    def channels(self) -> int:
        """Number of channels of a client's state."""
        return self.state.channels

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
            task.mask,
            ~task.mask,
            jnp.zeros(task.width),
            jnp.zeros_like(first),
            self._own_samples(jax.random.fold_in(key, 2)),
            *self._own_circumstances(jax.random.fold_in(key, 3)),
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

    def _own_circumstances(self, key: PRNGKeyArray) -> tuple[Array, Array]:
        """Draw the step size of the clients and the participation of an episode."""
        rate, fractions = self.learning_rate, jnp.array(self.participation, jnp.float32)
        rate_key, fraction_key = jax.random.split(key)
        if self.rates is not None:
            low, high = np.log(self.rates)
            rate = jnp.exp(jax.random.uniform(rate_key, (), minval=low, maxval=high))
        return rate, jax.random.choice(fraction_key, fractions)

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
        # The shares of absent clients are redistributed to present ones.
        shares = jnp.where(state.present, allocation, 0.0)
        shares = shares if self.whole else shares / jnp.maximum(shares.sum(), 1e-12)
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
        """Reward an aggregate with its accuracy and train the next round's models from it."""
        reward = self.correct(aggregate[None, :], self.evaluation).sum()
        following = self._round(task, state, aggregate, shares, key)
        return Step(following, reward, jnp.array(False), following.n >= self.horizon)

    def test_accuracy(self, model: Model) -> Float[Array, ""]:
        """Compute the accuracy on the test set."""
        return self.correct(model[None, :], self.test).sum()

    def _round(self, task, last, aggregate, held, key) -> FederationState:
        move, n = aggregate - last.aggregate, last.n + 1
        present, slots = self._participants(task, n, last.participation, key)
        # A client's batches depend on its identity, not on its position in the task.
        members = task.members[slots]
        keys = jax.vmap(lambda name: jax.random.fold_in(key, name))(self.identities[members])
        trained = jax.vmap(lambda c, k: self.train(aggregate, c, n, last.rate, key=k))(
            members, keys
        )
        models = jnp.broadcast_to(aggregate, last.models.shape).at[slots].set(trained)
        counts, trusted = self.reported(task), present
        if self.state.reads == "classes":
            frequency = jax.nn.one_hot(self.labels[self.evaluation], self.classes).mean(0)
            scores = ClassScores(self.correct(models, self.evaluation), frequency)
        else:
            own, trusted = self._screened(models, aggregate, present, last)
            fedavg = average(shares_by_samples(counts, trusted), models)
            towards = fedavg + QUARTER * (models - fedavg)
            near = self.chances(jnp.concatenate([towards, fedavg[None]]), last.server.places)
            scores = SampleScores(own[:-1], near[:-1], near[-1], own[-1], last.server.shown)
        updates, rounds = models - aggregate[None, :], n.astype(jnp.float32)
        submission = Submission(updates, trusted, counts, last.absent, move, rounds, scores)
        shown = self.state(submission)[:, None, :]
        # After an absence the past states are outdated, so the present state fills the window.
        past = jnp.where(last.absent[:, None, None] > 0, shown, last.history[:, 1:])
        latest = jnp.concatenate([past, shown], axis=1)
        history = jnp.where(trusted[:, None, None], latest, last.history)
        absent = jnp.where(trusted, 0.0, last.absent + 1)
        held = held if self.whole else jnp.where(present, held, last.held)
        doubted = jnp.where(present, ~trusted, last.doubted)
        return FederationState(
            *(n, aggregate, models, history, held, present, trusted, doubted, absent, move),
            *(last.server, last.rate, last.participation),
        )

    def _screened(
        self, models: Models, start: Model, present: Bool[Array, " entities"], last: FederationState
    ) -> tuple[Float[Array, "_ samples"], Bool[Array, " entities"]]:
        """Return probabilities of the right answers, with `start` last, and the trusted clients."""
        own = last.server
        labels, real = self.labels[own.places], own.shown | own.kept
        chances, guesses = self.guesses(jnp.concatenate([models, start[None]]), own.places)
        right, guesses = guesses == labels, guesses[:-1]
        named = jax.nn.one_hot(guesses, self.classes) * real[:, None]
        asked = (jax.nn.one_hot(labels, self.classes) * real[:, None]).sum(0)
        known = jnp.minimum(named.sum(1) / jnp.maximum(asked, 1.0), 1.0)[:, labels] * real
        norms = jnp.linalg.norm(models - start, axis=-1)
        seen = (right[:-1], right[-1], known, norms, last.doubted, present)
        return chances, is_trusted(*seen)

    def _participants(
        self, task: Task, n: Int[Array, ""], fraction: Float[Array, ""], key: PRNGKeyArray
    ):
        """Return the clients of round n as a mask and as positions, whose number is static."""
        here = task.mask
        if not self.whole:
            # The middle of a round is not affected by rounding errors.
            lived = ((n + 0.5) / self.horizon - self.comes[task.members]) % 1.0
            here = here & (lived < self.stays[task.members])
        if self.participation == (1,):
            return here, jnp.arange(task.width)
        # No client has this identity, so the draw is independent of all batches.
        chance = jax.random.uniform(jax.random.fold_in(key, 2**31 - 1), (task.width,))
        order = jnp.argsort(jnp.where(here, chance, 2.0))
        # Rounding in float32 can make a fraction slightly too large, which must not add a client.
        count = jnp.ceil(fraction * here.sum() - 1e-4)
        present = jnp.argsort(order) < count
        return present, order[: math.ceil(max(self.participation) * task.width)]

    def reported(self, task: Task) -> Float[Array, " entities"]:
        """Return the number of samples that each client of a task claims to hold."""
        return self.counts[task.members] * self.claims[task.members]

    def train(
        self,
        model: Model,
        client: Int[Array, ""],
        n: Int[Array, ""],
        rate: Float[Array, ""] | None = None,
        *,
        key: PRNGKeyArray,
    ) -> Model:
        """Train a client from the aggregate in round n; attackers mislabel or scale updates."""
        index, attacks = self.index[client], n >= self.begins[client] * self.horizon
        labels = jnp.where(attacks, self.local_labels[client], self.labels[index])
        owned = Owned(self.images, index, labels, self.counts[client])
        factor = jnp.where(attacks, self.factors[client], 1.0)
        return model + factor * (self.descend(model, owned, rate, key=key) - model)

    def descend(
        self,
        model: Model,
        owned: Owned,
        rate: Float[Array, ""] | None = None,
        *,
        key: PRNGKeyArray,
    ) -> Model:
        """Train a model on these images as a client does, by default at the settings' rate."""
        rate = self.learning_rate if rate is None else rate
        sizes = {"epochs": self.epochs, "batch": self.batch}
        return descend(self.model, model, owned, **sizes, learning_rate=rate, key=key)

    def chances(
        self, models: Models, chosen: Int[Array, " chosen"]
    ) -> Float[Array, "entities chosen"]:
        """Compute the probability of the right class of each chosen image under each model."""
        return self.guesses(models, chosen)[0]

    def answers(self, models: Models, chosen: Int[Array, " chosen"]) -> tuple[Array, Array]:
        """Return the `chances`, and whether the most likely class is right."""
        chances, guesses = self.guesses(models, chosen)
        return chances, (guesses == self.labels[chosen]).astype(jnp.float32)

    def guesses(self, models: Models, chosen: Int[Array, " chosen"]) -> tuple[Array, Array]:
        """Return the `chances`, and the most likely class; computed in blocks of images."""
        size = chosen.shape[0]
        blocks = -(-size // min(self.block, size))
        length = -(-size // blocks)

        def judge(places):
            images, labels = self.images[places], self.labels[places]

            def of_model(flat):
                logits = self.model.logits(unravelled(self.model, flat), images)
                own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
                return jnp.exp(own - jax.nn.logsumexp(logits, axis=-1)), logits.argmax(-1)

            return jax.vmap(of_model)(models)

        padded = jnp.pad(chosen, (0, blocks * length - size)).reshape(blocks, length)
        chances, guesses = (
            jnp.moveaxis(each, 0, 1).reshape(len(models), -1)[:, :size]
            for each in jax.lax.map(judge, padded)
        )
        return chances, guesses

    def loss(self, model: Model, chosen: Int[Array, " chosen"]) -> Float[Array, ""]:
        """Compute the cross-entropy on the chosen images."""
        return -jnp.log(self.chances(model[None, :], chosen) + 1e-9).mean()

    def correct(self, models: Models, chosen: Int[Array, " chosen"]) -> Float[Array, "entities _"]:
        """Compute the fraction of the chosen images that is of each class and right, by model."""
        _, right = self.answers(models, chosen)
        return right @ jax.nn.one_hot(self.labels[chosen], self.classes) / chosen.shape[0]


def server_sets(
    digits: Digits, settings: FederationSettings, sets: Literal["disjoint", "paper"], *, seed: int
) -> tuple[Int[Array, " evaluation"], Int[Array, " test"]]:
    """Draw the evaluation and the test set from the server's images."""
    pool = np.random.default_rng(seed).permutation(np.flatnonzero(digits.server))
    evaluation, test = settings.evaluation, settings.test
    needed = evaluation + (test if sets == "disjoint" else 0)
    if needed > len(pool):
        raise InputError(
            f"federation: {evaluation} images to score models and {test} to test them are requested, "
            f"but the server has {len(pool)}; request fewer"
        )
    tested = pool[evaluation:needed] if sets == "disjoint" else pool
    return jnp.asarray(pool[:evaluation], jnp.int32), jnp.asarray(tested, jnp.int32)


def paper_world(
    settings: PPOSettings, digits: Digits, seeds: Sequence[int]
) -> tuple[Federation, list[tuple[Task, Task]]]:
    """Build the paper's federation and, for each seed, training and unseen tasks of its own clients.

    Parameters
    ----------
    settings : PPOSettings
        Sizes of the federation, such as `reduced_size()`.
    digits : Digits
        The images to distribute.
    seeds : sequence of int
        Seeds of the splits of the images.
    """
    digits = digits.pooled(settings.pooling)
    deals = {
        seed: paper_split(
            digits, settings.clients, settings.samples, unlike=settings.unlike, seed=seed
        )
        for seed in dict.fromkeys(seeds)
    }
    tasks = {}
    for place, (seed, partition) in enumerate(deals.items()):
        own = skewed_tasks(
            partition, settings.tasks, settings.unseen, sizes=settings.task_sizes,
            seen=settings.seen, unlike=settings.unlike, seed=2 * seed,
        )  # fmt: skip
        first = place * partition.universe
        tasks[seed] = tuple(Task(part.members + first, part.mask) for part in own)
    columns = zip(*(vars(partition).values() for partition in deals.values()), strict=True)
    federation = Federation(
        digits, Partition(*map(np.concatenate, columns)), settings, sets=settings.sets
    )
    return federation, [tasks[seed] for seed in seeds]


def training_world(
    settings: GradientSettings,
    digits: Digits,
    *,
    participation: float | tuple[float, ...] = 1.0,
    rates: tuple[float, float] | None = None,
) -> tuple[Federation, Task]:
    """Build training federations of the settings' kinds and sizes; options as in `Federation`.

    Training and unseen federations share no image: the server of the training world holds a part of
    the clients' images, and only the unseen world uses the images of `digits.server`.
    """
    digits = digits.pooled(settings.pooling)
    places, _ = halves(digits)
    held = places[len(places) - int(_SERVER_FRACTION * len(places)) :]
    server = np.zeros(len(digits.labels), bool)
    server[held] = True
    fewest, most = settings.server_samples
    if not 1 <= fewest <= most <= len(held) // 2:
        raise InputError(
            f"server_samples {fewest} {most}: between 1 and {len(held) // 2} images can be the server's"
        )
    seeds = range(1000 * settings.seed, 1000 * settings.seed + settings.copies)
    wanted = list(product(kinds_of(settings.kinds), dict.fromkeys(settings.sizes), seeds))
    own = places[: len(places) - len(held)]
    dealt = mixture(replace(digits, server=server), wanted, own, samples=settings.samples)
    half = min(len(held) // 2, 2 * most)
    sized = replace(settings, evaluation=half, test=half)
    sets = {"drawn": (fewest, most), "gate": True, "participation": participation, "rates": rates}
    return Federation(dealt.digits, dealt.partition, sized, **sets), dealt.tasks


def unseen_world(
    settings: FederationSettings,
    digits: Digits,
    wanted: Sequence[Wanted],
    *,
    samples: int | None = None,
    participation: float = 1.0,
) -> tuple[Federation, Task]:
    """Build federations of clients and images that training never sees, one task each.

    Parameters
    ----------
    settings, digits : FederationSettings, Digits
        As in `Federation`; the digits are not pooled yet.
    wanted : sequence of (str, int, int)
        Kind, number of clients and seed of each federation.
    samples : int, optional
        Number of the server's images, `settings.evaluation` by default. Each episode draws them
        from a larger set, if the server has more.
    participation : float
        Fraction of a federation's clients that takes part in a round.
    """
    digits = digits.pooled(settings.pooling)
    _, places = halves(digits)
    dealt = mixture(digits, wanted, places, samples=settings.samples)
    count = settings.evaluation if samples is None else samples
    available = int(digits.server.sum()) - settings.test
    pool = max(count, min(3 * settings.evaluation // 2, available))
    sized, sets = replace(settings, evaluation=pool), {"drawn": (count, count), "gate": True}
    world = Federation(dealt.digits, dealt.partition, sized, participation=participation, **sets)
    return world, dealt.tasks
