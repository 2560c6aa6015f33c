"""Ways to make one model of many: learned shares, and those they are compared with.

An aggregator turns what the server received into a model and the shares it gave; it may remember
something from round to round. `Learned` has a gate: it never does worse than FedAvg by more than chance
explains. Beside it stand the usual defences against byzantine clients (coordinate-wise median and trimmed
mean, Yin et al. 2018; Krum, Blanchard et al. 2017; nearest-neighbour mixing, Allouah et al. 2023), the
server's optimisers (FedAvgM, Hsu et al. 2019; FedAdam and FedYogi, Reddi et al. 2021), and those that learn
from the server's samples in every round, without any policy. An episode under an aggregator is an
`EpisodeRecord`.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray, PyTree

from apportion.composition import EqualShares
from apportion.domains.federated.clients import Owned
from apportion.domains.federated.federation import (
    Federation,
    FederationState,
    Model,
    Models,
    ServerSamples,
)
from apportion.domains.federated.policy import AggregationPolicy, Decision
from apportion.domains.federated.states import average, shares_by_samples
from apportion.problem import Choice, Observation
from apportion.simplex import Mask, masked_softmax
from apportion.tasks import Task

Shares = Float[Array, " entities"]
Remembered = PyTree[Array]
"""What an aggregator keeps from round to round."""
WRONG = 0.02
"""Added to a chance before its logarithm is taken: to be wrong for certain is to be wrong by so much."""


class Received(eqx.Module):
    """A round's models with what the server knows of their senders."""

    models: Models
    observation: Observation
    counts: Int[Array, " entities"]
    mask: Bool[Array, " entities"]
    heard: Int[Array, ""]
    """Clients that have taken part so far."""
    start: Model
    """The aggregate that the clients started from."""
    move: Model
    """That aggregate less the one before."""
    samples: ServerSamples
    federation: Federation
    """Where the server tries models on its samples."""
    key: PRNGKeyArray

    @property
    def by_samples(self) -> Shares:
        """FedAvg's shares: in proportion to the clients' samples, capped."""
        return shares_by_samples(self.counts.astype(jnp.float32), self.mask)

    @property
    def fedavg(self) -> Decision:
        """FedAvg as a decision."""
        return Decision(self.by_samples, jnp.ones(()), jnp.zeros(()))

    def next_model(self, decision: Decision) -> Model:
        """What a decision makes of the round."""
        return decision.model(self.models, self.start, self.move)


class Aggregator(eqx.Module):
    """The received models to one model, and the shares that made it."""

    @abstractmethod
    def begin(self, model: Model) -> Remembered:
        """What is remembered before the first round."""

    @abstractmethod
    def step(self, received: Received, memory: Remembered) -> tuple[Model, Shares, Remembered]:
        """Aggregate one round."""


class Memoryless(Aggregator):
    """An aggregator that sees one round at a time."""

    @abstractmethod
    def __call__(self, received: Received) -> tuple[Model, Shares]:
        """Aggregate one round."""

    def begin(self, model: Model) -> Remembered:
        return ()

    def step(self, received: Received, memory: Remembered) -> tuple[Model, Shares, Remembered]:
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


class Learned(Memoryless):
    """Shares, step and momentum by a policy; with `gated`, only as far as the server's samples bear it out.

    Where few clients are `alike` the policy's shares count alone, without its step and momentum: what alike
    clients do not agree on is noise, and a step too far into it costs nothing in its own round, and much
    in later ones; with `MANY` clients it averages out. The policy's model must not do worse than FedAvg's
    (`passes_gate`), or FedAvg's is taken; and where that clearly does worse than the last one, the last one
    stays (`harms`). The gate needs a federation that keeps samples for it (`Federation(gate=True)`).
    """

    policy: AggregationPolicy
    gated: bool = eqx.field(static=True, default=True)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        decision = self.policy.decide(received.observation, received.mask)
        if not self.gated:
            return received.next_model(decision), decision.shares
        samples, federation = received.samples, received.federation
        real = samples.shown | samples.kept
        each = jnp.log(federation.chances(received.models, samples.places) + WRONG)
        few_alike = alike(each, decision.shares, real) & (received.heard < MANY)
        step = jnp.where(few_alike, 1.0, decision.step)
        momentum = jnp.where(few_alike, 0.0, decision.momentum)
        ours, plain = Decision(decision.shares, step, momentum), received.fedavg
        models = jnp.stack([received.next_model(ours), received.next_model(plain), received.start])
        chances, right = federation.answers(models, samples.places)
        logs = jnp.log(chances + WRONG)
        gains = logs[0] - logs[1], right[0] - right[1]
        best = jnp.where(passes_gate(*gains, samples.kept, real, few_alike), 0, 1)
        best = jnp.where(harms(logs[best] - logs[2], right[best] - right[2], real), 2, best)
        return models[best], jnp.where(best == 0, decision.shares, plain.shares)


ALIKE = 0.3
"""How closely two clients' answers go together, on average, where clients are alike: those who hold the
same classes, rightly named or not, do so from the first round on, skewed ones once they have learned from
each other."""
MANY = 15
"""So many clients that the noise of alike ones averages out: with twenty the policy's step and momentum
cost nothing where all mistake labels, with ten they did."""


def alike(logs: Any, shares: Any, real: Any = True) -> Any:
    """Whether clients are sure of the same samples: by the mean correlation of two, drawn by their shares,
    in the logarithms of the chances that their models give to the right answers.

    Arrays of JAX's or of NumPy's, for the simulator and for a real server.

    >>> same, other = [0.0, -1.0, -2.0, 0.0], [-2.0, -1.0, 0.0, -2.0]
    >>> halves = np.full(2, 0.5)
    >>> bool(alike(np.array([same, same]), halves)), bool(alike(np.array([same, other]), halves))
    (True, False)
    """
    xp = logs.__array_namespace__()
    real = xp.broadcast_to(xp.asarray(real), logs.shape[1:])
    means = xp.where(real, logs, 0.0).sum(1) / xp.maximum(real.sum(), 1)
    apart = xp.where(real, logs - means[:, None], 0.0)
    apart = apart / (xp.sqrt((apart**2).sum(1))[:, None] + 1e-6)
    # Of all pairs, less everybody with himself.
    together = (shares @ apart) ** 2 - shares**2 @ apart**2
    pairs = shares.sum() ** 2 - (shares**2).sum()
    return together.sum() >= ALIKE * pairs


def passes_gate(gains: Any, more_right: Any, kept: Any, real: Any, few_alike: Any) -> Any:
    """Whether the policy's model is taken and not FedAvg's: by the gains in the logarithm of the chance it
    `passes` on the samples kept from the policy, and on all of them it has as many right answers at least.

    Few alike clients leave little to gain: there a model that may be worse is not taken.
    """
    allowed = 1.0 - few_alike
    return passes(gains, kept, allowed) & (mean_and_error(more_right, real)[0] >= 0)


def passes(gains: Any, kept: Any, allowed: Any = 1.0) -> Any:
    """Whether the mean gain over the kept samples is no further below 0 than so many standard errors.

    Gains are in the logarithm of the chance given to the right answer: by the chance itself, a model that
    is rash and mostly wrong can pass for one that is right and not yet sure.

    >>> bool(passes(np.array([-0.4, -0.5, -0.6]), np.ones(3, bool)))
    False
    """
    mean, error = mean_and_error(gains, kept)
    return mean >= -allowed * error


def mean_and_error(gains: Any, kept: Any) -> tuple[Any, Any]:
    """The mean over the kept samples, and its standard error."""
    xp = gains.__array_namespace__()
    kept = xp.broadcast_to(xp.asarray(kept), gains.shape)
    count = xp.maximum(kept.sum(), 1)
    mean = xp.where(kept, gains, 0.0).sum() / count
    spread = xp.where(kept, (gains - mean) ** 2, 0.0).sum() / xp.maximum(count - 1, 1)
    return mean, xp.sqrt(spread / count)


HARM = 3.0
"""Standard errors by which a model must be worse than the last one for the last one to stay."""


def harms(gains: Any, more_right: Any, real: Any = True) -> Any:
    """Whether a model is clearly worse than the one that the clients started from, by its gains over it: in
    the mean, on most samples, and in right answers.

    One that forgets the few classes that its clients do not hold is worse in the mean alone: it is needed,
    or a federation with few clients a round would never learn. One that clients with wrong labels have made
    less sure is worse on most samples, and may be right as often. Arrays of JAX's or of NumPy's.

    >>> less_sure, more_right = np.array([-2.0, -3.0, -2.5]), np.array([-1.0, 0.0, 0.0])
    >>> bool(harms(less_sure, more_right)), bool(harms(less_sure, 0 * more_right))
    (True, False)
    >>> bool(harms(np.array([-2.0, 1.0, 0.5]), more_right))
    False
    """
    mean, error = mean_and_error(gains, real)
    better, _ = mean_and_error((gains > 0) * 1.0, real)
    righter, _ = mean_and_error(more_right, real)
    return (mean < -HARM * error) & (better < 0.5) & (righter < 0)


class TrimmedMean(Memoryless):
    """Coordinate by coordinate, the mean without the `fraction` smallest and largest values."""

    fraction: float = eqx.field(static=True, default=0.2)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        m = received.mask.sum()
        cut = jnp.minimum((self.fraction * m).astype(jnp.int32), (m - 1) // 2)
        return _by_rank(received, cut, m - cut)


class Median(Memoryless):
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


class Krum(Memoryless):
    """The one model nearest to its m - f - 2 nearest neighbours, f being the byzantine clients to
    withstand.
    """

    byzantine: int = eqx.field(static=True, default=2)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        mask, models = received.mask, received.models
        m = mask.sum()
        distances = _distances(models)
        apart = mask[None, :] & ~jnp.eye(len(mask), dtype=bool)
        ordered = jnp.sort(jnp.where(apart, distances, jnp.inf), axis=-1)
        near = jnp.arange(len(mask))[None, :] < jnp.maximum(m - self.byzantine - 2, 1)
        score = jnp.where(mask, jnp.where(near, ordered, 0.0).sum(-1), jnp.inf)
        chosen = jnp.argmin(score)
        return models[chosen], jax.nn.one_hot(chosen, len(mask))


class NearestMixing(Memoryless):
    """Each model replaced by the mean of the m - f nearest to it, itself included, then the trimmed mean
    without the f smallest and largest values; f is the part `byzantine` of the clients.
    """

    byzantine: float = eqx.field(static=True, default=0.3)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        mask = received.mask
        m = mask.sum()
        distances = jnp.where(mask[None, :], _distances(received.models), jnp.inf)
        ranks = jnp.argsort(jnp.argsort(distances, axis=-1), axis=-1)
        kept = jnp.maximum(m - jnp.floor(self.byzantine * m + 1e-6).astype(jnp.int32), 1)
        near = (ranks < kept) & mask[None, :]
        mixing = near / near.sum(-1, keepdims=True)
        mixed = jnp.matmul(mixing, received.models, precision="highest")
        model, shares = TrimmedMean(self.byzantine)(
            eqx.tree_at(lambda r: r.models, received, mixed)
        )
        return model, shares @ mixing


def _distances(models: Models) -> Float[Array, "entities entities"]:
    squares = (models**2).sum(-1)
    products = jnp.matmul(models, models.T, precision="highest")
    return squares[:, None] + squares[None, :] - 2 * products


class ServerStep(Memoryless):
    """FedAvg with the server's own step, and with momentum: FedAvgM."""

    step_size: float = eqx.field(static=True, default=1.0)
    momentum: float = eqx.field(static=True, default=0.0)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares = received.by_samples
        decision = Decision(shares, jnp.asarray(self.step_size), jnp.asarray(self.momentum))
        return received.next_model(decision), shares


FIRST_DECAY, SECOND_DECAY, FLOOR = 0.9, 0.99, 1e-3


class Adaptive(Aggregator):
    """FedAdam, or FedYogi: the average update's mean over its root mean square, by coordinate.

    The step and the constants are Flower's defaults.
    """

    step_size: float = eqx.field(static=True, default=0.1)
    yogi: bool = eqx.field(static=True, default=False)

    def begin(self, model: Model) -> Remembered:
        return jnp.zeros_like(model), jnp.zeros_like(model), jnp.zeros((), jnp.int32)

    def step(self, received: Received, memory: Remembered) -> tuple[Model, Shares, Remembered]:
        first, second, n = memory
        shares = received.by_samples
        update = average(shares, received.models) - received.start
        first = FIRST_DECAY * first + (1 - FIRST_DECAY) * update
        square = update**2
        if self.yogi:
            second = second - (1 - SECOND_DECAY) * square * jnp.sign(second - square)
        else:
            second = SECOND_DECAY * second + (1 - SECOND_DECAY) * square
        n = n + 1
        # Flower corrects the means' bias in the step, and counts one round more than there were.
        bias = jnp.sqrt(1 - SECOND_DECAY ** (n + 1)) / (1 - FIRST_DECAY ** (n + 1))
        rate = self.step_size * (1.0 if self.yogi else bias)
        model = received.start + rate * first / (jnp.sqrt(second) + FLOOR)
        return model, shares, (first, second, n)


class GradientShares(Memoryless):
    """Shares by gradient on the server's loss, from FedAvg's and pulled back to them, with momentum."""

    momentum: float = eqx.field(static=True, default=0.5)
    """How much of its last move the server repeats."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        federation, samples = received.federation, received.samples
        real = samples.shown | samples.kept

        def loss(shares: Shares) -> Float[Array, ""]:
            chances = federation.chances(average(shares, received.models)[None], samples.places)[0]
            return -(jnp.log(chances + 1e-6) * real).sum() / jnp.maximum(real.sum(), 1)

        shares = descend_shares(loss, received.by_samples, received.mask)
        decision = Decision(shares, jnp.ones(()), jnp.asarray(self.momentum))
        return received.next_model(decision), shares


STEPS, STEP_SIZE, PULL = 20, 0.5, 0.05
"""Of the descent in the shares: a step has this length in the log shares, whatever the loss's unit is, and
the divergence from FedAvg's shares this weight beside the loss."""


def descend_shares(loss: Callable[[Shares], Float[Array, ""]], plain: Shares, mask: Mask) -> Shares:
    """Shares after gradient descent on a loss of theirs, from FedAvg's `plain` ones and pulled to them."""
    log_plain = jnp.where(mask, jnp.log(jnp.maximum(plain, 1e-12)), 0.0)

    def pulled(change: Shares) -> Float[Array, ""]:
        shares = masked_softmax(log_plain + change, mask)
        apart = (shares * (jnp.log(jnp.maximum(shares, 1e-12)) - log_plain)).sum()
        return loss(shares) + PULL * apart

    def descend(change, _):
        slope = jax.grad(pulled)(change)
        return change - STEP_SIZE * slope / (jnp.linalg.norm(slope) + 1e-6), None

    change, _ = jax.lax.scan(descend, jnp.zeros(len(plain)), None, STEPS)
    return masked_softmax(log_plain + change, mask)


class ServerClient(Memoryless):
    """The server trains on its own samples as the clients do, and is averaged with them by samples."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        plain = received.by_samples
        own, count = _trained(received, received.start)
        total = jnp.where(received.mask, received.counts, 0).sum()
        part = count / (count + total)
        return (1 - part) * average(plain, received.models) + part * own, plain


class FineTuned(Memoryless):
    """FedAvg's aggregate, trained on the server's samples."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        plain = received.by_samples
        return _trained(received, average(plain, received.models))[0], plain


def _trained(received: Received, model: Model) -> tuple[Model, Float[Array, ""]]:
    """A model after a client's epochs on the server's samples, and how many those are."""
    federation, samples, key = received.federation, received.samples, received.key
    real = samples.shown | samples.kept
    # The real ones first, as clients have theirs.
    places = samples.places[jnp.argsort(~real)]
    count = real.sum()
    owned = Owned(federation.images, places, federation.labels[places], count)
    return federation.descend(model, owned, key=key), count.astype(jnp.float32)


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


def receive(
    federation: Federation, task: Task, state: FederationState, key: PRNGKeyArray
) -> Received:
    """What the server has received in a state."""
    return Received(
        state.models,
        federation.observe(task, state),
        federation.counts[task.members],
        state.present,
        (state.absent <= state.n).sum(),
        state.aggregate,
        state.move,
        state.server,
        federation,
        jax.random.fold_in(key, 1),
    )


@eqx.filter_jit
def run_episodes(
    federation: Federation, aggregator: Aggregator, tasks: Task, keys: Key[Array, " tasks"]
) -> EpisodeRecord:
    """One episode of every task with its own key, tested every round: arrays (tasks, time, ...).

    The same key gives the same first model and the same batches.
    """

    def episode(task, key):
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
        return EpisodeRecord(*jax.lax.scan(one_round, begun, keys)[1])

    return jax.vmap(episode)(tasks, keys)
