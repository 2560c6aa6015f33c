"""Algorithm 1: prioritised multi-task reinforcement learning, as one compiled scan.

A step samples a task t ~ p and a batch from its memory, updates the policy with the loss weighted by
w_t, updates the score s_t, and then acts for n_e more periods in t. P-MTL is `Priority()`, uniform MTL is
`Priority(alpha=0)`, and single-task learning uses one task. Independent runs are one `vmap`.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray, PyTree, UInt32

from apportion import memory as memories
from apportion.errors import InputError
from apportion.learners.learner import Learner, Update
from apportion.memory import Memory, Replay
from apportion.policy import GaussianLogits, LogitPolicy, Policy
from apportion.priority import Drawn, Priority, PriorityState
from apportion.problem import Problem, State
from apportion.scorers import Evidence, Scorer, max_deviation, mean_deviation
from apportion.simplex import on_simplex
from apportion.tasks import Task
from apportion.trees import fingerprint

Index = Int[Array, ""]

_BEFORE = 2**32 - 1  # step number whose key initialises memory before the first step

_FAULTS = (
    "",
    "the loss or its gradient is not finite (check the problem's observations and rewards for NaN)",
    "the policy's allocation is not on the simplex",
    "the scorer returned NaN or infinity",
    "the scorer returned a negative number",
)


class Metrics(eqx.Module):
    """Metrics of one step: a row of the metrics table."""

    task: Int[Array, "..."]
    loss: Float[Array, "..."]
    reward: Float[Array, "..."]
    score: Float[Array, "..."]
    probability: Float[Array, "..."]
    weight: Float[Array, "..."]
    deviation: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]


class RunState(eqx.Module):
    """Complete state of a run; a run that resumes from it is bitwise identical."""

    parameters: PyTree[Array]
    learner_state: PyTree[Array]
    priority_state: PriorityState
    memory: Memory | None
    key: PRNGKeyArray
    step: Index
    fault: Int[Array, " 3"]
    """Kind (an index into `_FAULTS`, 0 for none), step and task of the first fault."""
    fingerprint: UInt32[Array, " parts"]
    """Fingerprints of problem, tasks, learner and key (`Algorithm.fingerprints`)."""


class Algorithm(eqx.Module):
    """Configuration of Algorithm 1; `begin` and `advance` run it.

    Parameters
    ----------
    explore
        Noise on the actions after an update; None acts greedily.
    skeleton
        The policy without its arrays.
    replay
        How memory is filled and sampled, with all defaults resolved (`Replay.fitted`).
    """

    problem: Problem
    tasks: Task
    learner: Learner
    priority: Priority
    explore: GaussianLogits | None
    skeleton: PyTree = eqx.field(static=True)
    scorer: Scorer = eqx.field(static=True)
    replay: Replay = eqx.field(static=True)

    @classmethod
    def of(
        cls,
        problem: Problem,
        tasks: Task,
        policy: Policy,
        learner: Learner,
        *,
        priority: Priority | None = None,
        scorer: Scorer = max_deviation,
        explore: GaussianLogits | None = None,
        replay: Replay | None = None,
        horizon: int | None = None,
    ) -> "Algorithm":
        """Build the algorithm with the paper's defaults; pass `horizon` if the problem is stacked."""
        horizon = problem.horizon if horizon is None else horizon
        return cls(
            problem,
            tasks,
            learner,
            Priority() if priority is None else priority,
            explore,
            eqx.filter(policy, eqx.is_array, inverse=True),
            scorer,
            (replay or Replay()).fitted(horizon=horizon, batch=learner.periods, tasks=tasks.count),
        )

    @property
    def remembers(self) -> bool:
        """Whether memory is needed: the learner reads batches, or periods are acted."""
        return self.learner.periods > 0 or bool(self.replay.act_periods)

    def policy(self, state: RunState) -> Policy:
        """Return the policy with the parameters in `state`."""
        return eqx.combine(state.parameters, self.skeleton)

    def fingerprints(self, key: Key[Array, "*runs"]) -> dict[str, int]:
        """Hash problem, tasks, learner and key; a state resumes only if all four match."""
        parts = {"problem": self.problem, "tasks": self.tasks, "learner": self.learner, "key": key}
        return {name: fingerprint(part) for name, part in parts.items()}

    def probabilities(self, state: RunState) -> Float[Array, "*runs tasks"]:
        """Return the sampling probability of each task (runs by tasks if there are several runs)."""
        of_run = self.priority.probabilities
        return (jax.vmap(of_run) if state.step.ndim else of_run)(state.priority_state)


def begin(algorithm: Algorithm, policy: Policy, key: PRNGKeyArray) -> RunState:
    """Return the state before the first step."""
    tasks, replay, empty = algorithm.tasks, algorithm.replay, None
    if algorithm.remembers:
        assert replay.length is not None, "an algorithm's replay is fitted"
        empty = memories.start(
            algorithm.problem,
            tasks,
            slots=min(replay.slots, len(tasks)),
            length=replay.length,
            warm_up=replay.warm_up or 0,
            key=jax.random.fold_in(key, _BEFORE),
        )
    return RunState(
        eqx.filter(policy, eqx.is_array),
        algorithm.learner.start(policy),
        algorithm.priority.start(len(tasks)),
        empty,
        key,
        jnp.zeros((), jnp.int32),
        jnp.zeros(3, jnp.int32),
        # `train` fills these in: a fingerprint needs concrete values, which are not available under jit.
        jnp.zeros(4, jnp.uint32),
    )


def advance(
    algorithm: Algorithm, state: RunState, steps: int, record_every: int = 1
) -> tuple[RunState, Metrics]:
    """Run `steps` steps in one scan and return the metrics of every `record_every`-th step."""

    def one(state, _):
        state, metrics = step(algorithm, state)
        # One row per step: on a GPU, writing a row takes as long as writing a single number.
        task, *numbers = jax.tree.leaves(metrics)
        return state, (task, jnp.stack(numbers))

    def several(state, _):
        state, rows = jax.lax.scan(one, state, None, record_every)
        return state, jax.tree.map(lambda leaf: leaf[-1], rows)

    recorded = one if record_every == 1 else several
    state, (tasks, rows) = jax.lax.scan(recorded, state, None, steps // record_every)
    return state, Metrics(tasks, *rows.T)


def step(algorithm: Algorithm, state: RunState) -> tuple[RunState, Metrics]:
    """Run one step of Algorithm 1."""
    problem, replay, policy = algorithm.problem, algorithm.replay, algorithm.policy(state)
    # Keys are derived from the step number, so a resumed run needs no other random state.
    keys = jax.random.split(jax.random.fold_in(state.key, state.step), 5)
    draw_key, reset_key, sample_key, update_key, act_key = keys

    # 1. Sample a task t ~ p.
    drawn = algorithm.priority.draw(state.priority_state, state.step, key=draw_key)
    task = algorithm.tasks[drawn.task]

    # 2. Sample a batch B_t from the task's memory R_t.
    memory, slot = memories.open_slot(
        state.memory, problem, algorithm.tasks, drawn.task, state.step, key=reset_key
    )
    batch = memories.sample(
        memory, slot, algorithm.learner.periods,
        horizon=problem.horizon, recency=replay.recency, key=sample_key,
    )  # fmt: skip

    # 3. Update the policy with the loss weighted by w_t.
    update = algorithm.learner.update(
        problem, task, batch, policy, state.learner_state, drawn.weight, key=update_key
    )

    # 4. Update the task's score: s_t <- smoothing s_t + (1 - smoothing) scorer(B_t).
    value = algorithm.scorer(update.evidence)
    policy, learner_state, value, fault = _undo_if_faulty(state, drawn, policy, update, value)
    priority_state = algorithm.priority.update(state.priority_state, drawn, value)

    # 5. Act for n_e more periods from n_t and store the states.
    memory = memories.rewrite(memory, slot, batch, update.new_states)
    choose = _explored(problem, task, policy, algorithm.explore)
    memory = memories.act(memory, slot, problem, task, choose, replay, key=act_key)

    following = RunState(
        eqx.filter(policy, eqx.is_array),
        learner_state,
        priority_state,
        memory,
        state.key,
        state.step + 1,
        fault,
        state.fingerprint,
    )
    return following, _metrics(drawn, update.evidence)


def _explored(
    problem: Problem, task: Task, policy: Policy, explore: GaussianLogits | None
) -> Callable[[State, PRNGKeyArray], Float[Array, " entities"]]:
    """Return the policy with exploration noise, as a function of a state and a key."""

    def choose(state, key):
        observation = problem.observe(task, state)
        if explore is None or not isinstance(policy, LogitPolicy):
            return policy(observation, task.mask)
        logits = policy.observed_logits(observation, task.mask)
        here = observation.present(task.mask)
        return policy.head(explore.sample(logits, here, key=key), here, observation.bounds)

    return choose


def _metrics(drawn: Drawn, evidence: Evidence) -> Metrics:
    return Metrics(
        drawn.task,
        evidence.loss,
        evidence.mean(evidence.rewards),
        drawn.score,
        drawn.probability,
        drawn.weight,
        mean_deviation(evidence),
        evidence.gradient_norm,
    )


def _undo_if_faulty(
    state: RunState, drawn: Drawn, policy: Policy, update: Update, value: Float[Array, ""]
) -> tuple[Policy, PyTree[Array], Float[Array, ""], Int[Array, " 3"]]:
    """Return policy, learner state, score and first fault; undo a faulty and all later updates."""
    kind, before = _fault(update.evidence, value), state.fault[0] > 0
    sound = (kind == 0) & ~before

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(sound, a, b) if eqx.is_array(a) else a, new, old)

    here = jnp.stack([kind, state.step, drawn.task])
    return (
        keep(update.policy, policy),
        keep(update.state, state.learner_state),
        # Passing the current score as the value leaves it unchanged.
        jnp.where(sound, value, drawn.score),
        jnp.where(~before & (kind > 0), here, state.fault),
    )


def _fault(evidence: Evidence, value: Float[Array, ""]) -> Index:
    """Return the index into `_FAULTS` of a step's fault, the root cause first."""
    # If limits leave part of the resource unused, equal shares within them leave the same part.
    available = evidence.equal.sum(-1)
    sound = on_simplex(evidence.allocations, evidence.mask, total=available) | ~evidence.valid
    found = jnp.stack(
        [
            ~(jnp.isfinite(evidence.loss) & jnp.isfinite(evidence.gradient_norm)),
            ~sound.all(),
            ~jnp.isfinite(value),
            value < 0,
        ]
    )
    return jnp.where(found.any(), jnp.argmax(found) + 1, 0).astype(jnp.int32)


def raise_fault(algorithm: Algorithm, state: RunState) -> None:
    """Raise an `InputError` that describes the first fault of a run, if there is one."""
    faults = np.asarray(state.fault).reshape(-1, 3)
    bad = np.flatnonzero(faults[:, 0])
    if len(bad) == 0:
        return
    run = int(bad[0])
    kind, step, t = (int(x) for x in faults[run])
    tasks = algorithm.tasks
    task = (tasks[run] if tasks.members.ndim > 2 else tasks)[t]
    whose = f" of run {run}" if len(faults) > 1 else ""
    source = f" ({algorithm.scorer.__name__})" if "scorer" in _FAULTS[kind] else ""
    raise InputError(
        f"step {step}{whose}, task {t} (entities {task.entities}): {_FAULTS[kind]}{source}; training "
        "stopped, and scores and policy are unchanged since the step before"
    )
