"""Whether a policy can aggregate clients, and sees what it was trained to see."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp

from apportion.domains.federated.states import STATES
from apportion.errors import InputError
from apportion.policy import Policy, ScoringPolicy
from apportion.problem import Observation


def require_fit(policy: Any, state: str, window: int, classes: int) -> None:
    """Refuse what is no policy, one that holds cash, and one that was trained for another state."""
    if not isinstance(policy, Policy):
        raise InputError(
            f"policy: {type(policy).__name__} is not a policy of this package; give one trained in "
            "the simulator, or its folder to LearnedAggregation.load"
        )
    if isinstance(policy, ScoringPolicy) and policy.head.cash:
        raise InputError(
            "policy: it keeps the first entity for cash, and no client is cash; give a policy "
            "trained to aggregate clients"
        )
    channels = STATES[state].channels(classes)
    if not _reads(policy, window, channels):
        fits = [n for n, other in STATES.items() if _reads(policy, window, other.channels(classes))]
        found = f"it fits {' or '.join(map(repr, fits))}" if fits else "it fits none of the states"
        raise InputError(
            f"policy: it was trained for another state than {state!r} ({channels} channels of "
            f"{classes} classes over {window} rounds): {found}; name that state, or train one for "
            f"{state!r}"
        )


def _reads(policy: Policy, window: int, channels: int) -> bool:
    """Whether the policy takes histories of this shape to one share for each client."""
    observation = Observation(jnp.zeros((3, window, channels)), jnp.full(3, 1 / 3))
    try:
        shares = eqx.filter_eval_shape(policy, observation, jnp.ones(3, bool))
    except Exception:  # JAX has no one error for shapes that do not meet
        return False
    return shares.shape == (3,)
