"""A trained policy as a Flower strategy: learned shares aggregate the models of a real federation.

In round n the server scores every submitted model v_{i,n} on its own data, the policy turns each
client's last H scores and its previous share into a_{i,n}, and sum_i a_{i,n} v_{i,n} is sent out
again. Clients are known by their node id alone, may come and go, and are trusted with nothing.
"""

import logging
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Bool, Float

from apportion.domains.federated.states import STATES, Submission, client_state
from apportion.errors import InputError
from apportion.policy import Policy, ScoringPolicy
from apportion.problem import Observation
from apportion.runs.policy_file import load_about, load_policy

try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg
except ImportError:
    raise InputError(
        "LearnedAggregation needs Flower, which is not installed; "
        "run pip install 'apportion[federated]'"
    ) from None

from apportion.bridges.flower.clients import Memory, Predict, ServerData
from apportion.bridges.flower.updates import (
    Model,
    Update,
    cast_like,
    geometry,
    read_model,
    sample_counts,
    usable,
    weighted_sum,
    write_model,
)

_log = logging.getLogger("flwr")


class LearnedAggregation(FedAvg):
    """FedAvg with shares decided by a trained policy, and with a guard at the door.

    Replies that failed, are misshapen, not finite or huge are left out; so are models that the
    server's data shows to do harm. A round without any usable reply keeps the model. Where no model
    can be scored, the round is FedAvg's, with a warning in Flower's log.

    Parameters
    ----------
    policy
        A policy trained in the simulator (`apportion train federated`) for this `state`. It serves
        any number of clients.
    predict
        Answers of a model (an `ArrayRecord`) for the server's samples: classes, or a row of scores
        a sample.
    labels
        The right classes of the server's samples, 0, 1, ...
    state, window
        What the policy was trained to see: a name of `apportion.domains.federated.states.STATES`, and the
        rounds of it. `load` takes them from the policy's folder.
    largest
        An update whose norm is more than this many times the median one is huge.
    harm
        A client is left out of a round where the aggregate without it is more than this much more
        accurate on the server's data, and shares are equal where that is: one more scoring for each
        client. Policies that favour rare data would otherwise favour byzantine clients. None trusts
        everyone.
    options
        As in Flower's `FedAvg`; `fraction_evaluate` is 0 unless it is given.

    Examples
    --------
    >>> import jax
    >>> from apportion.policy import Recurrent
    >>> strategy = LearnedAggregation(
    ...     Recurrent(channels=1, hidden=4, key=jax.random.key(0)),
    ...     predict=lambda arrays: arrays.to_numpy_ndarrays()[0],
    ...     labels=[0, 1, 1],
    ... )
    >>> strategy.to_frame().columns.tolist()
    ['round', 'node', 'outcome', 'accuracy', 'share']
    """

    def __init__(
        self,
        policy: Policy,
        predict: Predict,
        labels: Any,
        *,
        state: str = "accuracy",
        window: int = 5,
        largest: float = 10.0,
        harm: float | None = 0.03,
        **options: Any,
    ):
        options.setdefault("fraction_evaluate", 0.0)
        super().__init__(**options)
        self.server = ServerData(predict, labels)
        if not largest > 1 or not (harm is None or harm >= 0) or window < 1:
            raise InputError(
                f"LearnedAggregation: largest {largest} must be over 1, harm {harm} at least 0 (or "
                f"None) and window {window} at least 1"
            )
        self.policy = policy
        self.state, self.window = client_state(state), window
        self.largest, self.harm = largest, harm
        _check_policy(policy, state, window, self.server.classes)
        self._begin()

    @classmethod
    def load(
        cls, folder: Path | str, predict: Predict, labels: Any, **options: Any
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
        return cls(policy, predict, labels, state=asked, **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As in FedAvg, remembering the model sent out: replies are compared with it."""
        self._start = read_model(arrays)
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The replies' models to one; (None, None), which keeps the old one, if none is usable."""
        if server_round == 1:
            self._begin(self._start)
        usual = [norm for norms in self._norms for norm in norms]
        updates, refused, start = usable(replies, self._start, usual, self.largest)
        for node, why in refused.items():
            self._note(server_round, node, why.partition(":")[0])
            _log.warning("round %d: node %d is left out (%s)", server_round, node, why)
        if not updates or start is None:
            _log.warning("round %d: no usable reply; the model stays", server_round)
            return None, None
        self._norms.append([update.norm for update in updates])
        kept, shares, correct = self._apportion(server_round, updates, start)
        for update, share, right in zip(kept, shares, correct, strict=True):
            self._note(server_round, update.node, "kept", float(np.sum(right)), share)
        models = [update.model for update in kept]
        self._start = cast_like(weighted_sum(shares, models), start)
        return write_model(self._start), self._metrics(kept, shares, len(refused))

    def to_frame(self) -> pd.DataFrame:
        """What became of every reply: kept, failed, misshapen, not finite, huge or harmful, with the
        accuracy of its model on the server's data and its share.
        """
        return pd.DataFrame(self._notes, columns=["round", "node", "outcome", "accuracy", "share"])

    def _begin(self, start: Model | None = None) -> None:
        """Forget the clients of an earlier run."""
        self._start = start
        self._memory = Memory(self.window)
        self._norms: deque[list[float]] = deque(maxlen=self.window)
        self._notes: list[tuple[int, int, str, float, float]] = []

    def _note(
        self, n: int, node: int, outcome: str, accuracy: float = np.nan, share: float = 0.0
    ) -> None:
        self._notes.append((n, node, outcome, accuracy, share))

    def _apportion(
        self, n: int, updates: list[Update], start: Model
    ) -> tuple[list[Update], np.ndarray, list[np.ndarray]]:
        """Whom to average, with what shares, and how each did on the server's data."""
        answers = [(update, self.server.correct(update.model)) for update in updates]
        scored = [(update, right) for update, right in answers if right is not None]
        for update, right in answers:
            if scored and right is None:
                self._note(n, update.node, "not scored")
        kept = scored
        while kept:
            present, correct = [update for update, _ in kept], [right for _, right in kept]
            nodes, shown = [update.node for update in present], self._shown(present, correct, start)
            shares = np.asarray(_decide(self.policy, *self._memory.observation(nodes, shown)))
            shares = shares[: len(nodes)].astype(np.float64) / shares[: len(nodes)].sum()
            if not np.isfinite(shares).all():
                break
            # An honest majority is never sent away.
            droppable = len(kept) > len(scored) / 2 + 1
            shares, worst = self._guarded(n, present, shares, droppable)
            if worst is None:
                self._memory.keep(nodes, shown, shares)
                return present, shares, correct
            self._note(n, nodes[worst], "harmful", float(correct[worst].sum()))
            _log.warning("round %d: node %d is left out (harmful)", n, nodes[worst])
            kept = kept[:worst] + kept[worst + 1 :]
        _log.warning("round %d: no model can be scored; FedAvg instead of learned shares", n)
        counts = sample_counts(updates, self.weighted_by_key, self.largest)
        return updates, counts / counts.sum(), [np.array(np.nan)] * len(updates)

    def _shown(self, present: list[Update], correct: list[np.ndarray], start: Model) -> np.ndarray:
        submission = Submission(
            jnp.asarray(np.stack(correct), jnp.float32),
            jnp.asarray(self.server.frequency, jnp.float32),
            jnp.asarray(geometry([update.model for update in present], start), jnp.float32),
            jnp.ones(len(present), bool),
        )
        return np.asarray(self.state(submission))

    def _guarded(
        self, n: int, present: list[Update], shares: np.ndarray, droppable: bool
    ) -> tuple[np.ndarray, int | None]:
        """The client, if there is one, without which the aggregate does better by more than `harm`;
        else the shares, or equal ones where those do better by as much.
        """
        if self.harm is None:
            return shares, None
        models = [update.model for update in present]
        equal = np.full(len(models), 1 / len(models))
        best, worst = self._tried(shares, models, droppable)
        if worst is not None:
            return shares, worst
        plain, worst = self._tried(equal, models, False)
        if plain <= best + self.harm:
            return shares, None
        _log.warning("round %d: equal shares do better than the learned ones", n)
        return equal, self._tried(equal, models, droppable)[1]

    def _tried(
        self, shares: np.ndarray, models: list[Model], droppable: bool
    ) -> tuple[float, int | None]:
        """Accuracy of the aggregate, and the client without which it would be better by `harm`."""
        total = weighted_sum(shares, models)
        together = self.server.accuracy(total, models[0])
        without = np.full(len(models), -np.inf)
        for i, (share, model) in enumerate(zip(shares, models, strict=True)):
            if droppable and share < 1 - 1e-6:
                rest = {name: (total[name] - share * model[name]) / (1 - share) for name in total}
                without[i] = self.server.accuracy(rest, model)
        worst = int(without.argmax())
        return together, worst if without[worst] > together + (self.harm or 0) else None

    def _metrics(self, kept: list[Update], shares: np.ndarray, refused: int) -> MetricRecord:
        try:
            contents = [update.content for update in kept]
            metrics = self.train_metrics_aggr_fn(contents, self.weighted_by_key)
        except Exception as error:  # clients may report anything, or nothing
            _log.warning("the clients' metrics cannot be averaged (%s)", error)
            metrics = MetricRecord()
        metrics["clients-kept"] = len(kept)
        metrics["clients-refused"] = refused
        metrics["largest-share"] = float(shares.max())
        return metrics


@eqx.filter_jit
def _decide(
    policy: Policy, observation: Observation, mask: Bool[Array, " entities"]
) -> Float[Array, " entities"]:
    return policy(observation, mask)


def _check_policy(policy: Any, state: str, window: int, classes: int) -> None:
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
