"""What to use when: learned aggregation and its rivals on data that nothing else here uses, on a CPU.

    python benchmarks/flower_circumstances.py [--seeds 7] [--clients 10 5 100] [--out DIR]

The data are 4,635 docstrings of ten installed packages, 17 % from the most frequent package and 3 % from
the rarest. A model reads the principal components of the words and names the package. `fast` clients nearly
converge in 20 rounds of FedAvg, `slow` ones do not; these step sizes were chosen by FedAvg alone, on other
federations. Writes a row for each federation and method, with plain and balanced accuracy, to
DIR/flower/circumstances.csv, and versions and fingerprint of the data to circumstances.json; DIR is
docs/results by default.

Rivals have the settings of their papers, or of Flower where it has them: FedAvgM a momentum of 0.9 (Hsu et
al. 2019), and of 0.7 as a milder choice; the trimmed mean leaves out a fifth at either end; Multi-Krum
assumes that two fifths of the clients are malicious. Fine-tuning trains FedAvg's model as a client does, on
all samples of the server, in every round.
"""

import ast
import importlib.metadata
import json
import re
import sysconfig
import zlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from table import DOCS, options

from apportion.domains.federated import aggregators
from apportion.domains.federated.aggregators import CHANCE_OFFSET, Memoryless, Received, is_better
from apportion.domains.federated.data import KINDS, Digits, mixture
from apportion.domains.federated.federation import Federation, ServerSamples
from apportion.domains.federated.policy import shipped_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.states import average
from apportion_studies.federated import peers

ROUNDS, EPOCHS, TESTED, FIRST_KEY = 20, 3, 800, 7000
PACKAGES = {
    "numpy": 635, "scipy": 800, "pandas": 650, "scikit-learn": 550, "jax": 500, "matplotlib": 450,
    "plotly": 400, "ray": 300, "SQLAlchemy": 200, "selenium": 150,
}  # fmt: skip
"""Docstrings of each package."""
FOLDERS = {"scikit-learn": "sklearn", "SQLAlchemy": "sqlalchemy"}
SIDE, HASHES, SHORTEST, MOST_IN_FILE = 10, 2048, 80, 8
"""Root of the number of features, hashes of words, letters of the shortest docstring, and largest number of
docstrings from a file."""


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
    "FedAvgM, 0.9": aggregators.ServerStep(momentum=0.9),
    "FedAvgM, 0.7": aggregators.ServerStep(momentum=0.7),
    "median": aggregators.Median(),
    "trimmed mean": aggregators.TrimmedMean(),
    "Multi-Krum": MultiKrum(),
    "gradient shares, momentum": peers.GradientShares(momentum=0.5),
    "fine-tuned": peers.FineTuned(),
    "learned": LEARNED,
    "learned, then tuned": LearnedThenTuned(LEARNED),
}


WITHOUT_SAMPLES = tuple(METHODS)[:6]
"""Methods that ignore the server's samples."""


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
    """Number of clients, and how many of them take part in a round."""

    clients: int
    participation: float
    own: int
    """Samples of a client."""
    samples: tuple[int, ...]
    """Numbers of the server's samples."""
    methods: tuple[str, ...] = tuple(METHODS)


_RARE = ("FedAvg", "FedAvgM, 0.9", "gradient shares, momentum", "fine-tuned", "learned")
CIRCUMSTANCES = (
    Circumstance(10, 1.0, 50, (200, 20)),
    Circumstance(5, 1.0, 50, (200, 20)),
    Circumstance(100, 0.1, 33, (200,), _RARE),
)


def docstrings(package: str, count: int, rng: np.random.Generator) -> list[str]:
    """Distinct docstrings from the files of an installed package, in random order."""
    folder = Path(sysconfig.get_paths()["purelib"]) / FOLDERS.get(package, package)
    files = sorted(file for file in folder.rglob("*.py") if "tests" not in file.parts)
    found: dict[str, None] = {}
    for place in rng.permutation(len(files)):
        try:
            tree = ast.parse(files[place].read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        own = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        found |= dict.fromkeys(
            [text for text in own if text and len(text) >= SHORTEST][:MOST_IN_FILE]
        )
        if len(found) >= count:
            break
    return list(found)[:count]


def hashed_words(text: str) -> np.ndarray:
    """Log counts of words by their hashes, without the names of the packages."""
    row, names = np.zeros(HASHES), {FOLDERS.get(name, name) for name in PACKAGES}
    for word in re.findall("[a-z]{3,}", text.lower()):
        if word not in names:
            row[zlib.crc32(word.encode()) % HASHES] += 1
    return np.log1p(row)


@cache
def text_data() -> Digits:
    """Docstrings as squares of features, and the packages they are from as labels."""
    rng = np.random.default_rng(0)
    texts = [docstrings(package, count, rng) for package, count in PACKAGES.items()]
    labels = np.repeat(np.arange(len(texts)), [len(own) for own in texts])
    rows = np.stack([hashed_words(text) for own in texts for text in own])
    # Rare words weigh more; components of the words, computed without labels.
    rows = rows * np.log(len(rows) / (1 + (rows > 0).sum(0)))
    rows = rows / (np.linalg.norm(rows, axis=1, keepdims=True) + 1e-6)
    rows = rows - rows.mean(0)
    rows = rows @ np.linalg.eigh(rows.T @ rows)[1][:, -(SIDE**2) :]
    rows = (rows / rows.std()).astype(np.float32)
    order = rng.permutation(len(labels))
    server = np.arange(len(labels)) < 1300
    return Digits(rows[order].reshape(-1, SIDE, SIDE), labels[order].astype(np.int32), server)


RATES = {"fast": 0.3, "slow": 0.03}
"""Step sizes of the clients."""


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
    """Rows of all methods and kinds in some circumstances."""
    wanted = [(kind, own.clients, seed) for kind in KINDS for seed in range(seeds)]
    keys = jnp.stack([
        jax.random.fold_in(jax.random.key(FIRST_KEY + seed), KINDS.index(kind))
        for kind, _, seed in wanted
    ])  # fmt: skip
    digits, rows = text_data(), []
    dealt = mixture(digits, wanted, np.flatnonzero(~digits.server), samples=own.own)
    for method, aggregator in ((name, METHODS[name]) for name in own.methods):
        for speed, rate in RATES.items():
            settings = GradientSettings(
                rounds=ROUNDS, epochs=EPOCHS, client_rate=rate, evaluation=250, test=TESTED,
                width=16, pooling=1, block=1000,
            )  # fmt: skip
            for count in own.samples:
                if method in WITHOUT_SAMPLES and count != own.samples[0]:
                    rows += [row | {"samples": count} for row in rows[-len(wanted) :]]
                    continue
                federation = Sized(
                    dealt.digits, dealt.partition, settings, participation=own.participation,
                    gate=True, count=count,
                )  # fmt: skip
                found = np.array(final_accuracies(federation, aggregator, dealt.tasks, keys))
                print(
                    f"{own.clients}, {count}, {speed}, {method}: {found[0].mean():.3f}", flush=True
                )
                rows += [
                    {"clients": clients, "participation": own.participation, "samples": count,
                     "speed": speed, "kind": kind, "method": method, "seed": seed,
                     "accuracy": round(float(plain), 4), "balanced": round(float(balanced), 4)}
                    for (kind, clients, seed), plain, balanced in zip(wanted, *found, strict=True)
                ]  # fmt: skip
    return rows


def main() -> None:
    parser = options(__doc__, out=DOCS / "results")
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 5, 100])
    asked = parser.parse_args()
    file = asked.out / "flower" / "circumstances.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = pd.read_csv(file) if file.exists() else pd.DataFrame({"clients": []})
    for own in CIRCUMSTANCES:
        if own.clients in asked.clients:
            others = rows[rows["clients"] != own.clients]
            rows = pd.concat([others, pd.DataFrame(compare(own, asked.seeds))])
            rows.to_csv(file, index=False)
    about = {
        "command": f"python benchmarks/flower_circumstances.py --seeds {asked.seeds}",
        "fingerprint": text_data().fingerprint,
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
    }
    (file.parent / "circumstances.json").write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
