"""LearnedAggregation among hand-made replies: who is let in, what the policy sees, what comes out."""

import logging
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from jax.flatten_util import ravel_pytree

pytest.importorskip("flwr")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    Metadata,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedAvg

from apportion.bridges.flower import LearnedAggregation, ShareGradient
from apportion.bridges.flower.server_data import Judged, ServerData
from apportion.bridges.flower.updates import moved
from apportion.domains.federated.data import CLASSES, Digits, paper_split
from apportion.domains.federated.federation import Federation
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import GradientSettings
from apportion.domains.federated.states import GEOMETRY_CHANNELS, Invariant
from apportion.errors import InputError
from apportion.policy import Recurrent
from apportion.runs.policy_file import save_policy
from apportion.simplex import Head
from apportion.tasks import Task

NOBODY = {"min_train_nodes": 0, "min_available_nodes": 0}
"""Options with which a strategy is content with no node to ask."""
LABELS = np.arange(60) % 3
TRUTH = np.eye(3, dtype=np.float32)[LABELS]


class NoNodes:
    """A grid that sends nothing: the strategy only takes note of the model."""

    def get_node_ids(self):
        return []

    def send_and_receive(self, messages, *, timeout=None):
        return []


OWN_CHANCE = GEOMETRY_CHANNELS
"""The channel that says how a client's model does on the server's samples, beside the others'."""


def opinionated(sign=1, channels=Invariant.channels, **options):
    """A policy that gives most to those who do well, this round and before, or to those who do badly."""
    policy = AggregationPolicy(channels, 2, key=jax.random.key(0), **options)
    blank = jax.tree.map(jnp.zeros_like, policy)
    return eqx.tree_at(
        lambda p: (p.recurrence.from_input, p.recurrence.from_state, p.joint.weight, p.score),
        blank,
        (
            blank.recurrence.from_input.at[OWN_CHANCE, 0].set(1.0),
            blank.recurrence.from_state.at[0, 0].set(0.5),
            blank.joint.weight.at[0, 0].set(1.0),
            blank.score.at[0].set(8.0 * sign),
        ),
    )


def strategy_of(policy=None, predict=None, labels=LABELS, **options):
    """By default a model is a table of scores, one row for each of the server's samples."""
    return LearnedAggregation(
        (lambda arrays: arrays["scores"].numpy()) if predict is None else predict,
        labels,
        opinionated() if policy is None else policy,
        **(NOBODY | options),
    )


def message(node, content=None, error=None):
    facts = Metadata(1, "", node, 1, "x", "", 0.0, 60.0, "train")
    return Message(content=content, error=error, metadata=facts)


def reply(node, scores, examples=10, **arrays):
    arrays = {"scores": Array(np.asarray(scores, np.float32)), **arrays}
    metrics = MetricRecord({"num-examples": examples, "loss": 0.5})
    return message(node, RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics}))


def sends(arrays, **parts):
    """A ninth client's reply with these arrays, or with something else."""
    records = {"arrays": ArrayRecord(arrays)} if arrays else {}
    return message(9, RecordDict(records | parts))


def replies_of(tables):
    return [reply(i, table) for i, table in enumerate(tables)]


def models(count, seed=0):
    """Tables that are right on some samples: a different part for each client."""
    rng = np.random.default_rng(seed)
    wrong = np.roll(TRUTH, 1, axis=1)
    tables = [
        np.where(rng.random((60, 1)) < 0.4 + 0.5 * i / count, TRUTH, wrong) for i in range(count)
    ]
    return [table + rng.normal(0, 0.01, TRUTH.shape).astype(np.float32) for table in tables]


def begin(strategy, scores=TRUTH * 0, n=1):
    """Send out a model of these scores, or an `ArrayRecord`."""
    record = scores if isinstance(scores, ArrayRecord) else ArrayRecord({"scores": Array(scores)})
    list(strategy.configure_train(n, record, ConfigRecord(), NoNodes()))
    return strategy


def scores_of(strategy, replies, n=1):
    """The model of a round."""
    return strategy.aggregate_train(n, replies)[0]["scores"].numpy()


def shares_of(strategy, server_round=1):
    seen = strategy.to_frame()
    kept = seen[(seen["round"] == server_round) & (seen["outcome"] == "kept")]
    return kept.set_index("node")["share"]


def walk(strategy, rounds, model=TRUTH * 0):
    """The model after rounds of these replies, each of which starts from the last, and their metrics."""
    metrics = []
    for n, replies in enumerate(rounds, 1):
        arrays, own = begin(strategy, model, n).aggregate_train(n, replies)
        model = arrays["scores"].numpy()
        metrics.append(own)
    return model, metrics


def test_permuting_the_clients_permutes_the_shares_and_the_order_of_arrival_changes_nothing():
    tables, order = models(4), [3, 0, 1, 2]
    plain, permuted, late = (begin(strategy_of(gate=False)) for _ in range(3))
    for n in (1, 2):
        made = scores_of(plain, replies_of(tables), n)
        permuted.aggregate_train(n, replies_of([tables[i] for i in order]))
        expected = shares_of(plain, n).to_numpy()[order]
        np.testing.assert_allclose(shares_of(permuted, n), expected, atol=1e-5)
        assert (scores_of(late, replies_of(tables)[::-1], n) == made).all()
    assert np.ptp(shares_of(plain, 2)) > 0.05


def test_the_aggregate_is_the_mean_by_the_shares_in_the_model_s_own_types():
    tables, strategy = models(4), strategy_of(gate=False)
    record = {"steps": Array(np.array(0)), "scores": Array(np.zeros_like(TRUTH))}
    begin(strategy, ArrayRecord(record))
    # Clients may name their arrays in another order.
    replies = [reply(i, table, steps=Array(np.array(7))) for i, table in enumerate(tables)]
    made, metrics = strategy.aggregate_train(1, replies)
    expected = np.tensordot(shares_of(strategy).to_numpy(), np.stack(tables), 1)
    np.testing.assert_allclose(made["scores"].numpy(), expected, atol=1e-6)
    assert made["scores"].numpy().dtype == np.float32
    assert made["steps"].numpy() == 7
    assert made["steps"].numpy().dtype == np.array(0).dtype
    assert metrics["loss"] == pytest.approx(0.5)
    assert metrics["clients-kept"] == 4


def nan(table):
    table = table.copy()
    table[5, 1] = np.nan
    return reply(9, table)


NUMPY = "numpy.ndarray"
FAULTY = {
    "failed": lambda table: message(9, error=Error(1, "no disk left")),
    "not finite": nan,
    "huge": lambda table: reply(9, 1000 * table),
    "misshapen, transposed": lambda table: reply(9, table.T),
    "misshapen, one array more": lambda table: reply(9, table, other=Array(table)),
    "misshapen, another name": lambda table: sends({"other": Array(table)}),
    "misshapen, complex": lambda table: sends({"scores": Array(table + 1j)}),
    "misshapen, no arrays": lambda table: sends({}, metrics=MetricRecord({"a": 1})),
    "misshapen, unreadable": lambda table: sends({"scores": Array("float32", (60, 3), NUMPY, b"junk")}),
    "misshapen, pickled": lambda table: sends(
        {"scores": Array("object", (1,), NUMPY, pickle.dumps(table))}
    ),
    "not finite, beyond float32": lambda table: sends({"scores": Array(1e300 * table.astype(float))}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_reply_is_left_out_as_if_it_had_never_come(fault):
    tables = models(4)
    good = replies_of(tables)
    with_it, without = (begin(strategy_of()) for _ in range(2))
    made = scores_of(with_it, [FAULTY[fault](tables[0]), *good])
    seen = with_it.to_frame().set_index("node").loc[9]
    assert seen["outcome"] == fault.partition(",")[0]
    assert seen["share"] == 0
    assert (made == scores_of(without, good)).all()


@pytest.mark.parametrize("replies", [[], [message(1, error=Error(1, "gone"))]])
def test_a_round_without_a_usable_reply_keeps_the_model(replies):
    strategy = begin(strategy_of())
    assert strategy.aggregate_train(1, replies) == (None, None)
    assert np.isfinite(scores_of(strategy, replies_of(models(3)), 2)).all()
    with pytest.raises(InputError, match="configure_train comes before"):
        strategy_of().aggregate_train(1, replies)


def test_clients_come_and_go_and_are_remembered_by_their_node_until_a_second_run():
    strategy, tables = begin(strategy_of(gate=False)), models(9)
    rounds = [[0, 1, 2], [0, 1, 2, 3], [3], list(range(9)), [0, 2, 4]]
    for n, nodes in enumerate(rounds, 1):
        made, _ = strategy.aggregate_train(n, [reply(i, tables[i]) for i in nodes])
        shares = shares_of(strategy, n)
        assert shares.index.tolist() == nodes
        assert shares.sum() == pytest.approx(1)
        assert np.isfinite(made["scores"].numpy()).all()
    remembered = shares_of(strategy, 5)[0]
    fresh, again = begin(strategy_of(gate=False)), begin(strategy)
    last = [reply(i, tables[i]) for i in (0, 2, 4)]
    assert (scores_of(fresh, last) == scores_of(again, last)).all()
    assert abs(shares_of(fresh)[0] - remembered) > 1e-3
    assert again.to_frame()["round"].unique().tolist() == [1]


@pytest.fixture
def warnings(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    caplog.set_level(logging.WARNING, "flwr")
    return caplog


def test_shares_by_gradient_are_recommended_once_if_clients_take_part_rarely(warnings):
    pairs = [[reply(2 * n + i, table) for i, table in enumerate(models(2))] for n in range(8)]
    walk(shipped(), pairs)
    assert warnings.text.count("ShareGradient may be better") == 1


def unequal(tables):
    """Clients that hold 10, 20 and 30 samples."""
    return [reply(i, table, 10 * (i + 1)) for i, table in enumerate(tables)]


def by_samples(tables):
    """FedAvg's model of theirs."""
    return np.tensordot([1 / 6, 2 / 6, 3 / 6], np.stack(tables), 1)


def broken(arrays):
    raise RuntimeError("the test set is gone")


def only_at_first(later):
    """Answers to the model of all zeros that a federation begins with, and then something else."""

    def predict(arrays):
        scores = arrays["scores"].numpy()
        return later(arrays) if scores.any() else scores

    return predict


@pytest.mark.parametrize("later", [broken, lambda arrays: [1, 2, 3]], ids=["raises", "too few"])
def test_a_server_that_cannot_score_falls_back_to_fedavg_with_a_warning(later, warnings):
    tables = models(3)
    strategy = begin(strategy_of(predict=only_at_first(later)))
    made = scores_of(strategy, unequal(tables))
    np.testing.assert_allclose(made, by_samples(tables), atol=1e-6)
    assert "FedAvg instead of learned shares" in warnings.text


def test_in_the_fallback_a_claim_counts_at_most_ten_times_the_median():
    strategy, tables = begin(strategy_of(predict=only_at_first(broken))), models(4)
    strategy.aggregate_train(
        1, [reply(i, tables[i], 10) for i in range(3)] + [reply(3, tables[3], 10**15)]
    )
    assert shares_of(strategy)[3] == pytest.approx(10 / 13)
    strategy.aggregate_train(2, [reply(0, tables[0], -5), reply(1, tables[1], 9)])
    assert shares_of(strategy, 2).tolist() == [0.5, 0.5]


def test_neither_a_model_that_cannot_be_scored_nor_missing_metrics_cost_the_others_their_shares():
    def predict(arrays):
        scores = arrays["scores"].numpy()
        return broken(arrays) if scores[0, 0] > 4 else scores

    tables = models(4)
    strategy = begin(strategy_of(predict=predict))
    silent = message(3, RecordDict({"arrays": ArrayRecord({"scores": Array(tables[3])})}))
    replies = [reply(9, tables[0] + 5), *replies_of(tables[:3]), silent]
    _, metrics = strategy.aggregate_train(1, replies)
    assert metrics["clients-kept"] == 4
    assert shares_of(strategy).index.tolist() == [0, 1, 2, 3]
    assert strategy.to_frame().set_index("node").loc[9, "outcome"] == "not scored"


def attacked(honest, malicious):
    """Clients that are mostly right, and some who are wrong by four times as much."""
    tables = [TRUTH + 0.3 * table for table in models(honest)]
    return replies_of([*tables, *[4 * np.roll(TRUTH, 1, axis=1)] * malicious])


def test_a_policy_that_favours_the_wrong_does_not_pass_the_gate():
    replies, favours_wrong = attacked(6, 2), opinionated(sign=-1)
    options = [{"gate": gate, "screen": False} for gate in (False, True)]
    open_, gated = (begin(strategy_of(favours_wrong, **each)) for each in options)
    made, metrics = open_.aggregate_train(1, replies)
    assert metrics["gate-passed"] == 1
    assert (made["scores"].numpy().argmax(1) == LABELS).mean() < 0.5
    assert gated.aggregate_train(1, replies)[1]["gate-passed"] == 0
    np.testing.assert_allclose(shares_of(gated), np.full(8, 1 / 8))


def test_without_a_policy_the_shipped_one_leaves_malicious_clients_with_little():
    plain = begin(shipped(screen=False))
    plain.aggregate_train(1, attacked(7, 3))
    assert shares_of(plain)[[7, 8, 9]].sum() < 0.2


def test_wrong_and_unchanged_models_get_no_share_and_are_named_with_the_reason():
    wrong, start = np.roll(TRUTH, 1, axis=1), 0.1 * TRUTH
    strategy = begin(strategy_of(), start)
    tables = [TRUTH + 0.3 * table for table in models(5)]
    made = scores_of(strategy, replies_of([*tables, wrong, wrong, wrong, start]))
    outcomes = strategy.to_frame().set_index("node")["outcome"].sort_index()
    assert outcomes.tolist() == ["kept"] * 5 + ["wrong"] * 3 + ["unchanged"]
    assert (made.argmax(1) == LABELS).all()
    summary = strategy.summary()
    assert "least trusted: node 5: share 0.000, right on 0 % of the samples; node 6" in summary
    assert "; the others on 100 %" in summary


def test_a_client_that_knows_one_class_alone_is_heard():
    half = np.where(LABELS[:, None] < 2, TRUTH, np.eye(3, dtype=np.float32)[0])
    other = np.tile(np.eye(3, dtype=np.float32)[2], (60, 1))
    strategy = begin(strategy_of())
    strategy.aggregate_train(1, replies_of([half, half, half, half, other]))
    assert set(strategy.to_frame()["outcome"]) == {"kept"}


def test_a_client_that_was_wrong_needs_more_to_be_heard_again():
    wrong = np.roll(TRUTH, 1, axis=1)
    # Right on 63 % of the samples, which is within a standard error of two thirds.
    partly = np.where(np.arange(60)[:, None] < 38, TRUTH, wrong)
    fresh, known = (begin(strategy_of(), 0.1 * TRUTH) for _ in range(2))
    known.aggregate_train(1, replies_of([TRUTH, TRUTH, TRUTH, wrong]))
    for strategy, n in ((fresh, 1), (known, 2)):
        begin(strategy, (0.1 + 0.1 * n) * TRUTH, n)
        strategy.aggregate_train(n, replies_of([TRUTH, TRUTH, TRUTH, partly]))
    assert fresh.to_frame()["outcome"].tolist().count("wrong") == 0
    assert known.to_frame()["outcome"].tolist().count("wrong") == 2


def test_a_score_stands_for_answers_and_labels():
    def losses(arrays):
        return ((arrays["scores"].numpy() - TRUTH) ** 2).sum(1)

    plain = LearnedAggregation(score=losses, **NOBODY)
    tables = [TRUTH + 0.1 * table for table in models(5)] + [5 - 5 * TRUTH]
    assert np.isfinite(scores_of(begin(plain), replies_of(tables))).all()
    assert plain.to_frame().set_index("node").loc[5, "outcome"] == "wrong"
    # A loss is neither an accuracy nor a right answer.
    summary = plain.summary()
    assert "accuracy" not in summary
    assert "node 5: share 0.000, with a loss below the mean of the model sent out on" in summary
    assert "right" not in summary


def test_with_a_score_a_client_is_wrong_by_its_mean_loss():
    """Even one that is better than the median on a third of 20 samples."""
    server, doubted = ServerData(None, None, score=lambda arrays: np.ones(20)), np.ones(10, bool)
    rng = np.random.default_rng(0)
    usual = rng.chisquare(1, 20)
    wrong = np.where(np.arange(20) % 3, 2.6, 0.8) * usual
    losses = [
        *(usual * np.linspace(0.9, 1.1, 7)[:, None]),
        1.4 * usual,
        wrong,
        1.7 * rng.permutation(usual),
    ]
    clients = [Judged(np.exp(-own), np.ones(20, bool), np.ones(20)) for own in losses]

    def passing(before, doubted=~doubted):
        right, right_before = server.right_answers(clients, before, doubted)
        assert right_before.all()
        assert (right.all(1) | ~right.any(1)).all()
        return right.all(1).tolist()

    assert passing(clients[0]) == [True] * 8 + [False, True]
    # 1.7 times the median is within a standard error of 1.5 times, unless the client is doubted.
    assert passing(clients[0], doubted) == [True] * 8 + [False, False]
    # No model is worse than the one that was sent out.
    assert passing(clients[8]) == [True] * 10
    # A huge loss of the model that was sent out is finite.
    huge = Judged(np.r_[0.0, clients[0].chances[1:]], np.ones(20, bool), np.ones(20))
    assert np.isfinite(huge.losses).all()


def chosen_rows(arrays, chosen):
    """Learn the samples by heart."""
    scores = arrays["scores"].numpy().copy()
    scores[chosen] = 5 * TRUTH[chosen]
    return ArrayRecord({"scores": Array(scores)})


def all_rows(arrays, chosen):
    """Learn what is right for other samples, too."""
    return ArrayRecord({"scores": Array(5 * TRUTH)})


@pytest.mark.parametrize(
    ("tune", "clients", "used"),
    [
        (all_rows, 4, True),
        (chosen_rows, 4, False),
        (all_rows, 16, False),
        (lambda arrays, chosen: broken(arrays), 4, False),
        (lambda arrays, chosen: ArrayRecord({"other": Array(TRUTH)}), 4, False),
    ],
    ids=["helps", "by heart", "many clients", "raises", "misshapen"],
)
def test_a_model_is_tuned_if_that_helps_on_held_out_samples_and_clients_are_few(
    tune, clients, used
):
    plain, tuning = begin(strategy_of()), begin(strategy_of(tune=tune))
    replies = replies_of(models(clients))
    expected = 5 * TRUTH if used else scores_of(plain, replies)
    np.testing.assert_allclose(scores_of(tuning, replies), expected)
    assert ("tuned on the server's samples in 1" in tuning.summary()) == used


def test_a_server_without_samples_is_refused():
    with pytest.raises(InputError, match="without samples use Flower's FedAvg"):
        LearnedAggregation()
    with pytest.raises(InputError, match="labels without predict"):
        LearnedAggregation(labels=LABELS)


def test_a_server_that_dies_goes_on_with_its_memory(tmp_path):
    tables, file = models(4), tmp_path / "memory.safetensors"
    rounds = [replies_of([table + 0.1 * n for table in tables]) for n in range(4)]

    expected, _ = walk(shipped(), rounds)
    first = shipped(checkpoint_path=file)
    made, _ = walk(first, rounds[:2])
    second = shipped(checkpoint_path=file)
    kept = second.kept_model["scores"].numpy()
    assert (kept == made).all()
    np.testing.assert_allclose(walk(second, rounds[2:], kept)[0], expected, atol=1e-5)
    resumed, whole = second.to_frame(), first.to_frame()
    assert resumed["round"].tolist() == np.repeat([1, 2, 3, 4], 4).tolist()
    pd.testing.assert_frame_equal(resumed[:8], whole)
    assert second.summary().startswith("4 rounds, 4 clients; ")
    ends = [first._memory.round_notes[0].accuracy, second._memory.round_notes[-1].accuracy]
    assert f": {ends[0]:.3f} after round 1, {ends[1]:.3f} after round 4" in second.summary()
    file.write_bytes(b"junk")
    with pytest.raises(InputError, match="memory.safetensors"):
        shipped(checkpoint_path=file)


def shipped(**options):
    return LearnedAggregation(lambda arrays: arrays["scores"].numpy(), LABELS, **(NOBODY | options))


@pytest.mark.parametrize(
    ("answers", "labels", "words"),
    [
        (
            lambda scores: scores,
            LABELS + 1,
            "labels start at 1 and go up to 3; classes count from 0",
        ),
        (lambda scores: scores, LABELS[:59], r"\(60, 3\) for 59 labels; return a row"),
        (lambda scores: scores[:, :2], LABELS, "2 classes, and labels go up to 2"),
        (lambda scores: scores[:, :1], LABELS % 2, r"np.stack\(\[1 - p, p\], axis=1\)"),
        (lambda scores: scores[:, 0], LABELS % 2, r"one float32 per sample, \(60,\)"),
        (lambda scores: scores + np.nan, LABELS, "not finite"),
        (lambda scores: broken(scores), LABELS, "RuntimeError: the test set is gone"),
    ],
    ids=["from 1", "too few labels", "too few classes", "column", "sigmoid", "nan", "raises"],
)
def test_a_predict_that_does_not_do_is_refused_before_anybody_is_asked(answers, labels, words):
    strategy = strategy_of(predict=lambda arrays: answers(arrays["scores"].numpy()), labels=labels)
    with pytest.raises(InputError, match=words) as caught:
        begin(strategy)
    assert "\n" not in str(caught.value)
    assert len(strategy.to_frame()) == 0
    begin(strategy_of(predict=lambda arrays: arrays["scores"].numpy().argmax(1)))


def test_a_score_that_does_not_do_is_refused_before_anybody_is_asked():
    for losses in (-TRUTH[:, 0] - 1, TRUTH, 1.0):
        strategy = LearnedAggregation(score=lambda arrays, losses=losses: losses, **NOBODY)
        with pytest.raises(InputError, match="return a loss of at least 0 for each sample"):
            begin(strategy)


def test_the_memory_of_another_federation_is_refused(tmp_path):
    file = tmp_path / "memory.safetensors"
    begin(shipped(checkpoint_path=file)).aggregate_train(1, replies_of(models(3)))
    begin(shipped(checkpoint_path=file))
    predict = lambda arrays: arrays["scores"].numpy()  # noqa: E731
    with pytest.raises(InputError, match="belongs to a server with other samples"):
        LearnedAggregation(predict, LABELS[::-1], checkpoint_path=file, **NOBODY)
    wider = {"scores": Array(TRUTH * 0), "more": Array(TRUTH)}
    with pytest.raises(InputError, match="belongs to a model with other arrays"):
        begin(shipped(checkpoint_path=file), ArrayRecord(wider))


def moves(rounds, **options):
    """The server's step and momentum in each round."""
    _, metrics = walk(shipped(**options), rounds)
    return [(own["server-step"], own["server-momentum"]) for own in metrics]


def farthest(tables, **options):
    """The longest step and the largest momentum of three rounds with these models."""
    made = moves([replies_of(tables)] * 3, **options)
    return tuple(map(max, zip(*made, strict=True)))


def test_step_and_momentum_are_taken_if_the_samples_improve_together():
    rng = np.random.default_rng(0)
    right = [0.1 * TRUTH + rng.normal(0, 0.01, TRUTH.shape).astype(np.float32) for _ in range(3)]
    assert farthest(right) > (1.0, 0.0)
    # As far in a direction that helps some samples and harms others.
    mixed = [np.where(np.arange(60)[:, None] % 2, own, -own) for own in right]
    assert farthest(mixed) == (1.0, 0.0)
    assert farthest(mixed, gate=False) > (1.0, 0.0)


def late_joiner(strategy, size):
    """Rounds whose updates shrink to a hundredth, and then one that goes far, to what is right."""
    tables = models(4)
    for n in range(1, 8):
        scores = tables[0] + 0.01 * n
        near = [scores + table / 100 ** (n / 7) for table in tables]
        begin(strategy, scores, n)
        strategy.aggregate_train(n, replies_of(near))
    begin(strategy, scores, 8)
    strategy.aggregate_train(8, [*replies_of(near), reply(9, scores + size * TRUTH)])
    return strategy.to_frame().query("round == 8").set_index("node")["outcome"][9]


def test_an_update_as_large_as_all_were_at_first_is_not_huge_and_beyond_that_the_samples_decide():
    assert late_joiner(ShareGradient(lambda model: jnp.zeros(()), **NOBODY), 3.0) == "kept"
    assert late_joiner(ShareGradient(lambda model: jnp.zeros(()), **NOBODY), 300.0) == "huge"
    assert late_joiner(strategy_of(), 300.0) == "kept"
    assert late_joiner(strategy_of(), -300.0) == "huge"


def test_a_model_that_is_less_sure_and_as_often_right_stays_and_a_wrong_one_does_not():
    sure = TRUTH * 9
    less_sure, wrong = TRUTH, np.roll(TRUTH, 1, axis=1)
    # Three answers of 60 are within noise.
    nearly = np.where(np.arange(60)[:, None] < 3, wrong, less_sure)
    for scores, harmful in ((less_sure, False), (nearly, False), (wrong, True)):
        strategy = begin(strategy_of(), sure)
        made = scores_of(strategy, [*replies_of([scores] * 3), nan(scores)])
        assert np.allclose(made, sure if harmful else scores)
        assert ("harmful" in set(strategy.to_frame()["outcome"])) == harmful
    summary = strategy.summary()
    assert summary.startswith(
        "1 rounds, 4 clients; the model was the last one, because all replies were harmful"
    )
    assert summary.endswith("node 2 harmful 1 times; node 9 not finite 1 times")
    # All are trusted as little, so that none is least trusted.
    assert "least trusted" not in summary


def test_silent_nodes_are_reported(monkeypatch):
    def addressed(strategy, record, nodes, kind):
        facts = [Metadata(1, "", 0, node, "", "", 0.0, 60.0, kind) for node in nodes]
        return [Message(content=record, metadata=own) for own in facts]

    # Outside a run Flower gives its messages no run's number.
    monkeypatch.setattr(FedAvg, "_construct_messages", addressed)
    monkeypatch.setattr(NoNodes, "get_node_ids", lambda grid: [1, 2, 3])
    strategy, tables = strategy_of(), models(3)
    begin(strategy).aggregate_train(1, [reply(1, tables[0]), reply(2, tables[1])])
    outcomes = strategy.to_frame().set_index("node")["outcome"]
    assert outcomes.to_dict() == {1: "kept", 2: "kept", 3: "silent"}


def test_shares_by_gradient_turn_from_those_who_raise_the_servers_loss():
    def loss(model):
        return -jnp.take_along_axis(jax.nn.log_softmax(model["scores"]), LABELS[:, None], 1).mean()

    replies, strategy = attacked(4, 1), begin(ShareGradient(loss, **NOBODY))
    made = scores_of(strategy, replies)
    plain = scores_of(begin(FedAvg(fraction_evaluate=0.0, **NOBODY)), replies)
    assert float(loss({"scores": made})) < float(loss({"scores": plain}))
    # The second round repeats half of the first one's move.
    again = scores_of(begin(strategy, made, 2), replies_of([made] * 3), 2)
    np.testing.assert_allclose(again, 1.5 * made, rtol=1e-4)
    assert strategy.aggregate_train(3, []) == (None, None)
    with pytest.raises(InputError, match="momentum"):
        ShareGradient(loss, momentum=1.0)


def test_noise_for_equal_weights_is_refused(tmp_path):
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

    strategy = strategy_of()
    wrapped = DifferentialPrivacyServerSideFixedClipping(strategy, 1.0, 1.0, 3)
    record = ArrayRecord({"scores": Array(np.zeros_like(TRUTH))})
    # Also after it has run by itself.
    strategy.start(NoNodes(), record, num_rounds=0)
    with pytest.raises(InputError, match="noise protects an average of equal"):
        wrapped.start(NoNodes(), record, num_rounds=1)
    # A strategy that resumes from a file refuses it, too.
    file = tmp_path / "memory.safetensors"
    begin(shipped(checkpoint_path=file)).aggregate_train(1, replies_of(models(3)))
    wrapped.strategy = shipped(checkpoint_path=file)
    with pytest.raises(InputError, match="noise protects an average of equal"):
        wrapped.start(NoNodes(), record, num_rounds=1)


def test_counters_and_variances_are_averaged_and_never_extrapolated():
    start = {"weight": np.zeros(2), "variance": np.ones(2), "steps": np.array(0)}
    sent = {"weight": np.ones(2), "variance": np.full(2, 0.5), "steps": np.array(7)}
    move = {"weight": np.ones(2), "variance": np.full(2, -1.0)}
    made = moved([sent, sent], start, move, np.array([0.5, 0.5]), 3.0, 0.5)
    assert made["weight"].tolist() == [3.5, 3.5]
    assert made["variance"].tolist() == [0.5, 0.5]
    assert made["steps"] == 7


def test_a_policy_sees_in_flower_what_it_saw_in_the_simulator():
    rng = np.random.default_rng(0)
    labels = np.arange(300, dtype=np.int32) % CLASSES
    images = 0.1 * rng.random((300, 4, 4)) + labels[:, None, None] / 10
    digits = Digits(images.astype(np.float32), labels, np.arange(300) < 100)
    settings = GradientSettings(
        width=6, rounds=3, epochs=1, batch=10, evaluation=60, test=20, client_rate=0.3
    )
    federation = Federation(digits, paper_split(digits, (4, 2), 20), settings)
    policy = opinionated()
    task = Task(jnp.array([0, 2, 3, 4, 5]), jnp.ones(5, bool))
    parameters = federation.model.start(key=jax.random.key(0))
    _, unravel = ravel_pytree(parameters)

    def record(flat):
        return ArrayRecord({name: Array(np.asarray(leaf)) for name, leaf in unravel(flat).items()})

    def predict(arrays):
        leaves = {name: jnp.asarray(array.numpy()) for name, array in arrays.items()}
        return federation.model.logits(leaves, federation.images[federation.evaluation])

    own = np.asarray(federation.labels[federation.evaluation])
    strategy = strategy_of(policy, predict, own, gate=False)
    now = jax.jit(lambda: federation.reset(task, key=jax.random.key(1)))()
    step = jax.jit(lambda now, shares, key: federation.step(task, now, shares, key=key).state)
    for n in (1, 2, 3):
        begin(strategy, record(now.aggregate), n)
        sent = [RecordDict({"arrays": record(model)}) for model in now.models]
        strategy.aggregate_train(n, [message(i, content) for i, content in enumerate(sent)])
        shares = policy(federation.observe(task, now), task.mask)
        np.testing.assert_allclose(shares_of(strategy, n), shares, atol=2e-4)
        now = step(now, shares, jax.random.key(n))
    assert np.ptp(np.asarray(shares)) > 0.02


def test_a_saved_policy_brings_its_window(tmp_path):
    save_policy(opinionated(), tmp_path, {"job": "federated", "window": 3})
    plain = strategy_of(window=3)
    loaded = LearnedAggregation.load(tmp_path, plain.server.predict, LABELS, **NOBODY)
    assert loaded.window == 3
    replies = replies_of(models(4))
    assert (scores_of(begin(plain), replies) == scores_of(begin(loaded), replies)).all()
    save_policy(Recurrent(1, 4, key=jax.random.key(0)), tmp_path / "other", {"job": "portfolio"})
    with pytest.raises(InputError, match="Recurrent, trained for the job 'portfolio'"):
        LearnedAggregation.load(tmp_path / "other", lambda arrays: None, LABELS)


@pytest.mark.parametrize(
    ("policy", "options", "words"),
    [
        (
            lambda: opinionated(channels=12),
            {},
            "it reads 12 channels, but the state of a client has 17",
        ),
        (
            lambda: Recurrent(17, 4, key=jax.random.key(0)),
            {},
            "Recurrent is not a single AggregationPolicy",
        ),
        (
            lambda: jax.tree.map(lambda x: x[None], opinionated()),
            {},
            "not a single AggregationPolicy",
        ),
        (lambda: opinionated(head=Head(cash=True)), {}, "without a share for cash"),
        (lambda: lambda observation, mask: mask, {}, "function is not a single AggregationPolicy"),
        (opinionated, {"labels": [0.5, 1.0]}, "labels"),
        (opinionated, {"labels": []}, "labels"),
        (opinionated, {"max_update_ratio": 0.5}, "max_update_ratio"),
        (opinionated, {"lables": [0]}, "no option is called 'lables'; did you mean labels?"),
        (opinionated, {"min_train_node": 3}, "did you mean min_train_nodes?"),
        (opinionated, {"predict": False, "score": lambda arrays: [1.0]}, "either predict"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(policy, options, words):
    with pytest.raises(InputError, match=words) as caught:
        strategy_of(policy(), **options)
    assert "\n" not in str(caught.value)
