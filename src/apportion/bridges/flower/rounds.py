"""One round's decision: what the policy sees of the replies, what it makes of them, and the gate.

In the simulator and here the same state functions show the policy the same numbers. Models are tried
one at a time, so that memory holds the replies and two models more, however many clients there are.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from apportion.bridges.flower.server_data import Judged, ServerData
from apportion.bridges.flower.updates import (
    ClientMemory,
    ClientUpdate,
    Model,
    between,
    geometry,
    moved,
    weighted_sum,
)
from apportion.domains.federated.aggregators import WRONG
from apportion.domains.federated.policy import AggregationPolicy, Decision
from apportion.domains.federated.states import (
    QUARTER,
    ClientState,
    SampleScores,
    ServerInfo,
    Submission,
)
from apportion.policy import Policy
from apportion.problem import Observation
from apportion.simplex import Mask


@dataclass(frozen=True)
class Aggregated:
    """The model of a round, and how it came about."""

    model: Model
    shares: np.ndarray
    step: float = 1.0
    momentum: float = 0.0
    learned: bool = True
    """Whether it is the policy's model, not FedAvg's."""
    gain: float = float("nan")
    """What the policy's model gained over FedAvg's on the gate's samples, whichever was taken."""


@dataclass(frozen=True)
class Round:
    """The usable replies of a round, as the server's samples and its memory show them."""

    updates: list[ClientUpdate]
    judged: list[Judged]
    start: Model
    memory: ClientMemory
    server: ServerData
    counts: np.ndarray
    gated: bool
    trust: float = 1.0
    """The policy's part in the model, 0 to 1."""

    @property
    def nodes(self) -> list[int]:
        """Who replied."""
        return [update.node for update in self.updates]

    @property
    def models(self) -> list[Model]:
        """What they sent."""
        return [update.model for update in self.updates]

    @cached_property
    def fedavg(self) -> Model:
        """FedAvg's model."""
        return weighted_sum(self.usual, self.models)

    @property
    def usual(self) -> np.ndarray:
        """FedAvg's shares."""
        return self.counts / self.counts.sum()

    @cached_property
    def fedavg_judged(self) -> Judged | None:
        """How FedAvg's model does; None where it cannot be tried."""
        return self.server.judged(self.fedavg)

    def shown(self, state: ClientState) -> np.ndarray | None:
        """What the policy sees of each client; None where the server's samples fail it."""
        rows = geometry(self.models, self.start, self.memory.move)
        m = len(self.updates)
        known = ServerInfo(
            _array(self.counts),
            _array(self.memory.absent(self.nodes)),
            _array(rows[m]),
            _array(float(self.memory.rounds)),
        )
        submission = Submission(
            _array(np.stack([self.server.correct(own) for own in self.judged])),
            _array(self.server.frequency),
            _array(rows[:m]),
            jax.device_put(np.ones(m, bool)),
            known=known,
        )
        if state.reads == "samples":
            tried = self._tried()
            if tried is None:
                return None
            submission = replace(submission, tried=tried)
        return np.asarray(_channels(state, submission))

    def _tried(self) -> SampleScores | None:
        before, ahead = self.server.judged(self.start), self.fedavg_judged
        if before is None or ahead is None:
            return None
        towards = []
        for model, own in zip(self.models, self.judged, strict=True):
            found = self.server.judged(between(self.fedavg, model, QUARTER))
            towards.append(own.chances if found is None else found.chances)
        return SampleScores(
            _array(np.stack([own.chances for own in self.judged])),
            _array(np.stack(towards)),
            _array(ahead.chances),
            _array(before.chances),
            jax.device_put(~(kept_samples(len(ahead.chances)) & self.gated)),
        )

    def decide(self, policy: Policy, shown: np.ndarray) -> Aggregated | None:
        """The policy's model, or FedAvg's where the gate says so; None if it decides on no number."""
        observation, mask = self.memory.observation(self.nodes, shown)
        decision = _decide(policy, observation, mask)
        shares = np.asarray(decision.shares, np.float64)[: len(self.updates)]
        if not np.isfinite(shares).all():
            return None
        shares = shares / shares.sum()
        step, momentum = float(decision.step), float(decision.momentum)
        model = moved(shares, self.models, self.start, self.memory.move, step, momentum)
        both = self._beside_fedavg(model) if self.gated else np.zeros((2, 0))
        gain = _mean(both)
        if both is None or not _passes(both) or self.trust == 0:
            return Aggregated(self.fedavg, self.usual, learned=False, gain=gain)
        if self.trust < 1:
            shares, step, momentum = partly(self.trust, self.usual, shares, step, momentum)
            model = moved(shares, self.models, self.start, self.memory.move, step, momentum)
        return Aggregated(model, shares, step, momentum, gain=gain)

    def _beside_fedavg(self, model: Model) -> np.ndarray | None:
        """The chances of the model and of FedAvg's on each sample that the policy does not see; none
        where FedAvg's cannot be tried, and None where the model itself cannot be.
        """
        ours, theirs = self.server.judged(model), self.fedavg_judged
        if ours is None or theirs is None:
            return None if ours is None else np.zeros((2, 0))
        return np.stack([ours.chances, theirs.chances])[:, kept_samples(len(ours.chances))]


def partly(
    trust: float, usual: np.ndarray, shares: np.ndarray, step: float, momentum: float
) -> tuple[np.ndarray, float, float]:
    """Shares, step and momentum whose model lies this part of the way from FedAvg's to the policy's.

    >>> partly(0.5, np.array([0.5, 0.5]), np.array([1.0, 0.0]), 1.0, 0.4)
    (array([0.75, 0.25]), 1.0, 0.2)
    """
    reach = 1 + trust * (step - 1)
    mixed = ((1 - trust) * usual + trust * step * shares) / reach
    return mixed, reach, trust * momentum


def _passes(chances: np.ndarray) -> bool:
    """Whether the logarithm gains no less on average than minus its standard error."""
    ours, theirs = np.log(chances + WRONG)
    gains = ours - theirs
    error = gains.std(ddof=1) / np.sqrt(len(gains)) if len(gains) > 1 else 0.0
    return bool(len(gains) == 0 or gains.mean() >= -error)


def _mean(chances: np.ndarray | None) -> float:
    """What a chance gains on average."""
    if chances is None or chances.shape[1] == 0:
        return float("nan")
    return float(np.mean(chances[0] - chances[1]))


def split_scored(
    updates: list[ClientUpdate], server: ServerData
) -> tuple[list[ClientUpdate], list[Judged], list[int]]:
    """The replies that can be scored, how they do, and the nodes whose cannot."""
    judged = [(update, server.judged(update.model)) for update in updates]
    scored = [(update, own) for update, own in judged if own is not None]
    failed = [update.node for update, own in judged if own is None]
    return [update for update, _ in scored], [own for _, own in scored], failed


def kept_samples(count: int) -> np.ndarray:
    """The samples that the gate keeps from the policy: every fourth, as in the simulator."""
    return np.arange(count) % 4 == 3


# In one program: operation by operation, every number of clients compiles dozens of them.
_channels = eqx.filter_jit(lambda state, submission: state(submission))


@eqx.filter_jit
def _decide(policy: Policy, observation: Observation, mask: Mask) -> Decision:
    if isinstance(policy, AggregationPolicy):
        return policy.decide(observation, mask)
    return Decision(policy(observation, mask), jnp.ones(()), jnp.zeros(()))


def _array(values: np.ndarray | float) -> Array:
    return jax.device_put(np.asarray(values, np.float32))
