"""The defences against byzfl 0.0.11, a library of them.

Set APPORTION_BYZFL_PYTHON to the python of an environment with byzfl, or have one in .peers.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from apportion.domains.federated.aggregators import Median, TrimmedMean
from apportion_studies.federated.peers import Krum, NearestMixing
from domains.federated.test_aggregators import received

pytestmark = pytest.mark.peer
OWN = Path(__file__).parents[3] / ".peers" / "byzfl" / "bin" / "python"
PYTHON = os.environ.get("APPORTION_BYZFL_PYTHON", str(OWN))
PROGRAM = Path(__file__).with_name("byzfl_aggregates.py")
CASES = {"ten": (10, 3, 200), "eleven": (11, 2, 3000), "seven": (7, 1, 5)}
"""Clients, those of them that attack, and parameters."""


def updates(clients: int, byzantine: int, parameters: int) -> np.ndarray:
    """Honest clients agree on a direction; the others send it backwards, each longer than the last."""
    rng = np.random.default_rng(clients)
    direction = rng.normal(size=parameters)
    honest = direction + rng.normal(size=(clients - byzantine, parameters))
    attack = -direction * np.arange(1, byzantine + 1)[:, None]
    return np.concatenate([attack, honest]).astype(np.float32)


def aggregators(clients: int, byzantine: int):
    # A little more than the part, lest rounding make it a client less.
    part = (byzantine + 0.1) / clients
    return {
        "median": Median(),
        "trimmed mean": TrimmedMean(part),
        "Krum": Krum(byzantine),
        "nearest-neighbour mixing": NearestMixing(part),
    }


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    if not Path(PYTHON).is_file():
        pytest.skip("APPORTION_BYZFL_PYTHON names no python with byzfl 0.0.11")
    folder = tmp_path_factory.mktemp("byzfl")
    given = {f"updates/{case}": updates(*sizes) for case, sizes in CASES.items()}
    given |= {f"byzantine/{case}": np.array(sizes[1]) for case, sizes in CASES.items()}
    np.savez(folder / "updates.npz", **given)
    command = [PYTHON, str(PROGRAM), str(folder / "updates.npz"), str(folder / "found.npz")]
    subprocess.run(command, check=True)
    return dict(np.load(folder / "found.npz"))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["median", "trimmed mean", "Krum", "nearest-neighbour mixing"])
def test_a_defence_makes_the_same_model_as_byzfls(theirs, name, case):
    clients, byzantine, parameters = CASES[case]
    given = updates(clients, byzantine, parameters)
    model, _ = aggregators(clients, byzantine)[name](received(given))
    np.testing.assert_allclose(np.asarray(model), theirs[f"{name}/{case}"], atol=1e-5)
