"""Train an aggregation policy and test it in federations of unseen clients.

The metric is the test accuracy of the aggregate minus that of FedAvg, paired by task, after the
last round and averaged over the rounds. For a policy of many kinds, it is also given by kind.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.certify.statistics import compare
from apportion.domains.federated.aggregators import (
    UNIFORM,
    Aggregator,
    BySamples,
    EpisodeRecord,
    Learned,
    PolicyAggregator,
    run_episodes,
)
from apportion.domains.federated.data import Digits, kinds_of
from apportion.domains.federated.federation import Federation, paper_world, unseen_world
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import FederationSettings, GradientSettings, PPOSettings
from apportion.domains.federated.training import train_mixture
from apportion.domains.training import averaged, train_members
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Policy, Recurrent
from apportion.runs.runner import JobResult, PreparedJob
from apportion.runs.signals import tested_after_training
from apportion.tasks import Task
from apportion.training import Chunks, OnChunk, Resume

_UNSEEN_CLIENTS = 10
"""Number of clients of each federation that tests a policy of many kinds."""


def prepare_mixture(settings: GradientSettings, digits: Digits) -> PreparedJob:
    """Prepare to train one policy for many kinds of federations and to test it in unseen ones."""
    kinds = kinds_of(settings.kinds)

    def run(on_chunk: OnChunk, resume: Resume) -> JobResult:
        chunks = Chunks(settings.chunk, on_chunk=on_chunk)
        policy = train_mixture(settings, digits, chunks=chunks, state=resume)
        seeds = range(settings.seed, settings.seed + settings.unseen)
        wanted = [(kind, _UNSEEN_CLIENTS, seed) for kind in kinds for seed in seeds]

        def test() -> tuple[JobResult, np.ndarray]:
            world, tasks = unseen_world(settings, digits, wanted)
            return _compared(policy, BySamples(), settings, world, tasks)

        outcome, gains = tested_after_training(test)
        by_kind = dict(zip(kinds, gains.reshape(len(kinds), -1).mean(1).tolist(), strict=True))
        worst = min(by_kind, key=by_kind.__getitem__)
        points = f"{100 * by_kind[worst]:+.1f} points over FedAvg in the last round"
        table = pd.DataFrame({"kind": list(by_kind), "gain": by_kind.values()})
        return replace(
            outcome,
            about=outcome.about | {"kinds": list(kinds)},
            results=outcome.results | {"gain_by_kind": by_kind},
            summary=f"{outcome.summary}\nworst kind: {worst}, {points}",
            tables=outcome.tables | {"kinds": table},
        )

    return PreparedJob(_about_data(settings, digits) | {"kinds": len(kinds)}, run)


def prepare_paper(settings: PPOSettings, digits: Digits) -> PreparedJob:
    """Prepare to train the paper's policy on its own split and to test it on unseen tasks."""
    federation, [(own, unseen)] = paper_world(settings, digits, [settings.seed])

    def run(on_chunk: OnChunk, resume: Resume) -> JobResult:
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
        outcome, _ = tested_after_training(
            lambda: _compared(policy, UNIFORM, settings, federation, unseen)
        )
        return replace(outcome, about=outcome.about | {"clients": int(unseen.width)})

    return PreparedJob(_about_data(settings, digits) | {"clients": federation.universe}, run)


def _about_data(settings: FederationSettings, digits: Digits) -> dict[str, Any]:
    source = "embedded digits" if settings.images is None else str(settings.images)
    return {"source": source, "fingerprint": digits.fingerprint}


def _both(
    policy: Policy, other: Aggregator, federation: Federation, tasks: Task, seed: int
) -> list[EpisodeRecord]:
    """Run a policy and another aggregator in all tasks, on the same batches.

    A task's key does not depend on the number of tasks.
    """
    key = jax.random.key(seed)
    keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(len(tasks)))
    if isinstance(policy, AggregationPolicy):
        learned: Aggregator = Learned(policy)
    else:
        learned = PolicyAggregator(policy)
    return [run_episodes(federation, each, tasks, keys) for each in (learned, other)]


def _compared(
    policy: Policy,
    fedavg: Aggregator,
    settings: FederationSettings,
    federation: Federation,
    tasks: Task,
) -> tuple[JobResult, np.ndarray]:
    """Compare the policy with FedAvg; return the result and each task's gain in the last round."""
    learned, plain = _both(policy, fedavg, federation, tasks, settings.seed)
    ours, theirs = (np.asarray(each.tested, float) for each in (learned, plain))
    last, mean = compare(ours[:, -1], theirs[:, -1]), compare(ours.mean(1), theirs.mean(1))
    results = {
        "final_accuracy": float(ours[:, -1].mean()),
        "final_accuracy_fedavg": float(theirs[:, -1].mean()),
        "gain_final": last.to_dict(),
        "gain_mean_over_rounds": mean.to_dict(),
    }
    lines = [
        f"test accuracy after the last round: {results['final_accuracy']:.3f}, FedAvg "
        f"{results['final_accuracy_fedavg']:.3f}"
    ]
    cards = []
    for when, gain in (("last round", last), ("mean over the rounds", mean)):
        points = f"{100 * gain.value:+.1f} points"
        interval = f"[{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        lines.append(f"gain over FedAvg, {when}: {points} {interval} over {gain.n} unseen tasks")
        cards.append({
            "label": f"Test accuracy over FedAvg, {when}", "value": points, "interval": interval,
            "note": f"paired over {gain.n} unseen tasks", "outcome": gain.outcome,
        })  # fmt: skip
    rounds = np.arange(1, ours.shape[1] + 1)
    accuracy = {"round": rounds, "learned": ours.mean(0), "fedavg": theirs.mean(0)}
    names = pd.Index([f"client {i}" for i in np.asarray(tasks.members[0])])
    shares = pd.DataFrame(np.asarray(learned.shares[0]), columns=names)
    outcome = JobResult(
        policy,
        results,
        "\n".join(lines),
        {
            "job": "federated", "window": federation.window, "state": settings.state,
            "channels": federation.channels,
        },
        {"title": "A federation of clients", "subtitle": settings.method, "cards": cards},
        {
            "accuracy": pd.DataFrame(accuracy),
            "allocations": shares.rename_axis("period").reset_index(),
        },
    )  # fmt: skip
    return outcome, ours[:, -1] - theirs[:, -1]
