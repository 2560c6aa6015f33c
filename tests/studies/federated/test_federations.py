import numpy as np
import pandas as pd
import pytest

from apportion.domains.federated.settings import FederatedSettings
from apportion.errors import InputError
from apportion.studies.federated import federations
from domains.federated.made_up import made_up_digits

DIGITS = made_up_digits()
SMALL = FederatedSettings(
    pooling=1, clients=(20, 8), seen=(10, 5), samples=20, model="perceptron", width=8, rounds=3,
    epochs=1, batch=10, client_rate=0.3, evaluation=60, test=100, block=60, tasks=3, unseen=2,
    steps=2, rollouts=2, hidden=4, chunk=2,
)  # fmt: skip
PLAN = federations.plan(scale="paper", digits=DIGITS)


def computed(cells):
    found = federations.compute(
        cells, lambda what, done: None, settings=SMALL, widths=(5, 50), digits=DIGITS
    )
    return {cell.name: rows for cell, rows in found}


@pytest.mark.parametrize(
    "program",
    [
        "unequal-accuracy-state-the-papers",
        "poisoned-skewed-clients-krum",
    ],
)
def test_a_cell_computed_alone_is_the_same_as_with_others(program):
    """Seeds and methods differ, and all accuracies were equal; in a longer training sums over another
    number of runs, rounded in another order, may change an answer.
    """
    cells = [cell for cell in PLAN.cells if cell.program == program]
    several = [cells[0], cells[-1]]
    assert several[0]["seed"] != several[1]["seed"]
    together, alone = computed(several), computed(several[1:])
    name = several[1].name
    pd.testing.assert_frame_equal(alone[name], together[name], check_exact=False, rtol=0, atol=1e-6)
    assert (together[several[0].name]["tested"] != alone[name]["tested"]).any()


def test_policies_and_baselines_of_a_seed_meet_the_same_tasks_and_batches():
    """A policy trained for two steps still gives nearly equal shares: it must do as FedAvg does."""
    fedavg, learned = (
        next(cell for cell in PLAN.cells if cell.program == program and cell["seed"] == 3)
        for program in ("transfer-fedavg", "transfer-mtl-accuracy-state")
    )
    base = computed([fedavg])[fedavg.name]
    policy = computed([learned])[learned.name]
    where = ["setting", "seed", "task", "round"]
    assert base[where].equals(policy[where])
    assert base["setting"].nunique() == 5
    assert base["tested"].to_numpy() == pytest.approx(policy["tested"].to_numpy(), abs=0.05)
    # Tasks differ by more than that, so it would show if they were exchanged.
    finals = base[base["round"] == SMALL.rounds].groupby(["setting", "task"])["tested"].first()
    assert np.ptp(finals) > 0.1


def made_up_rows(accuracies):
    """Four seeds of two tasks and five rounds, the same accuracy in all."""
    frames = []
    for name, accuracy in accuracies.items():
        experiment, setting, method = name.split("/")
        index = pd.MultiIndex.from_product(
            [range(4), range(2), range(1, 6)], names=["seed", "task", "round"]
        )
        about = {"experiment": experiment, "setting": setting, "method": method}
        rows = pd.DataFrame({"tested": accuracy}, index).reset_index()
        frames.append(rows.assign(**about))
    return pd.concat(frames, ignore_index=True)


def test_a_defence_that_is_better_keeps_its_verdict():
    accuracies = {
        "unequal/skewed/FedAvg": 0.6,
        "unequal/skewed/MTL": 0.6,
        "unequal/skewed/P-MTL, gradient-norm": 0.8,
        "transfer/5 clients/MTL, rich state": 0.8,
        "transfer/5 clients/FedAvg": 0.6,
        "poisoned/equal clients/MTL, rich state": 0.6,
        "poisoned/equal clients/FedAvg": 0.6,
        "poisoned/equal clients/median": 0.8,
    }
    study = federations.conclude(made_up_rows(accuracies), {})
    held = {verdict.claim.split(",")[0]: verdict.holds for verdict in study.verdicts}
    assert held == {"unequal tasks": True, "transfer": True, "poisoned": False}
    assert {verdict.n for verdict in study.verdicts} == {4}
    assert study.table["experiments"].tolist() == [4] * len(accuracies)
    assert np.allclose(study.table["final"], list(accuracies.values()))
    assert study.plot() is not None


def test_paper_size_asks_for_all_of_mnist():
    with pytest.raises(InputError, match="--mnist"):
        federations.plan(scale="paper")


def test_every_seed_meets_every_method_in_every_experiment():
    names = [cell.name for cell in PLAN.cells]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").isalnum() for name in names)
    seeds = {}
    for cell in PLAN.cells:
        key = (cell["experiment"], cell["setting"], cell["label"])
        seeds.setdefault(key, set()).add(cell["seed"])
    assert len(seeds) == 2 * 6 + 3 + 2 * 6
    assert all(own == set(range(6)) for own in seeds.values())
