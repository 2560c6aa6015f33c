"""A trained policy as a Flower strategy: learned shares aggregate the models of a real federation.

In round n the server scores every submitted model v_{i,n} on its own data, the policy turns each
client's last H states into shares a_{i,n}, a step and a momentum, and the aggregate is sent out again
if it passes the gate. Clients are known by their node id alone, may come and go, and are trusted with
nothing. In the simulator and here the same state functions show the policy the same numbers. Models are
tried one at a time, so that memory holds the replies and two models more, however many clients there are.

`ShareGradient` needs no policy, but a loss that JAX can differentiate.
"""

import logging
import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float

from apportion.certificate import Gains
from apportion.domains.federated.aggregators import WRONG, descend_shares, passes
from apportion.domains.federated.domain import MAX_ROUND_GAIN, round_gains
from apportion.domains.federated.policy import (
    AggregationPolicy,
    Decision,
    shipped_blind_policy,
    shipped_policy,
)
from apportion.domains.federated.states import (
    QUARTER,
    STATES,
    ClientState,
    SampleScores,
    ServerInfo,
    Submission,
    client_state,
)
from apportion.errors import InputError, optional_import
from apportion.policy import Policy, ScoringPolicy
from apportion.problem import Observation
from apportion.runs.policy_file import load_about, load_policy
from apportion.simplex import Mask

with optional_import("LearnedAggregation needs Flower", "federated"):
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg

from apportion.bridges.flower.server_data import Answers, Judged, ServerData
from apportion.bridges.flower.updates import (
    ClientMemory,
    ClientUpdate,
    Model,
    between,
    geometry,
    moved,
    read_model,
    sample_counts,
    usable,
    weighted_sum,
    write_model,
)

_log = logging.getLogger("flwr")


@dataclass(frozen=True)
class Aggregated:
    """The model of a round, and how it came about."""

    model: Model
    updates: list[ClientUpdate]
    """Those it is made of."""
    shares: np.ndarray
    accuracies: list[float]
    """Of their models on the server's samples; not a number where they were not tried."""
    step: float = 1.0
    momentum: float = 0.0
    learned: bool = True
    """Whether it is the policy's model, not FedAvg's."""
    gain: float = float("nan")
    """What the policy's model gained over FedAvg's on the gate's samples, whichever was taken."""


class GuardedFedAvg(FedAvg):
    """FedAvg with guards at the door: replies that failed, are misshapen, not finite or huge are left out.

    A round without any usable reply keeps the model.
    """

    def __init__(self, window: int, max_update_ratio: float, options: dict[str, Any]):
        options.setdefault("fraction_evaluate", 0.0)
        super().__init__(**options)
        if not max_update_ratio > 1 or window < 1:
            raise InputError(
                f"{type(self).__name__}: max_update_ratio {max_update_ratio} must be over 1 and window "
                f"{window} at least 1"
            )
        self.window, self.max_update_ratio = window, max_update_ratio

    @abstractmethod
    def make_model(
        self, server_round: int, updates: list[ClientUpdate], start: Model
    ) -> Aggregated:
        """The model of a round's usable replies, which started from `start`."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As in FedAvg, remembering the model sent out, which replies are compared with, and to whom."""
        caller = type(sys._getframe(1).f_locals.get("self")).__name__
        if caller.startswith("DifferentialPrivacy"):
            raise InputError(
                f"{type(self).__name__} inside {caller}: its noise protects an average of equal weights, "
                "and learned shares, step and momentum would void that; use FedAvg inside it"
            )
        if server_round == 1 and self._memory.rounds > self._resumed:
            self._begin()
        self._memory.send(read_model(arrays))
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id for message in messages}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The replies' models to one; (None, None), which keeps the old one, if none is usable."""
        replies, start = list(replies), self._memory.start
        if start is None:
            raise InputError(f"{type(self).__name__}: configure_train comes before aggregate_train")
        usual = [norm for norms in self._norms for norm in norms]
        updates, refused = usable(replies, start, usual, self.max_update_ratio)
        for node, why in refused.items():
            self._note(server_round, node, why.partition(":")[0])
            _log.warning("round %d: node %d is left out (%s)", server_round, node, why)
        for node in sorted(self._asked - {message.metadata.src_node_id for message in replies}):
            self._note(server_round, node, "silent")
        if not updates:
            self._memory.end_round()
            why = next(iter(refused.values()), "nobody replied")
            text = "round %d: no usable reply (%d refused; %s); the model stays"
            _log.error(text, server_round, len(refused), why)
            return None, None
        self._norms.append([update.norm for update in updates])
        made = self.make_model(server_round, updates, start)
        for update, share, right in zip(made.updates, made.shares, made.accuracies, strict=True):
            self._note(server_round, update.node, "kept", right, float(share))
        self._memory.end_round(made.gain)
        try:
            contents = [update.content for update in made.updates]
            metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # clients may report anything, or nothing
            _log.warning("the clients' metrics cannot be averaged (%s)", error)
            metrics = MetricRecord()
        metrics["clients-kept"] = len(made.updates)
        metrics["clients-refused"] = len(refused) + len(updates) - len(made.updates)
        metrics["largest-share"] = float(made.shares.max())
        metrics["server-step"], metrics["server-momentum"] = made.step, made.momentum
        return write_model(made.model), metrics

    def to_frame(self) -> pd.DataFrame:
        """What became of every client asked: kept, failed, misshapen, not finite, huge, not scored or
        silent, with the accuracy of its model on the server's samples and its share.
        """
        return pd.DataFrame(self._notes, columns=["round", "node", "outcome", "accuracy", "share"])

    def _begin(self) -> None:
        """Forget the clients of an earlier run."""
        self._memory, self._resumed = ClientMemory(self.window), 0
        self._asked: set[int] = set()
        self._norms: deque[list[float]] = deque(maxlen=self.window)
        self._notes: list[tuple[int, int, str, float, float]] = []

    def _note(
        self, n: int, node: int, outcome: str, accuracy: float = np.nan, share: float = 0.0
    ) -> None:
        self._notes.append((n, node, outcome, accuracy, share))

    def _counts(self, updates: list[ClientUpdate]) -> np.ndarray:
        return sample_counts(updates, self.weighted_by_key, self.max_update_ratio)


class LearnedAggregation(GuardedFedAvg):
    """FedAvg with shares, step and momentum decided by a trained policy, and with guards at the door.

    Replies that failed, are misshapen, not finite or huge are left out, and the policy's model is taken
    only where it is not worse than FedAvg's on samples that the policy does not see. A round without any
    usable reply keeps the model. Where no model can be scored, the round is FedAvg's, with a warning in
    Flower's log.

    Parameters
    ----------
    predict
        Answers of a model (an `ArrayRecord`) for the server's samples: classes, or a row of scores or of
        probabilities a sample. A server without samples leaves it out: its policy goes by the updates'
        geometry and the clients' counts alone.
    labels
        The right classes of the server's samples, 0, 1, ...
    policy
        The one that comes with the package for the state, unless given: one trained in the simulator
        (`apportion train federated`) for this `state`. It serves any number of clients and classes.
    score
        In place of predict and labels, where the task is none of classes: the loss of a model (an
        `ArrayRecord`) on each of the server's samples, at least 0.
    state, window
        What the policy was trained to see: a name of `apportion.domains.federated.states.STATES`, and the
        rounds of it; `invariant` unless given, and `blind` on a server without samples, which has no gate.
        `load` takes them from the policy's folder.
    max_update_ratio
        An update whose norm is more than this many times the median one is huge.
    gate
        Whether the policy's model has to pass; a quarter of the samples is for that.
    alpha
        With a number the policy has to earn its place: models are FedAvg's, moved towards the policy's by
        the share of trust that its gains have earned in the rounds before, as in `apportion.Gate`. A policy
        that is never better is ever trusted in full with probability alpha at most.
    max_gain
        What a round's gain counts at most, in these bets and in `gains`.
    checkpoint_path
        A file for the strategy's memory, written after every round. Where it is there already, the
        strategy goes on from it: `kept_model` is the model to begin with.
    options
        As in Flower's `FedAvg`; `fraction_evaluate` is 0 unless it is given.

    Examples
    --------
    >>> strategy = LearnedAggregation(
    ...     predict=lambda arrays: arrays.to_numpy_ndarrays()[0], labels=[0, 1, 1]
    ... )
    >>> strategy.to_frame().columns.tolist()
    ['round', 'node', 'outcome', 'accuracy', 'share']
    """

    def __init__(
        self,
        predict: Answers | None = None,
        labels: Any = None,
        policy: Policy | None = None,
        *,
        score: Answers | None = None,
        state: str | None = None,
        window: int = 5,
        max_update_ratio: float = 10.0,
        gate: bool = True,
        alpha: float | None = None,
        max_gain: float = MAX_ROUND_GAIN,
        checkpoint_path: Path | str | None = None,
        **options: Any,
    ):
        super().__init__(window, max_update_ratio, options)
        self.server = ServerData(predict, labels, score)
        if not 0 < max_gain <= 1:
            raise InputError(f"max_gain is {max_gain}; it must be above 0 and at most 1")
        state = state or ("blind" if self.server.empty else "invariant")
        shipped = shipped_blind_policy if state == "blind" else shipped_policy
        self.policy = shipped() if policy is None else policy
        self.state, self.gate = client_state(state), gate and not self.server.empty
        self.alpha, self.max_gain = alpha, max_gain
        if alpha is not None and not (0 < alpha < 1 and self.gate):
            raise InputError(
                f"alpha {alpha:g}: trust is earned on the gate's samples, with alpha above 0 and below 1; "
                "give predict and labels, or score, and leave gate on"
            )
        self.checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path)
        if self.server.empty and self.state.reads != "nothing":
            raise InputError(
                f"state {state!r} reads the server's samples: give predict and labels, or score; for a "
                "server without any leave the state out, or take 'blind'"
            )
        if self.server.classes == 0 and self.state.reads == "classes":
            raise InputError(
                f"state {state!r} reads classes, and a score has none; use 'invariant'"
            )
        _require_fit(self.policy, state, window, max(self.server.classes, 1))
        self._begin()

    @classmethod
    def load(
        cls,
        folder: Path | str,
        predict: Answers | None = None,
        labels: Any = None,
        **options: Any,
    ) -> "LearnedAggregation":
        """The strategy with the policy of a run's folder, and with the state it was trained for.

        Raises
        ------
        InputError
            The folder holds no policy, one of another problem, or one for another state.
        """
        policy, about = load_policy(folder), load_about(folder)
        if "state" not in about:
            job = f"for the job {about['job']!r}" if "job" in about else "for an unknown state"
            raise InputError(
                f"{folder}: this policy was trained {job}, not to aggregate clients; give a folder "
                'of `apportion train federated`, or save_policy(policy, folder, {"state": ...})'
            )
        asked = options.pop("state", about["state"])
        if asked != about["state"]:
            raise InputError(
                f"{folder}: this policy was trained for the state {about['state']!r}, not for "
                f"{asked!r}; leave state out, or train one for {asked!r}"
            )
        options.setdefault("window", about.get("window", 5))
        return cls(predict, labels, policy, state=asked, **options)

    @property
    def kept_model(self) -> ArrayRecord | None:
        """The last model of the run whose memory `checkpoint_path` holds; None before the first."""
        return None if self._made is None else write_model(self._made)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The replies' models to one; (None, None), which keeps the old one, if none is usable."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            metrics["gate-passed"], metrics["trust"] = int(self._learned), self.trust
            if self.checkpoint_path is not None and self._made is not None:
                self._memory.save(self.checkpoint_path, self._made)
        return arrays, metrics

    def make_model(
        self, server_round: int, updates: list[ClientUpdate], start: Model
    ) -> Aggregated:
        """The round's model by the policy, behind the gate; FedAvg's where the samples fail it."""
        self.server.begin_round(start)
        judged = [(update, self.server.judged(update.model)) for update in updates]
        scored = [(update, own) for update, own in judged if own is not None]
        here = Round(
            [update for update, _ in scored],
            [own for _, own in scored],
            start,
            self._memory,
            self.server,
            self._counts([update for update, _ in scored]),
            self.gate,
            self.trust,
        )
        shown = here.shown(self.state) if scored else None
        made = None if shown is None else here.decide(self.policy, shown)
        if shown is None or made is None:
            _log.warning(
                "round %d: no model can be scored; FedAvg instead of learned shares", server_round
            )
            counts = self._counts(updates)
            shares = counts / counts.sum()
            model = weighted_sum(shares, [update.model for update in updates])
            unknown = [np.nan] * len(updates)
            made = Aggregated(model, updates, shares, unknown, learned=False)
        else:
            for update, own in judged:
                if own is None:
                    self._note(server_round, update.node, "not scored")
            if not made.learned:
                text = "round %d: FedAvg's model, trust in the policy's is %.2f"
                _log.info(text, server_round, here.trust)
            self._memory.keep(here.nodes, shown, made.shares)
        self._made, self._learned = made.model, made.learned
        return made

    def gains(self) -> Gains:
        """What the policy's model gained over FedAvg's in each round, in the chance of the right answer
        to the samples that it does not see: `strategy.gains().certify(block=5)` says whether it has
        earned its place on these samples, which are the same every round.
        """
        return round_gains(self._memory.gains, self.max_gain)

    @property
    def trust(self) -> float:
        """The policy's part in the next model, 0 to 1; 1 where it need not earn its place."""
        return 1.0 if self.alpha is None else self.gains().certify(alpha=self.alpha).trust

    def _begin(self) -> None:
        """Forget the clients of an earlier run; go on from a file that is there."""
        super()._begin()
        self._made: Model | None = None
        if self.checkpoint_path is not None and self.checkpoint_path.exists():
            self._memory, self._made = ClientMemory.restored(self.checkpoint_path, self.window)
            self._resumed = self._memory.rounds


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

    @property
    def usual(self) -> np.ndarray:
        """FedAvg's shares."""
        return self.counts / self.counts.sum()

    @cached_property
    def fedavg(self) -> Model:
        """FedAvg's model."""
        return weighted_sum(self.usual, self.models)

    @cached_property
    def fedavg_judged(self) -> Judged | None:
        """How FedAvg's model does; None where it cannot be tried."""
        return self.server.judged(self.fedavg)

    def shown(self, state: ClientState) -> np.ndarray | None:
        """What the policy sees of each client; None where the server's samples fail it."""
        rows = geometry(self.models, self.start, self.memory.move)
        m = len(self.updates)
        submission = Submission(
            _array(np.stack([self.server.correct(own) for own in self.judged])),
            _array(self.server.frequency),
            _array(rows[:m]),
            jax.device_put(np.ones(m, bool)),
            ServerInfo(
                _array(self.counts),
                _array([self.memory.absence(node) for node in self.nodes]),
                _array(rows[m]),
                _array(float(self.memory.rounds)),
            ),
        )
        if state.reads == "samples":
            before, ahead = self.server.judged(self.start), self.fedavg_judged
            if before is None or ahead is None:
                return None
            towards = []
            for model, own in zip(self.models, self.judged, strict=True):
                found = self.server.judged(between(self.fedavg, model, QUARTER))
                towards.append(own.chances if found is None else found.chances)
            scores = SampleScores(
                _array(np.stack([own.chances for own in self.judged])),
                _array(np.stack(towards)),
                _array(ahead.chances),
                _array(before.chances),
                jax.device_put(~(_kept_samples(len(ahead.chances)) & self.gated)),
            )
            submission = replace(submission, scores=scores)
        return np.asarray(_channels(state, submission))

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
        accuracies = [own.accuracy for own in self.judged]
        passed, gain = True, np.nan
        if self.gated:
            # It passes where FedAvg's model cannot be tried, but not where it cannot be itself.
            ours, theirs = self.server.judged(model), self.fedavg_judged
            passed = ours is not None
            if ours is not None and theirs is not None:
                kept = _kept_samples(len(ours.chances))
                gains = np.log(ours.chances + WRONG) - np.log(theirs.chances + WRONG)
                passed = bool(passes(gains, kept))
                if kept.any():
                    gain = float((ours.chances - theirs.chances)[kept].mean())
        if not passed or self.trust == 0:
            return Aggregated(
                self.fedavg, self.updates, self.usual, accuracies, learned=False, gain=gain
            )
        if self.trust < 1:
            shares, step, momentum = partly(self.trust, self.usual, shares, step, momentum)
            model = moved(shares, self.models, self.start, self.memory.move, step, momentum)
        return Aggregated(model, self.updates, shares, accuracies, step, momentum, gain=gain)


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


def _kept_samples(count: int) -> np.ndarray:
    """The samples that the gate keeps from the policy: every fourth, as in the simulator."""
    return np.arange(count) % 4 == 3


# In one program: operation by operation, every number of clients compiles dozens of them.
_channels = eqx.filter_jit(lambda state, submission: state(submission))


@eqx.filter_jit
def _decide(policy: Policy, observation: Observation, mask: Mask) -> Decision:
    if isinstance(policy, AggregationPolicy):
        return policy.decide(observation, mask)
    return Decision(policy(observation, mask), jnp.ones(()), jnp.zeros(()))


def _array(values: np.ndarray | list[int] | float) -> Array:
    return jax.device_put(np.asarray(values, np.float32))


def _require_fit(policy: Any, state: str, window: int, classes: int) -> None:
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

    def reads(channels: int) -> bool:
        """Whether the policy takes histories of this shape to one share for each client."""
        observation = Observation(jnp.zeros((3, window, channels)), jnp.full(3, 1 / 3))
        try:
            shares = eqx.filter_eval_shape(policy, observation, jnp.ones(3, bool))
        except Exception:  # JAX has no one error for shapes that do not meet
            return False
        return shares.shape == (3,)

    channels = STATES[state].channels(classes)
    if not reads(channels):
        fits = [name for name, other in STATES.items() if reads(other.channels(classes))]
        found = f"it fits {' or '.join(map(repr, fits))}" if fits else "it fits none of the states"
        raise InputError(
            f"policy: it was trained for another state than {state!r} ({channels} channels of "
            f"{classes} classes over {window} rounds): {found}; name that state, or train one for "
            f"{state!r}"
        )


Loss = Callable[[dict[str, Array]], Float[Array, ""]]


class ShareGradient(GuardedFedAvg):
    """FedAvg with shares that descend the server's own loss, and with momentum.

    In every round the server descends its own loss L(sum_i a_i v_i) in the shares a, from FedAvg's and
    pulled back to them, and repeats a part of its last move. With a few dozen samples it fits their noise;
    there `LearnedAggregation` does better.

    Parameters
    ----------
    loss
        The server's loss of a model, a dict of JAX arrays by name; JAX must be able to differentiate it.
    steps, step_size
        Steps of gradient descent on the log shares, and the length of each.
    pull
        Weight of the divergence from FedAvg's shares beside the loss.
    momentum
        How much of its last move the server repeats.
    max_update_ratio
        An update whose norm is more than this many times the median one is left out.
    options
        As in Flower's `FedAvg`; `fraction_evaluate` is 0 unless it is given.

    Examples
    --------
    >>> ShareGradient(lambda model: (model["x"] ** 2).sum(), steps=5).steps
    5
    """

    def __init__(
        self,
        loss: Loss,
        *,
        steps: int = 20,
        step_size: float = 0.5,
        pull: float = 0.05,
        momentum: float = 0.5,
        max_update_ratio: float = 10.0,
        **options: Any,
    ):
        super().__init__(1, max_update_ratio, options)
        if steps < 1 or not 0 <= momentum < 1:
            raise InputError(
                f"ShareGradient: steps {steps} must be at least 1 and momentum {momentum} in [0, 1)"
            )
        self.loss, self.steps, self.step_size, self.pull = loss, steps, step_size, pull
        self.momentum = momentum
        self._begin()

    def make_model(
        self, server_round: int, updates: list[ClientUpdate], start: Model
    ) -> Aggregated:
        """The model of the shares that descend the loss, moved on."""
        counts = self._counts(updates)
        stacked = {
            name: jnp.stack([jnp.asarray(update.model[name]) for update in updates])
            for name in updates[0].model
        }
        plain = jnp.asarray(counts / counts.sum(), jnp.float32)
        options = {"steps": self.steps, "step_size": self.step_size, "pull": self.pull}
        shares = np.asarray(_descended(self.loss, stacked, plain, options), np.float64)
        if not np.isfinite(shares).all():
            _log.warning("the loss is not finite; FedAvg's shares in this round")
            shares = counts
        shares = shares / shares.sum()
        models = [update.model for update in updates]
        made = moved(shares, models, start, self._memory.move, 1.0, self.momentum)
        return Aggregated(made, updates, shares, [np.nan] * len(updates), 1.0, self.momentum)


@eqx.filter_jit
def _descended(
    loss: Loss, models: dict[str, Array], plain: Array, options: dict[str, Any]
) -> Array:
    def of_shares(shares):
        return loss({
            name: jnp.tensordot(shares, own.astype(jnp.float32), 1) for name, own in models.items()
        })  # fmt: skip

    with jax.default_matmul_precision("highest"):
        return descend_shares(of_shares, plain, jnp.ones(len(plain), bool), **options)
