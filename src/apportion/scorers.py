"""How hard a task is, judged by the batch B_t just learnt from, never by a look at other tasks.

The paper's formula is the largest deviation from equal shares over the batch, its text says the
mean: both are here, with the reward variance it also proposes, the gradient norm that its Figure 2
holds beside them, and the realised gain over equal shares, which finds signal instead of noise.
"""

from collections.abc import Callable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Evidence(eqx.Module):
    """What an update learnt from a batch: the paper's B_t as scorers and metrics read it."""

    allocations: Float[Array, "batch entities"]
    equal: Float[Array, "batch entities"]
    """Equal shares within what each state allowed."""
    rewards: Float[Array, " batch"]
    equal_rewards: Float[Array, " batch"]
    """What equal shares would have earned in the same states."""
    valid: Bool[Array, " batch"]
    mask: Bool[Array, " entities"]
    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]
    """Norm of the gradient before the importance weight."""

    def mean(self, values: Float[Array, " batch"]) -> Float[Array, ""]:
        """Mean over the periods that took part."""
        return jnp.where(self.valid, values, 0.0).sum() / jnp.maximum(self.valid.sum(), 1)


Scorer = Callable[[Evidence], Float[Array, ""]]


def deviations(evidence: Evidence) -> Float[Array, " batch"]:
    """Sup-norm distance of each allocation from equal shares."""
    gaps = jnp.abs(evidence.allocations - evidence.equal).max(-1)
    return jnp.where(evidence.valid, gaps, 0.0)


def max_deviation(evidence: Evidence) -> Float[Array, ""]:
    """The paper's formula: max over the batch of ||pi(x_n) - 1/m||_inf."""
    return deviations(evidence).max()


def mean_deviation(evidence: Evidence) -> Float[Array, ""]:
    """The paper's text: the mean over the batch of ||pi(x_n) - 1/m||_inf."""
    return evidence.mean(deviations(evidence))


def reward_variance(evidence: Evidence) -> Float[Array, ""]:
    """Variance of the batch's rewards."""
    gap = evidence.rewards - evidence.mean(evidence.rewards)
    return evidence.mean(gap**2)


def gradient_norm(evidence: Evidence) -> Float[Array, ""]:
    """Norm of the gradient that the batch gave."""
    return evidence.gradient_norm


def realised_gain(evidence: Evidence) -> Float[Array, ""]:
    """What the policy earned on the batch beyond equal shares, where it did, plus 1e-5."""
    gain = evidence.mean(evidence.rewards - evidence.equal_rewards)
    return jnp.maximum(gain, 0.0) + 1e-5


SCORERS: dict[str, Scorer] = {
    "max-deviation": max_deviation,
    "mean-deviation": mean_deviation,
    "reward-variance": reward_variance,
    "gradient-norm": gradient_norm,
    "realised-gain": realised_gain,
}
