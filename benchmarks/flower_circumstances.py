"""What to use when: learned aggregation and its rivals in many circumstances, in the simulator on a CPU.

    python benchmarks/flower_circumstances.py [--seeds 3] [--out DIR]

Digits of 7 x 7 pixels and synthetic tables of as many columns, ten classes each. `fast` clients nearly
converge in 20 rounds and overfit wrong labels; `slow` ones do not converge. Writes a row for each
federation and method, with plain and balanced accuracy, to DIR/flower/circumstances.csv; DIR is
docs/results by default.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from table import DOCS, options

from apportion.domains.federated import aggregators
from apportion.domains.federated.aggregators import CHANCE_OFFSET, Memoryless, Received, is_better
from apportion.domains.federated.data import KINDS, Digits, embedded_digits, mixture
from apportion.domains.federated.federation import Federation, ServerSamples
from apportion.domains.federated.policy import shipped_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.states import average
from apportion_studies.federated import peers

ROUNDS, EPOCHS, TESTED = 20, 3, 800
HONEST = ("equal", "sizes", "two-labels", "dirichlet-0.3", "paper", "paper+late")
NOISE = ("symmetric-noise", "pairwise-noise", "noise-by-client")
ATTACKS = ("flipped-3", "colluders", "sleepers", "free-riders")
CASES = (*HONEST, *NOISE, *ATTACKS)


class MultiKrum(Memoryless):
    """Mean of the m - f models nearest to their m - f - 2 nearest neighbours, f being two fifths."""

    def __call__(self, received: Received):
        mask, m = received.mask, received.mask.sum()
        others = mask[None, :] & ~jnp.eye(len(mask), dtype=bool)
        apart = ((received.models[:, None] - received.models[None]) ** 2).sum(-1)
        ordered = jnp.sort(jnp.where(others, apart, jnp.inf), axis=-1)
        byzantine = jnp.floor(0.4 * m)
        near = jnp.arange(len(mask))[None, :] < jnp.maximum(m - byzantine - 2, 1)
        score = jnp.where(mask, jnp.where(near, ordered, 0.0).sum(-1), jnp.inf)
        kept = (jnp.argsort(jnp.argsort(score)) < m - byzantine) & mask
        shares = kept / kept.sum()
        return average(shares, received.models), shares


class LearnedThenTuned(Memoryless):
    """`Learned`, then trained on the server's samples if held-out samples are in favour of it."""

    learned: aggregators.Learned

    def __call__(self, received: Received):
        model, shares = self.learned(received)
        samples, federation = received.samples, received.federation
        real, folds = samples.shown | samples.kept, jnp.arange(len(samples.places)) % 4
        parts = [real & (folds != fold) for fold in range(4)]
        tuned = jnp.stack([self._trained(received, model, own) for own in (*parts, real)])
        chances, right = federation.answers(jnp.stack([*tuned[:4], model]), samples.places)
        logs = jnp.log(chances + CHANCE_OFFSET)
        held_out, more = (own[folds, jnp.arange(len(folds))] - own[4] for own in (logs, right))
        better = is_better(held_out, real) & (jnp.where(real, more, 0.0).sum() >= 0)
        return jnp.where(better, tuned[4], model), shares

    def _trained(self, received: Received, model, chosen):
        own = replace(received.samples, shown=chosen, kept=jnp.zeros_like(chosen))
        return peers._trained(replace(received, samples=own), model)[0]


LEARNED = aggregators.Learned(shipped_policy())
METHODS = {
    "FedAvg": aggregators.BySamples(),
    "FedAvgM": aggregators.ServerStep(momentum=0.7),
    "median": aggregators.Median(),
    "Multi-Krum": MultiKrum(),
    "gradient shares, momentum": peers.GradientShares(momentum=0.5),
    "fine-tuned": peers.FineTuned(),
    "learned": LEARNED,
    "learned, then tuned": LearnedThenTuned(LEARNED),
}


class Sized(Federation):
    """A federation whose server has `count` samples, 200 at most: one program for any number."""

    count: jax.Array

    def __init__(self, *args, count, **options):
        super().__init__(*args, **options)
        self.count = jnp.asarray(count)

    def _own_samples(self, key):
        places = jax.random.permutation(key, self.evaluation)[:200]
        real = jnp.arange(200) < self.count
        kept = real & (jnp.arange(200) % 4 == 3)
        return ServerSamples(places, real & ~kept, kept)


@dataclass(frozen=True)
class Circumstance:
    """Numbers of clients, and how many of them take part in a round."""

    clients: tuple[int, ...]
    participation: float
    own: int
    """Samples of a client."""
    samples: tuple[int, ...]
    """Numbers of the server's samples."""


CIRCUMSTANCES = (
    Circumstance((10, 5), 1.0, 50, (200, 20)),
    Circumstance((100,), 0.1, 36, (200,)),
)


@cache
def data_of(name: str) -> Digits:
    """Digits, or a table of clusters in twelve dimensions seen through 49 noisy columns."""
    if name == "digits":
        return embedded_digits().pooled(4)
    rng, count = np.random.default_rng(0), 5000
    chances = np.array([35, 25, 12, 7, 6, 5, 4, 3, 2, 1]) / 100 if name == "rare classes" else None
    labels = rng.choice(10, count, p=chances)
    centres = 1.3 * rng.normal(size=(10, 2, 12))
    hidden = centres[labels, rng.integers(0, 2, count)] + 0.9 * rng.normal(size=(count, 12))
    columns = np.tanh(hidden @ rng.normal(size=(12, 49)) / 3) + 0.52 * rng.normal(size=(count, 49))
    scaled = ((columns - columns.mean(0)) / columns.std(0)).astype(np.float32)
    server = np.arange(count) < 1300
    return Digits(scaled.reshape(count, 7, 7), labels.astype(np.int32), server)


RATES = {
    "digits, fast": ("digits", 1.0),
    "digits, slow": ("digits", 0.1),
    "table, fast": ("table", 0.45),
    "table, slow": ("table", 0.03),
    "rare classes": ("rare classes", 0.15),
}
"""Data and step size of the clients."""


@eqx.filter_jit
def final_accuracies(federation: Federation, aggregator, tasks, keys):
    """Plain and balanced accuracy on the test set after the last round of every task."""
    frequency = jax.nn.one_hot(federation.labels[federation.test], federation.classes).mean(0)

    def episode(task, key):
        reset_key, walk_key = jax.random.split(key)

        def one_round(carry, key):
            state, memory = carry
            received = aggregators.receive(federation, task, state, key)
            model, shares, memory = aggregator.step(received, memory)
            step = federation.continue_from(task, state, model, shares, key=key)
            return (step.state, memory), None

        first = federation.reset(task, key=reset_key)
        keys = jax.random.split(walk_key, federation.horizon)
        begun = (first, aggregator.begin(first.aggregate))
        (last, _), _ = jax.lax.scan(one_round, begun, keys)
        correct = federation.correct(last.aggregate[None], federation.test)[0]
        return correct.sum(), (correct / jnp.maximum(frequency, 1e-6)).mean()

    return jax.vmap(episode)(tasks, keys)


def compare(own: Circumstance, seeds: int) -> list[dict]:
    """Rows of all methods, kinds and data in some circumstances."""
    wanted = [(k, c, s) for c in own.clients for k in CASES for s in range(seeds)]
    keys = jnp.stack([
        jax.random.fold_in(jax.random.key(1000 + seed), KINDS.index(kind)) for kind, _, seed in wanted
    ])  # fmt: skip
    rows = []
    for (method, aggregator), (where, (data, rate)) in product(METHODS.items(), RATES.items()):
        if own.participation < 1 and (method == "learned, then tuned" or where == "rare classes"):
            continue
        digits = data_of(data)
        dealt = mixture(digits, wanted, np.flatnonzero(~digits.server), samples=own.own)
        settings = GradientSettings(
            rounds=ROUNDS, epochs=EPOCHS, client_rate=rate, evaluation=250, test=TESTED, width=24,
            pooling=1, block=1000,
        )  # fmt: skip
        for count in own.samples:
            federation = Sized(
                dealt.digits, dealt.partition, settings, participation=own.participation,
                gate=True, count=count,
            )  # fmt: skip
            found = np.array(final_accuracies(federation, aggregator, dealt.tasks, keys))
            print(f"{own.clients}, {count}, {where}, {method}: {found[0].mean():.3f}", flush=True)
            rows += [
                {"clients": clients, "participation": own.participation, "samples": count,
                 "data": where, "kind": kind, "method": method, "seed": seed,
                 "accuracy": round(float(plain), 4), "balanced": round(float(balanced), 4)}
                for (kind, clients, seed), plain, balanced in zip(wanted, *found, strict=True)
            ]  # fmt: skip
    return rows


def main() -> None:
    parser = options(__doc__, out=DOCS / "results")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    rows = [row for own in CIRCUMSTANCES for row in compare(own, asked.seeds)]
    folder = asked.out / "flower"
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "circumstances.csv", index=False)
    about = {"command": f"python benchmarks/flower_circumstances.py --seeds {asked.seeds}"}
    (folder / "circumstances.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
