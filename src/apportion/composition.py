"""Policy wrappers: ensembles, partial trading, shrinkage to equal shares and turnover limits.

Each wrapper is a policy, can be nested in the others, and is equivariant if the wrapped policy is.
Together they compute a_n = w_{n-1} + eta (target - w_{n-1}) with target = (1 - k)/m + k pi(x_n), where pi
is the mean of an ensemble, eta the trade fraction and k the trust. All respect the bounds they are given.
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
    """Return a convex combination of two allocations.

    Parameters
    ----------
    policy, baseline : array
        Two allocations over the same entities.
    trust : float or array
        Weight of the policy's allocation, in [0, 1].

    Returns
    -------
    array
        The mixture. It satisfies every bound that both allocations satisfy.

    Examples
    --------
    >>> mix_allocations(np.array([1.0, 0.0]), np.array([0.5, 0.5]), 0.2).tolist()
    [0.6, 0.4]
    """
    return baseline + trust * (policy - baseline)


class EqualShares(Policy):
    """Policy that gives each entity the share 1/m (Equal CRP).

    Within bounds, the part that an entity cannot take goes to the others in equal shares.

    Examples
    --------
    >>> from apportion import Observation
    >>> observation = Observation(jnp.zeros((4, 1, 1)), jnp.zeros(4))
    >>> EqualShares()(observation, jnp.ones(4, bool)).tolist()
    [0.25, 0.25, 0.25, 0.25]
    """

    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        return ()

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        return equal_within(mask, bounds, held.dtype)


class PolicyWrapper(Policy):
    """Base class of policies that use the encoder of another policy."""

    policy: eqx.AbstractVar[Policy]

    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        return self.policy.encode(history, mask)


class PartialTrading(PolicyWrapper):
    """Trade only the fraction `trade_fraction` of the way from the held shares to the policy's target.

    With `EqualShares` this is lazy rebalancing; with trade_fraction = 0 it is buy and hold.

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
    """Shrink a policy to equal shares: (1 - trust)/m + trust pi."""

    policy: Policy
    trust: Float[Array, "*runs"] = eqx.field(converter=partial(_fraction, "trust"))

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        wanted = self.policy.allocate(features, held, mask, bounds)
        equal = equal_within(mask, bounds, held.dtype)
        return mix_allocations(wanted, equal, self.trust.astype(held.dtype))


class Ensemble(Policy):
    """Mean of the allocations of several policies, given as one policy with stacked arrays.

    Examples
    --------
    >>> from apportion.policy import Recurrent
    >>> keys = jax.random.split(jax.random.key(0), 4)
    >>> team = Ensemble(eqx.filter_vmap(lambda key: Recurrent(channels=1, key=key))(keys))
    """

    members: Policy

    @classmethod
    def of(cls, policies: Sequence[Policy]) -> "Ensemble":
        """Build an ensemble from policies of the same structure."""
        if not policies:
            raise InputError("Ensemble: got no policies; pass at least one")
        if len({jax.tree.structure(policy) for policy in policies}) > 1:
            raise InputError(
                "Ensemble: the policies differ in structure; pass policies of one kind"
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
    """Limit the turnover of a policy to `max_turnover`, the sum of absolute changes (2 at most).

    Changes that the bounds require are made even if they exceed `max_turnover`.

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
        # The limit is a constant, not a parameter to train.
        max_turnover = jax.lax.stop_gradient(self.max_turnover).astype(held.dtype)
        room = jnp.maximum(max_turnover - forced, 0.0)
        step = jnp.minimum(room / jnp.where(path > 0, path, 1.0), 1.0)
        return start + step * (target - start)
