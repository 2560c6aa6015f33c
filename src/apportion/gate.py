"""A policy behind a gate: the baseline decides until the policy has earned trust, and again if it loses it.

After every period in which both were followed, one of them in the shadow, the gate is told by how much
the policy was better. A bet on these gains (see `betting`) has the wealth K_n <= 1/alpha, and the policy
is trusted with the share log K_n / log(1/alpha) of every allocation, none below K_n = 1. A policy that is
never better is ever trusted with the share s with probability alpha^s at most.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from apportion.certify.betting import STAKES
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.recurrence import History
from apportion.simplex import Allocation, Bounds, Mask


def _checked(evidence: Float[Array, "*runs stakes"] | None) -> Array:
    evidence = jnp.zeros(len(STAKES)) if evidence is None else evidence
    if not isinstance(evidence, Tracer) and np.shape(evidence)[-1:] != STAKES.shape:
        raise InputError(
            f"Gate: evidence has shape {np.shape(evidence)}; it is a number for each of the "
            f"{len(STAKES)} stakes"
        )
    return jnp.asarray(evidence, jnp.float32)


class Gate(Policy):
    """Part baseline, part policy, as the evidence stands; itself a policy, and saved like any other.

    Its state is `evidence`, an array of numbers: `after` returns the gate of the next period. Wealth is
    kept from growing beyond 1/alpha, so that a policy that turns bad is found out as fast as if it
    had been trusted only yesterday.

    Parameters
    ----------
    policy, baseline
        Who has to earn trust, and who decides until then.
    low, high
        The least and the most that a gain can be, known beforehand; what is beyond counts as they do.
    alpha
        How likely a policy that is never better may be trusted in full at any time.
    evidence
        The logarithm of each stake's wealth; of no gains by default.

    Examples
    --------
    >>> from apportion.composition import EqualShares, PartialTrading
    >>> gate = Gate(EqualShares(), PartialTrading(EqualShares(), 0.1), low=-1.0, high=1.0)
    >>> for gain in (0.4, 0.2, 0.6, 0.5, 0.3, 0.4):
    ...     gate = gate.after(gain)
    >>> round(float(gate.trust), 2)
    0.3
    """

    policy: Policy
    baseline: Policy
    low: float = eqx.field(static=True, kw_only=True)
    high: float = eqx.field(static=True, kw_only=True)
    alpha: float = eqx.field(static=True, default=0.05, kw_only=True)
    evidence: Float[Array, "*runs stakes"] = eqx.field(
        converter=_checked, default=None, kw_only=True
    )

    def __check_init__(self):
        low, high = self.low, self.high
        if not -np.inf < low < 0 < high < np.inf:
            raise InputError(f"Gate: bounds {low:g} and {high:g}; 0 must lie between them")
        if not 0 < self.alpha < 1:
            raise InputError(f"Gate: alpha is {self.alpha:g}; it must be above 0 and below 1")

    @property
    def trust(self) -> Float[Array, "*runs"]:
        """The policy's part of every allocation, 0 to 1."""
        return jnp.clip(_log_wealth(self.evidence) / -np.log(self.alpha), 0.0, 1.0)

    def after(self, gain: float | Float[Array, "*runs"]) -> "Gate":
        """The gate after one more period; a gain that is not a number is a missing one."""
        gain = jnp.asarray(gain)
        counted = jnp.clip(jnp.where(jnp.isnan(gain), 0.0, gain), self.low, self.high)
        stakes = jnp.asarray(STAKES, self.evidence.dtype)
        grown = self.evidence + jnp.log1p(stakes * counted[..., None] / -self.low)
        beyond = jnp.maximum(_log_wealth(grown) + np.log(self.alpha), 0.0)
        return eqx.tree_at(lambda gate: gate.evidence, self, grown - beyond[..., None])

    def encode(self, history: History, mask: Mask) -> PyTree[Array]:
        return self.policy.encode(history, mask), self.baseline.encode(history, mask)

    def allocate(
        self, features: PyTree[Array], held: Allocation, mask: Mask, bounds: Bounds | None = None
    ) -> Allocation:
        wanted = self.policy.allocate(features[0], held, mask, bounds)
        usual = self.baseline.allocate(features[1], held, mask, bounds)
        # Both keep to the bounds, and so does what lies between them. Trust is earned, not learnt.
        trust = jax.lax.stop_gradient(self.trust).astype(held.dtype)
        return usual + trust * (wanted - usual)


def _log_wealth(evidence: Array) -> Array:
    return jax.nn.logsumexp(evidence, axis=-1) - np.log(len(STAKES))
