"""A trained policy as a Flower strategy: learned shares aggregate the models of a real federation.

In round n the server scores every submitted model v_{i,n} on its own data, the policy turns each
client's last H states into shares a_{i,n}, a step and a momentum, and the aggregate is sent out again
if it passes the gate. Clients are known by their node id alone, may come and go, and are trusted with
nothing.
"""

import logging
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from apportion.certificate import Gains
from apportion.domains.federated.domain import MAX_ROUND_GAIN, round_gains
from apportion.domains.federated.policy import shipped_blind_policy, shipped_policy
from apportion.domains.federated.states import client_state
from apportion.errors import InputError, needing
from apportion.policy import Policy
from apportion.runs.policy_file import load_about, load_policy

with needing("LearnedAggregation needs Flower", "federated"):
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg

from apportion.bridges.flower.server_data import Answers, ServerData
from apportion.bridges.flower.strategy import Aggregated, Round, require_fit, split_scored
from apportion.bridges.flower.updates import (
    ClientMemory,
    ClientUpdate,
    read_model,
    sample_counts,
    usable,
    weighted_sum,
    write_model,
)

_log = logging.getLogger("flwr")


class LearnedAggregation(FedAvg):
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
    largest
        An update whose norm is more than this many times the median one is huge.
    gate
        Whether the policy's model has to pass; a quarter of the samples is for that.
    alpha
        With a number the policy has to earn its place: models are FedAvg's, moved towards the policy's by
        the share of trust that its gains have earned in the rounds before, as in `apportion.Gate`. A policy
        that is never better is ever trusted in full with probability alpha at most.
    bound
        What a round's gain counts at most, in these bets and in `gains`.
    keep
        A file for the strategy's memory, written after every round. Where it is there already, the
        strategy goes on from it: `kept_model` is the model to begin with.
    stop_when_all_fail
        Whether a round without any usable reply ends the run with an error.
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
        largest: float = 10.0,
        gate: bool = True,
        alpha: float | None = None,
        bound: float = MAX_ROUND_GAIN,
        keep: Path | str | None = None,
        stop_when_all_fail: bool = False,
        **options: Any,
    ):
        options.setdefault("fraction_evaluate", 0.0)
        super().__init__(**options)
        self.server = ServerData(predict, labels, score)
        if not largest > 1 or window < 1 or not 0 < bound <= 1:
            raise InputError(
                f"LearnedAggregation: largest {largest} must be over 1, window {window} at least 1 and "
                f"bound {bound} above 0 and at most 1"
            )
        state = state or ("blind" if self.server.empty else "invariant")
        shipped = shipped_blind_policy if state == "blind" else shipped_policy
        self.policy = shipped() if policy is None else policy
        self.state, self.window = client_state(state), window
        self.largest, self.gate = largest, gate and not self.server.empty
        self.alpha, self.bound = alpha, bound
        if alpha is not None and not (0 < alpha < 1 and self.gate):
            raise InputError(
                f"alpha {alpha:g}: trust is earned on the gate's samples, with alpha above 0 and below 1; "
                "give predict and labels, or score, and leave gate on"
            )
        self.keep = None if keep is None else Path(keep)
        self.stop_when_all_fail = stop_when_all_fail
        if self.server.empty and self.state.reads != "nothing":
            raise InputError(
                f"state {state!r} reads the server's samples: give predict and labels, or score; for a "
                "server without any leave the state out, or take 'blind'"
            )
        if self.server.classes == 0 and self.state.reads == "classes":
            raise InputError(
                f"state {state!r} reads classes, and a score has none; use 'invariant'"
            )
        require_fit(self.policy, state, window, max(self.server.classes, 1))
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
        """The last model of the run whose memory `keep` holds; None before the first."""
        return None if self._made is None else write_model(self._made)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As in FedAvg, remembering the model sent out, which replies are compared with, and to whom."""
        _refuse_noise(sys._getframe(1).f_locals.get("self"))
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
        replies = list(replies)
        usual = [norm for norms in self._norms for norm in norms]
        updates, refused, start = usable(replies, self._memory.start, usual, self.largest)
        self._note_refused(server_round, replies, refused)
        if not updates or start is None:
            self._memory.end_round()
            return self._no_model(server_round, refused)
        self._norms.append([update.norm for update in updates])
        self.server.begin_round(start)
        scored, judged, not_scored = split_scored(updates, self.server)
        counts = sample_counts(scored, self.weighted_by_key, self.largest)
        seen = (start, self._memory, self.server, counts)
        here = Round(scored, judged, *seen, self.gate, self.trust)
        made = self._decided(server_round, here)
        if made is None:
            made = self._fedavg(server_round, updates)
            here = None
        else:
            for node in not_scored:
                self._note(server_round, node, "not scored")
        kept = updates if here is None else here.updates
        right = [np.nan] * len(kept) if here is None else [own.accuracy for own in here.judged]
        for update, share, accuracy in zip(kept, made.shares, right, strict=True):
            self._note(server_round, update.node, "kept", accuracy, float(share))
        self._memory.end_round(made.gain)
        self._made = made.model
        if self.keep is not None:
            self._memory.save(self.keep, self._made)
        left_out = len(refused) + len(not_scored)
        return write_model(self._made), self._metrics(kept, made, left_out)

    def to_frame(self) -> pd.DataFrame:
        """What became of every client asked: kept, failed, misshapen, not finite, huge, not scored or
        silent, with the accuracy of its model on the server's samples and its share.
        """
        return pd.DataFrame(self._notes, columns=["round", "node", "outcome", "accuracy", "share"])

    def gains(self) -> Gains:
        """What the policy's model gained over FedAvg's in each round, in the chance of the right answer
        to the samples that it does not see: `strategy.gains().certify(block=5)` says whether it has
        earned its place on these samples, which are the same every round.
        """
        return round_gains(self._memory.gains, self.bound)

    @property
    def trust(self) -> float:
        """The policy's part in the next model, 0 to 1; 1 where it need not earn its place."""
        return 1.0 if self.alpha is None else self.gains().certify(alpha=self.alpha).trust

    def _begin(self) -> None:
        """Forget the clients of an earlier run; go on from a file that is there."""
        self._memory, self._made = ClientMemory(self.window), None
        if self.keep is not None and self.keep.exists():
            self._memory, self._made = ClientMemory.restored(self.keep, self.window)
        self._resumed = self._memory.rounds
        self._asked: set[int] = set()
        self._norms: deque[list[float]] = deque(maxlen=self.window)
        self._notes: list[tuple[int, int, str, float, float]] = []

    def _note(
        self, n: int, node: int, outcome: str, accuracy: float = np.nan, share: float = 0.0
    ) -> None:
        self._notes.append((n, node, outcome, accuracy, share))

    def _note_refused(self, n: int, replies: list[Message], refused: dict[int, str]) -> None:
        for node, why in refused.items():
            self._note(n, node, why.partition(":")[0])
            _log.warning("round %d: node %d is left out (%s)", n, node, why)
        heard = {message.metadata.src_node_id for message in replies}
        for node in sorted(self._asked - heard):
            self._note(n, node, "silent")

    def _no_model(self, n: int, refused: dict[int, str]) -> tuple[None, None]:
        why = next(iter(refused.values()), "nobody replied")
        text = f"round {n}: no usable reply ({len(refused)} refused; {why}); the model stays"
        if self.stop_when_all_fail:
            raise RuntimeError(text)
        _log.error(text)
        return None, None

    def _decided(self, n: int, here: Round) -> Aggregated | None:
        """The round's model by the policy, behind the gate; None where the samples fail it."""
        if not here.updates:
            return None
        shown = here.shown(self.state)
        made = None if shown is None else here.decide(self.policy, shown)
        if shown is None or made is None:
            return None
        if not made.learned:
            _log.info("round %d: FedAvg's model, trust in the policy's is %.2f", n, here.trust)
        self._memory.keep(here.nodes, shown, made.shares)
        return made

    def _fedavg(self, n: int, updates: list[ClientUpdate]) -> Aggregated:
        _log.warning("round %d: no model can be scored; FedAvg instead of learned shares", n)
        counts = sample_counts(updates, self.weighted_by_key, self.largest)
        shares = counts / counts.sum()
        model = weighted_sum(shares, [update.model for update in updates])
        return Aggregated(model, shares, learned=False)

    def _metrics(self, kept: list[ClientUpdate], made: Aggregated, refused: int) -> MetricRecord:
        try:
            contents = [update.content for update in kept]
            metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # clients may report anything, or nothing
            _log.warning("the clients' metrics cannot be averaged (%s)", error)
            metrics = MetricRecord()
        metrics["clients-kept"] = len(kept)
        metrics["clients-refused"] = refused
        metrics["largest-share"] = float(made.shares.max())
        metrics["server-step"], metrics["server-momentum"] = made.step, made.momentum
        metrics["gate-passed"] = int(made.learned)
        metrics["trust"] = self.trust
        return metrics


def _refuse_noise(caller: Any) -> None:
    """Flower's wrappers for differential privacy add noise that is measured for equal weights."""
    if type(caller).__name__.startswith("DifferentialPrivacy"):
        raise InputError(
            f"LearnedAggregation inside {type(caller).__name__}: its noise protects an average of equal "
            "weights, and learned shares, step and momentum would void that; use FedAvg inside it"
        )
