"""Aggregators combine the models of a round into one: the learned policy and its baselines.

An aggregator returns the model and the clients' shares, and may keep a memory between rounds. `Learned`
uses a policy behind a gate. The baselines are FedAvg, fixed shares, defences against byzantine clients
(coordinate-wise median and trimmed mean, Yin et al. 2018), FedAvgM (Hsu et al. 2019) and FedAvg fine-tuned
on the server's samples. `run_episodes` returns an `EpisodeRecord`.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray, PyTree

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
_Memory = PyTree[Array]
"""Memory of an aggregator between rounds."""
CHANCE_OFFSET = 0.02
"""Constant added to a probability before its logarithm; bounds the loss of a confident mistake."""


class Received(eqx.Module):
    """Models of a round and the server's information about their clients."""

    models: Models
    observation: Observation
    counts: Float[Array, " entities"]
    mask: Bool[Array, " entities"]
    trusted: Bool[Array, " entities"]
    """Clients that pass the screening; the learned aggregation uses only these."""
    start: Model
    """The aggregate that the clients started from."""
    move: Model
    """The last change of the aggregate."""
    samples: ServerSamples
    federation: Federation
    """Evaluates models on the server's samples."""
    key: PRNGKeyArray

    @property
    def by_samples(self) -> Shares:
        """FedAvg's shares, proportional to the clients' capped sample counts."""
        return shares_by_samples(self.counts, self.mask)

    @property
    def fedavg(self) -> Decision:
        """FedAvg over the trusted clients, as a `Decision`."""
        shares = shares_by_samples(self.counts, self.trusted)
        return Decision(shares, jnp.ones(()), jnp.zeros(()))

    def next_model(self, decision: Decision) -> Model:
        """Apply a decision to the round's models."""
        return decision.model(self.models, self.start, self.move)


class Aggregator(eqx.Module):
    """Combines the received models into one."""

    @abstractmethod
    def begin(self, model: Model) -> _Memory:
        """Return the memory before the first round."""

    @abstractmethod
    def step(self, received: Received, memory: _Memory) -> tuple[Model, Shares, _Memory]:
        """Aggregate one round: the model, the shares and the next memory."""


class Memoryless(Aggregator):
    """An aggregator without memory."""

    @abstractmethod
    def __call__(self, received: Received) -> tuple[Model, Shares]:
        """Aggregate one round."""

    def begin(self, model: Model) -> _Memory:
        return ()

    def step(self, received: Received, memory: _Memory) -> tuple[Model, Shares, _Memory]:
        return *self(received), memory


class BySamples(Memoryless):
    """FedAvg: shares proportional to the clients' capped sample counts."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        return average(received.by_samples, received.models), received.by_samples


class PolicyAggregator(Memoryless):
    """Shares of any policy, a function of (observation, mask)."""

    choose: Choice

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares = self.choose(received.observation, received.mask)
        return average(shares, received.models), shares


UNIFORM = PolicyAggregator(EqualShares())
"""FedAvg with equal shares."""


class Fixed(Memoryless):
    """The same shares every round, by the client's position in the task."""

    shares: Shares
    """Share of each position, scaled to sum to one over the clients that take part."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares = jnp.where(received.mask, self.shares, 0.0)
        shares = shares / shares.sum()
        return average(shares, received.models), shares

    @classmethod
    def minority(cls, total: float | Array, sizes: tuple[int, int] = (8, 2)) -> "Fixed":
        """Divide `total` among the last clients and the rest among the first."""
        first, last = sizes
        total = jnp.asarray(total, float)
        return cls(
            jnp.concatenate([jnp.full(first, (1 - total) / first), jnp.full(last, total / last)])
        )


class Learned(Memoryless):
    """Shares, step and momentum of a policy, checked by a gate unless `gated` is False.

    Clients that fail the screening (`is_trusted`) are left out. The gate has three rules. If the
    model of the policy's shares fails `passes_gate`, FedAvg's shares are used. If its step and
    momentum do not improve the model of these shares (`is_better`), 1 and 0 are used. If the result
    is harmful (`is_harmful`), the last model is kept. The gate needs `Federation(gate=True)`.
    """

    policy: AggregationPolicy
    gated: bool = eqx.field(static=True, default=True)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        decision = self.policy.decide(received.observation, received.trusted)
        if not self.gated:
            return received.next_model(decision), decision.shares
        return gated_model(received, decision)


def gated_model(received: Received, decision: Decision) -> tuple[Model, Shares]:
    """Return the model and shares of a policy's decision, after the gate of `Learned`."""
    samples, federation = received.samples, received.federation
    real = samples.shown | samples.kept
    shares = jnp.stack([decision.shares, received.fedavg.shares])
    careful, bold = (jnp.ones(()), jnp.zeros(())), (decision.step, decision.momentum)
    models = [received.next_model(Decision(own, *way)) for way in (careful, bold) for own in shares]
    models = jnp.stack([*models, received.start])
    chances, right = federation.answers(models, samples.places)
    logs = jnp.log(chances + CHANCE_OFFSET)
    passed = passes_gate(logs[0] - logs[1], right[0] - right[1], samples.kept, real)
    whose = jnp.where(passed, 0, 1)
    best = whose + 2 * is_better(logs[whose + 2] - logs[whose], real, STEP_STANDARD_ERRORS)
    best = jnp.where(is_harmful(logs[best] - logs[4], right[best] - right[4], real), 4, best)
    return models[best], shares[whose]


def passes_gate(gains: Any, more_right: Any, kept: Any, real: Any) -> Any:
    """Whether the policy's shares are used instead of FedAvg's.

    The model must not be worse in log probability on the samples that the policy does not see, and
    must have at least as many right answers on all samples. Gains are in log probability, because
    in probability a confident model that is mostly wrong can beat a correct, less confident one.
    """
    return (_mean_and_error(gains, kept)[0] >= 0) & (_mean_and_error(more_right, real)[0] >= 0)


STEP_STANDARD_ERRORS = 0.5
"""Standard errors by which step and momentum must improve the model of a round to be used.

Chosen from 0, 0.5, 1 and 2 in trials with ten clients, eight kinds, digits and tables, four seeds:
1 cost up to four points if clients hold few classes, 0 a point more than 0.5 with wrong labels."""


def is_better(gains: Any, real: Any = True, errors: float = 1.0) -> Any:
    """Whether the mean gain in log probability exceeds `errors` standard errors.

    A longer step and momentum pass if most samples improve together, as in a federation that learns
    slowly. They fail if some samples improve and others become worse, as with wrong labels: a
    longer step then amplifies the noise of few clients, which costs accuracy in later rounds only.

    >>> bool(is_better(np.array([0.4, 0.5, 0.6]))), bool(is_better(np.array([2.0, -1.0, -0.9])))
    (True, False)
    """
    mean, error = _mean_and_error(gains, real)
    return mean > errors * error


def _mean_and_error(gains: Any, kept: Any) -> tuple[Any, Any]:
    """Compute the mean over the kept samples and its standard error."""
    xp = gains.__array_namespace__()
    kept = xp.broadcast_to(xp.asarray(kept), gains.shape)
    count = xp.maximum(kept.sum(), 1)
    mean = xp.where(kept, gains, 0.0).sum() / count
    spread = xp.where(kept, (gains - mean) ** 2, 0.0).sum() / xp.maximum(count - 1, 1)
    return mean, xp.sqrt(spread / count)


_HARM_STANDARD_ERRORS = 3.0
"""Standard errors by which a model must be worse than the last one to be harmful."""


def is_harmful(gains: Any, more_right: Any, real: Any = True) -> Any:
    """Whether a model is clearly worse than the last: in mean, on most samples, in right answers.

    All three conditions must hold, the first and the last by three standard errors. A model of few
    clients that forgets the classes they do not hold is worse in the mean only, and without such
    models the federation never learns. A less confident model is worse on most samples, but has
    nearly as many right answers. Refusing it can stop a federation permanently, because its clients
    start from the same model again. Accepts JAX or NumPy arrays.

    >>> less_sure = np.linspace(-2.0, -3.0, 20)
    >>> many, few = -1.0 * (np.arange(20) < 12), -1.0 * (np.arange(20) < 2)
    >>> bool(is_harmful(less_sure, many)), bool(is_harmful(less_sure, few))
    (True, False)
    >>> bool(is_harmful(np.where(np.arange(20) < 8, -9.0, 0.1), many))
    False
    """
    mean, error = _mean_and_error(gains, real)
    better, _ = _mean_and_error((gains > 0) * 1.0, real)
    righter, spread = _mean_and_error(more_right, real)
    worse = mean < -_HARM_STANDARD_ERRORS * error
    return worse & (better < 0.5) & (righter < -_HARM_STANDARD_ERRORS * spread)


class TrimmedMean(Memoryless):
    """Coordinate-wise mean without the `fraction` smallest and the `fraction` largest values."""

    fraction: float = eqx.field(static=True, default=0.2)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        m = received.mask.sum()
        cut = jnp.minimum((self.fraction * m).astype(jnp.int32), (m - 1) // 2)
        return _by_rank(received, cut, m - cut)


class Median(Memoryless):
    """Coordinate-wise median."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        m = received.mask.sum()
        return _by_rank(received, (m - 1) // 2, m // 2 + 1)


def _by_rank(received: Received, first: Array, end: Array) -> tuple[Model, Shares]:
    """Average the values of ranks first to end - 1 by coordinate; shares are their fractions."""
    values = jnp.where(received.mask[:, None], received.models, jnp.inf)
    ranks = jnp.argsort(jnp.argsort(values, axis=0), axis=0)
    kept = (ranks >= first) & (ranks < end)
    model = jnp.where(kept, received.models, 0.0).sum(0) / (end - first)
    return model, kept.mean(1) / (end - first)


class ServerStep(Memoryless):
    """FedAvg with a server step size and momentum: FedAvgM."""

    step_size: float = eqx.field(static=True, default=1.0)
    momentum: float = eqx.field(static=True, default=0.0)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares = received.by_samples
        decision = Decision(shares, jnp.asarray(self.step_size), jnp.asarray(self.momentum))
        return received.next_model(decision), shares


class FineTuned(Memoryless):
    """FedAvg, with each round's average trained on the server's samples as a client trains."""

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares, federation, samples = received.by_samples, received.federation, received.samples
        real = samples.shown | samples.kept
        # Real samples first, as in `Owned`.
        places = samples.places[jnp.argsort(~real)]
        owned = Owned(federation.images, places, federation.labels[places], real.sum())
        return federation.descend(average(shares, received.models), owned, key=received.key), shares


_SHARE_STEPS, _SHARE_STEP_SIZE, _FEDAVG_PULL = 20, 0.5, 0.05
"""Gradient descent on shares: number of steps, their length in log shares, and the weight of the divergence
from FedAvg's shares in the loss."""


def descend_shares(loss: Callable[[Shares], Float[Array, ""]], plain: Shares, mask: Mask) -> Shares:
    """Minimise a loss of the shares by gradient descent, starting from FedAvg's `plain` shares."""
    log_plain = jnp.where(mask, jnp.log(jnp.maximum(plain, 1e-12)), 0.0)

    def pulled(change: Shares) -> Float[Array, ""]:
        shares = masked_softmax(log_plain + change, mask)
        apart = (shares * (jnp.log(jnp.maximum(shares, 1e-12)) - log_plain)).sum()
        return loss(shares) + _FEDAVG_PULL * apart

    def descend(change, _):
        slope = jax.grad(pulled)(change)
        return change - _SHARE_STEP_SIZE * slope / (jnp.linalg.norm(slope) + 1e-6), None

    change, _ = jax.lax.scan(descend, jnp.zeros(len(plain)), None, _SHARE_STEPS)
    return masked_softmax(log_plain + change, mask)


class EpisodeRecord(eqx.Module):
    """Accuracy of the aggregate and shares of the clients in each round."""

    evaluated: Float[Array, "*batch time"]
    """Accuracy on the server's evaluation set: the reward."""
    tested: Float[Array, "*batch time"]
    """Accuracy on the test set; NaN in rounds that are not tested."""
    shares: Float[Array, "*batch time entities"]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per task and round, with a column for each client's share."""
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
    """Collect the server's information in a state."""
    return Received(
        state.models,
        federation.observe(task, state),
        federation.reported(task),
        state.present,
        state.trusted,
        state.aggregate,
        state.move,
        state.server,
        federation,
        jax.random.fold_in(key, 1),
    )


@eqx.filter_jit
def run_episodes(
    federation: Federation,
    aggregator: Aggregator,
    tasks: Task,
    keys: Key[Array, " tasks"],
    *,
    test_from: int = 0,
) -> EpisodeRecord:
    """Run one episode of every task, each with its own key, and test the aggregate in every round.

    Equal keys give equal initial models and batches, so that aggregators can be compared in pairs.

    Parameters
    ----------
    federation : Federation
        The problem.
    aggregator : Aggregator
        Combines the models of every round, such as `UNIFORM` or `Fixed`.
    tasks, keys : Task, PRNGKey
        Clients and key of each episode.
    test_from : int
        First round, counted from 0, whose aggregate is tested. Testing can take as long as the clients'
        training.
    """
    rounds = jnp.arange(federation.horizon)

    def episode(task, key):
        reset_key, walk_key = jax.random.split(key)

        def one_round(carry, now):
            state, memory = carry
            number, key = now
            received = receive(federation, task, state, key)
            model, shares, memory = aggregator.step(received, memory)
            step = federation.continue_from(task, state, model, shares, key=key)
            # All episodes are in the same round, so `cond` stays a branch under `vmap`.
            tested = jax.lax.cond(
                number >= test_from, lambda: federation.test_accuracy(model), lambda: jnp.nan
            )
            return (step.state, memory), (step.reward, tested, shares)

        first = federation.reset(task, key=reset_key)
        keys = jax.random.split(walk_key, federation.horizon)
        begun = (first, aggregator.begin(first.aggregate))
        return EpisodeRecord(*jax.lax.scan(one_round, begun, (rounds, keys))[1])

    return jax.vmap(episode)(tasks, keys)
