"""Algorithm 1: prioritised multi-task reinforcement learning, as one compiled scan.

A step draws a task t ~ p, a batch from its memory, updates the policy with the loss weighted by w_t,
updates s_t alone, then acts n_e more periods in t. P-MTL is `Priority()`, uniform MTL is
`Priority(alpha=0)`, single-task learning is one task; independent runs are one `vmap`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree, UInt32

from apportion import memory as memories
from apportion.learners.learner import Learner
from apportion.memory import Batch, Memory, Replay, read_before_write
from apportion.policy import GaussianLogits, LogitPolicy, Policy
from apportion.priority import Priority, PriorityState
from apportion.problem import Problem
from apportion.scorers import Evidence, Scorer, max_deviation, mean_deviation
from apportion.simplex import on_simplex
from apportion.tasks import Task

Index = Int[Array, ""]

_BEFORE = 2**32 - 1  # the "step" whose key makes what there is before the first one

PARTS = ("problem", "tasks", "learner", "key")
"""What a run is made of: a state goes on with these and no others."""
FAULTS = (
    "",
    "the loss or its gradient is not finite (does the problem's observation or reward hold NaN?)",
    "the policy's allocation is off the simplex",
    "the scorer returned NaN or infinity",
    "the scorer returned a negative number",
)


class Metrics(eqx.Module):
    """One step as numbers: the row of the metrics table."""

    task: Int[Array, "..."]
    loss: Float[Array, "..."]
    reward: Float[Array, "..."]
    score: Float[Array, "..."]
    probability: Float[Array, "..."]
    weight: Float[Array, "..."]
    deviation: Float[Array, "..."]
    gradient_norm: Float[Array, "..."]


class RunState(eqx.Module):
    """Everything a run is at a step; the same state and the same key continue it bit for bit."""

    parameters: PyTree[Array]
    learner_state: PyTree[Array]
    priority_state: PriorityState
    memory: Memory | None
    key: PRNGKeyArray
    step: Index
    fault: Int[Array, " 3"]
    """Kind (an index into FAULTS, 0 is none), step and task of the first thing that went wrong."""
    fingerprint: UInt32[Array, " parts"]
    """Fingerprints of what the run is made of (`PARTS`)."""


class Algorithm(eqx.Module):
    """Algorithm 1 with everything chosen; `begin` and `advance` run it.

    Parameters
    ----------
    explore
        Noise of the periods acted after an update; none acts greedily.
    skeleton
        The policy without its arrays.
    replay
        How memory is filled and read, its length filled in (`Replay.fitted`).
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
        """The algorithm with the paper's defaults; `horizon` is the problem's where it is stacked."""
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
        """Whether there is any use for memory."""
        return self.learner.periods > 0 or bool(self.replay.act_periods)

    def policy(self, state: RunState) -> Policy:
        """The policy as it is at `state`."""
        return eqx.combine(state.parameters, self.skeleton)

    def probabilities(self, state: RunState) -> Float[Array, "*runs tasks"]:
        """Each task's chance to be drawn next (runs by tasks, where there are several runs)."""
        of_run = self.priority.probabilities
        return (jax.vmap(of_run) if state.step.ndim else of_run)(state.priority_state)


def begin(algorithm: Algorithm, policy: Policy, key: PRNGKeyArray) -> RunState:
    """The state before the first step."""
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
        jnp.zeros(len(PARTS), jnp.uint32),
    )


def advance(
    algorithm: Algorithm, state: RunState, steps: int, record_every: int = 1
) -> tuple[RunState, Metrics]:
    """`steps` steps in one scan; metrics of every `record_every`-th."""

    def one(state, _):
        state, metrics = step(algorithm, state)
        # A step's numbers as one row: a GPU writes a row in the time of a number.
        task, *numbers = jax.tree.leaves(metrics)
        return state, (task, jnp.stack(numbers))

    def several(state, _):
        state, rows = jax.lax.scan(one, state, None, record_every)
        return state, jax.tree.map(lambda leaf: leaf[-1], rows)

    recorded = one if record_every == 1 else several
    state, (tasks, rows) = jax.lax.scan(recorded, state, None, steps // record_every)
    return state, Metrics(tasks, *rows.T)


def step(algorithm: Algorithm, state: RunState) -> tuple[RunState, Metrics]:
    """One round of the paper's loop."""
    problem, learner, priority = algorithm.problem, algorithm.learner, algorithm.priority
    # The step's number makes its keys: a resumed run needs no other memory of its randomness.
    draw_key, reset_key, sample_key, update_key, act_key = jax.random.split(
        jax.random.fold_in(state.key, state.step), 5
    )
    policy = algorithm.policy(state)

    chances, memory, slot, batch = state.priority_state, state.memory, None, None

    def draw(number):
        drawn = priority.draw(chances, number, key=draw_key)
        return drawn, None if memory is None else memories.find_slot(memory, drawn.task)

    drawn, found = read_before_write(draw, state.step)
    t = drawn.task
    task = algorithm.tasks[t]
    if memory is not None and found is not None:
        fresh = problem.reset(task, key=reset_key)
        memory, slot = memories.assign_slot(memory, found, t, fresh, state.step), found.index
        batch = _sample(algorithm, memory, slot, sample_key) if learner.periods else None
    update = learner.update(
        problem, task, batch, policy, state.learner_state, drawn.weight, key=update_key
    )

    value = algorithm.scorer(update.evidence)
    kind = _fault(update.evidence, value)
    sound = (kind == 0) & (state.fault[0] == 0)
    policy = _keep_if(sound, update.policy, policy)
    # A faulty value is replaced by the task's own score, which leaves that score as it was.
    chances = priority.update(chances, drawn, jnp.where(sound, value, drawn.score))

    if memory is not None and slot is not None:
        if batch is not None and update.new_states is not None:
            memory = memories.rewrite(memory, slot, batch, update.new_states, sound)
        if algorithm.replay.act_periods:
            memory = _act(algorithm, policy, task, memory, slot, sound, act_key)

    first_fault = jnp.where(
        (state.fault[0] == 0) & (kind > 0), jnp.stack([kind, state.step, t]), state.fault
    )
    following = RunState(
        eqx.filter(policy, eqx.is_array),
        _keep_if(sound, update.state, state.learner_state),
        chances,
        memory,
        state.key,
        state.step + 1,
        first_fault,
        state.fingerprint,
    )
    evidence = update.evidence
    return following, Metrics(
        drawn.task,
        evidence.loss,
        evidence.mean(evidence.rewards),
        drawn.score,
        drawn.probability,
        drawn.weight,
        mean_deviation(evidence),
        evidence.gradient_norm,
    )


def _sample(algorithm: Algorithm, memory: Memory, slot: Index, key: PRNGKeyArray) -> Batch:
    """The batch B_t out of the drawn task's memory."""

    def read(slot):
        return memories.sample(
            memory,
            slot,
            algorithm.learner.periods,
            horizon=algorithm.problem.horizon,
            recency=algorithm.replay.recency,
            key=key,
        )

    return read_before_write(read, slot)


def _act(
    algorithm: Algorithm,
    policy: Policy,
    task: Task,
    memory: Memory,
    slot: Index,
    sound: Bool[Array, ""],
    key: PRNGKeyArray,
) -> Memory:
    """From n_t on, n_e periods with the current policy and exploration noise, storing what is seen."""
    problem, explore = algorithm.problem, algorithm.explore

    def choose(state, key):
        observation = problem.observe(task, state)
        if explore is None or not isinstance(policy, LogitPolicy):
            return policy(observation, task.mask)
        logits, here = (
            policy.observed_logits(observation, task.mask),
            observation.present(task.mask),
        )
        return policy.head(explore.sample(logits, here, key=key), here, observation.bounds)

    def period(carry, key):
        state, n = carry
        noise_key, step_key = jax.random.split(key)
        following = memories.move_on(problem, task, state, n, choose(state, noise_key), step_key)
        return following, following

    here = read_before_write(lambda slot: (memory.current(slot), memory.position(slot)), slot)
    keys = jax.random.split(key, algorithm.replay.act_periods or 0)
    _, (states, periods) = jax.lax.scan(period, here, keys)
    acted = jnp.broadcast_to(sound, periods.shape)
    if algorithm.replay.stops:
        # Period 0 is where the next episode begins: nothing after it is acted.
        begun = jnp.cumsum(periods == 0)
        acted = acted & (begun - (periods == 0) == 0)
    return memories.store(memory, slot, states, periods, acted)


def _fault(evidence: Evidence, value: Float[Array, ""]) -> Index:
    """Which of FAULTS a step ran into, the root cause first."""
    # Where limits leave a remainder, equal shares within them leave the same one.
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


def _keep_if(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b) if eqx.is_array(a) else a, new, old)
