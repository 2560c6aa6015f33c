"""Policies that do not care who the entities are: pi(sigma x) = sigma pi(x) (Definition 1).

The paper calls this permutation invariance; it is equivariance. A policy works in two halves:
`encode` reads each entity's history, which allocations do not touch, so that whole price series
can be encoded in parallel; `allocate` joins the share each entity holds and apportions.
"""

import math
from abc import abstractmethod
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray, PyTree

from apportion.errors import InputError, check_counts
from apportion.problem import Observation, as_key
from apportion.recurrence import Features, History, Recurrence
from apportion.simplex import Allocation, Bounds, Head, Logits, Mask, Scalar


class Policy(eqx.Module):
    """Anything that apportions: history to features, features and held shares to an allocation.

    To be saved (`save_policy`), a policy keeps every argument of its constructor in a field of the
    same name, except the random `key`: numbers and text as static fields, arrays and other policies
    as ordinary ones.
    """

    @abstractmethod
    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        """Features of each entity; they may not depend on allocations."""

    @abstractmethod
    def allocate(
        self,
        features: PyTree[Array],
        held: Allocation,
        mask: Mask,
        bounds: Bounds | None = None,
    ) -> Allocation:
        """The shares within the bounds, given the features and what each entity holds."""

    def __call__(self, observation: Observation, mask: Mask) -> Allocation:
        """The shares; an entity that can take nothing now is left out, as padding is."""
        read = observation.scored(mask)
        features = self.encode(observation.history, read)
        return self.allocate(features, observation.held, read, observation.bounds)


class LogitPolicy(Policy):
    """A policy that gives every entity a logit, then apportions by its head: the kind that can explore."""

    head: eqx.AbstractVar[Head]

    @abstractmethod
    def logits(self, features: PyTree[Array], held: Allocation, mask: Mask) -> Logits:
        """One score for each entity, from one network shared by all."""

    def observed_logits(self, observation: Observation, mask: Mask) -> Logits:
        """The logits of what is seen, without those who can take nothing now."""
        read = observation.scored(mask)
        return self.logits(self.encode(observation.history, read), observation.held, read)

    def allocate(
        self,
        features: PyTree[Array],
        held: Allocation,
        mask: Mask,
        bounds: Bounds | None = None,
    ) -> Allocation:
        return self.head(self.logits(features, held, mask), mask, bounds)


class Score(eqx.Module):
    """The shared linear layer from an entity's features and its held share to its score.

    It starts near zero, so that the untrained policy gives equal shares, and has no bias: a common
    shift cancels in the softmax.
    """

    of_features: Float[Array, " hidden"]
    of_held: Float[Array, ""]

    def __init__(self, hidden: int, *, key: PRNGKeyArray):
        self.of_features = 0.01 * jax.random.normal(key, (hidden,))
        self.of_held = jnp.zeros(())

    def __call__(self, features: Features, held: Allocation) -> Logits:
        return features @ self.of_features + self.of_held * held


class Recurrent(LogitPolicy):
    """The paper's policy: a shared tanh RNN, its last state joined with the entity's allocation, a
    shared linear score, softmax.

    Examples
    --------
    >>> policy = Recurrent(channels=3, key=jax.random.key(0))
    >>> observation = Observation(jnp.ones((4, 31, 3)), jnp.full(4, 0.25))
    >>> policy(observation, jnp.ones(4, bool)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    recurrence: Recurrence
    score: Score
    head: Head
    channels: int = eqx.field(static=True)
    hidden: int = eqx.field(static=True)

    def __init__(
        self, channels: int, hidden: int = 25, *, head: Head | None = None, key: PRNGKeyArray | int
    ):
        check_counts(channels=channels, hidden=hidden)
        self.channels, self.hidden = channels, hidden
        recurrence_key, score_key = jax.random.split(as_key(key))
        self.recurrence = Recurrence(channels, hidden, key=recurrence_key)
        self.score = Score(hidden, key=score_key)
        self.head = Head() if head is None else head

    def encode(self, history: History, mask: Mask) -> Features:
        return self.recurrence(history)

    def logits(self, features: Features, held: Allocation, mask: Mask) -> Logits:
        return self.score(features, held)


class Pooled(LogitPolicy):
    """Each entity's last period is read by one layer, joined with the mean and the maximum over all
    present entities, and scored by a second: it knows how many want the resource, and how much.

    Logits are held within `reach` of 0, so that no entity is ever shut out for good.
    """

    first: eqx.nn.Linear
    own: eqx.nn.Linear
    others: Float[Array, "pooled hidden"]
    score: Score
    head: Head
    channels: int = eqx.field(static=True)
    hidden: int = eqx.field(static=True)
    reach: float = eqx.field(static=True)

    def __init__(
        self,
        channels: int,
        hidden: int = 48,
        *,
        reach: float = 5.0,
        head: Head | None = None,
        key: PRNGKeyArray | int,
    ):
        check_counts(channels=channels, hidden=hidden)
        if not 0 < reach <= 30:
            raise InputError(f"reach is {reach}; it must be above 0 and at most 30")
        self.channels, self.hidden, self.reach = channels, hidden, float(reach)
        first_key, own_key, others_key, score_key = jax.random.split(as_key(key), 4)
        self.first = eqx.nn.Linear(channels, hidden, key=first_key)
        self.own = eqx.nn.Linear(hidden, hidden, key=own_key)
        self.others = jax.nn.initializers.glorot_uniform()(others_key, (2 * hidden, hidden))
        self.score = Score(hidden, key=score_key)
        self.head = Head() if head is None else head

    def encode(self, history: History, mask: Mask) -> Features:
        # A row an entity: a batch of tasks is then one product, with nothing turned over.
        read = jax.nn.relu(_on_rows(self.first, history[:, -1]))
        present = jnp.where(mask[:, None], read, 0.0)
        mean = present.sum(0) / jnp.maximum(mask.sum(), 1)
        pooled = jnp.concatenate([mean, largest(present.T)]) @ self.others
        return jax.nn.relu(_on_rows(self.own, read) + pooled)

    def logits(self, features: Features, held: Allocation, mask: Mask) -> Logits:
        return self.reach * jnp.tanh(self.score(features, held) / self.reach)


class GaussianLogits(eqx.Module):
    """How to explore: noise on the logits, the policy's head afterwards; the action is the noisy logits.

    Its log-probability is exact. Bounds act after the noise, on the allocation; the density is that of
    the action before them, which is what ratios of probabilities need. Entities that are absent, their
    limit 0, are left out by the mask (`Observation.present`): they get no noise and no part of the
    density.
    """

    log_noise_std: Scalar

    def __init__(self, noise_std: float | Scalar = 0.5):
        self.log_noise_std = jnp.log(jnp.asarray(noise_std, float))

    def sample(self, logits: Logits, mask: Mask, *, key: PRNGKeyArray) -> Logits:
        """Draw an action."""
        noise = jax.random.normal(key, logits.shape, logits.dtype)
        return jnp.where(mask, logits + jnp.exp(self.log_noise_std) * noise, 0.0)

    def log_prob(self, logits: Logits, mask: Mask, action: Logits) -> Scalar:
        """Exact log-density of an action."""
        z = jnp.where(mask, (action - logits) / jnp.exp(self.log_noise_std), 0.0)
        return -0.5 * (z**2).sum() - mask.sum() * (self.log_noise_std + 0.5 * math.log(2 * math.pi))


@jax.custom_jvp
def largest(values: Float[Array, "*rows entities"]) -> Float[Array, "*rows"]:
    """The maximum over the last axis; of equal ones the first has the gradient.

    >>> jax.grad(lambda x: largest(x))(jnp.array([1.0, 3.0, 3.0])).tolist()
    [0.0, 1.0, 0.0]
    """
    return values.max(-1)


@largest.defjvp
def _largest_moves(primals, tangents):
    # By place: JAX's own rule asks who equals the maximum, and where the compiler computes the values
    # twice they may differ in the last bit, so that none does, and the gradient is 0 / 0.
    (values,), (moved,) = primals, tangents
    place = jnp.argmax(values, -1)[..., None]
    return largest(values), jnp.take_along_axis(moved, place, -1)[..., 0]


def _on_rows(layer: eqx.nn.Linear, rows: Float[Array, "rows before"]) -> Float[Array, "rows after"]:
    assert layer.bias is not None, "layers here have a bias"
    return rows @ layer.weight.T + layer.bias


def assert_equivariant(
    policy: Callable[[Observation, Bool[Array, " entities"]], Allocation],
    *,
    window: int,
    channels: int,
) -> None:
    """Check that permuting the entities permutes the allocation, and that padding takes no part.

    Parameters
    ----------
    policy
        Any callable of (observation, mask), such as a `Policy`.
    window, channels
        The shape of the histories the policy reads.

    Raises
    ------
    InputError
        Says by how much, for which permutation or padding.
    """
    entities, tolerance = 7, 1e-5
    for trial_key in jax.random.split(jax.random.key(0), 8):
        history_key, held_key, order_key, pad_key = jax.random.split(trial_key, 4)
        history = jax.random.normal(history_key, (entities, window, channels))
        held = jax.nn.softmax(jax.random.normal(held_key, (entities,)))
        mask = jnp.ones(entities, bool)
        order = jax.random.permutation(order_key, entities)
        plain = np.asarray(policy(Observation(history, held), mask))
        permuted = np.asarray(policy(Observation(history[order], held[order]), mask))
        gap = np.abs(permuted - plain[np.asarray(order)]).max()
        if not gap <= tolerance:
            raise InputError(
                f"{type(policy).__name__} is not permutation equivariant: under the permutation "
                f"{np.asarray(order).tolist()} a share moves by {gap:.3g} (tolerance {tolerance:g})"
            )
        stranger = jax.random.normal(pad_key, (1, window, channels))
        padded = Observation(jnp.concatenate([history, stranger]), jnp.append(held, 0.0))
        shares = np.asarray(policy(padded, jnp.append(mask, False)))
        gap = np.abs(shares[:-1] - plain).max()
        if shares[-1] != 0 or not gap <= tolerance:
            raise InputError(
                f"{type(policy).__name__} lets padding take part: the padded entity gets "
                f"{shares[-1]:.3g} and others move by {gap:.3g}; respect the mask"
            )
