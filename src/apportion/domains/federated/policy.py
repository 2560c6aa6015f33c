"""A policy that starts as FedAvg: shares = softmax(log FedAvg's share + f(x_i)), f = 0 at first.

The features of the same network, pooled over the clients, determine the server's step eta in
[least_step, 3] and momentum mu in [0, .9], which are 1 and 0 at first, as in FedAvg:
v_{n+1} = v_n + eta (sum_i a_i v_{i,n} - v_n) + mu (v_n - v_{n-1}).

The package contains a trained policy; docs/tutorials/flower.md has its model card.
"""

import hashlib
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from apportion.domains.federated.states import average
from apportion.errors import InputError
from apportion.policy import LogitPolicy
from apportion.problem import Observation
from apportion.recurrence import Features, History, Recurrence
from apportion.runs.policy_file import load_policy
from apportion.simplex import Allocation, Head, Logits, Mask

_LEAST_STEP, _MOST_STEP = 0.5, 3.0
_MOST_MOMENTUM = 0.9


class Decision(eqx.Module):
    """Shares, server step and server momentum of a round."""

    shares: Float[Array, " entities"]
    step: Float[Array, ""]
    momentum: Float[Array, ""]

    def model(
        self,
        models: Float[Array, "entities parameters"],
        start: Float[Array, " parameters"],
        move: Float[Array, " parameters"],
    ) -> Float[Array, " parameters"]:
        """Compute the next aggregate from the clients' models, the last aggregate and its last change."""
        mean = average(self.shares, models)
        return start + self.step * (mean - start) + self.momentum * move


class _ClientFeatures(eqx.Module):
    """Hidden features of the clients, pooled features, and the log of FedAvg's shares."""

    own: Features
    pooled: Float[Array, " pooled"]
    log_share: Float[Array, " entities"]


class AggregationPolicy(LogitPolicy):
    """Shares relative to FedAvg's, with the server's step and momentum, for any number of clients.

    A recurrent network reads each client's history; a second layer combines it with the mean over clients.

    Parameters
    ----------
    channels : int
        Channels of the state; the first is the log of FedAvg's share (`Invariant`).
    hidden : int
        Units of each layer.
    relative : bool
        Whether to add every channel standardised over the clients, and to pool by the spread as well as
        by the mean.
    least_step : float
        Lower bound on the server's step. Training considers one round at a time and so prefers
        short steps, which reduce the clients' noise but slow down later rounds.
    head : Head, optional
        Bounds on the shares.
    key : PRNGKey
        Random key of the initial parameters.

    Examples
    --------
    >>> policy = AggregationPolicy(channels=17, key=jax.random.key(0))
    >>> history = jnp.ones((3, 5, 17)).at[..., 0].set(jnp.log(jnp.array([[0.2], [0.3], [0.5]])))
    >>> decision = policy.decide(Observation(history, jnp.full(3, 1 / 3)), jnp.ones(3, bool))
    >>> [round(share, 4) for share in decision.shares.tolist()]
    [0.2, 0.3, 0.5]
    >>> float(decision.step), float(decision.momentum)
    (1.0, 0.0)
    """

    recurrence: Recurrence
    joint: eqx.nn.Linear
    score: Float[Array, " hidden"]
    server: Float[Array, "pooled 2"]
    head: Head
    channels: int = eqx.field(static=True)
    hidden: int = eqx.field(static=True)
    relative: bool = eqx.field(static=True)
    least_step: float = eqx.field(static=True)

    def __init__(
        self,
        channels: int,
        hidden: int = 16,
        *,
        relative: bool = False,
        least_step: float = _LEAST_STEP,
        head: Head | None = None,
        key: PRNGKeyArray,
    ):
        if channels < 1 or hidden < 1:
            raise InputError(f"channels {channels} and hidden {hidden} must be at least 1")
        if not 0 < least_step <= 1:
            raise InputError(
                f"least_step is {least_step}; it must be above 0, and at most 1 for FedAvg's step"
            )
        self.least_step = least_step
        self.channels, self.hidden, self.relative = channels, hidden, relative
        recurrence_key, joint_key = jax.random.split(key)
        self.recurrence = Recurrence((1 + relative) * channels, hidden, key=recurrence_key)
        self.joint = eqx.nn.Linear((2 + relative) * hidden, hidden, key=joint_key)
        self.score, self.server = jnp.zeros(hidden), jnp.zeros(((1 + relative) * hidden, 2))
        self.head = Head() if head is None else head

    def encode(self, history: History, mask: Mask) -> _ClientFeatures:
        # Shares are relative to an equal share; rounds before the first are zero.
        log_share = history[:, -1, 0]
        lived = mask[:, None] & (history[..., 0] != 0)
        apart = jnp.where(lived, history[..., 0] + jnp.log(mask.sum()), 0.0)
        seen = history.at[..., 0].set(apart)
        if self.relative:
            seen = jnp.concatenate([seen, _standing(seen, mask)], -1)
        own = self.recurrence(seen)
        middle = self._pooled(own, mask)
        both = jax.vmap(lambda h: jnp.tanh(self.joint(jnp.concatenate([h, middle]))))(own)
        pooled = self._pooled(both, mask)
        return _ClientFeatures(both, pooled, log_share)

    def _pooled(self, own: Features, mask: Mask) -> Float[Array, " pooled"]:
        middle = _mean(own, mask)
        if not self.relative:
            return middle
        variance = _mean((own - middle[None]) ** 2, mask)
        return jnp.concatenate([middle, jnp.sqrt(variance + 1e-6)])

    def logits(self, features: _ClientFeatures, held: Allocation, mask: Mask) -> Logits:
        return features.log_share + features.own @ self.score

    def decide(self, observation: Observation, mask: Mask) -> Decision:
        """Decide shares, step and momentum of a round."""
        features = self.encode(observation.history, mask)
        shares = self.allocate(features, observation.held, mask, observation.bounds)
        log_step, momentum = features.pooled @ self.server
        bounds = jnp.log(jnp.array([self.least_step, _MOST_STEP]))
        return Decision(
            shares,
            jnp.exp(_within(log_step, bounds[0], bounds[1])),
            _within(momentum, 0.0, _MOST_MOMENTUM),
        )


def _mean(values: Array, mask: Mask) -> Array:
    """Compute the mean over the real clients."""
    real = mask.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(real, values, 0.0).sum(0) / jnp.maximum(mask.sum(), 1)


def _standing(seen: History, mask: Mask) -> History:
    """Standardise each channel over the clients, clipped at 3."""
    apart = seen - _mean(seen, mask)[None]
    spread = jnp.sqrt(_mean(apart**2, mask))[None]
    return jnp.where(mask[:, None, None], jnp.clip(apart / (spread + 1e-3), -3.0, 3.0), 0.0)


def _within(value: Array, low: Array | float, high: Array | float) -> Array:
    """Clip a value but keep its gradient, so that learning continues at a bound."""
    return value + jax.lax.stop_gradient(jnp.clip(value, low, high) - value)


FOLDER = Path(__file__).parent / "policy_files"


@cache
def shipped_policy() -> AggregationPolicy:
    """Load the shipped policy, which reads the state `invariant` of five rounds."""
    policy = load_policy(FOLDER)
    assert isinstance(policy, AggregationPolicy)
    return policy


def shipped_fingerprint() -> str:
    """Return a short digest of the shipped policy, for the provenance of results."""
    return hashlib.sha256((FOLDER / "policy.safetensors").read_bytes()).hexdigest()[:16]
