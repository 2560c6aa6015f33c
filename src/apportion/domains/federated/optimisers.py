"""Optimisers on the server: the average update as a gradient to step along.

FedAvg with another step, FedAvgM (Hsu et al. 2019), FedAdam and FedYogi (Reddi et al. 2021). Shares
are FedAvg's.
"""

import equinox as eqx
import jax.numpy as jnp

from apportion.domains.federated.aggregators import Aggregator, Memory, Memoryless, Received, Shares
from apportion.domains.federated.federation import Model, average
from apportion.domains.federated.policy import Decision


class ServerStep(Memoryless):
    """FedAvg with the server's own step, and with momentum: FedAvgM."""

    step_size: float = eqx.field(static=True, default=1.0)
    momentum: float = eqx.field(static=True, default=0.0)

    def __call__(self, received: Received) -> tuple[Model, Shares]:
        shares = received.by_samples
        decision = Decision(shares, jnp.asarray(self.step_size), jnp.asarray(self.momentum))
        return decision.model(received.models, received.start, received.move), shares


class Adaptive(Aggregator):
    """FedAdam, or FedYogi: the average update's mean over its root mean square, by coordinate.

    The defaults are Flower's.
    """

    step_size: float = eqx.field(static=True, default=0.1)
    first_decay: float = eqx.field(static=True, default=0.9)
    second_decay: float = eqx.field(static=True, default=0.99)
    floor: float = eqx.field(static=True, default=1e-3)
    yogi: bool = eqx.field(static=True, default=False)

    def begin(self, model: Model) -> Memory:
        return jnp.zeros_like(model), jnp.zeros_like(model), jnp.zeros((), jnp.int32)

    def step(self, received: Received, memory: Memory) -> tuple[Model, Shares, Memory]:
        first, second, n = memory
        shares = received.by_samples
        update = average(shares, received.models) - received.start
        first = self.first_decay * first + (1 - self.first_decay) * update
        square = update**2
        if self.yogi:
            second = second - (1 - self.second_decay) * square * jnp.sign(second - square)
        else:
            second = self.second_decay * second + (1 - self.second_decay) * square
        n = n + 1
        # Flower corrects the means' bias in the step, and counts one round more than there were.
        bias = jnp.sqrt(1 - self.second_decay ** (n + 1)) / (1 - self.first_decay ** (n + 1))
        rate = self.step_size * (1.0 if self.yogi else bias)
        model = received.start + rate * first / (jnp.sqrt(second) + self.floor)
        return model, shares, (first, second, n)
