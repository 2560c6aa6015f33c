import equinox as eqx
import jax
import numpy as np
import pytest

from apportion.composition import Ensemble, EqualShares, PartialTrading, ShrunkToEqual
from apportion.errors import InputError
from apportion.policy import Attention, Convolutional, Policy, Recurrent
from apportion.runs.policy_file import load_about, load_policy, save_policy
from apportion.runs.atomic import write_arrays
from apportion.simplex import Head

KEY = jax.random.key(0)


def _team() -> Ensemble:
    keys = jax.random.split(KEY, 3)
    return Ensemble(eqx.filter_vmap(lambda key: Recurrent(1, 4, key=key))(keys))


@pytest.mark.parametrize(
    "policy",
    [
        Recurrent(3, 5, head=Head(cap=0.5), key=KEY),
        Convolutional(2, 8, 4, head=Head(floor=0.01, cash=True), key=KEY),
        Convolutional(2, 2, 4, key=KEY),
        Attention(3, 8, heads=4, key=KEY),
        EqualShares(),
        PartialTrading(ShrunkToEqual(_team(), 0.5), 0.1),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_a_saved_policy_comes_back_the_same_to_the_bit(policy, tmp_path):
    save_policy(policy, tmp_path, {"entities": ["A", "B"]})
    assert eqx.tree_equal(load_policy(tmp_path), policy)
    assert load_about(tmp_path) == {"entities": ["A", "B"]}


def test_a_policy_stacked_over_runs_keeps_its_leading_axis(tmp_path):
    policies = _team().members
    save_policy(policies, tmp_path)
    assert eqx.tree_equal(load_policy(tmp_path), policies)


class Own(Policy):
    def encode(self, history, mask):
        return history[:, -1, :1]

    def allocate(self, features, held, mask):
        return held


def test_a_policy_of_an_unknown_class_is_refused_by_name(tmp_path):
    with pytest.raises(InputError, match="Own: only the package's own policies"):
        save_policy(Own(), tmp_path)


def test_a_file_made_for_something_else_is_refused_in_one_sentence(tmp_path):
    file = tmp_path / "policy.safetensors"
    with pytest.raises(InputError, match="no such file"):
        load_policy(tmp_path)
    file.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(InputError, match="not a file that apportion wrote"):
        load_policy(tmp_path)
    write_arrays(file, {"x": np.zeros(3)}, {"format": "something else"})
    with pytest.raises(InputError, match="not a policy"):
        load_policy(tmp_path)


@pytest.mark.parametrize(
    "description",
    [
        {"class": "Popen", "args": "true"},
        {"class": "Recurrent"},
        {"class": "Recurrent", "channels": -3, "hidden": 5, "head": {}},
        {"class": "Recurrent", "channels": 3, "hidden": 5, "head": {"cap": 7.0}},
        {"class": "Recurrent", "channels": 4, "hidden": 5, "head": {}},
        {"class": "Convolutional", "channels": 1, "window": 8, "hidden": 5, "head": {}},
    ],
    ids=["class", "nothing", "size", "head", "shape", "other"],
)
def test_a_description_that_does_not_fit_its_arrays_makes_no_policy(description, tmp_path):
    from apportion.runs import policy_file

    policy = Recurrent(3, 5, key=KEY)
    about = {"format": policy_file._FORMAT, "policy": description, "about": {}}
    write_arrays(tmp_path / policy_file.FILE, policy_file._named(policy), about)
    with pytest.raises(InputError, match="does not make a policy"):
        load_policy(tmp_path)
