"""Settings of each learner, and sections of a run's page."""

from dataclasses import replace

import pandas as pd
import pytest

from apportion.domains.federated.domain import DOMAIN
from apportion.domains.federated.settings import GradientSettings, PPOSettings, reduced_size
from apportion.errors import InputError
from apportion.runs.settings import from_mapping, read_toml, to_toml

SETTINGS = GradientSettings(
    pooling=1, samples=10, width=4, rounds=2, epochs=1, batch=5, evaluation=40, test=60
)


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


def test_the_page_of_a_run_shows_the_accuracy_of_every_round(tmp_path):
    pytest.importorskip("apportion.report.plots")
    assert DOMAIN.sections(tmp_path) == []
    rounds = pd.DataFrame({"round": [1, 2], "learned": [0.5, 0.8], "fedavg": [0.4, 0.6]})
    rounds.to_csv(tmp_path / "accuracy.csv", index=False)
    (section,) = DOMAIN.sections(tmp_path)
    assert section.title == "Accuracy"
    assert "learned 80.0%, fedavg 60.0%" in section.parts[0].html("x")
