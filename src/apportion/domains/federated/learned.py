"""A learned aggregator with a gate: it never does worse than FedAvg by more than chance explains.

The aggregate that the policy decides on is compared with FedAvg's on samples that the policy has not
seen, and FedAvg's is taken where the policy's is worse by more than the standard error. Worse is by the
logarithm of the chance given to the right answer: by the chance itself, a model that is rash and mostly
wrong can pass for one that is right and not yet sure.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from apportion.domains.federated.aggregators import Memoryless, Received, Shares
from apportion.domains.federated.federation import Model
from apportion.domains.federated.policy import AggregationPolicy, fedavg

WRONG = 0.02
"""Added to a chance before its logarithm is taken: to be wrong for certain is to be wrong by so much."""


class Learned(Memoryless):
    """Shares, step and momentum by a policy; with `gated`, FedAvg's where it does worse.

    The gate needs a federation that keeps samples for it (`Federation(gate=True)`).
    """

    policy: AggregationPolicy
    gated: bool = eqx.field(static=True, default=True)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        decision = self.policy.decide(received.observation, received.mask)
        model = decision.model(received.models, received.start, received.move)
        if not self.gated:
            return model, decision.shares
        federation, samples = received.federation, received.samples
        assert federation is not None
        assert samples is not None
        plain = fedavg(received.counts.astype(jnp.float32), received.mask)
        other = plain.model(received.models, received.start, received.move)
        chances = federation.chances(jnp.stack([model, other]), samples.places)
        ours, theirs = jnp.log(chances + WRONG)
        passed = passes(ours - theirs, samples.kept)
        return jnp.where(passed, model, other), jnp.where(passed, decision.shares, plain.shares)


def passes(gains: Float[Array, " samples"], kept: Bool[Array, " samples"]) -> Bool[Array, ""]:
    """Whether the mean gain over the kept samples is no further below 0 than its standard error.

    >>> bool(passes(jnp.array([-0.4, -0.5, -0.6]), jnp.ones(3, bool)))
    False
    """
    count = jnp.maximum(kept.sum(), 1)
    mean = jnp.where(kept, gains, 0.0).sum() / count
    spread = jnp.where(kept, (gains - mean) ** 2, 0.0).sum() / jnp.maximum(count - 1, 1)
    return mean >= -jnp.sqrt(spread / count)
