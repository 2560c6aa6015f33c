"""Make the aggregation policy that comes with the package, or train its shares further.

    python benchmarks/aggregation_policy.py [make|retrain|compare] [--out DIR]

`retrain` starts from the shipped policy. It trains the shares with the screening and the gate in the loop,
draws the clients' step size and participation in every episode, and leaves step and momentum as they are.
It writes DIR/aggregator_training/retrained; about 25 minutes on one CPU core. `compare` tests both policies
and FedAvg on clients and images that no training sees, and writes DIR/aggregator_training/retrained.csv.

`make` learns on all kinds of federations that are not held back, with five clients and with ten, goes on
with skews and faults combined, at half the rate, and turns what came of it into the policy that the package
ships by the numbers in docs/results/aggregator_training/theta.json: how strongly its log step, momentum and
scores count, by how much step and momentum are shifted, and how far clients' sample counts are discounted.
It writes DIR/aggregator_training, and takes a stage that is there already, `first` or `second`, as it is.
DIR is docs/results unless given.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import pandas as pd
from table import DOCS, options

from apportion.domains.federated.aggregators import BySamples, Learned, run_episodes
from apportion.domains.federated.data import HELD_BACK, KINDS, embedded_digits
from apportion.domains.federated.federation import training_world, unseen_world
from apportion.domains.federated.policy import FOLDER, AggregationPolicy, shipped_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.training import ThroughRounds, shortfall, train_mixture
from apportion.memory import Replay
from apportion.runs.policy_file import load_about, load_policy, save_policy
from apportion.training import Chunks, train

THETA = DOCS / "results" / "aggregator_training" / "theta.json"
TRAINED = tuple(kind for kind in KINDS if kind not in HELD_BACK)
CROSSED = tuple(
    f"{skew}+{fault}"
    for skew in ("dirichlet-0.1", "dirichlet-0.3", "two-labels", "sizes", "paper")
    for fault in ("noisy-labels", "flipped-1", "flipped-3", "reversed", "scaled")
)
FIRST = GradientSettings(
    kinds=",".join(TRAINED), sizes=(5, 10), rounds=30, copies=6, steps=1080, together=8
)
SECOND = replace(
    FIRST, kinds=",".join((*TRAINED, *CROSSED)), steps=820, together=16, learning_rate=5e-3
)
"""The two stages of training."""
RETRAINED = replace(
    SECOND, pooling=4, width=24, samples=60, sizes=(5, 20), rounds=20, epochs=3, copies=3,
    steps=600, together=10, rollouts=1, learning_rate=2e-3, chunk=20,
)  # fmt: skip
RATES, PARTICIPATION = (0.05, 1.0), (1.0, 0.3, 0.1)
"""Settings of `retrain`: small images, for a CPU, and as much larger step sizes of the clients."""
USUAL, SLOW = replace(RETRAINED, client_rate=0.4), replace(RETRAINED, client_rate=0.1)
WHOLE = replace(
    RETRAINED, pooling=1, width=32, samples=120, rounds=25, epochs=2, client_rate=0.1, test=800
)
COMPARED = (
    ("7 x 7 pixels", USUAL, 10, 200), ("7 x 7 pixels", USUAL, 10, 20),
    ("7 x 7 pixels", USUAL, 5, 200), ("7 x 7 pixels", USUAL, 5, 20),
    ("7 x 7 pixels, slow clients", SLOW, 10, 60),
    ("28 x 28 pixels", WHOLE, 10, 200), ("28 x 28 pixels", WHOLE, 10, 20),
)  # fmt: skip
"""Circumstances of `compare`: images, settings, clients, and the server's samples."""
SEEDS, LAST_ROUNDS = range(5000, 5006), 3
"""Federations of each kind, and the last rounds whose mean accuracy counts."""


def gone_on(
    first: AggregationPolicy, settings: GradientSettings = SECOND, server=None, **worlds
) -> AggregationPolicy:
    """Train a policy further; `server` decides step and momentum if it is given."""
    federation, tasks = training_world(settings, embedded_digits(), **worlds)
    learner = ThroughRounds(
        settings.rollouts, settings.learning_rate, updates=settings.steps, others=tasks,
        together=settings.together, logarithm=settings.logarithm, gated=server is not None,
        server=server,
    )  # fmt: skip
    _, run_key = jax.random.split(jax.random.key(1))
    begun = time.monotonic()

    def report(chunk):
        print(f"update {chunk.step}, {time.monotonic() - begun:.0f} s", flush=True)

    result = train(
        federation, tasks, first, learner, steps=settings.steps, priority=settings.priority(),
        scorer=shortfall, replay=Replay(act_periods=0),
        chunks=Chunks(settings.chunk, on_chunk=report), measure=0, key=run_key,
    )  # fmt: skip
    return cast(AggregationPolicy, result.policy)


def retrained() -> AggregationPolicy:
    """The shipped policy's step and momentum with shares that are trained further."""
    shipped = shipped_policy()
    shares = gone_on(shipped, RETRAINED, shipped, participation=PARTICIPATION, rates=RATES)
    zero = jnp.zeros_like
    return added(
        eqx.tree_at(lambda p: p.score, shipped, zero(shipped.score)),
        eqx.tree_at(lambda p: p.server, shares, zero(shares.server)),
    )


def untrained(like: AggregationPolicy, hidden: int) -> AggregationPolicy:
    """A policy that reads what another does, in other sizes, and whose shortest step is FedAvg's."""
    key = jax.random.key(0)
    return AggregationPolicy(
        like.channels, hidden, relative=like.relative, least_step=1.0, head=like.head, key=key
    )


def added(policy: AggregationPolicy, unit: AggregationPolicy) -> AggregationPolicy:
    """One policy whose scores, log step and momentum are the sums of both: their units side by side."""
    both = (policy, unit)

    def beside(part: Callable[[AggregationPolicy], jax.Array]) -> jax.Array:
        return jnp.concatenate([part(p) for p in both], -1)

    # A client's own units, their mean over the clients, and their spread where that is read.
    def parts(matrix: Callable[[AggregationPolicy], jax.Array]) -> Iterator[list[jax.Array]]:
        for n in range(matrix(policy).shape[1] // policy.hidden):
            yield [matrix(p)[:, n * p.hidden : (n + 1) * p.hidden] for p in both]

    block = jax.scipy.linalg.block_diag
    server = [jnp.concatenate(part, -1) for part in parts(lambda p: p.server.T)]
    return eqx.tree_at(
        lambda p: (
            *(p.recurrence.from_input, p.recurrence.from_state, p.recurrence.bias),
            *(p.joint.weight, p.joint.bias, p.score, p.server),
        ),
        untrained(policy, policy.hidden + unit.hidden),
        (
            beside(lambda p: p.recurrence.from_input),
            block(*(p.recurrence.from_state for p in both)),
            beside(lambda p: p.recurrence.bias),
            jnp.concatenate([block(*part) for part in parts(lambda p: p.joint.weight)], 1),
            beside(lambda p: cast(jax.Array, p.joint.bias)),
            beside(lambda p: p.score),
            jnp.concatenate(server, -1).T,
        ),
    )


def calibrated(policy: AggregationPolicy, theta: jax.Array) -> AggregationPolicy:
    """Log step, momentum and scores times exp(theta[:3]); log step and momentum shifted by theta[3:5],
    by one more unit that is always 1.
    """
    factors = jnp.exp(theta[:3])
    outputs = (policy.server * factors[:2], policy.score * factors[2])
    scaled = eqx.tree_at(lambda p: (p.server, p.score), policy, outputs)
    one = jax.tree.map(jnp.zeros_like, untrained(policy, 1))
    shifts = (jnp.full(1, 20.0), one.server.at[0].set(theta[3:5]))
    return added(scaled, eqx.tree_at(lambda p: (p.joint.bias, p.server), one, shifts))


def discounted(policy: AggregationPolicy, theta: float, reach: float) -> AggregationPolicy:
    """The same policy with FedAvg's shares to the power of 1 - theta in place of themselves.

    One more unit passes on how far the log of a client's share is from an equal one, for the score to
    take theta times of it away: where all clients hold the same number of samples it says nothing. It
    reads `reach` of that distance: tanh is all but a line where that is short, and saturates where long.
    """
    one = jax.tree.map(jnp.zeros_like, untrained(policy, 1))
    unit = eqx.tree_at(
        lambda p: (p.recurrence.from_input, p.joint.weight, p.score),
        one,
        (
            one.recurrence.from_input.at[0].set(reach),
            one.joint.weight.at[0, 0].set(1.0),
            jnp.full(1, -theta / reach),
        ),
    )
    return added(policy, unit)


def finished(policy: AggregationPolicy) -> AggregationPolicy:
    """With the numbers that were found for it."""
    said = json.loads(THETA.read_text())
    made = calibrated(policy, jnp.asarray(said["theta"], jnp.float32))
    return discounted(made, **said["counts"])


def make(folder: Path) -> None:
    """Both stages of training, and the numbers that turn the second into the shipped policy."""

    def kept(name: str, settings: GradientSettings, stage: Callable[[], AggregationPolicy]):
        if not (folder / name).exists():
            policy = stage()
            about = {
                "job": "federated", "window": settings.window, "state": settings.state,
                "channels": policy.channels, "kinds": settings.kinds.split(","),
            }  # fmt: skip
            save_policy(policy, folder / name, about)
        return cast(AggregationPolicy, load_policy(folder / name))

    chunks = Chunks(FIRST.chunk)
    first = kept("first", FIRST, lambda: train_mixture(FIRST, embedded_digits(), chunks=chunks))
    second = kept("second", SECOND, lambda: gone_on(first))
    save_policy(finished(second), folder, load_about(folder / "second"))


def compare(folder: Path) -> None:
    """Test the shipped policy, the retrained one and FedAvg in the same federations of all kinds."""
    policies = {"shipped": shipped_policy(), "retrained": load_policy(folder / "retrained")}
    methods = {name: Learned(cast(AggregationPolicy, one)) for name, one in policies.items()}
    kinds, rows = list(KINDS), []
    for images, settings, clients, samples in COMPARED:
        wanted = [(kind, clients, seed) for kind, seed in product(kinds, SEEDS)]
        federation, tasks = unseen_world(settings, embedded_digits(), wanted, samples=samples)
        keys = [
            jax.random.fold_in(jax.random.key(seed), kinds.index(kind)) for kind, _, seed in wanted
        ]
        circumstance = {"images": images, "clients": clients, "samples": samples}
        for name, aggregator in {"FedAvg": BySamples(), **methods}.items():
            record = run_episodes(
                federation,
                aggregator,
                tasks,
                jnp.stack(keys),
                test_from=settings.rounds - LAST_ROUNDS,
            )
            final = record.tested[:, -LAST_ROUNDS:].mean(1).tolist()
            rows += [
                {**circumstance, "kind": kind, "seed": seed, "method": name, "accuracy": accuracy}
                for (kind, _, seed), accuracy in zip(wanted, final, strict=True)
            ]
        own = pd.DataFrame(rows)
        print(circumstance, own[-len(wanted) * 3 :].groupby("method").accuracy.mean().to_dict())
    pd.DataFrame(rows).to_csv(folder / "retrained.csv", index=False, float_format="%.4f")


def main() -> None:
    parser = options(__doc__, out=DOCS / "results")
    parser.add_argument("job", nargs="?", choices=("make", "retrain", "compare"), default="make")
    asked = parser.parse_args()
    folder = asked.out / "aggregator_training"
    if asked.job != "retrain":
        {"make": make, "compare": compare}[asked.job](folder)
        return
    about = load_about(FOLDER) | {"kinds": RETRAINED.kinds.split(",")}
    save_policy(retrained(), folder / "retrained", about)


if __name__ == "__main__":
    main()
