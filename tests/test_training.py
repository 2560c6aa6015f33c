import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion.algorithm import Algorithm, _fault, advance, begin
from apportion.domains.probes import ProbeState, ShownBest
from apportion.errors import InputError
from apportion.learners.direct import Direct
from apportion.memory import Replay
from apportion.policy import GaussianScores, Policy, Recurrent
from apportion.priority import Priority
from apportion.problem import Observation, evaluate
from apportion.scorers import Evidence, mean_deviation
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
    assert compare(prioritised, uniform).low > 0


@pytest.mark.slow
def test_prioritisation_equals_uniform_where_all_tasks_carry_signal():
    problem = SomeCarrySignal()
    tasks = draw_tasks(8, 4, 32, seed=3)
    uniform = learnt(problem, tasks, Priority(alpha=0.0), 200)
    prioritised = learnt(problem, tasks, Priority(alpha=1.0, beta=0.0), 200)
    gap = compare(prioritised, uniform)
    assert gap.low - 0.01 <= 0 <= gap.high + 0.01


# In float64, where several runs' sums, taken in another order, come to the same.
def run(function=train, steps=60, networks=policy, **options):
    with jax.enable_x64(True):
        settings = {"explore": GaussianScores(0.3), "replay": Replay(act_periods=2)} | options
        key = settings.get("key", settings.get("keys"))
        return function(ShownBest(), TASKS, networks(key), LEARNER, steps=steps, **settings)


@pytest.fixture(scope="module")
def trained():
    with warnings.catch_warnings():
        # Its step has a slope, and nothing is warned of.
        warnings.simplefilter("error", UserWarning)
        return run(chunks=Chunks(60), key=KEY)


def test_a_run_goes_on_bit_for_bit_as_if_it_had_never_stopped_and_chunks_do_not_matter(trained):
    stops = []

    def stop(chunk):
        stops.append(jax.tree.map(jnp.copy, chunk.state))
        return True

    first = run(chunks=Chunks(30, on_chunk=stop), key=KEY)
    resumed = run(chunks=Chunks(30), state=stops[0], key=KEY)
    assert bool(eqx.tree_equal(resumed.state, trained.state))
    pd.testing.assert_frame_equal(
        pd.concat([first.metrics, resumed.metrics], ignore_index=True), trained.metrics
    )


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
    many = run(train_runs, 20, eqx.filter_vmap(policy), chunks=Chunks(20), keys=keys).metrics
    others, theirs = (many[many.run == one] for one in (0, 1))
    alone = trained.metrics[:20]
    assert theirs["task"].tolist() == alone["task"].tolist()
    assert theirs["reward"].tolist() == pytest.approx(alone["reward"].tolist(), abs=1e-9)
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
    """Shows NaN, which `train` would refuse before it starts."""

    def observe(self, task, state: ProbeState) -> Observation:
        return Observation(jnp.nan * state.signal[:, None, None], state.held)


def test_a_fault_is_told_with_its_step_and_leaves_scores_and_policy_as_they_were():
    algorithm = Algorithm.of(Poison(), TASKS, policy(), Direct(4), scorer=mean_deviation)
    state = eqx.filter_jit(begin)(algorithm, policy(), KEY)
    after, _ = eqx.filter_jit(lambda a, s: advance(a, s, 5))(algorithm, state)
    with pytest.raises(
        InputError, match=r"step 0, task \d \(entities \[.*\]\): the loss or its grad"
    ):
        _raise_fault(algorithm, TASKS, after)
    assert np.asarray(after.selection.scores).tolist() == [1.0] * 8
    assert bool(eqx.tree_equal(after.parameters, state.parameters))
    # Of several runs, the second.
    later = eqx.tree_at(lambda s: s.fault, after, jnp.array([[0, 0, 0], [4, 3, 2]]))
    words = r"step 3 of run 1, task 2 .* scorer returned a negative number \(mean_deviation\)"
    with pytest.raises(InputError, match=words):
        _raise_fault(algorithm, TASKS, later)


@pytest.mark.parametrize(
    ("changes", "value", "kind"),
    [
        ({}, 0.5, 0),
        ({"loss": jnp.nan}, 0.5, 1),
        ({"gradient_norm": jnp.inf}, jnp.nan, 1),
        ({"allocations": [[0.9, 0.2, 0.0]]}, 0.5, 2),
        ({"allocations": [[0.5, 0.0, 0.5]]}, 0.5, 2),
        # What nobody can take is left over, and a period that was not lived says nothing.
        ({"allocations": [[0.2, 0.2, 0.0]], "equal": [[0.2, 0.2, 0.0]]}, 0.5, 0),
        ({"allocations": [[0.9, 0.2, 0.0]], "valid": [False]}, 0.5, 0),
        ({}, jnp.inf, 3),
        ({}, -0.1, 4),
    ],
)
def test_what_goes_wrong_in_a_step_is_told_by_its_root_cause(changes, value, kind):
    half = [[0.5, 0.5, 0.0]]
    sound = {
        "allocations": half, "equal": half, "rewards": [1.0], "equal_rewards": [1.0],
        "valid": [True], "mask": [True, True, False], "loss": 0.1, "gradient_norm": 0.1,
    }  # fmt: skip
    evidence = Evidence(**{name: jnp.asarray(x) for name, x in (sound | changes).items()})
    assert int(_fault(evidence, jnp.asarray(value))) == kind


def test_a_policy_off_the_simplex_or_for_other_channels_is_refused_before_any_work():
    class OffSimplex(Policy):
        def encode(self, history, mask):
            return ()

        def allocate(self, features, held, mask, bounds=None):
            return 1.1 * mask / mask.sum()

    with pytest.raises(InputError, match="OffSimplex: allocation .* is off the simplex"):
        train(ShownBest(), TASKS, OffSimplex(), Direct(4), steps=5, key=KEY)
    words = r"Recurrent cannot read ShownBest's observation.*\(4, 1, 1\)"
    with pytest.raises(InputError, match=words):
        train(ShownBest(), TASKS, Recurrent(channels=3, key=KEY), Direct(4), steps=5, key=KEY)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replay": Replay(act_periods=-1)}, "act_periods is -1"),
        ({"replay": Replay(length=2)}, "memory length is 2"),
        ({"replay": Replay(recency=1.0)}, "recency is 1.0"),
        ({"replay": Replay(slots=0)}, "slots is 0"),
        ({"replay": Replay(warm_up=9, slots=2)}, "warm_up needs a slot for each of the 8 tasks"),
        ({"replay": Replay(warm_up=20, length=16)}, "warm_up is 20"),
        ({"steps": 0}, "steps and chunk length count steps"),
    ],
)
def test_bad_settings_get_one_sentence_before_any_work(settings, words):
    with pytest.raises(InputError, match=words):
        train(ShownBest(), TASKS, policy(), Direct(4), **({"steps": 10} | settings), key=KEY)
