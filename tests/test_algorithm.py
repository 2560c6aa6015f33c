"""Algorithm 1 against a plain NumPy re-implementation that shares nothing but the random numbers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from apportion.learners.direct import Direct
from apportion.memory import Replay
from apportion.policy import GaussianLogits, LogitPolicy
from apportion.priority import Priority
from apportion.simplex import Head
from apportion.tasks import draw_tasks
from apportion.training import Chunks, train
from probe_problems import HeldPays

T, M, m = 6, 12, 4
HORIZON, HISTORY, B, ACTING = 16, 8, 4, 3
ALPHA, BETA, SMOOTHING, RATE, RECENCY, NOISE = 0.7, 0.8, 0.2, 0.3, 0.1, 0.4
STEPS = 120


class OneParameter(LogitPolicy):
    """Scores theta times what the entity shows: small enough to differentiate by hand."""

    theta: jax.Array
    head: Head = Head()

    def encode(self, history, mask):
        return history[:, -1, :]

    def logits(self, features, held, mask):
        return self.theta * features[:, 0]


def softmax(scores):
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


class Reference:
    """The paper's loop, one line after the other."""

    def __init__(self, members, stops):
        self.stops = stops
        self.quality = np.linspace(0, 1, M)[members]
        self.theta = 0.5
        self.s = np.ones(T)
        # R_t: rows of (period, held); the last row stored is where the episode stands.
        self.rows = [{0: (0, np.full(m, 1 / m))} for _ in range(T)]
        self.count = [1] * T

    def probabilities(self):
        p = self.s**ALPHA / (self.s**ALPHA).sum()
        w = (T * p) ** -BETA
        return p, w / w.max()

    def last(self, t):
        return self.rows[t][(self.count[t] - 1) % HISTORY]

    def batch(self, t, uniform):
        filled = min(self.count[t], HISTORY)
        oldest = self.count[t] % HISTORY if self.count[t] > HISTORY else 0
        latest = max(filled - B, 0)
        chances = np.cumsum((1 - RECENCY) ** np.arange(latest + 1))
        back = int(np.searchsorted(chances / chances[-1], uniform, side="right"))
        places = [latest - back + j for j in range(B) if latest - back + j < filled]
        return [(oldest + place) % HISTORY for place in places]

    def mean_reward(self, theta, t, rows):
        """The batch's rewards, each in the state that the previous allocation leads to."""
        q = self.quality[t]
        rewards, previous = [], None
        for row in rows:
            period, held = self.rows[t][row]
            if previous is not None and period == previous[0] + 1:
                held = previous[1]
            shares = softmax(theta * q)
            rewards.append((np.minimum(held, shares) * q).sum())
            previous = (period, shares)
        return np.mean(rewards)

    def step(self, uniforms, recall_uniform, noises):
        p, w = self.probabilities()
        t = int(np.searchsorted(np.cumsum(p), uniforms[0], side="right"))
        rows = self.batch(t, recall_uniform)
        up, down = (self.mean_reward(self.theta + h, t, rows) for h in (1e-6, -1e-6))
        gradient = (up - down) / 2e-6
        shares = softmax(self.theta * self.quality[t])
        score = np.abs(shares - 1 / m).max()
        arrived = {}
        for before, row in itertools.pairwise(rows):
            if self.rows[t][row][0] == self.rows[t][before][0] + 1:
                arrived[row] = (self.rows[t][row][0], shares)
        self.theta += RATE * w[t] * gradient
        self.s[t] = SMOOTHING * self.s[t] + (1 - SMOOTHING) * max(score, 1e-6)
        self.rows[t].update(arrived)
        period, _ = self.last(t)
        for noise in noises:
            shares = softmax(self.theta * self.quality[t] + NOISE * noise)
            period += 1
            if period == HORIZON:
                period, shares = 0, np.full(m, 1 / m)
            self.rows[t][self.count[t] % HISTORY] = (period, shares)
            self.count[t] += 1
            if self.stops and period == 0:
                break
        return t, p[t], w[t], score


@jax.jit
def randomness(key, step):
    """The uniforms and normals that step n of the algorithm uses."""
    draw, _, recall, _, act = jax.random.split(jax.random.fold_in(key, step), 5)
    noises = [
        jax.random.normal(jax.random.split(k)[0], (m,)) for k in jax.random.split(act, ACTING)
    ]
    return jax.random.uniform(draw, (1,)), jax.random.uniform(recall), jnp.stack(noises)


@jax.jit
def seen(priority, state):
    """Probabilities, and where each task's episode stands."""
    positions = jax.vmap(state.memory.position)(jnp.arange(T))
    return priority.probabilities(state.priority_state), positions


@pytest.fixture(scope="module", params=[False, True], ids=["goes on", "stops at the end"])
def both(request):
    tasks = draw_tasks(M, m, T, seed=2)
    key = jax.random.key(5)
    frames, watched = [], []

    def watch(chunk):
        frames.append(chunk.metrics)
        memory = chunk.state.memory
        probabilities, positions = seen(Priority(ALPHA), chunk.state)
        watched.append(
            {
                "scores": np.asarray(chunk.state.priority_state.scores),
                "probabilities": np.asarray(probabilities),
                "positions": np.asarray(positions),
                "periods": np.asarray(memory.periods),
                "held": np.asarray(memory.states.held),
                "count": np.asarray(memory.count),
                "theta": float(chunk.policy.theta),
            }
        )

    train(
        HeldPays(universe=M, horizon=HORIZON),
        tasks,
        OneParameter(jnp.asarray(0.5)),
        Direct(B, RATE, transform=optax.identity()),
        priority=Priority(ALPHA, BETA, SMOOTHING),
        explore=GaussianLogits(NOISE),
        replay=Replay(
            length=HISTORY, warm_up=0, recency=RECENCY, act_periods=ACTING, stops=request.param
        ),
        steps=STEPS,
        chunks=Chunks(1, on_chunk=watch),
        measure=0,
        key=key,
    )
    reference, expected = Reference(np.asarray(tasks.members), request.param), []
    for n in range(STEPS):
        drawn = reference.step(*jax.device_get(randomness(key, n)))
        expected.append(
            {
                "drawn": drawn,
                "scores": reference.s.copy(),
                "probabilities": reference.probabilities()[0],
                "positions": np.array([reference.last(t)[0] for t in range(T)]),
                "rows": [dict(rows) for rows in reference.rows],
                "count": list(reference.count),
                "theta": reference.theta,
            }
        )
    return frames, watched, expected


def test_the_same_tasks_are_drawn_with_the_same_probabilities_and_weights(both):
    frames, _, expected = both
    for frame, reference in zip(frames, expected, strict=True):
        t, p, w, _ = reference["drawn"]
        row = frame.iloc[0]
        assert int(row["task"]) == t
        assert row["probability"] == pytest.approx(p, rel=1e-4)
        assert row["weight"] == pytest.approx(w, rel=1e-3)
    assert len({r["drawn"][0] for r in expected}) == T


def test_scores_and_probabilities_agree_after_every_step(both):
    _, watched, expected = both
    for ours, reference in zip(watched, expected, strict=True):
        assert ours["scores"] == pytest.approx(reference["scores"], rel=1e-3)
        assert ours["probabilities"] == pytest.approx(reference["probabilities"], rel=1e-3)
        assert ours["theta"] == pytest.approx(reference["theta"], rel=1e-3)
    assert expected[-1]["theta"] > 0.7


def test_positions_and_memory_agree_after_every_step(both):
    _, watched, expected = both
    wrapped = 0
    for ours, reference in zip(watched, expected, strict=True):
        assert ours["positions"].tolist() == reference["positions"].tolist()
        assert ours["count"].tolist() == reference["count"]
        for t in range(T):
            for row, (period, held) in reference["rows"][t].items():
                assert int(ours["periods"][t, row]) == period
                assert ours["held"][t, row] == pytest.approx(held, abs=2e-3)
        wrapped += max(reference["count"]) > HORIZON
    assert wrapped > 50
