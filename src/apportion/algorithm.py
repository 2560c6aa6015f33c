"""Algorithm 1: prioritised multi-task reinforcement learning, as one compiled scan.

A step draws a task t ~ p, a batch from its memory, updates the policy with the loss weighted by w_t,
updates s_t alone, then acts n_e more periods in t. P-MTL is `Priority()`, uniform MTL is
`Priority(alpha=0)`, single-task learning is one task; independent runs are one `vmap`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from apportion import memory as replay
from apportion.errors import InputError
from apportion.learners.learner import Learner
from apportion.memory import Memory, read_apart
from apportion.policy import Policy, ScoringPolicy
from apportion.priority import Selection
from apportion.problem import Problem
from apportion.scorers import Evidence, Scorer, mean_deviation
from apportion.simplex import Exploration
from apportion.tasks import Tasks

Index = Int[Array, ""]

_BEFORE = 2**32 - 1  # the "step" whose key makes what there is before the first one

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
    learner: PyTree[Array]
    selection: PyTree[Array]
    memory: Memory | None
    key: PRNGKeyArray
    step: Index
    fault: Int[Array, " 3"]
    """Kind (an index into FAULTS, 0 is none), step and task of the first thing that went wrong."""


class Algorithm(eqx.Module):
    """Algorithm 1 with everything chosen; `begin` and `advance` run it.

    Parameters
    ----------
    acting
        n_e, the periods acted in the drawn task after each update; 0 for a learner that makes its
        own rollouts.
    explore
        Noise of those periods; none acts greedily.
    history
        States a task's memory keeps.
    slots
        Tasks that have memory at one time.
    warm_up
        States of each task seen under equal shares before the first step.
    recency
        How strongly batches favour recent states (see `memory.recall`).
    """

    problem: Problem
    tasks: Tasks
    learner: Learner
    selection: Selection
    explore: Exploration | None
    skeleton: PyTree = eqx.field(static=True)
    scorer: Scorer = eqx.field(static=True)
    acting: int = eqx.field(static=True)
    history: int = eqx.field(static=True)
    slots: int = eqx.field(static=True)
    warm_up: int = eqx.field(static=True)
    recency: float = eqx.field(static=True)

    def __check_init__(self):
        least = max(self.learner.periods, self.acting)
        if self.acting < 0:
            raise InputError(f"acting is {self.acting}; it counts periods and must be >= 0")
        if self.history < least:
            raise InputError(
                f"history is {self.history}; memory must hold a batch ({self.learner.periods}) and "
                f"the periods acted ({self.acting})"
            )
        if self.warm_up > self.history:
            raise InputError(f"warm_up is {self.warm_up}; memory holds only {self.history} states")
        if not 0 <= self.recency < 1:
            raise InputError(f"recency is {self.recency}; it must be in [0, 1)")
        if self.slots < 1:
            raise InputError(f"slots is {self.slots}; at least one task needs memory")
        if self.warm_up and self.slots < len(self.tasks):
            raise InputError(
                f"warm_up needs a slot for each of the {len(self.tasks)} tasks, but slots is "
                f"{self.slots}"
            )

    @property
    def remembers(self) -> bool:
        """Whether there is any use for memory."""
        return self.learner.periods > 0 or self.acting > 0

    def policy(self, state: RunState) -> Policy:
        """The policy as it is at `state`."""
        return eqx.combine(state.parameters, self.skeleton)


def begin(algorithm: Algorithm, policy: Policy, key: PRNGKeyArray) -> RunState:
    """The state before the first step."""
    tasks, chosen = algorithm.tasks, None
    if algorithm.remembers:
        chosen = replay.start(
            algorithm.problem,
            tasks,
            slots=min(algorithm.slots, len(tasks)),
            history=algorithm.history,
            warm_up=algorithm.warm_up,
            key=jax.random.fold_in(key, _BEFORE),
        )
    return RunState(
        eqx.filter(policy, eqx.is_array),
        algorithm.learner.start(policy),
        algorithm.selection.start(len(tasks)),
        chosen,
        key,
        jnp.zeros((), jnp.int32),
        jnp.zeros(3, jnp.int32),
    )


def advance(
    algorithm: Algorithm, state: RunState, steps: int, record_every: int = 1
) -> tuple[RunState, Metrics]:
    """`steps` steps in one scan; metrics of every `record_every`-th."""

    def one(state, _):
        return step(algorithm, state)

    if record_every == 1:
        return jax.lax.scan(one, state, None, steps)

    def several(state, _):
        state, metrics = jax.lax.scan(one, state, None, record_every)
        return state, jax.tree.map(lambda leaf: leaf[-1], metrics)

    return jax.lax.scan(several, state, None, steps // record_every)


def step(algorithm: Algorithm, state: RunState) -> tuple[RunState, Metrics]:
    """One round of the paper's loop."""
    problem, learner, selection = algorithm.problem, algorithm.learner, algorithm.selection
    # The step's number makes its keys: a resumed run needs no other memory of its randomness.
    draw_key, claim_key, recall_key, update_key, act_key = jax.random.split(
        jax.random.fold_in(state.key, state.step), 5
    )
    policy = algorithm.policy(state)

    chances, memory, batch = state.selection, state.memory, None
    drawn = read_apart(lambda number: selection.draw(chances, number, key=draw_key), state.step)
    t = drawn.task
    task = algorithm.tasks[t]
    if memory is not None:
        place = read_apart(lambda t, memory=memory: replay.locate(memory, t), t)
        fresh = problem.reset(task, key=claim_key)
        memory = replay.claim(memory, place, t, fresh, state.step)
    if memory is not None and learner.periods:

        def recall(slot, memory=memory):
            return replay.recall(
                memory,
                slot,
                learner.periods,
                horizon=problem.horizon,
                recency=algorithm.recency,
                key=recall_key,
            )

        batch = read_apart(recall, place.slot)
    update = learner.update(
        problem, task, batch, policy, state.learner, drawn.weight, key=update_key
    )

    value = algorithm.scorer(update.evidence)
    kind = _fault(update.evidence, value)
    sound = (kind == 0) & (state.fault[0] == 0)
    policy = _keep_if(sound, update.policy, policy)
    # A faulty value is replaced by the task's own score, which leaves that score as it was.
    value = jnp.where(sound, value, drawn.score)
    chances = selection.update(chances, drawn, value)

    if memory is not None and batch is not None and update.arrived is not None:
        memory = replay.rewrite(memory, place.slot, batch, update.arrived, sound)
    if memory is not None and algorithm.acting:
        memory = _act(algorithm, policy, task, memory, place.slot, sound, act_key)

    evidence = update.evidence
    metrics = Metrics(
        t,
        evidence.loss,
        evidence.mean(evidence.rewards),
        drawn.score,
        drawn.probability,
        drawn.weight,
        mean_deviation(evidence),
        evidence.gradient_norm,
    )
    first = jnp.where(
        (state.fault[0] == 0) & (kind > 0), jnp.stack([kind, state.step, t]), state.fault
    )
    following = RunState(
        eqx.filter(policy, eqx.is_array),
        _keep_if(sound, update.state, state.learner),
        chances,
        memory,
        state.key,
        state.step + 1,
        first,
    )
    return following, metrics


def _act(
    algorithm: Algorithm,
    policy: Policy,
    task: Tasks,
    memory: Memory,
    slot: Index,
    sound: Bool[Array, ""],
    key: PRNGKeyArray,
) -> Memory:
    """From n_t on, n_e periods with the current policy and exploration noise, storing what is seen."""
    problem, explore = algorithm.problem, algorithm.explore

    def choose(state, key):
        observation = problem.observe(task, state)
        if explore is None or not isinstance(policy, ScoringPolicy):
            return policy(observation, task.mask)
        features = policy.encode(observation.history, task.mask)
        scores = policy.scores(features, observation.held, task.mask)
        return explore.share(explore.sample(scores, task.mask, key=key), task.mask)

    def period(carry, key):
        state, n = carry
        noise_key, step_key = jax.random.split(key)
        following = replay.advance(problem, task, state, n, choose(state, noise_key), step_key)
        return following, following

    here = read_apart(lambda slot: (memory.current(slot), memory.position(slot)), slot)
    _, (states, periods) = jax.lax.scan(period, here, jax.random.split(key, algorithm.acting))
    return replay.store(memory, slot, states, periods, sound)


def _fault(evidence: Evidence, value: Float[Array, ""]) -> Index:
    """Which of FAULTS a step ran into, the root cause first."""
    shares = jnp.where(evidence.valid[:, None], evidence.allocations, evidence.mask[None, :])
    totals = jnp.where(evidence.valid, shares.sum(-1), 1.0)
    found = jnp.stack(
        [
            ~(jnp.isfinite(evidence.loss) & jnp.isfinite(evidence.gradient_norm)),
            (jnp.abs(totals - 1) > 1e-4).any() | (shares < -1e-5).any(),
            ~jnp.isfinite(value),
            value < 0,
        ]
    )
    return jnp.where(found.any(), jnp.argmax(found) + 1, 0).astype(jnp.int32)


def _keep_if(condition: Bool[Array, ""], new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b) if eqx.is_array(a) else a, new, old)
