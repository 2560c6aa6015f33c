"""What the command line asks of the domain: settings of each learner, gains, sections of a run's page."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest
from made_up import made_up_digits

from apportion.composition import EqualShares
from apportion.domains.federated import data, evaluation
from apportion.domains.federated.aggregators import BySamples, EpisodeRecord
from apportion.domains.federated.domain import DOMAIN, CertifyOptions
from apportion.domains.federated.evaluation import federation_gains
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import GradientSettings, PPOSettings, reduced_size
from apportion.domains.federated.states import client_state
from apportion.errors import InputError
from apportion.runs.files import write_arrays
from apportion.runs.folder import Run
from apportion.runs.runner import Outcome, finish
from apportion.runs.settings import from_mapping, read_toml, to_toml

SETTINGS = GradientSettings(
    pooling=1, samples=10, width=4, rounds=2, epochs=1, batch=5, evaluation=40, test=60
)
ABOUT = {"job": "federated", "kinds": ["equal", "paper"]}


@pytest.mark.parametrize("settings", [SETTINGS, reduced_size()], ids=["gradient", "ppo"])
def test_saved_settings_name_their_learner_and_refuse_those_of_the_other(settings, tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text(to_toml(settings, "federated"))
    content = {name: value for name, value in read_toml(path).items() if name != "job"}
    kind = DOMAIN.variants[content["learner"]]
    assert from_mapping(content, kind, str(path)) == settings
    (other,) = set(DOMAIN.variants.values()) - {kind}
    with pytest.raises(InputError, match="no setting is called|one of"):
        from_mapping(content, other, str(path))


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (GradientSettings, {"members": 2}, "members is 2, which the learner gradient does not"),
        (GradientSettings, {"tasks": 4}, "tasks is 4, which the learner gradient does not read"),
        (GradientSettings, {"scorer": "reward-variance"}, "does not read"),
        (GradientSettings, {"learner": "ppo"}, "choose one of gradient"),
        (GradientSettings, {"together": 0}, "together is 0"),
        (PPOSettings, {"samples": 0}, "samples is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(kind, wrong, words):
    with pytest.raises(InputError, match=words):
        kind(**wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kinds": "equall"}, "did you mean equal"),
        ({"state": "accuracy"}, "does not hold FedAvg's shares"),
        ({"state": "mood"}, "not known"),
        ({"mnist": "nowhere.npz"}, "no such file"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_training(wrong, words):
    with pytest.raises(InputError, match=words):
        DOMAIN.prepare(replace(SETTINGS, **wrong))


def gains(policy, against, federations, settings=SETTINGS):
    digits = made_up_digits()
    return federation_gains(policy, ABOUT, settings, digits, against, federations=federations)


def test_the_same_aggregator_gains_nothing_and_more_federations_go_on_from_the_first():
    few, more = (gains(EqualShares(), "median", n).values for n in (2, 4))
    assert np.abs(more).max() > 0
    assert few == pytest.approx(more[:2], abs=0.02)
    assert gains(EqualShares(), "fedavg", 2).values == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize(("state", "gated"), [("invariant", True), ("blind", False)])
def test_a_policy_without_samples_has_no_gate_to_hide_behind(state, gated, monkeypatch, tmp_path):
    asked = []

    def untried(world, aggregator, tasks, keys):
        asked.append(aggregator)
        return EpisodeRecord(*np.full((3, len(tasks), 1), 0.1 * len(asked)))

    monkeypatch.setattr(evaluation, "run_each", untried)
    monkeypatch.setattr(data, "read_digits", lambda settings: made_up_digits())
    policy = AggregationPolicy(client_state(state).channels(1), 2, key=jax.random.key(0))
    run = Run.create(tmp_path / "run", "federated", replace(SETTINGS, state=state), {})
    finish(run, Outcome(policy, {}, "", ABOUT, {}))
    # Flower's way to write the baseline is as good.
    found = DOMAIN.gains(run, "FedAvg", CertifyOptions(federations=1, bound=0.05))
    assert asked[0].gated is gated
    assert isinstance(asked[1], BySamples)
    assert (found.baseline, found.period) == ("fedavg", "federation")
    assert (found.values.tolist(), found.clipped) == ([-0.05], 1)


def test_the_papers_policy_is_tried_on_its_own_unseen_tasks():
    settings = replace(
        reduced_size(), pooling=1, samples=10, clients=(8, 4), seen=(5, 2), task_sizes=(2, 1),
        model="perceptron", width=4, rounds=2, epochs=1, batch=5, evaluation=40, test=60,
    )  # fmt: skip
    assert gains(EqualShares(), "fedavg", 3, settings).values.shape == (3,)


def test_what_cannot_be_compared_is_refused():
    digits = made_up_digits()
    for about, against, count, words in (
        ({"job": "budget"}, "fedavg", 2, "not to aggregate"),
        (ABOUT, "fedsgd", 2, "there is no aggregator 'fedsgd'"),
        (ABOUT, "fedavg", 0, "federations is 0"),
    ):
        with pytest.raises(InputError, match=words):
            federation_gains(EqualShares(), about, SETTINGS, digits, against, federations=count)


def test_the_gains_that_a_server_keeps_are_those_of_its_rounds(tmp_path):
    write_arrays(tmp_path / "kept", {}, {"gains": [0.1, None, 0.4]})
    found = DOMAIN.gains(tmp_path / "kept", "fedavg", CertifyOptions())
    np.testing.assert_array_equal(found.values, [0.1, np.nan, 0.25])
    assert (found.baseline, found.period) == ("FedAvg", "round")
    assert DOMAIN.gains(tmp_path / "kept", "FedAvg", CertifyOptions(bound=0.5)).values[2] == 0.4


@pytest.mark.parametrize(
    ("name", "against", "options", "words"),
    [
        ("kept", "median", {}, "compares with FedAvg alone, not with 'median'"),
        ("kept", "fedavg", {"federations": 3}, "reads no --federations"),
        ("kept", "fedavg", {"data": "x.npz"}, "reads no --data"),
        ("other", "fedavg", {}, "holds no gains of a federation"),
        ("text", "fedavg", {}, "text"),
    ],
)
def test_a_file_that_cannot_be_certified_is_refused_in_a_sentence(
    name, against, options, words, tmp_path
):
    write_arrays(tmp_path / "kept", {}, {"gains": [0.1, None]})
    write_arrays(tmp_path / "other", {}, {"gains": ["much"]})
    (tmp_path / "text").write_text("no arrays")
    with pytest.raises(InputError, match=words) as refused:
        DOMAIN.gains(tmp_path / name, against, CertifyOptions(**options))
    assert "\n" not in str(refused.value)


def test_the_page_of_a_run_shows_the_accuracy_of_every_round(tmp_path):
    pytest.importorskip("apportion.report.plots")
    assert DOMAIN.sections(tmp_path) == []
    rounds = pd.DataFrame({"round": [1, 2], "learned": [0.5, 0.8], "fedavg": [0.4, 0.6]})
    rounds.to_csv(tmp_path / "accuracy.csv", index=False)
    (section,) = DOMAIN.sections(tmp_path)
    assert section.title == "Accuracy"
    assert "learned 80.0%, fedavg 60.0%" in section.parts[0].html("x")
