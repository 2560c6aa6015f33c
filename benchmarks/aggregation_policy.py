"""The aggregation policies that come with the package: how the first is made, how the blind one does.

    python benchmarks/aggregation_policy.py train --updates 1080 --seed 0 --out FIRST
    python benchmarks/aggregation_policy.py train --start FIRST --updates 820 --seed 1 --out SECOND
    python benchmarks/aggregation_policy.py calibrate SECOND MNIST --out DIR
    python benchmarks/aggregation_policy.py apply SECOND --out DIR
    python benchmarks/aggregation_policy.py blind [--seeds 8]

`train` learns on all kinds of federations that are not held back, with five clients and with ten; with a
policy to start from it goes on with skews and faults combined, at half the rate. Its gradient sees one
round ahead: `calibrate` therefore goes on by an evolution strategy, for the accuracy of the last rounds,
over how strongly the policy's log step, momentum and scores count, by how much step and momentum are
shifted, and how short steps may be. Its federations are dealt out of images of MNIST (the usual
mnist.npz) that the study `federations` never deals out. `apply` makes the policy that the package ships,
by the numbers in docs/results/aggregator_training/theta.json: those six, and how far clients' sample
counts are discounted. `blind` tries the shipped policy for servers without samples, which no gate guards,
on every kind of federation against FedAvg, FedAvgM and the defences that need no samples either; it
writes docs/results/blind.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.domains.federated.aggregators import (
    Aggregator,
    BySamples,
    Learned,
    Median,
    NearestMixing,
    ServerStep,
    run_episodes,
)
from apportion.domains.federated.data import (
    HELD_BACK,
    KINDS,
    Digits,
    embedded_digits,
    halves,
    load_images,
    mixture,
)
from apportion.domains.federated.federation import Federation, training_world, unseen_world
from apportion.domains.federated.policy import LEAST_STEP, AggregationPolicy, shipped_blind_policy
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.training import ThroughRounds, shortfall
from apportion.memory import Replay
from apportion.priority import Priority
from apportion.runs.environment import devices, versions
from apportion.runs.policy_file import load_policy, save_policy
from apportion.statistics import compare
from apportion.training import Chunks, train

RESULTS = Path(__file__).parents[1] / "docs" / "results"
THETA = RESULTS / "aggregator_training" / "theta.json"
CROSSED = tuple(
    f"{skew}+{fault}"
    for skew in ("dirichlet-0.1", "dirichlet-0.3", "two-labels", "sizes", "paper")
    for fault in ("noisy-labels", "flipped-1", "flipped-3", "reversed", "scaled")
)
TRAINED = tuple(kind for kind in KINDS if kind not in HELD_BACK)
IMAGES, SERVERS, LAST, COPIES = 12000, 2600, 5, 12
"""To calibrate on, those of them for the server, the rounds that count, and federations of each kind."""
FIRST = np.array([0.0, np.log(1.2), 0.0, 0.0, 0.0, np.log(0.65 / 0.75)])
SPREAD = np.array([0.15, 0.25, 0.1, 0.15, 0.08, 0.2])
CIRCUMSTANCES = {
    "10 clients, as in training": (10, {"samples": 80}, 4),
    "20 clients of 60 images": (20, {"samples": 60}, 2),
    "convolutional": (10, {"samples": 80, "model": "convolutional", "width": 8}, 2),
}
"""For the blind policy: clients, settings other than those of its training, and the peers tried there."""
PEERS: dict[str, Aggregator] = {
    "FedAvg": BySamples(),
    "FedAvgM": ServerStep(momentum=0.7),
    "median": Median(),
    "nearest-neighbour mixing": NearestMixing(0.3),
}


def trained(
    updates: int, seed: int, start: AggregationPolicy | None
) -> tuple[AggregationPolicy, dict]:
    """The first stage, or the second from where the first ended, with what is said of it; every draw is the
    seed's.
    """
    kinds = TRAINED if start is None else (*TRAINED, *CROSSED)
    settings = GradientSettings(
        kinds=",".join(kinds), sizes=(5, 10), rounds=30, copies=COPIES // 2, hidden=32
    )
    federation, tasks = training_world(settings, embedded_digits())
    policy_key, run_key = jax.random.split(jax.random.key(seed))
    first = AggregationPolicy(federation.channels, 32, relative=True, key=policy_key)
    learner = ThroughRounds(
        2, 1e-2 if start is None else 5e-3, updates=updates, others=tasks,
        together=8 if start is None else 16, logarithm=True,
    )  # fmt: skip
    result = train(
        federation, tasks, start or first, learner, steps=updates,
        selection=Priority(0.0, beta=0.0), scorer=shortfall, replay=Replay(act_periods=0),
        chunks=Chunks(40), key=run_key,
    )  # fmt: skip
    about = {
        "job": "federated", "window": federation.window, "state": settings.state,
        "channels": federation.channels, "kinds": list(kinds),
    }  # fmt: skip
    return cast(AggregationPolicy, result.policy), about


class Stepping(eqx.Module):
    """A policy whose shortest step is an array, so that one program tries many."""

    policy: AggregationPolicy
    least: jax.Array

    def decide(self, observation, mask):
        decision = self.policy.decide(observation, mask)
        return replace(decision, step=jnp.maximum(decision.step, self.least))


def untrained(like: AggregationPolicy, hidden: int, least_step: float) -> AggregationPolicy:
    """A policy that reads what another does, in other sizes."""
    return AggregationPolicy(
        like.channels, hidden, relative=like.relative, least_step=least_step, head=like.head,
        key=jax.random.key(0),
    )  # fmt: skip


def bounded(policy: AggregationPolicy, least_step: float) -> AggregationPolicy:
    """The same policy with another shortest step."""
    structure = jax.tree.structure(untrained(policy, policy.hidden, least_step))
    return jax.tree.unflatten(structure, jax.tree.leaves(policy))


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
        untrained(policy, policy.hidden + unit.hidden, policy.least_step),
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
    by one more unit that is always 1."""
    factors = jnp.exp(theta[:3])
    outputs = (policy.server * factors[:2], policy.score * factors[2])
    scaled = eqx.tree_at(lambda p: (p.server, p.score), policy, outputs)
    one = jax.tree.map(jnp.zeros_like, untrained(policy, 1, policy.least_step))
    shifts = (jnp.full(1, 20.0), one.server.at[0].set(theta[3:5]))
    return added(scaled, eqx.tree_at(lambda p: (p.joint.bias, p.server), one, shifts))


def discounted(policy: AggregationPolicy, theta: float, reach: float) -> AggregationPolicy:
    """The same policy with FedAvg's shares to the power of 1 - theta in place of themselves.

    One more unit passes on how far the log of a client's share is from an equal one, for the score to
    take theta times of it away: where all clients hold the same number of samples it says nothing. It
    reads `reach` of that distance: tanh is all but a line where that is short, and saturates where long.
    """
    one = jax.tree.map(jnp.zeros_like, untrained(policy, 1, policy.least_step))
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


def least_step(theta: jax.Array) -> jax.Array:
    """What the last number says of the shortest step."""
    return jnp.clip(0.75 * jnp.exp(theta[5]), LEAST_STEP, 1.0)


@eqx.filter_jit
def fitness(federation, policy, thetas, tasks, keys):
    """Mean test accuracy of the last rounds for each row of `thetas`, gated as in use."""

    def one(theta):
        tried = Stepping(calibrated(policy, theta), least_step(theta))
        record = run_episodes(federation, Learned(cast(AggregationPolicy, tried)), tasks, keys)
        return record.tested[:, -LAST:].mean()

    return jax.vmap(one)(thetas)


def search(mnist: Digits, policy: AggregationPolicy, generations: int, pairs: int) -> np.ndarray:
    """The mean of the later half of the generations; each tries pairs on either side of where it is."""
    settings = GradientSettings(
        pooling=1,
        samples=200,
        rounds=30,
        epochs=2,
        client_rate=0.1,
        evaluation=400,
        test=2000,
        seed=77,
    )
    places = np.random.default_rng(11).permutation(halves(mnist)[0])[:IMAGES]
    servers = np.arange(IMAGES) < SERVERS
    digits = Digits(mnist.images[places], mnist.labels[places], servers)
    wanted = [(kind, 10, 7000 + n) for kind in TRAINED for n in range(COPIES)]
    dealt = mixture(digits, wanted, np.flatnonzero(~servers), samples=settings.samples)
    federation = Federation(
        dealt.digits, dealt.partition, settings, drawn=settings.server_samples, gate=True
    )
    by_kind = np.arange(len(wanted)).reshape(len(TRAINED), COPIES)
    rng, theta, path = np.random.default_rng(1), FIRST, []
    for generation in range(generations):
        noise = rng.normal(size=(pairs, len(theta)))
        thetas = jnp.asarray(theta + SPREAD * np.concatenate([noise, -noise]), jnp.float32)
        drawn = np.random.default_rng([5, 1000 + generation])
        chosen = np.concatenate([drawn.choice(own, 2, replace=False) for own in by_kind])
        keys = jax.random.split(jax.random.key(1900 + generation), len(chosen))
        found = np.asarray(fitness(federation, policy, thetas, dealt.tasks[chosen], keys))
        ranks = (np.argsort(np.argsort(found)) + 0.5) / len(found) - 0.5
        slope = ((ranks[:pairs] - ranks[pairs:])[:, None] * noise).mean(0)
        theta = theta + 2 * SPREAD * slope / max(1, np.linalg.norm(slope)) * 0.93**generation
        path.append(theta)
        print(f"generation {generation}: {found.mean():.4f}, {theta.round(2).tolist()}", flush=True)
    return np.mean(path[len(path) // 2 :], 0)


def blind(seeds: range) -> list[dict]:
    """A row for each circumstance, kind and aggregator, with the paired gain over FedAvg."""
    rows = []
    for name, (clients, changed, peers) in CIRCUMSTANCES.items():
        settings = GradientSettings(state="blind", **changed)
        wanted = [(kind, clients, seed) for kind in KINDS for seed in seeds]
        federation, tasks = unseen_world(settings, embedded_digits(), wanted)
        keys = jax.random.split(jax.random.key(seeds[0]), len(wanted))
        aggregators = dict(list(PEERS.items())[:peers])
        aggregators["learned"] = Learned(shipped_blind_policy(), gated=False)
        found = {}
        for method, aggregator in aggregators.items():
            record = run_episodes(federation, aggregator, tasks, keys)
            tested = np.asarray(record.tested[:, -1], float)
            tested = tested.reshape(len(KINDS), len(seeds))
            found[method] = np.vstack([tested, tested.mean(0)])
            print(f"{name}: {method} {tested.mean():.4f}", flush=True)
            gained = found[method] - found["FedAvg"]
            worst = [*gained[:-1].min(1), gained[:-1].min()]
            for k, kind in enumerate((*KINDS, "mean")):
                gain = compare(found[method][k], found["FedAvg"][k])
                rows.append({
                    "circumstance": name, "kind": kind, "aggregator": method, "seeds": gain.n,
                    "accuracy": found[method][k].mean(), "gain": gain.value, "low": gain.low,
                    "high": gain.high, "worst run": worst[k],
                })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["train", "calibrate", "apply", "blind"])
    parser.add_argument("policy", type=Path, nargs="?")
    parser.add_argument("mnist", type=Path, nargs="?")
    parser.add_argument("--updates", type=int, default=1080)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--start", type=Path)
    parser.add_argument("--least-step", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "blind")
    asked = parser.parse_args()
    given = asked.start or asked.policy
    policy = None if given is None else cast(AggregationPolicy, load_policy(given))
    begun = time.perf_counter()
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "train":
        policy, about = trained(asked.updates, asked.seed, policy)
        save_policy(policy, asked.out, about)
    elif asked.what == "blind":
        rows = pd.DataFrame(blind(range(100, 100 + asked.seeds)))
        rows.round(4).to_csv(asked.out / "table.csv", index=False)
        about = {
            "command": f"python benchmarks/aggregation_policy.py blind --seeds {asked.seeds}",
            "policy": "apportion train federated --state blind",
            "versions": versions(),
            "devices": devices(),
            "seconds": round(time.perf_counter() - begun),
        }
        (asked.out / "about.json").write_text(json.dumps(about, indent=1) + "\n")
    else:
        assert policy is not None
        said = json.loads(THETA.read_text())
        if asked.what == "calibrate":
            begun = bounded(policy, LEAST_STEP)
            theta = search(load_images(asked.mnist), begun, asked.generations, asked.pairs)
            found = round(float(least_step(jnp.asarray(theta))), 2)
            said = said | {"theta": theta.tolist(), "least_step_found": found}
            (asked.out / "theta.json").write_text(json.dumps(said, indent=1) + "\n")
        made = calibrated(policy, jnp.asarray(said["theta"], jnp.float32))
        made = bounded(discounted(made, **said["counts"]), asked.least_step)
        save_policy(
            made, asked.out, json.loads((asked.policy / "policy.json").read_text())["about"]
        )


if __name__ == "__main__":
    main()
