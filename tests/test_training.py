import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apportion.algorithm import Algorithm, advance, begin
from apportion.domains.probes import ProbeState, ShownBest
from apportion.errors import InputError
from apportion.learners.direct import Direct
from apportion.memory import Replay
from apportion.policy import GaussianScores, Policy, Recurrent
from apportion.priority import Priority
from apportion.problem import Observation, evaluate
from apportion.statistics import compare
from apportion.tasks import Task, draw_tasks, single_tasks
from apportion.training import Chunks, _raise_fault, train, train_runs
from learning import assert_mean_above, fractions_of_best, train_seeds
from probe_problems import ConstantBest, HeldPays, SomeCarrySignal

KEY = jax.random.key(0)
TASKS = draw_tasks(12, [3, 4], 8)
LEARNER = Direct(16, 3e-2)


@eqx.filter_jit
def policy(key=KEY):
    return Recurrent(channels=1, hidden=8, key=key)


@pytest.mark.parametrize("problem", [ShownBest(), HeldPays()], ids=lambda p: type(p).__name__)
def test_direct_gradient_reaches_95_percent_of_the_optimum_on_every_probe(problem):
    policies = train_seeds(problem, TASKS, policy, LEARNER, steps=300)
    for tasks in (TASKS, draw_tasks(12, 4, 8, seed=9)):
        for of_task in fractions_of_best(problem, policies, tasks).T:
            assert_mean_above(of_task, 0.95)


# Two of 32 tasks carry signal; the others are quiet and pay noise.
MIXED = draw_tasks(8, 4, 2).joined(draw_tasks(np.arange(8, 64), 4, 30))
RUNS = 12


def learnt(problem, tasks, selection, steps):
    """Mean reward of each of 12 runs on unseen tasks of the carriers."""
    keys = jax.random.split(jax.random.key(1), RUNS)
    policies = eqx.filter_vmap(policy)(keys)
    result = train_runs(
        problem, tasks, policies, Direct(16, 1e-2), steps=steps, selection=selection, keys=keys
    )
    return np.asarray(scores(problem, result.policy, draw_tasks(8, 4, 20, seed=5)))


@eqx.filter_jit
def scores(problem, policies, tasks):
    def score(policy):
        path = evaluate(problem, policy, tasks, key=jax.random.key(9), episodes=4)
        return path.mean_reward.mean()

    return eqx.filter_vmap(score)(policies)


def test_prioritisation_beats_uniform_where_only_some_tasks_carry_signal():
    problem = SomeCarrySignal()
    uniform = learnt(problem, MIXED, Priority(alpha=0.0), 200)
    prioritised = learnt(problem, MIXED, Priority(alpha=1.0, beta=0.0), 200)
    assert compare(prioritised, uniform).above_zero


@pytest.mark.slow
def test_prioritisation_equals_uniform_where_all_tasks_carry_signal():
    problem = SomeCarrySignal()
    tasks = draw_tasks(8, 4, 32, seed=3)
    uniform = learnt(problem, tasks, Priority(alpha=0.0), 200)
    prioritised = learnt(problem, tasks, Priority(alpha=1.0, beta=0.0), 200)
    gap = compare(prioritised, uniform)
    assert gap.low - 0.01 <= 0 <= gap.high + 0.01


@pytest.fixture(scope="module")
def trained():
    return train(
        ShownBest(), TASKS, policy(), LEARNER, steps=60, chunks=Chunks(30),
        explore=GaussianScores(0.3), replay=Replay(act_periods=2), key=KEY,
    )  # fmt: skip


def leaves(result):
    state = eqx.filter(result.state, eqx.is_array)
    return [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
        for x in jax.tree.leaves(state)
    ]


def test_the_same_key_gives_the_same_run_bit_for_bit_and_chunks_do_not_matter(trained):
    with warnings.catch_warnings():
        # Its step has a slope, and nothing is warned of.
        warnings.simplefilter("error", UserWarning)
        again = train(
            ShownBest(), TASKS, policy(), LEARNER, steps=60, chunks=Chunks(60),
            explore=GaussianScores(0.3), replay=Replay(act_periods=2), key=KEY,
        )  # fmt: skip
    assert all(np.array_equal(a, b) for a, b in zip(leaves(trained), leaves(again), strict=True))
    assert trained.metrics.equals(again.metrics)


def test_a_run_goes_on_from_a_state_as_if_it_had_never_stopped(trained):
    stops = []

    def stop(chunk):
        stops.append(jax.tree.map(jnp.copy, chunk.state))
        return True

    arguments = (ShownBest(), TASKS, policy(), LEARNER)
    settings = {
        "explore": GaussianScores(0.3), "replay": Replay(act_periods=2), "key": KEY, "steps": 60,
    }  # fmt: skip
    train(*arguments, chunks=Chunks(30, on_chunk=stop), **settings)
    resumed = train(*arguments, chunks=Chunks(30), state=stops[0], **settings)
    assert all(np.array_equal(a, b) for a, b in zip(leaves(trained), leaves(resumed), strict=True))


def test_the_result_shows_itself(trained):
    assert list(trained.metrics.columns) == [
        "step", "task", "loss", "reward", "score", "probability", "weight", "deviation",
        "gradient_norm",
    ]  # fmt: skip
    assert len(trained.metrics) == 60
    assert "60 steps over 8 tasks" in trained.summary()
    assert trained.probabilities.sum() == pytest.approx(1, abs=1e-5)


def test_independent_runs_are_what_single_runs_are(trained):
    keys = jnp.stack([jax.random.key(7), KEY])
    many = train_runs(
        ShownBest(), TASKS, eqx.filter_vmap(policy)(keys), LEARNER, steps=60, chunks=Chunks(30),
        explore=GaussianScores(0.3), replay=Replay(act_periods=2), keys=keys,
    )  # fmt: skip
    assert sorted(many.metrics["run"].unique()) == [0, 1]
    # Sums are taken in another order for several runs, and Adam's first steps make that rounding large.
    theirs, alone = many.metrics.query("run == 1")[:10], trained.metrics[:10]
    assert theirs["task"].tolist() == alone["task"].tolist()
    assert theirs["reward"].tolist() == pytest.approx(alone["reward"].tolist(), abs=1e-3)
    others = many.metrics.query("run == 0")[:10]
    assert others["task"].tolist() != alone["task"].tolist()


def test_single_task_learners_and_settings_vary_by_run():
    keys = jax.random.split(KEY, 2)
    policies = eqx.filter_vmap(policy)(keys)
    own = single_tasks(TASKS[:2])
    rates = Direct(8, jnp.array([0.0, 3e-2]))
    result = train_runs(ConstantBest(), own, policies, rates, steps=60, keys=keys)
    late = result.metrics.query("step > 50").groupby("run")["deviation"].mean()
    assert late[0] < 0.02
    assert late[1] > 0.3


def test_a_million_tasks_need_memory_only_for_those_in_use():
    members = jax.random.randint(KEY, (1_000_000, 4), 0, 12)
    tasks = Task(members, members >= 0)
    replay = Replay(length=16, slots=256, act_periods=2)
    algorithm = Algorithm.of(ShownBest(), tasks, policy(), Direct(4), replay=replay)
    state = jax.eval_shape(lambda: begin(algorithm, policy(), KEY))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.memory, state.selection)))
    assert size < 32 * 2**20


class Rounded(ShownBest):
    """Pays in whole numbers, which has no slope."""

    def reward(self, task, state, allocation, *, key):
        return jnp.round(super().reward(task, state, allocation, key=key))


def test_a_step_without_a_slope_is_warned_of_once():
    with pytest.warns(UserWarning, match=r"Direct: the gradient was 0 .* Rounded.step") as said:
        train(Rounded(), TASKS, policy(), Direct(4), steps=4, chunks=Chunks(2), key=KEY)
    assert len([one for one in said if "gradient" in str(one.message)]) == 1


class Poison(ShownBest):
    """Shows NaN from the fourth period of an episode on."""

    def observe(self, task, state: ProbeState) -> Observation:
        signal = jnp.where(state.n >= 3, jnp.nan, state.signal)
        return Observation(signal[:, None, None], state.held)


class OffSimplex(Policy):
    """Shares that sum to one until something is shown to entity 0."""

    bias: jax.Array

    def encode(self, history, mask):
        return history[:, -1, 0]

    def allocate(self, features, held, mask, bounds=None):
        return mask / mask.sum() * (1 + self.bias * held[0] * features[0])


def test_nan_from_a_users_problem_stops_training_at_its_step_and_poisons_nothing():
    states = []
    with pytest.raises(
        InputError, match=r"step \d+, task \d \(entities \[.*\]\): the loss or its grad"
    ):
        train(
            Poison(), TASKS, policy(), Direct(4, 1e-2), replay=Replay(act_periods=2), steps=30, key=KEY,
            chunks=Chunks(30, on_chunk=lambda chunk: states.append(chunk)),
        )  # fmt: skip
    assert states == []


def test_a_bad_scorer_is_named_at_its_step_and_leaves_scores_and_policy_as_they_were():
    def below_zero(evidence):
        return -jnp.ones(())

    algorithm = Algorithm.of(ShownBest(), TASKS, policy(), Direct(4), scorer=below_zero)
    state = eqx.filter_jit(begin)(algorithm, policy(), KEY)
    after, _ = eqx.filter_jit(lambda a, s: advance(a, s, 5))(algorithm, state)
    words = r"step 0, task .* scorer returned a negative number \(below_zero\)"
    with pytest.raises(InputError, match=words):
        _raise_fault(algorithm, TASKS, after)
    assert np.asarray(after.selection.scores).tolist() == [1.0] * 8
    before, now = (jax.tree.leaves(s.parameters) for s in (state, after))
    assert all(np.array_equal(a, b) for a, b in zip(before, now, strict=True))


def test_an_allocation_off_the_simplex_is_refused_before_or_at_its_step():
    with pytest.raises(InputError, match="OffSimplex: allocation .* is off the simplex"):
        train(ConstantBest(), TASKS, OffSimplex(jnp.asarray(1.0)), Direct(4), steps=5, key=KEY)
    quiet = OffSimplex(jnp.asarray(0.0))
    with pytest.raises(InputError, match="step .* the policy's allocation is off the simplex"):
        train(ShownBest(), TASKS, quiet, Direct(4, 1.0), steps=40, key=KEY)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replay": Replay(act_periods=-1)}, "act_periods is -1"),
        ({"replay": Replay(length=2)}, "memory length is 2"),
        ({"replay": Replay(recency=1.0)}, "recency is 1.0"),
        ({"replay": Replay(slots=0)}, "slots is 0"),
        ({"replay": Replay(warm_up=9, slots=2)}, "warm_up needs a slot for each of the 8 tasks"),
        ({"replay": Replay(warm_up=20, length=16)}, "warm_up is 20"),
        ({"steps": 0}, "steps, chunk length and record_every"),
        ({"chunks": Chunks(record_every=7)}, "record_every 7 must divide steps"),
    ],
)
def test_bad_settings_get_one_sentence_before_any_work(settings, words):
    with pytest.raises(InputError, match=words):
        train(ShownBest(), TASKS, policy(), Direct(4), **({"steps": 10} | settings), key=KEY)


def test_a_policy_for_other_channels_is_refused_with_both_shapes():
    wrong = Recurrent(channels=3, key=KEY)
    with pytest.raises(
        InputError, match=r"Recurrent cannot read ShownBest's observation.*\(4, 1, 1\)"
    ):
        train(ShownBest(), TASKS, wrong, Direct(4), steps=5, key=KEY)
