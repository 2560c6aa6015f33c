"""Permutation-equivariant policies: pi(sigma x) = sigma pi(x) (Definition 1).

The paper calls this property permutation invariance. A policy has two parts. `encode` reads the history
of each entity, which does not depend on allocations, so that a whole price series is encoded in parallel.
`allocate` combines the features with the held shares and returns an allocation.
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
    """Abstract base class of policies, which map an observation to an allocation.

    Subclasses implement `encode` and `allocate`. `save_policy` requires that every argument of the
    constructor, except the random `key`, is stored in a field of the same name: numbers and strings in
    static fields, arrays and other policies in ordinary fields.

    Examples
    --------
    >>> class Proportional(Policy):
    ...     def encode(self, history, mask):
    ...         return history[:, -1, 0]
    ...     def allocate(self, features, held, mask, bounds=None):
    ...         wanted = jnp.where(mask, features, 0)
    ...         return wanted / wanted.sum()
    >>> observation = Observation(jnp.array([[[1.0]], [[3.0]]]), jnp.zeros(2))
    >>> Proportional()(observation, jnp.ones(2, bool)).tolist()
    [0.25, 0.75]
    """

    @abstractmethod
    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        """Compute the features of each entity; they must not depend on allocations.

        Parameters
        ----------
        history : array of shape (entities, window, channels)
            History of each entity.
        mask : array of shape (entities,)
            Whether the entity is present.

        Returns
        -------
        PyTree of arrays
            The features, as `allocate` takes them.
        """

    @abstractmethod
    def allocate(
        self,
        features: PyTree[Array],
        held: Allocation,
        mask: Mask,
        bounds: Bounds | None = None,
    ) -> Allocation:
        """Compute an allocation from the features and the held shares.

        Parameters
        ----------
        features : PyTree of arrays
            The result of `encode`.
        held : array of shape (entities,)
            Share that each entity holds.
        mask : array of shape (entities,)
            Whether the entity is present; the others get 0.
        bounds : Bounds, optional
            Upper and lower bounds of the shares in this period.

        Returns
        -------
        array of shape (entities,)
            The shares.
        """

    def __call__(self, observation: Observation, mask: Mask) -> Allocation:
        """Compute the allocation of an observation.

        Parameters
        ----------
        observation : Observation
            History, held shares and bounds of each entity.
        mask : array of shape (entities,)
            False for padding. Entities with a limit of 0 are masked as well.

        Returns
        -------
        array of shape (entities,)
            The shares.
        """
        read = observation.scored(mask)
        features = self.encode(observation.history, read)
        return self.allocate(features, observation.held, read, observation.bounds)


class LogitPolicy(Policy):
    """Abstract policy that computes a logit per entity and an allocation by its head.

    Exploration (`GaussianLogits`) and `PPO` need such a policy.
    """

    head: eqx.AbstractVar[Head]

    @abstractmethod
    def logits(self, features: PyTree[Array], held: Allocation, mask: Mask) -> Logits:
        """Compute the logit of each entity by one shared network."""

    def observed_logits(self, observation: Observation, mask: Mask) -> Logits:
        """Compute the logits of an observation; entities with a limit of 0 are masked."""
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


class LogitLayer(eqx.Module):
    """Shared linear layer from an entity's features and held share to its logit.

    It is initialised near zero, so that an untrained policy gives equal shares. It has no bias, because
    a common shift cancels in the softmax.
    """

    of_features: Float[Array, " hidden"]
    of_held: Float[Array, ""]

    def __init__(self, hidden: int, *, key: PRNGKeyArray):
        self.of_features = 0.01 * jax.random.normal(key, (hidden,))
        self.of_held = jnp.zeros(())

    def __call__(self, features: Features, held: Allocation) -> Logits:
        return features @ self.of_features + self.of_held * held


class Recurrent(LogitPolicy):
    """The paper's policy: a shared tanh RNN, a shared linear layer and a softmax.

    The logit of an entity reads the last state of the RNN and the share that the entity holds.

    Parameters
    ----------
    channels : int
        Number of channels in the history.
    hidden : int
        Number of hidden units.
    head : Head, optional
        Map from logits to shares; by default a softmax without bounds.
    key : PRNGKey or int
        Key of the initialisation, or a seed.

    Examples
    --------
    >>> policy = Recurrent(channels=3, key=jax.random.key(0))
    >>> observation = Observation(jnp.ones((4, 31, 3)), jnp.full(4, 0.25))
    >>> policy(observation, jnp.ones(4, bool)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    recurrence: Recurrence
    score: LogitLayer
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
        self.score = LogitLayer(hidden, key=score_key)
        self.head = Head() if head is None else head

    def encode(self, history: History, mask: Mask) -> Features:
        return self.recurrence(history)

    def logits(self, features: Features, held: Allocation, mask: Mask) -> Logits:
        return self.score(features, held)


class Pooled(LogitPolicy):
    """Policy that pools over entities: the logit of an entity depends on the others in the task.

    A shared layer reads the last period of each entity. A second layer reads it together with the mean
    and the maximum over all entities that are present.

    Parameters
    ----------
    channels : int
        Number of channels in the history.
    hidden : int
        Number of hidden units per layer.
    reach : float
        Bound on the absolute logits, at most 30; it keeps every share above zero.
    head : Head, optional
        Map from logits to shares; by default a softmax without bounds.
    key : PRNGKey or int
        Key of the initialisation, or a seed.

    Examples
    --------
    >>> policy = Pooled(channels=2, hidden=8, key=0)
    >>> observation = Observation(jnp.ones((4, 1, 2)), jnp.full(4, 0.25))
    >>> policy(observation, jnp.ones(4, bool)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    first: eqx.nn.Linear
    own: eqx.nn.Linear
    others: Float[Array, "pooled hidden"]
    score: LogitLayer
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
        self.score = LogitLayer(hidden, key=score_key)
        self.head = Head() if head is None else head

    def encode(self, history: History, mask: Mask) -> Features:
        # One row per entity: a batch of tasks is then one matrix product without a transpose.
        read = jax.nn.relu(_on_rows(self.first, history[:, -1]))
        present = jnp.where(mask[:, None], read, 0.0)
        mean = present.sum(0) / jnp.maximum(mask.sum(), 1)
        pooled = jnp.concatenate([mean, largest(present.T)]) @ self.others
        return jax.nn.relu(_on_rows(self.own, read) + pooled)

    def logits(self, features: Features, held: Allocation, mask: Mask) -> Logits:
        return self.reach * jnp.tanh(self.score(features, held) / self.reach)


class GaussianLogits(eqx.Module):
    """Exploration by Gaussian noise on the logits; the action is the noisy logits.

    The policy's head maps the action to shares within the bounds. The log-density is that of the action
    before the head, so that it is exact. Masked entities, and those with a limit of 0
    (`Observation.present`), get no noise and do not enter the density.

    Parameters
    ----------
    noise_std : float or array
        Standard deviation of the noise.
    """

    log_noise_std: Scalar

    def __init__(self, noise_std: float | Scalar = 0.5):
        self.log_noise_std = jnp.log(jnp.asarray(noise_std, float))

    def sample(self, logits: Logits, mask: Mask, *, key: PRNGKeyArray) -> Logits:
        """Sample an action."""
        # On ARM processors XLA (JAX 0.10.2) computes wrong noise if it fuses it with what reads it:
        # without the barrier the shares that a simulator receives are NaN or 0.
        noise = jax.lax.optimization_barrier(jax.random.normal(key, logits.shape, logits.dtype))
        return jnp.where(mask, logits + jnp.exp(self.log_noise_std) * noise, 0.0)

    def log_prob(self, logits: Logits, mask: Mask, action: Logits) -> Scalar:
        """Return the exact log-density of an action."""
        z = jnp.where(mask, (action - logits) / jnp.exp(self.log_noise_std), 0.0)
        return -0.5 * (z**2).sum() - mask.sum() * (self.log_noise_std + 0.5 * math.log(2 * math.pi))


@jax.custom_jvp
def largest(values: Float[Array, "*rows entities"]) -> Float[Array, "*rows"]:
    """Return the maximum over the last axis; the gradient goes to the first of equal entries.

    >>> jax.grad(lambda x: largest(x))(jnp.array([1.0, 3.0, 3.0])).tolist()
    [0.0, 1.0, 0.0]
    """
    return values.max(-1)


@largest.defjvp
def _largest_moves(primals, tangents):
    # JAX's own rule compares the values with the maximum. If XLA computes the values twice, they can
    # differ in the last bit; then none equals the maximum and the gradient is 0 / 0. An index is safe.
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
    """Check that a policy is permutation equivariant and ignores padding, on random observations.

    Parameters
    ----------
    policy : callable
        Function of (observation, mask), such as a `Policy`.
    window, channels : int
        Shape of the histories that the policy reads.

    Raises
    ------
    InputError
        If permuting the entities does not permute the shares, or if padding changes them. The message
        reports by how much and for which permutation.

    Examples
    --------
    >>> assert_equivariant(Recurrent(channels=2, hidden=4, key=0), window=3, channels=2)
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
                f"{np.asarray(order).tolist()} a share changes by {gap:.3g} (tolerance {tolerance:g})"
            )
        stranger = jax.random.normal(pad_key, (1, window, channels))
        padded = Observation(jnp.concatenate([history, stranger]), jnp.append(held, 0.0))
        shares = np.asarray(policy(padded, jnp.append(mask, False)))
        gap = np.abs(shares[:-1] - plain).max()
        if shares[-1] != 0 or not gap <= tolerance:
            raise InputError(
                f"{type(policy).__name__} does not ignore padding: the padded entity gets "
                f"{shares[-1]:.3g} and other shares change by {gap:.3g}; apply the mask"
            )
