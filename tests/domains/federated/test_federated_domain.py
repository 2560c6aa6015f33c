"""What the command line asks of the domain: settings of each learner, gains, sections of a run's page."""

from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest
from made_up import made_up_digits

from apportion.composition import EqualShares
from apportion.domains.federated import data, evaluation
from apportion.domains.federated.aggregators import UNIFORM, BySamples, EpisodeRecord
from apportion.domains.federated.domain import DOMAIN, CertifyOptions
from apportion.domains.federated.evaluation import federation_gains
from apportion.domains.federated.policy import AggregationPolicy
from apportion.domains.federated.settings import GradientSettings, PPOSettings, reduced_size
from apportion.domains.federated.states import Invariant
from apportion.errors import InputError
from apportion.runs.files import write_arrays
from apportion.runs.folder import Run
from apportion.runs.runner import JobResult, finish
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
    with pytest.raises(InputError, match="there is no setting|one of"):
        from_mapping(content, other, str(path))


@pytest.mark.parametrize(
    ("kind", "wrong", "words"),
    [
        (
            GradientSettings,
            {"scorer": "reward-variance"},
            "which the learner gradient does not read",
        ),
        (GradientSettings, {"learner": "ppo"}, "choose one of gradient"),
        (GradientSettings, {"together": 0}, "together is 0"),
        (GradientSettings, {"state": "accuracy"}, "choose one of invariant"),
        (PPOSettings, {"window": 0}, "window is 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(kind, wrong, words):
    with pytest.raises(InputError, match=words):
        kind(**wrong)


def test_a_kind_that_is_none_is_refused_before_training():
    with pytest.raises(InputError, match="did you mean equal"):
        DOMAIN.prepare(replace(SETTINGS, kinds="equall"))


def gains(against, federations, settings=SETTINGS):
    """Of equal shares."""
    sizes = {"federations": federations, "max_gain": 0.25}
    return federation_gains(EqualShares(), ABOUT, settings, made_up_digits(), against, **sizes)


def test_the_same_aggregator_gains_nothing(monkeypatch):
    # The same program on the same worlds and batches: nothing is left to rounding.
    monkeypatch.setitem(evaluation.BASELINES, "fedavg", UNIFORM)
    assert gains("fedavg", 2).values.tolist() == [0.0, 0.0]


@pytest.fixture
def untried(monkeypatch):
    """What would have been tried, in place of trying it."""
    asked = []

    def record(world, aggregator, tasks, keys):
        asked.append((world, aggregator, tasks, keys))
        return EpisodeRecord(*np.full((3, len(tasks), 1), 0.1 * len(asked)))

    monkeypatch.setattr(evaluation, "run_episodes", record)
    return asked


PAPERS = replace(
    reduced_size(), pooling=1, samples=10, clients=(8, 4), seen=(5, 2), task_sizes=(2, 1),
    model="perceptron", width=4, rounds=2, epochs=1, batch=5, evaluation=40, test=60,
)  # fmt: skip


@pytest.mark.parametrize("settings", [SETTINGS, PAPERS], ids=["gradient", "ppo"])
def test_more_federations_go_on_from_the_first(settings, untried):
    assert [len(gains("median", n, settings).values) for n in (2, 4)] == [2, 4]
    few, _, more, _ = (
        (world.index[tasks.members], tasks.mask, jax.random.key_data(keys))
        for world, _, tasks, keys in untried
    )
    for here, there in zip(few, more, strict=True):
        np.testing.assert_array_equal(here, there[:2])
        assert len(np.unique(there, axis=0)) == (1 if here.dtype == bool else 4)


def test_a_policy_is_certified_behind_its_gate(untried, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "read_digits", lambda settings: made_up_digits())
    policy = AggregationPolicy(Invariant.channels, 2, key=jax.random.key(0))
    run = Run.create(tmp_path / "run", "federated", SETTINGS, {})
    finish(run, JobResult(policy, {}, "", ABOUT, {}))
    # Flower's way to write the baseline is as good.
    found = DOMAIN.gains(run, "FedAvg", CertifyOptions(federations=1, bound=0.05))
    assert untried[0][1].gated
    assert isinstance(untried[1][1], BySamples)
    assert (found.baseline, found.period) == ("fedavg", "federation")
    assert (found.values.tolist(), found.clipped) == ([-0.05], 1)


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
