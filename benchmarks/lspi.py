"""LSPI against mushroom-rl's on the same finite MDP: the same greedy policies, and how much faster.

    python benchmarks/lspi.py --peer PYTHON

PYTHON is the interpreter of an environment with mushroom-rl (`make bench-env`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from table import RESULTS, alternate, facts, ratio, spread, version_in, write

from apportion.theory import draw_transitions, random_family
from apportion.theory.lspi import lspi_finite

SEEDS, STATES, ACTIONS, GAMMA, SAMPLES = 100, 12, 3, 0.9, 3000

PEER = """
import json, sys, time
import numpy as np
from mushroom_rl.algorithms.value import LSPI
from mushroom_rl.core import MDPInfo
from mushroom_rl.policy import EpsGreedy
from mushroom_rl.utils import spaces
from mushroom_rl.utils.parameters import Parameter

data = np.load(sys.argv[1])
states, actions, gamma = int(data["states"]), int(data["actions"]), float(data["gamma"])
eye = np.eye(states)


class OneHot:
    size = states

    def __call__(self, state):
        return eye[int(state[0])]


info = MDPInfo(spaces.Discrete(states), spaces.Discrete(actions), gamma, 100)
shape = dict(input_shape=(states,), output_shape=(actions,), n_actions=actions)
policies, seconds = [], 0.0
for x, a, r, y in zip(data["x"], data["a"], data["r"], data["y"]):
    rows = [
        (np.array([x[n]]), np.array([a[n]]), r[n], np.array([y[n]]), False, n == len(x) - 1)
        for n in range(len(x))
    ]
    agent = LSPI(
        info,
        EpsGreedy(epsilon=Parameter(0.0)),
        approximator_params=shape,
        epsilon=1e-9,
        features=OneHot(),
    )
    start = time.perf_counter()
    agent.fit(rows)
    seconds += time.perf_counter() - start
    policies.append(np.argmax(agent.approximator.predict(eye), axis=1).tolist())
print(json.dumps({"policies": policies, "seconds": seconds}))
"""


def count(rows, size):
    """Visits, moves and summed rewards of every seed (the column `task`), in one pass."""
    pair = (rows.task * STATES + rows.state) * ACTIONS + rows.action
    shape = (SEEDS, STATES, ACTIONS)
    visits = np.bincount(pair, minlength=size).reshape(shape)
    moves = np.bincount(pair * STATES + rows.next_state, minlength=size * STATES)
    rewards = np.bincount(pair, rows.reward, size).reshape(shape)
    return visits.astype(float), moves.reshape(*shape, STATES).astype(float), rewards


def ours(rows):
    """All seeds at once, from raw transitions."""
    features = np.eye(STATES * ACTIONS).reshape(STATES, ACTIONS, -1)
    start = time.perf_counter()
    counts = count(rows, SEEDS * STATES * ACTIONS)
    result = lspi_finite(*counts, features, GAMMA, iterations=50, ridge=1e-12)
    return result.policy, time.perf_counter() - start


def theirs(python: str, rows) -> tuple[np.ndarray, float]:
    """The same transitions in mushroom-rl, seed by seed: its policies and the seconds of fitting."""
    with tempfile.TemporaryDirectory() as folder:
        file, script = Path(folder) / "rows.npz", Path(folder) / "peer.py"
        columns = {
            name: column.reshape(SEEDS, SAMPLES)
            for name, column in zip(
                "xary", (rows.state, rows.action, rows.reward, rows.next_state), strict=True
            )
        }
        np.savez(file, states=STATES, actions=ACTIONS, gamma=GAMMA, **columns)
        script.write_text(PEER)
        done = subprocess.run([python, str(script), str(file)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"mushroom-rl failed: {done.stderr.strip().splitlines()[-1]}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return np.array(answer["policies"]), answer["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", required=True, help="python of an environment with mushroom-rl")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    about = facts(**{"mushroom-rl": version_in(asked.peer, "mushroom-rl")})
    one = random_family(states=STATES, actions=ACTIONS, tasks=1, spread=0.0, gamma=GAMMA)
    family = type(one)(np.repeat(one.kernel, SEEDS, 0), np.repeat(one.reward, SEEDS, 0), GAMMA)
    rows = draw_transitions(family, SAMPLES, seed=1)
    _, first = ours(rows)
    policies: dict[str, np.ndarray] = {}

    def side(name: str, run):
        def turn() -> float:
            policies[name], seconds = run()
            return seconds

        return turn

    found = alternate(
        {
            "ours": side("ours", lambda: ours(rows)),
            "theirs": side("theirs", lambda: theirs(asked.peer, rows)),
        },
        asked.turns,
    )
    same = (policies["theirs"] == policies["ours"]).all(1).mean()
    faster = ratio(found["theirs"], found["ours"])
    write(
        "lspi",
        "LSPI against mushroom-rl",
        f"Seconds for {SEEDS} seeds of {SAMPLES} samples of an MDP of {STATES} states and {ACTIONS} "
        "actions; medians over turns taken alternately, with the least and the most.",
        [
            {
                "seconds, ours": spread(found["ours"]),
                "with compilation": first,
                "mushroom-rl": spread(found["theirs"]),
                "ratio": faster,
                "to reach": 20.0,
                "same greedy policy": f"{same:.0%} of the seeds",
            }
        ],
        about,
        asked.out,
    )
    if same < 1 or faster["median"] < 20:
        sys.exit(1)


if __name__ == "__main__":
    main()
