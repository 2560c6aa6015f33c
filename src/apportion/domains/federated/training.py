"""Training and trying aggregation policies: many runs as one compiled program.

Runs differ in seed and method: single-task learning is a run whose tasks are all the same one,
uniform multi-task learning is alpha = 0. Results are plain arrays, so that the work can be done on
one machine and looked at on another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from apportion.algorithm import FAULTS, Algorithm, Metrics, RunState, advance, begin
from apportion.domains.federated.aggregators import Chosen, Course, Fixed, follow
from apportion.domains.federated.digits import Digits, embedded_digits, load_mnist
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.model import ClientModel, Convolutional, Perceptron
from apportion.domains.federated.partitions import Partition, paper_split, skewed_tasks
from apportion.domains.federated.settings import FederatedSettings
from apportion.domains.federated.states import client_state
from apportion.domains.settings import Method
from apportion.errors import InputError
from apportion.learners.ppo import PPO
from apportion.policy import Policy, Recurrent
from apportion.priority import Priority
from apportion.scorers import SCORERS
from apportion.tasks import Tasks


def read_digits(settings: FederatedSettings) -> Digits:
    """The digits that the settings name, at their full size."""
    return embedded_digits() if settings.mnist is None else load_mnist(settings.mnist)


def build(
    settings: FederatedSettings, digits: Digits, partition: Partition | None = None
) -> tuple[Federation, Partition]:
    """The federation of these settings out of full-size digits, with the partition behind it."""
    digits = digits.pooled(settings.pooling)
    side = digits.images.shape[1]
    model: ClientModel = {"convolutional": Convolutional, "perceptron": Perceptron}[settings.model](
        side, settings.width
    )
    if partition is None:
        partition = paper_split(digits, settings.clients, settings.samples, seed=settings.seed)
    federation = Federation(
        digits,
        partition,
        model,
        rounds=settings.rounds,
        epochs=settings.epochs,
        batch=settings.batch,
        learning_rate=settings.client_rate,
        evaluation=settings.evaluation,
        test=settings.test,
        sets=settings.sets,
        window=settings.window,
        state=client_state(settings.state),
        precision=settings.precision,
        block=settings.block,
        seed=settings.seed,
    )
    return federation, partition


def draw(settings: FederatedSettings, partition: Partition, seed: int) -> tuple[Tasks, Tasks]:
    """Training and unseen tasks of one seed."""
    return skewed_tasks(
        partition,
        settings.tasks,
        settings.unseen,
        sizes=settings.task_sizes,
        seen=settings.seen,
        seed=2 * seed,
    )


def stack(trees: Sequence[Any]) -> Any:
    """PyTrees of one structure as one, with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@dataclass(frozen=True)
class Trained:
    """Policies of all runs, stacked, with the metrics of each step."""

    policies: Policy
    reward: np.ndarray
    deviation: np.ndarray
    tasks: np.ndarray


def train_policies(
    settings: FederatedSettings,
    federation: Federation,
    tasks: Sequence[Tasks],
    methods: Sequence[Method],
    seeds: Sequence[int],
    *,
    chunk: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> Trained:
    """One run for each (tasks, method, seed) triple, all in one `vmap`.

    `progress` hears of it after every `chunk` updates, or after fewer where that would leave a rest.
    """
    first = np.zeros(settings.tasks, int)
    own_tasks = [
        own[first] if method == "stl" else own for own, method in zip(tasks, methods, strict=True)
    ]
    alphas = jnp.array([settings.alpha if method == "pmtl" else 0.0 for method in methods])
    keys = jax.vmap(jax.random.key)(jnp.asarray(seeds, jnp.uint32))

    def network(key):
        return Recurrent(federation.channels, settings.hidden, key=key)

    shape = eqx.filter_eval_shape(network, jax.random.key(0))
    algorithm = Algorithm(
        federation,
        tasks[0],
        PPO(settings.rollouts, settings.learning_rate, gamma=settings.gamma),
        Priority(settings.alpha, settings.beta, settings.smoothing),
        None,
        eqx.filter(shape, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True),
        SCORERS[settings.scorer],
        acting=0,
        history=1,
        slots=1,
        warm_up=0,
        recency=0.0,
    )

    def own(algorithm: Algorithm, tasks: Tasks, alpha: Float[Array, ""]) -> Algorithm:
        return eqx.tree_at(lambda a: (a.tasks, a.selection.alpha), algorithm, (tasks, alpha))

    @eqx.filter_jit
    def start(algorithm, tasks, alphas, keys):
        def run(tasks, alpha, key):
            policy_key, run_key = jax.random.split(key)
            return begin(own(algorithm, tasks, alpha), network(policy_key), run_key)

        return jax.vmap(run)(tasks, alphas, keys)

    @eqx.filter_jit
    def forward(algorithm, tasks, alphas, states, steps) -> tuple[RunState, Metrics]:
        def run(tasks, alpha, state):
            return advance(own(algorithm, tasks, alpha), state, steps)

        return jax.vmap(run)(tasks, alphas, states)

    runs = stack(own_tasks)
    states, rows = start(algorithm, runs, alphas, keys), []
    # A rest would be another program, and compiling costs as much as many updates.
    length = max(n for n in range(1, chunk + 1) if settings.steps % n == 0)
    for done in range(length, settings.steps + 1, length):
        states, metrics = forward(algorithm, runs, alphas, states, length)
        rows.append(jax.tree.map(np.asarray, metrics))
        _check(states)
        if progress is not None:
            progress(done, settings.steps)
    joined = jax.tree.map(lambda *parts: np.concatenate(parts, -1), *rows)
    policies = eqx.combine(states.parameters, algorithm.skeleton)
    return Trained(policies, joined.reward, joined.deviation, joined.task)


def _check(states: RunState) -> None:
    faults = np.asarray(states.fault).reshape(-1, 3)
    for run, (kind, step, task) in enumerate(faults):
        if kind:
            raise InputError(f"run {run}, step {step}, task {task}: {FAULTS[kind]}")


@eqx.filter_jit
def try_shares(
    federation: Federation, totals: Float[Array, " totals"], tasks: Tasks, keys: Any
) -> Course:
    """Fixed totals on the minority on every task: arrays (totals, tasks, time, ...)."""
    sizes = (tasks.width - 2, 2)

    def one(total, task, key):
        return follow(federation, Fixed.minority(total, sizes), task, key=key)

    over_tasks = jax.vmap(one, in_axes=(None, 0, 0))
    return jax.vmap(over_tasks, in_axes=(0, None, None))(totals, tasks, keys)


@eqx.filter_jit
def try_policies(federation: Federation, policies: Policy, tasks: Tasks, keys: Any) -> Course:
    """Each of the stacked policies on its own row of tasks: arrays (runs, tasks, time, ...)."""

    def one(policy, task, key):
        return follow(federation, Chosen(policy), task, key=key)

    over_tasks = eqx.filter_vmap(one, in_axes=(None, 0, 0))
    return eqx.filter_vmap(over_tasks)(policies, tasks, keys)
