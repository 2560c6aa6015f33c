"""Training an aggregation policy, and trying it in federations of clients it never saw.

What counts is the test accuracy of the aggregate against FedAvg's, paired by task, after the last
round and on average over the rounds; of a policy for every kind of federation, also the worst kind.
A certificate bets on its gains federation by federation: each is dealt anew, of a kind drawn at random, out
of images and clients that training never saw; rounds of one are autocorrelated, so that a federation is
one gain: the difference of both test accuracies after its last round, on the same batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Key

from apportion.certificate import Gains
from apportion.domains.federated.aggregators import (
    UNIFORM,
    Aggregator,
    BySamples,
    Learned,
    Median,
    PolicyAggregator,
    ServerStep,
    TrimmedMean,
    run_each,
    run_episodes,
)
from apportion.domains.federated.data import Digits, kinds_of
from apportion.domains.federated.federation import Federation, build, sample_tasks, unseen_world
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import FederationSettings, GradientSettings, PPOSettings
from apportion.domains.federated.states import client_state
from apportion.domains.federated.training import train_mixture
from apportion.domains.training import averaged, train_members
from apportion.errors import InputError
from apportion.learners.ppo import PPO
from apportion.memory import Replay
from apportion.policy import Policy, Recurrent
from apportion.runs.runner import Outcome, PreparedJob
from apportion.runs.settings import suggest
from apportion.runs.signals import tested_after_training
from apportion.statistics import compare
from apportion.tasks import Task
from apportion.training import Chunks, OnChunk, Resume
from apportion.trees import stack

UNSEEN_CLIENTS = 10
"""In each federation that a policy for every kind is tried in."""
MAX_GAIN = 0.25
"""A federation's gain counts at 25 points of accuracy at most."""
BASELINES: dict[str, Aggregator] = {
    "fedavg": BySamples(),
    "fedavgm": ServerStep(momentum=0.7),
    "median": Median(),
    "trimmed-mean": TrimmedMean(),
}
"""What a policy can be certified against."""
_SEEDS = 10**6
"""Seeds of the federations that are certified on begin here, far from those of training and tests."""


def prepare_mixture(settings: GradientSettings, digits: Digits) -> PreparedJob:
    """How to train one policy for federations of every kind, and to try it in unseen ones."""
    kinds = kinds_of(settings.kinds)
    if client_state(settings.state).reads == "classes":
        raise InputError(
            f"state {settings.state!r} does not hold FedAvg's shares, which the gradient starts from; "
            "choose invariant or blind, or the learner ppo"
        )

    def run(on_chunk: OnChunk, resume: Resume) -> Outcome:
        chunks = Chunks(settings.chunk, on_chunk=on_chunk)
        policy = train_mixture(settings, digits, chunks=chunks, state=resume)
        return tested_after_training(lambda: _evaluate_mixture(policy, settings, digits, kinds))

    return PreparedJob(_about_data(settings, digits) | {"kinds": len(kinds)}, run)


def prepare_paper(settings: PPOSettings, digits: Digits) -> PreparedJob:
    """How to train the paper's policy on its own split, and to try it on unseen tasks."""
    federation, partition = build(settings, digits)
    own, fresh = sample_tasks(settings, partition, settings.seed)

    def run(on_chunk: OnChunk, resume: Resume) -> Outcome:
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
        return tested_after_training(lambda: _evaluate_paper(policy, settings, federation, fresh))

    return PreparedJob(_about_data(settings, digits) | {"clients": partition.universe}, run)


def _about_data(settings: FederationSettings, digits: Digits) -> dict[str, Any]:
    source = "embedded digits" if settings.mnist is None else str(settings.mnist)
    return {"source": source, "fingerprint": digits.fingerprint}


def _evaluate_mixture(
    policy: AggregationPolicy, settings: GradientSettings, digits: Digits, kinds: Sequence[str]
) -> Outcome:
    """The policy against FedAvg on unseen federations of each kind, gated where its server has samples."""
    seeds = range(settings.seed, settings.seed + settings.unseen)
    wanted = [(kind, UNSEEN_CLIENTS, seed) for kind in kinds for seed in seeds]
    federation, dealt = unseen_world(settings, digits, wanted)
    outcome, gains = _compared(policy, BySamples(), settings, federation, dealt.tasks)
    own = np.array(dealt.kinds)
    by_kind = {kind: float(gains[own == kind].mean()) for kind in kinds}
    worst = min(by_kind, key=by_kind.__getitem__)
    line = f"worst kind: {worst}, {100 * by_kind[worst]:+.1f} points over FedAvg in the last round"
    table = pd.DataFrame({"kind": list(by_kind), "gain": by_kind.values()})
    return replace(
        outcome,
        about=outcome.about | {"kinds": list(kinds)},
        results=outcome.results | {"gain_by_kind": by_kind},
        summary=f"{outcome.summary}\n{line}",
        tables=outcome.tables | {"kinds": table},
    )


def _evaluate_paper(
    policy: Policy, settings: PPOSettings, federation: Federation, tasks: Task
) -> Outcome:
    """The policy against FedAvg on unseen tasks."""
    outcome, _ = _compared(policy, UNIFORM, settings, federation, tasks)
    return replace(outcome, about=outcome.about | {"clients": int(tasks.width)})


def _learned(policy: Policy, federation: Federation) -> Aggregator:
    """The policy as an aggregator; without samples of the server's there is no gate."""
    if isinstance(policy, AggregationPolicy):
        return Learned(policy, gated=federation.state.reads != "nothing")
    return PolicyAggregator(policy)


def _compared(
    policy: Policy,
    fedavg: Aggregator,
    settings: FederationSettings,
    federation: Federation,
    tasks: Task,
) -> tuple[Outcome, np.ndarray]:
    """What came of the policy and of FedAvg in all tasks, on the same batches, and each task's gain in the
    last round.
    """
    key = jax.random.key(settings.seed)
    learned, plain = (
        jax.tree.map(np.asarray, run_episodes(federation, each, tasks, key=key))
        for each in (_learned(policy, federation), fedavg)
    )
    ours, theirs = learned.tested, plain.tested
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
    shares = pd.DataFrame(learned.shares[0], columns=names)
    outcome = Outcome(
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
    return outcome, np.asarray(ours[:, -1] - theirs[:, -1], float)


def evaluation_keys(seeds: Sequence[int], tasks: int) -> Key[Array, "runs tasks"]:
    """Keys of the episodes that methods are compared on: the same first models and
    batches for every method of a seed.
    """
    return stack([jax.random.split(jax.random.key(1000 + seed), tasks) for seed in seeds])


def federation_gains(
    policy: Policy,
    about: Mapping[str, Any],
    settings: FederationSettings,
    digits: Digits,
    against: str,
    *,
    federations: int = 40,
    max_gain: float = MAX_GAIN,
) -> Gains:
    """A policy's gains over an aggregator in federations of clients it never saw.

    Parameters
    ----------
    about, settings
        What was saved with the policy, and what it was trained with.
    digits
        Images at their full size.
    against
        The name of an aggregator in `BASELINES`.
    federations
        How many to try it in; asking for more goes on from the same first ones.
    max_gain
        What a federation's gain counts at most; decide on it before you look.
    """
    if about.get("job") != "federated":
        raise InputError(
            f"the policy was trained for {about.get('job', 'something else')!r}, not to aggregate "
            "clients; give the folder of a federated run"
        )
    if federations < 1:
        raise InputError(f"federations is {federations}; at least one is needed")
    name = against.lower()
    if name not in BASELINES:
        raise InputError(
            f"there is no aggregator {against!r} to certify against; choose "
            f"{', '.join(BASELINES)}{suggest(name, BASELINES)}"
        )
    if isinstance(settings, PPOSettings):
        world, partition = build(settings, digits)
        tasks = sample_tasks(replace(settings, unseen=federations), partition, settings.seed)[1]
    else:
        first, wanted = _SEEDS * (1 + settings.seed), []
        for n in range(federations):
            kind = np.random.default_rng([settings.seed, n]).choice(about["kinds"])
            wanted.append((str(kind), UNSEEN_CLIENTS, first + n))
        world, dealt = unseen_world(settings, digits, wanted)
        tasks = dealt.tasks
    # A task's key is its own, however many tasks there are.
    key = jax.random.key(settings.seed + _SEEDS)
    keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(len(tasks)))
    ours, theirs = (
        np.asarray(run_each(world, each, tasks, keys).tested[:, -1], float)
        for each in (_learned(policy, world), BASELINES[name])
    )
    return Gains.within(
        ours - theirs, max_gain, baseline=name, period="federation", unit="test accuracy"
    )
