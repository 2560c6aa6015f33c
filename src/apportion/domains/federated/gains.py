"""What an aggregation policy gains over FedAvg, federation by federation: what a certificate bets on.

Each federation is dealt anew, of a kind drawn at random, out of images and clients that training never
saw; rounds of one hang together, so that a federation is one gain: the difference of both test
accuracies after its last round, on the same batches.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from apportion.certificate import Gains
from apportion.domains.federated.aggregators import (
    Aggregator,
    BySamples,
    PolicyAggregator,
    run_each,
)
from apportion.domains.federated.digits import Digits
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.job import UNSEEN_CLIENTS
from apportion.domains.federated.learned import Learned
from apportion.domains.federated.mixtures import unseen_world
from apportion.domains.federated.optimisers import ServerStep
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.robust import Median, TrimmedMean
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.training import build, sample_tasks
from apportion.errors import InputError
from apportion.policy import Policy
from apportion.runs.settings import suggest
from apportion.tasks import Tasks

BOUND = 0.25
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


def federation_gains(
    policy: Policy,
    about: Mapping[str, Any],
    settings: FederatedSettings,
    digits: Digits,
    against: str | Aggregator,
    *,
    federations: int = 40,
    bound: float = BOUND,
) -> Gains:
    """A policy's gains over an aggregator in federations of clients it never saw.

    Parameters
    ----------
    about, settings
        What was saved with the policy, and what it was trained with.
    digits
        Images at their full size.
    against
        The name of an aggregator in `BASELINES`, or one of your own.
    federations
        How many to try it in; asking for more goes on from the same first ones.
    bound
        What a federation's gain counts at most; decide on it before you look.
    """
    if about.get("job") != "federated":
        raise InputError(
            f"the policy was trained for {about.get('job', 'something else')!r}, not to aggregate "
            "clients; give the folder of a federated run"
        )
    if federations < 1:
        raise InputError(f"federations is {federations}; at least one is needed")
    name, other = (
        (against.lower(), _known(against)) if isinstance(against, str) else ("own", against)
    )
    world, tasks = _unseen(about, settings, digits, federations)
    gated = world.state.reads != "nothing"  # without samples there is no gate
    learned = (
        Learned(policy, gated)
        if isinstance(policy, AggregationPolicy)
        else PolicyAggregator(policy)
    )
    key = jax.random.key(settings.seed + _SEEDS)
    ours, theirs = (_last_accuracy(world, each, tasks, key) for each in (learned, other))
    return Gains.within(
        ours - theirs, bound, baseline=name, period="federation", unit="test accuracy"
    )


def _known(name: str) -> Aggregator:
    """An aggregator by its name, as here or as Flower writes it."""
    if name.lower() not in BASELINES:
        raise InputError(
            f"there is no aggregator {name!r} to certify against; choose "
            f"{', '.join(BASELINES)}{suggest(name, BASELINES)}"
        )
    return BASELINES[name.lower()]


def _unseen(
    about: Mapping[str, Any], settings: FederatedSettings, digits: Digits, count: int
) -> tuple[Federation, Tasks]:
    if "kinds" not in about:
        world, partition = build(settings, digits)
        return world, sample_tasks(replace(settings, unseen=count), partition, settings.seed)[1]
    drawn = [np.random.default_rng([settings.seed, n]).choice(about["kinds"]) for n in range(count)]
    first = _SEEDS * (1 + settings.seed)
    wanted = [(str(kind), UNSEEN_CLIENTS, first + n) for n, kind in enumerate(drawn)]
    world, dealt = unseen_world(settings, digits, wanted)
    return world, dealt.tasks


def _last_accuracy(
    world: Federation, aggregator: Aggregator, tasks: Tasks, key: PRNGKeyArray
) -> np.ndarray:
    """Test accuracy after the last round of each task; a task's key is its own, however many there are."""
    keys = jax.vmap(lambda n: jax.random.fold_in(key, n))(jnp.arange(len(tasks)))
    return np.asarray(_run(world, aggregator, tasks, keys).tested[:, -1], float)


_run = eqx.filter_jit(run_each)
