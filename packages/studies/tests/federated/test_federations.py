import numpy as np
import pandas as pd
import pytest

from apportion.domains.federated import policy
from apportion.domains.federated.data import Digits
from apportion.domains.federated.settings import GradientSettings
from apportion.errors import InputError
from apportion_studies.federated import federations
from domains.federated.made_up import made_up_digits

DIGITS = made_up_digits()
SMALL = GradientSettings(
    pooling=1, samples=20, width=8, rounds=3, epochs=1, batch=10, client_rate=0.3, evaluation=60,
    test=100, block=60,
)  # fmt: skip


def paper_plan():
    """At full size, with as many images as MNIST has."""
    number = np.arange(70_000)
    blank = Digits(np.zeros((70_000, 1, 1), np.float32), number % 10, number >= 60_000)
    return federations.federations(scale="paper", digits=blank)


@pytest.fixture(scope="module")
def plan():
    return paper_plan()


def computed(cells):
    found = federations._compute_federations(
        cells, lambda what, done: None, settings=SMALL, digits=DIGITS
    )
    return {cell.name: rows for cell, rows in found}


@pytest.fixture
def small(monkeypatch):
    """A scenario of the study with server's samples that the made-up digits have."""
    own = federations._Scenario(samples=40, clients=5)
    monkeypatch.setitem(federations._SCENARIOS, "perceptron, 200 samples", own)


def cells_of(plan, method, kinds=("sizes", "scaled")):
    return [
        cell
        for cell in plan.cells
        if cell["circumstance"] == "perceptron, 200 samples"
        and cell["method"] == method
        and cell["kind"] in kinds
        and cell["seed"] < 2
    ]


@pytest.mark.slow
def test_a_cell_computed_alone_is_the_same_as_with_others(plan, small):
    several = cells_of(plan, "FedAvgM")
    assert len(several) == 4
    together, alone = computed(several), computed(several[2:3])
    name = several[2].name
    pd.testing.assert_frame_equal(alone[name], together[name], check_exact=False, rtol=0, atol=1e-6)


def made_up_rows(accuracies):
    """Four seeds and five rounds, the same accuracy in all."""
    frames = []
    for (kind, method), accuracy in accuracies.items():
        index = pd.MultiIndex.from_product([range(4), range(1, 6)], names=["seed", "round"])
        rows = pd.DataFrame({"tested": accuracy}, index).reset_index()
        frames.append(rows.assign(circumstance="here", kind=kind, method=method))
    return pd.concat(frames, ignore_index=True)


RIVALS = {"FedAvg": 0.6, "FedAvgM": 0.65, "gradient shares, momentum": 0.68, "median": 0.7}


def study_of(**learned):
    values = {
        (kind.replace("_", "-"), name): value
        for kind, own in learned.items()
        for name, value in (RIVALS | {"learned": own}).items()
    }
    [figure] = federations._conclude(made_up_rows(values), {})
    return figure


@pytest.mark.parametrize(
    ("equal", "flipped", "held"),
    [
        (0.7, 0.7, [True, True, True, True]),
        (0.599, 0.8, [False, True, True, True]),
        (0.59, 0.69, [False, False, False, False]),
    ],
)
def test_a_verdict_holds_only_where_it_does(equal, flipped, held):
    study = study_of(equal=equal, flipped_3=flipped)
    assert [verdict.holds for verdict in study.verdicts] == held
    assert {verdict.n for verdict in study.verdicts} == {4}
    mean = study.table[(study.table["kind"] == "mean of kinds")].set_index("method")["final"]
    assert mean["learned"] == pytest.approx((equal + flipped) / 2)
    assert study.plot() is not None


def test_seeds_that_disagree_leave_open_whether_a_kind_is_harmed():
    values = {("equal", name): value for name, value in (RIVALS | {"learned": 0.6}).items()}
    rows = made_up_rows(values)
    for swing, outcome in ((0.02, "not-established"), (0.001, "holds")):
        swings = (rows["method"] == "learned") * swing * (-1.0) ** rows["seed"]
        [figure] = federations._conclude(rows.assign(tested=rows["tested"] + swings), {})
        assert figure.verdicts[0].estimate == pytest.approx(0, abs=1e-9)
        assert figure.verdicts[0].outcome == outcome


def test_paper_size_asks_for_all_of_mnist_and_another_policy_is_another_study(
    plan, tmp_path, monkeypatch
):
    with pytest.raises(InputError, match="--images"):
        federations.federations(scale="paper")
    with pytest.raises(InputError, match="needs 2000 images for clients, .* 342 and 300; give a"):
        federations.federations(scale="paper", digits=DIGITS)
    monkeypatch.setattr(policy, "FOLDER", tmp_path)
    (tmp_path / "policy.safetensors").write_bytes(b"another")
    assert paper_plan().digest != plan.digest
