import inspect
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

from apportion.algorithm import Algorithm, _fault, advance, begin, raise_fault
from apportion.certify.statistics import compare
from apportion.domains.probes import ProbeState, ShownBest
from apportion.errors import InputError
from apportion.learners.direct import Direct
from apportion.memory import Replay
from apportion.policy import GaussianLogits, Policy, Recurrent
from apportion.priority import Priority
from apportion.problem import Observation, evaluate
from apportion.runs.checkpoint import save_state
from apportion.scorers import Evidence, mean_deviation
from apportion.tasks import Task, draw_tasks
from apportion.training import (
    Chunks,
    _warn_if_flat,
    train,
)
from apportion.trees import stack, take
from learning import assert_mean_above, fractions_of_best, train_seeds
from probe_problems import HeldPays, SomeCarrySignal

KEY = jax.random.key(0)
TASKS = draw_tasks(12, [3, 4], 8)
LEARNER = Direct(16, 3e-2)


@eqx.filter_jit
def policy(key=KEY):
    return Recurrent(channels=1, hidden=8, key=key)


@pytest.mark.parametrize(
    "problem",
    [HeldPays(), pytest.param(ShownBest(), marks=pytest.mark.slow)],
    ids=lambda p: type(p).__name__,
)
def test_direct_gradient_reaches_95_percent_of_the_optimum_on_every_probe(problem):
    policies = train_seeds(problem, TASKS, policy, LEARNER, steps=300)
    for tasks in (TASKS, draw_tasks(12, 4, 8, seed=9)):
        for of_task in fractions_of_best(problem, policies, tasks).T:
            assert_mean_above(of_task, 0.95)


@pytest.mark.slow
def test_prioritisation_beats_uniform_where_only_some_tasks_carry_signal():
    """Runs of the same keys, tried on unseen tasks of the carriers."""
    problem, keys = SomeCarrySignal(), jax.random.split(jax.random.key(1), 12)
    keys = jnp.concatenate([keys, keys])
    # Two of 32 tasks carry signal; the others are quiet and pay noise.
    tasks = draw_tasks(8, 4, 2).joined(draw_tasks(np.arange(8, 64), 4, 30))
    policies = train(
        problem, tasks, eqx.filter_vmap(policy)(keys), Direct(16, 1e-2), steps=200,
        priority=Priority(jnp.repeat(jnp.array([0.0, 1.0]), 12), beta=0.0), key=keys,
    ).policy  # fmt: skip

    def score(policy):
        fresh = draw_tasks(8, 4, 20, seed=5)
        path = evaluate(problem, policy, fresh, key=jax.random.key(9), episodes=4)
        return path.mean_reward.mean()

    scores = eqx.filter_jit(eqx.filter_vmap(score))(policies)
    uniform, prioritised = np.split(np.asarray(scores), 2)
    assert compare(prioritised, uniform).low > 0


# In float64, where several runs' sums, taken in another order, come to the same.
def run(**options):
    own = {"problem": ShownBest(), "tasks": TASKS, "learner": LEARNER, "key": KEY, "steps": 40}
    with jax.enable_x64(True):
        return train(
            **({"policy": policy()} | own | options), measure=5,
            explore=GaussianLogits(0.3), replay=Replay(warm_up=0, act_periods=2),
        )  # fmt: skip


@pytest.fixture(scope="module")
def watched():
    """The states and rewards at the chunks' ends of a run, and its result."""
    seen = []

    def watch(chunk):
        seen.append((jax.tree.map(jnp.copy, chunk.state), chunk.measured))

    with warnings.catch_warnings():
        # Its step has a slope, and nothing is warned of.
        warnings.simplefilter("error", UserWarning)
        # A seed does for a key.
        result = run(chunks=Chunks(20, on_chunk=watch), key=0)
    return *zip(*seen, strict=True), result


@pytest.fixture
def trained(watched):
    return watched[-1]


def test_a_run_goes_on_bit_for_bit_as_if_it_had_never_stopped_and_chunks_do_not_matter(
    watched, tmp_path, caplog
):
    (half, _), _, trained = watched
    with caplog.at_level("INFO", "apportion"):
        stopped = run(chunks=Chunks(10, on_chunk=lambda chunk: True), resume_from=half)
    compiling = "train: compiling, which can take a minute"
    assert caplog.messages == [compiling, "train: 30 of 40 steps"]
    saved = save_state(stopped.state, tmp_path / "stopped.safetensors")
    resumed = run(chunks=Chunks(10), resume_from=saved)
    assert bool(eqx.tree_equal(resumed.state, trained.state))
    later = pd.concat([stopped.metrics, resumed.metrics], ignore_index=True)
    pd.testing.assert_frame_equal(later, trained.metrics[20:].reset_index(drop=True))
    with pytest.raises(InputError, match="steps is 10, but resume_from is at step 20"):
        run(resume_from=half, steps=10)
    with pytest.raises(InputError, match="shapes of this run's; pass the same policy"):
        run(resume_from=half, policy=Recurrent(channels=1, hidden=9, key=KEY))


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("problem", ShownBest(horizon=17)),
        ("tasks", draw_tasks(12, [3, 4], 8, seed=1)),
        ("learner", Direct(4, 2e-3)),
        ("key", jax.random.key(1)),
    ],
)
def test_a_state_goes_on_with_its_own_run_and_no_other(watched, part, other):
    with pytest.raises(InputError, match=f"a different {part}"):
        run(resume_from=watched[0][0], **{part: other})


def test_the_result_shows_itself(trained):
    assert list(trained.metrics.columns) == [
        "step", "task", "loss", "reward", "score", "probability", "weight", "deviation",
        "gradient_norm",
    ]  # fmt: skip
    assert len(trained.metrics) == 40
    lines = trained.summary().splitlines()
    assert "40 steps over 8 tasks" in lines[0]
    assert "on 5 of the tasks" in lines[1]
    assert float(lines[3].split()[-1]) == pytest.approx(trained.progress[0].mean(), abs=1e-3)
    assert "gain " in lines[6]
    # The rewards of whichever tasks were drawn are no progress, and none is told.
    assert not {"reward", "loss"} & {line.split()[0] for line in lines}
    with jax.enable_x64(True):
        assert trained.probabilities.sum() == pytest.approx(1)


def test_progress_is_what_evaluate_measures_on_the_same_tasks_before_along_and_after(watched):
    _, measured, trained = watched
    progress = trained.progress
    assert list(progress.columns) == ["equal", 0, 20, 40]
    assert progress["equal"].tolist() == pytest.approx([1 / int(m.mask.sum()) for m in TASKS[:5]])
    assert measured == pytest.approx((progress[20].mean(), progress[40].mean()))
    with jax.enable_x64(True):
        key = jax.random.fold_in(KEY, 2**32 - 2)
        again = evaluate(ShownBest(), trained.policy, TASKS[:5], key=key).mean_reward[:, 0]
    assert progress[40].tolist() == pytest.approx(again.tolist())


def test_runs_with_tasks_and_settings_of_their_own_are_what_single_runs_are(trained):
    with jax.enable_x64(True):
        keys = jnp.stack([jax.random.key(7), KEY])
        policies = eqx.filter_vmap(policy)(keys)
        many = train(
            ShownBest(), stack([draw_tasks(12, 4, 8, seed=9), TASKS]), policies,
            Direct(16, jnp.array([1e-12, 1.0]) * LEARNER.learning_rate), steps=20, key=keys,
            explore=GaussianLogits(0.3), replay=Replay(warm_up=0, act_periods=2),
        )  # fmt: skip
    others, theirs = (many.metrics[many.metrics.run == one] for one in (0, 1))
    alone = trained.metrics[:20]
    assert theirs["task"].tolist() == alone["task"].tolist()
    assert theirs["reward"].tolist() == pytest.approx(alone["reward"].tolist(), abs=1e-9)
    # The other run has other draws, and with a tiny rate learns nothing.
    assert others["task"].tolist() != alone["task"].tolist()
    with jax.enable_x64(True):
        assert eqx.tree_equal(take(many.policy, 0), take(policies, 0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"tasks": [[0, 1, 2]]}, r"expects a Task but got a list, \[\[0, 1, 2\]\]"),
        ({"learner": "direct"}, "expects a Learner but got a str, 'direct'"),
        ({"policy": Recurrent}, "expects a Policy"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_a_sentence(part, words):
    parts = {"problem": ShownBest(), "tasks": TASKS, "policy": policy(), "learner": LEARNER} | part
    with pytest.raises(InputError, match=words):
        # Without the types that tests check.
        inspect.unwrap(train)(**parts, key=KEY)


def test_the_papers_memory_starts_empty_and_acting_fills_it_up_to_the_end_of_an_episode():
    replay = Replay.paper(act_periods=5)
    options = {"steps": 4, "measure": 0, "replay": replay, "key": KEY}
    done = train(ShownBest(horizon=16), TASKS[:1], policy(), Direct(4), **options)
    # The first state, three times five periods, and one that ends the episode.
    assert done.state.memory.count.tolist() == [1 + 15 + 1]


def test_a_million_tasks_need_memory_only_for_those_in_use():
    members = (jnp.arange(1_000_000)[:, None] + jnp.arange(4)) % 12
    tasks = Task(members, members >= 0)
    replay = Replay(length=16, slots=256, act_periods=2)
    algorithm = Algorithm.of(ShownBest(), tasks, policy(), Direct(4), replay=replay)
    state = jax.eval_shape(lambda: begin(algorithm, policy(), KEY))
    size = sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves((state.memory, state.priority_state))
    )
    assert size < 32 * 2**20


def test_a_step_without_a_slope_is_warned_of(trained):
    flat = trained.metrics.assign(gradient_norm=0.0)
    with pytest.warns(UserWarning, match=r"Direct: the gradient was 0 .* ShownBest.step"):
        _warn_if_flat(trained.algorithm, flat)


class Poison(ShownBest):
    """Shows NaN, which `train` would refuse before it starts."""

    def observe(self, task, state: ProbeState) -> Observation:
        return Observation(jnp.nan * state.signal[:, None, None], state.held)


def test_a_fault_is_told_with_its_step_and_leaves_scores_and_policy_as_they_were():
    kept = {"scorer": mean_deviation, "replay": Replay(warm_up=0, act_periods=0)}
    algorithm = Algorithm.of(Poison(), TASKS, policy(), Direct(4), **kept)
    state = eqx.filter_jit(begin)(algorithm, policy(), KEY)
    after, _ = eqx.filter_jit(lambda a, s: advance(a, s, 5))(algorithm, state)
    with pytest.raises(
        InputError, match=r"step 0, task \d \(entities \[.*\]\): the loss or its grad"
    ):
        raise_fault(algorithm, after)
    assert np.asarray(after.priority_state.scores).tolist() == [1.0] * 8
    assert bool(eqx.tree_equal(after.parameters, state.parameters))
    # Of several runs, the second.
    later = eqx.tree_at(lambda s: s.fault, after, jnp.array([[0, 0, 0], [4, 3, 2]]))
    words = r"step 3 of run 1, task 2 .* scorer returned a negative number \(mean_deviation\)"
    with pytest.raises(InputError, match=words):
        raise_fault(algorithm, later)


@pytest.mark.parametrize(
    ("changes", "value", "kind"),
    [
        ({}, 0.5, 0),
        ({"loss": jnp.nan}, 0.5, 1),
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

    with pytest.raises(InputError, match="OffSimplex: allocation .* is not on the simplex"):
        train(ShownBest(), TASKS, OffSimplex(), Direct(4), steps=5, key=KEY)
    words = r"Recurrent cannot read ShownBest's observation.*\(4, 1, 1\)"
    with pytest.raises(InputError, match=words):
        train(ShownBest(), TASKS, Recurrent(channels=3, key=KEY), Direct(4), steps=5, key=KEY)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replay": Replay(length=2)}, "memory length is 2"),
        ({"replay": Replay(recency=1.0)}, "recency is 1.0"),
        ({"replay": Replay(warm_up=9, slots=2)}, "warm_up needs a slot for each of the 8 tasks"),
        ({"replay": Replay(warm_up=20, length=16)}, "warm_up is 20"),
        ({"steps": 0}, "steps, chunk length and record_every"),
        ({"problem_axes": 0}, "problem_axes needs several runs"),
        ({"key": jax.random.split(KEY, 2)}, "2 keys; pass one policy per key, stacked"),
        ({"chunks": Chunks(record_every=7)}, "record_every 7 must divide steps"),
    ],
)
def test_bad_settings_get_one_sentence_before_any_work(settings, words):
    with pytest.raises(InputError, match=words):
        train(ShownBest(), TASKS, policy(), Direct(4), **({"steps": 10, "key": KEY} | settings))
