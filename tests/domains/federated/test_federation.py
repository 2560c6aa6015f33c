"""A federation as a problem: who trains on what, what the server sees, and what padding may not change."""

from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from apportion.domains.federated.aggregators import Fixed, run_episodes
from apportion.domains.federated.clients import Convolutional, Perceptron
from apportion.domains.federated.data import mixture, paper_split, skewed_tasks
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.settings import GradientSettings, PPOSettings
from apportion.domains.federated.states import STATES, ClassScores, Submission
from apportion.errors import InputError
from apportion.problem import check_problem
from apportion.simplex import equal_shares
from apportion.tasks import Task
from domains.federated.made_up import made_up_digits

KEY = jax.random.key(0)
DIGITS = made_up_digits()
PARTITION = paper_split(DIGITS, (16, 8), 30)
TRAINING, UNSEEN = skewed_tasks(PARTITION, 3, 2, seen=(8, 5))


SETTINGS = PPOSettings(
    width=16, rounds=4, epochs=2, batch=10, client_rate=0.3, evaluation=100, test=150, block=40
)
SAMPLES = GradientSettings(
    model="convolutional", width=2, rounds=4, epochs=2, batch=10, evaluation=100, test=150, block=40
)
"""Clients with a convolution, and a policy that sees the server's samples."""
DRAWN = {"drawn": (20, 60), "gate": True}


def federation(settings=SETTINGS, partition=PARTITION, **options):
    return Federation(DIGITS, partition, settings, **options)


# Methods compiled by themselves, as `check_problem` compiles them: one program for both.
def reset(problem, task, key=KEY):
    return eqx.filter_jit(problem.reset)(task, key=key)


def step(problem, task, state):
    return eqx.filter_jit(problem.step)(task, state, equal_shares(task.mask), key=KEY)


def test_padding_takes_no_part_and_the_reward_is_the_accuracy_of_the_average():
    problem = federation()
    padded = Task.of([np.asarray(TRAINING[0].members).tolist()], width=12)[0]
    here, there = (reset(problem, task) for task in (TRAINING[0], padded))
    for name in ("models", "history", "held"):
        own = np.asarray(getattr(there, name))[:10]
        assert own == pytest.approx(np.asarray(getattr(here, name)), abs=1e-5)
    assert (there.history[10:] == 0).all()
    assert (there.held[10:] == 0).all()
    taken = step(problem, TRAINING[0], here)
    right = problem.correct(here.models.mean(0)[None], problem.evaluation).sum()
    assert float(taken.reward) == pytest.approx(float(right), abs=1e-6)
    assert not bool(taken.terminated)
    assert not bool(taken.truncated)


def test_a_larger_share_for_those_who_alone_hold_some_digits_pays_and_is_in_every_row():
    keys = jax.random.split(KEY, 3)
    informed, fedavg, late = (
        run_episodes(federation(), Fixed.minority(total), TRAINING, keys, test_from=first)
        for total, first in ((0.45, 0), (0.2, 0), (0.45, 2))
    )
    assert np.isnan(late.tested[:, :2]).all()
    # The two compile to programs of their own, whose rounding may differ.
    assert late.tested[:, 2:] == pytest.approx(np.asarray(informed.tested[:, 2:]), abs=0.01)
    assert float(informed.tested[:, -1].mean()) > float(fedavg.tested[:, -1].mean()) + 0.02
    rows = informed.to_frame()
    assert rows[["task", "round"]].to_numpy().tolist() == [
        [task, n] for task in range(3) for n in range(1, 5)
    ]
    last = rows[rows["round"] == 4]
    assert (last["tested"].to_numpy() == np.asarray(informed.tested[:, -1])).all()
    shares = rows[[f"share {i}" for i in range(10)]].to_numpy()
    assert shares[:, 8:].sum(1) == pytest.approx(0.45, abs=1e-6)
    assert shares.sum(1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("settings", [SAMPLES, replace(SETTINGS, state="rich")], ids=["i", "r"])
def test_every_client_state_keeps_the_interface(settings):
    samples = settings is SAMPLES
    problem = federation(settings, **(DRAWN if samples else {}))
    if samples:
        check_problem(problem, TRAINING)
    state = reset(problem, TRAINING[0])
    assert state.history.shape == (10, 5, problem.channels)
    differs = np.ptp(np.asarray(state.history[:, -1]), axis=0) > 0
    # Of the round, the server's samples and the other clients every client is told the same.
    assert differs.sum() >= min(problem.channels, 9)


def test_the_convolution_is_a_convolution():
    model = Convolutional(6, 3, 3)
    parameters = model.start(key=KEY)
    images = jax.random.uniform(KEY, (2, 6, 6))
    kernel = parameters["filter"].reshape(3, 3, 1, 3)
    same = jax.lax.conv_general_dilated(
        images[..., None], kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    hidden = jax.nn.relu(same).transpose(0, 3, 1, 2).reshape(2, -1)
    expected = hidden @ parameters["out"].reshape(-1, 10)
    assert np.asarray(model.logits(parameters, images)) == pytest.approx(
        np.asarray(expected), abs=1e-5
    )


@eqx.filter_jit
def train(problem, first):
    """What the fourth client makes of a model."""
    return problem.train(first, jnp.asarray(3), jnp.asarray(0), key=KEY)


def test_a_client_descends_its_own_loss_on_its_own_images_and_an_attacker_multiplies_its_update():
    problem = federation()
    first, unravel = ravel_pytree(problem.model.start(key=KEY))
    trained = train(problem, first)

    def loss(flat):
        logits = problem.model.logits(unravel(flat), problem.images[problem.index[3]])
        own = jax.nn.log_softmax(logits)[jnp.arange(30), problem.local_labels[3]]
        return float(-own.mean())

    assert loss(trained) < loss(first) - 0.1
    counts = PARTITION.counts.copy()
    counts[3] = 15
    fewer = federation(partition=replace(PARTITION, counts=counts))
    wrong = fewer.local_labels.at[3, 15:].set(0)
    poisoned = jax.tree.map(lambda leaf: wrong if leaf is fewer.local_labels else leaf, fewer)
    assert bool((train(fewer, first) == train(poisoned, first)).all())
    factors = np.ones(PARTITION.universe, np.float32)
    factors[3] = -2.0
    attacked = train(federation(partition=replace(PARTITION, factors=factors)), first)
    assert np.asarray(attacked - first) == pytest.approx(-2 * np.asarray(trained - first), abs=1e-6)


def test_blocks_change_memory_and_not_the_score():
    models = jnp.stack(
        [ravel_pytree(Perceptron(6, 16).start(key=key))[0] for key in jax.random.split(KEY, 3)]
    )
    scores = [
        np.asarray(eqx.filter_jit(problem.correct)(models, problem.evaluation))
        for problem in (federation(), federation(replace(SETTINGS, block=7)))
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert scores[0].shape == (3, 10)


def test_the_test_set_leaves_the_evaluation_set_out_unless_the_paper_is_followed():
    apart, papers = federation(), federation(sets="paper")
    assert not set(np.asarray(apart.evaluation)) & set(np.asarray(apart.test))
    assert set(np.asarray(papers.evaluation)) <= set(np.asarray(papers.test))
    with pytest.raises(InputError, match="request fewer"):
        federation(replace(SETTINGS, evaluation=250))


def submitted(correct):
    """Three clients' models by the part of two classes that each gets right; the third moved the most."""
    updates = jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    scores = ClassScores(jnp.asarray(correct), jnp.ones(2) / 2)
    mask, nothing = jnp.ones(3, bool), jnp.zeros(3)
    return Submission(updates, mask, jnp.ones(3), nothing, nothing[:2], nothing[0], scores)


def test_the_papers_state_is_the_accuracy_and_ours_is_that_centred_and_scaled():
    submission = submitted([[0.5, 0.0], [0.5, 0.1], [0.0, 0.4]])
    np.testing.assert_allclose(STATES["raw"](submission)[:, 0], [0.5, 0.6, 0.4], rtol=1e-6)
    np.testing.assert_allclose(STATES["accuracy"](submission)[:, 0], [0, 0.5, -0.5], atol=1e-6)


def test_the_rich_state_shows_the_length_and_the_direction_of_the_update():
    norm, cosine = np.asarray(STATES["rich"](submitted(jnp.ones((3, 2)) / 2)))[:, -2:].T
    assert norm[2] > norm[0] == norm[1]
    assert cosine[0] == cosine[1]


def test_only_part_of_the_clients_takes_part_and_the_others_keep_their_past():
    problem = federation(replace(SAMPLES, model="perceptron", width=16), participation=0.4)
    state = reset(problem, TRAINING[0])
    following = step(problem, TRAINING[0], state).state
    assert int(state.present.sum()) == int(following.present.sum()) == 4
    assert (state.present != following.present).any()
    away = np.asarray(~following.present)
    assert (np.asarray(following.history)[away] == np.asarray(state.history)[away]).all()
    assert (np.asarray(following.absent)[away] >= 1).all()
    with pytest.raises(InputError, match="participation"):
        federation(participation=0.0)


def test_every_episode_draws_its_rate_and_participation():
    small = replace(SAMPLES, model="perceptron", width=4)
    drawn = federation(small, participation=(1.0, 0.4), rates=(0.03, 0.5))
    keys = jax.random.split(KEY, 40)
    rates, fractions = map(np.asarray, jax.vmap(drawn._own_circumstances)(keys))
    assert (rates.min(), rates.max()) == pytest.approx((0.03, 0.5), rel=0.3)
    # Log-uniform: half of the draws are below the geometric mean.
    assert 0.25 < (rates < np.sqrt(0.03 * 0.5)).mean() < 0.75
    assert set((10 * fractions).round().tolist()) == {4.0, 10.0}
    state = reset(drawn, TRAINING[0])
    following = step(drawn, TRAINING[0], state).state
    assert (following.rate, following.participation) == (state.rate, state.participation)
    assert int(following.present.sum()) == round(10 * float(state.participation))
    fixed = federation(replace(small, client_rate=float(state.rate)))
    client = (state.aggregate, jnp.zeros((), int), jnp.zeros((), int))
    trained = drawn.train(*client, state.rate, key=KEY)
    np.testing.assert_allclose(trained, fixed.train(*client, key=KEY), rtol=1e-6)
    with pytest.raises(InputError, match="the smaller first"):
        federation(rates=(0.5, 0.03))


def test_clients_that_come_late_take_no_part_before_and_have_no_past():
    dealt = mixture(DIGITS, [("paper+late", 5, 0)], np.arange(800), samples=20)
    small = replace(SAMPLES, model="perceptron", width=16, rounds=6)
    problem, task = Federation(dealt.digits, dealt.partition, small), dealt.tasks[0]
    state, there = reset(problem, task), []
    for _ in range(6):
        there.append(np.asarray(state.present).tolist())
        late = state
        state = step(problem, task, state).state
        if not late.present[4]:
            assert (np.asarray(late.history[4]) == 0).all()
    assert there == [[True] * 4 + [False]] * 2 + [[True] * 5] * 4


def test_the_servers_samples_of_an_episode_are_drawn_and_a_quarter_is_kept_from_the_policy():
    problem = federation(SAMPLES, **DRAWN)
    counts = set()
    for key in jax.random.split(KEY, 8):
        server = reset(problem, TRAINING[0], key).server
        shown, kept = np.asarray(server.shown), np.asarray(server.kept)
        assert not (shown & kept).any()
        total = shown.sum() + kept.sum()
        assert 20 <= total <= 60
        assert kept.sum() == total // 4
        counts.add(int(total))
        places = np.asarray(server.places)
        assert len(set(places)) == len(places)
        assert set(places) <= set(np.asarray(problem.evaluation))
    assert len(counts) > 3
