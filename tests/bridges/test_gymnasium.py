"""Problems as environments, and environments as problems."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gymnasium")

import gymnasium
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from apportion import PPO, Chunks, Pooled, Replay, Task, draw_tasks, train
from apportion.bridges.gymnasium import ProblemEnv, from_gymnasium
from apportion.composition import EqualShares
from apportion.domains.budget.problem import Budget
from apportion.domains.domain import find_domain
from apportion.domains.probes import ShownBest
from apportion.errors import InputError
from apportion.problem import evaluate
from apportion.scorers import realised_gain

KEY = jax.random.key(0)
BUDGET = Budget.simulate(universe=12, periods=14, seed=1)
MIXED = Task.of([[0, 1, 2], [3, 4], [5, 6, 7], [8, 9]])


class NumpyBudget(gymnasium.Env):
    """The budget's problem once more, as a user would write it."""

    def __init__(self, campaigns):
        self.own = np.array(campaigns)
        self.carry, self.saturation = (
            np.asarray(x)[self.own] for x in (BUDGET.carry, BUDGET.saturation)
        )

    def show(self):
        record = np.asarray(BUDGET.measured)[self.own, self.n : self.n + BUDGET.window]
        return np.stack([record, np.broadcast_to(self.goodwill[:, None], record.shape)], -1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n, self.goodwill = 0, 1 / len(self.own) / (1 - self.carry)
        return self.show(), {}

    def step(self, shares):
        self.goodwill = self.carry * self.goodwill + shares
        efficiency = np.asarray(BUDGET.efficiency)[self.own, self.n + BUDGET.window]
        reward = (efficiency * self.goodwill / (self.goodwill + self.saturation)).mean()
        self.n += 1
        return self.show(), reward, False, self.n >= BUDGET.horizon, {}


class Lottery(gymnasium.Env):
    """Random prizes, a random end, limits, and a memory of everything: what is hard to repeat."""

    ends = 0.2

    def __init__(self, entities):
        self.entities = np.array(entities, np.float32)
        self.over = True

    def show(self):
        limits = self.np_random.uniform(0.3, 1.0, len(self.entities))
        return {"history": np.stack([self.entities / 10, self.prize], 1), "limits": limits}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.prize, self.pot, self.over = self.np_random.random(len(self.entities)), 0.0, False
        return self.show(), {}

    def step(self, shares):
        assert not self.over, "stepped after its end"
        self.pot = 0.5 * self.pot + float(shares @ self.prize)
        self.prize = self.np_random.random(len(self.entities))
        self.over = bool(self.np_random.random() < self.ends)
        return self.show(), self.pot, self.over, False, {}


def environment(domain):
    problem = find_domain(domain).problem()
    return ProblemEnv(problem, draw_tasks(problem.universe, 3, 4))


def numpy_budget():
    return from_gymnasium(NumpyBudget, universe=12, horizon=BUDGET.horizon)


@pytest.mark.parametrize("domain", ["budget", "charging"])
def test_gymnasium_s_own_checks_find_nothing(domain):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # It renders nothing, and Gymnasium checks render modes only of registered environments.
        check_env(environment(domain), skip_render_check=True)


def test_a_seed_fixes_the_episode_and_an_action_is_scores_of_those_who_are_there():
    env = ProblemEnv(ShownBest(), MIXED)
    actions = np.random.default_rng(0).uniform(-1, 1, (5, 3)).astype(np.float32)

    def walk(seed):
        observation, info = env.reset(seed=seed)
        there, seen = info["mask"], [observation["history"]]
        assert observation["mask"].tolist() == observation["limits"].tolist() == there.tolist()
        for action in actions:
            observation, *_, info = env.step(action)
            seen.append(observation["history"])
            raised = np.where(there, np.exp(5 * action), 0)
            np.testing.assert_allclose(info["allocation"], raised / raised.sum(), atol=1e-6)
        return np.stack(seen).tolist()

    assert walk(7) == walk(7) != walk(8)
    for wrong in (np.full(3, np.nan), np.zeros(4)):
        with pytest.raises(InputError, match="give a score from -1 to 1 for each entity"):
            env.step(wrong)
    # One task alone is stayed with.
    _, info = ProblemEnv(ShownBest(), MIXED[1]).reset(seed=0)
    assert info["mask"].tolist() == [True, True, False]


def test_a_garage_s_shares_keep_to_its_limits_and_its_day_terminates():
    env = environment("charging")
    observation, info = env.reset(seed=1)
    assert info["task"] in range(4)
    assert observation["history"].shape == (3 * 24,)
    rng, ends, bounded = np.random.default_rng(0), [], 0
    for _ in range(96):
        limits = observation["limits"]
        action = rng.uniform(-1, 1, 3).astype(np.float32)
        observation, _, terminated, truncated, info = env.step(action)
        assert (info["allocation"] <= limits + 1e-6).all()
        assert info["allocation"].sum() == pytest.approx(min(1, limits.sum()), abs=1e-5)
        bounded += int((limits < 1).all())
        ends.append((terminated, truncated))
    assert bounded > 0
    assert ends == [(False, False)] * 95 + [(True, False)]


@pytest.mark.peer
def test_stable_baselines_checks_find_nothing_and_its_ppo_runs():
    stable_baselines3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_checker import check_env as check_for_baselines

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for domain in ("budget", "charging"):
            check_for_baselines(environment(domain))
    garage = environment("charging")
    stable_baselines3.PPO("MultiInputPolicy", garage, n_steps=96, batch_size=32).learn(192)


def test_episodes_of_a_simulator_are_those_of_the_same_problem_in_jax():
    problem = numpy_budget()
    assert (problem.horizon, *problem.shape) == (BUDGET.horizon, 8, 2, False)
    # Far from the first parameters, where all shares are nearly equal.
    parameters, others = eqx.partition(Pooled(2, 4, key=KEY), eqx.is_inexact_array)
    policy = eqx.combine(jax.tree.map(lambda x: 30 * x, parameters), others)
    theirs, ours = (evaluate(each, policy, MIXED, key=KEY) for each in (problem, BUDGET))
    assert np.ptp(ours.allocations, -1).mean() > 0.3
    np.testing.assert_allclose(theirs.allocations, ours.allocations, atol=1e-4)
    np.testing.assert_allclose(theirs.rewards, ours.rewards, rtol=1e-4)


def train_shortly(problem, **options):
    """With memory and a scorer of counterfactual steps, both of which replay episodes."""
    return train(
        problem, MIXED, Pooled(2, 4, key=KEY), PPO(rollouts=3, epochs=2, minibatches=2), steps=4,
        key=KEY, scorer=realised_gain, replay=Replay(act_periods=2), **options,
    )  # fmt: skip


def test_training_on_a_simulator_goes_on_bit_for_bit():
    problem, states = numpy_budget(), []
    keep = Chunks(2, on_chunk=lambda chunk: states.append(jax.tree.map(jnp.copy, chunk.state)))
    whole = train_shortly(problem, chunks=keep)
    assert problem.episodes.replayed > 0
    problem.close()
    resumed = train_shortly(problem, resume_from=states[0], chunks=keep)
    assert resumed.metrics["loss"].tolist() == whole.metrics["loss"].tolist()[2:]
    assert eqx.tree_equal(resumed.policy, whole.policy)


def test_nothing_is_simulated_twice_and_a_step_is_a_pure_function_however_often_and_wherever_it_is_asked():
    first, other = (from_gymnasium(Lottery, universe=8, horizon=6) for _ in range(2))
    evaluate(first, EqualShares(), draw_tasks(8, 3, 4), key=KEY)
    assert first.episodes.replayed == 0
    task = Task.of([[1, 2, 5]])[0]
    a, b = jnp.array([0.3, 0.3, 0.3]), jnp.array([0.1, 0.2, 0.3])
    state = first.reset(task, key=KEY)
    once = first.step(task, state, a, key=KEY)
    aside = first.step(task, state, b, key=KEY)
    later = first.step(task, once.state, b, key=KEY)
    again = first.step(task, state, a, key=KEY)
    elsewhere = other.step(task, once.state, b, key=KEY)
    assert eqx.tree_equal(once, again)
    assert eqx.tree_equal(later, elsewhere)
    assert not eqx.tree_equal(once, aside)
    with pytest.raises(InputError, match="has no gradient; train with PPO"):
        jax.grad(lambda shares: first.step(task, state, shares, key=KEY).reward)(a)


class Forgetful(Lottery):
    def step(self, shares):
        observation, *others = super().step(shares)
        return observation | {"history": np.random.default_rng().random((3, 2))}, *others


def showing(observation):
    return type("Showing", (Lottery,), {"show": lambda self: observation})


class Old(Lottery):
    """Returns four values, as Gym did."""

    def step(self, shares):
        observation, reward, terminated, _, info = super().step(shares)
        return observation, reward, terminated, info


def acting(space):
    return type("Acting", (Lottery,), {"action_space": space})


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        (Forgetful, "Forgetful: the same seed and shares gave another history in period 1"),
        (showing(np.ones((2, 3))), r"for 3 entities .* history of shape \(2, 3\)"),
        (showing({"screen": 0}), r"for 3 entities the environment returns \['screen'\]"),
        (showing({"history": np.ones(3), "limits": [2, 0, 0]}), r"limits \[2.0, 0.0, 0.0\]"),
        (Old, r"Old.step returned 4 values; return 5, \(observation, reward, terminated"),
        (lambda entities: entities, "make_env returned list; return a gymnasium.Env"),
        (acting(spaces.Discrete(3)), r"action_space is Discrete\(3\), but `step` receives the sh"),
        (acting(spaces.Box(0, 5, (3,), np.int32)), "action_space is Box"),
        (acting(spaces.Box(-1.0, 1.0, (3,))), "numbers from 0 to 1"),
        (acting(spaces.Box(0.0, 1.0, (5,))), "of 3 entities, .* have one size, give task_size"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_before_any_work(environment, sentence):
    with pytest.raises(InputError, match=sentence):
        from_gymnasium(environment, universe=8, horizon=6)


def test_environments_of_one_size_are_taken():
    class Five(Lottery):
        ends, action_space = 0.0, spaces.Box(0.0, np.inf, (5,))

        def __init__(self, entities):
            if len(entities) != 5:
                raise ValueError("five reels it has")
            super().__init__(entities)

    with pytest.raises(InputError, match="five reels it has.* have one size, give task_size"):
        from_gymnasium(Five, universe=8, horizon=6)
    with pytest.raises(InputError, match="task_size is 9; it must be a whole number from 1 to 8"):
        from_gymnasium(Five, universe=8, horizon=6, task_size=9)
    problem = from_gymnasium(Five, universe=8, horizon=6, task_size=5)
    found = evaluate(problem, EqualShares(), draw_tasks(8, 5, 2), key=KEY)
    assert np.isfinite(found.rewards).all()
