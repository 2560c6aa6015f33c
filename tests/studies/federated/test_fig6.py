import json

import numpy as np
import pytest

from apportion.domains.federated.job import prepare
from apportion.domains.federated.settings import FederatedSettings
from apportion.errors import InputError
from apportion.studies.federated import federations, fig6
from apportion.studies.federated.federations_runs import sizes
from apportion.studies.federated.fig6_runs import load, save


def made_up_runs(gain):
    """What `compute` returns, with methods that are `gain` better than FedAvg in every round."""
    rng = np.random.default_rng(0)
    seeds, tasks, rounds = 2, 3, 12
    base = np.linspace(0.5, 0.85, rounds) + 0.001 * rng.normal(size=(seeds, tasks, rounds))
    shares = np.full((4, seeds, tasks, rounds, 10), 0.1)
    return {
        "totals": np.array([0.2, 0.45]),
        "fixed": np.stack([base, base + 0.1]),
        "seeds": np.array([0, 1]),
        "settings": np.array(json.dumps({"rounds": rounds})),
        "device": np.array("cpu"),
        "methods": np.array(["stl", "mtl", "pmtl", "mtl-rich"]),
        "tested": np.stack([base + gain, base + gain, base + gain, base + 0.098]),
        "shares": shares,
    }


def test_runs_written_on_one_machine_are_read_on_another(tmp_path):
    save(made_up_runs(0.05), tmp_path / "runs.npz")
    study = fig6.study_from(load(tmp_path / "runs.npz"))
    study.save(tmp_path / "study")
    names = {path.name for path in (tmp_path / "study").iterdir()}
    assert names >= {"figure.png", "table.csv", "verdict.json"}
    assert study.settings["seeds"] == [0, 1]


@pytest.mark.parametrize(("gain", "holds"), [(0.05, True), (-0.05, False)])
def test_a_method_beats_fedavg_only_where_it_does(gain, holds):
    verdicts = {v.claim: v for v in fig6.study_from(made_up_runs(gain)).verdicts}
    found = verdicts["MTL beats FedAvg in final test accuracy on unseen tasks"]
    assert found.holds is holds
    assert found.estimate == pytest.approx(gain)
    assert found.n == 6


def test_methods_that_are_equal_are_not_called_better():
    verdicts = {v.claim: v for v in fig6.study_from(made_up_runs(0.05)).verdicts}
    assert not verdicts["MTL beats STL in final test accuracy"].holds
    assert verdicts["MTL is not worse than STL by more than .01"].holds


def test_the_table_tells_the_first_round_above_nine_tenths():
    rows = fig6.study_from(made_up_runs(0.05)).table.set_index("method")
    assert rows["first round above .90"].isna()["FedAvg"]
    assert int(rows.loc["fixed share 0.45", "first round above .90"]) == 11


def test_paper_size_asks_for_all_of_mnist():
    for study in (fig6, federations):
        with pytest.raises(InputError, match="--mnist"):
            study.run(scale="paper")


def test_a_defence_that_is_better_keeps_its_verdict():
    low, high = np.full((4, 2, 5), 0.6), np.full((4, 2, 5), 0.8)
    arrays = {
        "unequal/skewed/FedAvg": low,
        "unequal/skewed/MTL": low,
        "unequal/skewed/P-MTL, gradient-norm": high,
        "transfer/5 clients/MTL, rich state": high,
        "transfer/5 clients/FedAvg": low,
        "poisoned/equal clients/MTL, rich state": low,
        "poisoned/equal clients/FedAvg": low,
        "poisoned/equal clients/median": high,
    }
    study = federations.study_from(arrays, sizes("quick"))
    held = {verdict.claim.split(",")[0]: verdict.holds for verdict in study.verdicts}
    assert held == {"unequal tasks": True, "transfer": True, "poisoned": False}
    assert study.plot() is not None


@pytest.mark.slow
def test_the_default_of_training_reaches_its_figures_on_clients_never_seen():
    results = prepare(FederatedSettings()).train(None, None).results
    assert results["gain_final"]["value"] >= 0.04
    assert results["gain_mean_over_rounds"]["value"] >= 0.07


@pytest.mark.slow
def test_the_figure_at_quick_scale_holds_what_it_must():
    study = fig6.run()
    gains = {verdict.claim: verdict.estimate for verdict in study.verdicts}
    for method in ("STL", "MTL", "P-MTL"):
        assert gains[f"{method} beats FedAvg in final test accuracy on unseen tasks"] >= 0.04
        assert gains[f"{method} beats FedAvg in mean accuracy over the rounds"] >= 0.07
    assert gains["MTL beats STL in final test accuracy"] >= -0.01
