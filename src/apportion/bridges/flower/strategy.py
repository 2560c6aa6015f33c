"""A trained policy as a Flower strategy: learned shares aggregate the models of a real federation.

In round n the server scores every submitted model v_{i,n} on its own data, the policy turns each
client's last H states into shares a_{i,n}, a step and a momentum, and the aggregate is sent out again
if it passes the gate. Clients are known by their node id alone, may come and go, and are trusted with
nothing. In the simulator and here the same state functions show the policy the same numbers. Models are
tried one at a time, so that memory holds the replies and two models more, however many clients there are.

`ShareGradient` needs no policy, but a loss that JAX can differentiate.
"""

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
from apportion.domains.federated.domain import MAX_GAIN, round_gains
from apportion.domains.federated.policy import (
    AggregationPolicy,
    Decision,
    shipped_blind_policy,
    shipped_policy,
)
from apportion.domains.federated.states import (
    QUARTER,
    Blind,
    Invariant,
    SampleScores,
    ServerInfo,
    Submission,
)
from apportion.errors import InputError, optional_import
from apportion.problem import Observation
from apportion.runs.policy_file import load_about, load_policy
from apportion.simplex import Mask

with optional_import("LearnedAggregation needs Flower", "federated"):
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg, Result

from apportion.bridges.flower.server_data import Answers, Judged, ServerData
from apportion.bridges.flower.updates import (
    ClientMemory,
    ClientUpdate,
    Model,
    fedavg_shares,
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
        self.window, self.max_update_ratio, self._started = window, max_update_ratio, False

    @abstractmethod
    def make_model(
        self, server_round: int, updates: list[ClientUpdate], start: Model
    ) -> Aggregated:
        """The model of a round's usable replies, which started from `start`."""

    def start(self, *args: Any, **options: Any) -> Result:
        """As in FedAvg."""
        self._started = True
        try:
            return super().start(*args, **options)
        finally:
            self._started = False

    def summary(self) -> None:
        """As in FedAvg; inside a wrapper, whose own `start` it is that asks for this, refuse to run."""
        if not self._started:
            raise InputError(
                f"{type(self).__name__} inside another strategy: differential privacy's noise protects an "
                "average of equal weights, and learned shares, step and momentum would void that; use "
                "FedAvg inside it"
            )
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As in FedAvg, remembering the model sent out, which replies are compared with, and to whom."""
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
        silent, with the accuracy of its model on the server's samples and its share. Rounds are counted
        from the first of the run, those before a server died among them.
        """
        return pd.DataFrame(
            self._memory.notes, columns=["round", "node", "outcome", "accuracy", "share"]
        )

    def _begin(self) -> None:
        """Forget the clients of an earlier run."""
        self._memory, self._resumed = ClientMemory(self.window), 0
        self._asked: set[int] = set()
        self._norms: deque[list[float]] = deque(maxlen=self.window)

    def _note(
        self, n: int, node: int, outcome: str, accuracy: float = np.nan, share: float = 0.0
    ) -> None:
        # A server that goes on counts its rounds from 1 again.
        self._memory.notes.append((self._resumed + n, node, outcome, accuracy, share))

    def _fedavg(self, updates: list[ClientUpdate], accuracies: list[float]) -> Aggregated:
        shares = fedavg_shares(sample_counts(updates, self.weighted_by_key))
        model = weighted_sum(shares, [update.model for update in updates])
        return Aggregated(model, updates, shares, accuracies, learned=False)


class LearnedAggregation(GuardedFedAvg):
    """FedAvg with shares, step and momentum decided by a trained policy, and with guards at the door.

    The policy's model is taken only where it is not worse than FedAvg's on samples that the policy does not
    see. Replies that cannot be used are left out; where no model can be scored, the round is FedAvg's, with
    a warning in Flower's log.

    Parameters
    ----------
    predict
        Answers of a model (an `ArrayRecord`) for the server's samples: classes, or a row of scores or of
        probabilities a sample. A server without samples leaves it out: its policy goes by the updates'
        geometry and the clients' counts alone.
    labels
        The right classes of the server's samples, 0, 1, ...
    policy
        One trained in the simulator (`apportion train federated`); else the one that comes with the
        package, for a server with samples or without. It serves any number of clients and classes.
    score
        In place of `predict` and `labels`, for tasks without classes: a model's loss on each of the
        server's samples.
    window
        Rounds of a client's past that the policy sees; `load` takes them from the policy's folder.
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
        policy: AggregationPolicy | None = None,
        *,
        score: Answers | None = None,
        window: int = 5,
        max_update_ratio: float = 10.0,
        gate: bool = True,
        alpha: float | None = None,
        max_gain: float = MAX_GAIN,
        checkpoint_path: Path | str | None = None,
        **options: Any,
    ):
        super().__init__(window, max_update_ratio, options)
        self.server = ServerData(predict, labels, score)
        if not 0 < max_gain <= 1:
            raise InputError(f"max_gain is {max_gain}; it must be above 0 and at most 1")
        self.gate, self.alpha, self.max_gain = gate and not self.server.empty, alpha, max_gain
        if alpha is not None and not (0 < alpha < 1 and self.gate):
            raise InputError(
                f"alpha {alpha:g}: trust is earned on the gate's samples, with alpha above 0 and below 1; "
                "give predict and labels, or score, and leave gate on"
            )
        if policy is None:
            policy = shipped_blind_policy() if self.server.empty else shipped_policy()
        self.policy, self.state = policy, _state_of(policy)
        if self.server.empty and self.state.reads == "samples":
            raise InputError(
                "policy: it reads the server's samples: give predict and labels, or score; for a server "
                "without any leave the policy out, or train one with --state blind"
            )
        self.checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path)
        self._begin()

    @classmethod
    def load(
        cls,
        folder: Path | str,
        predict: Answers | None = None,
        labels: Any = None,
        **options: Any,
    ) -> "LearnedAggregation":
        """The strategy with the policy of a run's folder.

        Raises
        ------
        InputError
            The folder holds no policy, or one of another problem.
        """
        policy, about = load_policy(folder), load_about(folder)
        if not isinstance(policy, AggregationPolicy):
            raise InputError(
                f"{folder}: holds a {type(policy).__name__}, trained for the job "
                f"{about.get('job', 'unknown')!r}, and no AggregationPolicy; give a folder of `apportion "
                "train federated`, whose learner gradient makes one"
            )
        options.setdefault("window", about.get("window", 5))
        return cls(predict, labels, policy, **options)

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
        made = self._decide(scored, start) if scored else None
        if made is None:
            _log.warning(
                "round %d: no model can be scored; FedAvg instead of learned shares", server_round
            )
            made = self._fedavg(updates, [np.nan] * len(updates))
        else:
            for update, own in judged:
                if own is None:
                    self._note(server_round, update.node, "not scored")
            if not made.learned:
                _log.info("round %d: FedAvg's model, not the policy's", server_round)
        self._made, self._learned = made.model, made.learned
        return made

    def _decide(self, scored: list[tuple[ClientUpdate, Judged]], start: Model) -> Aggregated | None:
        """The policy's model of the scored replies, or FedAvg's where the gate says so; None where the
        server's samples fail it, or it decides on no number.
        """
        updates, judged = [update for update, _ in scored], [own for _, own in scored]
        fedavg = self._fedavg(updates, [own.accuracy for own in judged])
        theirs = self.server.judged(fedavg.model)
        shown = self._shown(fedavg, theirs, judged, start)
        if shown is None:
            return None
        nodes = [update.node for update in updates]
        decision = _decision(self.policy, *self._memory.observation(nodes, shown))
        shares = np.asarray(decision.shares, np.float64)[: len(updates)]
        if not np.isfinite(shares).all():
            return None
        models, move, trust = [own.model for own in updates], self._memory.move, self.trust
        way = (shares / shares.sum(), float(decision.step), float(decision.momentum))
        model = moved(models, start, move, *way)
        passed, gain = True, np.nan
        if self.gate:
            # It passes where FedAvg's model cannot be tried, but not where it cannot be itself.
            ours = self.server.judged(model)
            passed = ours is not None
            if ours is not None and theirs is not None:
                kept = _kept_samples(len(ours.chances))
                gains = np.log(ours.chances + WRONG) - np.log(theirs.chances + WRONG)
                passed = bool(passes(gains, kept))
                if kept.any():
                    gain = float((ours.chances - theirs.chances)[kept].mean())
        if not passed or trust == 0:
            made = replace(fedavg, gain=gain)
        else:
            if trust < 1:
                way = partly(trust, fedavg.shares, *way)
                model = moved(models, start, move, *way)
            shares, step, momentum = way
            made = Aggregated(model, updates, shares, fedavg.accuracies, step, momentum, gain=gain)
        self._memory.keep(nodes, shown, made.shares)
        return made

    def _shown(
        self, fedavg: Aggregated, ahead: Judged | None, judged: list[Judged], start: Model
    ) -> np.ndarray | None:
        """What the policy sees of each client; None where it reads samples and they fail it."""
        models = [update.model for update in fedavg.updates]
        scores = None
        if self.state.reads == "samples":
            before = self.server.judged(start)
            if before is None or ahead is None:
                return None
            towards = []
            for model, own in zip(models, judged, strict=True):
                part = weighted_sum(np.array([1 - QUARTER, QUARTER]), [fedavg.model, model])
                towards.append((self.server.judged(part) or own).chances)
            scores = SampleScores(
                _array(np.stack([own.chances for own in judged])),
                _array(np.stack(towards)),
                _array(ahead.chances),
                _array(before.chances),
                jax.device_put(~(_kept_samples(len(ahead.chances)) & self.gate)),
            )
        rows = geometry(models, start, self._memory.move)
        info = ServerInfo(
            _array(sample_counts(fedavg.updates, self.weighted_by_key)),
            _array([self._memory.absence(update.node) for update in fedavg.updates]),
            _array(rows[-1]),
            _array(float(self._memory.rounds)),
        )
        present = jax.device_put(np.ones(len(models), bool))
        return np.asarray(
            _channels(self.state, Submission(_array(rows[:-1]), present, info, scores))
        )

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


# In one program each: operation by operation, every number of clients compiles dozens of them.
_channels = eqx.filter_jit(lambda state, submission: state(submission))


@eqx.filter_jit
def _decision(policy: AggregationPolicy, observation: Observation, mask: Mask) -> Decision:
    return policy.decide(observation, mask)


def _array(values: np.ndarray | list[int] | float) -> Array:
    return jax.device_put(np.asarray(values, np.float32))


def _state_of(policy: Any) -> Invariant | Blind:
    """The state that a policy reads; refuse what is no policy for clients."""
    if not isinstance(policy, AggregationPolicy) or policy.score.ndim != 1 or policy.head.cash:
        raise InputError(
            f"policy: {type(policy).__name__} is not one policy that shares all out among clients; give "
            "an AggregationPolicy trained in the simulator, or its folder to LearnedAggregation.load"
        )
    for state in (Invariant(), Blind()):
        if state.channels == policy.channels:
            return state
    raise InputError(
        f"policy: it reads {policy.channels} channels, and a client shows {Invariant.channels}, or "
        f"{Blind.channels} to a server without samples; train one by `apportion train federated`"
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
    momentum
        How much of its last move the server repeats.
    max_update_ratio, options
        As in `LearnedAggregation`.

    Examples
    --------
    >>> ShareGradient(lambda model: (model["x"] ** 2).sum()).momentum
    0.5
    """

    def __init__(
        self, loss: Loss, *, momentum: float = 0.5, max_update_ratio: float = 10.0, **options: Any
    ):
        super().__init__(1, max_update_ratio, options)
        if not 0 <= momentum < 1:
            raise InputError(f"ShareGradient: momentum {momentum} must be in [0, 1)")
        self.loss, self.momentum = loss, momentum
        self._begin()

    def make_model(
        self, server_round: int, updates: list[ClientUpdate], start: Model
    ) -> Aggregated:
        """The model of the shares that descend the loss, moved on."""
        models = [update.model for update in updates]
        plain = fedavg_shares(sample_counts(updates, self.weighted_by_key))
        stacked = {n: jnp.asarray(np.stack([own[n] for own in models])) for n in start}
        shares = np.asarray(_descended(self.loss, stacked, _array(plain)), np.float64)
        if not np.isfinite(shares).all():
            _log.warning("the loss is not finite; FedAvg's shares in this round")
            shares = plain
        shares = shares / shares.sum()
        made = moved(models, start, self._memory.move, shares, 1.0, self.momentum)
        return Aggregated(made, updates, shares, [np.nan] * len(updates), 1.0, self.momentum)


@eqx.filter_jit
def _descended(loss: Loss, models: dict[str, Array], plain: Array) -> Array:
    def of_shares(shares):
        return loss({
            name: jnp.tensordot(shares, own.astype(jnp.float32), 1) for name, own in models.items()
        })  # fmt: skip

    with jax.default_matmul_precision("highest"):
        return descend_shares(of_shares, plain, jnp.ones(len(plain), bool))
