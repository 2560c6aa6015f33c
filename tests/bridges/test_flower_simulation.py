"""A real Flower simulation: ten client processes' worth of training, and clients that fail."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
pytest.importorskip("flwr")
pytest.importorskip("ray")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "flower_app"))

import faulty_clients
import network
import server_app
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from apportion.problem import Observation
from apportion.saved_policy import load_policy

ROUNDS, TIMEOUT = 20, 2.5


class Federation:
    """One simulation, in which three federations are run one after the other."""

    def __init__(self, folder, plan):
        self.tested, self.models = {}, {}
        data = server_app.share_out(folder)
        images, labels = data["test"]
        self.strategies = {name: make(data) for name, (make, _, _) in plan.items()}
        server = ServerApp()

        def start(grid, name, timeout, faults):
            def evaluate(server_round, arrays):
                model = arrays.to_numpy_ndarrays()
                answers = network.logits(model, images).argmax(1)
                self.models.setdefault(name, []).append(model)
                self.tested.setdefault(name, []).append(float((answers == labels).mean()))
                return MetricRecord({"accuracy": self.tested[name][-1]})

            settings = {"data": str(folder), "faults": faults, "sleep": 1.2 * TIMEOUT}
            self.strategies[name].start(
                grid,
                ArrayRecord(network.start(images.shape[1])),
                num_rounds=ROUNDS,
                timeout=timeout,
                train_config=ConfigRecord(settings),
                evaluate_fn=evaluate,
            )

        @server.main()
        def main(grid, context):
            for name, (_, timeout, faults) in plan.items():
                start(grid, name, timeout, faults)

        run_simulation(
            server,
            faulty_clients.app,
            num_supernodes=server_app.CLIENTS,
            backend_config={
                "init_args": {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False},
                # A killed process comes back after a while, as a supervised client would.
                "client_resources": {"num_cpus": 0.5, "num_gpus": 0.0, "max_restarts": -1},
            },
        )


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return Federation(
        tmp_path_factory.mktemp("federation"),
        {
            "fedavg": (lambda data: FedAvg(fraction_evaluate=0.0), 120.0, False),
            "learned": (server_app.learned, 120.0, False),
            "faults": (server_app.learned, TIMEOUT, True),
        },
    )


@pytest.mark.flower
def test_learned_shares_beat_fedavg_at_the_same_round(federation):
    learned, fedavg = (np.array(federation.tested[name]) for name in ("learned", "fedavg"))
    assert len(learned) == len(fedavg) == ROUNDS + 1
    assert (learned[5:] > fedavg[5:]).all()
    assert learned[ROUNDS] > fedavg[ROUNDS] + 0.08
    assert learned[1:].mean() > fedavg[1:].mean() + 0.08


@pytest.mark.flower
def test_no_round_is_lost_to_clients_that_raise_sleep_send_nan_or_die(federation):
    models = federation.models["faults"]
    assert len(models) == ROUNDS + 1
    assert all(np.isfinite(array).all() for model in models for array in model)
    seen = federation.strategies["faults"].to_frame()
    kept = seen[seen["outcome"] == "kept"].groupby("round").size()
    assert kept.index.tolist() == list(range(1, ROUNDS + 1))
    for before, after in itertools.pairwise(models):
        assert any((a != b).any() for a, b in zip(before, after, strict=True))
    # The one that raises and the one whose process dies; the one that sends NaN.
    assert seen.loc[seen["outcome"] == "failed", "node"].nunique() >= 2
    assert (seen["outcome"] == "not finite").any()
    assert federation.tested["faults"][-1] > federation.tested["faults"][0] + 0.2


@pytest.mark.flower
def test_a_slow_client_is_absent_and_the_clients_that_fail_have_no_share(federation):
    seen = federation.strategies["faults"].to_frame()
    in_time = seen[seen["outcome"] == "kept"].groupby("node").size()
    assert len(in_time) <= server_app.CLIENTS - 3
    assert (seen.loc[seen["outcome"] != "kept", "share"] == 0).all()


@pytest.mark.slow
def test_the_example_s_policy_is_what_its_command_makes(tmp_path):
    command = [*server_app.POLICY_COMMAND.split()[1:], "--out", str(tmp_path / "run"), "--quiet"]
    # The suite's own flags compile fast and compute slowly; here it is the other way round.
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, "-m", "apportion", *command], check=True, env=plain)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["gain_final"]["value"] > 0.08
    made, kept = (load_policy(folder) for folder in (tmp_path / "run", server_app.POLICY))
    history = jnp.zeros((10, 5, 1)).at[8:].set(-0.8)
    observation = Observation(history, jnp.full(10, 0.1))
    shares = [policy(observation, jnp.ones(10, bool)) for policy in (made, kept)]
    np.testing.assert_allclose(*shares, atol=0.05)
