"""A real Flower simulation: ten client processes' worth of training, and clients that fail."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
pytest.importorskip("ray")

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "flower_app"))

import server_app
from faulty_clients import (
    DEADLY,
    DIES,
    HOPELESS,
    RAISES,
    SENDS_NAN,
    SLEEPS,
    SLEEPY,
    app,
)
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

ROUNDS, FAULTY_ROUNDS, TIMEOUT = 5, 9, 4.0


class Acquainted(FedAvg):
    """FedAvg that takes note of which node is which client, for the tests to speak of clients."""

    def __init__(self, nodes):
        super().__init__(fraction_evaluate=0.0)
        self.nodes = nodes

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        for reply in replies:
            self.nodes[reply.metadata.src_node_id] = int(reply.content.pop("who")["client"])
        return super().aggregate_train(server_round, replies)


class Federation:
    """One simulation, in which three federations are run one after the other."""

    def __init__(self, folder):
        # It takes long to import, and `make test` simulates nothing here.
        from flwr.simulation import run_simulation

        self.tested, self.models, self.nodes = {}, [], {}
        data = server_app.share_out(folder)
        self.strategies = {
            "fedavg": Acquainted(self.nodes),
            "learned": server_app.learned(data),
            "faults": server_app.learned(data),
        }
        server = ServerApp()

        @server.main()
        def main(grid, context):
            for name, strategy in self.strategies.items():
                faults = name == "faults"
                self.tested[name] = server_app.federate(
                    grid,
                    strategy,
                    folder,
                    data,
                    FAULTY_ROUNDS if faults else ROUNDS,
                    TIMEOUT if faults else 120.0,
                    self.models.append if faults else None,
                    faults=faults,
                    sleep=1.5 * TIMEOUT,
                )

        run_simulation(
            server,
            app,
            num_supernodes=server_app.CLIENTS,
            backend_config={
                "init_args": {"num_cpus": 2, "log_to_driver": False},
                # A killed process comes back after a while, as a supervised client would.
                "client_resources": {"num_cpus": 0.5, "num_gpus": 0.0, "max_restarts": -1},
            },
        )

    def outcomes(self, client):
        """What became of a client's replies among the faults, by round; silent if none came."""
        seen = self.strategies["faults"].to_frame()
        own = seen[seen["node"].map(self.nodes) == client]
        return own.set_index("round")["outcome"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    return Federation(tmp_path_factory.mktemp("federation"))


@pytest.mark.slow
@pytest.mark.flower
def test_learned_shares_beat_fedavg_at_the_same_round(federation):
    learned, fedavg = (np.array(federation.tested[name]) for name in ("learned", "fedavg"))
    assert len(learned) == len(fedavg) == ROUNDS + 1
    assert learned[ROUNDS] > fedavg[ROUNDS] + 0.08
    assert learned[1:].mean() > fedavg[1:].mean() + 0.08


@pytest.mark.slow
@pytest.mark.flower
def test_every_client_fails_as_it_should(federation):
    """Or else the next test would show nothing.

    A killed process takes other clients' replies with it for some rounds, whose they are being
    chance: each fault is asked for where nothing can hide it.
    """
    assert sorted(federation.nodes.values()) == list(range(server_app.CLIENTS))
    others = sorted({*range(1, FAULTY_ROUNDS + 1)} - {HOPELESS})
    assert set(federation.outcomes(RAISES)) <= {"failed", "silent"}
    assert (federation.outcomes(RAISES) == "failed").sum() >= FAULTY_ROUNDS - 2 * len(DEADLY)
    slept, died = federation.outcomes(SLEEPS), federation.outcomes(DIES)
    assert slept[SLEEPY[0]] == "silent"
    assert (died.reindex(DEADLY) == "failed").all()
    assert "kept" not in set(slept.reindex(SLEEPY))
    sent = federation.outcomes(SENDS_NAN)
    assert set(sent) <= {"not finite", "failed", "silent"}
    assert (sent == "not finite").sum() > FAULTY_ROUNDS / 2
    # The sleeper and the one that died are back later.
    for client, last in ((SLEEPS, SLEEPY[-1]), (DIES, DEADLY[-1])):
        seen = federation.outcomes(client).reindex(others)
        assert (seen[seen.index > last] == "kept").any()


@pytest.mark.slow
@pytest.mark.flower
def test_no_round_is_lost_to_clients_that_raise_sleep_send_nan_or_die(federation):
    models = federation.models
    assert len(models) == FAULTY_ROUNDS + 1
    assert all(np.isfinite(array).all() for model in models for array in model)
    seen = federation.strategies["faults"].to_frame()
    for n, (before, after) in enumerate(itertools.pairwise(models), start=1):
        same = all((a == b).all() for a, b in zip(before, after, strict=True))
        assert same == (n == HOPELESS)
    kept = seen[seen["outcome"] == "kept"].groupby("round").size()
    assert kept.index.tolist() == [n for n in range(1, FAULTY_ROUNDS + 1) if n != HOPELESS]
    assert (seen.loc[seen["outcome"] != "kept", "share"] == 0).all()
    assert federation.tested["faults"][-1] > federation.tested["faults"][0] + 0.2


def free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]


@pytest.fixture
def superlink(tmp_path):
    """The server that `flwr run` would start by itself and leave behind; returns the environment."""
    runtime, control = free_ports(2)
    environment = os.environ | {
        "FLWR_HOME": str(tmp_path),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": runtime,
        "FLWR_LOCAL_CONTROL_API_PORT": control,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = "flower-superlink --insecure --simulation --isolation subprocess --host 127.0.0.1"
    addresses = ["--port", runtime, "--control-api-address", f"127.0.0.1:{control}"]
    with subprocess.Popen([*command.split(), *addresses], env=environment) as server:
        try:
            health = f"http://127.0.0.1:{runtime}/health"
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=2):
                    break
                time.sleep(0.2)
            yield environment
        finally:
            server.terminate()


def printed_by(app, superlink, nodes, **settings):
    """The lines that an app prints under `flwr run`."""
    config = " ".join(f"{name}={value}" for name, value in settings.items())
    federation = f"num-supernodes={nodes} client-resources-num-cpus=1"
    command = ["flwr", "run", str(app), "--stream", "--run-config", config]
    command += ["--federation-config", federation]
    done = subprocess.run(command, env=superlink, capture_output=True, text=True, timeout=300)
    return done.stdout + done.stderr


def table_in(output):
    """The accuracies of FedAvg and of learned shares by round."""
    rows = [line.split() for line in output.splitlines()]
    assert ["round", "FedAvg", "learned"] in rows, output
    rows = rows[rows.index(["round", "FedAvg", "learned"]) + 1 :]
    found = [row for row in rows if len(row) == 3 and row[0].isdigit()]
    return {int(n): (float(plain), float(learned)) for n, plain, learned in found}


EXAMPLES = Path(server_app.__file__).parents[1]


@pytest.mark.slow
def test_flwr_run_runs_the_example(superlink):
    found = table_in(printed_by(EXAMPLES / "flower_app", superlink, 10, rounds=2))
    assert list(found) == [1, 2]


@pytest.mark.slow
def test_flwr_run_hears_hospitals_that_join_late_with_the_second_of_two_classes(superlink):
    output = printed_by(EXAMPLES / "flower_table", superlink, 7, rounds=16, joins=8)
    found = table_in(output)
    before, (plain, learned) = found[7], found[16]
    assert learned > max(before) + 0.02
    assert learned > plain - 0.02
    assert "16 rounds, 7 clients; the model was" in output
    assert "failed 7 times" in output
    assert "huge" not in output
