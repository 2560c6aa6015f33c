"""A trained policy as a Flower strategy: learned shares aggregate the models of a real federation.

In round n the server scores every submitted model v_{i,n} on its own samples, the policy turns each
client's last H states into shares a_{i,n}, a step and a momentum, and the gate chooses between its
aggregate and FedAvg's. Clients are identified by node id, may come and go, and are not trusted. The state
functions are those of the simulator. Models are evaluated one at a time, so that memory beyond the replies
does not grow with the number of clients.

`ShareGradient` needs no policy, but it needs a loss that JAX can differentiate.
"""

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float

from apportion.domains.federated.aggregators import STEP_STANDARD_ERRORS, descend_shares
from apportion.domains.federated.policy import AggregationPolicy, Decision, shipped_policy
from apportion.domains.federated.states import (
    QUARTER,
    UNCHANGED_RATIO,
    Invariant,
    SampleScores,
    Submission,
    is_trusted,
)
from apportion.errors import InputError, optional_import
from apportion.problem import Observation
from apportion.runs.policy_file import load_about, load_policy
from apportion.runs.settings import suggest
from apportion.simplex import Mask

with optional_import("LearnedAggregation needs Flower", "federated"):
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg, Result

from apportion.bridges.flower.server_data import Answers, Judged, ServerData, Tune, kept_samples
from apportion.bridges.flower.updates import (
    ClientMemory,
    ClientNote,
    ClientUpdate,
    ModelArrays,
    RoundNote,
    fedavg_shares,
    geometry,
    moved,
    padded_width,
    read_model,
    sample_counts,
    shapes_of,
    usable,
    weighted_sum,
    write_model,
)

_log = logging.getLogger("flwr")
POLICYS, FEDAVGS, LAST = (
    "the policy's",
    "FedAvg's",
    "the last one, because all replies were harmful",
)
TUNED = "tuned on the server's samples"
"""Source of a round's model."""
_RIGHT, _LOW_LOSS = "right", "with a loss below the mean of the model sent out"
"""What the accuracy of a client counts, with `predict` and with `score`."""
FEW_CLIENTS = 15
"""Smallest number of known clients without tuning on the server's samples."""


@dataclass(frozen=True)
class _Aggregated:
    """The model of a round and how it was made."""

    model: ModelArrays
    updates: list[ClientUpdate]
    """The updates that the model aggregates."""
    shares: np.ndarray
    accuracies: list[float]
    """Accuracy of each update's model on the server's samples; NaN if not evaluated."""
    step: float = 1.0
    momentum: float = 0.0
    by: str = POLICYS
    """Source of the model: the policy, FedAvg, or the last round."""
    accuracy: float = float("nan")
    """Accuracy of the model on the server's samples."""


RARE_CLIENT_ROUNDS = 5
"""A client that takes part in less than one in this many rounds is rare. If a tenth of 100 clients
takes part in a round and the clients nearly converge, `ShareGradient` is a point more accurate."""


class FedAvgOptions(TypedDict, total=False):
    """Options of Flower's `FedAvg`, with its names and types."""

    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    configrecord_key: str
    train_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None
    evaluate_metrics_aggr_fn: Callable[[list[RecordDict], str], MetricRecord] | None


class GuardedFedAvg(FedAvg):
    """FedAvg that leaves out replies that failed, are misshapen, not finite or huge.

    An update is huge relative to the updates of recent and of first rounds. A round without any
    usable reply keeps the model.
    """

    def __init__(self, window: int, max_update_ratio: float, options: FedAvgOptions):
        options.setdefault("fraction_evaluate", 0.0)
        known = FedAvgOptions.__annotations__ | type(self).__init__.__annotations__
        for name in options.keys() - FedAvgOptions.__annotations__.keys():
            raise InputError(
                f"{type(self).__name__}: no option is called {name!r}{suggest(name, known)}"
            )
        super().__init__(**options)
        if not max_update_ratio > 1 or window < 1:
            raise InputError(
                f"max_update_ratio {max_update_ratio} must be over 1 and window {window} at least 1"
            )
        self.window, self.max_update_ratio = window, max_update_ratio
        self._started = self._ran = False
        self._right = _RIGHT

    @abstractmethod
    def make_model(
        self, server_round: int, updates: list[ClientUpdate], start: ModelArrays
    ) -> _Aggregated:
        """Aggregate a round's usable replies, which started from `start`."""

    def start(self, *args: Any, **options: Any) -> Result:
        """Run the strategy, as in FedAvg."""
        self._started = self._ran = True
        try:
            return super().start(*args, **options)
        finally:
            self._started = False

    def summary(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Describe the run: rounds, sources of models, accuracy, shares, and clients left out.

        Flower calls it at the start of a run, which also logs FedAvg's options. A call before the
        first round and outside `start` comes from a wrapping strategy and raises InputError.
        """
        if self._started:
            super().summary()
        elif self._memory.rounds == self._resumed:
            self._refuse_wrapper()
        return _summarize(self._memory.round_notes, self._memory.notes, self._right)

    def _refuse_wrapper(self) -> None:
        raise InputError(
            f"{type(self).__name__} inside another strategy: differential privacy's noise protects an "
            "average of equal weights, and learned shares, step and momentum would void that; use "
            "FedAvg inside it"
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Configure as FedAvg does, and store the model and the nodes that it is sent to."""
        if self._ran and not self._started:
            self._refuse_wrapper()
        if server_round == 1 and self._memory.rounds > self._resumed:
            self._begin()
        model = read_model(arrays)
        if self._memory.rounds == self._resumed:
            self.try_out(model)
        self._memory.send(model)
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._asked = {message.metadata.dst_node_id for message in messages}
        return messages

    def try_out(self, model: ModelArrays) -> None:
        """Check the first model, before any client trains it."""

    def welcome(self, huge: ClientUpdate, others: list[ClientUpdate], start: ModelArrays) -> bool:
        """Whether to accept a huge update."""
        return False

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies; (None, None), which keeps the model, if none is usable."""
        replies, start = list(replies), self._memory.start
        if start is None:
            raise InputError(f"{type(self).__name__}: configure_train comes before aggregate_train")
        updates, refused = usable(replies, start)
        updates = self._without_huge(updates, refused, start)
        for node, why in refused.items():
            self._note(server_round, node, why.partition(":")[0])
            _log.warning("round %d: node %d is left out (%s)", server_round, node, why)
        for node in sorted(self._asked - {message.metadata.src_node_id for message in replies}):
            self._note(server_round, node, "silent")
        if not updates:
            note = RoundNote(self._resumed + server_round, "the last one, without replies", np.nan)
            self._memory.end_round(note)
            why = next(iter(refused.values()), "no client replied")
            text = "round %d: no usable reply (%d refused; %s); the model stays"
            _log.error(text, server_round, len(refused), why)
            return None, None
        made = self.make_model(server_round, updates, start)
        outcome = "harmful" if made.by == LAST else "kept"
        for update, share, right in zip(made.updates, made.shares, made.accuracies, strict=True):
            self._note(server_round, update.node, outcome, right, float(share))
        self._memory.made = made.model
        note = RoundNote(self._resumed + server_round, made.by, made.accuracy)
        self._memory.end_round(note)
        try:
            contents = [update.content for update in made.updates]
            metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # clients may report anything
            _log.warning("the clients' metrics cannot be averaged (%s)", error)
            metrics = MetricRecord()
        metrics["clients-kept"] = len(made.updates)
        metrics["clients-refused"] = len(refused) + len(updates) - len(made.updates)
        metrics["largest-share"] = float(made.shares.max())
        metrics["server-step"], metrics["server-momentum"] = made.step, made.momentum
        return write_model(made.model), metrics

    def _without_huge(
        self, updates: list[ClientUpdate], refused: dict[int, str], start: ModelArrays
    ) -> list[ClientUpdate]:
        """Move huge updates to `refused`, unless `welcome` accepts them."""
        limit = self.max_update_ratio * self._memory.usual_norm([own.norm for own in updates])
        others = [own for own in updates if own.norm <= limit]
        for own in updates:
            if own.norm > limit and not self.welcome(own, others, start):
                refused[own.node] = f"huge: its update has norm {own.norm:.3g}, over {limit:.3g}"
        return [own for own in updates if own.node not in refused]

    def to_frame(self) -> pd.DataFrame:
        """Return a row per round and client: outcome, accuracy on the server's samples, and share.

        With `score`, the accuracy is the fraction of samples whose loss is below the mean loss of the
        model that the round started with.
        Outcomes are kept, failed, misshapen, not finite, huge, wrong, unchanged, harmful, not scored and
        silent. A resumed server continues the count of rounds.
        """
        return pd.DataFrame(self._memory.notes, columns=pd.Index(ClientNote._fields))

    def _begin(self) -> None:
        """Start with an empty memory."""
        self._memory, self._resumed = ClientMemory(self.window), 0
        self._asked: set[int] = set()

    def _note(
        self, n: int, node: int, outcome: str, accuracy: float = np.nan, share: float = 0.0
    ) -> None:
        # Flower counts the rounds of a resumed server from 1.
        note = ClientNote(self._resumed + n, node, outcome, accuracy, share)
        self._memory.notes.append(note)

    def _fedavg(self, updates: list[ClientUpdate], accuracies: list[float]) -> _Aggregated:
        shares = fedavg_shares(sample_counts(updates, self.weighted_by_key))
        model = weighted_sum(shares, [update.model for update in updates])
        return _Aggregated(model, updates, shares, accuracies, by=FEDAVGS)


def _summarize(rounds: list[RoundNote], notes: list[ClientNote], right: str = _RIGHT) -> str:
    """Describe the rounds and the clients of a run.

    >>> notes = [ClientNote(1, 7, "kept", 0.5, 1.0), ClientNote(1, 8, "not finite", np.nan, 0.0)]
    >>> print(_summarize([RoundNote(1, "FedAvg's", 0.5)], notes))
    1 rounds, 2 clients; the model was FedAvg's in 1
    accuracy on the server's samples: 0.500 after round 1
    mean shares: node 7 1.000
    left out: node 8 not finite 1 times
    """
    if not rounds:
        return "no round yet"
    whose = Counter(note.by for note in rounds)
    by = ", ".join(f"{name} in {count}" for name, count in whose.most_common())
    clients = len({own.node for own in notes})
    lines = [f"{len(rounds)} rounds, {clients} clients; the model was {by}"]
    tried = [note for note in rounds if np.isfinite(note.accuracy)]
    # With `score`, each round compares with another model.
    if tried and right == _RIGHT:
        ends = dict.fromkeys([tried[0], tried[-1]])
        words = ", ".join(f"{note.accuracy:.3f} after round {note.n}" for note in ends)
        lines.append(f"accuracy on the server's samples: {words}")
    shares: dict[int, list[float]] = {}
    for own in notes:
        if own.outcome == "kept":
            shares.setdefault(own.node, []).append(own.share)
    means = sorted(((float(np.mean(own)), node) for node, own in shares.items()), reverse=True)
    if means:
        some = ", ".join(f"node {node} {share:.3f}" for share, node in means[:5])
        rest = f", and {len(means) - 5} more" if len(means) > 5 else ""
        lines.append(f"mean shares: {some}{rest}")
    lines += _least_trusted(notes, right)
    out = Counter((own.node, own.outcome) for own in notes if own.outcome != "kept")
    if out:
        words = "; ".join(f"node {node} {why} {n} times" for (node, why), n in sorted(out.items()))
        lines.append(f"left out: {words}")
    return "\n".join(lines)


def _least_trusted(notes: list[ClientNote], right: str = _RIGHT) -> list[str]:
    """Name up to five clients with less than half of an equal share, and compare their accuracy.

    >>> wrong = ClientNote(1, 8, "wrong", 0.12, 0.0)
    >>> _least_trusted([ClientNote(1, 6, "kept", 0.8, 0.5), ClientNote(1, 7, "kept", 0.86, 0.5), wrong])
    ['least trusted: node 8: share 0.000, right on 12 % of the samples; the others on 83 %']
    """
    heard = Counter(own.round for own in notes if np.isfinite(own.accuracy))
    found: dict[int, list[tuple[float, float, float]]] = {}
    for own in notes:
        if np.isfinite(own.accuracy):
            found.setdefault(own.node, []).append((own.share, own.accuracy, 1 / heard[own.round]))
    means = {node: np.mean(own, 0) for node, own in found.items()}
    low = sorted(node for node, (share, _, equal) in means.items() if share < 0.5 * equal)
    others = [own[1] for node, own in means.items() if node not in low]
    if not low or not others:
        return []
    words = [
        f"node {node}: share {means[node][0]:.3f}, {right} on {100 * means[node][1]:.0f} % of the samples"
        for node in sorted(low, key=lambda node: means[node][0])[:5]
    ]
    known = f"the others on {100 * np.mean(others):.0f} %"
    return [f"least trusted: {'; '.join(words)}; {known}"]


class LearnedAggregation(GuardedFedAvg):
    """FedAvg with shares, step and momentum decided by a trained policy.

    Unusable replies are left out, and so are clients that are wrong on the server's samples. The
    policy's shares are used if they are not worse than FedAvg's on samples that the policy does not
    see. Its step and momentum are used if they improve the model on the samples. If no model can be
    scored, FedAvg aggregates the round and a warning is logged. `ShareGradient` is better if each
    client takes part in few rounds, such as a tenth of 100 clients a round, and nearly converges.

    Parameters
    ----------
    predict : callable, optional
        Maps a model (an `ArrayRecord`) to its answers for the server's samples: classes, or a row of scores
        or probabilities per sample.
    labels : array of int, optional
        Right classes of the server's samples, 0, 1, ...
    policy : AggregationPolicy, optional
        A policy of `apportion train federated`; by default the shipped one. It supports any number
        of clients and classes.
    score : callable, optional
        Maps a model to its loss on each of the server's samples. It replaces `predict` and `labels`
        for tasks without classes.
    tune : callable, optional
        Trains a model (an `ArrayRecord`) on the server's samples at the given positions and returns it. It
        is used in rounds with fewer than 15 known clients, if it improves the model on held-out samples.
    window : int
        Rounds of a client's past that the policy sees; `load` reads it from the policy's folder.
    max_update_ratio : float
        An update is huge if its norm exceeds this multiple of the median norm.
    gate : bool
        Whether the policy's model must pass the gate, which uses a quarter of the samples.
    screen : bool
        Whether clients that are wrong on the server's samples get no share in the round. A client
        is wrong if, on the classes that it names, it is right less than two thirds as often as the
        median client; with `score`, if its mean loss is above 1.5 times the median client's. Use False
        if most clients are malicious.
    checkpoint_path : path, optional
        File for the strategy's memory, written after every round. If it exists, the strategy resumes from
        it: start with `kept_model`.
    **options
        Options of Flower's `FedAvg`; `fraction_evaluate` is 0 by default.

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
        tune: Tune | None = None,
        window: int = 5,
        max_update_ratio: float = 10.0,
        gate: bool = True,
        screen: bool = True,
        checkpoint_path: Path | str | None = None,
        **options: Unpack[FedAvgOptions],
    ):
        super().__init__(window, max_update_ratio, options)
        self.server = ServerData(predict, labels, score, tune)
        self._right = _RIGHT if score is None else _LOW_LOSS
        self.gate, self.screen = gate, screen
        self.policy = shipped_policy() if policy is None else policy
        _check_policy(self.policy)
        self.checkpoint_path = None if checkpoint_path is None else Path(checkpoint_path)
        self._begin()

    @classmethod
    def load(
        cls, folder: Path | str, predict: Answers | None = None, labels: Any = None, **options: Any
    ) -> "LearnedAggregation":
        """Build the strategy with the policy of a run's folder.

        Raises
        ------
        InputError
            If the folder contains no policy, or a policy of another problem.
        """
        policy, about = load_policy(folder), load_about(folder)
        if not isinstance(policy, AggregationPolicy):
            raise InputError(
                f"{folder}: contains a {type(policy).__name__}, trained for the job "
                f"{about.get('job', 'unknown')!r}, not an AggregationPolicy; give a folder of `apportion "
                "train federated` with the learner gradient"
            )
        options.setdefault("window", about.get("window", 5))
        return cls(predict, labels, policy, **options)

    @property
    def kept_model(self) -> ArrayRecord | None:
        """The last model in the memory; None before the first."""
        made = self._memory.made
        return None if made is None else write_model(made)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies; (None, None), which keeps the model, if none is usable."""
        if self._memory.start is not None:
            self.server.begin_round(self._memory.start)
        arrays, metrics = super().aggregate_train(server_round, replies)
        if metrics is not None:
            metrics["gate-passed"] = int(self._memory.round_notes[-1].by == POLICYS)
            if self.checkpoint_path is not None:
                self._memory.save(self.checkpoint_path)
        return arrays, metrics

    def make_model(
        self, server_round: int, updates: list[ClientUpdate], start: ModelArrays
    ) -> _Aggregated:
        """Aggregate by the policy, after the gate; as FedAvg does if no model can be scored."""
        judged = [(update, self.server.judged(update.model)) for update in updates]
        scored = [(update, own) for update, own in judged if own is not None]
        before = self.server.judged(start)
        if self.screen and scored and before is not None:
            scored = self._screened(server_round, scored, before)
        made = self._decide(scored, start, before) if scored else None
        if made is None:
            text = "round %d: no model can be scored; FedAvg instead of learned shares"
            _log.warning(text, server_round)
            trusted = [update for update, _ in scored] or updates
            return self._fedavg(trusted, [np.nan] * len(trusted))
        for update, own in judged:
            if own is None:
                self._note(server_round, update.node, "not scored")
        if made.by == LAST:
            _log.error("round %d: all replies harm the model, which stays", server_round)
        elif made.by == FEDAVGS:
            _log.info("round %d: FedAvg's model, not the policy's", server_round)
        return made

    def _screened(
        self, server_round: int, scored: list[tuple[ClientUpdate, Judged]], before: Judged
    ) -> list[tuple[ClientUpdate, Judged]]:
        """Leave out clients that fail the screening, and note why."""
        doubted, norms = self._memory.doubted, np.array([update.norm for update, _ in scored])
        were_doubted = np.array([update.node in doubted for update, _ in scored])
        judged = [own for _, own in scored]
        trusted = is_trusted(
            *self.server.right_answers(judged, before, were_doubted),
            np.stack([own.known for own in judged]),
            norms,
            were_doubted,
            np.ones(len(scored), bool),
        )
        for (update, own), passes in zip(scored, trusted, strict=True):
            doubted.discard(update.node)
            if not passes:
                doubted.add(update.node)
                # The lower median, as in `is_trusted`.
                unchanged = update.norm < UNCHANGED_RATIO * np.sort(norms)[(len(norms) - 1) // 2]
                why = "unchanged" if unchanged else "wrong"
                self._note(server_round, update.node, why, own.accuracy)
        return [each for each, passes in zip(scored, trusted, strict=True) if passes]

    def try_out(self, model: ModelArrays) -> None:
        """Raise InputError if `predict` or `score` fails, or the memory is of another model."""
        self.server.try_out(model)
        made = self._memory.made
        if made is not None and shapes_of(made) != shapes_of(model):
            raise InputError(
                f"{self.checkpoint_path}: belongs to a model with other arrays or shapes; name another "
                "file"
            )

    def welcome(self, huge: ClientUpdate, others: list[ClientUpdate], start: ModelArrays) -> bool:
        """Accept a huge update if a quarter step towards it improves FedAvg's model of the others.

        The improvement must exceed its standard error.
        """
        base = self._fedavg(others, []).model if others else start
        near = weighted_sum(np.array([1 - QUARTER, QUARTER]), [base, huge.model])
        without, with_it = self.server.judged(base), self.server.judged(near)
        return without is not None and with_it is not None and with_it.is_better(without)

    def _decide(
        self, scored: list[tuple[ClientUpdate, Judged]], start: ModelArrays, before: Judged | None
    ) -> _Aggregated | None:
        """Choose between the policy's model, FedAvg's and the last one.

        Returns None if the policy's inputs cannot be scored or its shares are not finite.
        """
        updates, judged = [update for update, _ in scored], [own for _, own in scored]
        fedavg = self._fedavg(updates, [own.accuracy for own in judged])
        theirs = self.server.judged(fedavg.model)
        shown = self._shown(fedavg, before, theirs, judged, start)
        if shown is None:
            return None
        nodes = [update.node for update in updates]
        decision = _decision(self.policy, *self._memory.observation(nodes, shown))
        shares = np.asarray(decision.shares, np.float64)[: len(updates)]
        if not np.isfinite(shares).all():
            return None
        shares, models = shares / shares.sum(), [own.model for own in updates]
        model = weighted_sum(shares, models)
        found = self.server.judged(model)
        passed = not self.gate or found is not None
        if self.gate and found is not None and theirs is not None:
            passed = found.passes_gate(theirs)
        if not passed:
            shares, model, found = fedavg.shares, fedavg.model, theirs
        way = (shares, float(decision.step), float(decision.momentum))
        further = moved(models, start, self._memory.move, *way)
        tried = self.server.judged(further)
        if not self.gate or (tried and found and tried.is_better(found, STEP_STANDARD_ERRORS)):
            model, found = further, tried
        else:
            way = (shares, 1.0, 0.0)
        by = POLICYS if passed else FEDAVGS
        made = _Aggregated(model, updates, way[0], fedavg.accuracies, *way[1:], by)
        # The scores of a model that was tuned on the samples are too high on these samples.
        fair = self.gate and not self._tuned
        if fair and found is not None and before is not None and found.is_harmful(before):
            made, found = replace(fedavg, model=start, shares=0 * shares, by=LAST), before
        self._memory.keep(nodes, shown, made.shares)
        clients = len(self._memory.clients)
        if clients > RARE_CLIENT_ROUNDS * len(updates) and not self._warned:
            self._warned = True
            _log.warning(
                "each client takes part in few rounds: ShareGradient may be better, see its docstring"
            )
        few = clients < FEW_CLIENTS
        tunes = self.server.tune is not None and few
        better = self.server.tuned(made.model, found) if tunes and found is not None else None
        self._tuned = better is not None
        if better is not None:
            made, found = replace(made, model=better[0], by=TUNED), better[1]
        return replace(made, accuracy=np.nan if found is None else found.accuracy)

    def _shown(
        self,
        fedavg: _Aggregated,
        before: Judged | None,
        ahead: Judged | None,
        judged: list[Judged],
        start: ModelArrays,
    ) -> np.ndarray | None:
        """Compute the policy's state of each client; None if a model cannot be scored."""
        if before is None or ahead is None:
            return None
        models = [update.model for update in fedavg.updates]
        towards = []
        for model, own in zip(models, judged, strict=True):
            part = weighted_sum(np.array([1 - QUARTER, QUARTER]), [fedavg.model, model])
            towards.append((self.server.judged(part) or own).chances)
        scores = SampleScores(
            _padded(np.stack([own.chances for own in judged])),
            _padded(np.stack(towards)),
            _array(ahead.chances),
            _array(before.chances),
            jax.device_put(~(kept_samples(len(ahead.chances)) & self.gate)),
        )
        m = len(models)
        rows = geometry(models, start, self._memory.move)
        rows = np.pad(rows, ((0, 0), (0, padded_width(m) - m)))
        submission = Submission(
            _padded(rows[:-1]),
            jax.device_put(np.arange(padded_width(m)) < m),
            _padded(sample_counts(fedavg.updates, self.weighted_by_key)),
            _padded(np.array([self._memory.absence(own.node) for own in fedavg.updates])),
            _array(rows[-1]),
            _array(float(self._memory.rounds)),
            scores,
        )
        return np.asarray(_channels(submission))[:m]

    def _begin(self) -> None:
        """Start with an empty memory, or resume from the checkpoint."""
        super()._begin()
        self._tuned = self._warned = False
        self._memory.samples = self.server.fingerprint
        if self.checkpoint_path is not None and self.checkpoint_path.exists():
            given = (self.checkpoint_path, self.window, self.server.fingerprint)
            self._memory = ClientMemory.restored(*given)
            self._resumed = self._memory.rounds


# Compiled as one program each: separate operations would compile dozens for every number of clients.
_channels = eqx.filter_jit(Invariant())


@eqx.filter_jit
def _decision(policy: AggregationPolicy, observation: Observation, mask: Mask) -> Decision:
    return policy.decide(observation, mask)


def _padded(rows: np.ndarray) -> Array:
    """Pad rows of clients to the width of the policy's input."""
    more = padded_width(len(rows)) - len(rows)
    return _array(np.pad(rows, [(0, more), *[(0, 0)] * (rows.ndim - 1)]))


def _array(values: np.ndarray | list[int] | float) -> Array:
    return jax.device_put(np.asarray(values, np.float32))


def _check_policy(policy: Any) -> None:
    """Raise InputError for a policy that does not read `Invariant`."""
    if not isinstance(policy, AggregationPolicy) or policy.score.ndim != 1 or policy.head.cash:
        raise InputError(
            f"policy: {type(policy).__name__} is not a single AggregationPolicy without a share for cash; "
            "train one in the simulator, or give its folder to LearnedAggregation.load"
        )
    if policy.channels != Invariant.channels:
        raise InputError(
            f"policy: it reads {policy.channels} channels, but the state of a client has "
            f"{Invariant.channels}; train a policy with `apportion train federated`"
        )


_Loss = Callable[[dict[str, Array]], Float[Array, ""]]


class ShareGradient(GuardedFedAvg):
    """FedAvg with shares by gradient descent on the server's loss, and with momentum.

    In every round the server minimises L(sum_i a_i v_i) over the shares a, regularised towards
    FedAvg's. With a few dozen samples this overfits, and `LearnedAggregation` is better. With 200
    samples it is a point better if each client takes part in few rounds and nearly converges.

    Parameters
    ----------
    loss : callable
        Differentiable function of a model, a dict of JAX arrays by name; returns the server's loss.
    momentum : float
        Momentum of the server.
    max_update_ratio, **options
        As in `LearnedAggregation`.

    Examples
    --------
    >>> ShareGradient(lambda model: (model["x"] ** 2).sum()).momentum
    0.5
    """

    def __init__(
        self,
        loss: _Loss,
        *,
        momentum: float = 0.5,
        max_update_ratio: float = 10.0,
        **options: Unpack[FedAvgOptions],
    ):
        super().__init__(1, max_update_ratio, options)
        if not 0 <= momentum < 1:
            raise InputError(f"ShareGradient: momentum {momentum} must be in [0, 1)")
        self.loss, self.momentum = loss, momentum
        self._begin()

    def make_model(
        self, server_round: int, updates: list[ClientUpdate], start: ModelArrays
    ) -> _Aggregated:
        """Aggregate by the shares that minimise the loss, with momentum."""
        models = [update.model for update in updates]
        plain = fedavg_shares(sample_counts(updates, self.weighted_by_key))
        stacked = {n: jnp.asarray(np.stack([own[n] for own in models])) for n in start}
        shares = np.asarray(_descended(self.loss, stacked, _array(plain)), np.float64)
        if not np.isfinite(shares).all():
            _log.warning("the loss is not finite; FedAvg's shares in this round")
            shares = plain
        shares = shares / shares.sum()
        made = moved(models, start, self._memory.move, shares, 1.0, self.momentum)
        accuracies, by = [np.nan] * len(updates), "that of shares by gradient"
        return _Aggregated(made, updates, shares, accuracies, 1.0, self.momentum, by)


@eqx.filter_jit
def _descended(loss: _Loss, models: dict[str, Array], plain: Array) -> Array:
    def of_shares(shares):
        return loss({
            name: jnp.tensordot(shares, own.astype(jnp.float32), 1) for name, own in models.items()
        })  # fmt: skip

    with jax.default_matmul_precision("highest"):
        return descend_shares(of_shares, plain, jnp.ones(len(plain), bool))
