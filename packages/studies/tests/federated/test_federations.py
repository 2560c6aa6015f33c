import numpy as np
import pandas as pd
import pytest

from apportion.certify.statistics import mean_over
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
    """Return the plan at paper size, with as many images as MNIST."""
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
    """Shrink a scenario of the study to the server samples and clients of the made-up digits."""
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
    """Make rows of four seeds with the same accuracy."""
    rows = [
        {"circumstance": "here", "kind": kind, "method": method, "seed": seed, "tested": accuracy}
        for (kind, method), accuracy in accuracies.items()
        for seed in range(4)
    ]
    return pd.DataFrame(rows)


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
    ("equal", "flipped", "harmless", "ahead", "defended"),
    [
        (0.7, 0.7, True, True, True),
        (0.599, 0.8, False, True, True),
        (0.59, 0.69, False, False, False),
    ],
)
def test_a_verdict_holds_only_where_it_does(equal, flipped, harmless, ahead, defended):
    study = study_of(equal=equal, flipped_3=flipped)
    verdicts = {verdict.claim.partition(" (")[0]: verdict for verdict in study.verdicts}
    for claim, holds in (
        ("on no kind below FedAvg by more than .003", harmless),
        ("ahead of FedAvgM, mean of kinds", ahead),
        ("ahead of gradient shares, momentum, mean of kinds", ahead),
        ("among attackers within .005 of the best defence", defended),
    ):
        assert verdicts[f"here: {claim}"].holds is holds
        assert verdicts[f"here: {claim}"].n == 4
    found = verdicts["here: ahead of FedAvgM, mean of kinds"]
    assert found.levels == pytest.approx({"learned": (equal + flipped) / 2, "FedAvgM": 0.65})
    mean = study.table[(study.table["kind"] == "mean of kinds")].set_index("method")["final"]
    assert mean["learned"] == pytest.approx((equal + flipped) / 2)
    assert study.plot() is not None


def test_federations_in_general_have_kinds_for_a_sample():
    study = study_of(equal=0.7, flipped_3=0.8, sizes=0.61, paper=0.95)
    verdicts = {verdict.claim: verdict for verdict in study.verdicts}
    # The seeds agree, and the kinds do not.
    of_these = verdicts["here: ahead of FedAvg, mean of kinds"]
    general = verdicts["here: ahead of FedAvg in federations in general"]
    assert general.estimate == pytest.approx(of_these.estimate) == pytest.approx(0.165)
    expected = mean_over(np.array([0.1, 0.2, 0.01, 0.35]))
    assert np.ptp(of_these.interval) < 0.001
    assert general.interval == pytest.approx((expected.low, expected.high), rel=0.05)
    # The claim in general is made for the strongest rival and FedAvg only.
    strongest = verdicts["here: ahead of the strongest rival in federations in general"]
    assert list(strongest.levels) == ["learned", "gradient shares, momentum"]
    rows = study.table[study.table.method == "learned"].set_index("kind").gain
    assert rows["mean without the paper's split"] == pytest.approx((0.1 + 0.2 + 0.01) / 3)


def test_the_notes_list_the_rivals_that_beat_it():
    notes = "\n".join(study_of(equal=0.58, flipped_3=0.75).notes)
    assert "Beaten by a rival in the mean of kinds, in points: here, by gradient shares" in notes
    assert "Beaten by FedAvg on a kind, in points: here, by FedAvg on equal: -2.0" in notes
    notes = "\n".join(study_of(equal=0.7, flipped_3=0.75).notes)
    assert "Beaten by a rival in the mean of kinds, in points: nowhere." in notes


def test_every_scenario_has_every_rival_and_another_seed_other_federations(plan):
    methods: dict = {}
    for cell in plan.cells:
        methods.setdefault(cell["circumstance"], set()).add(cell["method"])
    assert len(methods) == 8
    for own in methods.values():
        assert {*federations._RIVALS, "learned"} <= own
    assert {cell["kind"] for cell in plan.cells} == set(federations.KINDS)
    seeds = [{cell["seed"] for cell in federations.federations(seed=n).cells} for n in (0, 1)]
    assert not seeds[0] & seeds[1]


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
