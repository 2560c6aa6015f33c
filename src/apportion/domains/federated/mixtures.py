"""The federations that a policy learns from, and those of other clients that it is tried in.

The clients' images are cut in two: training and unseen federations share no image. The training
world has a server of its own, whose images lie in the first part; the server's images proper are
for the unseen world alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from apportion.domains.federated.digits import Digits
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.kinds import Mixture, Wanted, kinds_of, mixture
from apportion.domains.federated.model import ClientModel, Convolutional, Perceptron
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.states import client_state
from apportion.errors import InputError

TRAINING, HELD = 0.62, 0.35
"""The part of the clients' images for training, and the part of that for its server."""


def client_model(settings: FederatedSettings, side: int) -> ClientModel:
    """What the clients of these settings train on images of so many pixels."""
    kinds = {"convolutional": Convolutional, "perceptron": Perceptron}
    return kinds[settings.model](side, settings.width)


def halves(digits: Digits) -> tuple[np.ndarray, np.ndarray]:
    """Places of the clients' images for training federations, and for unseen ones."""
    places = np.random.default_rng(7).permutation(np.flatnonzero(~digits.server))
    cut = int(TRAINING * len(places))
    return places[:cut], places[cut:]


def training_world(settings: FederatedSettings, digits: Digits) -> tuple[Federation, Mixture]:
    """Federations of all kinds asked for, small ones and large ones."""
    digits = digits.pooled(settings.pooling)
    places, _ = halves(digits)
    held = places[len(places) - int(HELD * len(places)) :]
    server = np.zeros(len(digits.labels), bool)
    server[held] = True
    fewest, most = settings.server_samples
    if not 1 <= fewest <= most <= len(held) // 2:
        raise InputError(
            f"server_samples {fewest} {most}: between 1 and {len(held) // 2} images can be the server's"
        )
    seeds = range(1000 * settings.seed, 1000 * settings.seed + settings.copies)
    wanted = list(product(kinds_of(settings.kinds), dict.fromkeys(settings.sizes), seeds))
    dealt = mixture(
        replace(digits, server=server),
        wanted,
        places[: len(places) - len(held)],
        samples=settings.samples,
    )
    half = min(len(held) // 2, 2 * most)
    federation = federation_of(settings, dealt, half, half, (fewest, most), seed=settings.seed)
    return federation, dealt


def unseen_world(
    settings: FederatedSettings,
    digits: Digits,
    wanted: Sequence[Wanted],
    *,
    samples: int | None = None,
    **changes: Any,
) -> tuple[Federation, Mixture]:
    """Federations of clients and images that training never sees.

    Parameters
    ----------
    wanted
        The kind, number of clients and seed of each.
    samples
        Images of the server's own, `settings.evaluation` unless given; each episode draws others out of
        half as many more.
    changes
        Of the federation's arguments, such as `participation`.
    """
    digits = digits.pooled(settings.pooling)
    _, places = halves(digits)
    dealt = mixture(digits, wanted, places, samples=settings.samples)
    count = settings.evaluation if samples is None else samples
    available = int(digits.server.sum()) - settings.test
    pool = max(count, min(3 * settings.evaluation // 2, available))
    federation = federation_of(
        settings, dealt, pool, settings.test, (count, count), seed=settings.seed, **changes
    )
    return federation, dealt


def federation_of(
    settings: FederatedSettings,
    dealt: Mixture,
    evaluation: int,
    test: int,
    drawn: tuple[int, int],
    *,
    seed: int,
    **changes: Any,
) -> Federation:
    """The federation of these clients, with a gate; others of its arguments as `changes` say."""
    return Federation(
        dealt.digits,
        dealt.partition,
        client_model(settings, dealt.digits.images.shape[1]),
        rounds=settings.rounds,
        epochs=settings.epochs,
        batch=settings.batch,
        learning_rate=settings.client_rate,
        evaluation=evaluation,
        test=test,
        window=settings.window,
        state=client_state(settings.state),
        precision=settings.precision,
        block=settings.block,
        drawn=drawn,
        gate=True,
        seed=seed,
        **changes,
    )
