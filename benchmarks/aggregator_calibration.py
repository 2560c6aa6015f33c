"""Numbers of an aggregation policy, calibrated for how well federations end.

    python benchmarks/aggregator_calibration.py calibrate POLICY MNIST --out DIR [--least-step 1]
    python benchmarks/aggregator_calibration.py apply POLICY --out DIR [--least-step 1]
    python benchmarks/aggregator_calibration.py table

The gradient that a policy is trained by sees one round ahead. `calibrate` goes on from the policy in the
folder POLICY by an evolution strategy, for the accuracy of the last rounds: how strongly the policy's
log step, momentum and scores count, by how much step and momentum are shifted, and how short steps may
be. It writes the calibrated policy and theta.json into DIR, in a minute or two on a graphics card. The
federations are of the study's sizes, dealt out of images of MNIST (the usual mnist.npz) that the study
`federations` never deals out. `apply` makes the policy that the package ships out of the one in POLICY, by
the numbers in theta.json: those six, and how far the clients' counts are taken back, which
aggregator_sizes.py chose. `table` writes calibration.csv out of calibration.json: test accuracy on
validation by samples, method, kind and seed.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from apportion.domains.federated.aggregators import Learned, run_each
from apportion.domains.federated.data import KINDS, Digits, Mixture, halves, load_mnist, mixture
from apportion.domains.federated.federation import Federation, federation_of
from apportion.domains.federated.policy import LEAST_STEP, AggregationPolicy, averaged
from apportion.domains.federated.settings import GradientSettings
from apportion.runs.policy_file import load_policy, save_policy

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "aggregator_training"
SETTINGS = GradientSettings(pooling=1, samples=200, rounds=30, epochs=2, client_rate=0.1, copies=12)
IMAGES, SERVERS, LAST = 12000, 2600, 5
"""To deal out, those of them for the server, and the rounds that count."""
FIRST = np.array([0.0, np.log(1.2), 0.0, 0.0, 0.0, np.log(0.65 / 0.75)])
SPREAD = np.array([0.15, 0.25, 0.1, 0.15, 0.08, 0.2])
NARROW = 0.05
"""Where tanh is all but a line."""
RIVAL = "gradient shares, momentum"


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


def calibrated(policy: AggregationPolicy, theta: jax.Array) -> AggregationPolicy:
    """Log step, momentum and scores times exp(theta[:3]); log step and momentum shifted by theta[3:5].

    A second policy, of one unit that is always 1, says the shifts; `averaged` halves what both say.
    """
    factors = 2 * jnp.exp(theta[:3])
    scaled = eqx.tree_at(
        lambda p: (p.server, p.score),
        policy,
        (policy.server * factors[:2], policy.score * factors[2]),
    )
    one = untrained(policy, 1, policy.least_step)
    shift = eqx.tree_at(
        lambda p: (p.recurrence, p.joint.weight, p.joint.bias, p.server),
        one,
        (
            jax.tree.map(jnp.zeros_like, one.recurrence),
            jnp.zeros_like(one.joint.weight),
            jnp.full(1, 20.0),
            one.server.at[0].set(2 * theta[3:5]),
        ),
    )
    return averaged([scaled, shift])


def levelled(
    policy: AggregationPolicy, theta: float | jax.Array, reach: float | jax.Array = NARROW
):
    """The same policy with FedAvg's shares to the power of 1 - theta in place of themselves.

    One more unit passes on how far the log of a client's share is from an equal one, for the score to
    take theta times of it away: where all clients hold the same number of samples it says nothing. It
    reads `reach` of that distance, where tanh is all but a line; with a longer reach it saturates.
    """
    doubled = eqx.tree_at(
        lambda p: (p.server, p.score), policy, (2 * policy.server, 2 * policy.score)
    )
    one = jax.tree.map(jnp.zeros_like, untrained(policy, 1, policy.least_step))
    unit = eqx.tree_at(
        lambda p: (p.recurrence.from_input, p.joint.weight, p.score),
        one,
        (
            one.recurrence.from_input.at[0].set(reach),
            one.joint.weight.at[0, 0].set(1.0),
            jnp.full(1, -2 * theta / reach),
        ),
    )
    return averaged([doubled, unit])


def least_step(theta: jax.Array) -> jax.Array:
    """What the last number says of the shortest step."""
    return jnp.clip(0.75 * jnp.exp(theta[5]), LEAST_STEP, 1.0)


def training_federations(mnist: Digits, settings: GradientSettings) -> tuple[Federation, Mixture]:
    """Every kind, some federations of each, and a server with images of its own."""
    places = np.random.default_rng(11).permutation(halves(mnist)[0])[:IMAGES]
    servers = np.arange(len(places)) < SERVERS
    digits = Digits(mnist.images[places], mnist.labels[places], servers).pooled(settings.pooling)
    wanted = [(kind, 10, 7000 + n) for kind in KINDS for n in range(settings.copies)]
    dealt = mixture(digits, wanted, np.flatnonzero(~servers), samples=settings.samples)
    federation = federation_of(settings, dealt, 400, 2000, settings.server_samples, seed=77)
    return federation, dealt


@eqx.filter_jit
def fitness(federation, policy, thetas, tasks, keys):
    """Mean test accuracy of the last rounds for each row of `thetas`, gated as in use."""

    def one(theta):
        tried = Stepping(calibrated(policy, theta), least_step(theta))
        record = run_each(federation, Learned(cast(AggregationPolicy, tried)), tasks, keys)
        return record.tested[:, -LAST:].mean()

    return jax.vmap(one)(thetas)


def search(
    federation: Federation, dealt: Mixture, policy: AggregationPolicy, generations: int, half: int
) -> np.ndarray:
    """The mean of the later half of the generations; each tries pairs on either side of where it is."""
    rng, theta, path = np.random.default_rng(1), FIRST, []
    by_kind = [np.flatnonzero(np.array(dealt.kinds) == kind) for kind in KINDS]
    for generation in range(generations):
        noise = rng.normal(size=(half, len(theta)))
        thetas = jnp.asarray(theta + SPREAD * np.concatenate([noise, -noise]), jnp.float32)
        drawn = np.random.default_rng([5, 1000 + generation])
        places = np.concatenate([drawn.choice(own, 2, replace=len(own) < 2) for own in by_kind])
        keys = jax.random.split(jax.random.key(1900 + generation), len(places))
        found = np.asarray(fitness(federation, policy, thetas, dealt.tasks[places], keys))
        ranks = (np.argsort(np.argsort(found)) + 0.5) / len(found) - 0.5
        slope = ((ranks[:half] - ranks[half:])[:, None] * noise).mean(0)
        theta = theta + 2 * SPREAD * slope / max(1, np.linalg.norm(slope)) * 0.93**generation
        path.append(theta)
        print(f"generation {generation}: {found.mean():.4f}, {theta.round(2).tolist()}", flush=True)
    return np.mean(path[len(path) // 2 :], 0)


def calibrate(asked: argparse.Namespace) -> None:
    """Write the calibrated policy, and what was found."""
    policy = load_policy(asked.policy)
    assert isinstance(policy, AggregationPolicy)
    settings = replace(SETTINGS, rounds=asked.rounds)
    federation, dealt = training_federations(load_mnist(asked.mnist), settings)
    theta = search(federation, dealt, bounded(policy, LEAST_STEP), asked.generations, asked.half)
    found = jnp.asarray(theta, jnp.float32)
    about = json.loads((asked.policy / "policy.json").read_text())["about"]
    save_policy(bounded(calibrated(policy, found), asked.least_step), asked.out, about)
    said = {"theta": theta.tolist(), "least_step_found": round(float(least_step(found)), 2)}
    (asked.out / "theta.json").write_text(json.dumps(said, indent=1) + "\n")


def apply(asked: argparse.Namespace) -> None:
    """Write the policy with the numbers that were found, those of the counts included."""
    policy = load_policy(asked.policy)
    assert isinstance(policy, AggregationPolicy)
    found = json.loads((FOLDER / "theta.json").read_text())
    made = levelled(calibrated(policy, jnp.asarray(found["theta"], jnp.float32)), **found["counts"])
    about = json.loads((asked.policy / "policy.json").read_text())["about"]
    save_policy(bounded(made, asked.least_step), asked.out, about)


def table(out: Path) -> pd.DataFrame:
    """How every method stood on validation; gains are paired by federation."""
    rows = []
    for name, judged in json.loads((out / "calibration.json").read_text()).items():
        for samples, methods in judged["found"].items():
            found = {method: np.array(values) for method, values in methods.items()}
            for method, own in found.items():
                gains = (own - found["FedAvg"]).mean(1)
                lead = (own - found[RIVAL]).mean(0)
                rows.append({
                    "federations": name, "method": method, "samples": int(samples),
                    "mean": own.mean(), "over FedAvg": gains.mean(),
                    "worst kind": judged["kinds"][int(gains.argmin())],
                    "worst over FedAvg": gains.min(), "over gradient shares": lead.mean(),
                    "standard error": lead.std(ddof=1) / len(lead) ** 0.5,
                })  # fmt: skip
    return pd.DataFrame(rows).round(4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    calibrating, applying = (commands.add_parser(name) for name in ("calibrate", "apply"))
    for command in (calibrating, applying):
        command.add_argument("policy", type=Path)
        command.add_argument("--least-step", type=float, default=1.0)
        command.add_argument("--out", type=Path, required=True)
    calibrating.add_argument("mnist", type=Path)
    calibrating.add_argument("--generations", type=int, default=8)
    calibrating.add_argument("--half", type=int, default=16, help="pairs of tries in a generation")
    calibrating.add_argument("--rounds", type=int, default=SETTINGS.rounds)
    commands.add_parser("table")
    asked = parser.parse_args()
    match asked.command:
        case "calibrate":
            calibrate(asked)
        case "apply":
            apply(asked)
        case _:
            table(FOLDER).to_csv(FOLDER / "calibration.csv", index=False)


if __name__ == "__main__":
    main()
