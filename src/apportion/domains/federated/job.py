"""Training an aggregation policy, and evaluating it on federations of clients it never saw.

What counts is the test accuracy of the aggregate against FedAvg's, paired by task, after the last
round and on average over the rounds; of a policy for every kind of federation, also the worst kind.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray

from apportion.domains.federated.aggregators import (
    UNIFORM,
    Aggregator,
    BySamples,
    EpisodeRecord,
    PolicyAggregator,
    run_episodes,
)
from apportion.domains.federated.digits import Digits
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.kinds import kinds_of
from apportion.domains.federated.learned import Learned
from apportion.domains.federated.mixtures import unseen_world
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.states import client_state
from apportion.domains.federated.training import (
    build,
    read_digits,
    sample_tasks,
    train_mixture,
)
from apportion.domains.training import averaged, train_members
from apportion.errors import InputError
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Policy, Recurrent
from apportion.runs.runner import Outcome, PreparedJob
from apportion.runs.signals import tested_after_training
from apportion.statistics import Estimate, compare
from apportion.tasks import Tasks
from apportion.training import Chunks, OnChunk, Resume

UNSEEN_CLIENTS = 10
"""In each federation that a policy for every kind is tried in."""


def prepare(settings: FederatedSettings) -> PreparedJob:
    """Read the digits, deal them out to the clients and sample the tasks."""
    digits = read_digits(settings)
    return (
        _mixture_job(settings, digits)
        if settings.learner == "gradient"
        else _papers_job(settings, digits)
    )


def _mixture_job(settings: FederatedSettings, digits: Digits) -> PreparedJob:
    kinds = kinds_of(settings.kinds)
    if client_state(settings.state).reads == "classes":
        raise InputError(
            f"state {settings.state!r} does not hold FedAvg's shares, which the gradient starts from; "
            "choose invariant or blind, or the learner ppo"
        )
    data = {
        "source": _source(settings), "kinds": len(kinds), "fingerprint": digits.fingerprint
    }  # fmt: skip

    def run(on_chunk: OnChunk, resume: Resume) -> Outcome:
        chunks = Chunks(settings.chunk, on_chunk=on_chunk)
        policy = train_mixture(settings, digits, chunks=chunks, state=resume)
        return tested_after_training(lambda: evaluate_mixture(policy, settings, digits, kinds))

    return PreparedJob(data, run)


def evaluate_mixture(
    policy: AggregationPolicy, settings: FederatedSettings, digits: Digits, kinds: Sequence[str]
) -> Outcome:
    """The policy against FedAvg on unseen federations of each kind, gated where its server has samples."""
    seeds = range(settings.seed, settings.seed + settings.unseen)
    wanted = [(kind, UNSEEN_CLIENTS, seed) for kind in kinds for seed in seeds]
    federation, dealt = unseen_world(settings, digits, wanted)
    gated = federation.state.reads != "nothing"
    learned, fedavg = _tried(
        federation,
        (Learned(policy, gated), BySamples()),
        dealt.tasks,
        jax.random.key(settings.seed),
    )
    gains = np.asarray(learned.tested[:, -1] - fedavg.tested[:, -1], float)
    own = np.array(dealt.kinds)
    by_kind = {kind: float(gains[own == kind].mean()) for kind in kinds}
    about = {
        "job": "federated", "window": federation.window, "state": settings.state,
        "channels": federation.channels, "kinds": list(kinds),
    }  # fmt: skip
    outcome = _outcome(policy, learned, fedavg, dealt.tasks, settings, about)
    worst = min(by_kind, key=by_kind.__getitem__)
    line = f"worst kind: {worst}, {100 * by_kind[worst]:+.1f} points over FedAvg in the last round"
    return replace(
        outcome,
        results=outcome.results | {"gain_by_kind": by_kind},
        summary=f"{outcome.summary}\n{line}",
        tables=outcome.tables
        | {"kinds": pd.DataFrame({"kind": list(by_kind), "gain": by_kind.values()})},
    )


def _papers_job(settings: FederatedSettings, digits: Digits) -> PreparedJob:
    federation, partition = build(settings, digits)
    own, fresh = sample_tasks(settings, partition, settings.seed)
    data = {
        "source": _source(settings),
        "clients": partition.universe,
        "fingerprint": digits.fingerprint,
    }

    def train(on_chunk: OnChunk, resume: Resume) -> Outcome:
        training = train_members(
            federation,
            own,
            lambda key: Recurrent(federation.channels, settings.hidden, key=key),
            PPO(settings.rollouts, settings.learning_rate, gamma=settings.gamma),
            settings,
            replay=Replay(act_periods=0),
            chunks=Chunks(settings.chunk, on_chunk=on_chunk),
            state=resume,
        )
        policy = averaged(training.policy, settings.members)
        return tested_after_training(lambda: evaluate_policy(federation, policy, fresh, settings))

    return PreparedJob(data, train)


def evaluate_policy(
    federation: Federation, policy: Policy, tasks: Tasks, settings: FederatedSettings
) -> Outcome:
    """The policy against FedAvg on unseen tasks."""
    learned, fedavg = _tried(
        federation, (PolicyAggregator(policy), UNIFORM), tasks, jax.random.key(settings.seed)
    )
    about = {
        "job": "federated",
        "window": federation.window,
        "state": settings.state,
        "channels": federation.channels,
        "clients": int(tasks.width),
    }
    return _outcome(policy, learned, fedavg, tasks, settings, about)


def _source(settings: FederatedSettings) -> str:
    return "embedded digits" if settings.mnist is None else str(settings.mnist)


def _tried(
    federation: Federation, aggregators: Sequence[Aggregator], tasks: Tasks, key: PRNGKeyArray
) -> list[EpisodeRecord]:
    """Episodes of all tasks under each aggregator, on the same batches."""
    return [
        jax.tree.map(np.asarray, run_episodes(federation, aggregator, tasks, key=key))
        for aggregator in aggregators
    ]


def _outcome(
    policy: Policy,
    learned: EpisodeRecord,
    fedavg: EpisodeRecord,
    tasks: Tasks,
    settings: FederatedSettings,
    about: dict[str, Any],
) -> Outcome:
    ours, theirs = np.asarray(learned.tested), np.asarray(fedavg.tested)
    last, mean = compare(ours[:, -1], theirs[:, -1]), compare(ours.mean(1), theirs.mean(1))
    results = {
        "final_accuracy": float(learned.tested[:, -1].mean()),
        "final_accuracy_fedavg": float(fedavg.tested[:, -1].mean()),
        "gain_final": last.to_dict(),
        "gain_mean_over_rounds": mean.to_dict(),
    }
    lines = [
        f"test accuracy after the last round: {results['final_accuracy']:.3f}, FedAvg "
        f"{results['final_accuracy_fedavg']:.3f}",
        f"gain over FedAvg, last round: {_points(last)}",
        f"gain over FedAvg, mean over the rounds: {_points(mean)}",
    ]
    cards = [_card("last round", last), _card("mean over the rounds", mean)]
    return Outcome(
        policy,
        results,
        "\n".join(lines),
        about,
        {"title": "A federation of clients", "subtitle": settings.method, "cards": cards},
        {"accuracy": _accuracies(learned, fedavg), "allocations": _shares(learned, tasks)},
    )


def _accuracies(learned: EpisodeRecord, fedavg: EpisodeRecord) -> pd.DataFrame:
    curves = {"learned": learned.tested.mean(0), "fedavg": fedavg.tested.mean(0)}
    table = pd.DataFrame({name: np.asarray(curve) for name, curve in curves.items()})
    table.insert(0, "round", np.arange(1, len(table) + 1))
    return table


def _shares(learned: EpisodeRecord, tasks: Tasks) -> pd.DataFrame:
    names = pd.Index([f"client {i}" for i in np.asarray(tasks.members[0])])
    table = pd.DataFrame(np.asarray(learned.shares[0]), columns=names)
    return table.rename_axis("period").reset_index()


def _points(gain: Estimate) -> str:
    return (
        f"{100 * gain.value:+.1f} points [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}] "
        f"over {gain.n} unseen tasks"
    )


def _card(when: str, gain: Estimate) -> dict:
    return {
        "label": f"Test accuracy over FedAvg, {when}",
        "value": f"{100 * gain.value:+.1f} points",
        "interval": f"[{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]",
        "note": f"paired over {gain.n} unseen tasks",
        "outcome": gain.outcome,
    }
