"""Training an aggregation policy, and evaluating it on federations of clients it never saw.

What counts is the test accuracy of the aggregate against FedAvg's, paired by task, after the last
round and on average over the rounds.
"""

import jax
import numpy as np
import pandas as pd

from apportion.domains.federated.aggregators import (
    UNIFORM,
    EpisodeRecord,
    PolicyAggregator,
    run_episodes,
)
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.training import build, read_digits, sample_tasks
from apportion.domains.training import averaged, train_members
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Policy, Recurrent
from apportion.runs.job import Outcome, PreparedJob
from apportion.statistics import Estimate, compare
from apportion.tasks import Tasks
from apportion.training import Chunks, OnChunk, Resume


def prepare(settings: FederatedSettings) -> PreparedJob:
    """Read the digits, deal them out to the clients and sample the tasks."""
    digits = read_digits(settings)
    federation, partition = build(settings, digits)
    own, fresh = sample_tasks(settings, partition, settings.seed)
    source = "embedded digits" if settings.mnist is None else str(settings.mnist)
    data = {"source": source, "clients": partition.universe, "fingerprint": digits.fingerprint}

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
        return evaluate_policy(federation, policy, fresh, settings)

    return PreparedJob(data, train)


def evaluate_policy(
    federation: Federation, policy: Policy, tasks: Tasks, settings: FederatedSettings
) -> Outcome:
    """The policy against FedAvg on unseen tasks."""
    key = jax.random.key(settings.seed)
    learned, fedavg = (
        jax.tree.map(np.asarray, run_episodes(federation, aggregator, tasks, key=key))
        for aggregator in (PolicyAggregator(policy), UNIFORM)
    )
    last = compare(learned.tested[:, -1], fedavg.tested[:, -1])
    mean = compare(learned.tested.mean(1), fedavg.tested.mean(1))
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
    about = {
        "job": "federated",
        "window": federation.window,
        "state": settings.state,
        "channels": federation.channels,
        "clients": int(tasks.width),
    }
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
        "holds": gain.above_zero,
    }
