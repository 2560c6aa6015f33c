"""Small pieces around any policy: average several, trade part of the way, shrink to equal shares.

Each is itself a policy, usable alone or inside the others, and equivariant where its inside is:
a_n = w_{n-1} + eta (target - w_{n-1}), target = (1 - k)/m + k pi(x_n), where pi is the mean of an ensemble,
eta the trade fraction and k the trust.
All keep to the bounds they are given; `LimitedTurnover` adds its own.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from apportion.errors import InputError
from apportion.policy import Policy
from apportion.recurrence import History
from apportion.simplex import Allocation, Bounds, Mask, equal_within, within
from apportion.trees import stack


def _fraction(name: str, value: float | Array | Sequence[float], largest: float = 1) -> Array:
    if not isinstance(value, Tracer):
        known = np.asarray(value)
        if not np.all((known >= 0) & (known <= largest)):
            raise InputError(f"{name} is {value}; it must be between 0 and {largest:g}")
    return jnp.asarray(value, jnp.float32)


def mix_allocations(policy: Any, baseline: Any, trust: Any) -> Any:
    """Mix two allocations: `trust` of the policy's and the rest of the baseline's.

    Parameters
    ----------
    policy, baseline : array
        Two allocations of the same entities.
    trust : float or array
        How far the policy is followed, in [0, 1]: 0 is the baseline, 1 the policy.

    Returns
    -------
    array
        The mixture. It keeps all bounds that both allocations keep.

    Examples
    --------
    >>> mix_allocations(np.array([1.0, 0.0]), np.array([0.5, 0.5]), 0.2).tolist()
    [0.6, 0.4]
    """
    return baseline + trust * (policy - baseline)


class EqualShares(Policy):
    """1/m for each entity, always: Equal CRP where allocations drift."""

    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        return ()

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        return equal_within(mask, bounds, held.dtype)


class PolicyWrapper(Policy):
    """A policy around another one, which reads the entities."""

    policy: eqx.AbstractVar[Policy]

    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        return self.policy.encode(history, mask)


class PartialTrading(PolicyWrapper):
    """Move only the fraction `trade_fraction` of the way from what is held to what the policy wants.

    Around `EqualShares` this is lazy rebalancing, and with trade_fraction = 0 buy and hold.

    Examples
    --------
    >>> from apportion.problem import Observation
    >>> lazy = PartialTrading(EqualShares(), 0.1)
    >>> observation = Observation(jnp.ones((2, 3, 1)), jnp.array([0.6, 0.4]))
    >>> [round(share, 4) for share in lazy(observation, jnp.ones(2, bool)).tolist()]
    [0.59, 0.41]
    """

    policy: Policy
    trade_fraction: Float[Array, "*runs"] = eqx.field(
        converter=partial(_fraction, "trade_fraction")
    )

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        target = self.policy.allocate(features, held, mask, bounds)
        return within(held + self.trade_fraction.astype(held.dtype) * (target - held), mask, bounds)


class ShrunkToEqual(PolicyWrapper):
    """Mix the policy with equal shares: (1 - trust)/m + trust pi; trust 1 is the policy itself."""

    policy: Policy
    trust: Float[Array, "*runs"] = eqx.field(converter=partial(_fraction, "trust"))

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        wanted = self.policy.allocate(features, held, mask, bounds)
        equal = equal_within(mask, bounds, held.dtype)
        return mix_allocations(wanted, equal, self.trust.astype(held.dtype))


class Ensemble(Policy):
    """The mean of several policies' allocations; they are one policy whose arrays are stacked.

    Examples
    --------
    >>> from apportion.policy import Recurrent
    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> team = Ensemble(eqx.filter_vmap(lambda key: Recurrent(channels=1, key=key))(keys))
    """

    members: Policy

    @classmethod
    def of(cls, policies: Sequence[Policy]) -> "Ensemble":
        """Stack policies of one structure."""
        if not policies:
            raise InputError("Ensemble: no policies were given; it needs at least one")
        if len({jax.tree.structure(policy) for policy in policies}) > 1:
            raise InputError(
                "Ensemble: the policies differ in structure; give policies of one kind"
            )
        return cls(stack(policies))

    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        return eqx.filter_vmap(lambda policy: policy.encode(history, mask))(self.members)

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        def one(policy, features):
            return policy.allocate(features, held, mask, bounds)

        return eqx.filter_vmap(one)(self.members, features).mean(0)


class LimitedTurnover(PolicyWrapper):
    """Trade at most `max_turnover`, bought and sold added up (exchanging everything is 2).

    What the bounds themselves force comes first: it is done even where it exceeds `max_turnover`.

    Examples
    --------
    >>> from apportion.problem import Observation
    >>> policy = LimitedTurnover(EqualShares(), 0.1)
    >>> observation = Observation(jnp.ones((2, 3, 1)), jnp.array([0.75, 0.25]))
    >>> [round(share, 4) for share in policy(observation, jnp.ones(2, bool)).tolist()]
    [0.7, 0.3]
    """

    policy: Policy
    max_turnover: Float[Array, "*runs"] = eqx.field(
        converter=partial(_fraction, "max_turnover", largest=2)
    )

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        target = self.policy.allocate(features, held, mask, bounds)
        start = within(held, mask, bounds)
        forced, path = jnp.abs(start - held).sum(), jnp.abs(target - start).sum()
        # A limit is given, not learnt.
        max_turnover = jax.lax.stop_gradient(self.max_turnover).astype(held.dtype)
        room = jnp.maximum(max_turnover - forced, 0.0)
        step = jnp.minimum(room / jnp.where(path > 0, path, 1.0), 1.0)
        return start + step * (target - start)
